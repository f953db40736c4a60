"""The work of `patchline preflight RECIPE`: before a campaign starts, see whether its cluster can carry it.

    OK   workers     2 on 2 nodes (h0: 0, h1: 1), on cpu
    FAIL run folder  not shared: worker 1 on h1 does not see what the driver has written
         → give the run a directory on storage that every node mounts at the same path: run=/shared/NAME

1. Say what the recipe will ask: sets, bytes of gradients and checkpoints, GPUs.
2. Start the recipe's own worker group once, with a function that measures and trains nothing (pipeline/preflight);
   meanwhile answer in the run directory, so that the nodes know that the driver sees what they write there.
3. Judge what the workers report (jobs/commands/findings.py).

Of the run nothing is changed: a folder in its directory is made and deleted. The exit code is 0 without a FAIL, else
that of the first one.
"""

import dataclasses
import fcntl
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import models
from data.errors import ExitCode, PatchlineError, exit_code
from data.files import refusal, write_whole
from jobs.cluster.placement import nodes_of
from jobs.cluster.worker_group import WorkerGroupError, do_nothing, run_worker_group
from jobs.commands.findings import judge
from jobs.commands.needs import Finding, Needs, StageNeed
from jobs.commands.plan import GPU_FLOPS, workers_text
from jobs.context import index_if_made
from jobs.recipe.validate import validate_all
from jobs.resolved_recipe import Campaign, Reads, Stage
from jobs.run.session import warn_of_unused_gpus
from jobs.run.temporary_run import temporary_run
from jobs.worlds import allowed_worlds
from pipeline.arithmetic import batch_arithmetic
from pipeline.checkpoints.disk_space import BYTES_FP32, bytes_to_come, checkpoint_bytes
from pipeline.plan.memory import memory_need, snapshot_bytes
from pipeline.plan.memory_traces import TraceFailed
from pipeline.preflight.folder import DRIVER_FILE, LOCK_FILE, answer_file
from pipeline.preflight.worker import PreflightReport, examine
from pipeline.training_config import TrainConfig
from pipeline.versions import code_version

ANSWER_POLL_S = 0.005
LARGEST_ALL_REDUCE = 2**28  # bytes
SMALLEST_ALL_REDUCE = 2**20


def preflight(campaign: Campaign, say: Callable[[str], None]) -> int:
    """Print a line for everything that was looked at; return the exit code."""
    began = time.monotonic()
    cluster = campaign.cluster
    workers = workers_text(cluster) + (" worker" if cluster.most == 1 else " workers")
    say(f"preflight of {campaign.run}: {workers} ({cluster.backend})")
    findings = []
    for result in validate_all(campaign, campaign.stages):
        findings.append(Finding(result.level, result.subject, result.text, result.remedy, result.exit_code))
    try:
        world = nodes_of(cluster).reserve(str(campaign.run), worlds_of_all(campaign), say, do_nothing)
        needs = needs_of(campaign, world)
        report = examine_workers(campaign, needs, world)
        findings += judge(report, needs)
    except (PatchlineError, WorkerGroupError, OSError) as error:
        findings.append(failed(error))

    for finding in findings:
        for line in finding.lines():
            say(line)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("OK", "WARN", "FAIL")}
    say(
        f"preflight: {counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL in "
        f"{time.monotonic() - began:.1f} s"
    )
    for finding in findings:
        if finding.level == "FAIL":
            return finding.exit_code
    return ExitCode.DONE


def failed(error: Exception) -> Finding:
    """Return the finding of a preflight that could not be carried out."""
    text = refusal(error) if isinstance(error, OSError) else str(error)
    first, _, rest = text.partition("\n")
    remedy = " ".join(rest.split())
    code = ExitCode(exit_code(error))
    # A worker that died has no exit code of its own.
    if code == ExitCode.INTERNAL:
        code = ExitCode.UNAVAILABLE
    return Finding("FAIL", "workers", f"nothing was measured: {first}", remedy, code)


# ------------------------------------------------------------------------ what the recipe asks


def worlds_of_all(campaign: Campaign) -> list[int]:
    """Return the numbers of workers on which every stage that has not finished may run, the largest first.

    Where no number is allowed by all, return those of the stage that comes first.
    """
    first: list[int] = []
    common: list[int] = []
    for stage in campaign.stages:
        if campaign.done(stage) is not None:
            continue
        allowed = allowed_worlds(stage.config, campaign.cluster)
        if not first:
            first = list(allowed)
            common = list(allowed)
        common = [world for world in common if world in allowed]
    # Where all have finished, nothing asks for a number.
    return common or first or list(range(campaign.cluster.most, campaign.cluster.least - 1, -1))


def needs_of(campaign: Campaign, world: int) -> Needs:
    """Say what the stages that have not finished will ask of `world` workers, as far as it is known before they run."""
    cluster = campaign.cluster
    stages = []
    sets: dict[str, float | None] = {}
    not_made = []
    for stage in campaign.stages:
        if campaign.done(stage) is not None:
            continue
        if stage.kind.trains and stage.model is not None:
            stages.append(stage_need(campaign, stage, stage.config, world))
        for path in set_paths(campaign, stage):
            index = index_if_made(path)
            if index is None:
                not_made.append(path)
                continue
            rate = None
            if cluster.gpus_per_worker and stage.model is not None and index.samples:
                images_per_s = cluster.gpus_per_worker * GPU_FLOPS / models.training_flops(stage.model, 1)
                rate = images_per_s * index.bytes / index.samples
            sets[path] = rate
    unused_gpus: list[str] = []
    warn_of_unused_gpus(cluster, unused_gpus.append)
    return Needs(
        workers=world,
        gpus_per_worker=cluster.gpus_per_worker,
        code=code_version(),
        stages=stages,
        sets=sets,
        # A run in an object store leaves nothing on storage that nodes share.
        is_shared=campaign.remote is None,
        not_made=sorted(set(not_made)),
        unused_gpus=unused_gpus,
    )


def set_paths(campaign: Campaign, stage: Stage) -> list[str]:
    """Return the absolute paths of the sets that a stage reads."""
    paths = []
    for value, reads in stage.kind.inputs_of(stage.config).values():
        path = campaign.resolve(value)
        if reads is Reads.SET and path is not None:
            paths.append(path)
    return paths


def stage_need(campaign: Campaign, stage: Stage, cfg: TrainConfig, measured_world: int) -> StageNeed:
    """Say what a trained stage will ask of workers, links and the disk."""
    cluster = campaign.cluster
    allowed = allowed_worlds(cfg, cluster)
    # The largest that the stage allows among so many workers as are measured.
    world = max([size for size in allowed if size <= measured_world], default=allowed[-1])
    arithmetic = batch_arithmetic(cfg, world)
    parameters = models.parameters_of(stage.model)
    # ZeRO 2 and 3 sum after every micro-batch, because no worker keeps a whole gradient; 3 also gathers the weights,
    # half as much again (Rajbhandari et al. 2020, section 7).
    reductions = 1.0
    if cfg.zero >= 2 and not cfg.exact_parts:
        reductions = float(arithmetic.accumulation)
    if cfg.zero == 3:
        reductions *= 1.5
    compute_s = None
    if cluster.gpus_per_worker:
        gpus = world * cluster.gpus_per_worker
        compute_s = models.training_flops(stage.model, cfg.batch_size) / (gpus * GPU_FLOPS)
    is_gpu = cluster.gpus_per_worker > 0
    memory_bytes = None
    with suppress(TraceFailed):
        memory_bytes = memory_need(cfg, stage.model, world, is_gpu=is_gpu).device_bytes
    checkpoint = checkpoint_bytes(cfg, stage.model)
    disk_bytes, _ = bytes_to_come(cfg, stage.model, campaign.directory(stage) / "checkpoints")
    return StageNeed(
        name=stage.name,
        gradient_bytes=parameters * BYTES_FP32,  # summed in fp32, whatever computes (pipeline.engine.settings)
        reductions=reductions,
        compute_s=compute_s,
        memory_bytes=memory_bytes,
        snapshot_bytes=snapshot_bytes(cfg, stage.model, world, is_gpu=is_gpu),
        checkpoint_bytes=checkpoint,
        disk_bytes=disk_bytes,
    )


# ------------------------------------------------------------------------ the workers


def examine_workers(campaign: Campaign, needs: Needs, world: int) -> PreflightReport:
    """Run a worker group of `world` workers once, and answer its questions meanwhile.

    Raises ClusterError, WorkerGroupError, and OSError where the run directory cannot be written.
    """
    cluster = dataclasses.replace(campaign.cluster, workers=world)
    largest = max((stage.gradient_bytes for stage in needs.stages), default=0)
    with temporary_run(campaign.run) as folder:
        shared = folder / "shared"
        shared.mkdir()
        task = {
            "folder": str(shared),
            "is_shared": needs.is_shared,
            "sets": sorted(needs.sets),
            "largest_bytes": min(max(largest, SMALLEST_ALL_REDUCE), LARGEST_ALL_REDUCE),
            "timeout_s": cluster.start_timeout_s,
        }
        with answering(shared):
            report = run_worker_group(
                examine,
                task,
                cluster=cluster,
                name="attempt",
                directory=folder / "preflight" / "attempts",
                is_shared=needs.is_shared,
            )
    return cast(PreflightReport, report)


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    """Answer what nodes ask in a folder, hold its lock, and leave a file of the driver's, while the block runs."""
    write_whole(folder / DRIVER_FILE, json.dumps({"token": secrets.token_hex(16)}))
    has_ended = threading.Event()
    thread = threading.Thread(target=answer_all, args=(folder, has_ended), daemon=True)
    with open(folder / LOCK_FILE, "a") as lock:
        # Where the file system has no locks the workers find that out, in words.
        with suppress(OSError):
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def answer_all(folder: Path, has_ended: threading.Event) -> None:
    """Answer each question once, with its token and this clock's time."""
    answered: set[str] = set()
    while not has_ended.wait(ANSWER_POLL_S):
        with suppress(OSError, ValueError):
            for path in folder.iterdir():
                if path.name.startswith("ask-") and path.name not in answered:
                    question: Mapping[str, Any] = json.loads(path.read_text())
                    answer = {"token": question["token"], "time": time.time()}
                    write_whole(folder / answer_file(path.name), json.dumps(answer))
                    answered.add(path.name)
