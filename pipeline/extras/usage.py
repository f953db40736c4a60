"""Hook that records the CPU time, memory and GPU utilisation of each worker over time, for the run's page.

A thread of each worker writes `rank-00003.usage.json` to the attempt's folder:

    {"rank": 3, "node": "n1", "started": 1763800000.0, "interval_s": 1.0,
     "cores": [1.93, 1.97, …],                     CPU time of the worker and its decoding processes / time
     "memory_gb": [2.1, …], "gpu": [0.87, …]}      resident memory; "gpu" only if NVML reports it

If there are MAX_POINTS values, neighbours are averaged and the interval is doubled, so a file stays below 10 kB.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from data.files import write_atomically
from pipeline.hooks import Hook

if TYPE_CHECKING:
    from pipeline.worker import Progress, Setup

FILES = "rank-*.usage.json"
FIRST_INTERVAL_S = 1.0
MAX_POINTS = 240
POINTS_PER_WRITE = 5  # of the first interval: about one write every 5 s, then more rarely


class Usage(Hook):
    """Hook that starts the recording thread of a worker."""

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Start the thread, which ends with the process."""
        gpu = None
        if worker.group.device.type == "cuda":
            gpu = worker.group.device.index
        recorder = UsageRecorder(self.job.attempt_folder, worker.group.rank, gpu)
        threading.Thread(target=recorder.run, name="usage", daemon=True).start()


class UsageRecorder:
    """Measures this process and its children at regular intervals."""

    def __init__(self, folder: Path, rank: int, gpu: int | None = None) -> None:
        self.path = folder / f"rank-{rank:05d}.usage.json"
        self.gpu = gpu
        self.series: dict[str, list[float]] = {"cores": [], "memory_gb": [], "gpu": []}
        self.values: dict[str, Any] = {"rank": rank, "node": socket.gethostname(), "interval_s": FIRST_INTERVAL_S}
        self.cpu_s: dict[int, float] = {}  # pid → CPU seconds at the last measurement
        self.measured_at = time.monotonic()
        self.values["started"] = time.time()
        self.measure()  # the first measurement has no interval before it
        for numbers in self.series.values():
            numbers.clear()

    def run(self) -> None:
        """Measure and write until the process ends."""
        while True:
            time.sleep(self.values["interval_s"])
            # The record is a convenience: a full disk, or a process that ends while it is read, must not end the run.
            with suppress(OSError, psutil.Error):
                self.measure()
                if len(self.series["cores"]) % POINTS_PER_WRITE == 0:
                    self.write()

    def measure(self) -> None:
        """Append a value to each series."""
        own = psutil.Process()
        cpu_s = {}
        memory = 0
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):  # a child may just have ended
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                memory += process.memory_info().rss
        now = time.monotonic()
        used_s = sum(max(0.0, seconds - self.cpu_s.get(pid, 0.0)) for pid, seconds in cpu_s.items())
        self.series["cores"].append(used_s / max(now - self.measured_at, 1e-9))
        self.series["memory_gb"].append(memory / 2**30)
        if self.gpu is not None:
            try:
                import torch

                self.series["gpu"].append(torch.cuda.utilization(self.gpu) / 100)
            except Exception:  # NVML or its Python package is missing, or the driver does not report this value
                self.gpu = None
                self.series["gpu"].clear()
        self.cpu_s = cpu_s
        self.measured_at = now
        if len(self.series["cores"]) >= MAX_POINTS:
            self.values["interval_s"] *= 2
            for name, numbers in self.series.items():
                halves = zip(numbers[::2], numbers[1::2], strict=False)
                self.series[name] = [(first + second) / 2 for first, second in halves]

    def write(self) -> None:
        """Write all values, rounded to three digits after the point."""
        record = dict(self.values)
        for name, numbers in self.series.items():
            if numbers:
                record[name] = [round(number, 3) for number in numbers]
        write_atomically(self.path, json.dumps(record))
