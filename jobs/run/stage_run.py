"""Run one stage of a campaign: check its inputs, run it, and record its outcome.

`run_stage`, in order:
1. check that the parent stages have finished, and that their outputs are compatible with this stage;
2. raise an error if an unfinished stage with the same name has a different config: the user must undo the change, or
   restart the stage with `--fresh`;
3. write `stage.json` with the config, with which a later start compares its config;
4. run the stage (jobs/stages). If a run of a sweep diverges, the divergence is its outcome, which the sweep's table
   shows;
5. write `provenance.json`: config, inputs with their digests, code, environment;
6. write `done.json` last, with the sha256 of every file that other stages may read: from then on, the stage counts as
   finished, and the session (jobs/run/session.py) skips it.
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import ConfigError, Diverged
from jobs.cluster.failure import StageFailed
from jobs.ownership import clock
from jobs.recipe import class_names
from jobs.recipe.records import changed_warnings, environment, stage_record
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Context, Reads
from jobs.terminal import typed_command
from pipeline import artifacts
from pipeline.artifacts import DIVERGED
from pipeline.identity import code_version
from pipeline.monitoring.telemetry import account, read_metrics
from pipeline.variables import recorded


def run_stage(context: Context, *, fresh: bool) -> dict[str, Any]:
    """Run an unfinished stage; return the content of its done.json.

    Raises ConfigError if a parent stage has not run or, unless `fresh`, if this stage is unfinished with a different
    config.
    """
    began, began_at = time.time(), clock()
    stage = context.stage
    directory = context.directory
    # 1 and 2. These checks write nothing, so a refused start leaves the run unchanged.
    check_parents(context)
    # Read the indexes again: earlier stages may have written data sets since the last check.
    available = Available(context.campaign)
    refuse(validate(stage, available, fresh=fresh))

    # 3.
    record_start(context, began)
    inputs = inputs_of(context, available)
    # Earlier commands may have been killed, so their time is computed from the records of their attempts.
    damage: list[str] = []
    earlier_s = account(read_metrics(directory, None, damage)).wall
    for message in damage:
        context.log(f"{stage.name}: {message}")

    # 4. All data sets of the stage exist now, so the class names of the model's outputs are known.
    context = dataclasses.replace(context, class_names=class_names.of_stage(stage, available))
    try:
        outcome = dict(stage.kind.run(stage.config, context))
    except StageFailed as error:
        outcome = outcome_of_divergence(context, error)
    # If another command took over the run while this one was suspended, the stage must not be recorded as done.
    context.check_owned()

    # 5 and 6. Each file is written atomically, and done.json last, so that it implies that all others exist.
    files = outcome.pop("files", {})
    write_provenance(context, inputs, outcome)
    # Digests of weights come from the worker that wrote them and read them back.
    other_files = [name for name in artifacts.OUTPUT_FILES if name not in files]
    files = {**files, **artifacts.digests(directory, other_files)}
    # `time.time()` may have jumped meanwhile, for example when the network set this machine's clock.
    seconds = round(earlier_s + clock() - began_at, 1)
    done = {"key": stage.key, "seconds": seconds, "finished": time.time(), **outcome, "files": files}
    artifacts.write_record(directory / artifacts.DONE, done)
    return done


def check_parents(context: Context) -> None:
    """Raise ConfigError if a parent stage has not run, or Diverged if a parent stage has diverged."""
    stage = context.stage
    for field, (parent, _) in stage.links.items():
        outcome = context.campaign.done(context.campaign.stage(parent))
        if outcome is None:
            raise ConfigError(
                f"{stage.name}.{field} is {stage.parents[field]}, which has not run\n"
                f"  run the whole campaign, or first run --only {parent}"
            )
        if DIVERGED in outcome and not stage.kind.reads_outcomes:
            raise Diverged(f"{stage.name}.{field} is {stage.parents[field]}, which has diverged\n  {outcome[DIVERGED]}")


def record_start(context: Context, began: float) -> None:
    """Write stage.json, and log which settings have changed since the last start."""
    stage = context.stage
    directory = context.directory
    directory.mkdir(parents=True, exist_ok=True)
    # Compare before writing: the new stage.json replaces the record of the last start.
    warnings = changed_warnings(directory, stage)
    if warnings:
        context.log(f"{stage.name}: resuming with changed settings ({'; '.join(warnings.values())})")
    record = {**stage_record(stage), "started": began, "resumed": began}
    # A resumed stage keeps the time of its first start.
    if (directory / "stage.json").exists():
        record["started"] = artifacts.read_record(directory / "stage.json").get("started", began)
    artifacts.write_record(directory / "stage.json", record)
    context.log(f"{stage.name}: key {stage.key[:8]}, in {directory}")


def outcome_of_divergence(context: Context, error: StageFailed) -> dict[str, Any]:
    """Return the outcome of a sweep's diverged run; re-raise any other error."""
    stage = context.stage
    # The largest learning rate of a grid may diverge: the table shows this, and the other runs continue.
    if not stage.is_run or error.kind != Diverged.__name__:
        raise error
    message = str(error).splitlines()[0].removeprefix(f"{stage.name}: ")
    context.log(f"{stage.name}: {message}\n  the sweep continues without this run")
    return {DIVERGED: message}


def write_provenance(context: Context, inputs: Mapping[str, object], outcome: Mapping[str, Any]) -> None:
    """Write provenance.json: the config, inputs, code version and environment that produced the outcome."""
    stage = context.stage
    provenance: dict[str, Any] = {
        "stage": stage.name,
        "key": stage.key,
        "config": recorded(dataclasses.asdict(stage.config)),
        "inputs": recorded(inputs),
        "code": code_version(),
        "environment": environment(),
        "command": typed_command(),
        "user": os.environ.get("USER", ""),
    }
    for name in ("ledger", "samples_seen", "step", "kept", "sets"):
        if name in outcome:
            provenance[name] = outcome[name]
    artifacts.write_record(context.directory / artifacts.PROVENANCE, provenance)


def inputs_of(context: Context, available: Available) -> dict[str, dict[str, str | None]]:
    """Return the path and digest of each input of a stage that is about to run.

    The digest of a data set is that of its index; `part_of` is the digest of the data set from which a subset was
    selected. The digest of weights is the sha256 recorded with them. Raises DataError if a record was altered.
    """
    stage = context.stage
    inputs: dict[str, dict[str, str | None]] = {}
    for field, value in stage.parents.items():
        path = context.campaign.path_of(value)
        if field in stage.references:
            path = str(context.campaign.directory(context.campaign.stage(stage.links[field][0])))
        inputs[field] = {"path": path}
        reads = stage.reads.get(field, Reads.OUTCOME)
        index = available.index(value) if reads is Reads.SET else None
        if index is not None:
            part_of = None if index.origin is None else index.origin.digest
            inputs[field] |= {"digest": index.digest, "part_of": part_of}
        elif reads is Reads.WEIGHTS:
            inputs[field]["digest"] = artifacts.recorded_sha256(Path(path))
    return inputs
