"""Byte ranges of remote shards: `s3:// gs:// az://` by fsspec's clients, `https://` by the standard library.

Three questions can be asked of an address, whatever its scheme. Each is asked once; `Retry` is the one way in which an
object store is asked again, after a random part of a time that doubles.

    size_of("s3://bucket/train-000000.tar", 30.0)              →   6543360
    read_range("s3://bucket/train-000000.tar", 0, 512, 30.0)   →   the first 512 bytes
    list_tars("s3://bucket/train", 30.0)                       →   {"s3://bucket/train/train-000000.tar": 6543360, …}

Clients raise many kinds of errors, and any of their texts may hold a secret: of an error only its kind is shown.
Credentials come from the environment alone, in the names that each client's makers chose; so do other endpoints:
`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_CONNECTION_STRING`. `pipe:`, `file:`, `http:` and all else
is refused; so are private and link-local addresses behind `https://`, after resolution and every redirect, unless
their host stands in `PATCHLINE_PRIVATE_HOSTS` (comma-separated).
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import os
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from data.checks import redacted
from data.errors import DataError, StorageError
from data.index.names import preview
from data.index.shard import COMPRESSED

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Answer = TypeVar("Answer")
CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme → the package that speaks it
PROTOCOLS = {"s3": "s3", "gs": "gs", "az": "abfs"}  # scheme → fsspec's name for it
TESTED = {"s3fs": "2026.9.0", "gcsfs": "2026.10.1", "adlfs": "2026.8.0"}
SCHEMES = (*CLIENTS, "https")
LONGEST_PAUSE_S = 30.0  # between two attempts
WARN_AT_ATTEMPT = 2  # counted from 0: by the third attempt somebody waits


class Refused(DataError):
    """This address may not be read, now or later."""


def check_url(url: str) -> None:
    """Raise DataError unless the scheme is allowed."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise Refused(f"{redacted(url)}: scheme {scheme!r} is refused; use one of {', '.join(SCHEMES)} or a path")


# ------------------------------------------------------------------------------------ the three questions


def read_range(url: str, start: int, stop: int, timeout_s: float) -> bytes:
    """Return bytes start … stop−1, or fewer where the answer breaks off.

    Raises FileNotFoundError, PermissionError, Refused, and many kinds of errors that are worth another try; Refused
    also where the store ignores ranges: each would bring all of the object, and a run would end in wrong digests.
    """
    check_url(url)
    if url.startswith("https:"):
        with request_https(url, timeout_s, f"bytes={start}-{stop - 1}") as answer:
            # A server that ignores the range sends the file from its first byte on, which is only right for start 0.
            if answer.status != http.client.PARTIAL_CONTENT and start > 0:
                raise Refused(f"{redacted(url)}: the server ignores byte ranges; copy the shards to this machine")
            try:
                content = answer.read(stop - start)
            except http.client.IncompleteRead as error:
                # What did arrive is kept: the caller asks for the rest.
                content = error.partial
    else:
        with denied_as_such():
            content = client(urlsplit(url).scheme, timeout_s).cat_file(url, start=start, end=stop)
    if not content:
        raise ConnectionError("empty answer")
    if len(content) > stop - start:
        raise Refused(
            f"{redacted(url)}: the store ignores byte ranges: {len(content)} bytes came, {stop - start} were asked "
            "for; copy the shards to this machine"
        )
    return content


def size_of(url: str, timeout_s: float) -> int:
    """Return bytes of what a URL names; raises as `read_range`, and Refused where a server does not say."""
    if not url.startswith("https:"):
        with denied_as_such():
            return client(urlsplit(url).scheme, timeout_s).info(url)["size"]

    # One byte is asked for, not HEAD, which many servers and all signed URLs refuse.
    with request_https(url, timeout_s, "bytes=0-0") as answer:
        content_range = answer.headers.get("Content-Range", "")  # bytes 0-0/6543360
        size = content_range.rpartition("/")[2] or answer.headers.get("Content-Length", "")
    if not size.isdigit():
        raise Refused(f"{redacted(url)}: the server does not say how long it is; copy the shards to this machine")
    return int(size)


def list_tars(url: str, timeout_s: float) -> dict[str, int]:
    """Return {URL: bytes} of the *.tar in a folder, or of those that match a pattern; raises as `read_range`.

    Raises Refused where a folder has compressed tars too, which would be left out.
    """
    scheme = urlsplit(url).scheme
    if scheme == "https":
        raise Refused(f"{redacted(url)}: https cannot list; name the shards, as in …/train-{{000..099}}.tar")
    pattern = url if "*" in url else f"{url.rstrip('/')}/*.tar*"
    with denied_as_such():
        entries = client(scheme, timeout_s).glob(pattern, detail=True)
    compressed = []
    tars = {}
    for path, entry in sorted(entries.items()):
        if path.endswith(COMPRESSED):
            # Without its folder, as in `data.index.tar`: what is shown of a name is short.
            compressed.append(path.rpartition("/")[2])
        elif path.endswith(".tar"):
            tars[f"{scheme}://{path}"] = entry["size"]
    if compressed:
        raise Refused(
            f"{redacted(url)}: {preview(compressed)} would be left out: compressed tars; "
            f"uncompress them, or name those that you mean: {redacted(url).rstrip('/')}/*.tar"
        )
    return tars


# --------------------------------------------------------------------------------------------- asking again


def never() -> bool:
    """Return the default of all `stopped`: somebody always waits for the answer."""
    return False


class Retry:
    """Asks up to `attempts` times, which may be lowered while a request is under way, until `stopped` says so.

    The pause before the second attempt is `backoff_s` at most; it doubles with every attempt.
    """

    def __init__(self, attempts: int, backoff_s: float, stopped: Callable[[], bool] = never) -> None:
        self.attempts = attempts
        self.backoff_s = backoff_s
        self.stopped = stopped

    def patiently(self, address: str, ask: Callable[[], Answer]) -> Answer:
        """Return what `ask` answers in one of the attempts; `address` is what messages name.

        Raises at once: FileNotFoundError, because to ask again does not bring what is missing; DataError where the
        store's client is not installed or an address is refused. Raises StorageError when all attempts were in vain, or
        this was stopped.
        """
        reason = ""
        attempt = 0
        # Looked at anew each time: a command that ends has no more patience for what its threads still ask.
        while attempt < self.attempts:
            if self.stopped():
                raise StorageError(f"{address}: left where it was")
            try:
                with denied_as_such():
                    return ask()
            except FileNotFoundError:
                raise FileNotFoundError(f"{address}: there is no such object, or no such bucket") from None
            except DataError:
                raise
            except PermissionError:
                reason = "PermissionError"
                # The credentials may have expired: the next attempt reads what the environment says by then.
                forget_credentials()
            except Exception as error:
                reason = type(error).__name__
            if attempt == WARN_AT_ATTEMPT:
                logging.getLogger(__name__).warning("%s: no answer (%s), asking again", address, reason)
            if attempt + 1 < self.attempts:
                # A random part, so that many workers and nodes do not all ask again at once.
                pause_s = random.uniform(0, min(LONGEST_PAUSE_S, self.backoff_s * 2**attempt))
                ends_at = time.monotonic() + pause_s
                while not self.stopped() and time.monotonic() < ends_at:
                    time.sleep(min(0.1, max(0.0, ends_at - time.monotonic())))
            attempt += 1

        is_denied = reason == "PermissionError" or "Credentials" in reason
        remedy = "credentials come from the environment" if is_denied else "run again when it answers"
        raise StorageError(f"{address}: no answer after {attempt} attempts, last {reason}; {remedy}")


# --------------------------------------------------------------------------------------------- s3, gs, az


@contextmanager
def denied_as_such() -> Iterator[None]:
    """Raise PermissionError where the storage answered 401 or 403, which every client words in its own way."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "status_code", getattr(error, "code", None))
        if code in (401, 403) or str(error).startswith("Forbidden"):
            raise PermissionError("denied") from None
        raise


def forget_credentials() -> None:
    """Make the next read log in again, with what the environment says by then."""
    client.cache_clear()


# Kept from call to call: a client holds its connections and its login.
@lru_cache(maxsize=8)
def client(scheme: str, timeout_s: float) -> AbstractFileSystem:
    """Return fsspec's file system for a scheme; our own retries are the only ones.

    Raises DataError where its package is not installed, or is of a version that keeps its retries elsewhere.
    """
    # Imported here, because only shards behind s3, gs or az need it.
    import fsspec

    # fsspec would otherwise hand out the client it made before, with its old credentials, and share with others the
    # client whose retries are turned off here.
    options: dict[str, object] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "gs":
        options["requests_timeout"] = timeout_s
        # Without this gcsfs first asks the store what kind each bucket is.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    elif scheme == "az":
        options["connection_timeout"] = timeout_s
        options["read_timeout"] = timeout_s
    else:
        options["config_kwargs"] = {
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"total_max_attempts": 1},
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            options["endpoint_url"] = endpoint

    package = CLIENTS[scheme]
    try:
        filesystem = fsspec.filesystem(PROTOCOLS[scheme], **options)
    except ImportError:
        raise DataError(f"{scheme}:// needs a client: pip install {package}") from None

    # Turn the client's own retries off. Neither gcsfs nor adlfs has a public setting for it (docs/design/stores.md).
    # A client with its retries elsewhere would continue to retry unseen: it is refused by name.
    try:
        if scheme == "s3":
            filesystem.retries = min(filesystem.retries, 1)  # s3fs' own loop around botocore's
        elif scheme == "gs":
            asked_once = type(filesystem)._request.__wrapped__  # without gcsfs' six tries in 35 s
            filesystem._request = partial(asked_once, filesystem)
        else:
            policy = filesystem.service_client._config.retry_policy
            policy.total_retries = min(policy.total_retries, 0)  # Azure's take 83 s
    except AttributeError as error:
        raise DataError(
            f"{scheme}://: {package} {version(package)} is not known to retry as we do ({error}); "
            f"pip install {package}=={TESTED[package]}, the version that was tested"
        ) from None
    return filesystem


# ------------------------------------------------------------------------------------------------ https


@contextmanager
def request_https(url: str, timeout_s: float, byte_range: str) -> Iterator[http.client.HTTPResponse]:
    """Return the answer to a request for a range, and its errors as those of the other schemes."""
    # An opener that speaks https alone, also after a redirect, and only with public addresses. Put together by hand,
    # because `build_opener` would add file:, ftp: and data: to it.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(PublicHandler())
    opener.add_handler(urllib.request.HTTPRedirectHandler())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    request = urllib.request.Request(url, headers={"Range": byte_range})
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        # As the other schemes raise it.
        kind: type[OSError] = OSError
        if error.code in (404, 410):
            kind = FileNotFoundError
        elif error.code in (401, 403):
            kind = PermissionError
        raise kind(f"HTTP {error.code}") from None
    except http.client.HTTPException as error:
        # Without its text, which may hold the URL and a secret in it.
        raise OSError(type(error).__name__) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise OSError("URLError") from None


class PublicConnection(http.client.HTTPSConnection):
    """Connects to the very address that was checked: a name cannot resolve differently a moment later."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._create_connection = connect_public


class PublicHandler(urllib.request.HTTPSHandler):
    """Opens https with `PublicConnection`."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(PublicConnection, req)


def connect_public(
    address: tuple[str, int], timeout: float, source_address: tuple[str, int] | None = None
) -> socket.socket:
    """Connect as socket.create_connection does, to public addresses only; raises Refused for others."""
    host, port = address
    is_allowed = host in os.environ.get("PATCHLINE_PRIVATE_HOSTS", "").split(",")
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # One private address among several is enough to refuse: the name is not what it says.
    for *_, place in resolved:
        if not is_allowed and not ipaddress.ip_address(place[0]).is_global:
            raise Refused(f"https://{host}: {place[0]} is not public; allow it with PATCHLINE_PRIVATE_HOSTS={host}")
    # The address itself and not the name: asked again, the name might resolve to another one.
    first_ip, first_port = resolved[0][4][:2]
    return socket.create_connection((str(first_ip), int(first_port)), timeout, source_address)
