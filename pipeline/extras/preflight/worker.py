"""Tasks that workers and nodes run for `jobs preflight`, which measures a cluster's resources but does not train.

In:  {"folder": "/runs/x/.preflight-…/shared", "is_shared": true, "sets": ["/data/train"], "largest_bytes": 344000000}
Out: on rank 0, the reports of all workers: {"workers": [one report per worker], "network": {…}, …}

The first worker of each node tests the node's shared resources: the folder, the machine and the data sets. On a node
without a worker, `examine_node` does this.
"""

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from data.extras.reach import Reach, measure_reads
from pipeline.extras.preflight.folder import FolderReport, report_on
from pipeline.extras.preflight.network import Network, measure
from pipeline.identity import Identity, identity
from pipeline.process_group import device_name, join_group, memory_free

SHARED_MEMORY = Path("/dev/shm")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU, including GPUs that this process cannot use


class MachineReport(TypedDict):
    """Resources of one node, in JSON-serialisable form."""

    memory_free: int  # free memory in bytes
    shm_free: int | None  # bytes in /dev/shm; None if it does not exist
    open_files: int  # limit of open files for a worker
    gpus_present: int
    gpu_memory_free: int | None  # bytes on the worker's GPU; None without a GPU


class WorkerReport(TypedDict):
    """The report of one worker, or of a node without a worker, in JSON-serialisable form."""

    identity: Identity
    machine: MachineReport
    folder: FolderReport | None  # only from the first worker of a node
    sets: dict[str, Reach]  # by path; only from the first worker of a node
    interface: str  # network interface configured for gloo; "" if gloo chooses it


class PreflightReport(TypedDict):
    """The reports of all workers and nodes, in JSON-serialisable form."""

    workers: list[WorkerReport]  # reports in the order of ranks
    spares: list[WorkerReport]  # from nodes without a worker
    network: Network | None  # None with a single worker


def own_report(device: torch.device) -> WorkerReport:
    """Return this worker's report; the tests of the folder and the data sets are not included."""
    shm_free = None
    with suppress(OSError):
        shm_free = shutil.disk_usage(SHARED_MEMORY).free
    gpus = 0
    with suppress(OSError):
        gpus = len(list(NVIDIA_GPUS.iterdir()))
    gpu_memory_free = None
    if device.type == "cuda":
        gpu_memory_free, _ = torch.cuda.mem_get_info(device)
    machine: MachineReport = {
        "memory_free": memory_free(),
        "shm_free": shm_free,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus_present": max(gpus, torch.cuda.device_count()),
        "gpu_memory_free": gpu_memory_free,
    }
    return {
        "identity": identity(device_name(device)),
        "machine": machine,
        "folder": None,
        "sets": {},
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


def examine_node(task: Mapping[str, Any]) -> WorkerReport:
    """Return the report of this node, which has no worker."""
    report = own_report(torch.device("cpu"))
    report["folder"] = report_on(Path(task["folder"]), socket.gethostname(), is_shared=task["is_shared"])
    for path in task["sets"]:
        report["sets"][path] = measure_reads(path)
    return report


def examine(task: Mapping[str, Any]) -> PreflightReport:
    """Collective: measure this worker and its node, and return the reports of all workers."""
    device = join_group(task["timeout_s"])
    world = dist.get_world_size()
    report = own_report(device)
    # All nodes test at the same time, as in training, so that they compete for shared resources.
    is_first_of_node = os.environ["LOCAL_RANK"] == "0"
    dist.barrier()
    if is_first_of_node:
        report["folder"] = report_on(Path(task["folder"]), f"{dist.get_rank():05d}", is_shared=task["is_shared"])
    dist.barrier()
    if is_first_of_node:
        for path in task["sets"]:
            report["sets"][path] = measure_reads(path)
    dist.barrier()
    reports = [report] * world
    dist.all_gather_object(reports, report)
    network = None
    if world > 1:
        nodes = []
        for other in reports:
            nodes.append(other["identity"]["node"])
        network = measure(device, nodes, task["largest_bytes"])
    dist.destroy_process_group()
    return {"workers": reports, "spares": [], "network": network}
