"""How long an operator takes that was measured in other shapes: by the rate of its neighbours, or by its bytes.

In:  (Operation("mm", "float32", 2_000_000, 120_000, (100, 100, 100, 1)), 0.004 s), and others that were measured
Out: a product of twice the FLOPs in a shape nearby takes 0.008 s, a sum of twice a measured one's bytes twice its time
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pipeline.plan.operations import PRODUCTS, Operation

NEIGHBOURS = 4  # measured shapes that a product of another shape goes by


class Rates:
    """Answers how long an operator takes, from those that were measured."""

    def __init__(self, samples: Iterable[tuple[Operation, float]]) -> None:
        self.exact: dict[Operation, float] = {}
        self.curves: dict[tuple[str, str], Curve] = {}  # made when they are first asked for
        self.alike: dict[tuple[str, str], list[tuple[Operation, float]]] = {}
        self.moving: dict[str, list[tuple[int, float]]] = {}  # by type: (bytes, seconds) of all that computes little
        for operation, seconds in samples:
            self.exact[operation] = seconds
            self.alike.setdefault(kind_of(operation), []).append((operation, seconds))
            if not operation.flops:
                self.moving.setdefault(operation.dtype, []).append((operation.bytes, seconds))

    def seconds_of(self, operation: Operation) -> tuple[float, bool]:
        """Return the seconds of a call, and whether its operator was measured, in this shape or in others."""
        if operation in self.exact:
            return self.exact[operation], True
        samples = self.alike.get(kind_of(operation))
        if samples and operation.flops:
            return operation.flops / nearby_rate(operation, samples), True
        if samples:
            kind = kind_of(operation)
            if kind not in self.curves:
                self.curves[kind] = Curve([(sample.bytes, seconds) for sample, seconds in samples])
            return self.curves[kind].at(operation.bytes), True
        # Never seen: it moves its bytes as others do.
        anything = self.moving.get(operation.dtype) or [point for points in self.moving.values() for point in points]
        return Curve(anything).at(operation.bytes), False


def kind_of(operation: Operation) -> tuple[str, str]:
    """Return what operators have in common that are measured by one another: addmm and mm are one kind."""
    name = operation.name
    if name in PRODUCTS:
        name = "bmm" if operation.shape[3] > 1 else "mm"
    return name, operation.dtype


def nearby_rate(operation: Operation, samples: Sequence[tuple[Operation, float]]) -> float:
    """Return the FLOP/s at the shape of an operation: of those nearest to it, the near ones weighing most."""
    target = coordinates(operation)
    ranked = []
    for sample, seconds in samples:
        distance = math.dist(target, coordinates(sample))
        ranked.append((distance, sample.flops / max(seconds, 1e-9)))
    ranked.sort()
    weights = 0.0
    logarithms = 0.0
    for distance, rate in ranked[:NEIGHBOURS]:
        weight = 1 / (distance + 0.05) ** 2
        weights += weight
        logarithms += weight * math.log(max(rate, 1.0))
    return math.exp(logarithms / weights)


def coordinates(operation: Operation) -> tuple[float, ...]:
    """Return where an operation stands among others: the logarithms of its lengths, or of its FLOPs and bytes."""
    lengths = operation.shape or (max(operation.flops, 1), max(operation.bytes, 1))
    return tuple(math.log2(max(length, 1)) for length in lengths)


class Curve:
    """Seconds by bytes: a straight line in logarithms between measured sizes, in proportion beyond the largest.

    Several times of one size count with their median. Below the smallest size it is the smallest's time.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        times: dict[int, list[float]] = {}
        for measured, seconds in points:
            times.setdefault(max(measured, 1), []).append(max(seconds, 1e-9))
        self.sizes = sorted(times)
        self.medians = [sorted(times[size])[len(times[size]) // 2] for size in self.sizes]

    def at(self, size: int) -> float:
        """Return the seconds for so many bytes."""
        sizes = self.sizes
        medians = self.medians
        if size <= sizes[0]:
            return medians[0]
        if size >= sizes[-1]:
            return medians[-1] * size / sizes[-1]
        above = bisect_left(sizes, size)
        share = math.log(size / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
        return math.exp((1 - share) * math.log(medians[above - 1]) + share * math.log(medians[above]))
