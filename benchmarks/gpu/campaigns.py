"""Runs a campaign from tars, kills its worker, and compares the resumed run bit for bit with an undisturbed twin.

The recipe is the one `make demo` uses: digits packed into tars, a ViT trained in bf16, its checkpoints and, in a
complete campaign, all stages up to the few-shot probe. One GPU is enough: the only worker is the victim.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import Context
from jobs.resolved_recipe import Campaign
from jobs.run.session import run_campaign
from tests.support import campaigns, demo


def kill_and_compare(
    context: Context, backend: str, zero: int, is_whole: bool, is_compiled: bool, exact_parts: int
) -> None:
    """Run a campaign, kill its worker between two checkpoints, and compare the result with an undisturbed twin."""
    name = f"campaign-{backend}-{zero}-{int(is_compiled)}-{exact_parts}"
    overrides = [
        "cluster.workers=1",
        f"cluster.gpus_per_worker={context.gpus}",
        "cluster.backoff_s=0",
        "cluster.wait_s=60",  # on a Ray cluster without GPUs the stage would wait for ever
        "pretrain.precision=bf16",
        f"pretrain.zero={zero}",
        f"pretrain.compile={str(is_compiled).lower()}",
        f"pretrain.exact_parts={exact_parts}",
        *context.size.campaign,
    ]

    began = time.monotonic()
    killed = campaigns.load(demo.RECIPE, [f"run={context.work / name}", f"cluster.backend={backend}", *overrides])
    killer = demo.Killer(killed)
    stages = [None] if is_whole else ["shards", "pretrain"]
    for stage in stages:
        run_campaign(killed, only=stage, watchers=[killer])
    took_s = time.monotonic() - began

    twin = campaigns.load(demo.RECIPE, [f"run={context.work / name}-twin", "cluster.backend=processes", *overrides])
    for stage in ("shards", "pretrain"):
        run_campaign(twin, only=stage, quiet=True)

    row = {
        "backend": backend,
        "stages": "shards to few-shot" if is_whole else "shards, pretrain",
        "zero": zero,
        "compiled": is_compiled,
        "exact": bool(exact_parts),
        "killed_after": killer.killed_at,
        "seconds": took_s,
        **comparison(pretraining_of(killed), pretraining_of(twin)),
    }
    row["note"] = promise_of(pretraining_of(killed))
    if killer.killed_at is None:
        row["note"] = "no worker was killed: the run ended too soon"
    context.report(**row)
    # On GPUs only exact mode guarantees equal bits.
    is_promised = bool(exact_parts) or context.device == "cpu"
    if killer.killed_at is None or (is_promised and not row["is_equal"]):
        sys.exit(f"killed after step {killer.killed_at}; equal to the undisturbed twin: {row['is_equal']}")


def pretraining_of(loaded: Campaign) -> Path:
    return loaded.directory(loaded.stage("pretrain"))


def promise_of(directory: Path) -> str:
    """Return the statement about bitwise exactness from the first log line of the last attempt."""
    lines = [line for line in (directory / "log.txt").read_text().splitlines() if line.startswith("attempt ")]
    return lines[-1].rpartition("; ")[2]


def comparison(directory: Path, twin: Path) -> dict[str, Any]:
    """Compare every loss, including repeated steps, and the sha256 of the last checkpoint's files."""
    losses = demo.step_losses(directory)
    twin_losses = demo.step_losses(twin)
    differing = set(losses.keys() ^ twin_losses.keys())
    repeated = 0
    largest = 0.0
    for step, values in losses.items():
        repeated += len(values) > 1
        for loss in values:
            expected = twin_losses.get(step, [loss])[0]
            if loss != expected:
                differing.add(step)
                largest = max(largest, abs(loss - expected))
    manifest = demo.newest_manifest(directory)
    twin_manifest = demo.newest_manifest(twin)
    has_equal_files = manifest.files == twin_manifest.files and manifest.ledger == twin_manifest.ledger
    return {
        "steps": len(losses),
        "repeated": repeated,
        "first_difference": min(differing, default=None),
        "largest_difference": largest,
        "has_equal_files": has_equal_files,
        "is_equal": has_equal_files and not differing,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
