"""The process group of an attempt's workers: joins it, and checks at the start that all workers are compatible.

`join_group` joins it, with a time-out for all collectives. In:  RANK, WORLD_SIZE, LOCAL_RANK and the address of rank 0
in the environment, under every backend. Out: torch's and DeepSpeed's default group, and this worker's device.

`check_start` checks before training whether all workers run the same code, and whether the run directory is the same
storage for all of them:
1. Every worker looks in the run directory for the claim of this attempt, written by the driver.
2. All workers exchange their identities and clock times.
3. Rank 0 looks for a file of every other worker: its phase log.
4. A difference that would change bits or lose a checkpoint is an error on all workers; rank 0 logs other differences:
       worker 1 on n2 has torch 2.12.0, 2 of 3 nodes 2.13.0
All this takes less than 0.1 s. `jobs preflight` measures what takes longer: links, disks, storage (docs/preflight.md).
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
from pipeline.objects import send_as_json

LONGEST_LIST = 8  # nodes listed in a log line
LARGE_PIECE = 80 << 20  # bytes; more than the 64 MB heap that glibc gives each thread
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
SKEW_S = 1.0  # smallest clock difference to log: records, incidents and the accounting compare times of several nodes


def join_group(timeout_s: float) -> torch.device:
    """Join (or adopt) the process group and return this worker's device; NCCL on GPUs, gloo otherwise.

    Workers that share a GPU also use gloo, because NCCL does not support that. The time-out applies to later groups
    too: DeepSpeed creates some without passing it on. Raises ClusterError if there are too few GPUs.
    """
    deepspeed = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bound_device = None
    # A collective that a worker never joins must fail within this time; gloo's default is 30 minutes.
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = gpu_of_worker()
        torch.cuda.set_device(device)
        backend = "nccl"
        # Bind the device: otherwise, if the first collective is a barrier, NCCL uses the GPU numbered like the global
        # rank. If the nodes have different numbers of workers, that is another worker's GPU.
        bound_device = device
        if not dist.is_initialized() and is_gpu_shared(device, timeout):
            backend = "gloo"
            bound_device = None
    else:
        device = torch.device("cpu")
        backend = "gloo"
        # At ZeRO 3 DeepSpeed reads the number of workers per node at every gradient reduction; if this variable is not
        # set, it starts numactl each time.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shortcoming = keep_freed_memory()
        if shortcoming and os.environ.get("RANK", "0") == "0":
            logging.getLogger(__name__).warning(shortcoming)
    # The caller may have created the group, as tests do. No backend of `jobs` does: worker errors carry a rank.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    send_as_json()
    dist.new_group = partial(dist.new_group, timeout=timeout)  # also for callers that pass no time-out
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


_stores: list[dist.Store] = []  # kept alive until exit: without an agent rank 0 serves its store to the others


def gpu_of_worker() -> torch.device:
    """Return the GPU with this worker's local rank on its node. Raises ClusterError if there are too few."""
    local_rank = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count()
    if local_rank >= count * workers_per_gpu():
        raise ClusterError(
            f"{local_rank + 1} workers or more are on {socket.gethostname()}, where torch sees {count} GPUs\n"
            f"  expected one GPU per worker\n"
            f"  lower cluster.workers; or, for a trial, set {WORKERS_PER_GPU}=2 in the environment to share GPUs"
        )
    return torch.device("cuda", local_rank % count)


def is_gpu_shared(device: torch.device, timeout: timedelta) -> bool:
    """Collective: return whether any two workers use the same GPU of a node.

    NCCL fails for such a group with "Duplicate GPU detected". Like NCCL, this compares PCI bus addresses, which are the
    same for two MIG slices of a GPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    store, _, world = next(dist.rendezvous("env://", timeout=timeout))
    _stores.append(store)
    # Each worker sends a few words at any world size: nobody reads the addresses of all workers.
    if store.add(f"gpu/{socket.gethostname()}/{pci_address(device)}", 1) > 1:
        store.set("gpu/shared", "yes")
    if store.add("gpu/arrived", 1) == world:
        store.set("gpu/all", "yes")
    store.wait(["gpu/all"], timeout)
    return store.check(["gpu/shared"])


def pci_address(device: torch.device) -> str:
    """Return a GPU's address on the PCI bus of its node, such as "0:26:0"."""
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        return str(properties.uuid)  # this version of torch does not provide the address
    return ":".join(map(str, parts))


def keep_freed_memory() -> str:
    """Make glibc's malloc keep freed memory for the next step; return why that failed, or "" on success.

    By default malloc returns large pieces, and free memory at the end of the heap, to the kernel. In the next step the
    kernel must provide and zero every page again: 0.4 of a step of B/32 (docs/design/step.md). In exchange, a worker
    holds its peak memory until it exits.
    """
    # Values from malloc.h, described in mallopt(3).
    settings = {
        "M_TRIM_THRESHOLD": (-1, -1),  # never
        # No separate mappings for large pieces. The alternative, raising M_MMAP_THRESHOLD above 32 MB, has no effect
        # before glibc 2.35 (`do_set_mmap_threshold` in malloc.c).
        "M_MMAP_MAX": (-4, 0),
    }
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return "this C library has no mallopt: memory freed by a step may return to the kernel, which costs time"
    refused = [name for name, (number, value) in settings.items() if mallopt(number, value) != 1]
    if refused:
        return f"mallopt rejected {' and '.join(refused)}: memory freed by a step may return to the kernel"
    # In a thread with its own heap, a large piece still gets a separate mapping. Check it by allocating one: it is not
    # written to, so it uses addresses but no memory. Before glibc 2.33 this cannot be checked.
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
    # The fourth number, `hblks` in the manual, counts separate mappings.
    if after.numbers[3] > before.numbers[3]:
        return (
            "the loop runs in a thread whose malloc returns large pieces to the kernel, so a step may take twice as "
            "long\n  start this process with GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
        )
    return ""


class MallocInfo(ctypes.Structure):
    """The result of mallinfo2(3): ten numbers."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def fetch_init(storage: Storage, init: str) -> None:
    """Collective: make the exported weights of another stage of this run available on each node, once per node.

    Raises DataError if they differ from what that stage wrote, StorageError.
    """
    # A path outside the run exists on every node; if not, the node reports it as missing.
    if os.environ["LOCAL_RANK"] == "0" and Path(init).is_relative_to(storage.local):
        artifacts.fetch_weights(storage, Path(init).relative_to(storage.local).as_posix())
    dist.barrier()


def log_network(log: Callable[[str], None]) -> None:
    """Collective: log the network interfaces that the workers use, and the NCCL and gloo settings in the environment.

    Settings that differ are listed by node: "eth0 on n1, ib0 on n2". Logs nothing for a single worker.
    """
    if dist.get_world_size() == 1:
        return
    settings: dict[str, str] = {}
    for name, value in os.environ.items():
        if name.startswith(("NCCL_", "GLOO_")):
            settings[name] = value
    here = (socket.gethostname(), settings)
    places = [here] * dist.get_world_size()  # node and settings of each worker
    dist.all_gather_object(places, here)

    # The interface comes first, then the variables in alphabetical order.
    backend = dist.get_backend()
    label: str = backend
    chooser = "GLOO_SOCKET_IFNAME"
    if backend == "nccl":
        label = "NCCL"
        chooser = "NCCL_SOCKET_IFNAME"
    names = set().union(*(settings for _, settings in places))
    parts = []
    for name in (chooser, *sorted(names - {chooser})):
        default = "the default interface" if name == chooser else "not set"
        by_node: dict[str, str] = {}
        for node, settings in places:
            by_node.setdefault(node, settings.get(name, default))
        shown = [f"{value} on {node}" for node, value in by_node.items()]
        text = few(shown, LONGEST_LIST, " and {} more nodes")
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
    """Return the name of the CPU."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_free() -> int:
    """Return the free memory in bytes: of the machine, or within the container's limit if smaller."""
    free = psutil.virtual_memory().available
    # cgroup v2; without a limit the file contains "max", which int() rejects.
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        free = min(free, limit - used)
    return free


# ------------------------------------------------------------------------ whether they fit together


@dataclass(frozen=True)
class Arrival:
    """The report of one worker at the start, which all workers exchange."""

    identity: Identity
    clock_s: float  # seconds since 1970, read after all workers had arrived
    sees_claim: bool
    free_bytes: int = 0  # of its GPU; of its node's memory if it computes on the CPU


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
    """Collective: raise ClusterError, on all workers alike, if the workers are not compatible; rank 0 logs the rest.

    `code` is the digest of the driver's code, `claimed` the time at which it claimed the attempt. Without `is_shared`
    each node has its own run directory, and no node looks for the files of another. `device_bytes` is the device
    memory that a worker needs, if known.
    """
    # 1. List the folder again, and wait if necessary, because a network file system may be late.
    claim = run / "attempts" / f"{attempt:06d}.json"
    sees_claim = True
    if is_shared:
        unseen, _ = look_for(claim.parent, {claim.name: None})
        sees_claim = not unseen

    # 2. Clocks are read after a barrier, so that all are read at about the same time.
    myself = identity(device_name(device))
    free = memory_free()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // workers_per_gpu()
    dist.barrier()
    arrival = Arrival(myself, time.time(), sees_claim, free)
    arrivals = [arrival] * dist.get_world_size()
    dist.all_gather_object(arrivals, arrival)

    # 3. and 4. Only rank 0 looks for the others' files, so it decides and sends the error, if any, to all.
    refusal: list[ClusterError | None] = [None]
    if dist.get_rank() == 0:
        try:
            refuse_unlike(arrivals, code, claim, attempt_folder, is_shared)
        except ClusterError as error:
            refusal[0] = error
        try:
            check_device_memory(arrivals, device_bytes or 0)
        except ClusterError as error:
            # A CPU may swap and its free memory varies; a GPU without enough memory would fail at the first step.
            if device.type == "cuda":
                refusal[0] = refusal[0] or error
            else:
                log(str(error))
        log_differences(arrivals, claimed, log)
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]


def check_device_memory(arrivals: Sequence[Arrival], device_bytes: int) -> None:
    """Raise ClusterError if a worker's device has less free memory than a step needs."""
    computing_on_cpu: Counter[str] = Counter()
    for arrival in arrivals:
        if arrival.identity["device"] == "cpu":
            computing_on_cpu[arrival.identity["node"]] += 1
    for arrival in arrivals:
        # A GPU belongs to one worker; a node's memory is shared by all its workers.
        sharing = computing_on_cpu[arrival.identity["node"]] or 1
        if device_bytes * sharing <= arrival.free_bytes:
            continue
        free = f"{arrival.free_bytes / 2**30:.1f} GiB"
        share = f"{free} are free"
        if sharing > 1:
            share = f"{sharing} such workers share {free} of free memory"
        way_out = "`python -m jobs plan RECIPE` shows why; lower micro_batch, or raise checkpoint_blocks or zero"
        if arrival.identity["device"] != "cpu":
            # Rounded down to what is really free.
            limit_gb = math.floor(10 * arrival.free_bytes / 2**30) / 10
            way_out = (
                f"type `python -m jobs plan RECIPE cluster.gpu_memory_gb={limit_gb}`, which finds values of "
                "micro_batch, checkpoint_blocks and zero that fit"
            )
        needed = f"{device_bytes / 2**30:.1f} GiB for a step"
        raise ClusterError(f"{worker_name(arrival.identity)} needs {needed}, and {share}\n  {way_out}")


def refuse_unlike(arrivals: Sequence[Arrival], code: str, claim: Path, attempt_folder: Path, is_shared: bool) -> None:
    """Raise ClusterError if these workers must not train together; MismatchedNodes if others of them could."""
    # Different code or versions would give different bits.
    workers = [arrival.identity for arrival in arrivals]
    text = code_mismatch(workers, code)
    if text:
        raise MismatchedNodes(
            f"{text}\n  expected: the same checkout everywhere, unchanged since the command started\n"
            "  run the same command again; if the node has its own checkout on PYTHONPATH, update it"
        )
    for difference in differences(workers, MUST_BE_EQUAL):
        raise MismatchedNodes(
            f"{difference}\n  expected: the same version on all nodes\n  install the version from constraints.txt there"
        )
    if not is_shared:
        return

    # With separate storage a worker would save its part of a checkpoint out of reach of the others.
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
    """Log differences that may be harmful but do not prevent training: other versions, devices, clocks."""
    workers = [arrival.identity for arrival in arrivals]
    for difference in differences(workers, (*SHOULD_BE_EQUAL, *DEVICE)):
        log(str(difference))
    # Find the worker whose clock differs most from rank 0's.
    first = arrivals[0]
    furthest = max(arrivals, key=lambda arrival: abs(arrival.clock_s - first.clock_s))
    skew_s = furthest.clock_s - first.clock_s
    if abs(skew_s) > SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        log(
            f"the clock of {worker_name(furthest.identity)} is {abs(skew_s):.1f} s {side} the clock of "
            f"{worker_name(first.identity)}: times from different nodes cannot be compared; synchronise them with NTP"
        )
    # The duration of the start is unknown, so only a clock behind the driver's can be detected.
    behind_s = claimed - first.clock_s
    if behind_s > SKEW_S:
        log(
            f"the clock of {worker_name(first.identity)} is at least {behind_s:.1f} s behind the driver's; "
            "synchronise them with NTP"
        )
