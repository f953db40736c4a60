"""A folder in the run directory for the length of a command that starts workers and trains nothing."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


@contextmanager
def folder_in(run: Path) -> Iterator[Path]:
    """Make a folder in the run directory for the length of the block; a directory that was not there goes again.

    In the main thread a SIGTERM within the block is a KeyboardInterrupt: then too the folder goes again.
    """
    with sigterm_as_interrupt():
        was_there = run.exists()
        run.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=run))
        try:
            # Workers may be of another user than the driver: they write here where they may write into the run.
            folder.chmod(run.stat().st_mode & 0o777)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if not was_there:
                with suppress(OSError):
                    run.rmdir()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM within the block, which would end the process where it stands."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt("ended by SIGTERM")

    # Only the main thread gets signals, and may say what they do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
