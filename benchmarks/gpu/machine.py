"""Measures the limits of the machine, and reports the GPUs that an embedded Ray cluster sees."""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import Context
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.process_group import processor

ROOT = Path(__file__).parents[2]
MATRIX = 8192  # number of rows and columns
COPY_BYTES = 1 << 30
DISK_BLOCK_BYTES = 1 << 26
# H/14 has 632 million parameters; a checkpoint has 12 bytes for each. Torch pins the next power of two.
PINNED_BYTES = 1 << 33


def measure(context: Context) -> None:
    """Report versions, DeepSpeed's import time, disk speed and, on a GPU, matrix products, copies and pinned memory."""
    report_versions(context)

    began = time.perf_counter()
    code = "from pipeline.engine.deepspeed import import_deepspeed; import_deepspeed()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    context.report(what="import_deepspeed, in a new process", value=time.perf_counter() - began, unit="s")

    blocks = 32 if context.device == "cuda" else 2
    block = os.urandom(DISK_BLOCK_BYTES)
    path = context.work / "disk"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
    gigabytes = blocks * len(block) / 1e9
    context.report(what="disk, written and synced", value=gigabytes / (time.perf_counter() - began), unit="GB/s")
    path.unlink()

    if context.device == "cuda":
        measure_gpu(context)


def report_versions(context: Context) -> None:
    """Report hardware and versions, which the top of the page shows."""
    import deepspeed
    import ray

    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions: dict[str, Any] = {
        "processor": f"{processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "DeepSpeed": deepspeed.__version__,
        "Ray": ray.__version__,
        "cuDNN": str(torch.backends.cudnn.version() or ""),
    }
    if context.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        versions["GPU"] = f"{count} × {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        with suppress(OSError, subprocess.CalledProcessError):  # a container may lack the command
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            answer = subprocess.run(query, capture_output=True, text=True, check=True)
            versions["driver"] = answer.stdout.partition("\n")[0]
    for what, value in versions.items():
        if value:
            context.report(what=what, value=value)


def measure_gpu(context: Context) -> None:
    """Report the speed of a large matrix product, of copies, and of pinning memory."""
    matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    seconds = median_seconds(lambda: matrix @ matrix)
    context.report(what=f"product of {MATRIX} × {MATRIX}, bf16", value=2 * MATRIX**3 / seconds / 1e12, unit="TFLOP/s")

    device = torch.empty(2 * COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = device[:COPY_BYTES]
    seconds = median_seconds(lambda: target.copy_(device[COPY_BYTES:]))
    context.report(what="copy on the GPU, read and written", value=2 * COPY_BYTES / seconds / 1e12, unit="TB/s")

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds = median_seconds(lambda: target.copy_(host, non_blocking=True))
    context.report(what="copy to the GPU, pinned", value=COPY_BYTES / seconds / 1e9, unit="GB/s")
    seconds = median_seconds(lambda: host.copy_(target, non_blocking=True))
    context.report(what="copy from the GPU, pinned", value=COPY_BYTES / seconds / 1e9, unit="GB/s")

    began = time.perf_counter()
    torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    gib = PINNED_BYTES / 2**30
    context.report(what=f"pinning {gib:.0f} GiB, as H/14's first save", value=time.perf_counter() - began, unit="s")


def median_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time of `work` on the GPU, after two repetitions as a warm-up."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


# ------------------------------------------------------------------------ Ray


def inspect_ray(context: Context) -> None:
    """Report the number of GPUs in an embedded Ray cluster, and of those that torch sees in one of its workers."""
    cluster = ClusterConfig(workers=1, backend="ray", gpus_per_worker=context.gpus, wait_s=30, start_timeout_s=60)
    with tempfile.TemporaryDirectory(dir=context.work) as folder:
        from jobs.cluster.nodes import nodes_of
        from jobs.cluster.ray import connect

        began = time.perf_counter()
        counted = connect(cluster).gpus
        nodes_of(cluster)
        context.report(
            what="GPUs that the embedded Ray cluster counts",
            value=counted,
            expected=torch.cuda.device_count() if context.gpus else 0,
            seconds=time.perf_counter() - began,
        )
        began = time.perf_counter()
        seen: Any = run_worker_group(see_devices, {}, cluster=cluster, name="look", directory=Path(folder))
        context.report(
            what="GPUs that torch sees in its worker",
            value=seen["gpus"],
            expected=context.gpus,
            seconds=time.perf_counter() - began,
            note=f"CUDA_VISIBLE_DEVICES={seen['visible']!r}, device {seen['device']}",
        )
    if counted < context.gpus or seen["gpus"] != context.gpus:
        sys.exit(f"Ray counts {counted} GPUs, and its worker sees {seen['gpus']}; expected {context.gpus} or more")


def see_devices(task: dict[str, Any]) -> dict[str, Any]:
    """Return the devices that torch sees; runs in a Ray worker."""
    is_cuda = torch.cuda.is_available()
    return {
        "gpus": torch.cuda.device_count() if is_cuda else 0,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
    }
