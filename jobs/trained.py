"""What pretrain and finetune share: attempts of a gang, restarts from the last commit, and when to give up."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import data
import models
from jobs import cluster
from jobs.gang import GangError, frozen, records
from jobs.ownership import claim_attempt
from jobs.stage import Context, code_version
from pipeline import checkpoint, config, durable
from pipeline.errors import PatchlineError, Preempted
from pipeline.stage import TrainConfig, batch_arithmetic
from pipeline.train import worker
from pipeline.trainer import Job
from pipeline.watchdog import Watch

INPUTS = ("data.train", "data.mixture.*.train", "data.evaluate", "init", "probe.train", "probe.test")


class StageFailed(PatchlineError):
    """A stage ended for a reason that a restart does not cure; carries the worker's exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """Attempts until the stage is done. Raises Preempted, or StageFailed with the code the worker wanted."""
    batch_arithmetic(cfg, context.cluster.workers)
    for path in filter(None, (*training_sets(cfg, context), context.resolve(cfg.data.evaluate))):
        data.check_sizes(data.load_index(path))
    without_progress, cause = 0, ""
    while True:
        before = last_step(context.directory)
        try:
            return attempt(cfg, context)
        except GangError as error:
            write_incident(context, error)
            if error.exit_code == Preempted.exit_code:
                raise Preempted(error.cause.partition(": ")[2]) from None
            if error.exit_code is not None:
                raise StageFailed(f"{context.name}: {error.cause.partition(': ')[2]}", error.exit_code) from None
            without_progress = 0 if last_step(context.directory) > before else without_progress + 1
            again = error.kind != "" and error.cause == cause and without_progress > 0
            cause = error.cause
            give_up_or_wait(context, error, without_progress, again)


def training_sets(cfg: TrainConfig, context: Context) -> list[str]:
    """Where the sets that are trained on are, in the order of their names."""
    return [context.resolve(path) or "" for path, _ in cfg.data.sets().values()]


def attempt(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """One gang, from claim to result."""
    number = claim_attempt(context.run)
    job = Job(
        run=str(context.run),
        directory=str(context.directory),
        attempt=number,
        key=context.key,
        code=code_version(),
        model=models.to_dict(context.model),
        train=training_sets(cfg, context),
        evaluate=context.resolve(cfg.data.evaluate),
        init=context.resolve(cfg.init),
        probe_train=context.resolve(cfg.probe.train),
        probe_test=context.resolve(cfg.probe.test),
        claimed=time.time(),
    )
    name = f"attempt-{number:06d}"
    folder = context.directory / "attempts"
    task = {"config": config.plain(cfg), "job": dataclasses.asdict(job)}

    durable.write_atomic(context.directory / "task.json", json.dumps(task, indent=1))  # `jobs replay` starts from it
    watch = Watch(folder / name, context.cluster.workers, cfg.stall_s)

    def tick() -> None:
        judge(watch, context)
        if context.stopping() and not job.stop_file.exists():
            job.stop_file.touch()
        context.tick(folder / name, number)

    try:
        return cluster.run_gang(worker, task, cluster=context.cluster, name=name, directory=folder, on_tick=tick)
    finally:
        context.tick(folder / name, number)


def judge(watch: Watch, context: Context) -> None:
    """Raise GangError where one worker has held up all others too long; name a slow one."""
    known = records(watch.folder, watch.world)
    found = watch.look(lambda rank: frozen(known.get(rank, {})))
    if found is not None:
        log = watch.folder / f"rank-{found.rank:05d}.log"
        stack = log.read_text(errors="replace")[-10_000:] if log.exists() else ""
        raise GangError(found.rank, known.get(found.rank, {}).get("node", "an unknown node"), found.cause, stack)
    slow = watch.slow()
    if slow is not None:
        node = known.get(slow[0], {}).get("node", "an unknown node")
        context.say(f"worker {slow[0]} on {node} is slow: the others waited for it alone in {slow[1]:.0%} of the looks")


def last_step(directory: Path) -> int:
    """Step of the newest committed checkpoint; −1 where there is none."""
    found = checkpoint.committed(directory / "checkpoints")
    return checkpoint.step_of(found[0]) if found else -1


def give_up_or_wait(context: Context, error: GangError, without_progress: int, again: bool) -> None:
    """Say what happened and what follows; back off, or raise StageFailed when restarts bring no new checkpoint.

    `again`: the same exception as the time before, without progress between: one restart was enough to know.
    """
    last = last_step(context.directory)
    where = f"step {last}" if last >= 0 else "the start: nothing was committed yet"
    if again or without_progress > context.cluster.max_restarts:
        raise StageFailed(
            f"{context.name}: {error}\n"
            f"  {without_progress} attempts in a row made no new checkpoint; the last is {where}\n"
            f"  the traceback is in {context.directory / 'incidents.txt'}",
            exit_code=70,
        )
    wait = context.cluster.backoff_s * 2 ** max(without_progress - 1, 0) if without_progress else 0.0
    context.say(f"{error}; restarting from {where}" + (f" in {wait:.0f}s" if wait else ""))
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if context.stopping():
            raise Preempted(f"stopped while waiting to restart from {where}; run the same command again to go on")
        time.sleep(0.2)


def write_incident(context: Context, error: GangError) -> None:
    """The incident log that a person can read: when, who, why, and the traceback."""
    try:
        with open(context.directory / "incidents.txt", "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error}\n{error.traceback}\n")
    except OSError as refused:  # a full disk may be the incident
        context.say(f"the incident log could not be written ({refused}): {error}")
