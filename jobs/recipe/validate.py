"""The checks of a stage before it runs, which `plan`, `run` and `preflight` make alike.

    validate(stage, available)  →  [CheckResult("FAIL", "inputs", "pretrain.data.train: no index at data/train"), …]

Of a stage that has not finished:
1. inputs from outside the campaign that are missing;
2. whether it is half done with another config;
3. whether a class id means the same in all its sets, and in the weights whose head it keeps (class_names.py);
4. what the kinds of the stages that read it check of it, as a sweep by which samples it chooses;
5. what its kind checks (jobs/stages): its config against the cluster, its sets, its memory.
Of a finished stage: whether what it handed on is what it wrote.

Data that an earlier stage makes may not be there yet: `run` validates a stage once more when it is about to start.
"""

from collections.abc import Iterable, Iterator, Sequence

from data.checks import few
from data.errors import DataError, ExitCode, PatchlineError
from jobs.named_stages import RECORD, stages_in
from jobs.recipe import class_names
from jobs.recipe.records import forbidden_fields, half_done_folder
from jobs.resolved_recipe import INPUTS, Available, Campaign, CheckResult, Stage, reference
from pipeline import artifacts, config
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

MOST_NAMED = 8  # missing inputs, or changed keys, that a message names


def validate(stage: Stage, available: Available, *, fresh: bool = False) -> list[CheckResult]:
    """Return the results of all checks of a stage.

    `fresh` lets a stage start over that is half done with another config. Raises OSError.
    """
    results: list[CheckResult] = []
    try:
        # Result by result: those before an error are kept.
        for result in checks(stage, available, fresh=fresh):
            results.append(result)
    except PatchlineError as error:
        # Later checks may rely on the one that has failed.
        results.append(CheckResult.of(error, stage.name))
    return results


def checks(stage: Stage, available: Available, *, fresh: bool) -> Iterator[CheckResult]:
    """Check a stage. Raises ConfigError and DataError for what cannot run, or has changed since it finished."""
    campaign = available.campaign
    # Of a finished stage, that what it handed on is what it wrote.
    if available.checks_files and campaign.done(stage) is not None:
        texts: list[str] = []
        artifacts.check_files(campaign.directory(stage), texts.append)
        for text in texts:
            yield CheckResult("OK", "files", text)
        yield from stage.kind.check_outputs(stage, available)
        return
    if available.checks_files:
        for message in stage.missing:
            yield CheckResult.of(DataError(message), INPUTS)
        folder = half_done_folder(campaign, stage)
        if folder is not None and not fresh:
            record = artifacts.read_record(folder / "stage.json")
            changes = config.differences(record["forbid"], forbidden_fields(stage))
            if not changes:
                changes = [f"key: {record['key'][:8]} → {stage.key[:8]}, by another version of Patchline"]
            yield CheckResult(
                "FAIL",
                "config",
                f"{stage.name} is half done with another config:\n    " + "\n    ".join(changes),
                "  undo the change to resume it, or pass --fresh to start this stage over (the old one is kept)",
                ExitCode.CONFIG,
            )
        for reader in available.readers(stage):
            reader.kind.check_parent(reader, stage, available)
    class_names.check(stage, available)
    yield from stage.kind.checks(stage, available)


def validate_all(campaign: Campaign, stages: Sequence[Stage], *, fresh: bool = False) -> list[CheckResult]:
    """Return the results of these stages, and of the finished stages that they read."""
    available = Available(campaign)
    names = set()
    for stage in stages:
        names.add(stage.name)
        if campaign.done(stage) is not None:
            continue
        # A stage that goes on from a checkpoint of its own does not read the weights that it started from: they may
        # have gone.
        checkpoints = StageCheckpoints(campaign.storage, campaign.directory(stage).name)
        is_resumed = stage.kind.trains and not fresh and bool(checkpoints.committed())
        for field, value in stage.parents.items():
            link = reference(value)
            if link is not None and not (is_resumed and field == "init"):
                names.add(link[0])
    finished: list[Stage] = []
    results: list[CheckResult] = []
    for stage in campaign.stages:
        if campaign.done(stage) is not None and stage.name in names:
            finished.append(stage)
        elif stage in stages:
            results += validate(stage, available, fresh=fresh)
    results += restarted_stages(campaign, [stage for stage in stages if stage not in finished])
    # Last, because a stage that reads a lost shard can say how to do without it.
    for stage in finished:
        results += validate(stage, available)
    return results


def restarted_stages(campaign: Campaign, stages: Sequence[Stage]) -> Iterator[CheckResult]:
    """Report the stages that start anew although one of their name has finished: by which keys the two differ.

    What follows from a change in another stage is reported of that one alone, and of a sweep its first run.
    """
    reported = set()
    finished = [folder for folder in stages_in(campaign.run) if folder.is_finished]
    for stage in stages:
        folders = [folder for folder in finished if folder.name == stage.name]
        if not folders or stage.source in reported or campaign.directory(stage).exists():
            continue
        record = artifacts.read_record(folders[0].path / RECORD)
        changes: dict[str, str] = {}
        for change in config.differences(record["forbid"], forbidden_fields(stage)):
            key = change.partition(":")[0]
            field = key.removeprefix("content of ")
            if key == field or (field not in changes and reference(stage.parents.get(field, "")) is None):
                changes[key] = change
        if not changes:
            continue
        reported.add(stage.source)
        listed = few(list(changes.values()), MOST_NAMED, ", and {} more")
        text = f"{stage.name}: starts anew; {folders[0]}, stays as it is and differs by {listed}"
        if stage.kind.trains and stage.config.init is None:
            text += f"\n  to start from its weights, not from random ones, type {stage.source}.init={folders[0].path}"
        yield CheckResult("WARN", "config", text)


def refuse(results: Iterable[CheckResult]) -> None:
    """Raise the error of the first FAIL; inputs that are missing come first, and all in one."""
    failures = []
    missing = []
    for result in results:
        if result.level == "FAIL":
            failures.append(result)
            if result.subject == INPUTS:
                missing.append(result)
    if len(missing) > 1:
        # On one line with the first, because status.json keeps one line.
        messages = [str(result.error()) for result in missing[:MOST_NAMED]]
        if len(missing) > MOST_NAMED:
            messages.append(f"… and {len(missing) - MOST_NAMED} more")
        raise DataError(f"{len(missing)} inputs are missing: " + "\n  ".join(messages))
    for failure in [*missing, *failures]:
        raise failure.error()
