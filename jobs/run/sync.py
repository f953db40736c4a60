"""A run that is kept in an object store: who owns it, and the way of its small files there and back.

In the store, beside the checkpoints (data/bucket.py), under the run's URL:
    owner.json              who works on the run, and a count that grows every 10 s as long as it lives
    attempts/000007.json    an attempt that was claimed; attempts/000000.json is the test that a name is created once
    status.json, log.txt, <stage>/stage.json, <stage>/weights.safetensors …    as in a run directory
Here, in the run's local folder: the same small files, and sync.json, which says of which owner they are.

One command on such a run, in order (`synced`):
1. refuse where another process owns it and lives (`take_over`): a store has no locks, so a sign of life is waited for;
2. fetch its small files, unless the last owner worked in this very folder (`pull`);
3. renew owner.json, and put what has changed every minute, each in a thread; the end of a stage and of the command put
   too.

owner.json is there for good manners, so that two commands do not take turns. What keeps a checkpoint safe from an owner
that was cut off and comes back is the number of its attempt (`Bucket.sweep`).
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict
from uuid import uuid4

from data.bucket import Bucket, each
from data.errors import PatchlineError, RunOwned, StorageError
from data.files import locked, write_whole
from data.storage import Storage
from jobs.ownership import OWNER_FILE
from pipeline.artifacts import DONE
from pipeline.checkpoints.manifest import ATTEMPTS, attempt_folder

SYNC_FILE = "sync.json"
BEAT_S = 10.0  # between two signs of life
WATCH_BEATS = 3  # without a sign of life, after which an owner is taken for dead
PUT_EVERY_BEATS = 6  # so often the thread puts what has changed
LAST_ATTEMPTS = 3  # of a request when the command ends: a store that is gone must not hold it up for minutes
NOT_SYNCED = ("checkpoints", ATTEMPTS)  # folders: the one has its own rules, the other is of this node
OWN_FILES = (OWNER_FILE, SYNC_FILE)  # of the local folder

Log = Callable[[str], None]


class Owner(TypedDict):
    """Holds what owner.json says in the store."""

    token: str  # of one command
    host: str
    pid: int
    since: str
    command: str
    beats: int
    is_released: bool  # the command has ended, and said so


@contextmanager
def synced(storage: Storage, log: Log) -> Iterator[Callable[[], None]]:
    """Keep a run's local folder and its URL alike while the block works; gives the function that puts what has changed.

    The local folder is locked already. For a run in a folder there is nothing to do. Raises RunOwned, also in the place
    of what has ended the block when another command had taken the run over; StorageError.
    """
    if storage.is_shared:
        yield lambda: None
        return
    # 1. The run is ours, and the folder holds its files.
    sync = Sync(storage, log)
    is_ours = sync.take_over()
    sync.pull(is_ours)
    sync.note()
    # 2. A sign of life, and what has changed, in a thread each: a large file takes minutes, and without a sign of life
    #    for 30 s the owner is taken for dead.
    has_ended = threading.Event()
    threads = []
    for work in (sync.keep_alive, sync.keep_putting):
        threads.append(threading.Thread(target=work, args=(has_ended,), name="sync", daemon=True))
    for thread in threads:
        thread.start()
    try:
        # What the last command here could not put: workers on other nodes may need that a stage is done.
        if is_ours:
            sync.put()
        try:
            yield sync.put
        except PatchlineError:
            # A worker may have failed at its commit, or have stopped as it was asked to. Neither exit code would say
            # that another command goes on with the run, and a batch system would start one that asks to be run again.
            storage.retry.attempts = LAST_ATTEMPTS
            with suppress(StorageError, OSError):
                sync.check_owned()
            raise
    finally:
        # 3. The last files, and that this command has ended.
        has_ended.set()
        # Before the threads are waited for: they may be asking a store that is gone.
        storage.retry.attempts = LAST_ATTEMPTS
        for thread in threads:
            thread.join()
        try:
            sync.put()
            sync.renew(0, is_released=True)
        except (PatchlineError, OSError) as error:
            log(f"the last lines of this command are in {sync.run} alone: {error}")


@contextmanager
def looked_at(storage: Storage) -> Iterator[Path]:
    """Give the block a folder with a run's small files, for a command that only reads them.

    That is the run's local folder where a command works on it here, or was the last to do so. Elsewhere it is a
    temporary one: workers of a run that lives may write into the local folder of this node. Raises StorageError.
    """
    if storage.is_shared:
        yield storage.local
        return
    has_all_here = False
    if storage.local.is_dir():
        with locked(storage.local / OWNER_FILE, wait=False) as is_free:
            # A command works here; or its last owner did so.
            has_all_here = not is_free
            if is_free:
                sync = Sync(storage, print)
                owner = sync.owner()
                has_all_here = owner is not None and owner["token"] == sync.last_token
    if has_all_here:
        yield storage.local
        return
    with TemporaryDirectory(prefix="patchline-plan-") as temporary:
        folder = Path(temporary).resolve()
        Sync(Bucket(storage.url, folder), print).pull(is_ours=False)
        yield folder


class Sync:
    """The local folder of a run, and the same in an object store; `token` tells this command from all others."""

    def __init__(self, store: Bucket, log: Log) -> None:
        self.store = store
        self.run = store.local
        self.log = log
        self.token = uuid4().hex
        self.last_token = ""  # of the command that worked here last
        self.known: dict[str, list[int]] = {}  # by name: size and mtime in ns of what the store has
        self.lock = threading.Lock()  # the thread and the command do not put at once
        # Torn or not there: then the store knows better.
        with suppress(OSError, ValueError, KeyError):
            record = json.loads((self.run / SYNC_FILE).read_text())
            self.last_token = record["token"]
            self.known = record["known"]

    # ------------------------------------------------------------------------ who owns the run

    def owner(self) -> Owner | None:
        """Return what owner.json says; None where there is none."""
        content = self.store.read(OWNER_FILE)
        return None if content is None else json.loads(content)

    def take_over(self) -> bool:
        """Make this command the owner; returns whether the last one worked in this folder, which then has its files.

        Raises RunOwned where the owner is alive, StorageError where the store cannot keep two owners apart.
        """
        # 1. A store without conditional writes could not keep a late commit out.
        self.store.check_creates_once(f"{ATTEMPTS}/{0:06d}.json")

        # 2. An owner that has worked in this folder is dead, because we hold the lock of it. Another one that has not
        #    said that it has ended is waited for. Only what changes is looked at, never a time: clocks of machines
        #    differ.
        owner = self.owner()
        is_ours = owner is not None and owner["token"] == self.last_token
        if owner is not None and not is_ours and not owner["is_released"]:
            wait_s = WATCH_BEATS * BEAT_S
            self.log(f"{self.store.url} was left by {name_of(owner)}; waiting {wait_s:.0f} s for a sign of life")
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                time.sleep(BEAT_S / 5)
                now = self.owner()
                if now is not None and now != owner and not now["is_released"]:
                    raise self.owned_by(now)
            self.log(f"no sign of life: taking the run over; should {name_of(owner)} wake up, it cannot commit")

        # 3. Of two that come at once, the later one has put its name over the other's.
        self.renew(0)
        time.sleep(min(1.0, BEAT_S / 10))
        self.check_owned()
        return is_ours

    def owned_by(self, owner: Owner) -> RunOwned:
        """Return the error that names the owner."""
        if owner["is_released"]:
            return RunOwned(
                f"{self.store.url} was taken over by {name_of(owner)}, which has ended since\n"
                f"  see how: python -m jobs status {self.store.url}\n"
                "  where its stages have not all finished, type the same command again to go on"
            )
        return RunOwned(
            f"{self.store.url} is owned by {name_of(owner)}, which is alive\n"
            f"  watch it: python -m jobs status {self.store.url}\n"
            f"  once it is dead for {WATCH_BEATS * BEAT_S:.0f} s the same command takes over; or give this run another "
            "name: run=…"
        )

    def check_owned(self) -> None:
        """Raise RunOwned where another command has taken the run over."""
        owner = self.owner()
        if owner is not None and owner["token"] != self.token:
            raise self.owned_by(owner)

    def renew(self, beats: int, is_released: bool = False) -> None:
        """Put owner.json: the command's sign of life."""
        owner: Owner = {
            "token": self.token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": SINCE,
            "command": " ".join(sys.argv),
            "beats": beats,
            "is_released": is_released,
        }
        self.store.put(OWNER_FILE, json.dumps(owner).encode())

    def keep_alive(self, has_ended: threading.Event) -> None:
        """Give a sign of life, again and again, until the command ends, or another one has taken the run over."""
        beats = 0
        while not has_ended.wait(BEAT_S):
            beats += 1
            try:
                self.check_owned()
                self.renew(beats)
            except RunOwned as error:
                self.log(f"taken over, nothing of this command is committed any more: {error}")
                # Else a restart would claim the next attempt, and end the new owner's saves. It is heard as a stop is.
                if not has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            except (PatchlineError, OSError) as error:
                # It was asked again and again: say so, and go on. The workers' saves have a patience of their own.
                self.log(f"{self.store.url} does not answer: {error}")

    def keep_putting(self, has_ended: threading.Event) -> None:
        """Put what has changed, again and again, as long as the run is this command's."""
        while not has_ended.wait(PUT_EVERY_BEATS * BEAT_S):
            try:
                self.put()
            except RunOwned:
                return
            except (PatchlineError, OSError) as error:
                self.log(f"not all small files are in {self.store.url} yet: {error}")

    # ------------------------------------------------------------------------ there and back

    def pull(self, is_ours: bool) -> None:
        """Fetch the run's small files. Where the folder is another owner's, or an older one, they replace all in it."""
        if not is_ours:
            self.known = {}
            for path in self.run.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != OWNER_FILE:
                    path.unlink()
        for name in fetch_small_files(self.store, lambda name: is_synced(Path(name))):
            self.known[name] = state_of(self.run / name)

    def put(self) -> None:
        """Put every small file that has changed; the record that a stage is done comes after all else of it.

        Raises RunOwned where another command has taken the run over, StorageError.
        """
        with self.lock:
            self.check_owned()
            paths: list[Path] = []
            for path in self.run.rglob("*"):
                if is_synced(path.relative_to(self.run)):
                    paths.append(path)
            # The records that a stage is done come behind all other files.
            for path in sorted(paths, key=lambda path: path.name == DONE):
                # A file may go while we look, as temporary ones do.
                with suppress(FileNotFoundError):
                    name = path.relative_to(self.run).as_posix()
                    state = state_of(path)
                    if path.is_file() and self.known.get(name) != state:
                        # Before each of them: a large one takes minutes, in which the run may be taken over.
                        self.check_owned()
                        self.store.send(name)
                        self.known[name] = state
            self.note()

    def note(self) -> None:
        """Write down whose files these are, and which of them the store has."""
        write_whole(self.run / SYNC_FILE, json.dumps({"token": self.token, "known": self.known}))


def fetch_small_files(store: Bucket, is_wanted: Callable[[str], bool]) -> dict[str, int]:
    """Fetch those files of a run that are wanted and not in its local folder yet; returns their bytes by name.

    How often a stage was tried is counted by its folders of attempts: those are made too. Raises StorageError.
    """
    missing: dict[str, int] = {}
    claims: list[str] = []  # of attempts
    for name, size in store.list().items():
        if name.startswith(f"{ATTEMPTS}/"):
            claims.append(name)
        if is_wanted(name) and not (store.local / name).exists():
            missing[name] = size

    def fetch(name: str) -> None:
        path = store.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(name, path, missing[name])

    def make_attempt_folder(name: str) -> None:
        claim = json.loads(store.read(name) or b"{}")
        if claim.get("stage"):
            attempt_folder(store.local / claim["stage"], int(Path(name).stem)).mkdir(parents=True, exist_ok=True)

    each(list(missing), fetch)
    each(claims, make_attempt_folder)
    return missing


SINCE = time.strftime("%Y-%m-%d %H:%M:%S")


def is_synced(name: Path) -> bool:
    """Tell whether a file of a run, named below it, is one of the small ones that lie both here and in the store."""
    is_elsewhere = any(part in NOT_SYNCED for part in name.parts[:-1])
    return not is_elsewhere and name.as_posix() not in OWN_FILES and not name.name.startswith(".tmp-")


def state_of(path: Path) -> list[int]:
    """Return what tells a changed file from an unchanged one: size and mtime in ns."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def name_of(owner: Owner) -> str:
    """Name an owner in words."""
    return f"process {owner['pid']} on {owner['host']} since {owner['since']} ({owner['command']})"
