"""Plan a stage's training: one line each for batch, steps, data, compute, memory, time and cost.

      batch   4096 = 8 workers × micro_batch 512 × accumulation 1
      steps   2,190 (9.0M images, 7.00 passes over 1,281,167 samples)
      memory  23.1 GiB per worker …
      time    800 ms per step on 8 workers: compute 752 ms, …; 5.1k images/s (measured 2026-11-23; …)

If values are unknown, for example because data or weights do not exist yet, the corresponding line is omitted or gives
the reason. Times come from trials (`python -m jobs trial`); without trials, times are estimated and labelled as
estimates.
"""

import math
from collections.abc import Callable

import models
from data.files import memory_text
from data.order import shares as shares_of
from jobs.extras.planning.checks import STAGE, results
from jobs.extras.planning.stage_checks import TrainedFacts, milliseconds
from jobs.extras.planning.trial import trial_key
from jobs.resolved_recipe import Campaign, Stage, index_if_made
from pipeline.engine.settings import Settings, bucket_size, engine_settings
from pipeline.extras.plan.cost import (
    GPUS,
    HOUR_S,
    TRY,
    Assumptions,
    Gpu,
    Rate,
    best_save_seconds,
    estimated_rates,
    rate_on,
    seconds_with_failures,
)
from pipeline.extras.plan.trial import read_trials
from pipeline.training_config import flops_of, has_one_shape
from pipeline.training_data import batch_arithmetic, cache_line, steps_of, training_order
from pipeline.values import amount, counted, duration

MIN_GAIN = 0.01  # another save_every is suggested if it saves at least this fraction of a stage's time


def format_duration_range(least_s: float, most_s: float) -> str:
    """Format a duration or a range of durations: "4d03h", "3d01h to 6d02h"."""
    if math.isinf(most_s):
        return "NEVER finishes, because failures lose more work than is done between them"
    if least_s == most_s:
        return duration(least_s)
    return f"{duration(least_s)} to {duration(most_s)}"


def rounded(number: float, decimals: int) -> str:
    """Format a number with at most three significant digits if it is 100 or more: 7585.29 → 7,590."""
    if number < 100:
        return f"{number:,.{decimals}f}"
    return f"{float(f'{number:.3g}'):,.0f}"


def format_cost(least_hours: float, most_hours: float, price: float | None) -> str:
    """Format a number or range of worker-hours and its price."""
    hours = rounded(least_hours, 1)
    money = rounded(least_hours * (price or 0), 2)
    if least_hours != most_hours:
        hours += f" to {rounded(most_hours, 1)}"
        money += f" to {rounded(most_hours * (price or 0), 2)}"
    if price is None:
        return f"{hours} worker-hours (for the cost, add --price 2.5)"
    return f"{hours} worker-hours, {money} at {price:g} each"


class PlannedTraining(TrainedFacts):
    """Computes the plan of a training stage: its lines, and its numbers for the summary."""

    def __init__(
        self,
        campaign: Campaign,
        stage: Stage,
        assumed: Assumptions,
        add: Callable[[str, str], None],  # adds a line to the plan: label, text
        log: Callable[[str], None],  # receives messages about waits
    ) -> None:
        super().__init__(campaign, stage, assumed, log=log)
        self.add = add
        self.least_s = 0.0  # minimum and maximum duration of the stage; 0: unknown
        self.most_s = 0.0
        self.failures = 0.0  # expected number of failures
        self.no_time = "the data or the model does not exist yet"  # why the duration is unknown
        self.is_asynchronous = getattr(self.cfg, "evaluate_on", "training") == "spare"

    def compute(self) -> None:
        """Compute the estimates and add their lines to the plan; skip estimates that need unknown data or models."""
        is_known = self.describe()
        for result in results("plan", self, STAGE):
            self.add(result.subject, "; ".join(filter(None, (result.text, result.remedy))))
        if is_known and self.model is not None:
            # Describe how gradients are reduced over all workers, including settings in the user's DeepSpeed file.
            micro_batches = batch_arithmetic(self.cfg, self.world).accumulation
            tuned = engine_settings(self.cfg, micro_batches)["zero_optimization"]
            summed = reduction_line(tuned, models.parameters_of(self.model), self.world, self.cfg.exact_parts)
            if summed:
                self.add("sums", summed)
            self.add_time()

    def describe(self) -> bool:
        """Add lines for batch, steps, data and compute to the plan; return whether data and model are known."""
        cfg = self.cfg
        # 1. How a batch is split over the workers.
        arithmetic = batch_arithmetic(cfg, self.world)
        micro_batches = arithmetic.accumulation
        if cfg.batch_size == self.world * cfg.micro_batch * micro_batches:
            shares = f"= {self.world} workers × micro_batch {cfg.micro_batch} × accumulation {micro_batches}"
        else:
            shares = f"split unevenly over {self.world} workers, {micro_batches} micro-batches each"
        self.add("batch", f"{cfg.batch_size} {shares}")
        if len(self.worlds) > 1:
            *others, last = map(str, self.worlds)
            worlds = f"{', '.join(others)} or {last}"
            if len(self.worlds) > 6:
                worlds = f"{', '.join(others[:3])} … {last}"
            self.add("workers", f"{worlds}, depending on available nodes; values per worker are for {self.fewest}")

        # 2. The number of steps: from the data sets if all exist, otherwise from the recipe.
        samples = self.samples
        if samples is None and cfg.steps is None:
            self.add(
                "steps", f"{cfg.passes:g} passes; the data does not exist yet (to plan without it, set data.samples=…)"
            )
            return False
        self.steps = steps_of(cfg, samples or 0)
        # A branch of another stage starts at a later step.
        self.taken = range(cfg.first_step, self.steps)
        self.add_data(samples)

        # 3. Compute and optimizer.
        if self.model is None:
            self.add("model", "unknown: the initial weights are missing")
            return False
        model = self.model
        phases = cfg.phases(self.steps, model)
        has_full_steps = has_one_shape(phases, model)
        self.flops = flops_of(phases, model, self.taken, cfg.batch_size)
        text = f"{self.flops / 1e18:.4g} exaFLOPs (6 × MACs × images)"
        if not has_full_steps:
            whole = models.training_flops(model, len(self.taken) * cfg.batch_size)
            text += f", {self.flops / whole:.2f} × the {whole / 1e18:.4g} with whole images"
        self.add("compute", text)
        if not has_full_steps:
            for phase in phases:
                text = f"steps {phase.steps.start:,} … {phase.steps.stop - 1:,}: {phase.image_size} px"
                if phase.kept is not None:
                    text += f", {phase.kept} of {phase.patches} patches"
                self.add("phase", text)
        schedule = cfg.optim.schedule
        text = (
            f"{cfg.optim.name} lr {cfg.optim.lr:g}, {schedule.decay} after {schedule.warmup_steps:,} warm-up steps, "
            f"decay {cfg.optim.weight_decay:g}, clip {cfg.optim.clip:g}; ZeRO {cfg.zero}, {cfg.precision}"
        )
        if cfg.exact_parts:
            text += f", exact mode with {cfg.exact_parts} parts"
        self.add("optim", text)
        return True

    def add_data(self, samples: int | None) -> None:
        """Add lines for the number of steps, the evaluations and the composition of each batch to the plan."""
        cfg = self.cfg
        images = len(self.taken) * cfg.batch_size
        passes = "the data does not exist yet"
        if samples:
            passes = f"{images / samples:.2f} passes over {samples:,} samples"
            if not self.has_all_sets:
                passes += " (according to the recipe; the data does not exist yet)"
        steps = f"{self.steps:,}"
        if cfg.first_step:
            steps = f"{len(self.taken):,}, from step {cfg.first_step:,} of {cfg.init} to {self.steps:,}"
        self.add("steps", f"{steps} ({amount(images)} images, {passes})")
        if cfg.evaluate_every and self.is_asynchronous:
            self.add(
                "eval",
                f"every {cfg.evaluate_every:,} steps, after a commit, on a spare worker during training; on the "
                "training workers if there is no spare worker, and at the end",
            )
        elif cfg.evaluate_every:
            self.add(
                "eval",
                f"every {cfg.evaluate_every:,} steps; training pauses (to use spare workers, set evaluate_on=spare)",
            )
        # Number of samples of each data set in a batch, and the number of passes over it.
        if cfg.data.mixture:
            shares = shares_of(cfg.batch_size, cfg.data.weights())
            for (name, index), share in zip(self.index_of.items(), shares, strict=True):
                text = f"{name}: {share} of every batch"
                if index is not None:
                    text += f", {self.steps * share / index.samples:.2f} passes over {index.samples:,} samples"
                self.add("mixture", text)
        if self.has_all_sets and any(index.remote for index in self.indexes):
            joined, order = training_order(cfg, self.indexes)
            slots = batch_arithmetic(cfg, self.fewest).slots(0)
            self.add("cache", f"a worker needs {cache_line(joined, order, slots, 0, cfg.data)}")

    # -------------------------------------------------------------------------------------------- time and money

    def add_time(self) -> None:
        """Add lines for the time and cost of all steps, measured by trials or estimated from FLOPs, to the plan."""
        cluster = self.campaign.cluster
        trials = []
        key = trial_key(self.campaign, self.stage)
        for trial in read_trials(self.campaign.run, key):
            # Use only trials whose workers had the same number of GPUs and CPU cores.
            if (trial.gpus_per_worker, trial.cpus_per_worker) == (cluster.gpus_per_worker, cluster.cpus_per_worker):
                trials.append(trial)
        if trials and self.assumed.gpu is None:
            self.add_measured_time(rate_on(self.world, trials))
            return
        gpu = GPUS[self.assumed.gpu or "h100"]
        if not self.is_gpu and self.assumed.gpu is None:
            self.no_time = f"to measure 30 steps of each stage, run {TRY}"
            # Estimates assume bf16.
            if self.cfg.precision == "bf16":
                self.no_time += "; for an estimate, add --gpu h100"
        elif self.cfg.precision != "bf16":
            self.no_time = f"estimates assume bf16, but this stage uses {self.cfg.precision}; to measure it, run {TRY}"
        else:
            self.add_estimate(gpu)
            return
        self.add("time", f"unknown: {self.no_time}")

    def add_measured_time(self, rate: Rate) -> None:
        """Add lines for the measured step time and the total time to the plan; include failures if an MTBF is given."""
        cfg = self.cfg
        trial = rate.trial
        step_s = cfg.batch_size / rate.images_per_s
        scale = step_s / trial.step_s  # assume the same proportions for other numbers of workers
        self.add(
            "time",
            f"{milliseconds(step_s)} per step on {counted(self.world, 'worker')}: compute "
            f"{milliseconds(trial.compute_s * scale)}, storage {milliseconds(trial.storage_s * scale)}, decode "
            f"{milliseconds(trial.decode_s * scale)}, transfer {milliseconds(trial.transfer_s * scale)}; "
            f"{amount(rate.images_per_s)} images/s ({rate.source}; {trial.hardware}, "
            f"at most {trial.memory_gib:.1f} GiB)",
        )
        # An evaluation is a forward pass, a third of the work of a training step per image.
        evaluations_s = self.evaluated_images() / (3 * rate.images_per_s)
        steps = len(self.taken)
        work_s = steps * step_s + evaluations_s
        between_s = min(cfg.save_every, steps) * work_s / steps
        mtbf_s = None if self.assumed.mtbf_hours is None else self.assumed.mtbf_hours * HOUR_S
        without_failures_s, _ = seconds_with_failures(work_s, between_s, trial, None)
        seconds, self.failures = seconds_with_failures(work_s, between_s, trial, mtbf_s)
        self.least_s = self.most_s = seconds
        text = f"{duration(without_failures_s)} for {steps:,} steps"
        if evaluations_s:
            text += f" and evaluations ({duration(evaluations_s)}, at a third of a training step's time per image)"
        if mtbf_s is not None:
            text += f"; with {self.failures:.1f} failures {format_duration_range(seconds, seconds)}"
        hours = seconds * self.world / HOUR_S
        self.add("finish", f"{text}; {format_cost(hours, hours, self.assumed.price)}")
        if mtbf_s is None:
            return
        best_s = best_save_seconds(trial, mtbf_s)
        best_every = min(max(1, round(best_s / work_s * steps)), steps)
        with_best_s, _ = seconds_with_failures(work_s, best_every * work_s / steps, trial, mtbf_s)
        text = f"every {cfg.save_every:,} steps; "
        if with_best_s < (1 - MIN_GAIN) * seconds:
            sooner = "at all" if math.isinf(seconds) else f"{1 - with_best_s / seconds:.0%} sooner"
            text += f"saving every {best_every:,} steps would make it finish {sooner} (Young 1974): set "
            text += f"{self.name}.save_every={best_every}"
        else:
            text += f"no other interval would make it finish {MIN_GAIN:.0%} sooner (Young 1974)"
        self.add(
            "save",
            f"{text}; a save pauses training for {milliseconds(trial.save_stall_s)} and is committed after "
            f"{milliseconds(trial.save_s)}; after a start, steps are steady after {milliseconds(trial.until_steady_s)}",
        )

    def add_estimate(self, gpu: Gpu) -> None:
        """Add lines to the plan with the total time, estimated from FLOPs over a range of GPU utilisations."""
        trained_images = len(self.taken) * self.cfg.batch_size
        low, high = estimated_rates(self.flops / trained_images, gpu, self.world)
        images = trained_images + self.evaluated_images() / 3
        self.least_s = images / high
        self.most_s = images / low
        self.add(
            "time",
            f"ESTIMATE, not measured: {amount(low)} to {amount(high)} images/s, 20 to 40 % of the peak performance of "
            f"{self.world} {gpu.name}; to measure it, run {TRY}",
        )
        seconds = format_duration_range(self.least_s, self.most_s)
        text = f"{seconds} for {len(self.taken):,} steps, without saves and failures"
        money = format_cost(self.least_s * self.world / HOUR_S, self.most_s * self.world / HOUR_S, self.assumed.price)
        self.add("finish", f"{text}; {money}")

    def evaluated_images(self) -> int:
        """Return the total number of images evaluated by the training workers, counting only existing data sets."""
        images = 0
        for path in (self.cfg.data.evaluate, self.cfg.probe.train, self.cfg.probe.test):
            index = index_if_made(self.campaign.path_of(path)) if path else None
            if index is not None:
                images += index.samples
        times = 1  # the evaluation at the end
        if self.cfg.evaluate_every and not self.is_asynchronous:
            times += (self.steps - 1) // self.cfg.evaluate_every - self.taken.start // self.cfg.evaluate_every
        return images * times


def reduction_line(zero_optimization: Settings, parameters: int, world: int, exact_parts: int = 0) -> str:
    """Describe the gradient reduction over workers: the buckets, and whether it overlaps with the backward pass.

    `zero_optimization` is the section with that name in `deepspeed_config`. Returns "" for a single worker.

        reduction_line({"stage": 2}, parameters=632_045_800, world=8)
        →  "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each (overlap_comm off)"
    """
    if world == 1:
        return ""
    if exact_parts:
        return "all gradients at once after the backward pass, in a fixed order (exact_parts)"
    if zero_optimization["stage"] == 0:
        return "all gradients at once after the backward pass (ZeRO 0)"
    size = zero_optimization.get("reduce_bucket_size", bucket_size(parameters))
    buckets = math.ceil(parameters / size)
    pieces = f"{buckets} buckets of {size / 1e6:,.3g} million gradients"
    if buckets == 1:
        pieces = f"one bucket of {parameters / 1e6:,.3g} million gradients"
    when = "the backward pass waits for each (overlap_comm off)"
    overlaps = zero_optimization.get("overlap_comm")
    if overlaps is None:  # by default DeepSpeed overlaps only at ZeRO 3
        overlaps = zero_optimization["stage"] == 3
    if overlaps:
        when = "during the backward pass (overlap_comm on)"
    return f"{pieces}, {memory_text(size * 4)} each; {when}"
