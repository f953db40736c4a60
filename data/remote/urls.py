"""Read byte ranges of remote shards: `s3:// gs:// az://` by fsspec's clients, `https:// hf://` by extras.

`https://` is data/extras/https.py, `hf://` (data sets on the Hugging Face Hub) data/extras/hub.py.

`read_range` works for every scheme, and so do the functions of listing.py. Each sends one request; only `Retry` repeats
requests to an object store, with exponential backoff and jitter, or after the pause that the store requests.

    read_range("s3://bucket/train-000000.tar", 0, 512, 30.0)   →   the first 512 bytes

Clients raise many kinds of errors whose texts may contain secrets, so messages show only the kind. Credentials come
only from the environment, in the variables defined by each client; so do custom endpoints: `AWS_ENDPOINT_URL`,
`STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_CONNECTION_STRING`. `pipe:`, `file:`, `http:` and all other schemes are
rejected.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from data.checks import redacted
from data.error_pages import ERROR, LONGEST, words_of
from data.errors import DataError, PatchlineError, StorageError
from data.optional import load_optional

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Answer = TypeVar("Answer")
CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme → client package
PROTOCOLS = {"s3": "s3", "gs": "gs", "az": "abfs"}  # scheme → fsspec's name for the protocol
TESTED = {"s3fs": "2026.9.0", "gcsfs": "2026.10.1", "adlfs": "2026.8.0"}
SCHEMES = (*CLIENTS, "hf", "https")
HUB = "data.extras.hub:"  # module of the functions for hf://
# Schemes that are read over https, by "module:function" of an extra.
REQUESTS = {"https": "data.extras.https:request_https", "hf": f"{HUB}request_file"}
LONGEST_PAUSE_S = 30.0  # longest pause between two attempts
WARN_AT_ATTEMPT = 2  # counted from 0; two failed attempts may be a short interruption
THROTTLING = (429, 503)  # statuses that may come with `Retry-After`
LONGEST_THROTTLED_S = 3600.0  # total of the pauses that a store may request before one request fails
WARN_IF_THROTTLED_S = 30.0  # total of these pauses from which they are logged
# Retry a denied request for this long, in case the credentials are just being renewed; each retry reads them again.
DENIED_S = 30.0
RENEW = (
    "renew them (aws sso login, gcloud auth application-default login, az login, or new values in the file or "
    "variables that the client reads), then run the same command again"
)
# S3's requests that answer 200 before they are done, and report a later error in the body; the client retries them:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
LATE_ERRORS = ("CompleteMultipartUpload", "CopyObject", "UploadPartCopy")
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
    # Hugging Face Hub, in X-Error-Code
    "GatedRepo": (
        "the data set is gated: accept its conditions on its page, and set HF_TOKEN to a token of that account that "
        "may read gated repositories, then run the same command again"
    ),
}
DENIED = "check the credentials in the environment (docs/storage.md)"  # the remedy for a denial without a known code


class Refused(DataError):
    """A request that will never be allowed, so it is not retried."""


class Denied(PermissionError):
    """A store rejects the credentials or does not allow the request; `code` is the store's error code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Throttled(OSError):
    """A store asks the client to pause for `pause_s` seconds before the next request."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(f"rate limit, pause of {pause_s:g} s")
        self.pause_s = pause_s


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
        raise Refused(
            f"{redacted(url)}: the scheme {scheme!r} is not supported; use one of {', '.join(SCHEMES)} or a path"
        )


# ------------------------------------------------------------------------------------ requests


def read_range(url: str, start: int, stop: int, timeout_s: float) -> bytes:
    """Return bytes start … stop−1, or fewer if the response ends early.

    Raises FileNotFoundError, PermissionError, or any of the many errors for which a retry may help. Raises Refused for
    a forbidden scheme or address, or if the store ignores ranges, because every request would then return the whole
    object. Raises StorageError with the text of an error page if one arrives instead of these bytes.
    """
    check_url(url)
    scheme = urlsplit(url).scheme
    if scheme in REQUESTS:
        with load_optional(REQUESTS[scheme], f"{scheme}://")(url, timeout_s, f"bytes={start}-{stop - 1}") as answer:
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
            content = client(scheme, timeout_s).cat_file(url, start=start, end=stop)
    if not content:
        raise ConnectionError("empty answer")
    if len(content) != stop - start:
        refuse_error_page(url, content)
    if len(content) > stop - start:
        raise Refused(
            f"{redacted(url)}: the store ignores byte ranges: it sent {len(content)} bytes instead of {stop - start}; "
            "copy the shards to this machine"
        )
    return content


def refuse_error_page(url: str, content: bytes) -> None:
    """Raise StorageError if the content is an error page, which some proxies send with a success status."""
    words = words_of(content)
    if words:
        raise StorageError(f"{redacted(url)}: {ErrorPage(words)}")


def refuse_answer(event_name: str, response_dict: dict[str, Any] | None, **_: object) -> None:
    """Raise ErrorPage if S3's response to a request other than a read is an error page; a botocore hook.

    botocore would parse an HTML page as an empty list of objects, and retry XML and JSON pages like a status of 500.
    """
    # The body of a read is a stream.
    body = response_dict and response_dict.get("body")
    if (
        response_dict is not None
        and isinstance(body, bytes)
        and response_dict.get("status_code") == http.client.OK
        and event_name.rpartition(".")[2] not in LATE_ERRORS
    ):
        refuse_page(body)


def refuse_page(answer: bytes) -> None:
    """Raise ErrorPage if the body of a response that should be a store's XML or JSON is an error page."""
    words = words_of(answer) if ERROR.match(answer) else ""
    if words:
        raise ErrorPage(words)


# --------------------------------------------------------------------------------------------- retries


def never() -> bool:
    """Return False: the default for `stopped`."""
    return False


class Retry:
    """Retries a failed request, up to `attempts` attempts or until `stopped()`; `attempts` may be lowered at any time.

    The pause before the second attempt is at most `backoff_s`, and the limit doubles with every attempt. If the store
    itself requests a pause (status 429 or 503 with `Retry-After`), the next request follows after this pause, and the
    refused request does not count as an attempt, because the store works. `waiting` is called several times a second
    during these pauses.
    """

    def __init__(
        self,
        attempts: int,
        backoff_s: float,
        stopped: Callable[[], bool] = never,
        waiting: Callable[[], object] = never,
    ) -> None:
        self.attempts = attempts
        self.backoff_s = backoff_s
        self.stopped = stopped
        self.waiting = waiting

    def with_retries(self, address: str, ask: Callable[[], Answer]) -> Answer:
        """Return the result of `ask`, with retries; `address` is the name for messages.

        Raises at once: FileNotFoundError, because retries do not help; DataError if the store's client is not installed
        or an address is refused; StorageError for an error page. Raises StorageError if all attempts fail, if the store
        has denied the requests for DENIED_S, if the pauses that it requests exceed LONGEST_THROTTLED_S, or if
        `stopped()` is true.
        """
        bucket = "/".join(address.split("/")[:3])
        reason = ""
        attempt = 0
        throttled_s = 0.0  # total of the pauses that the store has requested
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
                requested_s = requested_pause(error)
                if requested_s is not None:
                    throttled_s = self.wait_as_requested(address, requested_s, throttled_s)
                    continue
            if attempt == WARN_AT_ATTEMPT:
                remedy = f": {DENIALS[reason]}" if reason in DENIALS else ""
                logging.getLogger(__name__).warning("%s: request failed (%s), retrying%s", address, reason, remedy)
            if attempt + 1 < self.attempts:
                # A random part, so that many workers and nodes do not retry at the same moment.
                self.pause(random.uniform(0, min(LONGEST_PAUSE_S, self.backoff_s * 2**attempt)), never)
            attempt += 1

        if bucket in _denied_since:
            raise denial(address, reason, attempt)
        raise StorageError(
            f"{address}: no response after {attempt} attempts, the last error was {reason}; run the same command "
            "again when the store responds"
        )

    def wait_as_requested(self, address: str, requested_s: float, throttled_s: float) -> float:
        """Wait as long as the store requests; return the total length of such pauses, `throttled_s` included.

        Raises StorageError if the total exceeds LONGEST_THROTTLED_S.
        """
        total_s = throttled_s + max(1.0, requested_s)
        if total_s > LONGEST_THROTTLED_S:
            raise StorageError(
                f"{address}: the store limits the rate of requests, and requests a pause of {requested_s:.0f} s after "
                f"{throttled_s:.0f} s of pauses; run the same command again later, or use fewer nodes or a lower "
                "data.cache.fetchers"
            )
        if throttled_s < WARN_IF_THROTTLED_S <= total_s:
            logging.getLogger(__name__).warning(
                "%s: the store limits the rate of requests; waiting %.0f s, as it requests", address, requested_s
            )
        # Never shorter than the store requests; the random part spreads many readers that were refused together.
        self.pause(requested_s + random.uniform(0, max(self.backoff_s, requested_s / 4)), self.waiting)
        return total_s

    def pause(self, pause_s: float, waiting: Callable[[], object]) -> None:
        """Wait for `pause_s`, or until `stopped()` returns true; call `waiting` at least every 0.1 s."""
        ends_at = time.monotonic() + pause_s
        while not self.stopped() and time.monotonic() < ends_at:
            waiting()
            time.sleep(min(0.1, max(0.0, ends_at - time.monotonic())))


def requested_pause(error: BaseException) -> float | None:
    """Return the pause, in seconds, that a store requests when it rejects a request; None for other errors."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, Throttled):
            return link.pause_s
        response = getattr(link, "response", None)  # huggingface_hub's; botocore's is a dict without these attributes
        if response is not None and getattr(response, "status_code", None) in THROTTLING:
            return pause_in(response.headers)
        link = link.__cause__ or link.__context__
    return None


def pause_in(headers: Mapping[str, str] | Message) -> float | None:
    """Return the pause, in seconds, that a response's headers request; None if they request none."""
    text = headers.get("Retry-After") or ""
    if text.strip().isdigit():
        return float(text)
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    # The Hub's: RateLimit: "resolvers";r=0;t=55 (draft-ietf-httpapi-ratelimit-headers-09)
    reset = re.search(r"\br=0\s*;\s*t=(\d+)", headers.get("RateLimit") or "")
    return float(reset[1]) if reset else None


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
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)  # huggingface_hub's
    if status in (401, 403):
        return f"HTTP {status}"
    # A PermissionError of the local disk has an errno.
    is_denied = isinstance(error, PermissionError) and error.errno is None
    return "HTTP 403" if is_denied or str(error).startswith("Forbidden") else ""


def forget_credentials() -> None:
    """Make the next request log in again, with the current credentials from the environment."""
    client.cache_clear()


async def ask_azure(sent: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Send one request of Azure's client. Raises ErrorPage if an error page arrives instead of a list of objects."""
    answer = await sent(request)
    if "comp=list" in request.http_request.url and answer.http_response.status_code == http.client.OK:
        refuse_page(answer.http_response.body())
    return answer


async def ask_google(
    send_once: Callable[..., Awaitable[Any]],
    filesystem: AbstractFileSystem,
    method: str,
    path: str,
    *args: Any,
    **options: Any,
) -> Any:
    """Send one request of gcsfs. Raises ErrorPage if an error page arrives instead of the JSON of a list or an object.

    gcsfs would retry HTML and XML pages, and mistake a JSON page for an empty list.
    """
    answer = await send_once(filesystem, method, path, *args, **options)
    # Reads have complete URLs as paths; an object may contain anything.
    if path.startswith("b/"):
        refuse_page(answer[-1])
    return answer


# Cached, because a client keeps its connections and its login.
@lru_cache(maxsize=8)
def client(scheme: str, timeout_s: float) -> AbstractFileSystem:
    """Return fsspec's file system for a scheme, with its own retries disabled.

    Raises DataError if its package is missing, or if the retries of the installed version cannot be disabled.
    """
    if scheme == "hf":
        hub: AbstractFileSystem = load_optional(HUB + "file_system", "hf://")()
        return hub
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
            session.register("response-received.s3", refuse_answer)
            options["session"] = session
        filesystem = fsspec.filesystem(PROTOCOLS[scheme], **options)
    except ImportError:
        raise DataError(f"{scheme}:// needs a client library; run pip install {package}") from None

    # Disable the client's own retries; gcsfs and adlfs have no public setting for this (docs/design/stores.md). If a
    # new version keeps its retries elsewhere, the attribute is missing and the version is rejected.
    try:
        if scheme == "s3":
            filesystem.retries = min(filesystem.retries, 1)  # s3fs's own retries, around those of botocore
        elif scheme == "gs":
            send_once = type(filesystem)._request.__wrapped__  # without gcsfs's six attempts in 35 s
            filesystem._request = partial(ask_google, send_once, filesystem)
        else:
            policy = filesystem.service_client._config.retry_policy
            policy.total_retries = min(policy.total_retries, 0)  # Azure's retries take 83 s
            policy.send = partial(ask_azure, policy.send)
    except AttributeError as error:
        raise DataError(
            f"{scheme}://: cannot disable the retries of {package} {version(package)} ({error}); "
            f"run pip install {package}=={TESTED[package]}, which installs the tested version"
        ) from None
    return filesystem
