"""Whether rank 0 sees what the others have written: files in a folder that all nodes share, or should.

In:  what every worker says it has written: name, bytes, node
Out: nothing, or an error that names the first that rank 0 does not see, after a wait: a network file system may be some
     seconds late

On a folder that is not shared every worker writes happily onto the disk of its own node. Only a look tells.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.errors import CheckpointError
from data.files import size_text
from data.storage import Storage
from pipeline.checkpoints.manifest import ChunkedRecord

SEEN_WITHIN_S = 30.0  # NFS keeps what it knows of a folder for up to 30 s (acdirmin of its mount) unless it asks anew
POLL_S = 0.1
SOON_S = 1.0  # a wait beyond it is logged
SAME_STORAGE = "expected: a run directory on storage that every node mounts at the same path\n  type run=/shared/NAME"


@dataclass(frozen=True)
class WrittenFile:
    """Describes what one worker's thread has left: a file with its size and digests, or an error."""

    name: str
    record: ChunkedRecord | None = None  # None where there is an error
    error: str = ""
    node: str = field(default_factory=socket.gethostname)  # where it was written

    @property
    def bytes(self) -> int:
        """Return the size of the file; 0 where none was written."""
        return self.record["bytes"] if self.record else 0


def check_seen(storage: Storage, staged: str, written: Sequence[WrittenFile], log: Callable[[str], None]) -> None:
    """Raise CheckpointError unless rank 0 sees the files of all workers in a staged set, whole.

    It names the workers whose files are not seen, by rank. Raises StorageError, OSError where the storage fails.
    """

    def sizes() -> dict[str, int]:
        return {name.removeprefix(f"{staged}/"): size for name, size in storage.list(staged).items()}

    expected = {file.name: file.bytes for file in written}
    # What rank 0 has written itself it sees at once: where that is gone, another start has swept the folder.
    is_patient = not storage.sees_at_once and written[0].name in sizes()
    unseen, waited_s = wait_until_seen(sizes, expected, SEEN_WITHIN_S if is_patient else 0.0)
    address = storage.address(staged)
    if not unseen:
        if waited_s > SOON_S:
            log(f"rank 0 saw the files of all workers in {address} only after {waited_s:.1f} s")
        return

    ranks = [rank for rank, file in enumerate(written) if file.name in unseen]
    first = written[ranks[0]]
    bytes_seen = unseen[first.name]
    seen = "no such file" if bytes_seen is None else f"{bytes_seen:,} bytes"
    others = ""
    if len(ranks) > 1:
        others = f", nor the files of {len(ranks) - 1} more workers ({', '.join(map(str, ranks[1:9]))} …)"
    raise CheckpointError(
        f"worker {ranks[0]} on {first.node} has written {address}/{first.name} ({size_text(first.bytes)}), rank 0 on "
        f"{socket.gethostname()} sees {seen} there after {waited_s:.0f} s{others}; "
        f"{address.rpartition('/')[0]} must be the same storage on all nodes"
    )


def look_for(folder: Path, names: Iterable[str]) -> tuple[dict[str, int | None], float]:
    """Look for names in a folder until all are seen, or 30 s are over.

    Returns those that are not seen, and the seconds it took.
    """
    return wait_until_seen(lambda: dict.fromkeys(names_in(folder)), dict.fromkeys(names), SEEN_WITHIN_S)


def wait_until_seen(
    sizes: Callable[[], Mapping[str, int | None]], expected: Mapping[str, int | None], patience_s: float
) -> tuple[dict[str, int | None], float]:
    """Ask for the sizes of files until they are as expected, None for any size, or the patience is over.

    Returns the files that are not seen so, each with the size that was seen, None for no file; and the seconds it took.
    """
    began = time.monotonic()
    while True:
        seen = sizes()
        unseen: dict[str, int | None] = {}
        for name, size in expected.items():
            if name not in seen or (size is not None and seen[name] != size):
                unseen[name] = seen.get(name)
        waited_s = time.monotonic() - began
        if not unseen or waited_s >= patience_s:
            return unseen, waited_s
        time.sleep(POLL_S)


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, listed anew; none where there is no such folder."""
    # To open a folder makes a network file system ask its server what is new there; to ask for a name may not.
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
