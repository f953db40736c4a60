"""A folder in the run directory for the length of a command that starts workers and keeps none of their files."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


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
