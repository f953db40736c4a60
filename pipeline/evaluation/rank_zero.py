"""What rank 0 computes alone while the others wait, and all still hear of a stop, and of a failure of rank 0.

1. Rank 0 works, and calls `beat` between two pieces. About once a second a beat is heard by all: the watchdog sees
   that rank 0 moves, and every worker says whether it is asked to stop.
2. The others wait for the next beat that is heard, or for the end.

Rank 0 stays the one behind: it has entered one phase fewer than those that wait for it.
"""

import time
from collections.abc import Callable
from typing import IO, TypeVar

import torch
import torch.distributed as dist

from pipeline.evaluation.evaluate import EvaluationFailed, EvaluationStopped, go_on_together
from pipeline.evaluation.probe import Beat
from pipeline.monitoring.watchdog import Phases

Result = TypeVar("Result")

BEAT_S = 1.0  # between two beats that all hear


def at_rank_0_alone(
    work: Callable[[Beat], Result],
    phase: str,
    *,
    phases: Phases,
    wants_stop: Callable[[], bool],
    device: torch.device,
    log: IO[str],
    step: int = 0,
) -> Result | None:
    """Collective: return what `work(beat)` gives at rank 0; None elsewhere.

    Raises EvaluationFailed and EvaluationStopped, on all workers alike.
    """
    is_rank_0 = dist.get_rank() == 0
    last_heard = time.monotonic()

    def agree(is_working: bool, failure: Exception | None = None) -> bool:
        """Collective: tell the others whether rank 0 still works, and hear who wants to stop; return what is told."""
        working = torch.tensor([is_working], dtype=torch.int64, device=device)
        dist.broadcast(working, 0)
        go_on_together(failure, wants_stop, device, log)
        return bool(working.item())

    def beat() -> None:
        nonlocal last_heard
        if time.monotonic() - last_heard < BEAT_S:
            return
        phases.enter(phase, step)
        agree(is_working=True)
        last_heard = time.monotonic()

    with phases.led(phase, step, is_rank_0):
        if not is_rank_0:
            while agree(is_working=True):
                phases.enter("wait", step)
            return None
        result = None
        failure = None
        try:
            result = work(beat)
        except (EvaluationFailed, EvaluationStopped):  # out of a beat: the others have heard it
            raise
        except Exception as error:
            failure = error
        agree(is_working=False, failure=failure)
    return result
