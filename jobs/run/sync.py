"""Synchronizes the small files of a run in an object store with its local folder.

In the store, next to the checkpoints (data/bucket.py), under the run's URL:
    leases/, attempts/      the owner of the run (jobs/ownership.py); attempts/000000.json tests the store
    status.json, log.txt, <stage>/stage.json, <stage>/weights.safetensors …    as in a run directory
Here, in the run's local folder: the same small files, and sync.json, which names the owner of these files.

One command on such a run, in order (`synced`), once it has the lease:
1. fetch its small files, unless the last owner worked in this folder (`pull`);
2. store changed files every minute in a thread, and at the end of each stage and of the command. Before each file,
   check that this command still owns the run.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.bucket import Bucket, each
from data.checks import check_file_name
from data.errors import DataError, PatchlineError, RunOwned
from data.files import refuse_planted, write_atomically
from data.storage import Storage
from jobs.ownership import LEASES, Lease
from pipeline.artifacts import DONE
from pipeline.checkpoints.manifest import ATTEMPTS, attempt_folder

SYNC_FILE = "sync.json"
ATTEMPT_CLAIM = re.compile(rf"{ATTEMPTS}/\d+\.json")
PUT_EVERY_S = 60.0  # between two rounds of the thread that stores changed files
NOT_SYNCED = ("checkpoints", ATTEMPTS, LEASES)  # folders: they have rules of their own

Log = Callable[[str], None]


@contextmanager
def synced(storage: Storage, lease: Lease, log: Log) -> Iterator[Callable[[], None]]:
    """Keep a run's local folder and its URL equal during the block; yield the function that stores changed files.

    That function raises RunOwned if another command took the run over; for a run in a folder it does nothing else.
    Raises StorageError.
    """
    if storage.is_shared:
        yield lease.check
        return
    refuse_planted(
        storage.local, "remove it, or choose a folder that only you can write to: cluster.scratch=/elsewhere"
    )
    # 1. The folder has the files of the last owner already if that command worked in it.
    sync = Sync(storage, lease, log)
    has_files = lease.previous_token == sync.previous_token
    sync.pull(has_files)
    sync.note()
    # 2. A thread, because a large file takes minutes.
    has_ended = threading.Event()
    thread = threading.Thread(target=sync.keep_putting, args=(has_ended,), name="sync", daemon=True)
    thread.start()
    try:
        # Files that the last command here could not store: workers on other nodes may wait for the end of a stage.
        if has_files:
            sync.put()
        yield sync.put
    finally:
        # 3. The last files.
        has_ended.set()
        # Before waiting for the thread: its store may be gone.
        storage.limit_retries()
        thread.join()
        try:
            sync.put()
        except (PatchlineError, OSError) as error:
            log(f"could not store the last lines of this command; they are only in {sync.run}: {error}")


class Sync:
    """Copies changed small files between a run's local folder and its object store."""

    def __init__(self, store: Bucket, lease: Lease, log: Log) -> None:
        self.store = store
        self.run = store.local
        self.lease = lease
        self.log = log
        self.lock = threading.Lock()  # the thread and the command do not store files at the same time
        # The command that worked here last, and by name: size and mtime in ns of the files in the store.
        self.previous_token, self.known = last_owner(store.local)

    def keep_putting(self, has_ended: threading.Event) -> None:
        """Store changed files repeatedly, as long as this command owns the run."""
        while not has_ended.wait(PUT_EVERY_S):
            try:
                self.put()
            except RunOwned:
                return
            except (PatchlineError, OSError) as error:
                self.log(f"could not store all small files in {self.store.url}, retrying: {error}")

    def pull(self, has_files: bool) -> None:
        """Fetch the run's small files. They replace the content of the folder if it has another owner's files."""
        if not has_files:
            self.known = {}
            for path in self.run.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        for name in fetch_small_files(self.store, lambda name: is_synced(Path(name))):
            self.known[name] = state_of(self.run / name)

    def put(self) -> None:
        """Store every changed small file; the record of a finished stage comes last.

        Raises RunOwned if another command took the run over, StorageError.
        """
        with self.lock:
            self.lease.check()
            paths: list[Path] = []
            for path in self.run.rglob("*"):
                if is_synced(path.relative_to(self.run)):
                    paths.append(path)
            # The records of finished stages come after all other files.
            for path in sorted(paths, key=lambda path: path.name == DONE):
                # A temporary file may disappear meanwhile.
                with suppress(FileNotFoundError):
                    name = path.relative_to(self.run).as_posix()
                    state = state_of(path)
                    if path.is_file() and self.known.get(name) != state:
                        # Before each file: a large one takes minutes, in which the run may be taken over.
                        self.lease.check()
                        self.store.upload(name)
                        self.known[name] = state
            self.note()

    def note(self) -> None:
        """Record the owner of these files, and which of them the store has."""
        write_atomically(self.run / SYNC_FILE, json.dumps({"token": self.lease.record["token"], "known": self.known}))


def fetch_small_files(store: Bucket, is_wanted: Callable[[str], bool]) -> dict[str, int]:
    """Fetch the wanted files of a run that are not in its local folder yet; return their sizes in bytes by name.

    The folders of attempts are made too, because their number is the number of attempts. Raises StorageError, and
    DataError for a claim that is not JSON or names a folder outside the run.
    """
    missing: dict[str, int] = {}
    claims: list[str] = []  # of attempts
    for name, size in store.list().items():
        if ATTEMPT_CLAIM.fullmatch(name):
            claims.append(name)
        if is_wanted(name) and not (store.local / name).exists():
            missing[name] = size

    def fetch(name: str) -> None:
        path = store.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(name, path, missing[name])

    def make_attempt_folder(name: str) -> None:
        try:
            stage = json.loads(store.read(name) or b"{}").get("stage")
        except (ValueError, AttributeError):
            raise DataError(
                f"{store.address(name)}: not JSON with the stage of an attempt\n  delete it, or restore it from a copy"
            ) from None
        if stage:
            stage = check_file_name(stage, store.address(name), folders=False)
            attempt_folder(store.local / stage, int(Path(name).stem)).mkdir(parents=True, exist_ok=True)

    each(list(missing), fetch)
    each(claims, make_attempt_folder)
    return missing


def last_owner(run: Path) -> tuple[str, dict[str, list[int]]]:
    """Return the token of the last command that worked in a local folder, and the files that it had stored."""
    # If it is torn or missing, all files are fetched.
    with suppress(OSError, ValueError, KeyError):
        record = json.loads((run / SYNC_FILE).read_text())
        return record["token"], record["known"]
    return "", {}


def is_synced(name: Path) -> bool:
    """Return whether a file, named relative to the run, is one of the synchronized small files."""
    is_elsewhere = any(part in NOT_SYNCED for part in name.parts[:-1])
    return not is_elsewhere and name.as_posix() != SYNC_FILE and not name.name.startswith(".tmp-")


def state_of(path: Path) -> list[int]:
    """Return the size and the mtime in ns, by which a changed file is recognized."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
