"""Who a worker or a node is, in code, packages and device; and which of several is unlike the others.

    differences(workers, MUST_BE_EQUAL)  →  worker 1 on n2 has torch 2.12.0, 2 of 3 nodes 2.13.0

Nobody's packages are the yardstick but those of most nodes, each of which counts once. Of two versions on equally many
nodes neither is right: that is a tie, and said. The code has a yardstick: that of the driver.

Torch is not imported here: a node is asked who it is without it.
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
SOURCES = {".py", ".cpp"}  # suffixes of the files that make pixels or numbers

COMMIT_VARIABLE = "PATCHLINE_COMMIT"  # tells a job, whose copy of the checkout has no git

MUST_BE_EQUAL = ("torch", "deepspeed")  # they make the numbers, and speak to themselves on the other workers
SHOULD_BE_EQUAL = ("python", "ray", "numpy")

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DEVICE = ("device", "GPU driver")  # what workers should have alike beside packages
DIGEST_CHARACTERS = 12  # of a digest, as people are shown it
WORKERS_PER_GPU = "PATCHLINE_WORKERS_PER_GPU"  # variable of the environment
NO_RANK = -1  # of a node that has no worker


# ------------------------------------------------------------------------ what this process runs


@cache
def code_version() -> str:
    """Return the sha256 of the four packages' sources, which is the same everywhere, also where there is no git."""
    sources = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in SOURCES:
                sources.append(path)
    total = hashlib.sha256()
    # Sorted, because rglob follows the order of the file system, which differs from machine to machine.
    for path in sorted(sources):
        name = str(path.relative_to(ROOT))
        total.update(name.encode() + path.read_bytes())
    return total.hexdigest()


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "-dirty" where files differ from it; "" where it is not known.

    A submitted job has a copy without git, and is told by `submit`.
    """
    told = os.environ.get(COMMIT_VARIABLE, "")
    if told or not (ROOT / ".git").exists():
        return told
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that workers should have alike; "none" of one not there."""
    versions = {"python": sys.version.split()[0]}
    for package in (*MUST_BE_EQUAL, *SHOULD_BE_EQUAL[1:]):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


class Identity(TypedDict):
    """Code, packages and device of one worker, or of a node without a worker; JSON."""

    rank: int
    node: str
    root: str  # where its checkout lies
    code: str  # the digest of that
    packages: dict[str, str]
    device: str  # "cpu", or the name of the GPU
    driver: str  # version of the GPU's driver, "550.54.15"; "" without one


def workers_per_gpu() -> int:
    """Return how many workers may share a GPU, to try several workers on a machine with one. Raises ConfigError."""
    text = os.environ.get(WORKERS_PER_GPU, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{WORKERS_PER_GPU} is {text!r}, expected a whole number of at least 1\n  unset it, or type 2"
        )
    return int(text)


def identity(device: str) -> Identity:
    """Return the identity of this process, a worker on such a device or a node without a worker."""
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


# ------------------------------------------------------------------------ which is unlike the others


@dataclass(frozen=True)
class Difference:
    """A property that not all nodes have alike, and those that are unlike most of them."""

    name: str  # of the property: a package, "device", "GPU driver"
    odd: Sequence[Identity]  # that have another value than most nodes, at least one
    value: str  # of the first of these; "" where it has none
    expected: str  # of most nodes
    first: Identity  # that has the expected value
    nodes: int  # that have it
    of_nodes: int
    is_tie: bool  # another value is on as many nodes: nobody can tell which is right

    def __str__(self) -> str:
        """Return "worker 1 on n2 (and 3 more) has torch 2.12.0, 5 of 7 nodes 2.13.0"."""
        start = f"{worker_name(self.odd[0], len(self.odd) - 1)} has {self.name} {self.value or 'none'}, "
        expected = self.expected or "none"
        if self.is_tie:
            return f"{start}{worker_name(self.first)} {expected}: a tie, each on {self.nodes} of {self.of_nodes} nodes"
        return f"{start}{self.nodes} of {self.of_nodes} nodes {expected}"


def differences(workers: Sequence[Identity], names: Sequence[str]) -> list[Difference]:
    """Return a difference for each property that not all have alike: of packages, or of DEVICE."""
    result = []
    for name in names:
        values = []
        value_of_node: dict[str, str] = {}  # that of its first worker
        for worker in workers:
            of_worker = {**worker["packages"], "device": worker["device"], "GPU driver": worker["driver"]}
            values.append(of_worker[name])
            value_of_node.setdefault(worker["node"], of_worker[name])
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
    """Name the first worker that runs other code than the driver's, `code`; "" where all run that."""
    others = [worker for worker in workers if worker["code"] != code]
    if not others:
        return ""
    first = others[0]
    return (
        f"{worker_name(first, len(others) - 1)} runs other code than this command: "
        f"{first['code'][:DIGEST_CHARACTERS]} in {first['root']}, this command {code[:DIGEST_CHARACTERS]}"
    )


def worker_name(worker: Identity, more: int = 0) -> str:
    """Return how a worker is called in messages: "worker 1 on n2", with " (and 3 more)" where it stands for others."""
    name = f"worker {worker['rank']} on {worker['node']}"
    if worker["rank"] == NO_RANK:
        name = f"node {worker['node']}"
    if more:
        name += f" (and {more} more)"
    return name
