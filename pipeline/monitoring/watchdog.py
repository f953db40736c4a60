"""Detects a worker that blocks the others: workers report their phases, and the driver watches them.

1. A worker calls `Phases.enter`; its file `rank-00003.phase` in the attempt's folder then contains the line

       {"entered": 4711, "phase": "data", "step": 1200, "shard": "train-000017.tar"}

   which is overwritten in place by a single write. It takes 1 µs, and entering a phase 37 to 64 µs of processor time,
   mostly for the timer of the stack traces (two cores, load 15). The file is in a folder local to the node
   (`node_folder`), so that a shared folder that hangs does not hide the worker's phase.
2. The agent of each node reads the file (`read_phase`) and reports the phase to the driver, which calls
   `Watch.find_stall` once a second. The driver compares phases with earlier reports by its own clock; the nodes' clocks
   do not matter.
3. If no worker has entered a phase for `stall_s`, `find_stall` returns the rank that blocks the others, and the reason.
   All workers enter the same phases in the same order, so the worker that has entered the fewest phases is behind.

Every phase is watched: from the start (join, build, restore) through the steps to evaluate, finish and end. On a GPU, a
phase is entered when its kernels are queued; a hanging device becomes visible in the next phase that waits for it,
`reduce`.
"""

import faulthandler
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data.checks import encodable

STEP = ("data", "forward", "backward", "reduce", "save")  # phases of the training loop
# A worker dumps its stacks into its log at this share of the timeout, before the driver ends it.
DUMP_AT = 0.8
LINE_BYTES = 2048  # fixed length of a phase file, so that a short line overwrites a longer one completely
LONGEST_SHARD = 150  # characters; each may take twelve bytes in JSON, and a truncated line would not be valid JSON
NODE_FOLDER = "PATCHLINE_NODE_FOLDER"  # worker environment variable: its attempt's node-local folder
STOP_FILE = "stop"  # created in the node's folder when the driver asks the worker group to commit and exit
PHASE_FILE = "rank-{:05d}.phase"  # name of a phase file in the node's folder


def node_folder(attempt_folder: Path) -> Path:
    """Return this node's local folder for an attempt; if the node has no agent, the attempt's own folder."""
    return Path(os.environ.get(NODE_FOLDER, attempt_folder))


# ------------------------------------------------------------------------------------------------ in the worker


class Phases:
    """Writes a worker's phase file; errors are ignored, because a worker that cannot report its phase still trains."""

    def __init__(self, folder: Path, rank: int, stall_s: float) -> None:
        self.stall_s = stall_s
        self.entered = 0  # number of phases entered so far
        # Called with each phase and its step as the phase begins; an extra may replace it.
        self.on_enter: Callable[[str, int], object] = lambda phase, step: None
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(node_folder(folder) / PHASE_FILE.format(rank), os.O_WRONLY | os.O_CREAT, 0o666)
        self.log = open(folder / f"rank-{rank:05d}.log", "a")  # noqa: SIM115 (faulthandler writes until close)

    def enter(self, phase: str, step: int, shard: str = "") -> None:
        """Record that this worker enters `phase`; if the phase lasts too long, stack traces are dumped into the log.

        `step` is the number of completed steps.
        """
        self.entered += 1
        self.on_enter(phase, step)
        shard = encodable(shard)
        if len(shard) > LONGEST_SHARD:
            # Keep the end of the name, because shard names differ there.
            shard = "…" + shard[1 - LONGEST_SHARD :]
        report = PhaseReport(self.entered, phase, step, shard)
        line = json.dumps(vars(report)).encode()
        # A single write of fixed length at a fixed place: the driver may read at any moment and finds a whole line.
        with suppress(OSError):
            os.pwrite(self.handle, line[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n", 0)
        # This replaces the previous timer. It dumps the stacks even while Python is stuck in a library.
        faulthandler.dump_traceback_later(self.stall_s * DUMP_AT, file=self.log)

    @contextmanager
    def rank_0_phase(self, phase: str, step: int, is_rank_0: bool) -> Iterator[None]:
        """Context manager for a `phase` during which rank 0 works and the other ranks "wait".

        At its end, rank 0 enters "wait" too. All workers thus enter both phases, so that their phase counts remain
        comparable.
        """
        self.enter(phase, step)
        # The waiting workers have then entered one phase more than rank 0, so rank 0 counts as the late one.
        if not is_rank_0:
            self.enter("wait", step)
        yield
        if is_rank_0:
            self.enter("wait", step)

    def close(self) -> None:
        """Cancel the timer that dumps stack traces, and close both files."""
        faulthandler.cancel_dump_traceback_later()
        os.close(self.handle)
        self.log.close()


# ------------------------------------------------------------------------ in the agent and in the driver


@dataclass(frozen=True)
class PhaseReport:
    """A worker's current phase, and how many phases it has entered; the worker with the fewest phases is behind."""

    entered: int  # number of phases entered so far
    phase: str
    step: int  # number of completed steps
    shard: str

    def __str__(self) -> str:
        shard = f", shard {self.shard}" if self.shard else ""
        if self.phase == "save":
            return f"save of step {self.step}{shard}"
        if self.phase in STEP:
            return f"{self.phase} of step {self.step + 1}{shard}"  # the step in progress
        if self.step:
            return f"{self.phase} after step {self.step}{shard}"
        return f"{self.phase}{shard}"


def read_phase(folder: Path, rank: int) -> PhaseReport | None:
    """Return the last phase reported by a worker on this node; None if it has not reported a phase."""
    try:
        fields = json.loads((folder / PHASE_FILE.format(rank)).read_bytes())
    except (OSError, ValueError):
        return None
    return PhaseReport(**fields)


@dataclass(frozen=True)
class Stall:
    """A worker that blocks the worker group, and the reason."""

    rank: int
    cause: str


class Watch:
    """Watches the workers of one attempt through the phases that the nodes' agents report.

    `start_s`, if longer than `stall_s`, is the time allowed for workers to be placed and to import their packages.
    `clock` returns seconds.
    """

    def __init__(
        self, world: int, stall_s: float, start_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.world = world
        self.stall_s = stall_s
        self.start_s = max(start_s, stall_s)
        self.clock = clock
        self.last_sign: float | None = None  # when any worker last entered a new phase; initially the first check
        self.places: dict[int, PhaseReport] = {}  # rank → last reported phase

    def find_stall(self, reported: Mapping[int, PhaseReport], frozen: Callable[[int], bool]) -> Stall | None:
        """Return the worker that has blocked the others for longer than the timeout; None if any makes progress.

        `reported` are the workers' phases by rank, from about the same moment. `frozen` returns whether the process of
        a rank is stopped by a signal.
        """
        # Measure from the first check, because no worker may have reported anything for a long time.
        if self.last_sign is None:
            self.last_sign = self.clock()
        for rank, place in reported.items():
            known = self.places.get(rank)
            # Compare counts, not names: a phase may follow another of the same name. Use only this machine's clock.
            if known is None or place.entered != known.entered:
                self.last_sign = self.clock()
                self.places[rank] = place
        idle_s = self.clock() - self.last_sign
        has_all = len(self.places) == self.world

        # A worker without a report may still be importing, which takes longer than any phase.
        limit_s = self.start_s
        if has_all:
            limit_s = self.stall_s
        if idle_s <= limit_s:
            return None

        # The late workers are those without a report or, if all have reported, those with the fewest phases.
        if has_all:
            fewest = min(place.entered for place in self.places.values())
            late = [rank for rank in range(self.world) if self.places[rank].entered == fewest]
        else:
            late = [rank for rank in range(self.world) if rank not in self.places]
        # A worker stopped by a signal explains why the others make no progress.
        for rank in late:
            if frozen(rank):
                return Stall(rank, f"frozen: stopped by a signal, no progress for {idle_s:.0f}s")
        # Nothing else can be determined from outside the process.
        rank = late[0]
        if not has_all:
            cause = f"not started: no progress for {idle_s:.0f}s"
        elif self.places[rank].phase == "data":
            # In this phase a worker waits only for the storage and its own decoding processes.
            cause = f"stalled reader: no batch for {idle_s:.0f}s"
        elif self.world == 1:
            cause = f"stuck for {idle_s:.0f}s"
        elif len(late) == self.world:
            # All are in the same phase: no single worker is to blame, so name the collective.
            cause = f"stuck collective: all {self.world} workers have been in it for {idle_s:.0f}s"
        else:
            cause = f"stuck for {idle_s:.0f}s; the other workers are waiting for it"
        return Stall(rank, cause)
