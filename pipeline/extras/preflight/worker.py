"""The work of the workers and nodes of `jobs preflight`: they train nothing, and measure what training will need.

In:  {"folder": "/runs/x/.preflight-…/shared", "is_shared": true, "sets": ["/data/train"], "largest_bytes": 344000000}
Out: of rank 0, the reports of all: {"workers": [a document a worker], "network": {…}, …}

The first worker of each node looks at what belongs to the node: the folder, the machine, the sets. A node without a
worker does the same by itself (`examine_node`).
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
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder a GPU, also of GPUs that this user may not use


class MachineReport(TypedDict):
    """What one node has; JSON."""

    memory_free: int  # bytes
    shm_free: int | None  # bytes; None where there is no such folder
    open_files: int  # that a worker may have
    gpus_present: int
    gpu_memory_free: int | None  # bytes, of the worker's own GPU; None without


class WorkerReport(TypedDict):
    """The report of one worker, or of a node without a worker; JSON."""

    identity: Identity
    machine: MachineReport
    folder: FolderReport | None  # None of all but the first worker of a node
    sets: dict[str, Reach]  # by path; empty of all but those
    interface: str  # of the network, that gloo was told; "" where it chose itself


class PreflightReport(TypedDict):
    """The reports of all of them; JSON."""

    workers: list[WorkerReport]  # by rank
    spares: list[WorkerReport]  # nodes without a worker
    network: Network | None  # None of a single worker


def own_report(device: torch.device) -> WorkerReport:
    """Return the report without folder and sets."""
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
    """Collective: measure this worker and its node, and return the reports of all."""
    device = join_group(task["timeout_s"])
    world = dist.get_world_size()
    report = own_report(device)
    # Together, as a checkpoint is written and as shards are read: what nodes share they share here too.
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
