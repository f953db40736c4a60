"""Writes and reads the outputs of training: log.txt, metrics.jsonl and TensorBoard, all with the same names.

1. The loop adds each step's loss, gradient norm and waits to a `Window`.
2. At each report, rank 0 writes the window's values as a record and as a log line. A save writes only a record, so
   that the metrics of every committed step are in metrics.jsonl. Each step is in exactly one of its attempt's records:

       {"kind": "train", "time": 1764071.3, "attempt": 1, "step": 50, "loss": 2.841, …, "crc": "9a3c01fe"}
       step 50/700000  loss 2.841  lr 4.0e-6  grad 0.42  img/s 41.2k  wait 1%  eta 3d04h

3. The driver follows log.txt and prints it; `read_metrics` reads the records. Reading 14,000 records of 50 steps each
   (38 MB) takes 0.6 s.
   Each record ends with the CRC-32 of the rest of its line, and `read_metrics` rejects a damaged line. Records written
   by versions without this field are read without verification.
4. `account` computes from the records how the wall time of all attempts was spent:

       account(read_metrics(folder, None)).line()
       →  "training steps: 91.2% of 4h10m; overhead: start-up 3.1%, data loading 2.4%, …"

JSON has no NaN or infinity: a non-finite loss or norm is null in metrics.jsonl, and the readers here return NaN.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from data.checks import printable_lines
from data.errors import DataError
from data.files import sync
from pipeline.values import amount, duration, significant

if TYPE_CHECKING:  # the driver reads metrics without importing torch
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from data.loader import Wait

Record: TypeAlias = Mapping[str, Any]  # a line of metrics.jsonl; "kind" decides which values it holds

# Peak FLOP/s of dense bf16 matrix products, from the vendors' data sheets; the denominator of mfu. The first name that
# is part of the device's name counts: cards have lower clocks than the SXM modules of the same name.
PEAK = {
    **{"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12},
    **{"H200 NVL": 835e12, "H200": 989e12, "B200": 2250e12},
}
# Prefixes of TensorBoard's tags. The numbers sort the training curves first; otherwise checkpoint/* would come first.
TENSORBOARD_GROUPS = {"train": "1 train", "evaluate": "2 evaluate"}
# Search for the newest record in this many bytes at the end of metrics.jsonl; a record of 50 steps has about 3 KB.
TAIL_BYTES = 1 << 20
SEAL = re.compile(rb', "crc": "([0-9a-f]{8})"}')  # the end of each record: CRC-32 of the line's bytes before it
SEAL_BYTES = 20
KIND = b'{"kind": '  # the beginning of each record
ZEROS = bytes(8)  # storage that lost a block returns zeros; a record contains no zero byte
CUT_OFF = "the line before this one is incomplete: its writer was killed"
OF_ONE_SEED = re.compile(r"-seed-\d+$")  # matches a few-shot result of a single seed: "5shot-seed-0"


def log_line(report: Record) -> str:
    """Format a report as a log line of at most 89 characters, with the fields always in the same order.

    The terminal adds the stage's name. Other values, such as memory and mfu, are only in metrics.jsonl.
    """
    loss = significant(report["loss"], 4)
    rate = f"{report['lr']:.1e}".replace("e-0", "e-")
    return (
        f"step {report['step']}/{report['steps']}  loss {loss}  lr {rate}  "
        f"grad {significant(report['grad_norm'], 3)}  img/s {amount(report['images_per_s'])}  "
        f"wait {report['wait']:.0%}  eta {duration(report['eta_s'])}"
    )


# ------------------------------------------------------------------------------------------------ measurements


def memory_gb() -> float:
    """Return this worker's peak memory in GiB: GPU memory if it uses a GPU, otherwise resident memory."""
    import torch

    # Use the peak, which determines whether a run fits in memory.
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # getrusage counts bytes there, KiB on Linux
        return peak / 2**30
    return peak / 2**20


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a GPU; None on the CPU, or if the GPU is unknown."""
    import torch

    if device.type != "cuda":
        return None
    # Device names contain more than the model, such as "NVIDIA H100 80GB HBM3".
    name = torch.cuda.get_device_name(device)
    for model, peak in PEAK.items():
        if model in name:
            return peak
    return None


class WindowValues(TypedDict):
    """The values that a report shows for a window of steps."""

    loss: float  # loss of the last step
    losses: list[float]  # loss of every step
    grad_norm: float  # gradient norm of the last step, before clipping
    grad_norms: list[float]
    images_per_s: float  # speed of all workers together, excluding evaluations
    tflops_per_worker: float
    mfu: float | None  # share of the GPU's peak FLOP/s; None if the peak is unknown
    wait: float  # share of `seconds` in which this worker waited for data: the sum of the next three
    wait_storage: float
    wait_decode: float
    wait_transfer: float
    seconds: float
    stalled_s: float  # time blocked by checkpoints
    evaluated_s: float
    eta_s: float


class Window:
    """The losses, gradient norms and waits of consecutive steps, for example of all steps since the last record."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Empty the window and restart its clock."""
        self.since = time.monotonic()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.waits: list[Wait] = []  # one wait for each micro-batch
        self.traces: list[Sequence[list[float]]] = []  # one for each step, only in exact mode
        self.stalled_s = 0.0  # time blocked by checkpoints
        self.evaluated_s = 0.0

    def extend(self, later: Window) -> None:
        """Append the steps of `later`, the window that follows this window."""
        self.since = min(self.since, later.since)
        self.losses += later.losses
        self.norms += later.norms
        self.waits += later.waits
        self.traces += later.traces
        self.stalled_s += later.stalled_s
        self.evaluated_s += later.evaluated_s

    def values(self, samples: int, flops: float, peak: float | None, steps_left: int) -> WindowValues:
        """Return the window's values; `samples` is a total over all workers, `flops` the FLOPs of one worker."""
        elapsed = time.monotonic() - self.since
        # Exclude evaluations from the speed; otherwise each of them would look like a drop in images/s.
        busy = max(elapsed - self.evaluated_s, 1e-9)
        flops_per_s = flops / busy
        storage_s = 0.0
        decode_s = 0.0
        transfer_s = 0.0
        for wait in self.waits:
            storage_s += wait.storage_s
            decode_s += wait.decode_s
            transfer_s += wait.transfer_s
        # Report three shares, because each has a different remedy: storage, decoding processes, copies to the device.
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
    """Writes log.txt, metrics.jsonl and TensorBoard: every worker writes log lines, only rank 0 writes records."""

    def __init__(self, directory: Path, rank: int, attempt: int) -> None:
        self.directory = directory
        self.rank = rank
        self.attempt = attempt
        self.tensorboard: SummaryWriter | None = None
        self.lost_lines: dict[str, int] = {}  # file → number of lines lost since the last successful write
        if rank == 0:
            metrics = directory / "metrics.jsonl"
            if ends_within_line(metrics):
                append_whole(metrics, f"\n({CUT_OFF})\n".encode())
            from torch.utils.tensorboard import SummaryWriter

            # Flushed every 10 s, so that a killed run loses little of its curves.
            self.tensorboard = SummaryWriter(str(directory / "tensorboard"), flush_secs=10)

    def log(self, text: str) -> None:
        """Append a line to log.txt, prefixed with the rank on workers other than rank 0."""
        line = f"{printable_lines(text)}\n"
        if self.rank != 0:
            line = f"[worker {self.rank}] {line}"
        self._append("log.txt", line)

    def report(self, kind: str, values: Mapping[str, object], line: str = "") -> bool:
        """Write a record, its numbers to TensorBoard and, if given, a log line; ranks other than 0 do nothing.

        Returns False if the disk rejected the record.
        """
        if self.tensorboard is None:
            return True
        record = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **values}
        is_written = self._append("metrics.jsonl", sealed(json.dumps(without_nan(record), allow_nan=False)) + "\n")
        # TensorBoard sorts groups and curves by name and opens only the first group, so its page starts with
        # "1 train/1 loss".
        group = TENSORBOARD_GROUPS.get(kind, kind)
        with suppress(OSError):  # a full disk must not stop the run, as in `_append`
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
        """Flush metrics.jsonl to disk, for callers that rely on its records."""
        with suppress(OSError):  # the file may be missing because the disk was full, as in `_append`
            sync(self.directory / "metrics.jsonl")

    def _append(self, name: str, text: str) -> bool:
        """Append text to one of the stage's files; on a full disk, lines are lost but the run continues.

        Before the next successful write, the number of lost lines is written. Returns False if the disk rejected the
        text.
        """
        lost = self.lost_lines.get(name, 0)
        if lost:
            # The leading line break ends a line that a failed write left half-written; readers skip it.
            text = f"\n({lost} lines lost: they could not be written to disk)\n{text}"
        is_written = append_whole(self.directory / name, text.encode())
        self.lost_lines[name] = lost + 1
        if is_written:
            self.lost_lines[name] = 0
        return is_written

    def close(self) -> None:
        """Close the TensorBoard file; the other two files are opened for each line."""
        if self.tensorboard is not None:
            with suppress(OSError):
                self.tensorboard.close()


def without_nan(value: object) -> object:
    """Return a copy of a value or record in which every non-finite number is replaced with None."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sealed(record: str) -> str:
    """Return a record (a JSON object) with its CRC-32 appended as the last field."""
    content = record.removesuffix("}")
    return f'{content}, "crc": "{zlib.crc32(content.encode()):08x}"}}'


def ends_within_line(path: Path) -> bool:
    """Return whether the last line of a file is incomplete; False for an empty, missing or unreadable file."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def append_whole(path: Path, content: bytes) -> bool:
    """Append bytes to a file with a single write, so that workers' lines never mix; return False on failure."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # An almost full disk may accept only some of the bytes; that line counts as lost.
            return os.write(handle, content) == len(content)
        finally:
            os.close(handle)
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ reading back


def with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace null with NaN for losses and norms in a record, or in a part of a record."""
    for name in ("loss", "grad_norm"):
        if name in values and values[name] is None:
            values[name] = math.nan
    for name in ("losses", "grad_norms"):
        numbers = values.get(name, [])
        if None in numbers:
            values[name] = [math.nan if number is None else number for number in numbers]
    return values


class MetricsRecord(dict[str, Any]):
    """A record from metrics.jsonl; reading a missing value raises DataError, which names the file."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise altered(self, f"a record has no {name!r}")


def altered(record: Record, problem: str) -> DataError:
    """Build the error for a record that cannot have been written by the run."""
    path = getattr(record, "path", "metrics.jsonl")
    return DataError(
        f"{path} has changed: {problem}: {str(dict(record))[:80]}\n"
        "  expected the original lines of the run\n"
        "  restore the file from a copy, or delete that line: results are then computed without it"
    )


def read_metrics(directory: Path, kind: str | None = "train", damage: list[str] | None = None) -> list[Record]:
    """Return the records of one kind, or of all kinds if None, in the order written.

    An incomplete line, left by a killed writer or a full disk, is skipped. Raises DataError, with the line numbers, if
    lines are damaged; if a list is passed as `damage`, these lines are skipped and a message is appended to the list.
    Only code that displays records may skip them: a missing evaluation could change the best step. Raises DataError if
    a record has no kind.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    # Line by line, because the file of a long run has hundreds of megabytes.
    with open(path, "rb") as file:
        problems = damaged_lines(lines_of(file))
    if problems:
        message = damage_message(path, problems)
        if damage is None:
            raise DataError(message)
        damage.append(message)
    records: list[Record] = []
    with open(path, "rb") as file:
        lines = (line for number, line in enumerate(lines_of(file), 1) if number not in problems)
        # The kind is the first field, so records of other kinds need not be parsed.
        if kind is not None:
            beginning = KIND + json.dumps(kind).encode()
            lines = (line for line in lines if line.startswith(beginning) or not line.startswith(KIND))
        for record in records_in(lines, path):
            if kind is None or record["kind"] == kind:
                records.append(record)
    return records


def lines_of(file: Iterable[bytes]) -> Iterator[bytes]:
    """Iterate over the lines of an open file with their line breaks, splitting them like `bytes.splitlines`."""
    for line in file:
        yield from line.splitlines(keepends=True)


def damaged_lines(lines: Iterable[bytes]) -> dict[int, str]:
    """Return {line number from 1: problem} for the damaged lines of metrics.jsonl.

    Incomplete lines do not count as damaged: the last line, if its line break is missing, and a line followed by the
    note in parentheses that the next writer adds. Lines before the first digest may be from a version that did not
    write digests.
    """
    is_sealed = False  # a line above had a digest
    problems: dict[int, str] = {}
    without_digest = 0  # number of the line before, if it has no digest; it is incomplete if a note follows
    for number, line_with_break in enumerate(lines, 1):
        line = line_with_break.rstrip(b"\r\n")
        if without_digest and not is_note(line):
            problems[without_digest] = "its digest is missing"
        without_digest = 0
        if ZEROS in line:
            problems[number] = f"it contains {line.count(0)} zero bytes"
            continue
        seal = SEAL.fullmatch(line[-SEAL_BYTES:])
        if seal is not None:
            is_sealed = True
            digest = f"{zlib.crc32(line[:-SEAL_BYTES]):08x}"
            if digest != seal[1].decode():
                problems[number] = f"its digest is {digest}, expected {seal[1].decode()}"
            continue
        if SEAL.search(line):
            problems[number] = "a record continues after its digest"
            continue
        if has_altered_seal(line):
            problems[number] = "its digest is altered"
            continue
        if not is_sealed or not line or is_note(line):
            continue
        # A complete record ends with a brace; an incomplete line is the beginning of a record or of a note.
        if is_json_object(line):
            problems[number] = "its digest is missing"
        elif line != line_with_break:
            without_digest = number
    if without_digest:
        problems[without_digest] = "its digest is missing"
    return problems


def damage_message(path: Path, problems: Mapping[int, str]) -> str:
    """Format the message about damaged lines in metrics.jsonl: line numbers, problems and remedy."""
    numbers = list(problems)
    shown = [f"line {number}: {problems[number]}" for number in numbers[:3]]
    if len(numbers) > 3:
        shown.append(f"and {len(numbers) - 3} more, up to line {numbers[-1]}")
    delete = ";".join(f"{number}d" for number in numbers)
    return (
        f"{path} is damaged: {'; '.join(shown)}\n"
        "  expected each record with the digest that the run wrote; the storage has changed the file\n"
        f"  restore the file from a copy; to compute results without these records, run: sed -i '{delete}' {path}"
    )


def has_altered_seal(line: bytes) -> bool:
    """Return whether the end of a line nearly matches that of a record with a digest: 9 of 12 fixed bytes match."""
    template = b', "crc": "\0\0\0\0\0\0\0\0"}'  # zeros for the digits
    end = line[-SEAL_BYTES:]
    if len(end) < SEAL_BYTES:
        return False
    return sum(byte == expected for byte, expected in zip(end, template, strict=True)) >= 9


def is_note(line: bytes) -> bool:
    """Return whether a line is a writer's note about lost or incomplete lines, and not a record."""
    return line.startswith(b"(") and line.endswith(b")")


def is_json_object(line: bytes) -> bool:
    """Return whether a line is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def without_single_seeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without the few-shot results of single seeds: keep the mean "5shot", drop "5shot-seed-0"."""
    return {name: value for name, value in metrics.items() if not OF_ONE_SEED.search(name)}


def records_in(lines: Iterable[bytes], path: Path) -> Iterator[MetricsRecord]:
    """Iterate over the records in lines of metrics.jsonl, removing their digests; skip incomplete and damaged lines."""
    for line_with_break in lines:
        line = line_with_break.rstrip(b"\r\n")
        seal = SEAL.fullmatch(line[-SEAL_BYTES:])
        if seal is not None and zlib.crc32(line[:-SEAL_BYTES]) != int(seal[1], 16):
            continue
        try:
            record = json.loads(line, object_hook=with_nan)
        except ValueError:
            continue
        # The end of an incomplete line may be valid JSON by chance, for example a number.
        if isinstance(record, dict):
            if seal is not None:
                del record["crc"]
            yield MetricsRecord(record, path)


# ------------------------------------------------------------------------------------------------ accounting of time


@dataclass
class Account:
    """How the time of a stage was spent, in seconds, from the first attempt's claim to the last record.

    `ratio` is `compute` as a fraction of the time during which a command ran the stage.
    """

    start: float = 0.0  # from the claim of the first attempt to its first step
    data: float = 0.0  # time spent waiting for batches
    compute: float = 0.0  # training steps, without the lost ones
    checkpoint: float = 0.0  # time blocked by saves
    lost: float = 0.0  # steps that a later attempt repeated
    recovery: float = 0.0  # from an attempt's last record, or the start of the resuming command, to the next first step
    other: float = 0.0  # evaluation and the end of the stage
    stopped: float = 0.0  # no command ran the stage; not part of `wall`

    @property
    def wall(self) -> float:
        """Return the seconds during which a command ran the stage."""
        return sum(asdict(self).values()) - self.stopped

    @property
    def ratio(self) -> float:
        """Return the effective training time ratio (training steps / wall time); 0 if no time has passed."""
        return self.compute / self.wall if self.wall else 0.0

    def line(self) -> str:
        """Return "training steps: 91.2% of 4h10m; overhead: start-up 3.1%, …" with the largest overhead first."""
        seconds = asdict(self)
        shares = []
        for name in reversed(sorted(seconds, key=seconds.__getitem__)):  # ties: later fields first
            if name in OVERHEADS and seconds[name] > 0:
                shares.append(f"{OVERHEADS[name]} {seconds[name] / self.wall:.1%}")
        line = f"training steps: {self.ratio:.1%} of {duration(self.wall)}"
        if shares:
            line += f"; overhead: {', '.join(shares)}"
        if self.stopped >= 1:
            line += f"; no command was running for another {duration(self.stopped)}"
        return line


# The overhead fields of an Account, and their names in the log.
OVERHEADS = {
    "start": "start-up",
    "data": "data loading",
    "checkpoint": "checkpoints",
    "lost": "repeated steps",
    "recovery": "recovery",
    "other": "evaluation and shutdown",
}


def account(records: Sequence[Record]) -> Account:
    """Compute how the time of all attempts was spent; `records` contains all kinds, in the order written.

    A record's `time` is the end of the described event; `claimed` in an attempt's "start" record is when the driver
    claimed the attempt. Raises DataError if a record lacks a value or has a value of the wrong type.
    """
    starts: list[Record] = []
    by_attempt: dict[int, list[Record]] = {}
    for record in records:
        # The stage's own "effective" record comes last and is ignored, so that a later call returns the same seconds.
        if record["kind"] != "effective":
            by_attempt.setdefault(record["attempt"], []).append(record)
        if record["kind"] == "start":
            starts.append(record)
    # An attempt keeps the steps before the first step of any later attempt: the one that fell back furthest counts.
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
        # A killed attempt leaves no record of its end; its last record of any kind counts as the end.
        end = attempt[-1]["time"]
        # A report is written after its steps. An attempt without reports is entirely start or recovery.
        first_step_at = end
        if reports:
            first_step_at = reports[0]["time"] - reports[0]["seconds"]

        # Before its first step an attempt is in start or, if it is not the first, in recovery. A node's clock may jump
        # back.
        if number == 0:
            claimed = start.get("claimed") or start["time"]
            total.start += max(0.0, first_step_at - claimed)
        else:
            # Between a stop and the command that resumes the stage no time is attributed to a failure.
            began = max(previous_end, start.get("began", 0.0))
            total.stopped += began - previous_end
            total.recovery += max(0.0, first_step_at - began)
        seconds = 0.0
        for report in reports:
            try:
                # Steps beyond those that the attempt keeps are lost. If a later attempt begins within a report, its
                # steps share the report's time equally, because their own times are not recorded.
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
                raise altered(report, "a value has the wrong type") from None
        total.other += max(0.0, end - first_step_at - seconds)
        previous_end = end
    return total
