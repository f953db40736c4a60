"""Folders of a run for commands that do not own it: one to write into and to remove, and one to read."""

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
    """Make a folder in the run directory for the length of the block; a directory that was not there goes again.

    In the main thread a SIGTERM within the block raises KeyboardInterrupt, so that the folder goes then too.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt("ended by SIGTERM")

    # Only the main thread may say what a signal does.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        was_there = run.exists()
        run.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".temporary-", dir=run))
        try:
            # Workers may be of another user than the driver: they write here where they may write into the run.
            folder.chmod(run.stat().st_mode & 0o777)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if not was_there:
                with suppress(OSError):
                    run.rmdir()
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def looked_at(storage: Storage) -> Iterator[Path]:
    """Yield a folder with a run's small files, for a command that only reads them.

    This is the run's local folder if the newest command works or worked here. Otherwise it is a temporary one, because
    workers of a running command may write into the local folder of this node. Raises StorageError.
    """
    if storage.is_shared:
        yield storage.local
        return
    # Does the newest command work here, or did it?
    seen = newest_lease(storage)
    has_all_here = seen is not None and seen.record is not None and seen.record["token"] == last_owner(storage.local)[0]
    if has_all_here:
        yield storage.local
        return
    with TemporaryDirectory(prefix="patchline-plan-") as temporary:
        folder = Path(temporary).resolve()
        fetch_small_files(Bucket(storage.url, folder), lambda name: is_synced(Path(name)))
        yield folder
