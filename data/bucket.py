"""The storage of a run in an object store (`s3:// gs:// az://`), for nodes without a shared folder.

It relies on three guarantees of S3, Google Cloud Storage and Azure:
1. an object appears completely or not at all, however its upload ends;
2. a list or read after a completed put sees the object;
3. if several clients create the same name, exactly one succeeds: `If-None-Match: *` on S3 and Azure,
   `ifGenerationMatch=0` on Google. `check_exclusive_create` tests this, because some stores that speak S3's protocol
   ignore the condition.

The folder of sets; every name includes the attempt, so two attempts never share one:
    step-0000001200-000007/    published if it has a MANIFEST.json, created last, and no marker; else staged or dead
        MANIFEST.json
        REFUSED.json             marker: set aside; never tried again, never deleted by us
        SWEPT.json               marker: its attempt ended during the save; only two small objects remain
An owner suspended before it created the manifest cannot publish later: before a newer attempt reads the sets,
it creates the missing MANIFEST.json of every unpublished set (`sweep`), and each name can be created only once.

Every failed request is retried (`data.remote.urls.Retry`); if all retries fail, a StorageError names the address.
Credentials come from the environment, as for remote shards.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from data.checks import check_file_name, redacted
from data.errors import CheckpointError, ConfigError, StorageError
from data.files import MANIFEST, SET_NAME, atomic_file, locked, path_in_errors, temporary_name
from data.remote.urls import CLIENTS, Retry, client, forget_credentials, read_range

Answer = TypeVar("Answer")
Value = TypeVar("Value")

ATTEMPTS = 10  # attempts per request: about a minute if the store rejects each immediately
DISCARD_ATTEMPTS = 3  # fewer, because the save has already failed, perhaps because the store is unreachable
LAST_ATTEMPTS = 3  # when the command ends: an unreachable store must not delay it by minutes
BACKOFF_S = 0.5  # longest pause before the second attempt; doubled each time
TIMEOUT_S = 30.0  # a request fails after this long without data
PIECE = 16 << 20  # bytes per request of `fetch`; a broken response loses at most this much
PAGE_OBJECTS = 1000  # objects per response of a listing: S3's maximum
AT_ONCE = 8  # number of parallel requests in `each`
REFUSED = "REFUSED.json"
SWEPT = "SWEPT.json"
FETCHING = "fetching.lock"  # lock file in the local folder of a stage's sets

# A forked process must open new connections: using those of its parent would hang.
os.register_at_fork(after_in_child=forget_credentials)


class Bucket:
    """A run's files under a URL; `local` is a scratch folder on this node, and may be empty when a command starts.

    `Folder` documents the methods that both classes share.
    """

    is_shared: Literal[False] = False
    is_consistent = True
    keeps_sets_locally = False
    set_aside_as = f"with a {REFUSED} file in each"
    restore_hint = f"repair one and delete its {REFUSED}"

    def __init__(self, url: str, local: Path, attempts: int | None = None) -> None:
        self.local = local
        self.url = url.rstrip("/")
        self.scheme, _, self.path = self.url.partition("://")
        self.retry = Retry(ATTEMPTS if attempts is None else attempts, BACKOFF_S)

    def address(self, name: str = "") -> str:
        return redacted(f"{self.url}/{name}".rstrip("/"))

    def request(self, name: str, question: Callable[[Any, str], Answer]) -> Answer:
        """Return the result of `question(client, path)`, with retries.

        Raises the errors of `Retry.with_retries`.
        """
        path = f"{self.path}/{name}".rstrip("/")
        return self.retry.with_retries(self.address(name), lambda: question(client(self.scheme, TIMEOUT_S), path))

    # ------------------------------------------------------------------------ small files

    def create_once(self, name: str, content: bytes) -> bool:
        def create(client: Any, path: str) -> bool:
            try:
                client.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # MinIO does not name the failed condition, so s3fs reports its refusal as an ordinary error.
                response = getattr(error.__cause__, "response", None) or {}
                if response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

        if self.request(name, create):
            return True
        # A request may have created the file although its response was lost; the retry was then refused.
        return self.read(name) == content

    def check_exclusive_create(self, name: str) -> None:
        self.create_once(name, b'{"for": "a test that this store creates a name only once"}')
        is_created_twice = self.create_once(name, b'{"for": "a second object of this name, which must be refused"}')
        if is_created_twice:
            raise StorageError(
                f"{self.url}: the store replaced an existing object although the request forbade it\n"
                "  expected a store with conditional writes (If-None-Match: * on S3), so that a run has only one "
                "owner\n"
                "  use another store, or a folder: run=/elsewhere"
            )

    def limit_retries(self) -> None:
        self.retry.attempts = LAST_ATTEMPTS

    def put(self, name: str, content: bytes) -> None:
        self.request(name, lambda client, path: client.pipe_file(path, content))

    def renew(self, name: str, content: bytes) -> None:
        self.put(name, content)

    def read(self, name: str) -> bytes | None:
        try:
            return self.request(name, lambda client, path: client.cat_file(path))
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> dict[str, int]:
        objects: dict[str, int] = {}
        try:
            if self.scheme == "s3":
                for page in self.s3_pages(folder):
                    objects |= page
            else:
                entries = self.request(folder, lambda client, path: client.find(path, detail=True))
                for path, entry in entries.items():
                    if entry.get("type") != "directory":
                        objects[path] = entry["size"]
        except FileNotFoundError:
            return {}
        sizes = {}
        for path, size in sorted(objects.items()):
            # The consoles of some stores create an empty object as a folder.
            if not path.endswith("/"):
                sizes[check_file_name(path.removeprefix(f"{self.path}/"), self.address())] = size
        return sizes

    def s3_pages(self, folder: str) -> Iterator[dict[str, int]]:
        """Yield {path: size} of the objects below a folder, in pages of at most PAGE_OBJECTS.

        Each page is one request, which is retried separately. s3fs's `find` would send three requests for an empty
        folder and one for each page, and all of them would be retried together.
        """
        bucket, _, prefix = f"{self.path}/{folder}".rstrip("/").partition("/")
        token: dict[str, str] = {}

        def ask(client: Any, _: str) -> Any:
            return client.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/", MaxKeys=PAGE_OBJECTS, **token)

        while True:
            answer = self.request(folder, ask)
            yield {f"{bucket}/{entry['Key']}": entry["Size"] for entry in answer.get("Contents", [])}
            if not answer.get("NextContinuationToken"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, names: Iterable[str]) -> None:
        def delete_one(name: str) -> None:
            with suppress(FileNotFoundError):
                self.request(name, lambda client, path: client.rm_file(path))

        each(names, delete_one)

    # ------------------------------------------------------------------------ copies in the local folder

    def put_file(self, name: str, file: Path) -> None:
        """Upload a local file atomically; large files are uploaded in parts, which the store joins at the end."""
        self.request(name, lambda client, path: client.put_file(str(file), path))

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Download an object of `size` bytes to a local file, in pieces; the file appears when it is complete.

        Raises FileNotFoundError if the object does not exist, StorageError if all attempts to read it fail, or OSError
        if the local disk fails.
        """
        with atomic_file(file) as temporary, open(temporary, "wb") as local:
            while local.tell() < size:
                start = local.tell()
                local.write(self.read_range(name, start, min(start + PIECE, size)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start … stop−1 of an object, or fewer if the response ends early."""
        ask = partial(read_range, f"{self.url}/{name}", start, stop, TIMEOUT_S)
        return self.retry.with_retries(self.address(name), ask)

    def upload(self, name: str) -> None:
        if (self.local / name).exists():
            self.put_file(name, self.local / name)

    def ensure_local(self, name: str, size: int, sha256: str) -> None:
        path = self.local / check_file_name(name, self.address())
        if has_bytes(path, size, sha256):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Use a temporary name: the driver uploads every changed file of the run, which would replace a good object.
        temporary = temporary_name(path)
        try:
            # If the transfer corrupted the first copy, a second one is correct.
            for _ in range(2):
                self.fetch(name, temporary, size)
                if has_bytes(temporary, size, sha256):
                    os.replace(temporary, path)
                    return
        finally:
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{self.address(name)} has changed: its sha256 differs from the recorded value, also after a second "
            "download\n"
            "  restore the object from a copy, then run the same command again"
        )

    # ------------------------------------------------------------------------ sets

    def staging_name(self, folder: str, name: str, attempt: int) -> str:
        return f"{folder}/{name}-{attempt:06d}"

    def write(self, name: str, content: memoryview) -> None:
        # Write to the local disk first: clients upload large files in parts, but copy large bytes objects in memory.
        path = self.local / name
        local = path.parent.with_name(f".tmp-{path.parent.name}-{path.name}")
        try:
            with path_in_errors(local, len(content)):
                local.write_bytes(content)
            self.put_file(name, local)
        finally:
            local.unlink(missing_ok=True)

    def publish(self, folder: str, name: str, attempt: int, manifest: bytes) -> bool:
        return self.create_once(f"{self.staging_name(folder, name, attempt)}/{MANIFEST}", manifest)

    def discard(self, folder: str, name: str, attempt: int) -> None:
        # A separate object: another thread may be deleting old sets with this one, which must keep its retries.
        impatient = Bucket(self.url, self.local, DISCARD_ATTEMPTS)
        with suppress(StorageError, OSError):
            files = impatient.list(self.staging_name(folder, name, attempt))
            # With a manifest, this set was published by an earlier save whose response was lost: keep it.
            if not any(file.endswith(f"/{MANIFEST}") for file in files):
                impatient.delete(files)

    def files_of_sets(self, folder: str) -> dict[str, set[str]]:
        """Return {set name: file names} for every set in a folder, published or not."""
        sets: dict[str, set[str]] = {}
        for path in self.list(folder):
            *_, name, file = path.split("/")
            if SET_NAME.fullmatch(name):
                sets.setdefault(name, set()).add(file)
        return sets

    def published(self, folder: str) -> Sequence[str]:
        names = []
        for name, files in self.files_of_sets(folder).items():
            if MANIFEST in files and REFUSED not in files and SWEPT not in files:
                names.append(name)
        return sorted(names, reverse=True)

    def unpublished(self, folder: str) -> Sequence[str]:
        # Use the same names as in a folder.
        names = []
        for name, files in sorted(self.files_of_sets(folder).items()):
            if REFUSED in files:
                names.append(f"bad-{name.removeprefix('step-')}")
            elif MANIFEST not in files:
                names.append(f".tmp-{name.removeprefix('step-')}")
        return sorted(names, reverse=True)

    def fetch_set(self, folder: str, name: str, check: Callable[[Path], object], *, recheck: bool = False) -> Path:
        local = self.local / folder
        local.mkdir(parents=True, exist_ok=True)

        def fetch_one(file_and_size: tuple[str, int]) -> None:
            file, size = file_and_size
            self.fetch(file, self.local / file, size)

        # Two nodes may share their scratch space, such as a home folder on NFS.
        with locked(local / FETCHING):
            # The store holds everything that matters: delete local copies of other sets, and remains of saves.
            for path in local.iterdir():
                if path.is_dir() and (path.name != name or recheck):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_file() and path.name != FETCHING:
                    path.unlink(missing_ok=True)
            for is_second in (False, True):
                # Fetch files that are missing locally or have another size.
                missing = []
                (local / name).mkdir(exist_ok=True)
                for file, size in self.list(f"{folder}/{name}").items():
                    path = self.local / file
                    if not path.is_file() or path.stat().st_size != size:
                        missing.append((file, size))
                each(missing, fetch_one)
                try:
                    check(local / name)
                    break
                except CheckpointError:
                    # The copy may be damaged by the transfer or the disk. Only a second bad copy proves the set bad.
                    if is_second:
                        raise
                    shutil.rmtree(local / name, ignore_errors=True)
        return local / name

    def set_aside(self, folder: str, name: str, attempt: int, problem: str) -> str:
        marker = json.dumps({"refused by attempt": attempt, "because": problem})
        self.put(f"{folder}/{name}/{REFUSED}", marker.encode())
        return f"marked {REFUSED} in the store"

    def delete_set(self, folder: str, name: str) -> None:
        files = self.list(f"{folder}/{name}")
        # Without a manifest it is no longer a set; if this is interrupted, a later attempt sweeps the remains.
        self.delete([f"{folder}/{name}/{MANIFEST}"])
        self.delete(files)

    def sweep(self, folder: str, attempt: int) -> None:
        reason = json.dumps({"swept by attempt": attempt}).encode()
        for name, files in self.files_of_sets(folder).items():
            is_set = MANIFEST in files and SWEPT not in files
            is_swept = files == {MANIFEST, SWEPT}
            # A set copied here from a folder may have no attempt in its name.
            _, _, its_attempt = name.removeprefix("step-").partition("-")
            if int(its_attempt or 0) >= attempt or REFUSED in files or is_set or is_swept:
                continue
            # From here on its owner cannot publish, even if it wakes up. If its owner was faster, this is a set.
            if MANIFEST not in files and not self.create_once(f"{folder}/{name}/{MANIFEST}", reason):
                continue
            self.put(f"{folder}/{name}/{SWEPT}", reason)
            self.delete(f"{folder}/{name}/{file}" for file in files if file not in (MANIFEST, SWEPT))


def each(values: Iterable[Value], act: Callable[[Value], None]) -> None:
    """Call `act` with each value in several threads; after all calls have finished, raise the first error."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for future in [threads.submit(act, value) for value in values]:
            future.result()


def has_bytes(path: Path, size: int, sha256: str) -> bool:
    """Return whether a file exists with this size and sha256."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path_in_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def local_name(url: str) -> str:
    """Return the name of the local folder, on this node, for the files of a run in an object store."""
    return f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def check_store_url(url: str) -> str:
    """Return the normalised URL of a run. Raises ConfigError unless it names a folder in a bucket."""
    parts = urlsplit(url)
    if parts.scheme not in CLIENTS:
        schemes = ", ".join(f"{scheme}://" for scheme in CLIENTS)
        raise ConfigError(
            f"run is {redacted(url)}, expected a folder, or one of {schemes}\n  set run=s3://BUCKET/NAME or run=PATH"
        )
    names = parts.path.strip("/").split("/")
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if not (parts.netloc and is_plain) or not all(name not in ("", ".", "..") for name in names):
        raise ConfigError(
            f"run is {redacted(url)}, expected a bucket and a folder in it, without credentials or a query\n"
            f"  set run={parts.scheme}://BUCKET/NAME; credentials come from the environment (docs/run-storage.md)"
        )
    return f"{parts.scheme}://{parts.netloc}/{'/'.join(names)}"
