"""What one worker of `jobs preflight` does: it trains nothing, and measures what training will need.

In:  {"folder": "/runs/x/.preflight-…/shared", "is_shared": true, "sets": ["/data/train"], "largest_bytes": 344000000}
Out: of rank 0, what all have found out: {"workers": [one document a worker], "network": {…}}

The first worker of each node looks at what belongs to the node: the folder, the machine, the sets.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist

from data.remote.reach import Reach, read_some
from pipeline.preflight.folder import FolderReport, report_on, report_on_own
from pipeline.preflight.identity import Identity, identity
from pipeline.preflight.machine import Machine, machine
from pipeline.preflight.network import Network, measure
from pipeline.process_group import join_group


class WorkerReport(TypedDict):
    """What one worker has found out; JSON."""

    identity: Identity
    machine: Machine
    folder: FolderReport | None  # None of all but the first worker of a node
    sets: dict[str, Reach]  # by path; empty of all but those
    interface: str  # of the network, that gloo was told; "" where it chose itself


class PreflightReport(TypedDict):
    """What the workers have found out; JSON."""

    workers: list[WorkerReport]  # by rank
    network: Network | None  # None of a single worker
    seconds: float


def examine(task: Mapping[str, Any]) -> PreflightReport:
    """Collective: find out what this worker and its node are, and how fast they are; rank 0 has what all found."""
    device = join_group(task["timeout_s"])
    began = time.monotonic()
    rank = dist.get_rank()
    world = dist.get_world_size()
    report: WorkerReport = {
        "identity": identity(device),
        "machine": machine(device),
        "folder": None,
        "sets": {},
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }
    # Together, as a checkpoint is written and as shards are read: what nodes share they share here too.
    is_first_of_node = os.environ["LOCAL_RANK"] == "0"
    dist.barrier()
    if is_first_of_node:
        look_at_folder = report_on if task["is_shared"] else report_on_own
        report["folder"] = look_at_folder(Path(task["folder"]), rank)
    dist.barrier()
    if is_first_of_node:
        for path in task["sets"]:
            report["sets"][path] = read_some(path)
    dist.barrier()
    reports = [report] * world
    dist.all_gather_object(reports, report)
    network = None
    if world > 1:
        nodes = [other["identity"]["node"] for other in reports]
        network = measure(device, nodes, task["largest_bytes"])
    dist.destroy_process_group()
    return {"workers": reports, "network": network, "seconds": time.monotonic() - began}
