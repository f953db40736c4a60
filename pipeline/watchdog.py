"""Finds the worker that the others wait for: every worker says which phase it enters, and the driver judges.

From the start (join, build, restore) through the steps to evaluate, finish and end, there is no phase without a judge.

`rank-00003.phase`, beside the worker's other files of the attempt, holds one line of JSON, overwritten in place by a
single write (2 µs on a local disk). The driver compares what it reads with what it read before, on its own clock: the
nodes' clocks do not matter. On a GPU a phase is entered when its kernels are queued; a device that hangs shows in the
next phase that waits for it, `reduce`.
"""

import faulthandler
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = ("data", "forward", "backward", "reduce", "save")  # phases of the training loop, in which a slow worker shows
WAITING = ("backward", "reduce", "save")  # phases with collectives: who is there may be waiting for the others
DUMP_AT = 0.8  # of the time-out: each worker writes its stacks into its log before the driver ends it
SLOW_LOOKS = 60  # looks of the driver (0.5 s each) in a row of which a slow worker must be alone behind in most
SLOW_SHARE = 0.9


class Phases:
    """A worker's pen. Never fails: a worker that cannot say where it is still trains."""

    def __init__(self, folder: Path, rank: int, stall_s: float) -> None:
        self.stall_s, self.entered = stall_s, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(folder / f"rank-{rank:05d}.phase", os.O_WRONLY | os.O_CREAT, 0o644)
        self.log = open(folder / f"rank-{rank:05d}.log", "a")  # noqa: SIM115 (faulthandler writes until close)

    def enter(self, phase: str, step: int, shard: str = "") -> None:
        """From now on this worker is in `phase` of `step`; a phase that lasts leaves its stacks in the log.

        `step` counts the steps that are whole."""
        self.entered += 1
        line = json.dumps({"entered": self.entered, "phase": phase, "step": step, "shard": shard})
        with suppress(OSError):
            os.pwrite(self.handle, line[:255].ljust(255).encode() + b"\n", 0)
        faulthandler.dump_traceback_later(self.stall_s * DUMP_AT, file=self.log)

    @contextmanager
    def led(self, phase: str, step: int, lead: bool) -> Iterator[None]:
        """The lead is in `phase`, the others in the wait for it, which the lead enters when it is done."""
        self.enter(phase, step)
        if not lead:
            self.enter("wait", step)
        yield
        if lead:
            self.enter("wait", step)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self.handle)
        self.log.close()


@dataclass(frozen=True)
class Place:
    """Where a worker is; workers do the same phases, so the one that has entered fewer is behind."""

    entered: int
    phase: str
    step: int
    shard: str
    since: float = 0.0  # on the driver's clock, when it was first seen there

    def __str__(self) -> str:
        shard = f", shard {self.shard}" if self.shard else ""
        if self.phase in STEP:
            return f"{self.phase} of step {self.step + (self.phase != 'save')}{shard}"
        return self.phase + (f" after step {self.step}" if self.step else "") + shard


@dataclass(frozen=True)
class Verdict:
    rank: int
    cause: str


class Watch:
    """The driver's eye on one attempt."""

    def __init__(
        self,
        folder: Path,
        world: int,
        stall_s: float,
        start_s: float = 0.0,  # in which the workers may be placed and import what they need
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.world, self.stall_s, self.clock = folder, world, stall_s, clock
        self.start_s = max(start_s, stall_s)
        self.began: float | None = None
        self.places: dict[int, Place] = {}
        self.behind: Counter[int] = Counter()
        self.looks = 0

    def look(self, frozen: Callable[[int], bool]) -> Verdict | None:
        """Who holds up everybody for longer than the time-out; None while anybody moves."""
        self.began = self.clock() if self.began is None else self.began
        for rank in range(self.world):
            found = self._read(rank)
            before = self.places.get(rank)
            if found is not None and (before is None or found["entered"] != before.entered):
                self.places[rank] = Place(**found, since=self.clock())
        idle = self.clock() - max([self.began, *(place.since for place in self.places.values())])
        missing = [rank for rank in range(self.world) if rank not in self.places]
        if missing:
            rank = next((r for r in missing if frozen(r)), missing[0])
            cause = "frozen: stopped by a signal" if frozen(rank) else "does not start"
            return Verdict(rank, f"{cause}, {idle:.0f}s without a sign of life") if idle > self.start_s else None
        if all(place.phase in STEP for place in self.places.values()):
            self.looks += 1
            self.behind.update(self._alone())
        return self._judge(idle, frozen) if idle > self.stall_s else None

    def place(self, rank: int | None) -> str:
        """Where a worker is now, in words; "" where it has not said so."""
        found = self._read(rank) if rank is not None else None
        return str(Place(**found)) if found else ""

    def _read(self, rank: int) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / f"rank-{rank:05d}.phase").read_text())
        except (OSError, ValueError):
            return None

    def _alone(self) -> list[int]:
        """The one worker that all others wait for, if that is how it is."""
        last = min(self.places, key=lambda rank: self.places[rank].entered)
        others = [place for rank, place in self.places.items() if rank != last]
        waits = all(p.phase in WAITING and p.entered > self.places[last].entered for p in others)
        return [last] if others and waits else []

    def _judge(self, idle: float, frozen: Callable[[int], bool]) -> Verdict:
        fewest = min(place.entered for place in self.places.values())
        late = [rank for rank, place in sorted(self.places.items()) if place.entered == fewest]
        rank = next((r for r in late if frozen(r)), late[0])
        if frozen(rank):
            return Verdict(rank, f"frozen: stopped by a signal, {idle:.0f}s without a sign of life")
        if self.places[rank].phase == "data":
            return Verdict(rank, f"stalled reader: {idle:.0f}s without a batch")
        if len(late) == self.world > 1:
            return Verdict(rank, f"stuck collective: all {self.world} workers are there for {idle:.0f}s")
        return Verdict(rank, f"stuck for {idle:.0f}s{', the others wait for it' if self.world > 1 else ''}")

    def slow(self) -> tuple[int, float] | None:
        """(rank, share of the looks in which the others waited for it alone), once for every `SLOW_LOOKS` looks."""
        if self.looks < SLOW_LOOKS:
            return None
        ranked, looks = self.behind.most_common(1), self.looks
        self.behind, self.looks = Counter(), 0
        return (ranked[0][0], ranked[0][1] / looks) if ranked and ranked[0][1] >= SLOW_SHARE * looks else None
