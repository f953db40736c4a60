"""Who holds up the gang: every worker says which phase it enters, the driver judges when nobody enters one any more.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WATCHED = ("data", "forward", "backward", "reduce", "save")
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
        """From now on this worker is in `phase` of `step`; a phase that lasts leaves its stacks in the log."""
        self.entered += 1
        line = json.dumps({"entered": self.entered, "phase": phase, "step": step, "shard": shard})
        with suppress(OSError):
            os.pwrite(self.handle, line[:255].ljust(255).encode() + b"\n", 0)
        if phase in WATCHED:
            faulthandler.dump_traceback_later(self.stall_s * DUMP_AT, file=self.log)
        else:
            faulthandler.cancel_dump_traceback_later()

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
    since: float  # on the driver's clock, when it was first seen there


@dataclass(frozen=True)
class Verdict:
    rank: int
    cause: str


class Watch:
    """The driver's eye on one attempt."""

    def __init__(self, folder: Path, world: int, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.world, self.stall_s, self.clock = folder, world, stall_s, clock
        self.places: dict[int, Place] = {}
        self.behind: Counter[int] = Counter()
        self.looks = 0

    def look(self, frozen: Callable[[int], bool]) -> Verdict | None:
        """Who holds up everybody for longer than the time-out; None while anybody moves, starts or evaluates."""
        for rank in range(self.world):
            found = self._read(rank)
            before = self.places.get(rank)
            if found is not None and (before is None or found["entered"] != before.entered):
                self.places[rank] = Place(**found, since=self.clock())
        if len(self.places) < self.world or any(p.phase not in WATCHED for p in self.places.values()):
            return None
        self.looks += 1
        self.behind.update(self._alone())
        idle = self.clock() - max(place.since for place in self.places.values())
        return self._judge(idle, frozen) if idle > self.stall_s else None

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
        place = self.places[rank]
        where = f"{place.phase} of step {place.step + 1}"
        if frozen(rank):
            return Verdict(rank, f"frozen: stopped by a signal in {where}, {idle:.0f}s without a sign of life")
        if place.phase == "data":
            return Verdict(rank, f"stalled reader: {idle:.0f}s without a batch in {where}, shard {place.shard}")
        if len(late) == self.world:
            return Verdict(rank, f"stuck collective: all {self.world} workers are in {where} for {idle:.0f}s")
        return Verdict(rank, f"stuck in {where} for {idle:.0f}s, the others wait for it")

    def slow(self) -> tuple[int, float] | None:
        """(rank, share of the looks in which the others waited for it alone), once for every `SLOW_LOOKS` looks."""
        if self.looks < SLOW_LOOKS:
            return None
        ranked, looks = self.behind.most_common(1), self.looks
        self.behind, self.looks = Counter(), 0
        return (ranked[0][0], ranked[0][1] / looks) if ranked and ranked[0][1] >= SLOW_SHARE * looks else None
