"""The identity of a worker, and the differences between workers that should be alike.

In:  {"rank": 1, "node": "n2", "code": "3f2a…", "packages": {"torch": "2.13.0", …}, "device": "cpu", …} of every worker
Out: "worker 1 on n2 has torch 2.12.0, worker 0 on n1 has 2.13.0"
"""

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from pipeline.versions import ROOT, code_version, package_versions

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DIGEST_CHARACTERS = 12  # of a digest, as people are shown it
NO_RANK = -1  # of a node that has no worker


class Identity(TypedDict):
    """Code, packages and device of one worker, or of a node without a worker; JSON."""

    rank: int
    node: str
    root: str  # where its checkout lies
    code: str  # the digest of that
    packages: dict[str, str]
    device: str  # "cpu", or the name of the GPU
    driver: str  # version of the GPU's driver; "" without one


def identity(device: torch.device) -> Identity:
    """Return the identity of this worker."""
    return {
        "rank": int(os.environ.get("RANK", NO_RANK)),
        "node": socket.gethostname(),
        "root": str(ROOT),
        "code": code_version(),
        "packages": package_versions(),
        "device": device_name(device),
        "driver": driver_version(),
    }


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the GPU, such as "NVIDIA H100 80GB HBM3"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def driver_version() -> str:
    """Return the version of the NVIDIA driver, "550.54.15"; "" where there is none."""
    text = ""
    with suppress(OSError):
        text = NVIDIA_DRIVER.read_text()
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    match = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", text)
    return match[1] if match else ""


# ------------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Difference:
    """A property that not all workers have alike: the first worker that differs from rank 0."""

    name: str  # of the property: a package, "device", "GPU driver"
    worker: Identity
    value: str  # "" where it has none
    more: int  # workers after it that differ from rank 0 as well
    first: Identity  # rank 0
    expected: str

    def __str__(self) -> str:
        """Return "worker 1 on n2 (and 3 more) has torch 2.12.0, worker 0 on n1 has 2.13.0"."""
        return (
            f"{named(self.worker, self.more)} has {self.name} {self.value or 'none'}, "
            f"{named(self.first)} has {self.expected or 'none'}"
        )


def differences_in(workers: Sequence[Identity], name: str, values: Sequence[str]) -> list[Difference]:
    """Compare a property of workers, whose values are in the order of the workers; [] where all are alike."""
    first_other: int | None = None
    others = 0
    for number, value in enumerate(values):
        if value == values[0]:
            continue
        others += 1
        if first_other is None:
            first_other = number
    if first_other is None:
        return []
    return [Difference(name, workers[first_other], values[first_other], others - 1, workers[0], values[0])]


def other_packages(workers: Sequence[Identity], packages: Sequence[str]) -> list[Difference]:
    """Return a difference for each of the packages that not all workers have in one version."""
    differences = []
    for package in packages:
        versions = []
        for worker in workers:
            versions.append(worker["packages"][package])
        differences += differences_in(workers, package, versions)
    return differences


def other_devices(workers: Sequence[Identity]) -> list[Difference]:
    """Return the differences in the device and in the version of its driver."""
    devices = []
    drivers = []
    for worker in workers:
        devices.append(worker["device"])
        drivers.append(worker["driver"])
    return [*differences_in(workers, "device", devices), *differences_in(workers, "GPU driver", drivers)]


def other_code(workers: Sequence[Identity], code: str) -> str:
    """Name the first worker that runs other code than the driver's, `code`; "" where all run that."""
    others = []
    for worker in workers:
        if worker["code"] != code:
            others.append(worker)
    if not others:
        return ""
    first = others[0]
    return (
        f"{named(first, len(others) - 1)} runs other code than this command: "
        f"{first['code'][:DIGEST_CHARACTERS]} in {first['root']}, this command {code[:DIGEST_CHARACTERS]}"
    )


def named(worker: Identity, more: int = 0) -> str:
    """Return how a worker is called in messages: "worker 1 on n2", and " (and 3 more)" where it stands for others."""
    name = f"worker {worker['rank']} on {worker['node']}"
    if worker["rank"] == NO_RANK:
        name = f"the spare node {worker['node']}"
    if more:
        name += f" (and {more} more)"
    return name
