"""Identifies each worker's or node's code, packages and device, and finds differences between workers.

    differences(workers, MUST_BE_EQUAL)  →  worker 1 on n2 has torch 2.12.0, 2 of 3 nodes have 2.13.0

The expected version of a package is the version on most nodes; each node counts once. If two versions are on the same
number of nodes, the difference is reported as a tie. The expected code is the driver's.

This module does not import torch, so that a node without workers can report its identity quickly.
"""

import hashlib
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from data.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "pipeline", "jobs")
SOURCES = {".py", ".cpp"}  # suffixes of source files that can change results

COMMIT_VARIABLE = "PATCHLINE_COMMIT"  # environment variable with the commit; a submitted job has no .git folder

MUST_BE_EQUAL = ("torch", "deepspeed")  # both affect results, and both communicate between workers
SHOULD_BE_EQUAL = ("python", "ray", "numpy")

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DEVICE = ("device", "GPU driver")  # hardware properties that should be equal on all workers
DIGEST_CHARACTERS = 12  # length of a digest in messages
WORKERS_PER_GPU = "PATCHLINE_WORKERS_PER_GPU"  # environment variable for trials that share a GPU
NO_RANK = -1  # rank of a node without a worker


# ------------------------------------------------------------------------ identity of this process


@cache
def code_version() -> str:
    """Return the sha256 of the four packages' source files: identical on every machine, and computed without git."""
    sources = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in SOURCES:
                sources.append(path)
    total = hashlib.sha256()
    # The order of rglob depends on the file system.
    for path in sorted(sources):
        name = str(path.relative_to(ROOT))
        total.update(name.encode() + path.read_bytes())
    return total.hexdigest()


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "-dirty" if there are uncommitted changes; "" if unknown.

    A submitted job runs from a copy without git; `submit` passes the commit in an environment variable.
    """
    commit = os.environ.get(COMMIT_VARIABLE, "")
    if commit or not (ROOT / ".git").exists():
        return commit
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of packages that must match on all workers; "none" if not installed."""
    versions = {"python": sys.version.split()[0]}
    for package in (*MUST_BE_EQUAL, *SHOULD_BE_EQUAL[1:]):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


class Identity(TypedDict):
    """The code, packages and device of a worker, or of a node without workers, as JSON values."""

    rank: int
    node: str
    root: str  # path of the checkout
    code: str  # digest of the code
    packages: dict[str, str]
    device: str  # "cpu", or the name of the GPU
    driver: str  # version of the GPU driver, such as "550.54.15"; "" if there is none


def workers_per_gpu() -> int:
    """Return how many workers may share a GPU: 1, or more to try distributed training on a single GPU.

    Raises ConfigError if the environment variable is not a positive whole number.
    """
    text = os.environ.get(WORKERS_PER_GPU, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{WORKERS_PER_GPU} is {text!r}, expected a positive integer\n"
            "  unset the variable, or set it to a number such as 2"
        )
    return int(text)


def identity(device: str) -> Identity:
    """Return the identity of this process, which is a worker on the given device or a node without workers."""
    driver = ""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    with suppress(OSError):
        match = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", NVIDIA_DRIVER.read_text())
        driver = match[1] if match else ""
    return {
        "rank": int(os.environ.get("RANK", NO_RANK)),
        "node": socket.gethostname(),
        "root": str(ROOT),
        "code": code_version(),
        "packages": package_versions(),
        "device": device,
        "driver": driver,
    }


# ------------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Difference:
    """A property that differs between nodes, and the workers that differ from the majority."""

    name: str  # name of the property: a package, "device" or "GPU driver"
    odd: Sequence[Identity]  # the workers that differ from the majority; at least one
    value: str  # value of the first differing worker; "" if it has none
    expected: str  # value on the majority of nodes
    first: Identity  # the first worker with the expected value
    nodes: int  # number of nodes with the expected value
    of_nodes: int  # total number of nodes
    is_tie: bool  # whether another value is equally common, so that neither is known to be right

    def __str__(self) -> str:
        """Format the difference: "worker 1 on n2 (and 3 more) has torch 2.12.0, 5 of 7 nodes have 2.13.0"."""
        start = f"{worker_name(self.odd[0], len(self.odd) - 1)} has {self.name} {self.value or 'none'}, "
        expected = self.expected or "none"
        if self.is_tie:
            return f"{start}{worker_name(self.first)} {expected}: a tie, each on {self.nodes} of {self.of_nodes} nodes"
        return f"{start}{self.nodes} of {self.of_nodes} nodes have {expected}"


def differences(workers: Sequence[Identity], names: Sequence[str]) -> list[Difference]:
    """Return a Difference for each named property (a package, or one of DEVICE) that differs between workers."""
    result = []
    for name in names:
        values = []
        value_of_node: dict[str, str] = {}  # node → value of its first worker
        for worker in workers:
            value_of = {**worker["packages"], "device": worker["device"], "GPU driver": worker["driver"]}
            values.append(value_of[name])
            value_of_node.setdefault(worker["node"], value_of[name])
        if len(set(values)) <= 1:
            continue
        counts = Counter(value_of_node.values())
        (expected, nodes), *others = counts.most_common()
        odd = [number for number, value in enumerate(values) if value != expected]
        difference = Difference(
            name=name,
            odd=[workers[number] for number in odd],
            value=values[odd[0]],
            expected=expected,
            first=workers[values.index(expected)],
            nodes=nodes,
            of_nodes=len(value_of_node),
            is_tie=any(count == nodes for _, count in others),
        )
        result.append(difference)
    return result


def code_mismatch(workers: Sequence[Identity], code: str) -> str:
    """Describe the first worker whose code differs from the driver's (digest `code`); "" if there is none."""
    others = [worker for worker in workers if worker["code"] != code]
    if not others:
        return ""
    first = others[0]
    return (
        f"{worker_name(first, len(others) - 1)} runs different code from this command: "
        f"{first['code'][:DIGEST_CHARACTERS]} in {first['root']}, expected {code[:DIGEST_CHARACTERS]}"
    )


def worker_name(worker: Identity, more: int = 0) -> str:
    """Return a worker's name for messages: "worker 1 on n2", or "worker 1 on n2 (and 3 more)" for a group."""
    name = f"worker {worker['rank']} on {worker['node']}"
    if worker["rank"] == NO_RANK:
        name = f"node {worker['node']}"
    if more:
        name += f" (and {more} more)"
    return name
