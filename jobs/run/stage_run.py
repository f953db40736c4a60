"""One stage of a campaign, run: what is checked before it, its work, and the files that say what it did.

In order:
1. the stages it reads must have finished, and what they made must fit it;
2. a half-done stage of the same name with another config is a conflict: undo the change, or start over with `--fresh`;
3. `stage.json` is written: the config that this folder belongs to, which a later start compares with its own;
4. the stage works (jobs/stages); that a run of a sweep diverges is an outcome too, which the sweep's table judges;
5. `provenance.json` is written: config, inputs, code, environment;
6. `done.json` is written last, with the sha256 of every file that the stage hands on: from now on the stage is
   finished and is skipped.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import ConfigError, Diverged
from jobs.cluster.failure import StageFailed
from jobs.recipe import class_names
from jobs.recipe.changes import changed_warnings
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Campaign, Context, Reads, Stage, reference
from jobs.run.stage_metadata import first_started, provenance_of, stage_record
from jobs.stages import sweep
from pipeline import artifacts


def run_stage(
    campaign: Campaign,
    stage: Stage,
    *,
    say: Callable[[str], None],
    poll: Callable[[Path, int], None],
    stop_requested: Callable[[], bool],
    check_owned: Callable[[], None],
    fresh: bool,
) -> dict[str, Any]:
    """Run a stage that has not finished; returns the content of its done.json.

    Raises ConfigError where a stage it reads has not run, and, unless `fresh`, where it is half done with another
    config.
    """
    began = time.time()
    directory = campaign.directory(stage)
    # 1. Nothing is written before this and 2 have passed: a start that is refused leaves the run as it was.
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
        if sweep.DIVERGED in parent_outcome and Reads.OUTCOME not in stage.kind.inputs.values():
            reason = parent_outcome[sweep.DIVERGED]
            raise Diverged(f"{stage.name}.{field} is {value}, which has diverged\n  {reason}")
    # 2. Once more: data that stages before it made is there only now.
    there = Available(campaign)
    refuse(validate(stage, there, fresh=fresh))

    # 3. Compare first: the new stage.json takes the place of the record of what the last start was given.
    directory.mkdir(parents=True, exist_ok=True)
    warnings = changed_warnings(directory, stage)
    if warnings:
        say(f"{stage.name}: resuming with a changed {'; '.join(warnings.values())}")
    record = {**stage_record(stage), "started": first_started(directory, began)}
    artifacts.write_record(directory / "stage.json", record)
    say(f"{stage.name}: key {stage.key[:8]}, in {directory}")

    # 4.
    context = Context(
        campaign=campaign,
        stage=stage,
        log=say,
        poll=poll,
        stop_requested=stop_requested,
        class_names=class_names.of_stage(stage, there),
        check_owned=check_owned,
    )
    try:
        outcome = dict(stage.kind.run(stage.config, context))
    except StageFailed as error:
        outcome = divergence_of_run(stage, error, say)

    # 5 and 6. Each is written whole, and done.json last: it promises that all the rest is there.
    files = outcome.pop("files", {})
    inputs = {field: campaign.resolve(value) or "" for field, value in stage.parents.items()}
    provenance = provenance_of(context, dataclasses.asdict(stage.config), inputs, outcome)
    artifacts.write_record(directory / artifacts.PROVENANCE, provenance)
    # Weights were read back by the worker that wrote them, before anybody else could have changed them.
    other_files = [name for name in artifacts.HANDED_ON if name not in files]
    files = {**files, **artifacts.digests(directory, other_files)}
    done = {"key": stage.key, "seconds": round(time.time() - began, 1), **outcome, "files": files}
    artifacts.write_record(directory / artifacts.DONE, done)
    return done


def divergence_of_run(stage: Stage, failure: StageFailed, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what a sweep's run that has diverged leaves for its done.json; raise any other `failure` again."""
    # The largest learning rate of a grid may well diverge: the table then says so, and the other runs go on.
    if not stage.is_run or failure.kind != Diverged.__name__:
        raise failure
    message = str(failure).splitlines()[0].removeprefix(f"{stage.name}: ")
    say(f"{stage.name}: {message}\n  the sweep goes on without this run")
    return {sweep.DIVERGED: message}
