"""Byte ranges of remote shards: `s3:// gs:// az://` by fsspec's clients, `https://` by the standard library.

Credentials come from the environment alone, in the names that each client's makers chose; so do other endpoints:
`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_CONNECTION_STRING`. `pipe:`, `file:`, `http:` and all else
is refused; so are private and link-local addresses behind `https://`, after resolution and every redirect, unless
their host stands in `PATCHLINE_PRIVATE_HOSTS` (comma-separated).
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from data.errors import DataError

CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme → the package that speaks it
TESTED = {"s3fs": "2026.9.0", "gcsfs": "2026.10.1", "adlfs": "2026.8.0"}
SCHEMES = (*CLIENTS, "https")


class Refused(DataError):
    """This address may not be read, now or later."""


def check_url(url: str) -> None:
    """Raise DataError unless the scheme is allowed."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise Refused(f"{redacted(url)}: scheme {scheme!r} is refused; use one of {', '.join(SCHEMES)} or a path")


def redacted(url: str) -> str:
    """The URL without user, password, query and fragment, any of which may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


def read_range(url: str, start: int, stop: int, timeout_s: float) -> bytes:
    """Bytes start … stop−1, or fewer where the answer breaks off.

    Raises FileNotFoundError, PermissionError, Refused, and many kinds of errors that are worth another try.
    """
    check_url(url)
    if url.startswith("https:"):
        found = read_https(url, start, stop, timeout_s)
    else:
        with denied_as_such():
            found = client(urlsplit(url).scheme, timeout_s).cat_file(url, start=start, end=stop)
    if not found:
        raise ConnectionError("empty answer")
    return found


def size_of(url: str, timeout_s: float) -> int:
    """Bytes of what a URL names; raises as `read_range`."""
    if url.startswith("https:"):
        with ask_https(url, timeout_s, headers={"Range": "bytes=0-0"}) as answer:
            size = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers.get(
                "Content-Length", ""
            )
        if not size.isdigit():
            raise Refused(f"{redacted(url)}: the server does not say how long it is; copy the shards to this machine")
        return int(size)
    with denied_as_such():
        return client(urlsplit(url).scheme, timeout_s).info(url)["size"]


def list_tars(url: str, timeout_s: float) -> dict[str, int]:
    """{URL: bytes} of the *.tar in a folder, or of those that match a pattern; raises as `read_range`."""
    scheme = urlsplit(url).scheme
    if scheme == "https":
        raise Refused(f"{redacted(url)}: https cannot list; name the shards, as in …/train-{{000..099}}.tar")
    with denied_as_such():
        pattern = url if "*" in url else f"{url.rstrip('/')}/*.tar"
        found = client(scheme, timeout_s).glob(pattern, detail=True)
    return {f"{scheme}://{path}": entry["size"] for path, entry in sorted(found.items())}


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


@lru_cache(maxsize=8)
def client(scheme: str, timeout_s: float) -> Any:
    """fsspec's filesystem for a scheme; our own retries are the only ones."""
    import fsspec

    options: dict = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "gs":
        options["requests_timeout"] = timeout_s
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # else it asks what kind each bucket is
    elif scheme == "az":
        options |= {"connection_timeout": timeout_s, "read_timeout": timeout_s}
    else:
        limits = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            options["endpoint_url"] = endpoint
    try:
        made = fsspec.filesystem({"az": "abfs"}.get(scheme, scheme), **options)
    except ImportError:
        raise DataError(f"{scheme}:// needs a client: pip install {CLIENTS[scheme]}") from None
    try:
        ask_once(scheme, made)
    except AttributeError as error:
        name = CLIENTS[scheme]
        raise DataError(
            f"{scheme}://: {name} {version(name)} is not known to retry as we do ({error}); "
            f"pip install {name}=={TESTED[name]}, the version that was tested"
        ) from None
    return made


def ask_once(scheme: str, made: Any) -> None:
    """Turn off the client's own retries; raises AttributeError where it keeps them elsewhere."""
    if scheme == "s3":
        made.retries = min(made.retries, 1)  # s3fs' own loop around botocore's
    elif scheme == "gs":
        made._request = partial(type(made)._request.__wrapped__, made)  # without gcsfs' six tries in 35 s
    else:
        policy = made.service_client._config.retry_policy
        policy.total_retries = min(policy.total_retries, 0)  # Azure's take 83 s


# ------------------------------------------------------------------------------------------------ https


def read_https(url: str, start: int, stop: int, timeout_s: float) -> bytes:
    with ask_https(url, timeout_s, headers={"Range": f"bytes={start}-{stop - 1}"}) as answer:
        if answer.status != 206 and start:
            raise Refused(f"{redacted(url)}: the server ignores byte ranges; copy the shards to this machine")
        try:
            return answer.read(stop - start)
        except http.client.IncompleteRead as error:
            return error.partial


@contextmanager
def ask_https(url: str, timeout_s: float, **request: Any) -> Iterator[Any]:
    """The answer to a request, and its errors as those of the other schemes."""
    try:
        with opener().open(urllib.request.Request(url, **request), timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        kind = {404: FileNotFoundError, 410: FileNotFoundError, 401: PermissionError, 403: PermissionError}
        raise kind.get(error.code, OSError)(f"HTTP {error.code}") from None
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from None
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else OSError("URLError") from None


def opener() -> urllib.request.OpenerDirector:
    """An opener that speaks https alone, also after a redirect, and only with public addresses."""
    made = urllib.request.OpenerDirector()
    for handler in (
        PublicHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        made.add_handler(handler)
    return made


class PublicConnection(http.client.HTTPSConnection):
    """Connects to the very address that was checked: a name cannot resolve differently a moment later."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._create_connection = connect_public


class PublicHandler(urllib.request.HTTPSHandler):
    def https_open(self, request):
        return self.do_open(PublicConnection, request)


def connect_public(address: tuple[str, int], timeout: float, source_address: Any = None) -> socket.socket:
    """socket.create_connection, for public addresses only."""
    host, port = address
    allowed = host in os.environ.get("PATCHLINE_PRIVATE_HOSTS", "").split(",")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, place in found:
        if not allowed and not ipaddress.ip_address(place[0]).is_global:
            raise Refused(f"https://{host}: {place[0]} is not public; allow it with PATCHLINE_PRIVATE_HOSTS={host}")
    place = found[0][4]
    return socket.create_connection((str(place[0]), int(place[1])), timeout, source_address)
