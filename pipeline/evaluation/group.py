"""How the workers of an evaluation stay together: each hears of a stop, and of a worker that cannot go on.

1. `agreed` gives a worker its next batch once every worker has its own: no batch goes into the model alone.
2. `at_rank_0_alone` has rank 0 work, which calls `beat` between two pieces of its work. About once a second all workers
   take part in a beat: the watchdog sees that rank 0 moves, and a stop is heard.
3. Both raise EvaluationStopped and EvaluationFailed on all workers alike.

A process without a group, as that of an asynchronous evaluation, is alone: its own error comes out as it is.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from data.errors import PatchlineError, Preempted, exit_code
from data.evaluation import EvaluationBatch
from pipeline.monitoring.watchdog import Phases

Result = TypeVar("Result")
Beat = Callable[[], None]  # called between two blocks of a long computation, which its errors end

BEAT_S = 1.0  # between two beats in which all workers take part


class EvaluationStopped(Preempted):
    """The run was asked to stop, and all workers have left an evaluation between two batches."""


class EvaluationFailed(PatchlineError):
    """An evaluation cannot be finished, which all workers know; carries the exit code of the failure."""

    exit_code: int

    def __init__(self, message: str, exit_code: int, path: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.path = path  # of the set that could not be passed through the model; None: a protocol failed


@dataclass(frozen=True)
class EvaluationGroup:
    """One worker's view of the group that evaluates. All methods are collective."""

    phases: Phases
    device: torch.device
    wants_stop: Callable[[], bool]  # of this worker
    step: int = 0  # of the weights, in phases

    def go_on_together(self, failure: Exception | None = None) -> None:
        """Return where no worker has failed or wants to stop; the phases' log gets the traceback of `failure`.

        Raises EvaluationFailed and EvaluationStopped, on all workers alike.
        """
        if not dist.is_initialized():
            if failure is not None:
                raise failure
            if self.wants_stop():
                raise EvaluationStopped("stopped in an evaluation")
            return
        flags = torch.tensor([failure is not None, self.wants_stop()], dtype=torch.float64, device=self.device)
        dist.all_reduce(flags)
        failures, stops = flags.tolist()
        if failures:
            mine = None
            if failure is not None:
                traceback.print_exception(failure, file=self.phases.log)
                self.phases.log.flush()
                mine = (f"worker {dist.get_rank()}: {type(failure).__name__}: {failure}", exit_code(failure))
            all_failures: list[tuple[str, int] | None] = [mine] * dist.get_world_size()
            dist.all_gather_object(all_failures, mine)
            for first_failure in all_failures:
                if first_failure is not None:
                    raise EvaluationFailed(*first_failure) from failure
        if stops:
            raise EvaluationStopped("stopped in an evaluation")

    def agreed(self, batches: Iterator[EvaluationBatch]) -> Iterator[EvaluationBatch]:
        """Iterate batches, each once every worker has its own.

        Raises EvaluationFailed or EvaluationStopped, on all workers alike, where a worker cannot read on or is asked to
        stop.
        """
        while True:
            batch = None
            failure = None
            try:
                batch = next(batches, None)
            except Exception as error:  # reading and decoding may raise any
                failure = error
            self.go_on_together(failure)
            if batch is None:
                return
            yield batch

    def at_rank_0_alone(self, work: Callable[[Beat], Result], phase: str) -> Result | None:
        """Return the value of `work(beat)` at rank 0; None elsewhere.

        Raises EvaluationFailed and EvaluationStopped, on all workers alike.
        """
        if not dist.is_initialized():
            return work(lambda: self.phases.enter(phase, self.step))
        is_rank_0 = dist.get_rank() == 0
        last_heard = time.monotonic()

        def agree(is_working: bool, failure: Exception | None = None) -> bool:
            """Tell the others whether rank 0 still works, and hear who wants to stop; collective."""
            working = torch.tensor([is_working], dtype=torch.int64, device=self.device)
            dist.broadcast(working, 0)
            self.go_on_together(failure)
            return bool(working.item())

        def beat() -> None:
            nonlocal last_heard
            if time.monotonic() - last_heard < BEAT_S:
                return
            self.phases.enter(phase, self.step)
            agree(is_working=True)
            last_heard = time.monotonic()

        # Rank 0 stays the worker behind: it has entered one phase fewer than those that wait for it.
        with self.phases.led(phase, self.step, is_rank_0):
            if not is_rank_0:
                while agree(is_working=True):
                    self.phases.enter("wait", self.step)
                return None
            result = None
            failure = None
            try:
                result = work(beat)
            except (EvaluationFailed, EvaluationStopped):  # raised by a beat: the others have heard it
                raise
            except Exception as error:
                failure = error
            agree(is_working=False, failure=failure)
        return result
