"""Elastic training: decide how many workers the next attempt uses, and when to stop an attempt to scale up.

1. A thread checks every few seconds how many workers the cluster has room for. It is a separate thread because an
   unreachable head delays the reply.
2. A scale-up is possible only after new nodes have stayed in the cluster for `patience_s`.
3. At the first commit after that, the workers are told to stop, so no step is lost. The next attempt uses all slots
   free by then.
4. If the next attempt does not get these slots, because another campaign took them or the nodes have left, the run
   does not try to scale up again for ten minutes. The same applies if the larger attempt ends without a commit, because
   a new node may be broken: the run then falls back to the previous number of workers, on the previous nodes.

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

CHECK_EVERY_S = 3.0  # interval between checks of the room in the cluster
COOLDOWN_S = 600.0  # wait after a failed scale-up; doubles with each failure
MAX_COOLDOWN_S = 86_400.0


@dataclass(frozen=True)
class Proven:
    """The number of workers and the nodes of an attempt with a committed checkpoint."""

    world: int
    nodes: Set[str]


@dataclass
class Sizes:
    """The numbers of workers ("worlds") that a stage's next attempt may use; persists between attempts."""

    worlds: Sequence[int]  # the stage's allowed numbers of workers, largest first
    clock: Callable[[], float] = time.monotonic  # seconds
    limit: int | None = None  # maximum number of workers of the next attempt
    proven: Proven | None = None  # the last attempt with a commit
    target: int = 0  # target of the scale-up for which the previous attempt was stopped; 0 if there was none
    not_before: float = 0.0  # earliest time of the next scale-up, by `clock`
    failures: int = 0  # failed scale-ups since the last successful one

    def open_worlds(self) -> list[int]:
        """Return the numbers of workers that the next attempt may use, largest first."""
        return [world for world in self.worlds if self.limit is None or world <= self.limit]

    def record_start(self, world: int) -> None:
        """Record that an attempt has slots for `world` workers; postpone scaling up if the target was higher."""
        if world < self.target:
            self.postpone_growth()
        self.target = 0

    def record_scale_up(self, target: int) -> None:
        """Record that an attempt was stopped to scale up to `target` workers."""
        self.target = target
        self.limit = None

    def record_commit(self, world: int, nodes: Set[str]) -> None:
        """Record that an attempt has committed a checkpoint."""
        if self.proven is not None and world > self.proven.world:
            self.failures = 0
        self.proven = Proven(world, nodes)

    def fall_back(self, world: int) -> Proven | None:
        """Return the smaller proven attempt to fall back to after a failure with `world` workers, if any."""
        if self.proven is None or world <= self.proven.world:
            return None
        self.limit = self.proven.world
        self.postpone_growth()
        return self.proven

    def postpone_growth(self) -> None:
        """Postpone scaling up for a cooldown period, which doubles with each failure up to a limit."""
        self.not_before = self.clock() + min(COOLDOWN_S * 2**self.failures, MAX_COOLDOWN_S)
        self.failures += 1


@dataclass
class Growth:
    """Watches the cluster during an attempt, and decides when the attempt should stop to scale up."""

    larger: Sequence[int]  # larger numbers of workers that the stage allows
    patience_s: float
    room: Callable[[], int]  # returns how many workers the cluster has room for
    last_step: Callable[[], int]  # returns the step of the newest commit
    not_before: float = 0.0  # earliest time of a scale-up, by `clock`
    clock: Callable[[], float] = time.monotonic  # seconds

    target: int | None = None  # number of workers to scale up to; None until a scale-up is due
    since: dict[int, float] = field(default_factory=dict)  # world size → time since which there has been room for it
    step: int = -1  # step of the newest commit, when last read
    step_before: int | None = None  # step of the newest commit when the scale-up became possible
    has_ended: threading.Event = field(default_factory=threading.Event)  # set when the attempt ends

    def start(self) -> None:
        """Start the thread if the stage allows more workers; setting `has_ended` stops the thread."""
        # Use a daemon thread, because the driver may exit while it waits for a response.
        if self.larger:
            threading.Thread(target=self.watch, name="growth", daemon=True).start()

    def watch(self) -> None:
        """Check every CHECK_EVERY_S seconds how much room the cluster has, until the attempt has ended."""
        while not self.has_ended.wait(CHECK_EVERY_S):
            # Ignore errors: the head may be unreachable, and the next check may succeed.
            with suppress(Exception):
                self.check_room()

    def check_room(self) -> None:
        """Check once how many workers the cluster has room for, and whether scaling up is due."""
        room = self.room()
        now = self.clock()
        since = {}
        for world in self.larger:
            if world <= room:
                since[world] = self.since.get(world, now)
        # Read the step here instead of in `is_due`, because an object store may respond late. Read it first: otherwise
        # `is_due` would compare a late step with none, and take an old checkpoint for a new one.
        if since:
            self.step = self.last_step()
        self.since = since

    def is_due(self) -> bool:
        """Return whether to stop this attempt so that the next attempt can use more workers.

        Returns True if the cluster has had room for more workers for `patience_s` seconds and a checkpoint has been
        committed since then. Once True, the result stays True.
        """
        if self.target is not None:
            return True
        # World sizes for which there has been room for `patience_s`.
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
