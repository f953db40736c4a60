"""What is written down of a stage, and what has changed of it since.

- `stage.json` (`stage_record`) says which config the stage's folder belongs to; it is written at every start.
- Fields tagged "forbid" may not have changed while the stage is half done: `half_done_folder`.
- A change of a field tagged "warn" is logged, and the stage goes on: `changed_warnings`.
- `environment` says what a stage's numbers depend on besides: Python, the machine, and the versions of packages.
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from jobs.recipe.key import MISSING
from jobs.recipe.references import known_values
from jobs.resolved_recipe import Campaign, Stage
from pipeline import artifacts, config
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

# Packages whose version a number may depend on.
RECORDED_PACKAGES = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")


def stage_record(stage: Stage) -> dict[str, Any]:
    """Return the content of stage.json: which config this folder belongs to."""
    record: dict[str, Any] = {
        "name": stage.name,
        "kind": stage.kind.name,
        "key": stage.key,
        "model": models.to_dict(stage.model) if stage.model else None,
        "forbid": forbidden_fields(stage),
        "config": config.plain(stage.config),
        "warn": config.tagged(stage.config, "warn"),
        "eval_inputs": dict(stage.eval_inputs),
    }
    known = known_values(stage)
    if known:
        record["chosen"] = known
    return record


def forbidden_fields(stage: Stage) -> dict[str, object]:
    """Return the fields that the key is of, flat and as JSON has them, with the resolved model for the recipe's."""
    fields = config.tagged(stage.config, "forbid")
    fields.pop("model", None)
    if stage.model:
        for name, value in models.to_dict(stage.model).items():
            fields[f"model.{name}"] = value
    for field, key in stage.inputs.items():
        fields[f"content of {field}"] = key
    # Through JSON, because this is compared with a stage.json, where tuples have become lists.
    return config.as_json(fields)


def changed_warnings(directory: Path, stage: Stage) -> dict[str, str]:
    """Return the fields tagged "warn" that have changed since this folder was last worked in, each with a text.

    A set has changed where its content has, by whatever path: of records that tell no content, where its path has.
    """
    record_path = directory / "stage.json"
    if not record_path.exists():
        return {}
    record = artifacts.read_record(record_path)
    contents = record.get("eval_inputs", {})
    changes: dict[str, str] = {}
    now = config.tagged(stage.config, "warn")
    # A key of an earlier version that has gone and held null changes nothing.
    before = {name: value for name, value in record["warn"].items() if name in now or value is not None}
    for text in config.differences(before, now):
        changes[text.partition(":")[0]] = text
    for field, content in stage.eval_inputs.items():
        # A finished stage is skipped also where the set that it was judged on is gone.
        if field not in contents or content == MISSING:
            continue
        if content == contents[field]:
            changes.pop(field, None)
        else:
            changes.setdefault(field, f"{field}: {stage.parents[field]}, which holds something else now")
    return changes


def half_done_folder(campaign: Campaign, stage: Stage) -> Path | None:
    """Return the folder of this name on which was worked last, with other forbidden fields, if it is unfinished."""
    # A folder is named by the key: where this key's is there, nothing has changed that may not.
    if campaign.directory(stage).exists():
        return None
    folders = campaign.run.glob(f"{stage.name}-{'[0-9a-f]' * 8}")
    # Attempts are numbered over the whole run; the clock may have jumped, so times would not tell which is the newest.
    for folder in sorted(folders, key=newest_attempt, reverse=True):
        # A finished stage stays under its own key, and what was begun before it had been given up with --fresh.
        if (folder / "done.json").exists():
            return None
        # One without a checkpoint loses nothing.
        if (folder / "stage.json").exists() and StageCheckpoints(campaign.storage, folder.name).committed():
            return folder
    return None


def newest_attempt(folder: Path) -> int:
    """Return the number of a stage's newest attempt; 0 where it has none."""
    newest = 0
    for path in (folder / "attempts").glob("attempt-*"):
        number = path.name.removeprefix("attempt-")
        # A folder of any other name is a copy made by hand.
        if number.isdigit():
            newest = max(newest, int(number))
    return newest


def environment() -> dict[str, str]:
    """Return Python's version, the machine, and the versions of packages that a number may depend on."""
    versions = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in RECORDED_PACKAGES:
        versions[package] = version(package)
    return versions
