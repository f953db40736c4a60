"""Whether rank 0 sees what the others have written: files in a folder that all nodes share, or should.

In:  what every worker says it has written: name, bytes, node
Out: "" or, in words, the first that rank 0 does not see, after a wait: a network file system may be some seconds late

On a folder that is not shared every worker writes happily onto the disk of its own node. Only a look tells.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.files import size_text
from pipeline.checkpoints.manifest import FileRecord

SEEN_WITHIN_S = 30.0  # NFS keeps what it knows of a folder for up to 30 s (acdirmin of its mount) unless it asks anew
POLL_S = 0.1
SOON_S = 1.0  # a wait beyond it is said
SAME_STORAGE = "expected: a run directory on storage that every node mounts at the same path\n  type run=/shared/NAME"


@dataclass(frozen=True)
class WrittenFile:
    """Describes what one worker's thread has left: a file with its size and digests, or an error."""

    name: str
    record: FileRecord | None = None  # None where there is an error
    error: str = ""
    node: str = field(default_factory=socket.gethostname)  # where it was written

    @property
    def bytes(self) -> int:
        """Return the size of the file; 0 where none was written."""
        return self.record["bytes"] if self.record else 0


def unseen_files(folder: Path, written: Sequence[WrittenFile], say: Callable[[str], None]) -> str:
    """Name the workers, by rank, whose files rank 0 does not see in a folder; "" where it sees all, whole."""
    sizes = {file.name: file.bytes for file in written}
    # What rank 0 has written itself it sees at once: where that is gone, somebody has swept the folder.
    is_swept = written[0].name not in names_in(folder)
    unseen, waited_s = look_for(folder, sizes, is_patient=not is_swept)
    if not unseen:
        if waited_s > SOON_S:
            say(f"rank 0 saw the files of all workers in {folder} only after {waited_s:.1f} s")
        return ""

    ranks = [rank for rank, file in enumerate(written) if file.name in unseen]
    first = written[ranks[0]]
    seen = "no such file"
    bytes_seen = unseen[first.name]
    if bytes_seen is not None:
        seen = f"{bytes_seen:,} bytes"
    others = ""
    if len(ranks) > 1:
        others = f", nor the files of {len(ranks) - 1} more workers ({', '.join(map(str, ranks[1:9]))} …)"
    return (
        f"worker {ranks[0]} on {first.node} has written {folder / first.name} ({size_text(first.bytes)}), rank 0 on "
        f"{socket.gethostname()} sees {seen} there after {waited_s:.0f} s{others}; "
        f"{folder.parent} must be the same storage on all nodes"
    )


def look_for(
    folder: Path, expected: Mapping[str, int | None], *, is_patient: bool = True
) -> tuple[dict[str, int | None], float]:
    """Look for files by name and size in bytes, None for any size, once, or until all are seen or 30 s are over.

    Returns those that are not seen so, each with the size that was seen, None for no file; and the seconds it took.
    """
    began = time.monotonic()
    while True:
        unseen = unseen_in(folder, expected)
        waited_s = time.monotonic() - began
        if not unseen or not is_patient or waited_s >= SEEN_WITHIN_S:
            return unseen, waited_s
        time.sleep(POLL_S)


def unseen_in(folder: Path, expected: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the files that are not seen as expected now, each with its bytes, None for no file."""
    unseen: dict[str, int | None] = {}
    names = names_in(folder)
    for name, size in expected.items():
        if name not in names:
            unseen[name] = None
            continue
        # Asked for its size only where that matters: a large worker group has thousands of files.
        if size is None:
            continue
        bytes_seen = size_of(folder / name)
        if bytes_seen != size:
            unseen[name] = bytes_seen
    return unseen


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, listed anew; none where there is no such folder."""
    # To open a folder makes a network file system ask its server what is new there; to ask for a name may not.
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None where it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
