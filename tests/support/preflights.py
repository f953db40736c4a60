"""Worker functions of the preflight tests, in a separate module because workers import it by name."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from data import files
from pipeline import identity, process_group
from pipeline.monitoring.watchdog import Phases
from pipeline.process_group import join_group
from tests.support.savers import with_a_disk_of_its_own


def start_task(folder: Path, act: str) -> dict[str, Any]:
    """Return the task of two workers, after writing the files that a driver writes first."""
    run = folder / "run"
    attempt_folder = run / "stage" / "attempts" / "attempt-000001"
    attempt_folder.mkdir(parents=True)
    (run / "attempts").mkdir()
    (run / "attempts" / "000001.json").touch()
    return {
        "run": str(run),
        "attempt_folder": str(attempt_folder),
        "code": identity.code_version(),
        "claimed": time.time(),
        "act": act,
        "copy": str(folder / "copy"),
    }


def be_otherwise(task: dict[str, Any]) -> None:
    """Make this worker differ from the others."""
    act = task["act"]
    if act == "other code":
        # A separate checkout with one additional line in one file.
        for package in identity.PACKAGES:
            shutil.copytree(identity.ROOT / package, Path(task["copy"]) / package)
        with open(Path(task["copy"]) / "data" / "order.py", "a") as file:
            file.write("\n")
        identity.ROOT = Path(task["copy"])
    elif act == "other torch":
        identity.version = lambda package: "1.0"
    elif act == "own disk":
        with_a_disk_of_its_own(task["attempt_folder"])
    elif act == "no claim":
        with_a_disk_of_its_own(str(Path(task["run"]) / "attempts"))
    elif act == "other clock":
        clock = time.time
        time.time = lambda: clock() + 3600


def start(task: dict[str, Any]) -> dict[str, Any]:
    """Check the start, as `set_up` does."""
    files.SEEN_WITHIN_S = 0.3
    device = join_group(60)
    if dist.get_rank() == 1:
        be_otherwise(task)
    folder = Path(task["attempt_folder"])
    phases = Phases(folder, dist.get_rank(), 60)
    phases.enter("join", 0)
    lines: list[str] = []
    dist.barrier()
    began = time.monotonic()
    process_group.check_start(
        run=Path(task["run"]),
        attempt=1,
        attempt_folder=folder,
        code=task["code"],
        claimed=task["claimed"],
        device=device,
        is_shared=True,
        log=lines.append,
    )
    seconds = time.monotonic() - began
    phases.close()
    dist.destroy_process_group()
    return {"log": lines, "seconds": seconds}


def choose_backend(task: dict[str, Any]) -> list[str]:
    """Join the group as on GPUs, at the addresses of the task; return each worker's chosen backend by rank.

    The task may name a file for each worker that contains the boot id of its machine.
    """
    rank = int(os.environ["RANK"])
    domain, bus, number = task["addresses"][rank]
    properties = SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=number, uuid="")
    form = dist.init_process_group
    asked = []

    def form_over_gloo(backend: str, **options: Any) -> None:
        asked.append(backend)
        form("gloo", timeout=options["timeout"])

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "set_device", lambda device: None),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(dist, "init_process_group", form_over_gloo),
        patch.object(process_group, "BOOT_ID", Path(task["boots"][rank])),
    ):
        join_group(60.0)
    of_all = [""] * dist.get_world_size()
    dist.all_gather_object(of_all, asked[0])
    return of_all
