"""A folder in the run directory for the length of a command that starts workers and trains nothing."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def folder_in(run: Path) -> Iterator[Path]:
    """Make a folder in the run directory for the length of the block; a directory that was not there goes again."""
    was_there = run.exists()
    run.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=run))
    # Workers may be of another user than the driver: they write here where they may write into the run.
    folder.chmod(run.stat().st_mode & 0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            with suppress(OSError):
                run.rmdir()
