"""The process group in which the workers of an attempt train together: joined once, with a time-out that holds.

In:  RANK, WORLD_SIZE, LOCAL_RANK and the address of rank 0 in the environment, under every backend
Out: torch's and DeepSpeed's default group, and this worker's device
"""

import ctypes
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Function = TypeVar("Function")

LONGEST_LIST = 8  # nodes that a line names


def join_group(timeout_s: float) -> torch.device:
    """Join (or adopt) the process group and return this worker's device; NCCL on GPUs, gloo otherwise.

    The time-out holds for every later group too: DeepSpeed makes groups of its own and does not pass it on.
    """
    deepspeed = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bound_device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "nccl"
        # Left to itself NCCL takes for a barrier that comes first the GPU with the number of the rank, counted over all
        # nodes alike: where they have not equally many workers, another worker's.
        bound_device = device
    else:
        device = torch.device("cpu")
        backend = "gloo"
        keep_freed_memory()
    # A collective that a worker never joins must fail in time; gloo's own time-out is 30 minutes.
    timeout = timedelta(seconds=timeout_s)
    # A caller may have formed it, as tests do. No backend of jobs/cluster does: an error of a worker's has a rank.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    give_later_groups_the_timeout(timeout)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


def keep_freed_memory() -> None:
    """Have glibc's malloc keep the memory that is freed; with another C library nothing happens.

    Left to itself it gives pieces above 32 MB, and what lies free at the heap's end, back to the kernel. The next step
    is handed new pages one by one, and each must be filled with zeros: 0.4 of a step of B/32 (docs/step.md).
    A worker keeps its peak for as long as it lives.
    """
    # From malloc.h, mallopt(3).
    m_trim_threshold = -1
    m_mmap_threshold = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_trim_threshold, -1)  # never
        mallopt(m_mmap_threshold, 2**31 - 1)  # the largest that it takes


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without what it loads for a worker that never uses it, torch._inductor above all.

    A fork server does this too, once for all its workers (jobs/cluster/preload.py).
    """
    # DeepSpeed looks for an accelerator when it is imported; the import waits until the variable is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    from deepspeed.runtime import compiler

    # Left to itself DeepSpeed asks a compiler which of its operators it could build, and on CPUs builds this one at
    # start (81 CPU-seconds), which it never uses. A build that was killed leaves a lock on which every later run hangs;
    # one that loads leaves 69 MB a worker behind in /dev/shm. Of no other operator does it look up here whether it can.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    # ZeRO asks whether the optimizer is Muon, which wraps its functions in torch.compile where it is imported.
    compile_of_deepspeed = compiler.compile
    compiler.compile = not_compiled
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = compile_of_deepspeed
    return deepspeed


def not_compiled() -> Callable[[Function], Function]:
    """Take the place of what gives DeepSpeed its decorator: the functions stay as they are."""
    return lambda function: function


def network_line() -> str:
    """Collective: say over which network interfaces the workers talk, and what the environment tells NCCL and gloo.

    It is "" for a single worker, which talks to nobody.
    """
    if dist.get_world_size() == 1:
        return ""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, Place.of_this_worker())
    return describe_network(dist.get_backend(), places)


@dataclass(frozen=True)
class Place:
    """Tells on which node a worker is, and what its environment says about the network."""

    node: str
    settings: dict[str, str]

    @classmethod
    def of_this_worker(cls) -> "Place":
        """Return the place of this process."""
        names = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "GLOO_"))]
        return cls(socket.gethostname(), {name: os.environ[name] for name in names})


def describe_network(backend: str, places: Sequence[Place]) -> str:
    """Return the line of `network_line`, from the places of all workers by rank."""
    chooser = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    label = "NCCL" if backend == "nccl" else backend
    names = {name for place in places for name in place.settings}
    parts = [f"network: {label} over {differing(chooser, places, 'the interface that it picks')}"]
    for name in sorted(names - {chooser}):
        parts.append(f"{name}={differing(name, places, 'not set')}")
    return "; ".join(parts)


def differing(name: str, places: Sequence[Place], default: str) -> str:
    """Return a variable's value where it is the same everywhere, otherwise "eth0 on n1, ib0 on n2"."""
    by_node: dict[str, str] = {}
    for place in places:
        by_node.setdefault(place.node, place.settings.get(name, default))
    values = set(by_node.values())
    if len(values) == 1:
        return values.pop()
    shown = [f"{value} on {node}" for node, value in by_node.items()]
    more = f" and {len(shown) - LONGEST_LIST} nodes more" if len(shown) > LONGEST_LIST else ""
    return ", ".join(shown[:LONGEST_LIST]) + more


def give_later_groups_the_timeout(timeout: timedelta) -> None:
    """Make `dist.new_group` use this time-out where its caller names none."""
    original = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        options.setdefault("timeout", timeout)
        return original(*args, **options)

    dist.new_group = new_group
