"""Read byte ranges of remote shards: `s3:// gs:// az://` by fsspec's clients, `https://` by the standard library.

Three functions work for every scheme. Each sends one request; only `Retry` repeats requests to an object store, with
exponential backoff and jitter.

    size_of("s3://bucket/train-000000.tar", 30.0)              →   6543360
    read_range("s3://bucket/train-000000.tar", 0, 512, 30.0)   →   the first 512 bytes
    list_tars("s3://bucket/train", 30.0)                       →   {"s3://bucket/train/train-000000.tar": 6543360, …}

Clients raise many kinds of errors whose texts may contain secrets, so messages show only the kind. Credentials come
only from the environment, in the variables defined by each client; so do custom endpoints: `AWS_ENDPOINT_URL`,
`STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_CONNECTION_STRING`. `pipe:`, `file:`, `http:` and all other schemes are
rejected. So are private and link-local addresses of `https://`, checked after name resolution and every redirect,
unless `PATCHLINE_PRIVATE_HOSTS` (comma-separated) contains the host.
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
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from data.checks import check_file_name, redacted
from data.error_pages import ERROR, LONGEST, words_of
from data.errors import DataError, PatchlineError, StorageError
from data.index.names import preview
from data.index.shard import COMPRESSED

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Answer = TypeVar("Answer")
CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme → client package
PROTOCOLS = {"s3": "s3", "gs": "gs", "az": "abfs"}  # scheme → fsspec's name for the protocol
TESTED = {"s3fs": "2026.9.0", "gcsfs": "2026.10.1", "adlfs": "2026.8.0"}
SCHEMES = (*CLIENTS, "https")
LONGEST_PAUSE_S = 30.0  # longest pause between two attempts
WARN_AT_ATTEMPT = 2  # counted from 0; two failed attempts may be a short interruption
# Retry a denied request for this long, in case the credentials are just being renewed; each retry reads them again.
DENIED_S = 30.0
RENEW = (
    "renew them (aws sso login, gcloud auth application-default login, az login, or new values in the file or "
    "variables that the client reads), then run the same command again"
)
CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_ENDPOINT_URL"
# Error codes of stores, and exceptions of clients, that deny a request → the cause and the remedy.
DENIALS = {
    # S3: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    "ExpiredToken": f"the credentials have expired: {RENEW}",
    "TokenRefreshRequired": f"the credentials have expired: {RENEW}",
    "InvalidToken": f"the session token is invalid: {RENEW}",
    "InvalidAccessKeyId": f"the store does not know this access key: {CHECK_KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {CHECK_KEYS}",
    "AccessDenied": (
        "the credentials are valid, but not for this request: allow s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:ListBucket on the bucket"
    ),
    "RequestTimeTooSkewed": (
        "this machine's clock differs from the store's by more than 15 minutes, and the credentials are not the cause: "
        "run timedatectl set-ntp true, or set the clock"
    ),
    # Raised by botocore before any request.
    "NoCredentialsError": f"there are no credentials in the environment: {CHECK_KEYS}",
    "PartialCredentialsError": f"the credentials are incomplete: {CHECK_KEYS}",
    "CredentialRetrievalError": f"the credentials cannot be renewed: {RENEW}",
    "TokenRetrievalError": f"the login has expired: {RENEW}",
    "UnauthorizedSSOTokenError": f"the login has expired: {RENEW}",
    # Google
    "RefreshError": f"the credentials cannot be renewed: {RENEW}",
    "DefaultCredentialsError": "there are no credentials: set GOOGLE_APPLICATION_CREDENTIALS, or use the node's",
    # Azure: https://learn.microsoft.com/rest/api/storageservices/common-rest-api-error-codes
    "AuthenticationFailed": f"the credentials are wrong or expired, or this machine's clock is wrong: {RENEW}",
    "AuthorizationFailure": "the storage account or its network rules do not allow this request: change them",
    "AuthorizationPermissionMismatch": "the credentials lack the role Storage Blob Data Contributor on the container",
    "InsufficientAccountPermissions": "the credentials are valid, but not for this request: allow read, write and list",
}
DENIED = "check the credentials in the environment (docs/storage.md)"  # the remedy for a denial without a known code


class Refused(DataError):
    """A request that will never be allowed, so it is not retried."""


class Denied(PermissionError):
    """A store rejects the credentials or does not allow the request; `code` is the store's error code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class ErrorPage(StorageError):
    """A store sent an error page with a success status; the argument is the text of the page."""

    def __str__(self) -> str:
        return (
            f"instead of the expected response, the store sent an error page: {self.args[0]}\n"
            "  run again when the store responds; check the endpoint, the proxy and the credentials"
        )


def check_url(url: str) -> None:
    """Raise DataError unless the scheme is allowed."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise Refused(f"{redacted(url)}: scheme {scheme!r} is not allowed; use one of {', '.join(SCHEMES)} or a path")


# ------------------------------------------------------------------------------------ requests


def read_range(url: str, start: int, stop: int, timeout_s: float) -> bytes:
    """Return bytes start … stop−1, or fewer if the response ends early.

    Raises FileNotFoundError, PermissionError, and many kinds of errors for which a retry may help. Raises Refused for
    a forbidden scheme or address, and if the store ignores ranges, because every request would then return the whole
    object. Raises StorageError with the text of an error page if one arrives instead of these bytes.
    """
    check_url(url)
    if url.startswith("https:"):
        with request_https(url, timeout_s, f"bytes={start}-{stop - 1}") as answer:
            # A server that ignores the range sends the whole file, which is correct only for start 0.
            if answer.status != http.client.PARTIAL_CONTENT and start > 0:
                refuse_error_page(url, answer.read(LONGEST + 1))
                raise Refused(f"{redacted(url)}: the server ignores byte ranges; copy the shards to this machine")
            try:
                content = answer.read(stop - start)
            except http.client.IncompleteRead as error:
                # Keep the bytes that did arrive; the caller requests the rest.
                content = error.partial
    else:
        with denied_as_such():
            content = client(urlsplit(url).scheme, timeout_s).cat_file(url, start=start, end=stop)
    if not content:
        raise ConnectionError("empty answer")
    if len(content) != stop - start:
        refuse_error_page(url, content)
    if len(content) > stop - start:
        raise Refused(
            f"{redacted(url)}: the store ignores byte ranges: requested {stop - start} bytes, received {len(content)}; "
            "copy the shards to this machine"
        )
    return content


def refuse_error_page(url: str, content: bytes) -> None:
    """Raise StorageError if the content is an error page, which some proxies send with a success status."""
    words = words_of(content)
    if words:
        raise StorageError(f"{redacted(url)}: {ErrorPage(words)}")


def refuse_answer(response_dict: dict[str, Any], **_: object) -> None:
    """Raise ErrorPage if S3's response to a request other than a read is an error page; a botocore hook.

    botocore would parse an HTML page as an empty list of objects. Before it calls this hook, it converts XML and JSON
    error pages to errors, which are retried.
    """
    body = response_dict.get("body")
    if isinstance(body, bytes) and response_dict.get("status_code") == http.client.OK and ERROR.match(body):
        words = words_of(body)
        if words:
            raise ErrorPage(words)


def size_of(url: str, timeout_s: float) -> int:
    """Return the size in bytes of the object at a URL.

    Raises the errors of `read_range`, and Refused if the size is not reported."""
    if not url.startswith("https:"):
        with denied_as_such():
            return client(urlsplit(url).scheme, timeout_s).info(url)["size"]

    # Request one byte instead of using HEAD, which many servers and all signed URLs reject.
    with request_https(url, timeout_s, "bytes=0-0") as answer:
        content_range = answer.headers.get("Content-Range", "")  # bytes 0-0/6543360
        size = content_range.rpartition("/")[2] or answer.headers.get("Content-Length", "")
    if not size.isdigit():
        raise Refused(f"{redacted(url)}: the server does not report the file size; copy the shards to this machine")
    return int(size)


def list_tars(url: str, timeout_s: float) -> dict[str, int]:
    """Return {URL: size in bytes} of the *.tar files in a folder or matching a pattern.

    Raises the errors of `read_range`, Refused if a folder also contains compressed tars, which would be ignored, and
    DataError for unsafe names.
    """
    scheme = urlsplit(url).scheme
    if scheme == "https":
        raise Refused(f"{redacted(url)}: https cannot list files; name the shards, as in …/train-{{000..099}}.tar")
    # Only `*` is a wildcard; `?` and `[` are ordinary characters of a key.
    folder = url.rstrip("/").replace("[", "[[]").replace("?", "[?]")
    pattern = folder if "*" in url else f"{folder}/*.tar*"
    with denied_as_such():
        entries = client(scheme, timeout_s).glob(pattern, detail=True)
    compressed = []
    tars = {}
    for path, entry in sorted(entries.items()):
        if path.endswith(COMPRESSED):
            # Without the folder, as in `data.index.tar`: messages abbreviate long names.
            compressed.append(path.rpartition("/")[2])
        elif path.endswith(".tar"):
            tars[f"{scheme}://{check_file_name(path, redacted(url))}"] = entry["size"]
    if compressed:
        raise Refused(
            f"{redacted(url)}: {preview(compressed)} are compressed tars and would be ignored; "
            f"decompress them, or name the tars to use: {redacted(url).rstrip('/')}/*.tar"
        )
    return tars


# --------------------------------------------------------------------------------------------- retries


def never() -> bool:
    """Return False: the default for `stopped`."""
    return False


class Retry:
    """Retries a failed request, up to `attempts` attempts or until `stopped()`; `attempts` may be lowered meanwhile.

    The pause before the second attempt is at most `backoff_s`, and the limit doubles with every attempt.
    """

    def __init__(self, attempts: int, backoff_s: float, stopped: Callable[[], bool] = never) -> None:
        self.attempts = attempts
        self.backoff_s = backoff_s
        self.stopped = stopped

    def patiently(self, address: str, ask: Callable[[], Answer]) -> Answer:
        """Return the result of `ask`, with retries; `address` is the name for messages.

        Raises at once: FileNotFoundError, because retries do not help; DataError if the store's client is not installed
        or an address is refused; StorageError for an error page. Raises StorageError if all attempts fail, if the store
        has denied the requests for DENIED_S, or if `stopped()` is true.
        """
        bucket = "/".join(address.split("/")[:3])
        reason = ""
        attempt = 0
        # Read `attempts` anew each time: an ending command lowers it for its threads.
        while attempt < self.attempts:
            if self.stopped():
                raise StorageError(f"{address}: stopped before the response arrived")
            try:
                with denied_as_such():
                    answer = ask()
                _denied_since.pop(bucket, None)
                return answer
            except FileNotFoundError:
                raise FileNotFoundError(f"{address}: this object or its bucket does not exist") from None
            except ErrorPage as page:
                raise StorageError(f"{address}: {page}") from None
            except PatchlineError:
                raise
            except Denied as error:
                reason = error.code
                # The credentials may have expired: the next attempt reads them from the environment again.
                forget_credentials()
                # If other requests have been denied for this long, do not retry this one.
                if time.monotonic() >= _denied_since.setdefault(bucket, time.monotonic()) + DENIED_S:
                    raise denial(address, reason, attempt + 1) from None
            except Exception as error:
                reason = type(error).__name__
            if attempt == WARN_AT_ATTEMPT:
                remedy = f": {DENIALS[reason]}" if reason in DENIALS else ""
                logging.getLogger(__name__).warning("%s: request failed (%s), retrying%s", address, reason, remedy)
            if attempt + 1 < self.attempts:
                # A random part, so that many workers and nodes do not retry at the same moment.
                pause_s = random.uniform(0, min(LONGEST_PAUSE_S, self.backoff_s * 2**attempt))
                ends_at = time.monotonic() + pause_s
                while not self.stopped() and time.monotonic() < ends_at:
                    time.sleep(min(0.1, max(0.0, ends_at - time.monotonic())))
            attempt += 1

        if bucket in _denied_since:
            raise denial(address, reason, attempt)
        raise StorageError(
            f"{address}: no response after {attempt} attempts, last error {reason}; run again when the store responds"
        )


_denied_since: dict[str, float] = {}  # bucket → time since when the store has denied this process's requests


def denial(address: str, code: str, attempts: int) -> StorageError:
    """Build the error for a request denied by the store, with its remedy."""
    return StorageError(f"{address}: denied after {attempts} attempts: {code}; {DENIALS.get(code, DENIED)}")


# --------------------------------------------------------------------------------------------- s3, gs, az


@contextmanager
def denied_as_such() -> Iterator[None]:
    """Context manager that raises Denied if the store denies a request; each client reports a denial differently."""
    try:
        yield
    except Denied:
        raise
    except Exception as error:
        code = denial_code(error)
        if code:
            # Without the cause, whose text may contain secrets.
            raise Denied(code) from None
        raise


def denial_code(error: BaseException) -> str:
    """Return the code with which a store denied a request, usually a key of DENIALS; "" for other errors."""
    link: BaseException | None = error
    while link is not None:
        response = getattr(link, "response", None)  # botocore's, a dict
        names = [type(link).__name__, getattr(link, "error_code", None)]  # Azure's code is a str or an enum
        if isinstance(response, dict):
            names.append(response.get("Error", {}).get("Code"))
        for name in names:
            name = getattr(name, "value", name)
            if name in DENIALS:
                return str(name)
        link = link.__cause__ or link.__context__
    status = getattr(error, "status_code", getattr(error, "code", None))
    if status in (401, 403):
        return f"HTTP {status}"
    # A PermissionError of the local disk has an errno.
    is_denied = isinstance(error, PermissionError) and error.errno is None
    return "HTTP 403" if is_denied or str(error).startswith("Forbidden") else ""


def forget_credentials() -> None:
    """Make the next request log in again, with the current credentials from the environment."""
    client.cache_clear()


# Cached, because a client keeps its connections and its login.
@lru_cache(maxsize=8)
def client(scheme: str, timeout_s: float) -> AbstractFileSystem:
    """Return fsspec's file system for a scheme, with its own retries disabled.

    Raises DataError if its package is missing, or is a version whose retries cannot be disabled.
    """
    # Imported here, because only shards in object stores need it.
    import fsspec

    # fsspec would otherwise return its cached client, which has old credentials and is shared with other code, whose
    # retries must stay enabled.
    options: dict[str, object] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "gs":
        options["requests_timeout"] = timeout_s
        # Without this, gcsfs first requests the kind of each bucket.
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
        if scheme == "s3":
            from aiobotocore.session import get_session

            session = get_session()
            session.register("before-parse.s3", refuse_answer)
            options["session"] = session
        filesystem = fsspec.filesystem(PROTOCOLS[scheme], **options)
    except ImportError:
        raise DataError(f"{scheme}:// needs a client: pip install {package}") from None

    # Disable the client's own retries; gcsfs and adlfs have no public setting for this (docs/design/stores.md). If a
    # new version keeps its retries elsewhere, the attribute is missing and the version is rejected.
    try:
        if scheme == "s3":
            filesystem.retries = min(filesystem.retries, 1)  # s3fs's own retries, around those of botocore
        elif scheme == "gs":
            asked_once = type(filesystem)._request.__wrapped__  # without gcsfs's six attempts in 35 s
            filesystem._request = partial(asked_once, filesystem)
        else:
            policy = filesystem.service_client._config.retry_policy
            policy.total_retries = min(policy.total_retries, 0)  # Azure's retries take 83 s
    except AttributeError as error:
        raise DataError(
            f"{scheme}://: cannot disable the retries of {package} {version(package)} ({error}); "
            f"pip install {package}=={TESTED[package]}, the tested version"
        ) from None
    return filesystem


# ------------------------------------------------------------------------------------------------ https


@contextmanager
def request_https(url: str, timeout_s: float, byte_range: str) -> Iterator[http.client.HTTPResponse]:
    """Context manager that yields the response to a range request; raises the same error types as the other schemes."""
    # An opener for https only, also after redirects, and only for public addresses. `build_opener` would add handlers
    # for file:, ftp: and data:.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(PublicHandler())
    opener.add_handler(urllib.request.HTTPRedirectHandler())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    # Encode spaces and non-ASCII characters; an already encoded address stays unchanged.
    address = quote(url, safe="!#$%&'()*+,/:;=?@[]~")
    request = urllib.request.Request(address, headers={"Range": byte_range})
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        # Raise the same types as the other schemes.
        kind: type[OSError] = OSError
        if error.code in (404, 410):
            kind = FileNotFoundError
        elif error.code in (401, 403):
            kind = PermissionError
        raise kind(f"HTTP {error.code}") from None
    except http.client.HTTPException as error:
        # Omit the text, which may contain the URL with a secret.
        raise OSError(type(error).__name__) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise OSError("URLError") from None


class PublicConnection(http.client.HTTPSConnection):
    """Connects to the checked address, because a second name resolution could return another one."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._create_connection = connect_public


class PublicHandler(urllib.request.HTTPSHandler):
    """Opens https URLs with `PublicConnection`."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(PublicConnection, req)


def connect_public(
    address: tuple[str, int], timeout: float, source_address: tuple[str, int] | None = None
) -> socket.socket:
    """Connect as socket.create_connection does, but only to public addresses; raises Refused for others."""
    host, port = address
    is_allowed = host in os.environ.get("PATCHLINE_PRIVATE_HOSTS", "").split(",")
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A single private address among several is refused, because the name cannot be trusted.
    for *_, place in resolved:
        if not is_allowed and not ipaddress.ip_address(place[0]).is_global:
            raise Refused(f"https://{host}: {place[0]} is not public; allow it with PATCHLINE_PRIVATE_HOSTS={host}")
    # Connect to the checked address: resolving the name again could return another one.
    first_ip, first_port = resolved[0][4][:2]
    return socket.create_connection((str(first_ip), int(first_port)), timeout, source_address)
