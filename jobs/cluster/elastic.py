"""Elastic training: how many workers the next attempt of a stage uses, and when a running attempt stops to grow.

1. A thread checks every few seconds how many workers the cluster has room for. It is a thread because an unreachable
   head answers late.
2. Growing is possible only after new nodes have stayed for `patience_s`.
3. At the first commit after that, the workers are asked to stop, which loses no step. The next attempt uses all places
   that are free then.
4. If the next attempt does not get the places, because another campaign was faster or the nodes have left, the run does
   not try to grow for ten minutes. The same applies if the larger attempt ends without a commit, because a new node may
   be broken: the run then continues with the previous number of workers, on their nodes.

    growth = Growth((4, 3), 60.0, room, last_step)      # for an attempt with two workers
    growth.start()
    growth.is_due()  →  True                            # after a commit, 60 s after a third node has joined
    growth.target    →  3
"""

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

LOOK_S = 3.0  # between two checks of the room in the cluster
AGAIN_S = 600.0  # before the next try to grow after a failed one; doubles with each failure
LONGEST_AGAIN_S = 86_400.0


@dataclass(frozen=True)
class Proven:
    """The number of workers and the nodes of a committed attempt."""

    world: int
    nodes: Set[str]


@dataclass
class Sizes:
    """The numbers of workers ("worlds") that the next attempt of a stage may use; kept between attempts."""

    worlds: Sequence[int]  # the stage's allowed numbers of workers, largest first
    clock: Callable[[], float] = time.monotonic  # seconds
    limit: int | None = None  # maximum number of workers of the next attempt
    proven: Proven | None = None  # the last attempt with a commit
    target: int = 0  # the number of workers for which the previous attempt was stopped; 0 if it was not
    not_before: float = 0.0  # earliest time to grow, by `clock`
    failures: int = 0  # failed tries to grow since the last success

    def open_worlds(self) -> list[int]:
        """Return the numbers of workers that the next attempt may use, largest first."""
        return [world for world in self.worlds if self.limit is None or world <= self.limit]

    def begins(self, world: int) -> None:
        """Record that an attempt has places for `world` workers; if it did not grow as planned, postpone growth."""
        if world < self.target:
            self.postpone_growth()
        self.target = 0

    def grows(self, target: int) -> None:
        """Record that an attempt was stopped in order to grow to `target` workers."""
        self.target = target
        self.limit = None

    def has_committed(self, world: int, nodes: Set[str]) -> None:
        """Record that an attempt has committed a checkpoint."""
        if self.proven is not None and world > self.proven.world:
            self.failures = 0
        self.proven = Proven(world, nodes)

    def fall_back(self, world: int) -> Proven | None:
        """Return the attempt to fall back to after a larger one made no commit; None if it was not larger."""
        if self.proven is None or world <= self.proven.world:
            return None
        self.limit = self.proven.world
        self.postpone_growth()
        return self.proven

    def postpone_growth(self) -> None:
        """Suspend scale-up for a cooldown period, which doubles each time up to a limit."""
        self.not_before = self.clock() + min(AGAIN_S * 2**self.failures, LONGEST_AGAIN_S)
        self.failures += 1


@dataclass
class Growth:
    """Watches one attempt and determines when it should stop to make room for a larger one."""

    larger: Sequence[int]  # larger numbers of workers that the stage allows
    patience_s: float
    room: Callable[[], int]  # returns how many workers the cluster has room for
    last_step: Callable[[], int]  # returns the step of the newest commit
    not_before: float = 0.0  # earliest time to grow, by `clock`
    clock: Callable[[], float] = time.monotonic  # seconds

    target: int | None = None  # target number of workers once a scale-up is due
    since: dict[int, float] = field(default_factory=dict)  # world size → time since which there has been room for it
    step: int = -1  # step of the newest commit, as last read
    step_before: int | None = None  # step of the latest commit when scale-up first became possible
    has_ended: threading.Event = field(default_factory=threading.Event)  # set at the end of the attempt

    def start(self) -> None:
        """Start watching if there is a larger world; setting `has_ended` stops the thread."""
        # A daemon thread: the driver may exit while the thread waits for an answer.
        if self.larger:
            threading.Thread(target=self.watch, name="growth", daemon=True).start()

    def watch(self) -> None:
        """Check the room every few seconds until the attempt has ended."""
        while not self.has_ended.wait(LOOK_S):
            # The head may be unreachable: check again next time.
            with suppress(Exception):
                self.look()

    def look(self) -> None:
        """Check once how many workers the cluster has room for."""
        room = self.room()
        now = self.clock()
        since = {}
        for world in self.larger:
            if world <= room:
                since[world] = self.since.get(world, now)
        self.since = since
        # Read here and not in `is_due`, because an object store may answer late.
        if since:
            self.step = self.last_step()

    def is_due(self) -> bool:
        """Return whether to stop this attempt so that the next one can use more workers.

        It is true if capacity has been stable and a checkpoint has been committed since. Once true, it stays true.
        """
        if self.target is not None:
            return True
        # Worlds for which there has been room for `patience_s`.
        now = self.clock()
        stable = [world for world, since in self.since.items() if now >= since + self.patience_s]
        if now < self.not_before or not stable:
            self.step_before = None
            return False
        if self.step_before is None:
            self.step_before = self.step
        if self.step > self.step_before:
            self.target = max(stable)
        return self.target is not None
