"""Check stages before they run; `plan`, `run` and `preflight` use the same checks.

    validate(stage, available)  →  [CheckResult("FAIL", "inputs", "pretrain.data.train: no index at data/train"), …]

Checks of an unfinished stage:
1. inputs from outside the campaign exist;
2. no unfinished stage with the same name has a different config;
3. a class id means the same class in all its data sets and, if it keeps the head of its initial weights, in those
   weights too (class_names.py);
4. the stages that read its output accept it (`StageKind.check_parent`), for example a sweep's table;
5. the checks of its kind pass (jobs/stages): config against cluster, data sets, and memory.
Check of a finished stage: the digests of files read by later stages match the recorded ones.

Data from an earlier stage may not exist yet, so `run` validates each stage again right before it starts.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data.checks import few
from data.errors import DataError, ExitCode, PatchlineError
from jobs.recipe import class_names
from jobs.recipe.records import changes_since, unfinished_folder
from jobs.resolved_recipe import Available, Campaign, CheckResult, MissingInput, Stage
from jobs.stage_folders import RECORD, stages_in
from pipeline import artifacts
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

LENGTH = ("steps", "passes", "optim.schedule.cooldown_steps")  # fields that change only how long a stage trains
MAX_LISTED = 8  # missing inputs or changed keys listed in a message


def validate(stage: Stage, available: Available, *, fresh: bool = False) -> list[CheckResult]:
    """Return the results of all checks of a stage. Raises OSError if a file cannot be read.

    `fresh` allows an unfinished stage with a different config to restart from step 0.
    """
    results: list[CheckResult] = []
    try:
        # Append results one by one, so that those before an error are kept.
        for result in checks(stage, available, fresh=fresh):
            results.append(result)
    except PatchlineError as error:
        # Stop at the first error, because later checks may depend on earlier ones.
        results.append(CheckResult.of(error, stage.name))
    return [with_typed_keys(result, stage) for result in results]


def with_typed_keys(result: CheckResult, stage: Stage) -> CheckResult:
    """Return a result whose remedy names the keys of the recipe's section: a run of a sweep has no section."""
    problem, *remedy = result.text.split("\n")
    remedy = [line.replace(f"{stage.name}.", f"{stage.source}.") for line in remedy]
    typed = result.remedy.replace(f"{stage.name}.", f"{stage.source}.")
    return replace(result, text="\n".join([problem, *remedy]), remedy=typed)


def checks(stage: Stage, available: Available, *, fresh: bool) -> Iterator[CheckResult]:
    """Check a stage. Raises ConfigError or DataError if it cannot run, or if files of a finished stage have changed."""
    campaign = available.campaign
    # A finished stage: verify its files by digest.
    done = artifacts.read_done(campaign.directory(stage)) if available.checks_files else None
    if done is not None:
        texts: list[str] = []
        artifacts.check_files(campaign.directory(stage), texts.append)
        for text in texts:
            yield CheckResult("OK", "files", text)
        yield from stage.kind.check_outputs(stage, done, available)
        return
    if available.checks_files:
        yield from stage.missing
        folder = unfinished_folder(campaign, stage)
        if folder is not None and not fresh:
            changes = changes_since(folder, stage)
            lines = list(changes.values())
            if not changes:
                key = artifacts.read_record(folder / RECORD)["key"]
                lines = [f"key: {key[:8]} → {stage.key[:8]}, from another version of Patchline"]
            yield CheckResult(
                "FAIL",
                "config",
                f"{stage.name} is unfinished, and its config has changed:\n    " + "\n    ".join(lines),
                "  to resume it, undo the change; to restart it from step 0, add --fresh (the old folder is kept)"
                + ways_to_train_longer(stage, folder, changes, available),
                ExitCode.CONFIG,
            )
        for reader in available.readers(stage):
            reader.kind.check_parent(reader, stage, available)
    class_names.check(stage, available)
    yield from stage.kind.checks(stage, available)


def ways_to_train_longer(stage: Stage, folder: Path, changed: Collection[str], available: Available) -> str:
    """Return lines with the commands that train a stage for more steps; "" if other settings have changed too."""
    if not stage.kind.trains or not changed or not set(changed) <= set(LENGTH):
        return ""
    ways = stage.kind.ways_to_train_longer(stage, folder, available)
    return "".join(f"\n  to train longer, {way}" for way in ways)


def validate_all(campaign: Campaign, stages: Sequence[Stage], *, fresh: bool = False) -> list[CheckResult]:
    """Return the results of all checks of these stages and of the finished stages they read."""
    available = Available(campaign)
    names = set()
    for stage in stages:
        names.add(stage.name)
        if campaign.done(stage) is not None:
            continue
        # A stage that resumes from a checkpoint does not need its initial weights, which may have been deleted.
        checkpoints = StageCheckpoints(campaign.storage, campaign.directory(stage).name)
        is_resumed = stage.kind.trains and not fresh and bool(checkpoints.committed())
        for field, (parent, _) in stage.links.items():
            if not (is_resumed and field == "init"):
                names.add(parent)
    finished: list[Stage] = []
    results: list[CheckResult] = []
    for stage in campaign.stages:
        if campaign.done(stage) is not None and stage.name in names:
            finished.append(stage)
        elif stage in stages:
            results += validate(stage, available, fresh=fresh)
    results += restarted_stages(campaign, [stage for stage in stages if stage not in finished], available)
    # Check finished stages last: if a shard is lost, the stage that reads it reports how to exclude the shard.
    for stage in finished:
        results += validate(stage, available)
    return results


def restarted_stages(campaign: Campaign, stages: Sequence[Stage], available: Available) -> Iterator[CheckResult]:
    """Warn if a stage will run again because its settings have changed since it finished; list the changed keys.

    A change is reported only for the stage whose keys have changed, not for later stages, and once per sweep.
    """
    reported = set()
    finished = [folder for folder in stages_in(campaign.run) if folder.is_finished]
    for stage in stages:
        folders = [folder for folder in finished if folder.name == stage.name]
        if not folders or stage.source in reported or campaign.directory(stage).exists():
            continue
        changes = changes_since(folders[0].path, stage)
        # The content of an input is listed only if its name has not changed and no other stage writes it.
        listed = []
        for key, change in changes.items():
            field = key.removeprefix("content of ")
            if key == field or (field not in changes and field not in stage.links):
                listed.append(change)
        if not listed:
            continue
        reported.add(stage.source)
        text = f"{stage.name} starts from step 0, because its settings differ from {folders[0]} (kept): "
        text += few(listed, MAX_LISTED, ", and {} more")
        if stage.kind.trains and stage.config.init is None:
            init = shlex.quote(str(folders[0].path))
            text += f"\n  to start from those weights instead of random ones, set {stage.source}.init={init}"
        text += ways_to_train_longer(stage, folders[0].path, changes, available)
        yield CheckResult("WARN", "config", text)


def refuse(results: Iterable[CheckResult]) -> None:
    """Raise an error for the first FAIL among check results; missing inputs come first, combined into one error."""
    failures = []
    missing = []
    for result in results:
        if result.level == "FAIL":
            failures.append(result)
            if isinstance(result, MissingInput):
                missing.append(result)
    if len(missing) > 1:
        # The first message is on the first line, because status.json keeps only that line.
        messages = [str(result.error()) for result in missing[:MAX_LISTED]]
        if len(missing) > MAX_LISTED:
            messages.append(f"… and {len(missing) - MAX_LISTED} more")
        raise DataError(f"{len(missing)} inputs are missing: " + "\n  ".join(messages))
    for failure in [*missing, *failures]:
        raise failure.error()
