"""The work of `patchline preflight RECIPE`: before a campaign starts, check whether its cluster can carry it.

    OK   workers     2 on 2 nodes (h0: 0, h1: 1), on cpu
    FAIL run folder  not shared: worker 1 on h1 does not see what the driver has written
         → give the run a directory on storage that every node mounts at the same path: run=/shared/NAME

1. Collect the requirements of the recipe: sets, bytes of gradients and checkpoints, GPUs.
2. Start the recipe's own worker group once, with a function that measures and trains nothing (pipeline/preflight);
   meanwhile answer in the run directory, so that the nodes know that the driver sees what they write there.
3. Run the same on the nodes that have no worker of this group: an attempt may move there. Where the group has failed,
   every node is asked by itself.
4. Compare the reports with the requirements (preflight_checks.py). The checks that `plan` and `run` make of the recipe
   come first (jobs/recipe/validate.py).

Of the run nothing is changed: a folder in its directory is made and deleted. The exit code is 0 without a FAIL, else
that of the first one.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import models
from data.errors import ExitCode, PatchlineError
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.nodes import ThisMachine
from jobs.cluster.placement import nodes_of
from jobs.cluster.worker_group import do_nothing, run_worker_group
from jobs.extras.planning.plan_training import GPU_FLOPS
from jobs.extras.planning.preflight_checks import Requirements, StageRequirements, check_identities, check_report
from jobs.extras.planning.run_folders import temporary_run
from jobs.recipe.validate import validate_all
from jobs.resolved_recipe import Campaign, CheckResult, Reads, Stage, index_if_made
from jobs.run.session import warn_of_unused_gpus
from jobs.stages.training import allowed_worlds
from jobs.terminal import echo
from pipeline.checkpoints.saver import bytes_to_come, checkpoint_bytes
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.extras.plan.memory import memory_need, snapshot_bytes
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.extras.preflight.folder import answering
from pipeline.extras.preflight.worker import PreflightReport, examine, examine_node
from pipeline.identity import code_version
from pipeline.training_config import TrainConfig
from pipeline.training_data import BYTES_FP32, batch_arithmetic
from pipeline.values import counted

LARGEST_ALL_REDUCE = 2**28  # bytes
SMALLEST_ALL_REDUCE = 2**20


def preflight(campaign: Campaign) -> int:
    """Print a line for every check; return the exit code."""
    began = time.monotonic()
    cluster = campaign.cluster
    workers = counted(cluster.most, "worker")
    if cluster.least < cluster.most:
        workers = f"{cluster.least} to {workers}"
    echo(f"preflight of {campaign.run}: {workers} ({cluster.backend})")
    # 1. The recipe, as `plan` and `run` check it. What they would refuse does not keep the cluster from being measured.
    results = validate_all(campaign, campaign.stages)

    # 2. The cluster: a worker group that measures, and the nodes that have no worker of it.
    try:
        world = nodes_of(cluster).reserve(str(campaign.run), worlds_of_all(campaign), echo, do_nothing)
        requirements = requirements_of(campaign, world)
        report, failure, silent = measure_everywhere(campaign, requirements, world)
        if failure is None:
            results += check_report(report, requirements)
        else:
            results.append(nothing_measured(failure))
            results += check_identities([node["identity"] for node in report["spares"]], requirements.code)
        for node, why in silent.items():
            remedy = "look at that node, or take it out of the cluster: an attempt may move there"
            results.append(CheckResult("WARN", "workers", f"node {node} did not answer: {why}", remedy))
    except (PatchlineError, WorkerGroupError, OSError) as error:
        results.append(nothing_measured(error))

    # 3. A line a check, and below it what to do.
    for result in results:
        echo(f"{result.level:4} {result.subject:11} {result.text}")
        if result.remedy:
            echo(f"     → {' '.join(result.remedy.split())}")
    counts: Counter[str] = Counter()
    code = ExitCode.DONE  # of the first FAIL
    for result in results:
        counts[result.level] += 1
        if result.level == "FAIL" and code == ExitCode.DONE:
            code = result.exit_code
    echo(
        f"preflight: {counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL in "
        f"{time.monotonic() - began:.1f} s"
    )
    return code


# ------------------------------------------------------------------------ requirements


def worlds_of_all(campaign: Campaign) -> list[int]:
    """Return the numbers of workers on which every stage that has not finished may run, the largest first.

    Where no number is allowed by all, return those of the stage that comes first.
    """
    first: list[int] = []
    common: list[int] = []
    for stage in campaign.stages:
        if campaign.done(stage) is not None:
            continue
        allowed: Sequence[int] = campaign.cluster.worlds
        if stage.kind.trains:
            allowed = allowed_worlds(stage.config, campaign.cluster)
        if not first:
            first = list(allowed)
            common = list(allowed)
        common = sorted(set(common).intersection(allowed), reverse=True)
    # Where all have finished, nothing asks for a number.
    return common or first or list(campaign.cluster.worlds)


def requirements_of(campaign: Campaign, world: int) -> Requirements:
    """Return the requirements of the stages that have not finished, as far as they are known before they run."""
    cluster = campaign.cluster
    stages = []
    sets: dict[str, float | None] = {}
    not_made: set[str] = set()
    for stage in campaign.stages:
        if campaign.done(stage) is not None:
            continue
        if stage.kind.trains and stage.model is not None:
            stages.append(stage_requirements(campaign, stage, world))
        # A set is read as fast as a GPU computes on its images; with CPUs the rate is not known.
        for value, reads in stage.kind.inputs_of(stage.config).values():
            if reads is not Reads.SET:
                continue
            path = campaign.path_of(value)
            index = index_if_made(path)
            if index is None:
                not_made.add(path)
                continue
            rate = None
            if cluster.gpus_per_worker and stage.model is not None and index.samples:
                images_per_s = cluster.gpus_per_worker * GPU_FLOPS / models.training_flops(stage.model, 1)
                rate = images_per_s * index.bytes / index.samples
            sets[path] = rate
    unused_gpus: list[str] = []
    warn_of_unused_gpus(cluster, unused_gpus.append)
    return Requirements(
        workers=world,
        gpus_per_worker=cluster.gpus_per_worker,
        code=code_version(),
        stages=stages,
        sets=sets,
        # A run in an object store leaves nothing on storage that nodes share.
        is_shared=campaign.storage.is_shared,
        not_made=sorted(not_made),
        unused_gpus=unused_gpus,
    )


def stage_requirements(campaign: Campaign, stage: Stage, measured_world: int) -> StageRequirements:
    """Return the requirements of a trained stage: of workers, links and the disk."""
    cfg: TrainConfig = stage.config
    cluster = campaign.cluster
    model = stage.model
    assert model is not None, "of stages whose model is known"
    allowed = allowed_worlds(cfg, cluster)
    # The largest that the stage allows among so many workers as are measured.
    world = allowed[-1]
    for size in allowed:
        if size <= measured_world:
            world = max(world, size)
    arithmetic = batch_arithmetic(cfg, world)
    parameters = models.parameters_of(model)
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
        compute_s = models.training_flops(model, cfg.batch_size) / (gpus * GPU_FLOPS)
    is_gpu = cluster.gpus_per_worker > 0
    memory_bytes = None
    with suppress(TraceFailed):
        memory_bytes = memory_need(cfg, model, world, is_gpu=is_gpu).device_bytes
    checkpoint = checkpoint_bytes(cfg, model)
    checkpoints = StageCheckpoints(campaign.storage, campaign.directory(stage).name)
    disk_bytes, _ = bytes_to_come(cfg, model, checkpoints)
    return StageRequirements(
        name=stage.name,
        gradient_bytes=parameters * BYTES_FP32,  # summed in fp32, whatever computes (pipeline.engine.settings)
        reductions=reductions,
        compute_s=compute_s,
        memory_bytes=memory_bytes,
        snapshot_bytes=snapshot_bytes(cfg, model, world, is_gpu=is_gpu),
        checkpoint_bytes=checkpoint,
        disk_bytes=disk_bytes,
    )


# ------------------------------------------------------------------------ the workers and the other nodes


def measure_everywhere(
    campaign: Campaign, requirements: Requirements, world: int
) -> tuple[PreflightReport, Exception | None, Mapping[str, str]]:
    """Run a worker group of `world` workers once, then the nodes that have none, and answer meanwhile.

    Where the worker group fails, all nodes are asked as those without a worker. Returns the reports, the failure of the
    group, and by the name of a node why it sent none. Raises OSError where the run directory cannot be written.
    """
    cluster = dataclasses.replace(campaign.cluster, workers=world)
    largest = 0
    for stage in requirements.stages:
        largest = max(largest, stage.gradient_bytes)
    measured: PreflightReport = {"workers": [], "spares": [], "network": None}
    failure: Exception | None = None
    silent: Mapping[str, str] = {}
    with temporary_run(campaign.run) as folder:
        shared = folder / "shared"
        shared.mkdir()
        task = {
            "folder": str(shared),
            "is_shared": requirements.is_shared,
            "sets": sorted(requirements.sets),
            "largest_bytes": min(max(largest, SMALLEST_ALL_REDUCE), LARGEST_ALL_REDUCE),
            "timeout_s": cluster.start_timeout_s,
        }
        with answering(shared):
            try:
                report = run_worker_group(
                    examine,
                    task,
                    cluster=cluster,
                    name="attempt",
                    directory=folder / "preflight" / "attempts",
                    is_shared=requirements.is_shared,
                )
                measured = cast(PreflightReport, report)
            except (PatchlineError, WorkerGroupError) as error:
                failure = error
            nodes = nodes_of(cluster)
            if not isinstance(nodes, ThisMachine):
                from jobs.cluster.every_node import run_on_nodes  # ray takes seconds to import

                used = nodes.nodes_held(world) if failure is None else set()
                reports, silent = run_on_nodes(examine_node, task, without=used, timeout_s=cluster.start_timeout_s)
                measured["spares"] = [report for _, report in reports]
    return measured, failure, silent


def nothing_measured(error: Exception) -> CheckResult:
    """Return the result of a worker group that has failed; a worker that died has no exit code of its own."""
    failure = CheckResult.of(error, "workers")
    code = failure.exit_code
    if code == ExitCode.INTERNAL:
        code = ExitCode.UNAVAILABLE
    return dataclasses.replace(failure, text=f"nothing was measured: {failure.text}", exit_code=code)
