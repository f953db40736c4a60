"""What a run says: log lines, metrics.jsonl and TensorBoard, always with the same names.

1. The loop puts every step's loss, gradient norm and waits into a `Window`.
2. At a report the window becomes values, which rank 0 writes as a record and as one log line. A save writes the record
   alone, so that a committed step is in metrics.jsonl; every step is in one record of its attempt:

       {"kind": "train", "time": 1764071.3, "attempt": 1, "step": 50, "loss": 2.841, "images_per_s": 41200.0, …}
       step 50/700000  loss 2.841  lr 4.0e-6  grad 0.42  img/s 41.2k  wait 1%  eta 3d04h

3. The driver follows log.txt and prints it; `read_metrics` and `last_metrics` read the records back: 14,000 of 50
   steps each, 38 MB, take 0.6 s.
4. `account` books the wall time of all attempts, from the records alone:

       account(read_metrics(folder, None)).line()  →  "steps took 91.2% of 4h10m (the rest: start 3.1%, data 2.4%, …)"

A loss or norm that is not finite is null in metrics.jsonl, because JSON has neither NaN nor infinity; the readers here
give NaN back.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from data.checks import printable_lines
from data.errors import DataError
from data.files import sync
from pipeline.values import amount, duration, significant

if TYPE_CHECKING:  # the driver reads metrics without loading torch
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from data.loader import Wait

Record: TypeAlias = Mapping[str, Any]  # a line of metrics.jsonl; which values it holds depends on its "kind"

# FLOP/s of dense bf16 products, from the makers' data sheets; the denominator of mfu
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
# How TensorBoard's groups are called; by name alone, checkpoint/* would come first and open.
TENSORBOARD_GROUPS = {"train": "1 train", "evaluate": "2 evaluate"}
# The newest record is looked for in so many bytes at the end of metrics.jsonl; a record of 50 steps has about 3 KB.
TAIL_BYTES = 1 << 20
OF_ONE_SEED = re.compile(r"-seed-\d+$")  # ends the name of a value of a single few-shot draw: "5shot-seed-0"
NOT_SCORES = ("time", "seconds")  # of an evaluation's record, the numbers that tell when and how long


def log_line(report: Record) -> str:
    """Return a report as one line, always in the same order: 89 characters at the most, as a terminal adds the stage.

    What else a record holds, such as memory and mfu, is in metrics.jsonl.
    """
    loss = significant(report["loss"], 4)
    rate = f"{report['lr']:.1e}".replace("e-0", "e-")
    return (
        f"step {report['step']}/{report['steps']}  loss {loss}  lr {rate}  "
        f"grad {significant(report['grad_norm'], 3)}  img/s {amount(report['images_per_s'])}  "
        f"wait {report['wait']:.0%}  eta {duration(report['eta_s'])}"
    )


# ------------------------------------------------------------------------------------------------ what is measured


def memory_gb() -> float:
    """Return the peak memory of this worker in GiB: the GPU's where there is one, resident memory otherwise."""
    import torch

    # The peak and not what is in use now: the peak decides whether a run fits.
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # getrusage counts bytes there, KiB on Linux
        return peak / 2**30
    return peak / 2**20


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of the GPU; None where there is none, or one that the table lacks."""
    import torch

    if device.type != "cuda":
        return None
    # Names hold more than the model, such as "NVIDIA H100 80GB HBM3".
    name = torch.cuda.get_device_name(device)
    for model, peak in PEAK.items():
        if model in name:
            return peak
    return None


class WindowValues(TypedDict):
    """What the steps of a window come to."""

    loss: float  # of the last step
    losses: list[float]  # of every step
    grad_norm: float  # of the last step, before clipping
    grad_norms: list[float]
    images_per_s: float  # of all workers, evaluations not counted
    tflops_per_worker: float
    mfu: float | None  # share of the GPU's peak; None where that is not known
    wait: float  # share of `seconds` that this worker waited for data: the sum of the next three
    wait_storage: float
    wait_decode: float
    wait_transfer: float
    seconds: float
    stalled_s: float  # in checkpoints
    evaluated_s: float
    eta_s: float


class Window:
    """A stretch of steps, such as those since the last record: losses, gradient norms, what the loop waited for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next window now."""
        self.since = time.monotonic()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.waits: list[Wait] = []  # of every micro-batch
        self.traces: list[Sequence[list[float]]] = []  # of every step, in exact mode alone
        self.stalled_s = 0.0  # by checkpoints
        self.evaluated_s = 0.0

    def extend(self, later: Window) -> None:
        """Add the steps of a window that followed this one."""
        self.since = min(self.since, later.since)
        self.losses += later.losses
        self.norms += later.norms
        self.waits += later.waits
        self.traces += later.traces
        self.stalled_s += later.stalled_s
        self.evaluated_s += later.evaluated_s

    def values(self, samples: int, flops: float, peak: float | None, steps_left: int) -> WindowValues:
        """Return what the window comes to; `samples` are all workers', `flops` are one worker's."""
        elapsed = time.monotonic() - self.since
        # Speed is that of training: an evaluation would show as a drop of images/s that is none.
        busy = max(elapsed - self.evaluated_s, 1e-9)
        flops_per_s = flops / busy
        storage_s = 0.0
        decode_s = 0.0
        transfer_s = 0.0
        for wait in self.waits:
            storage_s += wait.storage_s
            decode_s += wait.decode_s
            transfer_s += wait.transfer_s
        # Three shares and not one, since each has another cure: storage, decoding processes, the copying of images.
        wait_storage = storage_s / elapsed
        wait_decode = decode_s / elapsed
        wait_transfer = transfer_s / elapsed
        return {
            "loss": self.losses[-1],
            "losses": self.losses,
            "grad_norm": self.norms[-1],
            "grad_norms": self.norms,
            "images_per_s": samples / busy,
            "tflops_per_worker": flops_per_s / 1e12,
            "mfu": flops_per_s / peak if peak else None,
            "wait": wait_storage + wait_decode + wait_transfer,
            "wait_storage": wait_storage,
            "wait_decode": wait_decode,
            "wait_transfer": wait_transfer,
            "seconds": elapsed,
            "stalled_s": self.stalled_s,
            "evaluated_s": self.evaluated_s,
            "eta_s": steps_left * busy / len(self.losses),
        }


# ------------------------------------------------------------------------------------------------ writing


class Telemetry:
    """Writes log lines, metrics.jsonl and TensorBoard; records come from rank 0 only, lines from any worker."""

    def __init__(self, directory: Path, rank: int, attempt: int) -> None:
        self.directory = directory
        self.rank = rank
        self.attempt = attempt
        self.tensorboard: SummaryWriter | None = None
        self.lost_lines: dict[str, int] = {}  # by file: how many since the last one that was written whole
        if rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            # Flushed every 10 s, so that a run that is killed loses little of its curves.
            self.tensorboard = SummaryWriter(str(directory / "tensorboard"), flush_secs=10)

    def log(self, text: str) -> None:
        """Write a line for people, from any worker."""
        line = f"{printable_lines(text)}\n"
        if self.rank != 0:
            line = f"[worker {self.rank}] {line}"
        self._append("log.txt", line)

    def report(self, kind: str, values: Mapping[str, object], line: str = "") -> bool:
        """Write a record, its scalars and perhaps a line; does nothing on ranks other than 0.

        Returns False where the disk refused the record.
        """
        if self.tensorboard is None:
            return True
        record = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **values}
        is_written = self._append("metrics.jsonl", json.dumps(without_nan(record), allow_nan=False) + "\n")
        # TensorBoard sorts the groups by name, and the curves within a group, and opens the first group alone: its page
        # begins with "1 train/1 loss".
        group = TENSORBOARD_GROUPS.get(kind, kind)
        with suppress(OSError):  # a full disk, as in `_append`
            for name, value in values.items():
                if isinstance(value, float):
                    curve = name
                    if kind == "train" and name == "loss":
                        curve = "1 loss"
                    self.tensorboard.add_scalar(f"{group}/{curve}", value, values["step"])
        if line:
            self.log(line)
        return is_written

    def sync(self) -> None:
        """Bring the records to the disk, so that what relies on them may follow."""
        with suppress(OSError):  # it may not be there: a full disk, as in `_append`
            sync(self.directory / "metrics.jsonl")

    def _append(self, name: str, text: str) -> bool:
        """Append to a file of the stage; a full disk costs lines, not the run. Returns False where it refused.

        The lines that fit again are preceded by how many did not.
        """
        lost = self.lost_lines.get(name, 0)
        if lost:
            # The line break ends what a refused write may have left of its line; readers skip both as torn.
            text = f"\n({lost} lines lost: the disk refused them)\n{text}"
        is_written = append_whole(self.directory / name, text.encode())
        self.lost_lines[name] = lost + 1
        if is_written:
            self.lost_lines[name] = 0
        return is_written

    def close(self) -> None:
        """Close TensorBoard's file; the other two are opened for every line."""
        if self.tensorboard is not None:
            with suppress(OSError):
                self.tensorboard.close()


def without_nan(value: object) -> object:
    """Return a record, or a value in it, with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def append_whole(path: Path, content: bytes) -> bool:
    """Append by a single write, which O_APPEND keeps apart from other workers' lines; False where the disk refuses."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # A disk that fills up may take a part of the bytes: that line is lost too.
            return os.write(handle, content) == len(content)
        finally:
            os.close(handle)
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ reading back


def with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Put NaN where a record, or a part of it, has null for a loss or a norm that was not finite."""
    for name in ("loss", "grad_norm"):
        if name in values and values[name] is None:
            values[name] = math.nan
    for name in ("losses", "grad_norms"):
        numbers = values.get(name, [])
        if None in numbers:
            values[name] = [math.nan if number is None else number for number in numbers]
    return values


class MetricsRecord(dict[str, Any]):
    """A line of metrics.jsonl; to ask for a value that it lacks raises DataError, which names the file."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise altered(self, f"a record without {name!r}")


def altered(record: Record, problem: str) -> DataError:
    """Return the error of a record that the run cannot have written."""
    path = getattr(record, "path", "metrics.jsonl")
    return DataError(
        f"{path} has changed: {problem}: {str(dict(record))[:80]}\n"
        "  expected the lines as the run wrote them\n"
        "  bring the file back from a copy, or delete that line: no result is made of it"
    )


def read_metrics(directory: Path, kind: str | None = "train") -> list[Record]:
    """Return the records of a kind (None: of all) in the order written.

    A torn last line (the writer was killed) is left out. Raises DataError where a line is a record without a kind.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    records: list[Record] = []
    for record in records_in(path.read_bytes().splitlines(), path):
        if kind is None or record["kind"] == kind:
            records.append(record)
    return records


def steps_in(report: Record) -> range:
    """Return the steps whose losses a report of training holds, counted from 1: those since the report before it."""
    return range(report["step"] - len(report["losses"]) + 1, report["step"] + 1)


def last_metrics(directory: Path) -> Record | None:
    """Return the newest training record, found without reading a month of them."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()  # the first is perhaps cut
    for record in records_in(reversed(lines), path):
        if record["kind"] == "train":
            return record
    return None


def without_single_seeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values to show: the mean over few-shot draws, "5shot", without the single draws."""
    return {name: value for name, value in metrics.items() if not OF_ONE_SEED.search(name)}


def scores_of(record: Record) -> dict[str, float]:
    """Return the metrics of an evaluation's record; those of a few-shot probe are means over its seeds."""
    scores = {}
    for name, value in record.items():
        if isinstance(value, float) and name not in NOT_SCORES:
            scores[name] = value
    return without_single_seeds(scores)


def records_in(lines: Iterable[bytes], path: Path) -> Iterator[MetricsRecord]:
    """Iterate the records of lines of metrics.jsonl, those that are torn left out."""
    for line in lines:
        try:
            record = json.loads(line, object_hook=with_nan)
        except ValueError:
            continue
        # Part of a torn line may be valid JSON by chance: a number, say.
        if isinstance(record, dict):
            yield MetricsRecord(record, path)


# ------------------------------------------------------------------------------------------------ where the time went


@dataclass
class Account:
    """Seconds from the first claim of the stage to its last record; `ratio` is compute over those of a command.

    lost: steps that a later attempt did again. recovery: from an attempt's last record, or from the begin of the
    command that went on, to the first step of the next. other: evaluation, and what ends a stage. stopped: no command
    ran the stage; these seconds are not in `wall`.
    """

    start: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    checkpoint: float = 0.0
    lost: float = 0.0
    recovery: float = 0.0
    other: float = 0.0
    stopped: float = 0.0

    @property
    def wall(self) -> float:
        """Return the seconds in which a command ran the stage."""
        return sum(asdict(self).values()) - self.stopped

    @property
    def ratio(self) -> float:
        """Return the effective training time ratio: the share of compute; 0 where no time has passed."""
        return self.compute / self.wall if self.wall else 0.0

    def line(self) -> str:
        """Return "steps took 91.2% of 4h10m" and the shares of the rest, the largest first."""
        seconds = asdict(self)
        shares = []
        for name in reversed(sorted(seconds, key=seconds.__getitem__)):  # of two equal ones the later field comes first
            if name not in ("compute", "stopped") and seconds[name] > 0:
                shares.append(f"{name} {seconds[name] / self.wall:.1%}")
        line = f"steps took {self.ratio:.1%} of {duration(self.wall)}"
        if shares:
            line += f" (the rest: {', '.join(shares)})"
        if self.stopped >= 1:
            line += f", and {duration(self.stopped)} in which no command ran it"
        return line


def account(records: Sequence[Record]) -> Account:
    """Book the time of all attempts. `records` are of all kinds, in the order written.

    A record's `time` is its end; the driver's claim of an attempt is `claimed` in the attempt's "start" record.
    Raises DataError where a record lacks a value, or has one of another type.
    """
    starts: list[Record] = []
    by_attempt: dict[int, list[Record]] = {}
    for record in records:
        # A stage's own account is its last record: without it, whoever books later finds the same seconds.
        if record["kind"] != "effective":
            by_attempt.setdefault(record["attempt"], []).append(record)
        if record["kind"] == "start":
            starts.append(record)
    # An attempt keeps the steps up to where a later one began; the one that fell back furthest counts.
    kept_steps: dict[int, float] = {}
    furthest = math.inf
    for number in reversed(range(len(starts))):
        kept_steps[number] = furthest
        furthest = min(furthest, starts[number]["step"])

    total = Account()
    previous_end = 0.0
    for number, start in enumerate(starts):
        attempt = by_attempt[start["attempt"]]
        reports = [record for record in attempt if record["kind"] == "train"]
        # An attempt that died leaves no record of its end: its last record of any kind stands for it.
        end = attempt[-1]["time"]
        # A report's time is that of its end. An attempt that left no report is start or recovery as a whole.
        first_step_at = end
        if reports:
            first_step_at = reports[0]["time"] - reports[0]["seconds"]

        # Until its first step an attempt starts or, after another one, recovers. Clocks of nodes may have jumped back.
        if number == 0:
            claimed = start.get("claimed") or start["time"]
            total.start += max(0.0, first_step_at - claimed)
        else:
            # A stage that was stopped lies until somebody types the command that goes on: that is no failure's time.
            began = max(previous_end, start.get("began", 0.0))
            total.stopped += began - previous_end
            total.recovery += max(0.0, first_step_at - began)
        seconds = 0.0
        for report in reports:
            try:
                # Steps after those that the attempt keeps are lost. A later attempt may begin amid a report's steps:
                # their single times are not known, so all count alike.
                steps = len(report["losses"])
                lost_share = min(max(report["step"] - kept_steps[number], 0), steps) / steps
                kept_share = 1 - lost_share
                waited_s = report["wait"] * report["seconds"]
                total.lost += lost_share * report["seconds"]
                total.data += kept_share * waited_s
                total.checkpoint += kept_share * report["stalled_s"]
                total.other += kept_share * report["evaluated_s"]
                working_s = report["seconds"] - waited_s - report["stalled_s"] - report["evaluated_s"]
                total.compute += kept_share * working_s
                seconds += report["seconds"]
            except (TypeError, ArithmeticError):
                raise altered(report, "a value of another type") from None
        total.other += max(0.0, end - first_step_at - seconds)
        previous_end = end
    return total
