"""One stage of a campaign, run: what is checked before it, and the files that say what it was and what it did.

Before any stage starts, `plan` and `run` ask the same of all that have not finished: `check_inputs` and
`check_unfinished`, which also looks for the shards that were packed; and of those that have, `check_finished`.

Then, in order:
1. the stages it reads must have finished, and what they made must fit it;
2. a half-done stage of the same name with another config is a conflict: undo the change, or start over with `--fresh`;
3. `stage.json` is written: the config that this folder belongs to, which a later start compares with its own;
4. the stage works (jobs/stages); that a run of a sweep diverges is an outcome too, which the sweep's table judges;
5. `provenance.json` is written: config, inputs, code, environment;
6. `done.json` is written last, with the sha256 of every file that the stage hands on: from now on the stage is
   finished and is skipped.
"""

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from data.errors import ConfigError, DataError, Diverged
from jobs.attempts.restarts import StageFailed
from jobs.campaigns import class_names
from jobs.campaigns.campaign import KINDS, recipe_digest
from jobs.campaigns.choices import config_as_known
from jobs.campaigns.stage_checks import check_stage
from jobs.campaigns.stage_inputs import MISSING
from jobs.context import Context, index_if_made, reference
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import evaluate, evaluation_config, fewshot, pack, sweep, training
from jobs.worlds import allowed_worlds
from pipeline import config, handover
from pipeline.checkpoints.stored import committed_steps
from pipeline.planning.memory import GIB, BudgetTooSmall, blocks_of, with_blocks
from pipeline.planning.memory_remedies import check_fits, smaller_micro_batches
from pipeline.planning.memory_traces import TraceFailed
from pipeline.training_config import TrainConfig
from pipeline.versions import code_version, git_commit

# Packages whose version a number may depend on.
RECORDED_PACKAGES = ("torch", "deepspeed", "webdataset", "ray", "omegaconf", "numpy")


def run_stage(
    campaign: Campaign,
    stage: Stage,
    *,
    say: Callable[[str], None],
    tick: Callable[[Path, int], None],
    stopping: Callable[[], bool],
    check_owned: Callable[[], None],
    fresh: bool,
) -> dict[str, Any]:
    """Run a stage that has not finished; returns the content of its done.json.

    Raises ConfigError where a stage it reads has not run, and, unless `fresh`, where it is half done with another
    config.
    """
    began = time.time()
    # 1 and 2. Nothing is written before both have passed: a start that is refused leaves the run as it was.
    check_parents(campaign, stage)
    check_stage(campaign, stage)  # once more: data that stages before it made is there only now
    if not fresh:
        check_unchanged(campaign, [stage])

    directory = campaign.directory(stage)
    directory.mkdir(parents=True, exist_ok=True)
    # 3. Compare first: the new stage.json takes the place of the one that tells what the last start was given.
    warnings = changed_warnings(directory, stage)
    if warnings:
        say(f"{stage.name}: resuming with a changed {'; '.join(warnings.values())}")
    handover.write_record(directory / "stage.json", {**stage_record(stage), "started": first_started(directory, began)})
    say(f"{stage.name}: key {stage.key[:8]}, in {directory}")

    context = Context(
        name=stage.name,
        run=campaign.run,
        directory=directory,
        key=stage.key,
        cluster=campaign.cluster,
        resolve=campaign.resolve,
        model=stage.model,
        say=say,
        tick=tick,
        stopping=stopping,
        class_names=class_names.of_stage(campaign, stage),
        remote=campaign.remote,
        check_owned=check_owned,
    )
    try:
        outcome = dict(KINDS[stage.kind].run(stage.config, context))
    except StageFailed as error:
        outcome = divergence_of_run(stage, error, say)
    # Weights were read back by the worker that wrote them, before anybody else could have changed them.
    files = outcome.pop("files", {})

    # 5 and 6. Each is written whole, and done.json last: it promises that all the rest is there.
    inputs = {field: campaign.resolve(value) or "" for field, value in stage.parents.items()}
    provenance = provenance_of(context, dataclasses.asdict(stage.config), inputs, outcome)
    handover.write_record(directory / handover.PROVENANCE, provenance)
    other_files = [name for name in handover.HANDED_ON if name not in files]
    files = {**files, **handover.digests(directory, other_files)}
    done = {"key": stage.key, "seconds": round(time.time() - began, 1), **outcome, "files": files}
    handover.write_record(directory / handover.DONE, done)
    return done


def divergence_of_run(stage: Stage, failure: StageFailed, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what a sweep's run that has diverged leaves for its done.json; raise any other `failure` again."""
    # The largest learning rate of a grid may well diverge: the table then says so, and the other runs go on.
    if not stage.is_run or failure.kind != Diverged.__name__:
        raise failure
    message = str(failure).splitlines()[0].removeprefix(f"{stage.name}: ")
    say(f"{stage.name}: {message}\n  the sweep goes on without this run")
    return {sweep.DIVERGED: message}


def check_parents(campaign: Campaign, stage: Stage) -> None:
    """Raise ConfigError where the stage reads another that has not finished."""
    for field, value in stage.parents.items():
        link = reference(value)
        if link is None:
            continue
        parent, _ = link
        outcome = campaign.done(campaign.stage(parent))
        if outcome is None:
            raise ConfigError(
                f"{stage.name}.{field} is {value}, which has not run\n  run the campaign, or {parent} alone first"
            )
        if sweep.DIVERGED in outcome and stage.kind != "sweep":
            raise Diverged(f"{stage.name}.{field} is {value}, which has diverged\n  {outcome[sweep.DIVERGED]}")


def check_inputs(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise DataError, which names all of them, where inputs of unfinished stages from outside are missing."""
    messages = missing_inputs(campaign, stages)
    if len(messages) > 1:
        # On one line with the first, because status.json keeps one line.
        messages[0] = f"{len(messages)} inputs are missing: {messages[0]}"
    if messages:
        raise DataError("\n  ".join(messages))


def missing_inputs(campaign: Campaign, stages: Sequence[Stage]) -> list[str]:
    """Return a message for each input from outside the campaign that an unfinished stage reads and that is missing."""
    messages: list[str] = []
    for stage in stages:
        # A finished stage is skipped: what it was made from may be gone.
        if campaign.done(stage) is None:
            messages += stage.missing
    return messages


def check_memory(campaign: Campaign, stages: Sequence[Stage], say: Callable[[str], None]) -> None:
    """Raise ConfigError, with what to change, where a stage to be trained does not fit `activation_gb` or
    `cluster.gpu_memory_gb`, or where how many blocks the first comes to cannot be told.

    Without these fields nothing is traced, which takes some seconds for a step that never was. What the second needs
    and cannot be traced is said, and goes on unchecked.
    """
    limit = campaign.cluster.gpu_memory_gb
    is_gpu = campaign.cluster.gpus_per_worker > 0
    for stage in stages:
        if campaign.done(stage) is not None or not isinstance(stage.config, TrainConfig) or stage.model is None:
            continue
        # What a worker needs is the most where the workers are the fewest.
        fewest = allowed_worlds(stage.config, campaign.cluster)[-1]
        has_whole_images = stage.config.thinning.has_whole_images
        if stage.config.activation_gb is not None:
            if not has_whole_images:
                say(
                    f"{stage.name}: activation_gb is counted on whole images, of which patch dropout leaves out a "
                    f"part: fewer blocks may be enough; {number_in_its_place(stage)}"
                )
            check_activation_budget(stage, stage.config, fewest, is_gpu=is_gpu)
        if limit is None or not is_gpu:
            continue
        # What is traced is of whole images, and nobody has traced fewer patches: this limit refuses nothing for them.
        if not has_whole_images:
            say(f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known with patch dropout")
            continue
        try:
            check_fits(stage.config, stage.model, fewest, int(limit * GIB), is_gpu=True, name=stage.name)
        except TraceFailed as error:
            say(f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known: {error}")


def check_activation_budget(stage: Stage, cfg: TrainConfig, world: int, *, is_gpu: bool) -> None:
    """Raise ConfigError where nobody can tell how many blocks `activation_gb` recomputes, or none are enough."""
    try:
        with_blocks(cfg, stage.model, is_gpu=is_gpu)
    except BudgetTooSmall as error:
        way_out = f"type a larger {stage.name}.activation_gb"
        for micro_batch in smaller_micro_batches(cfg, world):
            if micro_batch <= error.largest:
                way_out = f"type {stage.name}.micro_batch={micro_batch}, or a larger {stage.name}.activation_gb"
                break
        raise ConfigError(f"{stage.name}.{error}\n  {way_out}") from None
    except TraceFailed as error:
        # To guess would end the run out of memory hours later, or take a third more time without a word.
        raise ConfigError(
            f"{stage.name}.activation_gb={cfg.activation_gb:g}: how many blocks to recompute is not known: {error}\n"
            f"  {number_in_its_place(stage)}"
        ) from None


def number_in_its_place(stage: Stage) -> str:
    """Say what to type where a number of blocks is to stand in the place of `activation_gb`."""
    return (
        f"type the number in its place: {stage.name}.activation_gb=null {stage.name}.checkpoint_blocks=N, from 0 to "
        f"{blocks_of(stage.model)}, with which a worker needs the least memory"
    )


def check_unfinished(campaign: Campaign, stages: Sequence[Stage], *, fresh: bool) -> None:
    """Raise ConfigError or DataError where one of these stages would be refused when its turn comes.

    Data that an earlier stage makes may not be there yet; it is looked at when the stage is about to start; what one
    has made must be there still. Half-done stages with another config are refused unless `fresh`.
    """
    if not fresh:
        check_unchanged(campaign, stages)
    for stage in stages:
        if campaign.done(stage) is not None:
            continue
        if isinstance(stage.config, TrainConfig):
            training.check_sets(stage.config, stage.name, campaign.resolve, index_if_made)
        if isinstance(stage.config, fewshot.Config):
            fewshot.check_sets(stage.config, campaign.resolve, index_if_made)
        if isinstance(stage.config, evaluate.Config):
            evaluation_config.check_sets(stage.config, campaign.resolve, index_if_made)
    # Last, because the checks above tell of a lost shard how to train without it.
    check_packed(campaign, stages)


def check_packed(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise DataError where shards of a finished pack stage are gone: of one among these stages, or read by one."""
    names = set()
    dropped: list[str] = []
    for stage in stages:
        names.add(stage.name)
        if isinstance(stage.config, TrainConfig):
            dropped += stage.config.data.drop
        for value in stage.parents.values():
            link = reference(value)
            if link is not None:
                names.add(link[0])
    for stage in campaign.stages:
        outcome = campaign.done(stage)
        if stage.kind == "pack" and stage.name in names and outcome is not None:
            pack.check_packed(campaign.directory(stage), outcome["sets"], dropped)


def check_finished(campaign: Campaign, stages: Sequence[Stage], say: Callable[[str], None]) -> set[str]:
    """Return the names of finished stages whose files have no digests, so that nobody would see a change.

    `say` is told of a check that took long. Raises DataError where a file that a stage handed on has changed since.
    """
    unverified: set[str] = set()
    for stage in stages:
        if campaign.done(stage) is None:
            continue
        has_digests = handover.check_files(campaign.directory(stage), say)
        if not has_digests:
            unverified.add(stage.name)
    return unverified


def check_unchanged(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise ConfigError where one of these stages is half done with another config."""
    for stage in stages:
        changes = changes_since_half_done(campaign, stage)
        if changes:
            raise ConfigError(
                f"{stage.name} is half done with another config:\n    " + "\n    ".join(changes) + "\n"
                "  undo the change to resume it, or pass --fresh to start this stage over (the old one is kept)"
            )


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
        record = handover.read_record(record_path).values
        changes = config.differences(record["forbid"], forbidden_fields(stage))
        if changes:
            return changes
        return [f"key: {record['key'][:8]} → {stage.key[:8]}, by another version of Patchline"]
    return []


def newest_attempt_name(folder: Path) -> str:
    """Return the name of a stage's newest attempt, "attempt-000012"; "" where it has none."""
    names = [path.name for path in (folder / "attempts").glob("attempt-*")]
    return max(names, default="")


def changed_warnings(directory: Path, stage: Stage) -> dict[str, str]:
    """Return the fields tagged "warn" that have changed since this folder was last worked in, each with a text.

    A set has changed where its content has, by whatever path: of records that tell no content, where its path has.
    """
    record_path = directory / "stage.json"
    if not record_path.exists():
        return {}
    record = handover.read_record(record_path).values
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


def first_started(directory: Path, now: float) -> float:
    """Return when this folder's stage was first started, seconds since 1970; `now` where it never was."""
    record_path = directory / "stage.json"
    if not record_path.exists():
        return now
    return handover.read_record(record_path).values.get("started", now)


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
