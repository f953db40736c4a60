"""The changes of a stage since its folder was last worked in, by the stage.json that is left there.

- Fields tagged "forbid" may not have changed while the stage is half done: `changes_since_half_done`.
- A change of a field tagged "warn" is logged, and the stage goes on: `changed_warnings`.
"""

from pathlib import Path

import models
from jobs.recipe.key import MISSING
from jobs.resolved_recipe import Campaign, Stage
from pipeline import artifacts, config
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints


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
    for text in config.differences(record["warn"], config.tagged(stage.config, "warn")):
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


def changes_since_half_done(campaign: Campaign, stage: Stage) -> list[str]:
    """Return the changes that are forbidden, since an unfinished stage of this name was last run; [] without any."""
    # A folder is named by the key: where this key's is there, nothing has changed that may not.
    if campaign.directory(stage).exists():
        return []
    folders = campaign.run.glob(f"{stage.name}-{'[0-9a-f]' * 8}")
    # Attempts are numbered over the whole run; the clock may have jumped, so times would not tell which is the newest.
    for folder in sorted(folders, key=newest_attempt_name, reverse=True):
        # A finished stage stays under its own key, and one without a checkpoint loses nothing: neither is a conflict.
        record_path = folder / "stage.json"
        is_finished = (folder / "done.json").exists()
        if not record_path.exists() or is_finished or not StageCheckpoints(campaign.storage, folder.name).committed():
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
