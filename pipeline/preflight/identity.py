"""What a worker says of itself, and in what workers differ that should be alike.

In:  {"rank": 1, "node": "n2", "code": "3f2a…", "packages": {"torch": "2.13.0", …}, "device": "cpu", …} of every worker
Out: "worker 1 on n2 has torch 2.12.0, worker 0 on n1 has 2.13.0"
"""

import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import torch

from pipeline.versions import ROOT, code_version, package_versions

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DIGEST_CHARACTERS = 12  # of a digest, as people are shown it


NO_RANK = -1  # of a node that has no worker


class Identity(TypedDict):
    """What one worker is, or a node without a worker; JSON."""

    rank: int
    node: str
    root: str  # where its checkout lies
    code: str  # the digest of that
    packages: dict[str, str]
    device: str  # "cpu", or the name of the GPU
    driver: str  # version of the GPU's driver; "" without one


def identity(device: torch.device) -> Identity:
    """Return what this worker is."""
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


# ------------------------------------------------------------------------ in what they differ


def named(worker: Identity) -> str:
    """Return how a worker is called in messages."""
    if worker["rank"] == NO_RANK:
        return f"the spare node {worker['node']}"
    return f"worker {worker['rank']} on {worker['node']}"


def other_code(workers: Sequence[Identity], code: str) -> str:
    """Name the first worker that runs other code than the driver's, `code`; "" where all run that."""
    others = [worker for worker in workers if worker["code"] != code]
    if not others:
        return ""
    first = others[0]
    return (
        f"{named(first)}{and_more(others)} runs other code than this command: "
        f"{first['code'][:DIGEST_CHARACTERS]} in {first['root']}, this command {code[:DIGEST_CHARACTERS]}"
    )


def other_packages(workers: Sequence[Identity], packages: Sequence[str]) -> list[str]:
    """Name, for each of the packages that not all have in one version, the first worker with another than rank 0's."""
    texts = []
    for package in packages:
        texts += differing(workers, package, lambda worker, name=package: worker["packages"][name])  # type: ignore[misc]
    return texts


def other_devices(workers: Sequence[Identity]) -> list[str]:
    """Name the first worker with another device than rank 0's, and with another driver."""
    return [
        *differing(workers, "device", lambda worker: worker["device"]),
        *differing(workers, "GPU driver", lambda worker: worker["driver"]),
    ]


def differing(workers: Sequence[Identity], what: str, value_of: Callable[[Identity], str]) -> list[str]:
    """Say in one line who has another value than rank 0; nothing where all agree."""
    expected = value_of(workers[0])
    others = [worker for worker in workers if value_of(worker) != expected]
    if not others:
        return []
    value = value_of(others[0]) or "none"
    first = workers[0]
    return [f"{named(others[0])}{and_more(others)} has {what} {value}, {named(first)} has {expected or 'none'}"]


def and_more(others: Sequence[Identity]) -> str:
    """Return " and 3 more" where it is not one worker alone."""
    if len(others) == 1:
        return ""
    return f" (and {len(others) - 1} more)"
