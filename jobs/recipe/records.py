"""Record a stage's config in stage.json, and compare it with the recipe when the stage is started again.

- `stage_record` returns the content of stage.json, which is written at every start.
- `unfinished_folder` finds an unfinished stage whose "forbid" fields have changed; it must not resume.
- `changed_warnings` finds changed "warn" fields; they are logged, and the stage resumes.
- `environment` records the versions of Python and packages, and the machine, because results may depend on them.
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from jobs.recipe.key import MISSING
from jobs.resolved_recipe import Campaign, Stage
from jobs.stage_folders import RECORD
from pipeline import artifacts, config
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.variables import recorded

# Packages whose versions may affect results.
RECORDED_PACKAGES = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")


def stage_record(stage: Stage) -> dict[str, Any]:
    """Return the content of stage.json: the config of the stage."""
    record: dict[str, Any] = {
        "name": stage.name,
        "section": stage.source,
        "kind": stage.kind.name,
        "key": stage.key,
        "model": models.to_dict(stage.model) if stage.model else None,
        "forbid": forbidden_fields(stage),
        "config": recorded(config.plain(stage.config)),
        "warn": recorded(config.tagged(stage.config, "warn")),
        "eval_inputs": dict(stage.eval_inputs),
    }
    if stage.chosen:
        record["chosen"] = dict(stage.chosen)
    return record


def forbidden_fields(stage: Stage) -> dict[str, object]:
    """Return the fields in a stage's key, flattened, as JSON types; `model.*` are fields of the resolved model."""
    fields = config.tagged(stage.config, "forbid")
    fields.pop("model", None)
    if stage.model:
        # The result is compared with a stage.json, in which tuples are lists.
        for name, value in config.as_json(models.to_dict(stage.model)).items():
            fields[f"model.{name}"] = value
    for field, key in stage.inputs.items():
        fields[f"content of {field}"] = key
    return recorded(fields)


def changes_since(folder: Path, stage: Stage) -> dict[str, str]:
    """Return the "forbid" fields that differ from the record in a stage's folder: field → description."""
    now = forbidden_fields(stage)
    before = recorded(artifacts.read_record(folder / RECORD)["forbid"])
    return config.differences(before, now)


def changed_warnings(directory: Path, stage: Stage) -> dict[str, str]:
    """Return the "warn" fields changed since the stage's last start: field → description.

    Data sets are compared by digest, or by path if an old record has no digest.
    """
    record_path = directory / RECORD
    if not record_path.exists():
        return {}
    record = artifacts.read_record(record_path)
    contents = record.get("eval_inputs", {})
    now = recorded(config.tagged(stage.config, "warn"))
    # Ignore recorded keys that this version of Patchline no longer has, if their value is null.
    # Records of earlier versions have the values of environment variables.
    before = {name: recorded(value) for name, value in record["warn"].items() if name in now or value is not None}
    changes = config.differences(before, now)
    for field, content in stage.eval_inputs.items():
        # A missing test set is not a change: a finished stage is skipped even if it is gone.
        if field not in contents or content == MISSING:
            continue
        if content == contents[field]:
            changes.pop(field, None)
        else:
            changes.setdefault(field, f"{field}: the content of {stage.parents[field]} has changed")
    return changes


def unfinished_folder(campaign: Campaign, stage: Stage) -> Path | None:
    """Return the folder of an unfinished stage with the same name but different "forbid" fields, or None."""
    # Folders are named after the key: if this folder exists, no "forbid" field has changed.
    if campaign.directory(stage).exists():
        return None
    folders = campaign.run.glob(f"{stage.name}-{'[0-9a-f]' * 8}")
    # Sort by attempt number, which increases across the whole run; times are unreliable if a clock has jumped.
    for folder in sorted(folders, key=newest_attempt, reverse=True):
        # Unfinished folders older than a finished one were abandoned with --fresh.
        if (folder / "done.json").exists():
            return None
        # A stage without a checkpoint has nothing to lose.
        if (folder / RECORD).exists() and StageCheckpoints(campaign.storage, folder.name).committed():
            return folder
    return None


def newest_attempt(folder: Path) -> int:
    """Return the number of a stage's newest attempt; 0 if there are no attempts."""
    newest = 0
    for path in (folder / "attempts").glob("attempt-*"):
        number = path.name.removeprefix("attempt-")
        # Users may have copied folders under other names.
        if number.isdigit():
            newest = max(newest, int(number))
    return newest


def environment() -> dict[str, str]:
    """Return the machine type and the versions of Python and packages; all of them may affect results."""
    versions = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in RECORDED_PACKAGES:
        versions[package] = version(package)
    return versions
