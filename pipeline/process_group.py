"""Joins the process group of an attempt's workers, and checks at the start that all workers are compatible.

`join_group` joins the group, with a timeout for all collectives. It reads RANK, WORLD_SIZE, LOCAL_RANK and the address
of rank 0 from the environment, creates the default group of torch and DeepSpeed, and returns this worker's device.

`check_start` checks before training whether all workers run the same code, and whether the run directory is the same
storage for all of them:
1. Every worker looks in the run directory for this attempt's claim, written by the driver.
2. All workers exchange their identities and clock times.
3. Rank 0 looks for a file written by every other worker: its phase log.
4. A difference that would change bits or lose a checkpoint is an error on all workers; rank 0 logs other differences:
       worker 1 on n2 has torch 2.12.0, 2 of 3 nodes have 2.13.0
These checks take less than 0.1 s. `jobs preflight` runs slower checks of links, disks and storage (docs/preflight.md).
"""

import ctypes
import hashlib
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

LONGEST_LIST = 8  # maximum number of nodes in a log line
LARGE_PIECE = 80 << 20  # bytes; more than the 64 MB heap that glibc gives each thread
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # unique for each machine and boot, unlike host names
SKEW_S = 1.0  # log clock differences above this: records, incidents and the accounting compare times between nodes


def join_group(timeout_s: float) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo otherwise) if necessary, and return this worker's device.

    Workers that share a GPU also use gloo, because NCCL does not support GPU sharing. The timeout also applies to
    later groups, because DeepSpeed creates groups without passing a timeout. Raises ClusterError if there are too few
    GPUs.
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
        # Bind the device. Otherwise, if the first collective is a barrier, NCCL picks the GPU by the global rank, which
        # can be another worker's GPU if the nodes have different numbers of workers.
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
    # Tests create the group themselves. No backend of `jobs` does, because worker errors carry a rank.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    send_as_json()
    dist.new_group = partial(dist.new_group, timeout=timeout)  # also for callers that pass no timeout
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


_stores: list[dist.Store] = []  # keep the stores alive until exit: without an agent, rank 0 serves its store to others


def gpu_of_worker() -> torch.device:
    """Return the GPU whose index is this worker's local rank. Raises ClusterError if the node has too few GPUs."""
    local_rank = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count()
    if local_rank >= count * workers_per_gpu():
        raise ClusterError(
            f"at least {local_rank + 1} workers are on {socket.gethostname()}, but torch sees only {count} GPUs there\n"
            f"  expected one GPU per worker\n"
            f"  lower cluster.workers; or, to share GPUs in a trial, set {WORKERS_PER_GPU}=2 in the environment"
        )
    return torch.device("cuda", local_rank % count)


def is_gpu_shared(device: torch.device, timeout: timedelta) -> bool:
    """Collective: return whether any two workers share a GPU.

    With shared GPUs, NCCL would fail with "Duplicate GPU detected". Like NCCL, this function compares PCI bus
    addresses, which are equal for two MIG slices of a GPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    store, _, world = next(dist.rendezvous("env://", timeout=timeout))
    _stores.append(store)
    # Two machines may have the same host name, and usually have the same addresses.
    machine = socket.gethostname()
    with suppress(OSError):
        machine += f"/{BOOT_ID.read_text().strip()}"
    # The cost per worker is independent of the world size: no worker reads the addresses of all others.
    if store.add(f"gpu/{machine}/{pci_address(device)}", 1) > 1:
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
    """Make glibc's malloc keep freed memory for the next step; return the reason if this fails, otherwise "".

    By default, malloc returns large blocks, and free memory at the end of the heap, to the kernel. In the next step the
    kernel must allocate and zero every page again, which takes 40 % of a B/32 step (docs/design/step.md). In exchange,
    a worker holds its peak memory until it exits.
    """
    # Values from malloc.h, described in mallopt(3).
    settings = {
        "M_TRIM_THRESHOLD": (-1, -1),  # never trim the heap
        # Do not map large blocks separately. The alternative, raising M_MMAP_THRESHOLD above 32 MB, has no effect
        # before glibc 2.35 (`do_set_mmap_threshold` in malloc.c).
        "M_MMAP_MAX": (-4, 0),
    }
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return "this C library has no mallopt: memory may be returned to the kernel after each step, which costs time"
    refused = [name for name, (number, value) in settings.items() if mallopt(number, value) != 1]
    if refused:
        return f"mallopt rejected {' and '.join(refused)}: memory may be returned to the kernel after each step"
    # In a thread with its own heap, a large block is still mapped separately. Test this by allocating one: without a
    # write it uses address space but no memory. Before glibc 2.33 this cannot be tested.
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
    # The fourth number (`hblks` in the manual) counts separate mappings.
    if after.numbers[3] > before.numbers[3]:
        return (
            "training runs in a thread whose malloc returns large blocks to the kernel, so a step may take twice as "
            "long\n  start this process with GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
        )
    return ""


class MallocInfo(ctypes.Structure):
    """The result of mallinfo2(3), a struct of ten numbers."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def fetch_init(storage: Storage, init: str) -> None:
    """Collective: download the weights of another stage in this run, once per node, if the nodes share no folder.

    Raises DataError if they differ from the files that the stage wrote, or StorageError if the store fails.
    """
    # A path outside the run must exist on every node; a node without it reports it as missing later.
    if os.environ["LOCAL_RANK"] == "0" and Path(init).is_relative_to(storage.local):
        artifacts.fetch_weights(storage, Path(init).relative_to(storage.local).as_posix())
    dist.barrier()


def log_network(log: Callable[[str], None]) -> None:
    """Collective: log the workers' network interfaces, and the NCCL and gloo settings in the environment.

    Settings that differ are listed by node: "eth0 on n1, ib0 on n2". Does not log for a single worker.
    """
    if dist.get_world_size() == 1:
        return
    settings: dict[str, str] = {}
    for name, value in os.environ.items():
        if name.startswith(("NCCL_", "GLOO_")):
            settings[name] = value
    here = (socket.gethostname(), settings)
    places = [here] * dist.get_world_size()  # (node, settings) of each worker
    dist.all_gather_object(places, here)

    # Log the interface first, then the variables in alphabetical order.
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


# Variables that choose the instructions of torch, MKL, oneDNN, OpenBLAS, NumPy and OpenCV, or a product's precision.
ARITHMETIC_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "OPENCV_CPU_DISABLE", "OPENCV_IPP"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)


def arithmetic_conditions() -> dict[str, str]:
    """Return conditions of this process that affect floating-point results, except for threads and versions."""
    values = {"processor": processor(), "instructions of torch": torch.backends.cpu.get_cpu_capability()}
    # A virtual machine can hide instructions of the same processor. "flags" is "Features" on ARM.
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = sorted(line.partition(":")[2].split())
                values["instructions of the processor"] = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12]
                break
    for name in ARITHMETIC_VARIABLES:
        if name in os.environ:
            values[name] = os.environ[name]
    return values


def memory_free() -> int:
    """Return the machine's free memory in bytes, or the remainder of the container's limit if that is smaller."""
    free = psutil.virtual_memory().available
    # cgroup v2; without a limit the file contains "max", which int() rejects.
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        # Like the machine's available memory, count cached files as free: the kernel drops them if memory is needed.
        for line in (CGROUP / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            if name in ("active_file", "inactive_file"):
                used -= int(size)
        free = min(free, limit - used)
    return free


# ------------------------------------------------------------------------ are the workers compatible?


@dataclass(frozen=True)
class Arrival:
    """A worker's report at the start of an attempt; all workers exchange these reports."""

    identity: Identity
    clock_s: float  # seconds since 1970, read after all workers had arrived
    sees_claim: bool
    free_bytes: int = 0  # free memory of its GPU, or of its node if it computes on the CPU


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
    """Collective: raise ClusterError on all workers if they are incompatible; rank 0 logs less serious differences.

    `code` is the digest of the driver's code; `claimed` is the time at which the driver claimed the attempt. If
    `is_shared` is false, each node has its own run directory, and rank 0 does not look for other workers' files.
    `device_bytes` is the device memory that a worker needs, if known.
    """
    # 1. Retry the listing for some time, because a network file system may show the file late.
    claim = run / "attempts" / f"{attempt:06d}.json"
    sees_claim = True
    if is_shared:
        unseen, _ = look_for(claim.parent, {claim.name: None})
        sees_claim = not unseen

    # 2. Read the clocks right after a barrier, so that all are read at about the same time.
    myself = identity(device_name(device))
    free = memory_free()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // workers_per_gpu()
    dist.barrier()
    arrival = Arrival(myself, time.time(), sees_claim, free)
    arrivals = [arrival] * dist.get_world_size()
    dist.all_gather_object(arrivals, arrival)

    # 3. and 4. Only rank 0 looks for the others' files, so it decides for all and broadcasts the error, if any.
    refusal: list[ClusterError | None] = [None]
    if dist.get_rank() == 0:
        try:
            refuse_unlike(arrivals, code, claim, attempt_folder, is_shared)
        except ClusterError as error:
            refusal[0] = error
        try:
            check_device_memory(arrivals, device_bytes or 0)
        except ClusterError as error:
            # Only GPUs fail at the first step without enough memory: a CPU can swap, and its free memory varies.
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
        # A GPU has one worker; the memory of a node is shared by all its workers.
        sharing = computing_on_cpu[arrival.identity["node"]] or 1
        if device_bytes * sharing <= arrival.free_bytes:
            continue
        free = f"{arrival.free_bytes / 2**30:.1f} GiB"
        share = f"only {free} is free"
        if sharing > 1:
            share = f"the {sharing} workers of this node share {free} of free memory"
        way_out = "`python -m jobs plan RECIPE` shows why; lower micro_batch, or raise checkpoint_blocks or zero"
        if arrival.identity["device"] != "cpu":
            # Round down, so that the limit does not exceed the free memory.
            limit_gb = math.floor(10 * arrival.free_bytes / 2**30) / 10
            way_out = (
                f"run `python -m jobs plan RECIPE cluster.gpu_memory_gb={limit_gb}`, which finds values of "
                "micro_batch, checkpoint_blocks and zero that fit"
            )
        needed = f"{device_bytes / 2**30:.1f} GiB for a step"
        raise ClusterError(f"{worker_name(arrival.identity)} needs {needed}, but {share}\n  {way_out}")


def refuse_unlike(arrivals: Sequence[Arrival], code: str, claim: Path, attempt_folder: Path, is_shared: bool) -> None:
    """Raise ClusterError if these workers must not train together; MismatchedNodes if a subset of the nodes can."""
    # Different code or versions would compute different results.
    workers = [arrival.identity for arrival in arrivals]
    text = code_mismatch(workers, code)
    if text:
        raise MismatchedNodes(
            f"{text}\n  expected the same checkout on all nodes, unchanged since the command started\n"
            "  run the same command again; if the node has its own checkout on PYTHONPATH, update it"
        )
    for difference in differences(workers, MUST_BE_EQUAL):
        raise MismatchedNodes(
            f"{difference}\n"
            "  expected the same version on all nodes\n"
            "  install the version from constraints.txt on the nodes that differ"
        )
    if not is_shared:
        return

    # Without shared storage a worker would save its part of a checkpoint where the others cannot read it.
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
            f"{worker_name(files[name])} wrote {path}, but rank 0 on {here} still cannot see the file after "
            f"{waited_s:.0f} s\n"
            f"  {SAME_STORAGE}"
        )


def log_differences(arrivals: Sequence[Arrival], claimed: float, log: Callable[[str], None]) -> None:
    """Log differences that do not prevent training but may cause problems: versions, devices, clocks."""
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
            f"{worker_name(first.identity)}, so times from different nodes cannot be compared; synchronise them with "
            "NTP"
        )
    # The start takes an unknown time, so a clock ahead of the driver's cannot be detected.
    behind_s = claimed - first.clock_s
    if behind_s > SKEW_S:
        log(
            f"the clock of {worker_name(first.identity)} is at least {behind_s:.1f} s behind the driver's; "
            "synchronise them with NTP"
        )
