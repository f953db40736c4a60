"""The files that workers leave in their attempt's folder, and how the driver reads them.

Each worker writes `rank-00003.json` when it starts, and once more when it ends:

    {"rank": 3, "node": "n1", "pid": 4711, "started": 1763800000.0, "oom_kills": 0}
    … and "ended": 1763800100.0, "value": {"step": 40}
    … or "ended": 1763800100.0, "exit_code": 65, "kind": "DataError", "error": "…", "traceback": "…"

It keeps `rank-00003.log` open all the while, for a crash to write its stack into. The driver looks at the records twice
a second while the workers work (`SeenRecords`), and once more when they have ended (`records`, `rank_zero_value`).
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

from data.errors import ClusterError
from data.files import write_with_reserve
from pipeline.checkpoints.shared_storage_check import SAME_STORAGE

VMSTAT = Path("/proc/vmstat")  # counts the kills of every cgroup, and any container can read it
RECORD_RESERVE_BYTES = 16_384  # in a worker's record, for its error and traceback
REFRESHED_AT_A_LOOK = 16  # records that the driver reads again at a look, though nothing says that they have changed


class WorkerRecord(TypedDict):
    """What one worker has written into `rank-00003.json`; times are seconds since 1970 on the worker's clock."""

    rank: int
    node: str
    node_id: NotRequired[str]  # RankInfo.node_id
    address: NotRequired[str]  # RankInfo.address
    pid: int
    started: float
    oom_kills: int  # of the worker's machine, when the worker started
    ended: NotRequired[float]
    value: NotRequired[object]  # of a worker that returned
    exit_code: NotRequired[int | None]  # of a worker that raised, as the next three
    kind: NotRequired[str]
    error: NotRequired[str]
    traceback: NotRequired[str]


def worker_file(folder: Path, rank: int, suffix: str) -> Path:
    """Return the path of what a worker leaves in the attempt's folder: `rank-00003` and the suffix."""
    return folder / f"rank-{rank:05d}{suffix}"


# ------------------------------------------------------------------------ in the worker


def write_record(folder: Path, record: WorkerRecord) -> None:
    """Write what a worker tells of itself, in the place of what it told before."""
    # Whole, because the driver reads the records while the workers write them.
    path = worker_file(folder, record["rank"], ".json")
    # With room for the end, which is written on a full disk too: the disk may be why the worker ends.
    write_with_reserve(path, json.dumps(record), RECORD_RESERVE_BYTES)


def oom_kills() -> int:
    """Count the processes of this machine that the kernel has killed for want of memory; 0 where it does not say."""
    with suppress(OSError):
        for line in VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# ------------------------------------------------------------------------ in the driver


def records(folder: Path, world: int) -> dict[int, WorkerRecord]:
    """Return what the workers have written so far, by rank."""
    by_rank = {}
    for rank in range(world):
        # Not there yet; or a shared folder stutters, and the next look has it.
        with suppress(OSError, ValueError):
            by_rank[rank] = json.loads(worker_file(folder, rank, ".json").read_text())
    return by_rank


class SeenRecords:
    """The records of an attempt as last seen, for somebody who looks often: only what is new is read.

    A record appears by a rename, which gives it another inode and its folder another time of change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_rank: dict[int, WorkerRecord] = {}
        self.inodes: dict[str, int] = {}  # by file name, of what was read
        self.listed_ns = 0  # the folder's time of change at the last listing
        self.is_settled = False  # it was the same at the listing before, so that the clock's tick hides nothing
        self.to_refresh = 0  # the place among the names of the record that is read again next

    def look(self) -> dict[int, WorkerRecord]:
        """Return what the workers have written so far, by rank."""
        # A shared folder may stutter: the next look has it.
        with suppress(OSError):
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns != self.listed_ns or not self.is_settled:
                self._read_new()
                self.is_settled = changed_ns == self.listed_ns
                self.listed_ns = changed_ns
        self._refresh()
        return self.by_rank

    def _read_new(self) -> None:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                is_record = entry.name.startswith("rank-") and entry.name.endswith(".json")
                if is_record and self.inodes.get(entry.name) != entry.inode():
                    self._read(entry.name, entry.inode())

    def _refresh(self) -> None:
        """Read a few records again, in turn: on a full disk one is written in place (data.files.write_with_reserve)."""
        names = list(self.inodes)
        for name in names[self.to_refresh : self.to_refresh + REFRESHED_AT_A_LOOK]:
            self._read(name, self.inodes[name])
        self.to_refresh += REFRESHED_AT_A_LOOK
        if self.to_refresh >= len(names):
            self.to_refresh = 0

    def _read(self, name: str, inode: int) -> None:
        with suppress(OSError, ValueError):
            with open(self.folder / name) as file:
                record: WorkerRecord = json.load(file)
            self.by_rank[record["rank"]] = record
            self.inodes[name] = inode


def rank_zero_value(folder: Path) -> object:
    """Return what the function of rank 0 returned, in a worker group that has ended well.

    Raises ClusterError where rank 0 has written that into another folder of this name, on a node of its own.
    """
    written = records(folder, world=1)
    if 0 not in written:
        raise ClusterError(
            f"rank 0 has ended well, and what it has written into {folder} is not here\n  {SAME_STORAGE}"
        )
    return written[0].get("value")
