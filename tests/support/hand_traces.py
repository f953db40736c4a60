"""A memory trace computed by hand, for tests of planning and of memory checks."""

from collections.abc import Callable

from pipeline.extras.plan.memory import GIB
from pipeline.extras.plan.memory_traces import MemoryTrace, Moment, StepToTrace


def trace_by_hand(step: StepToTrace, report: Callable[[str], None]) -> MemoryTrace:
    """Return a trace of 2 GiB plus 1 GiB per image, or half if all blocks are recomputed; states follow ZeRO."""
    share = 1 - step.recomputed / 24
    states = {1: 2.0, 2: 1.0, 3: 0.25}[step.config["zero"]]
    moment = Moment("backward", (states * GIB, 0, 0, 0, 0), (0, share * GIB, 0, 0, 0))
    return MemoryTrace(0, (moment,), (moment,))
