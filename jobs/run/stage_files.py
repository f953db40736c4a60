"""What is written down of a stage: which config its folder belongs to, and what its numbers trace back to.

stage_run.py writes both files.

- `stage.json` (`stage_record`) is written at every start. The next start compares its own config with it: fields tagged
  "forbid" may not have changed (`changes_since_half_done`), a change of one tagged "warn" is said (`changed_warnings`).
- `provenance.json` (`provenance_of`) is written when the stage has finished: config, inputs, code, environment.
- A tracker is told the same of a stage that starts (`facts_of`).
"""

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from jobs.context import Context
from jobs.recipe.campaign import recipe_digest
from jobs.recipe.choices import config_as_known
from jobs.recipe.stage_inputs import MISSING
from jobs.resolved_recipe import Campaign, Stage
from pipeline import artifacts, config
from pipeline.checkpoints.stored import committed_steps
from pipeline.versions import code_version, git_commit

# Packages whose version a number may depend on.
RECORDED_PACKAGES = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")


def stage_record(stage: Stage) -> dict[str, Any]:
    """Return the content of stage.json: which config this folder belongs to."""
    return {
        "name": stage.name,
        "kind": stage.kind,
        "key": stage.key,
        "model": models.to_dict(stage.model) if stage.model else None,
        "forbid": forbidden_fields(stage),
        "config": config.plain(stage.config),
        "warn": config.tagged(stage.config, "warn"),
        "judged_on": dict(stage.judged_on),
        **({"chosen": dict(stage.known)} if stage.known else {}),
    }


def first_started(directory: Path, now: float) -> float:
    """Return when this folder's stage was first started, seconds since 1970; `now` where it never was."""
    record_path = directory / "stage.json"
    if not record_path.exists():
        return now
    return artifacts.read_record(record_path).get("started", now)


def forbidden_fields(stage: Stage) -> dict[str, Any]:
    """Return the fields that the key is of, flat and as JSON has them, with the resolved model for the recipe's."""
    fields = config.tagged(stage.config, "forbid")
    fields.pop("model", None)
    if stage.model:
        for name, value in models.to_dict(stage.model).items():
            fields[f"model.{name}"] = value
    for field, key in stage.inputs.items():
        fields[f"content of {field}"] = key
    # Through JSON, because this is compared with a stage.json, where tuples have become lists.
    return json.loads(json.dumps(fields, default=str))


def changed_warnings(directory: Path, stage: Stage) -> dict[str, str]:
    """Return the fields tagged "warn" that have changed since this folder was last worked in, each with a text.

    A set has changed where its content has, by whatever path: of records that tell no content, where its path has.
    """
    record_path = directory / "stage.json"
    if not record_path.exists():
        return {}
    record = artifacts.read_record(record_path)
    contents = record.get("judged_on", {})
    changes: dict[str, str] = {}
    for text in config.differences(record["warn"], config.tagged(stage.config, "warn")):
        changes[text.partition(":")[0]] = text
    for field, content in stage.judged_on.items():
        # A finished stage is skipped also where the set that it was judged on is gone.
        if field not in contents or content == MISSING:
            continue
        if content == contents[field]:
            changes.pop(field, None)
        else:
            changes.setdefault(field, f"{field}: {stage.parents[field]}, which holds something else now")
    return changes


def changes_since_half_done(campaign: Campaign, stage: Stage) -> list[str]:
    """Say what may not change and has, since an unfinished stage of this name was last run; empty where nothing has."""
    # A folder is named by the key: where this key's is there, nothing has changed that may not.
    if campaign.directory(stage).exists():
        return []
    folders = campaign.run.glob(f"{stage.name}-{'[0-9a-f]' * 8}")
    # Attempts are numbered over the whole run; the clock may have jumped, so times would not tell which is the newest.
    for folder in sorted(folders, key=newest_attempt_name, reverse=True):
        # A finished stage stays under its own key, and one without a checkpoint loses nothing: neither is a conflict.
        record_path = folder / "stage.json"
        is_finished = (folder / "done.json").exists()
        if not record_path.exists() or is_finished or not committed_steps(folder, campaign.remote):
            continue
        record = artifacts.read_record(record_path)
        changes = config.differences(record["forbid"], forbidden_fields(stage))
        if changes:
            return changes
        return [f"key: {record['key'][:8]} → {stage.key[:8]}, by another version of Patchline"]
    return []


def newest_attempt_name(folder: Path) -> str:
    """Return the name of a stage's newest attempt, "attempt-000012"; "" where it has none."""
    names = [path.name for path in (folder / "attempts").glob("attempt-*")]
    return max(names, default="")


def provenance_of(
    context: Context, stage_config: Mapping[str, Any], inputs: Mapping[str, str], outcome: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of provenance.json: everything that the stage's numbers trace back to."""
    provenance: dict[str, Any] = {
        "stage": context.name,
        "key": context.key,
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
        "kind": stage.kind,
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
