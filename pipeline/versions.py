"""Which code and which packages this process runs: what workers must have in common, and what provenance records."""

import hashlib
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "pipeline", "jobs")
SOURCES = {".py", ".cpp"}  # suffixes of the files that make pixels or numbers

COMMIT_VARIABLE = "PATCHLINE_COMMIT"  # tells a job, whose copy of the checkout has no git

MUST_BE_EQUAL = ("torch", "deepspeed")  # they make the numbers, and speak to themselves on the other workers
SHOULD_BE_EQUAL = ("python", "ray", "numpy")


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
