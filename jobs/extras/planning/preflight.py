"""Implements `patchline preflight RECIPE`: check before a run whether the cluster can run the recipe.

    OK   workers     2 on 2 nodes (h0: 0, h1: 1), on cpu
    FAIL run folder  not shared: worker 1 on h1 does not see the driver's files
         → put the run directory on storage that every node mounts at the same path: run=/shared/NAME

1. Collect the requirements of the recipe: data sets, sizes of gradients and checkpoints, GPUs.
2. Start the recipe's worker group with a function that measures but does not train (pipeline/extras/preflight).
   Meanwhile, the driver replies to files that nodes write to the run directory, which checks that it sees them.
3. Make the same measurements on nodes without a worker, because a later attempt may run there. If the worker group has
   failed, make them on every node.
4. Compare the reports with the requirements (checks.py). The checks of the recipe itself come first.

The run is not changed: only a temporary folder in its directory is created and deleted. The exit code is that of the
first FAIL, or 0 if all checks pass.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

import models
from data.errors import ExitCode, PatchlineError
from jobs.answer import Answer, Document
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.nodes import ThisMachine, nodes_of, warn_of_unused_gpus
from jobs.cluster.worker_group import do_nothing, run_worker_group
from jobs.extras.planning.checks import GROUP, NODES, STAGE
from jobs.extras.planning.checks import results as results_of
from jobs.extras.planning.cluster_checks import ClusterFacts, Requirements, StageRequirements
from jobs.extras.planning.run_folders import temporary_run
from jobs.extras.planning.stage_checks import GPU_FLOPS, TrainedFacts
from jobs.recipe.validate import validate_all
from jobs.resolved_recipe import Campaign, CheckResult, Reads, Stage, index_if_made
from jobs.stages.training import allowed_worlds
from jobs.terminal import activity, echo
from pipeline.checkpoints.saver import bytes_to_come, checkpoint_bytes
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.extras.plan.memory import memory_need, snapshot_bytes
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.extras.preflight.folder import acting_as_driver
from pipeline.extras.preflight.worker import PreflightReport, examine, examine_node
from pipeline.identity import code_version
from pipeline.training_config import TrainConfig
from pipeline.training_data import BYTES_FP32, batch_arithmetic
from pipeline.values import counted

LARGEST_ALL_REDUCE = 2**28  # bytes
SMALLEST_ALL_REDUCE = 2**20


def preflight(campaign: Campaign) -> Answer:
    """Return the result of every check, and the exit code of the first FAIL."""
    began = time.monotonic()
    cluster = campaign.cluster
    workers = counted(cluster.most, "worker")
    if cluster.least < cluster.most:
        workers = f"{cluster.least} to {workers}"
    echo(f"preflight of {campaign.run}: {workers} ({cluster.backend})")
    # 1. Check the recipe like `plan` and `run`, but measure the cluster even if they would refuse the recipe.
    results = validate_all(campaign, campaign.stages)
    for stage in campaign.stages:
        if stage.kind.trains and campaign.done(stage) is None:
            for result in results_of("preflight", TrainedFacts(campaign, stage, log=activity.now), STAGE):
                results.append(dataclasses.replace(result, text=f"{stage.name}: {result.text}"))

    # 2. Measure the cluster: a worker group, and the nodes without a worker.
    try:
        world = nodes_of(cluster).reserve(str(campaign.run), worlds_of_all(campaign), echo, do_nothing)
        requirements = requirements_of(campaign, world)
        report, failure, silent = measure_everywhere(campaign, requirements, world)
        facts = ClusterFacts(report, requirements)
        if failure is None:
            results += results_of("preflight", facts, GROUP, NODES)
        else:
            results += [nothing_measured(failure), *results_of("preflight", facts, NODES)]
        for node, why in silent.items():
            remedy = "check that node, or remove it from the cluster, because an attempt may run there"
            results.append(CheckResult("WARN", "workers", f"node {node} did not respond: {why}", remedy))
    except (PatchlineError, WorkerGroupError, OSError) as error:
        results.append(nothing_measured(error))

    # 3. Collect the checks, each with its remedy.
    checks = []
    failed = ""
    steps = []
    code = ExitCode.DONE  # exit code of the first FAIL
    for result in results:
        remedy = " ".join(result.remedy.split())
        checks.append({"level": result.level, "subject": result.subject, "text": result.text, "remedy": remedy})
        if result.level == "FAIL":
            failed = failed or result.text
            code = code or result.exit_code
            steps += [{"do": "read", "text": remedy}] if remedy else []
    document = {"checks": checks, "seconds": time.monotonic() - began, "what": failed, "next": steps}
    return Answer(document, check_lines, code)


def check_lines(document: Document) -> Iterator[str]:
    """Yield a line per check, followed by its remedy."""
    counts = Counter(check["level"] for check in document["checks"])
    for check in document["checks"]:
        yield f"{check['level']:4} {check['subject']:11} {check['text']}"
        if check["remedy"]:
            yield f"     → {check['remedy']}"
    yield (f"preflight: {counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL in {document['seconds']:.1f} s")


# ------------------------------------------------------------------------ requirements


def worlds_of_all(campaign: Campaign) -> list[int]:
    """Return the numbers of workers allowed by all unfinished stages, in descending order.

    If the stages have no number in common, return the numbers allowed by the first unfinished stage.
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
    # If all stages have finished, only the recipe's cluster config limits the number of workers.
    return common or first or list(campaign.cluster.worlds)


def requirements_of(campaign: Campaign, world: int) -> Requirements:
    """Return the requirements of all unfinished stages; requirements not known yet are omitted."""
    cluster = campaign.cluster
    stages = []
    sets: dict[str, float | None] = {}
    not_made: set[str] = set()
    for stage in campaign.stages:
        if campaign.done(stage) is not None:
            continue
        if stage.kind.trains and stage.model is not None:
            stages.append(stage_requirements(campaign, stage, world))
        # A data set must be read as fast as a GPU trains on its images; for CPUs, this rate is unknown.
        for name, reads in stage.reads.items():
            if reads is not Reads.SET:
                continue
            path = campaign.path_of(stage.parents[name])
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
    warn_of_unused_gpus(cluster, nodes_of(cluster), unused_gpus.append)
    return Requirements(
        workers=world,
        gpus_per_worker=cluster.gpus_per_worker,
        code=code_version(),
        stages=stages,
        sets=sets,
        # A run in an object store does not use shared storage.
        is_shared=campaign.storage.is_shared,
        not_made=sorted(not_made),
        unused_gpus=unused_gpus,
    )


def stage_requirements(campaign: Campaign, stage: Stage, measured_world: int) -> StageRequirements:
    """Return a training stage's requirements for workers, links and disk."""
    cfg: TrainConfig = stage.config
    cluster = campaign.cluster
    model = stage.model
    assert model is not None, "called only for stages with a known model"
    allowed = allowed_worlds(cfg, cluster)
    # Use the largest world size that the stage allows, up to the measured one.
    world = allowed[-1]
    for size in allowed:
        if size <= measured_world:
            world = max(world, size)
    arithmetic = batch_arithmetic(cfg, world)
    parameters = models.parameters_of(model)
    # ZeRO 2 and 3 reduce gradients after every micro-batch, because no worker stores all of them; ZeRO 3 also gathers
    # the weights, which adds half of the traffic (Rajbhandari et al. 2020, section 7).
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
        gradient_bytes=parameters * BYTES_FP32,  # reduced in fp32 for every precision (pipeline.engine.settings)
        reductions=reductions,
        compute_s=compute_s,
        memory_bytes=memory_bytes,
        snapshot_bytes=snapshot_bytes(cfg, model, world, is_gpu=is_gpu),
        checkpoint_bytes=checkpoint,
        disk_bytes=disk_bytes,
    )


# ------------------------------------------------------------------------ measurements on workers and other nodes


def measure_everywhere(
    campaign: Campaign, requirements: Requirements, world: int
) -> tuple[PreflightReport, Exception | None, Mapping[str, str]]:
    """Run the measurements on `world` workers and on nodes without a worker, and reply to the files that they write.

    If the worker group fails, measure on all nodes without workers. Returns the reports, the error of the worker group
    if it failed, and node name → reason for each node without a report. Raises OSError if the run directory is not
    writable.
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
        with acting_as_driver(shared):
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
                from jobs.cluster.ray_nodes import run_on_nodes  # ray takes seconds to import

                used = nodes.nodes_held(world) if failure is None else set()
                reports, silent = run_on_nodes(examine_node, task, without=used, timeout_s=cluster.start_timeout_s)
                measured["spares"] = [report for _, report in reports]
    return measured, failure, silent


def nothing_measured(error: Exception) -> CheckResult:
    """Return the result FAIL for a failed worker group; the exit code is that of its error, or UNAVAILABLE."""
    failure = CheckResult.of(error, "workers")
    code = failure.exit_code
    if code == ExitCode.INTERNAL:
        code = ExitCode.UNAVAILABLE
    return dataclasses.replace(failure, text=f"nothing was measured: {failure.text}", exit_code=code)
