"""What a run says: one log line a report, the same names in metrics.jsonl and TensorBoard, and waits that speak.

The lead worker writes; whoever drives the run follows `log.txt` and prints it.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def amount(value: float) -> str:
    """41234.0 → "41.2k"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.1f}" if value < 100 and value % 1 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as "3d04h", "2h05m", "4m10s" or "12s"."""
    total = int(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{total % 60:02}s" if minutes else f"{total}s"


def log_line(report: Mapping[str, Any]) -> str:
    """The one line, always in the same order."""
    parts = [
        f"step {report['step']}/{report['steps']}",
        f"loss {report['loss']:.4f}",
        f"lr {report['lr']:.1e}",
        f"grad {report['grad_norm']:.2f}",
        f"img/s {amount(report['images_per_s'])} ({amount(report['images_per_s'] / report['world'])}/worker)",
    ]
    if report.get("mfu") is not None:
        parts.append(f"mfu {report['mfu']:.2f}")
    parts += [
        f"wait {report['wait']:.1%}",
        f"mem {report['memory_gb']:.1f}G",
        f"eta {duration(report['eta_s'])}",
    ]
    return "  ".join(parts)


def memory_gb() -> float:
    """Peak memory of this worker: the GPU's where there is one, resident memory otherwise."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


# FLOP/s of dense bf16 products, from the makers' data sheets; the denominator of mfu
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
WAITS = ("storage", "decode", "transfer")  # what a step may wait for (data.Wait)


def peak_flops(device: Any) -> float | None:
    """Of the GPU that we run on; None where there is none, or one that the table lacks."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAK.items() if known in name), None)


class Window:
    """The steps since the last report: losses, gradient norms, and what the loop waited for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next window now."""
        self.since = time.monotonic()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.waits: list[Any] = []  # data.Wait of every micro-batch
        self.stalled_s = self.evaluated_s = 0.0  # by checkpoints, by evaluations

    def values(self, samples: int, flops: float, peak: float | None, steps_left: int) -> dict[str, Any]:
        """What the window comes to; `samples` are all workers', `flops` one worker's."""
        elapsed = time.monotonic() - self.since
        busy = max(elapsed - self.evaluated_s, 1e-9)
        waited = {f"wait_{w}": sum(getattr(wait, f"{w}_s") for wait in self.waits) / elapsed for w in WAITS}
        return {
            "loss": self.losses[-1],
            "losses": self.losses,
            "grad_norm": self.norms[-1],
            "grad_norms": self.norms,
            "images_per_s": samples / busy,
            "tflops_per_worker": flops / busy / 1e12,
            "mfu": flops / busy / peak if peak else None,
            "wait": sum(waited.values()),
            **waited,
            "seconds": elapsed,
            "stalled_s": self.stalled_s,
            "evaluated_s": self.evaluated_s,
            "eta_s": steps_left * busy / len(self.losses),
        }


class Telemetry:
    """The lead's pen; on other workers only `say` writes (what they alone have seen)."""

    def __init__(self, directory: Path, rank: int, attempt: int) -> None:
        self.directory, self.rank, self.attempt = directory, rank, attempt
        self.tensorboard: Any = None
        self.lost: dict[str, int] = {}  # by file: lines since one was written whole
        if rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(directory / "tensorboard"), flush_secs=10)

    def say(self, text: str) -> None:
        """One line for people, from any worker; O_APPEND keeps lines of several workers whole."""
        prefix = "" if self.rank == 0 else f"[worker {self.rank}] "
        self._append("log.txt", f"{prefix}{text}\n")

    def report(self, kind: str, values: Mapping[str, Any], line: str = "") -> None:
        """A record in metrics.jsonl and scalars in TensorBoard; the lead's alone."""
        if self.rank != 0:
            return
        record = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **values}
        self._append("metrics.jsonl", json.dumps(record) + "\n")
        with suppress(OSError):
            for name, value in values.items():
                if isinstance(value, float):
                    self.tensorboard.add_scalar(f"{kind}/{name}", value, values["step"])
        if line:
            self.say(line)

    def _append(self, name: str, text: str) -> None:
        """A full disk costs lines, not the run; the lines that fit again are preceded by how many did not."""
        lost = self.lost.get(name, 0)
        blob = (f"\n({lost} lines lost: the disk refused them)\n" if lost else "") + text
        try:
            handle = os.open(self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                whole = os.write(handle, blob.encode()) == len(blob.encode())
            finally:
                os.close(handle)
        except OSError:
            whole = False
        self.lost[name] = 0 if whole else lost + 1

    def close(self) -> None:
        if self.tensorboard is not None:
            with suppress(OSError):
                self.tensorboard.close()


def read_metrics(directory: Path, kind: str | None = "train", tail: int | None = None) -> list[dict[str, Any]]:
    """Records of a kind (None: of all) in the order written, of the last `tail` bytes or of all.

    A torn last line (the writer was killed) is left out, and so is a first line that the tail cuts.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - tail) if tail else 0)
        lines = file.read().splitlines()
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and kind in (None, record["kind"])]


def last_metrics(directory: Path) -> dict[str, Any] | None:
    """The newest training record, found without reading a month of them."""
    records = read_metrics(directory, tail=1 << 20)
    return records[-1] if records else None
