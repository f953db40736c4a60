"""What a calibration has measured, and the file that it is kept in.

In:  what the workers of `jobs calibrate` have measured, as JSON (pipeline/planning/measure.py)
Out: calibration.json in the user's state folder: a sealed record, and from it a `Calibration`

Everything that a forecast asks is answered here or refused with what to type: the seconds of an operator
(`seconds_of`), of what DeepSpeed adds (`engine_seconds`), of a collective (`collective_s`), what workers that compute
at once take from one another (`together`).
"""

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import ConfigError, DataError
from data.files import state_folder
from data.images.augment import AugmentConfig
from pipeline import config, handover
from pipeline.planning.operations import PRODUCTS, Operation, Trace

CALIBRATION_SCHEMA = 1
FILE_VARIABLE = "PATCHLINE_CALIBRATION"  # names another file than that of the state folder
NEIGHBOURS = 4  # measured shapes that a product of another shape goes by


class Hardware(NamedTuple):
    """What a machine computes with."""

    processor: str  # of /proc/cpuinfo, or of the platform
    cores: int  # that this process may use
    device: str  # "cpu", or the name of the GPU


class Storage(NamedTuple):
    """How fast the run's storage is, from the slowest node; all nodes write and read at once."""

    folder: str
    write_bytes_per_s: float  # fsync included
    read_bytes_per_s: float  # past the page cache, where it lets itself be emptied


@dataclass(frozen=True)
class EngineTime:
    """What the engine added to the forward and backward passes of a small model; medians of the slowest worker."""

    world: int
    zero: int
    precision: str
    optimizer: str
    exact: bool
    tensors: int
    elements: int
    micro_s: float  # of a micro-batch behind which no step is taken
    step_s: float  # of one behind which one is
    micro_cpu_s: float  # the same in processor time of a worker
    step_cpu_s: float


class Overhead(NamedTuple):
    """What the engine adds in seconds: to every micro-batch but the last of a step, and to that one."""

    micro_s: float
    step_s: float


@dataclass(frozen=True)
class Calibration:
    """What was measured, JSON but for the operations, which are looked up."""

    date: str
    driver: Hardware  # the machine of the command
    worker: Hardware  # of the slowest node
    versions: Mapping[str, str]
    threads: int  # of a worker
    gpus: int
    backend: str
    nodes: int
    workers_on_a_node: int
    operations: Mapping[str, Sequence[tuple[Operation, float]]]  # by precision: what was called, median seconds
    call_s: Mapping[str, float]  # by precision: what a call costs beside its operator, mostly autograd and Python
    together: Mapping[str, Sequence[tuple[int, float]]]  # by precision: (workers of a node at once, times as long)
    engines: Sequence[EngineTime]
    collectives: Mapping[int, Mapping[str, Sequence[tuple[int, float]]]]  # by world, by name: (bytes, seconds)
    copy_bytes_per_s: float  # of a copy in memory, as a save begins
    storage: Storage | None = None
    decode: Mapping[str, float] = field(default_factory=dict)  # by set, size and augmentation: images a CPU-second
    noise: float = 0.0  # spread of one product's times through the measurement: interquartile range over median
    load: float = 0.0  # of the driver's machine when it began

    # -------------------------------------------------------------------- operators

    def compute_s(self, trace: Trace, precision: str) -> tuple[float, float, float]:
        """Return the seconds of a traced micro-batch's forward and backward pass, one worker alone on its cores.

        The third number is the share of it that stands on operators which were not measured. Raises ConfigError where
        nothing was measured in this precision.
        """
        rates = self._rates(precision)
        passes = []
        unmeasured_s = 0.0
        for operations, calls in ((trace.forward, trace.forward_calls), (trace.backward, trace.backward_calls)):
            total = calls * self.call_s[precision]
            for operation, count in operations.items():
                seconds, is_measured = rates.seconds_of(operation)
                total += count * seconds
                if not is_measured:
                    unmeasured_s += count * seconds
            passes.append(max(total, 0.0))
        forward_s, backward_s = passes
        return forward_s, backward_s, unmeasured_s / max(forward_s + backward_s, 1e-12)

    def _rates(self, precision: str) -> "Rates":
        if not self.operations.get(precision):
            known = ", ".join(self.operations) or "none"
            raise ConfigError(f"measured in {known}, the stage computes in {precision}")
        return Rates(self.operations[precision])

    def slowdown(self, precision: str, workers: int) -> float:
        """Return how many times as long a worker's operators take where so many of a node compute at once.

        More workers than the node has cores take turns, which is not counted here.
        """
        at_once = workers
        if not self.gpus:
            at_once = min(workers, max(self.worker.cores // self.threads, 1))
        points = [(1, 1.0), *self.together.get(precision, ())]
        return interpolated(at_once, points)

    # -------------------------------------------------------------------- the engine and the links

    def engine_s(
        self, world: int, zero: int, precision: str, optimizer: str, exact: bool, tensors: int, elements: int, cpu: bool
    ) -> Overhead:
        """Return what the engine adds to a micro-batch and to a step; with `cpu` in processor seconds of a worker.

        Raises ConfigError where this stage, precision or optimizer was not measured, or no world of more than one.
        """
        alike = [
            time
            for time in self.engines
            if (time.zero, time.precision, time.optimizer, time.exact) == (zero, precision, optimizer, exact)
        ]
        if not alike:
            kind = " in exact mode" if exact else ""
            raise ConfigError(f"ZeRO {zero} with {optimizer} in {precision}{kind} was not measured")
        worlds = sorted({time.world for time in alike})
        if world in worlds:
            return fitted([time for time in alike if time.world == world], tensors, elements, cpu)
        largest = worlds[-1]
        if largest == 1:
            raise ConfigError(f"the links between workers were not measured, only 1 worker: {world} cannot be forecast")
        # Between what was measured, and beyond it, the part of the links grows as a ring's all-reduce does.
        nearest = min((w for w in worlds if w > 1), key=lambda w: abs(math.log(w / world)))
        there = fitted([time for time in alike if time.world == nearest], tensors, elements, cpu)
        if 1 not in worlds:
            return there
        alone = fitted([time for time in alike if time.world == 1], tensors, elements, cpu)
        growth = self.growth(world, nearest, 4 * elements)
        return Overhead(
            max(alone.micro_s + growth * (there.micro_s - alone.micro_s), 0.0),
            max(alone.step_s + growth * (there.step_s - alone.step_s), 0.0),
        )

    def growth(self, world: int, measured_world: int, size: int) -> float:
        """Return how many times as long so many bytes are summed by `world` workers as by `measured_world`."""
        if world in self.collectives and measured_world in self.collectives:
            return self.collective_s("all_reduce", world, size) / self.collective_s("all_reduce", measured_world, size)
        return ring(world) / ring(measured_world)

    def collective_s(self, name: str, world: int, size: int) -> float:
        """Return the seconds of a collective of so many bytes; 0 of one worker. Raises ConfigError."""
        if world == 1:
            return 0.0
        worlds = [w for w in self.collectives if name in self.collectives[w]]
        if not worlds:
            raise ConfigError(f"{name} was not measured, only 1 worker: {world} cannot be forecast")
        nearest = min(worlds, key=lambda w: abs(math.log(w / world)))
        seconds = Curve(self.collectives[nearest][name]).at(size)
        return seconds * ring(world) / ring(nearest)

    def is_measured(self, world: int) -> bool:
        """Tell whether a group of so many workers was measured."""
        return any(time.world == world for time in self.engines)


def decode_key(path: str, image_size: int, augment: AugmentConfig) -> str:
    """Return the name of a decoding rate: a set at an image size, augmented in one way, of which it has the digest."""
    return f"{path} at {image_size} px, augmented {config.digest(config.plain(augment))[:8]}"


def ring(world: int) -> float:
    """Return how much of a gradient a worker sends in a ring's all-reduce (Patarasuk and Yuan 2009): 2 (w - 1) / w."""
    return 2 * (world - 1) / world


# ------------------------------------------------------------------------ between what was measured


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


def interpolated(at: float, points: Sequence[tuple[int, float]]) -> float:
    """Return the value at a place between points (place, value), and beyond them that of the last."""
    ordered = sorted(dict(points).items())
    for (low, low_value), (high, high_value) in pairwise(ordered):
        if low <= at <= high:
            return low_value + (high_value - low_value) * (at - low) / (high - low)
    return ordered[-1][1] if at > ordered[-1][0] else ordered[0][1]


def fitted(times: Sequence[EngineTime], tensors: int, elements: int, cpu: bool) -> Overhead:
    """Return the overhead of a model from those of others: a constant, so much a tensor, so much an element."""
    rows = [(1.0, float(time.tensors), float(time.elements)) for time in times]
    target = (1.0, float(tensors), float(elements))
    micro = [time.micro_cpu_s if cpu else time.micro_s for time in times]
    step = [time.step_cpu_s if cpu else time.step_s for time in times]
    return Overhead(at(target, rows, micro), at(target, rows, step))


def at(target: Sequence[float], rows: Sequence[Sequence[float]], values: Sequence[float]) -> float:
    """Return the value at `target` of the linear function without negative factors that fits the rows best."""
    import numpy as np

    matrix = np.array(rows)
    scale = matrix.max(axis=0)
    # A factor that comes out negative is noise: it is left out, and the others are fitted again.
    kept = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    while kept:
        factors, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.array(values), rcond=None)
        worst = int(np.argmin(factors))
        if factors[worst] >= 0:
            return float(sum(factors[n] * target[column] / scale[column] for n, column in enumerate(kept)))
        del kept[worst]
    return 0.0


# ------------------------------------------------------------------------ the file


def calibration_file() -> Path:
    """Return where this user's calibration is kept, unless the environment names another file."""
    named = os.environ.get(FILE_VARIABLE)
    return Path(named).expanduser() if named else state_folder() / "calibration.json"


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as a record that carries its own digest."""
    plain = asdict(calibration)
    for precision, samples in calibration.operations.items():
        plain["operations"][precision] = [row_of(operation, seconds) for operation, seconds in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    handover.write_record(path, {"calibration": CALIBRATION_SCHEMA, "values": plain})


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises DataError where it is not there, torn, altered, or of another version."""
    try:
        record = handover.read_record(path).values
    except FileNotFoundError:
        raise DataError(f"{path}: there is no calibration\n  type python -m jobs calibrate") from None
    schema = record.get("calibration")
    if schema != CALIBRATION_SCHEMA:
        raise DataError(
            f"{path} is a calibration of schema {schema}, expected {CALIBRATION_SCHEMA}\n"
            "  type python -m jobs calibrate, which writes it anew"
        )
    try:
        return of_plain(record["values"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} holds no calibration: {type(error).__name__}: {error}\n  type python -m jobs calibrate"
        ) from None


def of_plain(plain: Mapping[str, Any]) -> Calibration:
    """Return a calibration from JSON."""
    values = dict(plain)
    values["driver"] = Hardware(*plain["driver"])
    values["worker"] = Hardware(*plain["worker"])
    values["storage"] = None if plain["storage"] is None else Storage(*plain["storage"])
    values["engines"] = [EngineTime(**time) for time in plain["engines"]]
    # JSON knows neither tuples nor numbers as names.
    values["together"] = {precision: pairs(points) for precision, points in plain["together"].items()}
    collectives = {}
    for world, times in plain["collectives"].items():
        collectives[int(world)] = {name: pairs(points) for name, points in times.items()}
    values["collectives"] = collectives
    operations = {}
    for precision, rows in plain["operations"].items():
        operations[precision] = [of_row(row) for row in rows]
    values["operations"] = operations
    unknown = set(values) - {part.name for part in fields(Calibration)}
    if unknown:
        raise KeyError(min(unknown))
    return Calibration(**values)


def pairs(points: Iterable[Sequence[float]]) -> list[tuple[int, float]]:
    """Return points from JSON."""
    return [(int(place), value) for place, value in points]


def row_of(operation: Operation, seconds: float) -> str:
    """Return an operator and its seconds as a line of the file: "mm float32 697171968 6610944 1152x384x788x1 0.007"."""
    shape = "x".join(str(length) for length in operation.shape) or "-"
    return f"{operation.name} {operation.dtype or '-'} {operation.flops} {operation.bytes} {shape} {seconds:.4g}"


def of_row(row: str) -> tuple[Operation, float]:
    """Return what `row_of` was made of. Raises ValueError."""
    name, dtype, flops, size, shape, seconds = row.split(" ")
    lengths: tuple[int, ...] = ()
    if shape != "-":
        lengths = tuple(int(length) for length in shape.split("x"))
    return Operation(name, dtype if dtype != "-" else "", int(flops), int(size), lengths), float(seconds)
