"""What a node has left for its workers: cores, memory, shared memory, open files, GPUs."""

import os
import re
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import torch

from pipeline.process_group import memory_free

SHARED_MEMORY = Path("/dev/shm")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder a GPU, also for who may not use them


class Machine(TypedDict):
    """What one node has; JSON."""

    memory_free: int  # bytes
    shm_free: int | None  # bytes; None where there is no such folder
    open_files: int  # that a worker may have
    gpus_present: int
    gpu_memory_free: int | None  # bytes, of the worker's own GPU; None without


def machine(device: torch.device) -> Machine:
    """Return what this worker's node has."""
    shm_free = None
    with suppress(OSError):
        shm_free = shutil.disk_usage(SHARED_MEMORY).free
    gpus = 0
    with suppress(OSError):
        gpus = len(list(NVIDIA_GPUS.iterdir()))
    gpu_memory_free = None
    if device.type == "cuda":
        gpu_memory_free, _ = torch.cuda.mem_get_info(device)
    return {
        "memory_free": memory_free(),
        "shm_free": shm_free,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus_present": max(gpus, torch.cuda.device_count()),
        "gpu_memory_free": gpu_memory_free,
    }


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_models() -> tuple[str, ...]:
    """Return the names of this node's GPUs, each once, as the driver has them; () where there is none.

    Torch is not asked: it would take a GPU, and processes that are forked later could not compute on any.
    """
    names = set()
    with suppress(OSError):
        for path in NVIDIA_GPUS.glob("*/information"):
            match = re.search(r"^Model:\s*(.*\S)", path.read_text(), re.MULTILINE)
            if match:
                names.add(match[1])
    return tuple(sorted(names))
