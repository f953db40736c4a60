"""The process group in which the workers of an attempt train: joined once, and made of workers that fit together.

`join_group` joins it, with a time-out that holds. In:  RANK, WORLD_SIZE, LOCAL_RANK and the address of rank 0 in the
environment, under every backend. Out: torch's and DeepSpeed's default group, and this worker's device.

`check_start` asks, before an attempt works, whether all workers run the same code, and whether the run directory is the
same storage for all of them:
1. Every worker looks in the run directory for the claim of this attempt, which the driver has written.
2. All workers exchange their identities, and the time on their clocks.
3. Rank 0 looks for a file of every other worker: the log of its phases.
4. A difference that makes other bits or loses a checkpoint is refused, by all workers alike; rank 0 logs the others:
       worker 1 on n2 has torch 2.12.0, 2 of 3 nodes 2.13.0
It takes less than 0.1 s. `jobs preflight` measures what takes longer: links, disks, storage (docs/preflight.md).
"""

import ctypes
import logging
import math
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from data.checks import few
from data.errors import ClusterError, MismatchedNodes
from data.files import SAME_STORAGE, look_for
from data.storage import Storage
from pipeline import artifacts
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.identity import (
    DEVICE,
    MUST_BE_EQUAL,
    SHOULD_BE_EQUAL,
    WORKERS_PER_GPU,
    Identity,
    code_mismatch,
    differences,
    identity,
    worker_name,
    workers_per_gpu,
)

LONGEST_LIST = 8  # nodes that a line names
LARGE_PIECE = 80 << 20  # bytes; larger than the heap that glibc gives a thread of its own, which holds 64 MB
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
SKEW_S = 1.0  # of a clock; the times of several nodes stand side by side in records, incidents and the accounting


def join_group(timeout_s: float) -> torch.device:
    """Join (or adopt) the process group and return this worker's device; NCCL on GPUs, gloo otherwise.

    Workers that share a GPU talk over gloo too, because NCCL refuses them. Raises ClusterError if there is no GPU left.
    The time-out holds for every later group too: DeepSpeed makes groups of its own and does not pass it on.
    """
    deepspeed = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bound_device = None
    # A collective that a worker never joins must fail in time; gloo's own time-out is 30 minutes.
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = gpu_of_worker()
        torch.cuda.set_device(device)
        backend = "nccl"
        # Left to itself NCCL takes for a barrier that comes first the GPU with the number of the rank, counted over all
        # nodes alike: where they have not equally many workers, another worker's.
        bound_device = device
        if not dist.is_initialized() and is_gpu_shared(device, timeout):
            backend = "gloo"
            bound_device = None
    else:
        device = torch.device("cpu")
        backend = "gloo"
        # At ZeRO 3 DeepSpeed asks at every reduction of gradients how many workers a node has, and starts numactl to
        # find out where this is not set.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shortcoming = keep_freed_memory()
        if shortcoming and os.environ.get("RANK", "0") == "0":
            logging.getLogger(__name__).warning(shortcoming)
    # A caller may have formed it, as tests do. No backend of jobs does: an error of a worker's has a rank.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    dist.new_group = partial(dist.new_group, timeout=timeout)  # also where its caller names none
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


_stores: list[dist.Store] = []  # as long as the process lives: without an agent rank 0 serves it for the others


def gpu_of_worker() -> torch.device:
    """Return the GPU of this worker: that with its number on the node. Raises ClusterError if there are too few."""
    local_rank = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count()
    if local_rank >= count * workers_per_gpu():
        raise ClusterError(
            f"{local_rank + 1} workers or more are on {socket.gethostname()}, where torch sees {count} GPUs\n"
            f"  expected a GPU for each worker of a node\n"
            f"  type fewer cluster.workers; or, to try it, {WORKERS_PER_GPU}=2 in the environment: workers share a GPU"
        )
    return torch.device("cuda", local_rank % count)


def is_gpu_shared(device: torch.device, timeout: timedelta) -> bool:
    """Collective: return whether any two workers compute on the same GPU, at any node.

    NCCL refuses such a group: "Duplicate GPU detected". Like NCCL, this compares addresses on the PCI bus, which are
    the same for two MIG slices of a GPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    store, _, world = next(dist.rendezvous("env://", timeout=timeout))
    _stores.append(store)
    # Each worker sends a few words, whatever the world: nobody reads the addresses of all.
    if store.add(f"gpu/{socket.gethostname()}/{pci_address(device)}", 1) > 1:
        store.set("gpu/shared", "yes")
    if store.add("gpu/arrived", 1) == world:
        store.set("gpu/all", "yes")
    store.wait(["gpu/all"], timeout)
    return store.check(["gpu/shared"])


def pci_address(device: torch.device) -> str:
    """Return where a GPU sits on its node's PCI bus, such as "0:26:0"."""
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        return str(properties.uuid)  # a torch that does not tell the address
    return ":".join(map(str, parts))


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
    # A thread may have a heap of its own, in which a large piece has pages of its own all the same: there is one piece
    # more of that kind then. Nothing is written into it: it takes addresses and no memory. Before glibc 2.33 nothing
    # tells.
    mallinfo2 = getattr(library, "mallinfo2", None)
    if mallinfo2 is None:
        return ""
    mallinfo2.restype = MallocInfo
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    before = mallinfo2()
    piece = library.malloc(LARGE_PIECE)
    after = mallinfo2()
    library.free(piece)
    # The fourth number, called hblks there, counts pieces with pages of their own.
    if after.numbers[3] > before.numbers[3]:
        return (
            "the loop is in a thread whose malloc gives large pieces back to the kernel, and a step may take twice the "
            "time\n  start this process with GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
        )
    return ""


class MallocInfo(ctypes.Structure):
    """Holds what mallinfo2(3) returns: ten numbers."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def fetch_init(storage: Storage, init: str) -> None:
    """Collective: one worker of each node makes sure that it has the weights that another stage of this run handed on.

    Raises DataError where they are not what that stage wrote, StorageError.
    """
    # A path outside the run is on every node, or this node says that it is missing.
    if os.environ["LOCAL_RANK"] == "0" and Path(init).is_relative_to(storage.local):
        artifacts.fetch_weights(storage, Path(init).relative_to(storage.local).as_posix())
    dist.barrier()


def log_network(log: Callable[[str], None]) -> None:
    """Collective: log over which network interfaces the workers talk, and what the environment tells NCCL and gloo.

    A variable that is not the same everywhere is named with its nodes: "eth0 on n1, ib0 on n2". A single worker has no
    other to talk to.
    """
    if dist.get_world_size() == 1:
        return
    settings: dict[str, str] = {}
    for name, value in os.environ.items():
        if name.startswith(("NCCL_", "GLOO_")):
            settings[name] = value
    here = (socket.gethostname(), settings)
    places = [here] * dist.get_world_size()  # the node of each worker, and its settings
    dist.all_gather_object(places, here)

    # The interface stands first, then the variables by their names.
    backend = dist.get_backend()
    label: str = backend
    chooser = "GLOO_SOCKET_IFNAME"
    if backend == "nccl":
        label = "NCCL"
        chooser = "NCCL_SOCKET_IFNAME"
    names = set().union(*(settings for _, settings in places))
    parts = []
    for name in (chooser, *sorted(names - {chooser})):
        default = "the interface that it picks" if name == chooser else "not set"
        by_node: dict[str, str] = {}
        for node, settings in places:
            by_node.setdefault(node, settings.get(name, default))
        shown = [f"{value} on {node}" for node, value in by_node.items()]
        text = few(shown, LONGEST_LIST, " and {} nodes more")
        if len(set(by_node.values())) == 1:
            text = next(iter(by_node.values()))
        if name == chooser:
            parts.append(f"network: {label} over {text}")
        else:
            parts.append(f"{name}={text}")
    if dist.get_rank() == 0:
        log("; ".join(parts))


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the GPU, such as "NVIDIA H100 80GB HBM3"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_free() -> int:
    """Return the bytes that programs may still take: of the machine, or less where a container's limit is nearer."""
    free = psutil.virtual_memory().available
    # cgroup v2; a machine without a limit says "max", which is no number.
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        free = min(free, limit - used)
    return free


# ------------------------------------------------------------------------ whether they fit together


@dataclass(frozen=True)
class Arrival:
    """Holds what a worker sends the others when it has come to the start."""

    identity: Identity
    clock_s: float  # since 1970, when all had come
    sees_claim: bool
    free_bytes: int = 0  # of its GPU, or of its node's memory where it computes on the CPU


def check_start(
    *,
    run: Path,
    attempt: int,
    attempt_folder: Path,
    code: str,
    claimed: float,
    device: torch.device,
    is_shared: bool,
    device_bytes: int | None = None,
    log: Callable[[str], None],
) -> None:
    """Collective: refuse a worker group that would not train as one; rank 0 logs with `log`.

    `code` is the digest of the driver's code, `claimed` when it claimed the attempt. Without `is_shared` the run
    directory is each node's own, and no node looks for files of another. `device_bytes` is what a worker needs of its
    device, where that is known. Raises ClusterError, on all workers alike.
    """
    # 1. In a folder that is listed anew, and with patience, where a network file system is late.
    claim = run / "attempts" / f"{attempt:06d}.json"
    sees_claim = True
    if is_shared:
        unseen, _ = look_for(claim.parent, {claim.name: None})
        sees_claim = not unseen

    # 2. The clocks are read when all have come, so that they are read together.
    myself = identity(device_name(device))
    free = memory_free()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // workers_per_gpu()
    dist.barrier()
    arrival = Arrival(myself, time.time(), sees_claim, free)
    arrivals = [arrival] * dist.get_world_size()
    dist.all_gather_object(arrivals, arrival)

    # 3 and 4. Rank 0 alone sees the others' files; so it decides, and sends the others the reason of a refusal.
    refusal: list[ClusterError | None] = [None]
    if dist.get_rank() == 0:
        try:
            refuse_unlike(arrivals, code, claim, attempt_folder, is_shared)
        except ClusterError as error:
            refusal[0] = error
        try:
            check_device_memory(arrivals, device_bytes or 0)
        except ClusterError as error:
            # A CPU may swap, and its free memory changes by the minute; a GPU would end the run at its first step.
            if device.type == "cuda":
                refusal[0] = refusal[0] or error
            else:
                log(str(error))
        log_differences(arrivals, claimed, log)
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]


def check_device_memory(arrivals: Sequence[Arrival], device_bytes: int) -> None:
    """Raise ClusterError where a worker's device has fewer free bytes than a worker needs for a step."""
    computing_on_cpu: Counter[str] = Counter()
    for arrival in arrivals:
        if arrival.identity["device"] == "cpu":
            computing_on_cpu[arrival.identity["node"]] += 1
    for arrival in arrivals:
        # A GPU is one worker's, a node's memory that of all its workers.
        sharing = computing_on_cpu[arrival.identity["node"]] or 1
        if device_bytes * sharing <= arrival.free_bytes:
            continue
        free = f"{arrival.free_bytes / 2**30:.1f} GiB"
        share = f"{free} are free"
        if sharing > 1:
            share = f"{sharing} such share {free} that are free"
        way_out = "`python -m jobs plan RECIPE` says what of; lower micro_batch, or raise checkpoint_blocks or zero"
        if arrival.identity["device"] != "cpu":
            # Rounded down, because more than that is not free.
            limit_gb = math.floor(10 * arrival.free_bytes / 2**30) / 10
            way_out = (
                f"type `python -m jobs plan RECIPE cluster.gpu_memory_gb={limit_gb}`, which names the values of "
                "micro_batch, checkpoint_blocks and zero that fit"
            )
        needed = f"{device_bytes / 2**30:.1f} GiB for a step"
        raise ClusterError(f"{worker_name(arrival.identity)} needs {needed}, and {share}\n  {way_out}")


def refuse_unlike(arrivals: Sequence[Arrival], code: str, claim: Path, attempt_folder: Path, is_shared: bool) -> None:
    """Raise ClusterError where these workers may not train together; MismatchedNodes where others may."""
    # Other code or other versions would make other bits.
    workers = [arrival.identity for arrival in arrivals]
    text = code_mismatch(workers, code)
    if text:
        raise MismatchedNodes(
            f"{text}\n  expected: the same checkout everywhere, unchanged since the command started\n"
            "  run the same command again; where the node has a checkout of its own on PYTHONPATH, bring it up to date"
        )
    for difference in differences(workers, MUST_BE_EQUAL):
        raise MismatchedNodes(
            f"{difference}\n  expected: the same on all nodes\n  install there what constraints.txt pins"
        )
    if not is_shared:
        return

    # On storage of its own a worker would save a part of a checkpoint that no other worker finds.
    for arrival in arrivals:
        if not arrival.sees_claim:
            raise ClusterError(
                f"{worker_name(arrival.identity)} cannot see {claim}, which this command wrote\n  {SAME_STORAGE}"
            )
    files: dict[str, Identity] = {}
    for worker in workers:
        files[f"rank-{worker['rank']:05d}.log"] = worker
    unseen, waited_s = look_for(attempt_folder, dict.fromkeys(files))
    for name in unseen:
        here = socket.gethostname()
        path = attempt_folder / name
        raise ClusterError(
            f"{worker_name(files[name])} wrote {path}; rank 0 on {here} cannot see it after {waited_s:.0f} s\n"
            f"  {SAME_STORAGE}"
        )


def log_differences(arrivals: Sequence[Arrival], claimed: float, log: Callable[[str], None]) -> None:
    """Log differences that only may do harm: smaller versions, devices, clocks."""
    workers = [arrival.identity for arrival in arrivals]
    for difference in differences(workers, (*SHOULD_BE_EQUAL, *DEVICE)):
        log(str(difference))
    # The worker whose clock is furthest from rank 0's.
    first = arrivals[0]
    furthest = max(arrivals, key=lambda arrival: abs(arrival.clock_s - first.clock_s))
    skew_s = furthest.clock_s - first.clock_s
    if abs(skew_s) > SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        log(
            f"the clock of {worker_name(furthest.identity)} is {abs(skew_s):.1f} s {side} the clock of "
            f"{worker_name(first.identity)}: times from different nodes cannot be compared; synchronise them with NTP"
        )
    # How long the start took is not known, so only a clock that is behind the driver's can be recognised.
    behind_s = claimed - first.clock_s
    if behind_s > SKEW_S:
        log(
            f"the clock of {worker_name(first.identity)} is at least {behind_s:.1f} s behind the driver's; "
            "synchronise them with NTP"
        )
