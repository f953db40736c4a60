"""One stage of a campaign, run: what is checked before it, its work, and the files that say what it did.

In order:
1. the stages it reads must have finished, and what they made must fit it;
2. a half-done stage of the same name with another config is a conflict: undo the change, or start over with `--fresh`;
3. `stage.json` is written: the config that this folder belongs to, which a later start compares with its own;
4. the stage works (jobs/stages); that a run of a sweep diverges is an outcome too, which the sweep's table judges, and
   what goes on from a stage that was stopped as hopeless is not run;
5. `provenance.json` is written: config, inputs with their digests, code, environment;
6. `done.json` is written last, with the sha256 of every file that the stage hands on: from now on the stage is
   finished, and the session (jobs/run/session.py) skips it.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from data.errors import ConfigError, Diverged
from jobs.cluster.failure import StageFailed
from jobs.recipe import class_names
from jobs.recipe.records import changed_warnings, environment, stage_record
from jobs.recipe.references import source_of
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Context, Reads, reference
from jobs.terminal import typed_command
from pipeline import artifacts
from pipeline.artifacts import DIVERGED, STOPPED
from pipeline.monitoring.telemetry import account, read_metrics
from pipeline.versions import code_version


def run_stage(context: Context, *, fresh: bool) -> dict[str, Any]:
    """Run a stage that has not finished; returns the content of its done.json.

    Raises ConfigError where a stage it reads has not run, and, unless `fresh`, where it is half done with another
    config.
    """
    began = time.time()
    campaign = context.campaign
    stage = context.stage
    directory = context.directory
    # 1. Nothing is written before this and 2 have passed: a start that is refused leaves the run as it was.
    stopped = ""  # why what the stage starts from has ended early
    for field, value in stage.parents.items():
        link = reference(value)
        if link is None:
            continue
        parent = link[0]
        parent_outcome = campaign.done(campaign.stage(parent))
        if parent_outcome is None:
            raise ConfigError(
                f"{stage.name}.{field} is {value}, which has not run\n  run the campaign, or {parent} alone first"
            )
        if DIVERGED in parent_outcome and not stage.kind.reads_outcomes:
            reason = parent_outcome[DIVERGED]
            raise Diverged(f"{stage.name}.{field} is {value}, which has diverged\n  {reason}")
        if STOPPED in parent_outcome and not stage.kind.reads_outcomes:
            stopped = f"{parent} was stopped"
    # 2. Once more: data that stages before it made is there only now.
    there = Available(campaign)
    refuse(validate(stage, there, fresh=fresh))

    # 3. Compare first: the new stage.json takes the place of the record of what the last start was given.
    directory.mkdir(parents=True, exist_ok=True)
    warnings = changed_warnings(directory, stage)
    if warnings:
        context.log(f"{stage.name}: resuming with a changed {'; '.join(warnings.values())}")
    record = {**stage_record(stage), "started": began, "resumed": began}
    # Of a stage that goes on, when it was first started.
    if (directory / "stage.json").exists():
        record["started"] = artifacts.read_record(directory / "stage.json").get("started", began)
    artifacts.write_record(directory / "stage.json", record)
    context.log(f"{stage.name}: key {stage.key[:8]}, in {directory}")
    inputs = inputs_of(context, there)

    # What earlier commands have worked on it, which may have been killed: their attempts' records tell.
    earlier_s = account(read_metrics(directory, None)).wall

    # 4. What the outputs of its model are called is known now that its sets are there.
    context = dataclasses.replace(context, class_names=class_names.of_stage(stage, there))
    try:
        if stopped:
            # Nothing is spent on what goes on from a hopeless run; the tables behind it go on without.
            context.log(f"{stage.name}: not run: {stopped}")
            outcome: dict[str, Any] = {STOPPED: stopped}
        else:
            outcome = dict(stage.kind.run(stage.config, context))
    except StageFailed as error:
        # The largest learning rate of a grid may well diverge: the table then says so, and the other runs go on.
        if not stage.is_run or error.kind != Diverged.__name__:
            raise
        message = str(error).splitlines()[0].removeprefix(f"{stage.name}: ")
        context.log(f"{stage.name}: {message}\n  the sweep goes on without this run")
        outcome = {DIVERGED: message}

    # A driver that was frozen, and woke up after another has taken the run over, must not say that its stage is done.
    context.check_owned()
    # 5 and 6. Each is written whole, and done.json last: it promises that all the rest is there.
    files = outcome.pop("files", {})
    provenance: dict[str, Any] = {
        "stage": stage.name,
        "key": stage.key,
        "config": dataclasses.asdict(stage.config),
        "inputs": inputs,
        "code": code_version(),
        "environment": environment(),
        "command": typed_command(),
        "user": os.environ.get("USER", ""),
    }
    for name in ("ledger", "samples_seen", "step", "kept"):
        if name in outcome:
            provenance[name] = outcome[name]
    artifacts.write_record(directory / artifacts.PROVENANCE, provenance)
    # Weights were read back by the worker that wrote them, before anybody else could have changed them.
    other_files = [name for name in artifacts.HANDED_ON if name not in files]
    files = {**files, **artifacts.digests(directory, other_files)}
    finished = time.time()
    seconds = round(earlier_s + finished - began, 1)
    done = {"key": stage.key, "seconds": seconds, "finished": finished, **outcome, "files": files}
    artifacts.write_record(directory / artifacts.DONE, done)
    return done


def inputs_of(context: Context, there: Available) -> dict[str, dict[str, str | None]]:
    """Return the path of every input of a stage, and the digest of what lies there before the stage works.

    The digest of a set is its index's, `part_of` the digest of the set that it is a subset of; the digest of weights
    that a stage trains on from is the sha256 that their maker recorded. Raises DataError for an altered record.
    """
    stage = context.stage
    kinds_of_input = stage.kind.inputs_of(stage.config)
    inputs: dict[str, dict[str, str | None]] = {}
    for field, value in stage.parents.items():
        path = context.campaign.path_of(value)
        if field in stage.references:
            path = str(context.campaign.directory(source_of(context.campaign, value)[0]))
        inputs[field] = {"path": path}
        _value, reads = kinds_of_input.get(field, (value, Reads.OUTCOME))
        index = there.index(value) if reads is Reads.SET else None
        if index is not None:
            part_of = None if index.origin is None else index.origin.digest
            inputs[field] |= {"digest": index.digest, "part_of": part_of}
        elif reads is Reads.WEIGHTS:
            inputs[field]["digest"] = artifacts.recorded_sha256(Path(path))
    return inputs
