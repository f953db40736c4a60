"""Data sets on the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION]/train/*.tar`.

How a data set on the Hub is read:
1. `pin` requests the commit of the revision once, when a data set is indexed or packed, and stores it in `hub.json`.
   The index contains this commit, so all nodes and all later commands read the same files.
2. `file_system` returns huggingface_hub's client, which lists the files: once per data set, not once per worker.
3. `request_file` reads a byte range. The Hub redirects to a signed address of its storage. Until it expires, later
   requests use this address directly, and so do not count towards the Hub's rate limit; after that, the Hub gives
   a new one.

    pin("hf://datasets/me/photos/train/*.tar", Path("indexes/photos"), cache.with_retries, 30.0)
    →   hf://datasets/me/photos@6f1c…/train/*.tar        indexes/photos/hub.json: {"datasets/me/photos@main": "6f1c…"}

The token is HF_TOKEN in the environment, and is sent only to the Hub (HF_ENDPOINT, or huggingface.co). A token that
`hf auth login` has stored in a file is not used: other nodes do not have the file.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data.checks import redacted
from data.errors import DataError, StorageError
from data.extras.https import request_https
from data.files import write_atomically
from data.remote.urls import DENIALS, Refused, Throttled
from data.seal import Unsealed, seal, unseal

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

COMMIT = re.compile(r"[0-9a-f]{40}")
PINS = "hub.json"  # record of the commits, next to an index or in the folder of a pack stage
MAX_SIGNED = 1000  # signed addresses kept by a process
ADDRESS = "hf://datasets/OWNER/NAME/train/*.tar, or …/NAME@REVISION/…"

_signed: dict[str, str] = {}  # URL → signed address, without any expiry time; never logged


def client_package() -> Any:
    """Return the package huggingface_hub. Raises DataError if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.errors  # its submodules are loaded lazily
    except ImportError:
        raise DataError("hf:// needs a client library; run pip install huggingface_hub") from None
    return huggingface_hub


def endpoint() -> str:
    """Return the address of the Hub. Raises Refused if HF_ENDPOINT does not begin with https://."""
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    # The token would be readable on the way.
    if not address.startswith("https://"):
        raise Refused(f"HF_ENDPOINT is {redacted(address)}, expected https://…")
    return address


def token() -> str | bool:
    """Return the token from the environment, or False to send no token."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def file_system() -> HfFileSystem:
    """Return a client that lists the Hub's files."""
    hub: HfFileSystem = client_package().HfFileSystem(endpoint=endpoint(), token=token(), skip_instance_cache=True)
    return hub


def parsed(url: str) -> Any:
    """Return the parts of a URL: `id`, `revision` and `path_in_repo`. Raises Refused unless it names a data set."""
    package = client_package()
    try:
        parts = package.parse_hf_uri(url)
    except ValueError:
        raise Refused(f"{redacted(url)}: expected {ADDRESS}") from None
    if parts.type != "dataset":
        raise Refused(f"{redacted(url)} is the address of a {parts.type}, not of a data set; expected {ADDRESS}")
    return parts


# ------------------------------------------------------------------------------------ one commit for all readers


def pin(url: str, folder: Path, with_retries: Callable[[str, Callable[[], str]], str], timeout_s: float) -> str:
    """Replace the revision in a URL with its commit: the commit recorded in `folder`, or else the current one.

    The commit is then recorded in `folder`. `with_retries` calls a function, with retries. Raises DataError if the data
    set or its revision does not exist or if the record is damaged, or StorageError if the data set is gated and the
    token has no access.
    """
    parts = parsed(url)
    name = f"datasets/{parts.id}@{parts.revision or 'main'}"
    record = folder / PINS
    pins: dict[str, str] = {}
    if record.exists():
        try:
            pins = unseal(record.read_bytes())
        except Unsealed as error:
            raise DataError(
                f"{record}: {error}, so the commit that was read before is unknown\n"
                "  restore the file; or delete it to read the current commit, then run the same command again"
            ) from None
    if not COMMIT.fullmatch(pins.get(name, "")):
        pins[name] = with_retries(url, partial(commit_of, url, timeout_s))
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, seal(pins))
    return f"hf://datasets/{parts.id}@{pins[name]}/{parts.path_in_repo}".rstrip("/")


def commit_of(url: str, timeout_s: float) -> str:
    """Return the commit of a data set's revision, and check that the token has access to the files.

    Raises the errors of `pin`.
    """
    package = client_package()
    errors = package.errors
    parts = parsed(url)
    place = f"hf://datasets/{parts.id}"
    api = package.HfApi(endpoint=endpoint(), token=token())
    has_token = "is set" if token() else "is not set"
    try:
        commit: str = api.dataset_info(parts.id, revision=parts.revision, timeout=timeout_s).sha
        # The description and the listing of a gated set are public; only its files are not.
        api.auth_check(parts.id, repo_type="dataset")
    except errors.GatedRepoError:
        raise StorageError(
            f"{place}: access denied (HF_TOKEN {has_token}): {DENIALS['GatedRepo']}\n"
            f"  request access at {endpoint()}/datasets/{parts.id}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DataError(
            f"{place}: the Hub has no such data set, or it is private (HF_TOKEN {has_token})\n"
            f"  expected {ADDRESS}\n  check the name; for a private data set, set HF_TOKEN to a token with access"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(
            f"{place}: there is no revision {parts.revision}\n  expected a branch, a tag or a commit of "
            f"{endpoint()}/datasets/{parts.id}/commits\n  check the part after @"
        ) from None
    return commit


# ------------------------------------------------------------------------------------ byte ranges


@contextmanager
def request_file(url: str, timeout_s: float, byte_range: str) -> Iterator[http.client.HTTPResponse]:
    """Context manager that yields the response to a range request; raises the errors of `request_https`."""
    with ExitStack() as stack:
        answer = None
        signed = _signed.get(url)  # another thread may clear the table
        if signed is not None:
            try:
                answer = stack.enter_context(request_https(signed, timeout_s, byte_range))
            except Throttled:
                raise
            except OSError as error:
                _signed.pop(url, None)
                # These mean that the signature has expired. After other errors, the caller repeats the request.
                if not isinstance(error, PermissionError | FileNotFoundError):
                    raise
        if answer is None:
            parts = parsed(url)
            address = client_package().hf_hub_url(
                parts.id, parts.path_in_repo, repo_type="dataset", revision=parts.revision, endpoint=endpoint()
            )
            authorization = f"Bearer {token()}" if token() else ""
            answer = stack.enter_context(request_https(address, timeout_s, byte_range, authorization))
            # Files that the Hub sends itself need the token each time.
            if urlsplit(answer.url).netloc != urlsplit(endpoint()).netloc:
                if len(_signed) >= MAX_SIGNED:
                    _signed.clear()
                _signed[url] = answer.url
        yield answer
