"""The process group in which the workers of an attempt train together: joined once, with a time-out that holds.

In:  RANK, WORLD_SIZE, LOCAL_RANK and the address of rank 0 in the environment, under every backend
Out: torch's and DeepSpeed's default group, and this worker's device
"""

import ctypes
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.engine.deepspeed import import_deepspeed

LONGEST_LIST = 8  # nodes that a line names
LARGE_PIECE = 80 << 20  # bytes; larger than the heap that glibc gives a thread of its own, which holds 64 MB


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
        # At ZeRO 3 DeepSpeed asks at every reduction of gradients how many workers a node has, and starts numactl to
        # find out where this is not set.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shortcoming = keep_freed_memory()
        if shortcoming and os.environ.get("RANK", "0") == "0":
            logging.getLogger(__name__).warning(shortcoming)
    # A collective that a worker never joins must fail in time; gloo's own time-out is 30 minutes.
    timeout = timedelta(seconds=timeout_s)
    # A caller may have formed it, as tests do. No backend of jobs does: an error of a worker's has a rank.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    give_later_groups_the_timeout(timeout)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


def keep_freed_memory() -> str:
    """Have glibc's malloc keep the memory that is freed; return why it does not, "" where it does.

    Left to itself it gives large pieces, and what lies free at the heap's end, back to the kernel. The next step is
    handed new pages one by one, and each must be filled with zeros: 0.4 of a step of B/32 (docs/design/step.md).
    A worker keeps its peak for as long as it lives.
    """
    # From malloc.h; mallopt(3) says what they do.
    settings = {
        "M_TRIM_THRESHOLD": (-1, -1),  # never
        # No piece has pages of its own. To raise the size from which it has them, M_MMAP_THRESHOLD, above 32 MB does
        # nothing before glibc 2.35 (`do_set_mmap_threshold` in malloc.c).
        "M_MMAP_MAX": (-4, 0),
    }
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return "this C library has no mallopt: memory that a step frees may go back to the kernel, which takes time"
    refused = [name for name, (number, value) in settings.items() if mallopt(number, value) != 1]
    if refused:
        return f"mallopt has refused {' and '.join(refused)}: memory that a step frees may go back to the kernel"
    if has_pages_of_its_own(library, LARGE_PIECE):
        return (
            "the loop is in a thread whose malloc gives large pieces back to the kernel, and a step may take twice the "
            "time\n  start this process with GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
        )
    return ""


class MallocInfo(ctypes.Structure):
    """Holds what mallinfo2(3) returns: ten numbers."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]

    @property
    def pieces_with_own_pages(self) -> int:
        """Called hblks there."""
        return int(self.numbers[3])


def has_pages_of_its_own(library: ctypes.CDLL, size: int) -> bool:
    """Tell whether malloc asks the kernel for pages of its own where this thread wants a piece of `size` bytes.

    Before glibc 2.33 nothing tells, and it returns False. Nothing is written into the piece: it takes addresses and no
    memory.
    """
    mallinfo2 = getattr(library, "mallinfo2", None)
    if mallinfo2 is None:
        return False
    mallinfo2.restype = MallocInfo
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    before: int = mallinfo2().pieces_with_own_pages
    piece = library.malloc(size)
    after: int = mallinfo2().pieces_with_own_pages
    library.free(piece)
    return after > before


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
