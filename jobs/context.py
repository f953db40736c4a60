"""What every stage is given, and how one stage names another's outputs."""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.files import write_whole
from jobs.cluster.worker_group import ClusterConfig

PACKAGES = ("models", "data", "pipeline", "jobs")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Context:
    """One stage of one campaign, ready to run."""

    name: str
    run: Path  # the campaign's directory
    directory: Path  # the stage's own, named by its key
    key: str
    cluster: ClusterConfig
    resolve: Callable[[str | None], str | None]  # "@stage/part" or a path → absolute path
    model: Any  # resolved architecture, None for stages without one
    say: Callable[[str], None]
    tick: Callable[[Path, int], None]  # called while a worker group works; shows its log, may stop or kill it
    stopping: Callable[[], bool]  # somebody asked this process to end


def reference(value: str) -> tuple[str, str] | None:
    """ "@shards/train" → ("shards", "train"); None for a path."""
    if not value.startswith("@"):
        return None
    stage, _, part = value[1:].partition("/")
    return stage, part


@cache
def code_version() -> str:
    """sha256 over the four packages' sources: the same on a laptop, in a container and on a worker without git."""
    total = hashlib.sha256()
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".cpp")):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


def environment() -> dict[str, str]:
    """Versions that a number may depend on."""
    from importlib.metadata import version

    packages = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")
    found = {package: version(package) for package in packages}
    return {"python": sys.version.split()[0], "machine": platform.machine(), **found}


def write_done(
    context: Context, config: dict[str, Any], parents: dict[str, str], outcome: dict[str, Any], began: float
) -> None:
    """Provenance first, then the marker that makes the stage finished."""
    provenance = {
        "stage": context.name,
        "key": context.key,
        "config": config,
        "inputs": parents,
        "code": code_version(),
        "environment": environment(),
        "command": " ".join(sys.argv),
        "user": os.environ.get("USER", ""),
        **{str(name): outcome[name] for name in ("ledger", "samples_seen", "step") if name in outcome},
    }
    write_whole(context.directory / "provenance.json", json.dumps(provenance, indent=1, default=str))
    done = {"key": context.key, "seconds": round(time.time() - began, 1), **outcome}
    write_whole(context.directory / "done.json", json.dumps(done, indent=1))
