"""What a place beside training offers: one process, as long as nobody else wants the place.

    places.are_free()                                  →  True
    places.run(function, task, folder, on_tick)        →  what `function(task)` returned, in a process of its own

Nothing is ever taken from training, from the queue, or from anybody who waits for a placement group of Ray's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jobs.workers.worker_group import Task, WorkerFunction


class Places(Protocol):
    """Knows of a place for one process beside the worker group. Any thread may ask, one at a time."""

    def are_free(self) -> bool:
        """Tell whether there is a place that nobody wants."""

    def are_wanted(self) -> bool:
        """Tell whether somebody waits for the place that is used."""

    def training_has_ended(self) -> None:
        """Hear that the worker group's own places are free from now on."""

    def run(self, function: WorkerFunction, task: Task, folder: Path, on_tick: Callable[[], None]) -> object:
        """Return what `function(task)` returns in a new process, which leaves its record and log in `folder`.

        `on_tick` is called about twice a second; what it raises ends the process and comes out. Raises NoPlace where
        the place is gone, WorkerGroupError where the process fails.
        """


class NoPlace(Exception):
    """The place that seemed to be free is not, or is not any more."""
