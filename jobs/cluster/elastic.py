"""On how many workers a stage's next attempt may run, and when an attempt is to make room for a larger one.

1. A thread asks every few seconds for how many workers the cluster has room, because a head that is away answers late.
2. Nodes that have joined must stay for `patience_s`: only then is there a larger world.
3. The first commit after that is the moment: the workers are asked to stop, which loses no step, and the next attempt
   takes the places that are there then.
4. Where it does not get them, nothing is tried again for ten minutes: another campaign was faster, or nodes come and
   go. The same where the larger attempt ends without a commit: a node that has joined may be broken. A run that did
   well with fewer workers must not end by it, and goes on with those, on their nodes.

    growth = Growth((4, 3), 60.0, room, last_step)      # of an attempt of two workers
    growth.start()
    growth.is_due()  →  True                            # after a commit, 60 s after a third node has joined
    growth.target    →  3
"""

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

LOOK_S = 3.0  # between two questions for how many workers there is room
AGAIN_S = 600.0  # before growing is tried again where it failed; doubles with each failure
LONGEST_AGAIN_S = 86_400.0


@dataclass(frozen=True)
class Proven:
    """Tells on how many workers and on which nodes an attempt has committed."""

    world: int
    nodes: Set[str]


@dataclass
class Sizes:
    """Knows, from attempt to attempt of a stage, which worlds the next one may have."""

    worlds: Sequence[int]  # that the stage allows, the largest first
    clock: Callable[[], float] = time.monotonic  # seconds
    limit: int | None = None  # the next attempt has no more
    proven: Proven | None = None  # the last attempt that has committed
    target: int = 0  # the world for which the attempt before was stopped
    not_before: float = 0.0  # when growing may be tried, on the clock
    failures: int = 0  # to grow, since the last success

    def open_worlds(self) -> list[int]:
        """Return the worlds that the next attempt may have, the largest first."""
        return [world for world in self.worlds if self.limit is None or world <= self.limit]

    def begins(self, world: int) -> None:
        """Take down that an attempt has places for so many workers."""
        if world < self.target:
            self.postpone_growth()
        self.target = 0

    def grows(self, target: int) -> None:
        """Take down that an attempt was stopped for a larger one."""
        self.target = target
        self.limit = None

    def has_committed(self, world: int, nodes: Set[str]) -> None:
        """Take down that an attempt has committed."""
        if self.proven is not None and world > self.proven.world:
            self.failures = 0
        self.proven = Proven(world, nodes)

    def fall_back(self, world: int) -> Proven | None:
        """Return to which attempt to go back from one that ended without a commit; None where it was not larger."""
        if self.proven is None or world <= self.proven.world:
            return None
        self.limit = self.proven.world
        self.postpone_growth()
        return self.proven

    def postpone_growth(self) -> None:
        """Try no growing for a while."""
        self.not_before = self.clock() + min(AGAIN_S * 2**self.failures, LONGEST_AGAIN_S)
        self.failures += 1


@dataclass
class Growth:
    """Watches one attempt, which is to make room for a larger one."""

    larger: Sequence[int]  # worlds that it might have instead
    patience_s: float
    room: Callable[[], int]  # returns for how many workers the cluster has room
    last_step: Callable[[], int]  # returns the step of the newest commit
    not_before: float = 0.0  # when growing may be tried, on the clock
    clock: Callable[[], float] = time.monotonic  # seconds

    target: int | None = None  # the world for which the workers are to stop, once that is due
    since: dict[int, float] = field(default_factory=dict)  # world → from when on there was room for it without a break
    step: int = -1  # of the newest commit, as last seen
    step_before: int | None = None  # of the newest commit when there was room for the first time
    has_ended: threading.Event = field(default_factory=threading.Event)  # the attempt

    def start(self) -> None:
        """Start to watch, where there is anything to grow to; setting `has_ended` ends it."""
        # A daemon, because the driver may end while the thread waits for an answer.
        if self.larger:
            threading.Thread(target=self.watch, name="growth", daemon=True).start()

    def watch(self) -> None:
        """Look every few seconds until the attempt has ended."""
        while not self.has_ended.wait(LOOK_S):
            # The head may be away: the next look asks again.
            with suppress(Exception):
                self.look()

    def look(self) -> None:
        """Ask once for how many workers there is room."""
        room = self.room()
        now = self.clock()
        since = {}
        for world in self.larger:
            if world <= room:
                since[world] = self.since.get(world, now)
        self.since = since
        # Asked here and not in `is_due`, because an object store may take long to answer.
        if since:
            self.step = self.last_step()

    def is_due(self) -> bool:
        """Tell whether there is a larger world, and a checkpoint has been committed since; then it stays due."""
        if self.target is not None:
            return True
        # The largest world for which there has been room for long enough.
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
