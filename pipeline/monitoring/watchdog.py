"""Finds the worker that the others wait for: every worker says which phase it enters, and the driver judges.

1. A worker calls `Phases.enter`: `rank-00003.phase`, beside its other files of the attempt, then holds one line

       {"entered": 4711, "phase": "data", "step": 1200, "shard": "train-000017.tar"}

   overwritten in place by a single write (2 µs). The file is in a folder of the node's own (`node_folder`), so that a
   shared folder that hangs does not hide where the worker is.
2. The agent of each node reads the file (`read_phase`) and reports it to the driver, which calls `Watch.find_stall`
   once a second. The driver compares phases with earlier reports on its own clock, so clocks may differ between nodes.
3. When no worker has entered a phase for `stall_s`, the look returns a verdict: the rank that holds up the others, and
   why. All workers enter the same phases in the same order, so the one that has entered the fewest is behind.
4. `Watch.slow` tells which worker the others have waited for in most of the last looks, though it does move.

From the start (join, build, restore) through the steps to evaluate, finish and end, there is no phase without a judge.
On a GPU a phase is entered when its kernels are queued; a device that hangs shows in the next phase that waits for it,
`reduce`.
"""

import faulthandler
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STEP = ("data", "forward", "backward", "reduce", "save")  # phases of the training loop, in which a slow worker shows
WAITING = ("backward", "reduce", "save")  # phases with collectives: who is there may be waiting for the others
# At this share of the time-out a worker writes its stacks into its log: later the driver may have ended it already.
DUMP_AT = 0.8
LINE_BYTES = 2048  # of a phase file; always all of them, so that a shorter line leaves nothing of a longer one
LONGEST_SHARD = 150  # characters; as JSON each may take twelve bytes, and a line that is cut off is no JSON
# A worker is slow when it was alone behind in this share of so many looks of the driver, which looks once a second.
SLOW_LOOKS = 30
SLOW_SHARE = 0.9
NODE_FOLDER = "PATCHLINE_NODE_FOLDER"  # a worker's variable: its attempt's folder on this node alone
STOP_FILE = "stop"  # appears in the node's folder when the driver wants the worker group to commit and end
PHASE_FILE = "rank-{:05d}.phase"  # in the node's folder


def node_folder(attempt_folder: Path) -> Path:
    """Return the folder of an attempt that this node shares with no other; without an agent, the attempt's own."""
    return Path(os.environ.get(NODE_FOLDER, attempt_folder))


# ------------------------------------------------------------------------------------------------ in the worker


class Phases:
    """Writes a worker's phase file. It never fails: a worker that cannot say where it is still trains."""

    def __init__(self, folder: Path, rank: int, stall_s: float) -> None:
        self.stall_s = stall_s
        self.entered = 0  # phases so far
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(node_folder(folder) / PHASE_FILE.format(rank), os.O_WRONLY | os.O_CREAT, 0o666)
        self.log = open(folder / f"rank-{rank:05d}.log", "a")  # noqa: SIM115 (faulthandler writes until close)

    def enter(self, phase: str, step: int, shard: str = "") -> None:
        """Say that this worker is in `phase` from now on; a phase that lasts leaves its stacks in the log.

        `step` counts the steps that are whole.
        """
        self.entered += 1
        if len(shard) > LONGEST_SHARD:
            # Names of shards differ at their end.
            shard = "…" + shard[1 - LONGEST_SHARD :]
        line = json.dumps({"entered": self.entered, "phase": phase, "step": step, "shard": shard}).encode()
        # One write at a fixed place and of a fixed length: the driver, which reads at any moment, finds a whole line.
        with suppress(OSError):
            os.pwrite(self.handle, line[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n", 0)
        # Setting the timer anew cancels the one before. It writes the stacks even while Python is stuck in a library.
        faulthandler.dump_traceback_later(self.stall_s * DUMP_AT, file=self.log)

    @contextmanager
    def rank_0_phase(self, phase: str, step: int, is_rank_0: bool) -> Iterator[None]:
        """Put rank 0 into `phase` and the others into "wait"; rank 0 follows them when it is done.

        All enter both phases, so that their counts stay comparable.
        """
        self.enter(phase, step)
        # Those that wait have then entered one phase more than rank 0, so rank 0 counts as the one behind.
        if not is_rank_0:
            self.enter("wait", step)
        yield
        if is_rank_0:
            self.enter("wait", step)

    def close(self) -> None:
        """Stop the timer of the stacks and close both files."""
        faulthandler.cancel_dump_traceback_later()
        os.close(self.handle)
        self.log.close()


# ------------------------------------------------------------------------ in the agent and in the driver


@dataclass(frozen=True)
class PhaseReport:
    """Says where a worker is; of two workers the one that has entered fewer phases is behind."""

    entered: int  # phases so far
    phase: str
    step: int  # steps that are whole
    shard: str

    def __str__(self) -> str:
        shard = f", shard {self.shard}" if self.shard else ""
        if self.phase == "save":
            return f"save of step {self.step}{shard}"
        if self.phase in STEP:
            return f"{self.phase} of step {self.step + 1}{shard}"  # which is not whole yet
        if self.step:
            return f"{self.phase} after step {self.step}{shard}"
        return f"{self.phase}{shard}"


def read_phase(folder: Path, rank: int) -> PhaseReport | None:
    """Return where a worker of this node says that it is; None where it has said nothing."""
    try:
        fields = json.loads((folder / PHASE_FILE.format(rank)).read_bytes())
    except (OSError, ValueError):
        return None
    return PhaseReport(**fields)


@dataclass(frozen=True)
class Stall:
    """Names the worker that holds up the worker group, and says why."""

    rank: int
    cause: str


class Watch:
    """Watches the workers of one attempt, whose places the agents of their nodes report.

    `start_s`, where it is longer than `stall_s`, is how long the workers may take to be placed and to import what they
    need. `clock` returns seconds.
    """

    def __init__(
        self, world: int, stall_s: float, start_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.world = world
        self.stall_s = stall_s
        self.start_s = max(start_s, stall_s)
        self.clock = clock
        self.last_sign: float | None = None  # when a worker was last seen in a new phase; at first the first look
        self.places: dict[int, PhaseReport] = {}  # by rank, as last reported
        self.looks = 0  # during steps, since `slow` last told
        self.behind: Counter[int] = Counter()  # by rank: in how many of them all others waited for it

    def find_stall(self, reported: Mapping[int, PhaseReport], frozen: Callable[[int], bool]) -> Stall | None:
        """Tell which worker has held up all the others for longer than the time-out; None while any worker moves.

        `reported` are the workers' places by rank, of the same moment as far as possible. `frozen` tells whether the
        process of a rank is stopped by a signal.
        """
        # Counted from the first look: there may be no report of any worker for a long time.
        if self.last_sign is None:
            self.last_sign = self.clock()
        for rank, place in reported.items():
            known = self.places.get(rank)
            # Judged by the count, on this clock: a phase may follow one of the same name, and nodes' clocks differ.
            if known is None or place.entered != known.entered:
                self.last_sign = self.clock()
                self.places[rank] = place
        idle_s = self.clock() - self.last_sign
        has_all = len(self.places) == self.world

        # Only in the steps do all workers do equally much; elsewhere rank 0 may be behind for good reasons.
        if has_all and all(place.phase in STEP for place in self.places.values()):
            self.looks += 1
            if self.world > 1:
                last = min(self.places, key=lambda rank: self.places[rank].entered)
                # Being ahead is not waiting: a worker that still computes would not go on sooner if the last one came.
                waiting = 0
                for place in self.places.values():
                    waiting += place.phase in WAITING and place.entered > self.places[last].entered
                if waiting == self.world - 1:
                    self.behind[last] += 1

        # A worker that has never been seen may still be importing, which takes longer than any phase.
        limit_s = self.start_s
        if has_all:
            limit_s = self.stall_s
        if idle_s <= limit_s:
            return None

        # The workers that are missing; where all are there, those furthest behind, which may be several.
        if has_all:
            fewest = min(place.entered for place in self.places.values())
            late = [rank for rank in range(self.world) if self.places[rank].entered == fewest]
        else:
            late = [rank for rank in range(self.world) if rank not in self.places]
        # A worker that is stopped by a signal explains why the rest do not move.
        for rank in late:
            if frozen(rank):
                return Stall(rank, f"frozen: stopped by a signal, {idle_s:.0f}s without a sign of life")
        # From outside, no more can be told than this.
        rank = late[0]
        if not has_all:
            cause = f"does not start, {idle_s:.0f}s without a sign of life"
        elif self.places[rank].phase == "data":
            # In this phase a worker waits for nobody but the storage and its own decoding processes.
            cause = f"stalled reader: {idle_s:.0f}s without a batch"
        elif self.world == 1:
            cause = f"stuck for {idle_s:.0f}s"
        elif len(late) == self.world:
            # All are in the same phase: no single worker is to blame, so the collective itself is named.
            cause = f"stuck collective: all {self.world} workers are there for {idle_s:.0f}s"
        else:
            cause = f"stuck for {idle_s:.0f}s, the others wait for it"
        return Stall(rank, cause)

    def slow(self) -> tuple[int, float] | None:
        """Return (rank, share of the looks in which the others waited for it alone), where that is nearly always.

        It answers once for every `SLOW_LOOKS` looks, and returns None in between.
        """
        if self.looks < SLOW_LOOKS:
            return None
        # Counting begins anew after every telling, so that a worker that has recovered is not named for its past.
        looks = self.looks
        most_behind = self.behind.most_common(1)
        self.looks = 0
        self.behind = Counter()
        for rank, times in most_behind:
            if times >= SLOW_SHARE * looks:
                return rank, times / looks
        return None
