"""Provide folders for commands that do not own the run: a temporary folder, and a readable copy of the run."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from data.bucket import Bucket
from data.storage import Storage
from jobs.ownership import newest_lease
from jobs.run.sync import fetch_small_files, is_synced, last_owner


@contextmanager
def temporary_run(run: Path) -> Iterator[Path]:
    """Create a temporary folder in the run directory for the block; if the run directory is new, remove it too.

    In the main thread, SIGTERM raises KeyboardInterrupt during the block, so that the folder is always removed.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt("ended by SIGTERM")

    # Only the main thread can install signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        existed = run.exists()
        run.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".temporary-", dir=run))
        try:
            # Copy the permissions of the run directory, because workers may run as another user.
            folder.chmod(run.stat().st_mode & 0o777)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if not existed:
                with suppress(OSError):
                    run.rmdir()
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def readable_run(storage: Storage) -> Iterator[Path]:
    """Yield a folder with a run's small files, for a command that only reads them.

    If the newest command runs or ran on this machine, this is the run's local folder. Otherwise, it is a temporary
    copy, because workers of a running command may write to the local folder. Raises StorageError if the storage cannot
    be read.
    """
    if storage.is_shared:
        yield storage.local
        return
    # Check whether the newest command runs or ran on this machine.
    seen = newest_lease(storage)
    has_all_here = seen is not None and seen.record is not None and seen.record["token"] == last_owner(storage.local)[0]
    if has_all_here:
        yield storage.local
        return
    with TemporaryDirectory(prefix="patchline-plan-") as temporary:
        folder = Path(temporary).resolve()
        fetch_small_files(Bucket(storage.url, folder), lambda name: is_synced(Path(name)))
        yield folder
