"""What a stage will take in time and money: the lines of `plan`, and the forecast that a run keeps.

    time    412 ms a step on 2 workers: compute 371 ms, host 18 ms, reduce 21 ms, save 0.40 ms, …; 155 images/s
    finish  10d02h for 2,190,000 steps, 484 worker-hours, 1,210.00 at 2.5; with 1.7 failures 10d04h
    save    every 9,000 steps; every 340 would cost least, the stage then ends 2% sooner: …
    worlds  least bill on 1 worker: 1 worker 18d04h, 436 worker-hours; 2 workers 10d02h, 484 worker-hours

1. `outlook_of` reads the calibration: the file that is named, else this machine's own.
2. `time_lines` forecasts a step on the stage's world and on the others that its batch allows, and multiplies.
3. `keep_forecast` writes the same forecast into the stage's folder when a run begins.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path

from data.errors import ConfigError, DataError, PatchlineError
from jobs.cluster_config import ClusterConfig
from jobs.context import Context
from jobs.resolved_recipe import Campaign, Stage
from jobs.worlds import allowed_worlds, batch_fits
from models import ModelConfig
from pipeline.checkpoints.disk_space import checkpoint_bytes
from pipeline.monitoring.telemetry import amount, counted, duration, milliseconds
from pipeline.plan.calibration import Calibration, Hardware, calibration_file, decode_key, read_calibration
from pipeline.plan.forecast import StepForecast, forecast_step, passes_of, workers_on_a_node
from pipeline.plan.kept_forecast import KeptStep, write_forecast
from pipeline.plan.memory import with_blocks
from pipeline.plan.price import Bill, Failures, best_save_every, bill
from pipeline.preflight.machine import cores, gpu_models, processor
from pipeline.training_config import TrainConfig
from pipeline.versions import MUST_BE_EQUAL, package_versions

CALIBRATE = "python -m jobs calibrate RECIPE"
MOST_WORLDS = 6  # that a line compares
LEAST_GAIN = 0.01  # of a stage's time, for which another number of steps between two saves is proposed
KEPT_WORLDS = 8  # that a run keeps a forecast of


@dataclass(frozen=True)
class Outlook:
    """By what a plan forecasts, and what it is to say of money."""

    calibration: Calibration | None
    problem: str = ""  # why there is none, and what to type
    price: float | None = None  # of a worker and an hour
    mtbf_hours: float | None = None  # mean time between failures of a node; None: nothing fails
    restart_s: float = 120.0

    def failures(self, world: int) -> Failures | None:
        """Return how the nodes of so many workers fail; None where nothing is said of it."""
        if self.mtbf_hours is None or self.calibration is None:
            return None
        nodes = ceil(world / workers_on_a_node(world, self.calibration))
        return Failures(self.mtbf_hours, self.restart_s, nodes)


def outlook_of(
    file: str | None,
    *,
    price: float | None = None,
    mtbf_hours: float | None = None,
    restart_s: float = 120.0,
) -> Outlook:
    """Return the outlook by the calibration that is named, or by this machine's own where there is one.

    Raises DataError where the named one cannot be read, ConfigError where a number makes no sense. A machine's own
    that cannot be used is a `problem`, which the plan says: all its other lines stand without it.
    """
    for name, value in (("--price", price), ("--mtbf-hours", mtbf_hours), ("--restart-s", restart_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value:g}, expected more than 0")
    path = Path(file) if file is not None else calibration_file()
    problem = ""
    calibration = None
    try:
        calibration = read_calibration(path)
        if file is None:
            problem = of_another_machine(calibration, path)
    except DataError as error:
        if file is not None:
            raise
        problem = f"not forecast: this machine is not calibrated; type {CALIBRATE}"
        if path.exists():
            problem = f"not forecast: {str(error).splitlines()[0]}; type {CALIBRATE}"
    if problem:
        calibration = None
    return Outlook(calibration, problem, price, mtbf_hours, restart_s)


def of_another_machine(calibration: Calibration, path: Path) -> str:
    """Return what is wrong where a calibration was made by a command on another machine; "" where it was made here.

    Another machine is one with other hardware, or with another torch or DeepSpeed, whose operators take other times.
    """
    here = Hardware(processor(), cores(), "cpu")
    versions = package_versions()
    gpus = gpu_models()
    difference = ""
    if calibration.driver != here:
        difference = f"on {hardware_text(calibration.driver)}, this is {hardware_text(here)}"
    # Plain processes compute on this very machine, those of Ray on any.
    computed_here = calibration.gpus > 0 and calibration.backend == "processes"
    # Of a part of a GPU (MIG) torch says more than the driver.
    if not difference and computed_here and gpus and not calibration.worker.device.startswith(gpus):
        difference = f"on {calibration.worker.device}, this machine has {', '.join(gpus)}"
    for package in MUST_BE_EQUAL:
        measured = calibration.versions.get(package, "none")
        if not difference and measured != versions[package]:
            difference = f"with {package} {measured}, this is {versions[package]}"
    if not difference:
        return ""
    return (
        f"not forecast: {path} was made {difference}; "
        f"type {CALIBRATE}, or --calibration {path} to go by it all the same"
    )


def hardware_text(hardware: Hardware) -> str:
    """Return "AMD EPYC with 2 cores"."""
    return f"{hardware.processor} with {hardware.cores} cores"


def of_other_workers(calibration: Calibration, cluster: ClusterConfig) -> str:
    """Return why a cluster's steps take other times than those that were measured; "" where they are alike."""
    measured = worker_text(calibration.gpus, calibration.threads)
    asked = worker_text(cluster.gpus_per_worker, cluster.cpus_per_worker)
    if measured == asked:
        return ""
    return f"not forecast: calibrated for workers that compute on {measured}, here they do on {asked}; type {CALIBRATE}"


def worker_text(gpus: int, threads: int) -> str:
    """Return what a worker computes on: "a GPU", "the CPU with 4 threads"."""
    if gpus:
        return "a GPU"
    return f"the CPU with {counted(threads, 'thread')}"


# ------------------------------------------------------------------------ lines of a plan


def time_lines(
    campaign: Campaign, stage: Stage, cfg: TrainConfig, steps: int, judged_images: int, outlook: Outlook
) -> list[str]:
    """Return the lines about time and money of a trained stage whose model and length are known."""
    calibration = outlook.calibration
    if calibration is None:
        return [f"  time    {outlook.problem}"]
    problem = of_other_workers(calibration, campaign.cluster)
    if problem:
        return [f"  time    {problem}"]
    assert stage.model is not None
    worlds = allowed_worlds(cfg, campaign.cluster)
    try:
        passes = passes_of(cfg, stage.model, calibration)
    except ConfigError as error:
        return [refused(error)]

    def forecast(world: int) -> StepForecast:
        return forecast_step(
            cfg,
            stage.model,
            world,
            passes,
            calibration,
            judged_images=judged_images,
            images_per_cpu_s=decode_rate(campaign.resolve, cfg, stage.model, calibration),
        )

    try:
        step = forecast(worlds[0])
    except ConfigError as error:
        return [refused(error)]
    main_bill = bill_of(step, steps, cfg, stage.model, outlook)
    lines = [f"  time    {step_text(step)}", f"  finish  {bill_text(main_bill, steps, outlook)}"]
    if outlook.mtbf_hours is not None:
        lines.append(f"  save    {save_text(stage.name, cfg, stage.model, step, steps, outlook)}")
    others = compared_worlds(cfg, worlds)
    if len(others) > 1:
        bills = [bill_of(forecast(world), steps, cfg, stage.model, outlook) for world in others]
        lines.append(f"  worlds  {worlds_text(bills, calibration)}")
    lines += remarks(step, calibration, campaign.cluster)
    return lines


def refused(error: ConfigError) -> str:
    """Return the line of a stage that cannot be forecast."""
    return f"  time    not forecast: {str(error).splitlines()[0]}; type {CALIBRATE}"


def decode_rate(
    resolve: Callable[[str | None], str | None], cfg: TrainConfig, model: ModelConfig, calibration: Calibration
) -> float | None:
    """Return the images a CPU-second of the slowest set that was measured; None where none was, or a GPU decodes."""
    if cfg.data.decode == "gpu":
        return None
    rates = []
    for value, _weight in cfg.data.sets().values():
        path = resolve(value) if value else None
        rate = calibration.decode.get(decode_key(path or "", max(model.image_size), cfg.data.augment))
        if rate is not None:
            rates.append(rate)
    return min(rates, default=None)


def step_text(step: StepForecast) -> str:
    """Return the forecast of a step with its parts."""
    parts = {"compute": step.compute_s, "host": step.host_s, "reduce": step.reduce_s}
    if step.knows_decoding:
        parts["data"] = step.wait_s
    parts["save"] = step.save_s
    parts["evaluate"] = step.evaluate_s
    in_words = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in parts.items())
    return (
        f"{milliseconds(step.step_s)} a step on {counted(step.world, 'worker')}: {in_words}; "
        f"{amount(step.images_per_s)} images/s"
    )


def bill_of(step: StepForecast, steps: int, cfg: TrainConfig, model: ModelConfig, outlook: Outlook) -> Bill:
    """Return what the stage takes on the forecast's world."""
    durable_s = 0.0
    failures = outlook.failures(step.world)
    if failures is not None and outlook.calibration is not None:
        durable_s = durable_seconds(cfg, model, step, failures, outlook.calibration)
    return bill(
        step.world,
        steps,
        step.step_s,
        save_every=cfg.save_every,
        failures=failures,
        durable_s=durable_s,
        price=outlook.price,
    )


def bill_text(stage_bill: Bill, steps: int, outlook: Outlook) -> str:
    """Return how long all steps take, and what they cost."""
    text = f"{duration(stage_bill.steps_s)} for {steps:,} steps"
    if outlook.mtbf_hours is not None:
        text += f"; with {stage_bill.failures:.1f} failures {finish_text(stage_bill)}"
    text += f"; {stage_bill.worker_hours:,.1f} worker-hours"
    if stage_bill.cost is None:
        return f"{text} (--price 2.5 says what they cost)"
    return f"{text}, {stage_bill.cost:,.2f} at {outlook.price:g} each"


def finish_text(stage_bill: Bill) -> str:
    """Return how long a stage takes with failures."""
    if stage_bill.finish_s == inf:
        return "it NEVER ENDS: a failure costs more than the time between two"
    return duration(stage_bill.finish_s)


def save_text(name: str, cfg: TrainConfig, model: ModelConfig, step: StepForecast, steps: int, outlook: Outlook) -> str:
    """Return how often saving costs least, by Young's formula, and what to type where that is worth it."""
    failures = outlook.failures(step.world)
    assert failures is not None and outlook.calibration is not None
    durable_s = durable_seconds(cfg, model, step, failures, outlook.calibration)
    reason = (
        f"a save holds {milliseconds(step.snapshot_s)} up and is on the disk after {durable_s:.1f} s, a node of "
        f"{failures.nodes} fails every {failures.interval_s / 3600:,.0f} h (Young 1974)"
    )
    best = best_save_every(step.training_s + step.evaluate_s, step.snapshot_s, durable_s, failures)
    best = min(best, steps)  # the end of a stage is saved in any case
    finish_s = bill_of(step, steps, cfg, model, outlook).finish_s
    best_step = replace(step, save_s=step.snapshot_s / best)
    best_s = bill_of(best_step, steps, replace(cfg, save_every=best), model, outlook).finish_s
    if best_s == inf:
        return f"every {cfg.save_every:,} steps; no number of steps between two saves lets the stage end: {reason}"
    if best_s > (1 - LEAST_GAIN) * finish_s:
        return f"every {cfg.save_every:,} steps; no other number ends {LEAST_GAIN:.0%} sooner: {reason}"
    sooner = "at all" if finish_s == inf else f"{1 - best_s / finish_s:.0%} sooner"
    return (
        f"every {cfg.save_every:,} steps; every {best:,} would cost least, the stage then ends {sooner}: {reason}; "
        f"type {name}.save_every={best}"
    )


def durable_seconds(
    cfg: TrainConfig, model: ModelConfig, step: StepForecast, failures: Failures, calibration: Calibration
) -> float:
    """Return the seconds from a save's beginning until it is on the disk; of its copy alone where no disk is known."""
    if calibration.storage is None:
        return step.snapshot_s
    return checkpoint_bytes(cfg, model) / failures.nodes / calibration.storage.write_bytes_per_s


def compared_worlds(cfg: TrainConfig, allowed: Sequence[int]) -> list[int]:
    """Return the worlds whose bills are compared: those that the cluster may have, or else powers of two around."""
    if len(allowed) > 1:
        return sorted(allowed)[-MOST_WORLDS:]
    worlds = {allowed[0]}
    world = 1
    while world <= 4 * allowed[0]:
        if batch_fits(cfg, world):
            worlds.add(world)
        world *= 2
    return sorted(worlds)[-MOST_WORLDS:]


def worlds_text(bills: Sequence[Bill], calibration: Calibration) -> str:
    """Return what the stage takes on several worlds, and on which its bill is least."""
    least = min(bills, key=lambda stage_bill: stage_bill.worker_hours)
    fastest = min(bills, key=lambda stage_bill: stage_bill.finish_s)
    parts = []
    for stage_bill in bills:
        mark = "" if calibration.is_measured(stage_bill.world) else " (links not measured)"
        cost = f"{stage_bill.worker_hours:,.1f} h"
        if stage_bill.cost is not None:
            cost = f"{stage_bill.cost:,.2f}"
        parts.append(f"{stage_bill.world}: {duration(stage_bill.finish_s)}, {cost}{mark}")
    return (
        f"least bill on {counted(least.world, 'worker')}, first to end on {counted(fastest.world, 'worker')}; "
        f"{'; '.join(parts)}"
    )


def remarks(step: StepForecast, calibration: Calibration, cluster: ClusterConfig) -> list[str]:
    """Return what weakens a forecast."""
    said = []
    if step.unmeasured > 0.05:
        said.append(f"{step.unmeasured:.0%} of computing stands on operators that were not measured")
    if not step.is_measured_world:
        said.append(
            f"{counted(step.world, 'worker')} were not measured: their links are carried over from other numbers"
        )
    if calibration.backend != cluster.backend:
        said.append(f"measured with backend {calibration.backend}, not {cluster.backend}")
    if calibration.gpus and calibration.threads != cluster.cpus_per_worker:
        said.append(f"measured with {counted(calibration.threads, 'core')} a worker, not {cluster.cpus_per_worker}")
    if calibration.noise > 0.1:
        said.append(f"the calibration was noisy ({calibration.noise:.0%}, load {calibration.load:g})")
    if not said:
        return []
    return [f"  time    with care: {'; '.join(said)}; measured {calibration.date}"]


# ------------------------------------------------------------------------ what a run keeps


def keep_forecast(cfg: TrainConfig, context: Context) -> threading.Thread | None:
    """Begin to write a stage's forecast into its folder, beside what the driver does; None where none can be made.

    To trace a model takes seconds, for which the workers must not wait.
    """
    if context.model is None or not calibration_file().exists():
        return None
    thread = threading.Thread(target=_keep_forecast, args=(cfg, context), daemon=True)
    thread.start()
    return thread


def _keep_forecast(cfg: TrainConfig, context: Context) -> None:
    # A run goes on without its forecast: the line at its end is then not there.
    try:
        _write_forecast(cfg, context)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        context.say(f"{context.name}: no forecast is kept beside its steps: {type(error).__name__}: {reason}")


def _write_forecast(cfg: TrainConfig, context: Context) -> None:
    looked = outlook_of(None)
    calibration = looked.calibration
    problem = looked.problem
    if calibration is not None:
        problem = of_other_workers(calibration, context.cluster)
    if calibration is None or problem:
        context.say(f"{context.name}: {problem}")
        return
    # As the workers are told it (jobs/stages/training.py): a second forward pass of a block takes its time.
    cfg = with_blocks(cfg, context.model, is_gpu=context.cluster.gpus_per_worker > 0)
    steps: dict[int, KeptStep] = {}
    rate = decode_rate(context.resolve, cfg, context.model, calibration)
    for world in allowed_worlds(cfg, context.cluster)[:KEPT_WORLDS]:
        # Of a world like which nothing was measured there is none.
        try:
            passes = passes_of(cfg, context.model, calibration)
            step = forecast_step(cfg, context.model, world, passes, calibration, images_per_cpu_s=rate)
        except PatchlineError:
            continue
        steps[world] = {
            "training_s": step.training_s,
            "wait_s": step.wait_s,
            "save_s": step.save_s,
        }
    if steps:
        write_forecast(context.directory, f"{calibration.date}, {hardware_text(calibration.worker)}", steps)
