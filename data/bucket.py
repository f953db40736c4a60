"""A run in an object store (`s3:// gs:// az://`): the form of `data.storage.Storage` for nodes without a shared folder.

It relies on three things, which S3, Google's and Azure's store promise:
1. an object appears whole or not at all, however its upload ends;
2. who lists or reads after a put has ended sees it;
3. of all who create one name, one succeeds: `If-None-Match: *` on S3 and Azure, `ifGenerationMatch=0` on Google's.
The third is asked of the store itself (`check_exclusive_create`), because some that speak S3's protocol ignore it.

In the folder of its sets; every name holds the attempt, so that no two attempts share one:
    step-0000001200-000007/    published: MANIFEST.json is there, created last, and no marker; else staged, or died
        MANIFEST.json
        REFUSED.json             a marker: set aside; never tried, never deleted by us
        SWEPT.json               a marker: its attempt ended amid the save; nothing but two small objects is left
No owner that was frozen before it created the manifest can publish: a newer attempt, before it looks for a set, creates
the MANIFEST.json of every set that has none (`sweep`), and a name is created once.

Every request is made again when it fails (`data.remote.urls.Retry`); what never succeeds is a StorageError that names
the address. Credentials come from the environment, as those for remote shards do.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from data.checks import redacted
from data.errors import CheckpointError, ConfigError, StorageError
from data.files import MANIFEST, SET_NAME, atomic_file, locked, path_in_errors, temporary_name
from data.remote.urls import CLIENTS, Retry, client, forget_credentials, read_range

Answer = TypeVar("Answer")
Value = TypeVar("Value")

ATTEMPTS = 10  # to have one request answered: about a minute of a store that refuses at once
DISCARD_ATTEMPTS = 3  # of a request: the save has failed already, perhaps because the store is gone
LAST_ATTEMPTS = 3  # of a request when the command ends: a store that is gone must not hold it up for minutes
BACKOFF_S = 0.5  # before the second attempt, at most; doubled each time
TIMEOUT_S = 30.0  # of silence, after which a request is given up
PIECE = 16 << 20  # bytes of one request of `fetch`: what a broken answer costs at most
AT_ONCE = 8  # requests of `each`
REFUSED = "REFUSED.json"
SWEPT = "SWEPT.json"
FETCHING = "fetching.lock"  # of the local folder of a stage's sets

# A client's connections belong to the process that opened them: a fork that used them would hang.
os.register_at_fork(after_in_child=forget_credentials)


class Bucket:
    """Keeps the files of one run below a URL; `local` is scratch of this node, and may be empty at any start.

    The methods that `Folder` has too keep the contract that stands there.
    """

    is_shared: Literal[False] = False
    is_consistent = True
    keeps_sets_locally = False
    set_aside_as = f"with a {REFUSED} each"
    restore_hint = f"repair one and delete its {REFUSED}"

    def __init__(self, url: str, local: Path, attempts: int | None = None) -> None:
        self.local = local
        self.url = url.rstrip("/")
        self.scheme, _, self.path = self.url.partition("://")
        self.retry = Retry(ATTEMPTS if attempts is None else attempts, BACKOFF_S)

    def address(self, name: str = "") -> str:
        return redacted(f"{self.url}/{name}".rstrip("/"))

    def request(self, name: str, question: Callable[[Any, str], Answer]) -> Answer:
        """Return what `question(client, path)` answers in one of the attempts.

        Raises FileNotFoundError, DataError and StorageError, as `Retry.patiently` does.
        """
        path = f"{self.path}/{name}".rstrip("/")
        return self.retry.patiently(self.address(name), lambda: question(client(self.scheme, TIMEOUT_S), path))

    # ------------------------------------------------------------------------ small files

    def create_once(self, name: str, content: bytes) -> bool:
        def create(client: Any, path: str) -> bool:
            try:
                client.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # MinIO does not name the condition that failed, without which s3fs takes the refusal for an error.
                response = getattr(error.__cause__, "response", None) or {}
                if response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

        if self.request(name, create):
            return True
        # A request whose answer was lost may have created it, and then it was refused to the next one.
        return self.read(name) == content

    def check_exclusive_create(self, name: str) -> None:
        self.create_once(name, b'{"for": "a test whether this store creates a name once"}')
        is_created_twice = self.create_once(name, b'{"for": "a second object of this name, which must be refused"}')
        if is_created_twice:
            raise StorageError(
                f"{self.url}: the store lets a second object take the place of one that was to be created\n"
                "  expected a store with conditional writes (If-None-Match: * on S3), which keep two owners apart\n"
                "  give the run another store, or a folder: run=/elsewhere"
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
        try:
            entries = self.request(folder, lambda client, path: client.find(path, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {}
        for path, entry in sorted(entries.items()):
            # The consoles of some stores leave an empty object that stands for a folder.
            if entry.get("type") != "directory" and not path.endswith("/"):
                sizes[path.removeprefix(f"{self.path}/")] = entry["size"]
        return sizes

    def delete(self, names: Iterable[str]) -> None:
        def delete_one(name: str) -> None:
            with suppress(FileNotFoundError):
                self.request(name, lambda client, path: client.rm_file(path))

        each(names, delete_one)

    # ------------------------------------------------------------------------ files of the local folder

    def put_file(self, name: str, file: Path) -> None:
        """Put a local file whole; a large one goes up in parts, which the store joins when the last has come."""
        self.request(name, lambda client, path: client.put_file(str(file), path))

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Bring an object of `size` bytes into a local file, piece by piece; the file appears when it is whole.

        Raises FileNotFoundError where there is no such object, StorageError, OSError of the local disk.
        """
        with atomic_file(file) as temporary, open(temporary, "wb") as local:
            while local.tell() < size:
                start = local.tell()
                local.write(self.read_range(name, start, min(start + PIECE, size)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start … stop−1 of an object, or the first of them."""
        ask = partial(read_range, f"{self.url}/{name}", start, stop, TIMEOUT_S)
        return self.retry.patiently(self.address(name), ask)

    def upload(self, name: str) -> None:
        if (self.local / name).exists():
            self.put_file(name, self.local / name)

    def ensure_local(self, name: str, size: int, sha256: str) -> None:
        path = self.local / name
        if has_bytes(path, size, sha256):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a temporary name, because the driver sends whatever changes in the run's folder, over the good one too.
        temporary = temporary_name(path)
        try:
            # Where the transfer was at fault, a second one is right.
            for _ in range(2):
                self.fetch(name, temporary, size)
                if has_bytes(temporary, size, sha256):
                    os.replace(temporary, path)
                    return
        finally:
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{self.address(name)} has changed: fetched twice, its sha256 is not that of its record\n"
            "  bring the object back from a copy, then run the same command again"
        )

    # ------------------------------------------------------------------------ sets

    def staging_name(self, folder: str, name: str, attempt: int) -> str:
        return f"{folder}/{name}-{attempt:06d}"

    def write(self, name: str, content: memoryview) -> None:
        # By way of the local disk, because the stores' clients put large files in parts, and large bytes in a copy.
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
        # A client of its own: a deletion of old sets may be asking this one, and keeps its patience.
        brief = Bucket(self.url, self.local, DISCARD_ATTEMPTS)
        with suppress(StorageError, OSError):
            files = brief.list(self.staging_name(folder, name, attempt))
            # Else the same step was saved before, and published: only the answer was lost.
            if not any(file.endswith(f"/{MANIFEST}") for file in files):
                brief.delete(files)

    def files_of_sets(self, folder: str) -> dict[str, set[str]]:
        """Return the names of the files of every set, published or not, by the name of the set."""
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
        # Under the names that they have on a disk.
        names = []
        for name, files in sorted(self.files_of_sets(folder).items()):
            if REFUSED in files:
                names.append(f"bad-{name.removeprefix('step-')}")
            elif MANIFEST not in files:
                names.append(f".tmp-{name.removeprefix('step-')}")
        return sorted(names, reverse=True)

    def fetch_set(self, folder: str, name: str, check: Callable[[Path], object], *, anew: bool = False) -> Path:
        local = self.local / folder
        local.mkdir(parents=True, exist_ok=True)

        def fetch_one(file_and_size: tuple[str, int]) -> None:
            file, size = file_and_size
            self.fetch(file, self.local / file, size)

        # The scratch of two nodes may be one folder, such as a home on NFS.
        with locked(local / FETCHING):
            # The store has all that counts: copies of other sets, and what is left of saves, only take room.
            for path in local.iterdir():
                if path.is_dir() and (path.name != name or anew):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_file() and path.name != FETCHING:
                    path.unlink(missing_ok=True)
            for is_second in (False, True):
                # The files that are not here in their size.
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
                    # The copy may be at fault: the transfer, or a disk that has lost it since. A second one tells.
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
        # Without a manifest it is none: what is left when this is interrupted is swept by a later attempt.
        self.delete([f"{folder}/{name}/{MANIFEST}"])
        self.delete(files)

    def sweep(self, folder: str, attempt: int) -> None:
        reason = json.dumps({"swept by attempt": attempt}).encode()
        for name, files in self.files_of_sets(folder).items():
            is_set = MANIFEST in files and SWEPT not in files
            is_swept = files == {MANIFEST, SWEPT}
            # A set that was copied here from a folder has no attempt in its name.
            _, _, its_attempt = name.removeprefix("step-").partition("-")
            if int(its_attempt or 0) >= attempt or REFUSED in files or is_set or is_swept:
                continue
            # From here on its owner, should it wake up, cannot create it. Where it was faster, this is a set.
            if MANIFEST not in files and not self.create_once(f"{folder}/{name}/{MANIFEST}", reason):
                continue
            self.put(f"{folder}/{name}/{SWEPT}", reason)
            self.delete(f"{folder}/{name}/{file}" for file in files if file not in (MANIFEST, SWEPT))


def each(values: Iterable[Value], act: Callable[[Value], None]) -> None:
    """Call a function with each of the values, several at once; raises the first error when all have ended."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for future in [threads.submit(act, value) for value in values]:
            future.result()


def has_bytes(path: Path, size: int, sha256: str) -> bool:
    """Return whether there is a file of this size and digest."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path_in_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def local_name(url: str) -> str:
    """Return what a folder of this node for the files of a run in a store is called."""
    return f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def check_store_url(url: str) -> str:
    """Return the URL of a run in its one spelling. Raises ConfigError unless it names a folder in a bucket."""
    parts = urlsplit(url)
    if parts.scheme not in CLIENTS:
        schemes = ", ".join(f"{scheme}://" for scheme in CLIENTS)
        raise ConfigError(
            f"run is {redacted(url)}, expected a folder, or one of {schemes}\n  type run=s3://BUCKET/NAME, or a path"
        )
    names = parts.path.strip("/").split("/")
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if not (parts.netloc and is_plain) or not all(name not in ("", ".", "..") for name in names):
        raise ConfigError(
            f"run is {redacted(url)}, expected a bucket and a folder in it, and nothing else\n"
            f"  type run={parts.scheme}://BUCKET/NAME; credentials come from the environment (docs/run-storage.md)"
        )
    return f"{parts.scheme}://{parts.netloc}/{'/'.join(names)}"
