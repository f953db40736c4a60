"""What is written down of a stage: which config its folder belongs to, and what its numbers trace back to.

stage_run.py writes both files.

- `stage.json` (`stage_record`) is written at every start. The next start compares its own config with it
  (jobs/recipe/changes.py).
- `provenance.json` (`provenance_of`) is written when the stage has finished: config, inputs, code, environment.
- A tracker is told the same of a stage that starts (`facts_of`).
"""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from jobs.recipe.changes import forbidden_fields
from jobs.recipe.key import recipe_digest
from jobs.recipe.render import config_as_known
from jobs.resolved_recipe import Campaign, Context, Stage
from pipeline import artifacts, config
from pipeline.versions import code_version, git_commit

# Packages whose version a number may depend on.
RECORDED_PACKAGES = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")


def stage_record(stage: Stage) -> dict[str, Any]:
    """Return the content of stage.json: which config this folder belongs to."""
    return {
        "name": stage.name,
        "kind": stage.kind.name,
        "key": stage.key,
        "model": models.to_dict(stage.model) if stage.model else None,
        "forbid": forbidden_fields(stage),
        "config": config.plain(stage.config),
        "warn": config.tagged(stage.config, "warn"),
        "eval_inputs": dict(stage.eval_inputs),
        **({"chosen": dict(stage.known)} if stage.known else {}),
    }


def first_started(directory: Path, now: float) -> float:
    """Return when this folder's stage was first started, seconds since 1970; `now` where it never was."""
    record_path = directory / "stage.json"
    if not record_path.exists():
        return now
    return artifacts.read_record(record_path).get("started", now)


def provenance_of(
    context: Context, stage_config: Mapping[str, Any], inputs: Mapping[str, str], outcome: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of provenance.json: everything that the stage's numbers trace back to."""
    provenance: dict[str, Any] = {
        "stage": context.name,
        "key": context.stage.key,
        "config": stage_config,
        "inputs": inputs,
        "code": code_version(),
        "environment": environment(),
        "command": " ".join(sys.argv),
        "user": os.environ.get("USER", ""),
    }
    for name in ("ledger", "samples_seen", "step"):
        if name in outcome:
            provenance[name] = outcome[name]
    return provenance


def facts_of(campaign: Campaign, stage: Stage) -> dict[str, Any]:
    """Return what a tracker is told of a stage besides its numbers."""
    return {
        "run": str(campaign.run),
        "stage": stage.name,
        "kind": stage.kind.name,
        "key": stage.key,
        "recipe": recipe_digest(campaign),
        "code": code_version(),
        "commit": git_commit(),
        "inputs": stage.inputs,
        "cluster": config.plain(campaign.cluster),
        "model": models.to_dict(stage.model) if stage.model else None,
        "config": config_as_known(campaign, stage),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return Python's version, the machine, and the versions of packages that a number may depend on."""
    versions = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in RECORDED_PACKAGES:
        versions[package] = version(package)
    return versions
