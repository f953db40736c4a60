"""What the engine adds to a model's passes: measured on a few models, carried over to others by tensors and elements.

In:  EngineTimes of models of 20 to 152 tensors and 0.1 to 39 million elements (measure.ENGINE_MODELS)
Out: Overhead(micro_s=0.009, step_s=0.055) of a model of 152 tensors and 22 million elements

1. Two models of hardly any elements say what the engine adds to every model, and what for each tensor.
2. What larger ones took beyond that grows with the elements: in straight lines between them, in proportion beyond the
   largest. Among workers a small model puts fewer and smaller messages on the network than a large one, and an element
   of it costs something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from data.errors import ConfigError
from models import Size


class EngineKind(NamedTuple):
    """What an engine's cost depends on beside the model and the workers."""

    zero: int
    precision: str
    optimizer: str
    exact: bool = False

    def __str__(self) -> str:
        """Return "ZeRO 2 with adam in bf16"."""
        mode = " in exact mode" if self.exact else ""
        return f"ZeRO {self.zero} with {self.optimizer} in {self.precision}{mode}"


@dataclass(frozen=True)
class EngineTime:
    """What the engine added to the forward and backward passes of a small model.

    Differences of medians, each of them the slowest worker's.
    """

    world: int
    zero: int
    precision: str
    optimizer: str
    exact: bool
    tensors: int
    elements: int
    micro_s: float  # of every micro-batch that a step has more than one
    step_s: float  # of a step of one micro-batch
    micro_cpu_s: float  # the same in processor time of a worker
    step_cpu_s: float

    @property
    def kind(self) -> EngineKind:
        """Return whose time it is."""
        return EngineKind(self.zero, self.precision, self.optimizer, self.exact)


class Overhead(NamedTuple):
    """What the engine adds in seconds: to a step of one micro-batch, and to every other that a step has."""

    micro_s: float
    step_s: float


def overhead_of(times: Sequence[EngineTime], size: Size, *, cpu: bool) -> Overhead:
    """Return the overhead of a model from those of others of one kind and world; `cpu`: in processor seconds."""
    micro = []
    step = []
    for time in times:
        measured = Size(time.tensors, time.elements)
        micro.append((measured, time.micro_cpu_s if cpu else time.micro_s))
        step.append((measured, time.step_cpu_s if cpu else time.step_s))
    return Overhead(carried_over(micro, size), carried_over(step, size))


def carried_over(measured: Sequence[tuple[Size, float]], size: Size) -> float:
    """Return the seconds at a size from those at two sizes or more. Raises ConfigError where there is only one."""
    if len(measured) < 2:
        raise ConfigError("the engine was measured on one model only, from which nothing can be carried over")
    in_order = sorted(measured, key=lambda point: (point[0].elements, point[0].tensors))
    # 1. The two smallest differ in tensors.
    (few, few_s), (many, many_s) = in_order[:2]
    a_tensor_s = max((many_s - few_s) / max(many.tensors - few.tensors, 1), 0.0)
    fixed_s = max(few_s - a_tensor_s * few.tensors, 0.0)
    # 2. What the others took beyond that, by elements.
    points = [(0, 0.0)]
    for other, seconds in in_order[2:]:
        points.append((other.elements, max(seconds - fixed_s - a_tensor_s * other.tensors, 0.0)))
    return fixed_s + a_tensor_s * size.tensors + along(points, size.elements)


def along(points: Sequence[tuple[int, float]], place: int) -> float:
    """Return the value at a place on straight lines from (0, 0) through the points, in proportion beyond the last."""
    for (low, low_value), (high, high_value) in pairwise(points):
        if place <= high:
            return low_value + (high_value - low_value) * (place - low) / (high - low)
    last, last_value = points[-1]
    return last_value * place / last if last else 0.0
