"""Synchronise the small files of a run in an object store with the run's local folder.

In the store, next to the checkpoints (data/bucket.py), under the run's URL:
    leases/, attempts/      the owner of the run (jobs/ownership.py); attempts/000000.json tests the store
    status.json, log.txt, <stage>/stage.json, <stage>/weights.safetensors …    as in a run directory
The run's local folder has the same small files, and sync.json, which names the command that wrote them.

A command that holds the run's lease takes these steps (`synced`):
1. download the small files, unless the last owner used this local folder (`pull`);
2. upload changed files every minute in a thread, and at the end of each stage and of the command. Before each file,
   check that this command still owns the run.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.bucket import PIECE, Bucket, each
from data.checks import check_file_name
from data.errors import DataError, PatchlineError, RunOwned
from data.files import refuse_planted, write_atomically
from data.remote.urls import refuse_error_page
from data.storage import Storage
from jobs.ownership import LEASES, Lease
from pipeline.artifacts import DONE
from pipeline.checkpoints.manifest import ATTEMPTS, attempt_folder

SYNC_FILE = "sync.json"
ATTEMPT_CLAIM = re.compile(rf"{ATTEMPTS}/\d+\.json")
UPLOAD_EVERY_S = 60.0  # interval at which the thread uploads changed files
NOT_SYNCED = ("checkpoints", ATTEMPTS, LEASES)  # folders handled by other modules

Log = Callable[[str], None]


@contextmanager
def synced(storage: Storage, lease: Lease, log: Log) -> Iterator[Callable[[], None]]:
    """Synchronise a run's local folder with its object store during the block; yield a function that uploads changes.

    The yielded function raises RunOwned if another command has taken over the run. For a run in a shared folder, the
    function only checks the owner and uploads nothing. Raises StorageError if the store fails.
    """
    if storage.is_shared:
        yield lease.check
        return
    refuse_planted(
        storage.local, "remove it, or choose a folder that only you can write to: cluster.scratch=/elsewhere"
    )
    # 1. If the last owner used this folder, its files are already here.
    sync = Sync(storage, lease, log)
    has_files = lease.previous_token == sync.previous_token
    sync.pull(has_files)
    sync.note()
    # 2. In a thread, because uploading a large file takes minutes.
    has_ended = threading.Event()
    thread = threading.Thread(target=sync.keep_uploading, args=(has_ended,), name="sync", daemon=True)
    thread.start()
    try:
        # Upload files that the last command in this folder could not upload: workers on other nodes may wait for them.
        if has_files:
            sync.put()
        yield sync.put
    finally:
        # 3. Upload the last changes.
        has_ended.set()
        # Limit retries before waiting for the thread: the store may be unreachable.
        storage.limit_retries()
        thread.join()
        try:
            sync.put()
        except (PatchlineError, OSError) as error:
            log(f"could not upload the last lines of this command; they are only in {sync.run}: {error}")


class Sync:
    """Copies changed small files between a run's local folder and its object store."""

    def __init__(self, store: Bucket, lease: Lease, log: Log) -> None:
        self.store = store
        self.run = store.local
        self.lease = lease
        self.log = log
        self.lock = threading.Lock()  # held while files are uploaded, by the thread or by the command
        # Token of the command that used this folder last; file name → size and mtime in ns when it was uploaded.
        self.previous_token, self.known = last_owner(store.local)

    def keep_uploading(self, has_ended: threading.Event) -> None:
        """Upload changed files every UPLOAD_EVERY_S seconds while this command owns the run."""
        while not has_ended.wait(UPLOAD_EVERY_S):
            try:
                self.put()
            except RunOwned:
                return
            except (PatchlineError, OSError) as error:
                self.log(f"could not upload all small files to {self.store.url}; retrying: {error}")

    def pull(self, has_files: bool) -> None:
        """Download the run's small files; unless `has_files`, first delete the contents of the local folder."""
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
        """Upload all changed small files, the done.json files last, because they mark stages as finished.

        Raises StorageError if the store fails, or RunOwned if another command has taken over the run.
        """
        with self.lock:
            self.lease.check()
            paths: list[Path] = []
            for path in self.run.rglob("*"):
                if is_synced(path.relative_to(self.run)):
                    paths.append(path)
            # False sorts before True: each done.json comes after all other files.
            for path in sorted(paths, key=lambda path: path.name == DONE):
                # A temporary file may have disappeared.
                with suppress(FileNotFoundError):
                    name = path.relative_to(self.run).as_posix()
                    state = state_of(path)
                    if path.is_file() and self.known.get(name) != state:
                        # Check before each file: uploading takes minutes for a large one, and the run may be lost.
                        self.lease.check()
                        self.store.upload(name)
                        self.known[name] = state
            self.note()

    def note(self) -> None:
        """Write sync.json, which records the command that owns these files and the files in the store."""
        write_atomically(self.run / SYNC_FILE, json.dumps({"token": self.lease.record["token"], "known": self.known}))


def fetch_small_files(store: Bucket, is_selected: Callable[[str], bool]) -> dict[str, int]:
    """Download the files selected by `is_selected` that are missing locally; return file name → size in bytes.

    Also creates the attempts' folders, from which attempts are counted. Raises StorageError if the store fails, or
    DataError if an attempt's claim is invalid JSON or names a folder outside the run.
    """
    missing: dict[str, int] = {}
    claims: list[str] = []  # claim files of attempts
    for name, size in store.list().items():
        if ATTEMPT_CLAIM.fullmatch(name):
            claims.append(name)
        if is_selected(name) and not (store.local / name).exists():
            missing[name] = size

    def fetch(name: str) -> None:
        path = store.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A running command may replace the file after the listing. One request returns one version of it, but a large
        # file is read in pieces, and written only once.
        content = store.read(name) if missing[name] <= PIECE else None
        if content is None:
            store.fetch(name, path, missing[name])
            return
        if len(content) != missing[name]:
            refuse_error_page(f"{store.url}/{name}", content)
        write_atomically(path, content)

    def make_attempt_folder(name: str) -> None:
        try:
            stage = json.loads(store.read(name) or b"{}").get("stage")
        except (ValueError, AttributeError):
            raise DataError(
                f"{store.address(name)} is damaged: expected JSON with the stage of an attempt\n"
                "  delete it, or restore it from a copy"
            ) from None
        if stage:
            stage = check_file_name(stage, store.address(name), folders=False)
            attempt_folder(store.local / stage, int(Path(name).stem)).mkdir(parents=True, exist_ok=True)

    each(list(missing), fetch)
    each(claims, make_attempt_folder)
    return missing


def last_owner(run: Path) -> tuple[str, dict[str, list[int]]]:
    """Return the token of the last command that used a local folder, and the files uploaded by that command."""
    # If sync.json is missing or damaged, all files are downloaded.
    with suppress(OSError, ValueError, KeyError):
        record = json.loads((run / SYNC_FILE).read_text())
        return record["token"], record["known"]
    return "", {}


def is_synced(name: Path) -> bool:
    """Return whether a file is one of the synchronised small files; `name` is relative to the run."""
    is_elsewhere = any(part in NOT_SYNCED for part in name.parts[:-1])
    return not is_elsewhere and name.as_posix() != SYNC_FILE and not name.name.startswith(".tmp-")


def state_of(path: Path) -> list[int]:
    """Return a file's size and mtime in ns, to detect changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
