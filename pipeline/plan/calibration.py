"""What a calibration has measured, and the file that it is kept in.

In:  what the workers of `jobs calibrate` have measured, as JSON (pipeline/plan/measure.py)
Out: calibration.json in the user's state folder: a sealed record, and from it a `Calibration`

Everything that a forecast asks is answered here or refused with what to type: the seconds of a traced micro-batch's
operators (`compute_s`), of what the engine adds (`engine_s`), of a collective (`collective_s`), and how many times as
long workers take that compute at once (`slowdown`).
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import ConfigError, DataError
from data.files import state_folder
from data.images.augment import AugmentConfig
from models import Size
from pipeline import artifacts, config
from pipeline.plan.engine_cost import EngineKind, EngineTime, Overhead, overhead_of
from pipeline.plan.operations import Operation, Trace
from pipeline.plan.rates import Curve, Rates

CALIBRATION_SCHEMA = 3  # 1 had no engine of a large model; 2 timed engines that skipped their steps
FILE_VARIABLE = "PATCHLINE_CALIBRATION"  # names another file than that of the state folder


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
    together: Mapping[str, Sequence[tuple[int, float]]]  # (workers of a node at once, times as long), one or none
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

    def _rates(self, precision: str) -> Rates:
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
        # Measured is a worker alone, and as many as a node has; company grows in proportion between the two.
        points = self.together.get(precision)
        if not points:
            return 1.0
        measured, ratio = points[0]
        return 1 + (ratio - 1) * min((at_once - 1) / (measured - 1), 1)

    # -------------------------------------------------------------------- the engine and the links

    def engine_s(self, world: int, kind: EngineKind, size: Size, *, cpu: bool) -> Overhead:
        """Return what the engine adds to a micro-batch and to a step; with `cpu` in processor seconds of a worker.

        Raises ConfigError where this stage, precision or optimizer was not measured, or no world of more than one.
        """
        by_world: dict[int, list[EngineTime]] = {}
        for time in self.engines:
            if time.kind == kind:
                by_world.setdefault(time.world, []).append(time)
        if not by_world:
            raise ConfigError(f"{kind} was not measured")
        if world in by_world:
            return overhead_of(by_world[world], size, cpu=cpu)
        together_worlds = [measured for measured in by_world if measured > 1]
        if not together_worlds:
            raise ConfigError(f"the links between workers were not measured, only 1 worker: {world} cannot be forecast")
        nearest = nearest_world(world, together_worlds)
        together = overhead_of(by_world[nearest], size, cpu=cpu)
        if 1 not in by_world:
            return together
        # Between what was measured, and beyond it, the part of the links grows as a sum of the gradients does.
        alone = overhead_of(by_world[1], size, cpu=cpu)
        growth = self.growth(world, nearest, 4 * size.elements)
        micro_s = alone.micro_s + growth * (together.micro_s - alone.micro_s)
        step_s = alone.step_s + growth * (together.step_s - alone.step_s)
        return Overhead(max(micro_s, 0.0), max(step_s, 0.0))

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
        nearest = nearest_world(world, worlds)
        seconds = Curve(self.collectives[nearest][name]).at(size)
        return seconds * ring(world) / ring(nearest)

    def is_measured(self, world: int) -> bool:
        """Tell whether a group of so many workers was measured."""
        return any(time.world == world for time in self.engines)


def decode_key(path: str, image_size: int, augment: AugmentConfig) -> str:
    """Return the name of a decoding rate: a set at an image size, augmented in one way, of which it has the digest."""
    return f"{path} at {image_size} px, augmented {config.digest(config.plain(augment))[:8]}"


def nearest_world(world: int, worlds: Sequence[int]) -> int:
    """Return the world nearest to another: 4 is as near to 2 as to 8."""
    return min(worlds, key=lambda other: abs(math.log(other / world)))


def ring(world: int) -> float:
    """Return how much of a gradient a worker sends in a ring's all-reduce (Patarasuk and Yuan 2009): 2 (w - 1) / w."""
    return 2 * (world - 1) / world


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
    artifacts.write_record(path, {"calibration": CALIBRATION_SCHEMA, "values": plain})


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises DataError where it is not there, torn, altered, or of another version."""
    try:
        record = artifacts.read_record(path)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no calibration\n  type python -m jobs calibrate") from None
    except DataError as error:
        # The way out that it names is that of a stage's files.
        change, *_ = str(error).splitlines()
        raise DataError(
            f"{change}\n  expected the calibration as it was measured\n"
            f"  bring it back from a copy, or type python -m jobs calibrate --output {path}"
        ) from None
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
