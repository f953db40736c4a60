"""The plan of a stage's training: batch, steps, data, compute, memory, time and money, a line each.

      batch   4096 = 8 workers × micro_batch 512 × accumulation 1
      steps   2,190 (9.0M images, 7.00 passes over 1,281,167 samples)
      memory  23.1 GiB a worker …
      time    800 ms a step on 8 workers: compute 752 ms, …; 5.1k images/s (measured 2026-11-23; …)

A line that is not known is left out, or says why: data and weights may not be there yet. Times are those of trials
(`python -m jobs trial`), or an estimate that is labelled as one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import models
from data.decoder import images_per_cpu_s
from data.index.index import Index
from data.order import shares as shares_of
from jobs.cluster_config import cores
from jobs.extras.planning.trial import trial_key
from jobs.resolved_recipe import Campaign, Stage, index_if_made
from jobs.stages.training import allowed_worlds
from pipeline.engine.settings import engine_settings, reduction_line
from pipeline.extras.plan import memory
from pipeline.extras.plan.cost import (
    GPUS,
    HOUR_S,
    MOST_SHARE,
    TRY,
    Assumptions,
    Gpu,
    Rate,
    best_save_seconds,
    estimated_rates,
    rate_on,
    seconds_with_failures,
)
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.extras.plan.trial import read_trials
from pipeline.phases import flops_of, has_one_shape, has_whole_images
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic, cache_line, steps_of, training_order
from pipeline.values import amount, counted, duration, milliseconds

GPU_FLOPS = MOST_SHARE * GPUS["h100"].peak  # the most that is to be expected of one
CPU_RATE = 650.0  # ImageNet-1k photographs a core decodes in a second, busy (e2babf2); idle 925, benchmarks/README.md
MOST_PROCESSES = 128  # that are ever advised for a GPU: as many cores as a large node has for each
LEAST_GAIN = 0.01  # of a stage's time, for which another number of steps between two saves is proposed


def span(least_s: float, most_s: float) -> str:
    """Return "4d03h", or "3d01h to 6d02h" of a range."""
    if math.isinf(most_s):
        return "NEVER, because failures cost more than the time between two"
    if least_s == most_s:
        return duration(least_s)
    return f"{duration(least_s)} to {duration(most_s)}"


def bill(least_hours: float, most_hours: float, price: float | None) -> str:
    """Return the worker-hours of a range, and what they cost."""
    hours = f"{least_hours:,.1f}"
    money = f"{least_hours * (price or 0):,.2f}"
    if least_hours != most_hours:
        hours += f" to {most_hours:,.1f}"
        money += f" to {most_hours * (price or 0):,.2f}"
    if price is None:
        return f"{hours} worker-hours (--price 2.5 says what they cost)"
    return f"{hours} worker-hours, {money} at {price:g} each"


@dataclass
class PlannedTraining:
    """Works out a trained stage: its lines in the plan, and the numbers that the first three lines need of it."""

    campaign: Campaign
    stage: Stage
    assumed: Assumptions
    add: Callable[[str, str], None]  # a line of the plan: its label and its text
    log: Callable[[str], None]  # hears of waits
    device_bytes: int = 0  # that a worker needs; 0: not known
    limit: int = 0  # bytes of the device; 0: not known
    limit_source: str = ""
    fits: bool = True  # as far as is known
    least_s: float = 0.0  # that the stage takes, at the least and at the most; 0: not known
    most_s: float = 0.0
    failures: float = 0.0  # to be expected
    no_time: str = "the data or the model is not there yet"  # why it is not known how long it takes

    def __post_init__(self) -> None:
        self.name = self.stage.name
        self.cfg: TrainConfig = self.stage.config
        self.is_asynchronous = getattr(self.cfg, "evaluate_on", "training") == "spare"
        self.is_gpu = self.campaign.cluster.gpus_per_worker > 0
        self.worlds = allowed_worlds(self.cfg, self.campaign.cluster)
        self.world = self.worlds[0]
        # What a worker needs is the most where the workers are the fewest.
        self.fewest = self.worlds[-1]
        self.index_of: dict[str, Index | None] = {}  # by the name of a set that it trains on; None: not made yet
        for name, path in self.cfg.data.sets().items():
            self.index_of[name] = index_if_made(self.campaign.path_of(path))
        self.indexes = [index for index in self.index_of.values() if index is not None]
        self.all_there = len(self.indexes) == len(self.index_of)

    def work_out(self) -> None:
        """Fill lines and numbers, as far as data and model are there."""
        cfg = self.cfg
        # 1. How a batch falls on the workers.
        arithmetic = batch_arithmetic(cfg, self.world)
        micro_batches = arithmetic.accumulation
        if cfg.batch_size == self.world * cfg.micro_batch * micro_batches:
            shares = f"= {self.world} workers × micro_batch {cfg.micro_batch} × accumulation {micro_batches}"
        else:
            shares = f"over {self.world} workers unevenly, {micro_batches} micro-batches each"
        self.add("batch", f"{cfg.batch_size} {shares}")
        here = cores()
        if self.campaign.cluster.backend == "processes" and not self.is_gpu and self.world > here:
            self.add(
                "cores",
                f"{self.world} workers share the {here} cores of this machine, and a step takes "
                f"{self.world / here:.1f} times as long as on cores of their own; type cluster.workers={here}",
            )
        if len(self.worlds) > 1:
            *others, last = map(str, self.worlds)
            worlds = f"{', '.join(others)} or {last}"
            if len(self.worlds) > 6:
                worlds = f"{', '.join(others[:3])} … {last}"
            self.add("workers", f"{worlds}, as there is room; lines about a worker are for {self.fewest}")

        # 2. How many steps, counted where all sets are there, else as the recipe says.
        samples = cfg.data.samples
        if self.all_there:
            samples = sum(index.samples for index in self.indexes)
        if samples is None and cfg.steps is None:
            self.add("steps", f"{cfg.passes:g} passes; the data is not there yet (data.samples=… lets plan count)")
            return
        self.steps = steps_of(cfg, samples or 0)
        # A branch takes the steps after its begin.
        self.taken = range(cfg.first_step, self.steps)
        self.add_data(samples)

        # 3. What the steps compute.
        if self.stage.model is None:
            self.add("model", "not known: the weights that it starts from are missing")
            return
        self.model = self.stage.model
        phases = cfg.phases(self.steps, self.model)
        is_thinned = not has_one_shape(phases, self.model)
        self.flops = flops_of(phases, self.model, self.taken, cfg.batch_size)
        text = f"{self.flops / 1e18:.4g} exaFLOPs (6 × MACs × images)"
        if is_thinned:
            whole = models.training_flops(self.model, len(self.taken) * cfg.batch_size)
            text += f", {self.flops / whole:.2f} × the {whole / 1e18:.4g} of whole images"
        self.add("compute", text)
        if is_thinned:
            for phase in phases:
                text = f"steps {phase.steps.start:,} … {phase.steps.stop - 1:,}: {phase.image_size} px"
                if phase.kept is not None:
                    text += f", {phase.kept} of {phase.patches} patches"
                self.add("thinned", text)
        if self.is_gpu:
            self.add_feed()
        schedule = cfg.optim.schedule
        text = (
            f"{cfg.optim.name} lr {cfg.optim.lr:g}, {schedule.decay} after {schedule.warmup_steps:,} warm-up steps, "
            f"decay {cfg.optim.weight_decay:g}, clip {cfg.optim.clip:g}; ZeRO {cfg.zero}, {cfg.precision}"
        )
        if cfg.exact_parts:
            text += f", exact in {cfg.exact_parts} parts"
        self.add("optim", text)

        # 4. What a worker needs, how gradients are summed over all of them, and the time that takes.
        self.add_memory()
        # With the tuning of the user's own DeepSpeed file in it.
        tuned = engine_settings(cfg, micro_batches)["zero_optimization"]
        summed = reduction_line(tuned, models.parameters_of(self.model), self.world, cfg.exact_parts)
        if summed:
            self.add("sums", summed)
        self.add_time()

    def add_data(self, samples: int | None) -> None:
        """Say how long a stage trains, when it is evaluated, and where its samples come from."""
        cfg = self.cfg
        images = len(self.taken) * cfg.batch_size
        passes = "data is not there yet"
        if samples:
            passes = f"{images / samples:.2f} passes over {samples:,} samples"
            if not self.all_there:
                passes += " (as the recipe says; the data is not there yet)"
        steps = f"{self.steps:,}"
        if cfg.first_step:
            steps = f"{len(self.taken):,}, from {cfg.first_step:,} of {cfg.init} to {self.steps:,}"
        self.add("steps", f"{steps} ({amount(images)} images, {passes})")
        if cfg.evaluate_every and self.is_asynchronous:
            self.add(
                "judge",
                f"every {cfg.evaluate_every:,} steps, each committed first, on a worker beside training where "
                "one is spare, else by the workers; the last by the workers",
            )
        elif cfg.evaluate_every:
            self.add(
                "judge",
                f"every {cfg.evaluate_every:,} steps, by the workers, who stop for it (evaluate_on=spare: beside them)",
            )
        # How many samples of every batch each set gives, and how often that goes through the set.
        if cfg.data.mixture:
            shares = shares_of(cfg.batch_size, cfg.data.weights())
            for (name, index), share in zip(self.index_of.items(), shares, strict=True):
                text = f"{name}: {share} of every batch"
                if index is not None:
                    text += f", {self.steps * share / index.samples:.2f} passes over {index.samples:,} samples"
                self.add("mixture", text)
        if self.all_there and any(index.remote for index in self.indexes):
            joined, order = training_order(cfg, self.indexes)
            slots = batch_arithmetic(cfg, self.fewest).slots(0)
            self.add("cache", f"a worker needs {cache_line(joined, order, slots, 0, cfg.data)}")

    def add_feed(self) -> None:
        """Say whether a worker's decoding processes keep up with its GPU, and what to type where they do not."""
        cfg = self.cfg
        cores_per_worker = self.campaign.cluster.cpus_per_worker
        # How fast a core decodes depends on the photographs: measured where a set lies on this machine.
        measured = None
        for index in self.indexes:
            if not index.remote:
                measured = images_per_cpu_s(index, max(self.model.image_size), cfg.data.augment)
                break
        rate = measured or CPU_RATE
        source = "measured here on this set" if measured else "assumed; the set is not here to measure"
        needed = GPU_FLOPS / models.training_flops(self.model, 1)  # images a second that a GPU takes
        needed_cores = math.ceil(needed / rate)
        text = (
            f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at {MOST_SHARE:.0%}, the most to expect) takes "
            f"{needed:,.0f} images/s, a core decodes {rate:,.0f} ({source}): "
        )
        # More decoding processes than cores decode no faster.
        if cfg.data.decode == "gpu":
            text += "data.decode=gpu, not judged"
        elif needed_cores > MOST_PROCESSES:
            text += (
                f"no number of processes feeds so small a model; data.processes={cfg.data.processes} on "
                f"{cores_per_worker} cores decode {rate * max(1, min(cfg.data.processes, cores_per_worker)):,.0f} "
                "images/s, which is its rate"
            )
        elif min(cfg.data.processes, cores_per_worker) >= needed_cores:
            text += f"data.processes={cfg.data.processes} keeps up, {needed_cores} would"
        else:
            overrides = f"{self.name}.data.processes={needed_cores}"
            if needed_cores >= cores_per_worker:
                # The worker needs a core beside those that decode.
                overrides += f" cluster.cpus_per_worker={needed_cores + 1}"
            text += (
                f"data.processes={cfg.data.processes} on {cores_per_worker} cores CANNOT FEED IT; "
                f"type {overrides}, pack with --restarts, or {self.name}.data.decode=gpu"
            )
        self.add("feed", text)

    def add_memory(self) -> None:
        """Say what a worker needs of its device's memory and of its node's; the step is traced where that is new."""
        cfg = self.cfg
        has_gpu = self.is_gpu or self.assumed.gpu is not None
        if self.is_gpu and self.campaign.cluster.gpu_memory_gb is not None:
            self.limit = int(self.campaign.cluster.gpu_memory_gb * memory.GIB)
            self.limit_source = "cluster.gpu_memory_gb"
        elif self.assumed.gpu is not None:
            gpu = GPUS[self.assumed.gpu]
            self.limit = int(gpu.memory_gib * memory.GIB)
            self.limit_source = f"an {gpu.name}"
        elif not self.is_gpu and self.campaign.cluster.backend == "processes":
            self.limit = memory_free() // self.fewest
            self.limit_source = f"a worker's share of what is free here, of {self.fewest}"
        self.log(f"plan: {self.name}: tracing a step for what it needs of memory, once …")
        try:
            need = memory.memory_need(cfg, self.model, self.fewest, is_gpu=has_gpu)
        except TraceFailed as error:
            self.add("memory", f"not known: {error}")
            return
        text = f"{memory.in_words(need, is_gpu=has_gpu)} (checkpoint_blocks={need.recomputed})"
        if not has_whole_images(cfg.phases(self.steps, self.model)):
            text += "; of whole images, which patch dropout leaves out to the end: a worker needs less"
        self.add("memory", text)
        self.device_bytes = need.device_bytes
        self.fits = not self.limit or need.device_bytes <= self.limit

    # -------------------------------------------------------------------------------------------- time and money

    def add_time(self) -> None:
        """Say how long all steps take and what they cost: by trials, else by an estimate."""
        cluster = self.campaign.cluster
        trials = []
        key = trial_key(self.campaign, self.stage)
        for trial in read_trials(self.campaign.run, key):
            # A worker with a GPU, or with other cores, takes other times.
            if (trial.gpus_per_worker, trial.cpus_per_worker) == (cluster.gpus_per_worker, cluster.cpus_per_worker):
                trials.append(trial)
        if trials and self.assumed.gpu is None:
            self.add_measured_time(rate_on(self.world, trials))
            return
        gpu = GPUS[self.assumed.gpu or "h100"]
        if not self.is_gpu and self.assumed.gpu is None:
            self.no_time = f"type {TRY}, which takes 30 steps of each stage, or --gpu h100 for an estimate"
        elif self.cfg.precision != "bf16":
            self.no_time = f"a GPU's peak is of bf16, and this stage computes in {self.cfg.precision}; type {TRY}"
        else:
            self.add_estimate(gpu)
            return
        self.add("time", f"not known: {self.no_time}")

    def add_measured_time(self, rate: Rate) -> None:
        """Say what a step took in a trial, and what follows for all steps, with failures where they are assumed."""
        cfg = self.cfg
        trial = rate.trial
        step_s = cfg.batch_size / rate.images_per_s
        scale = step_s / trial.step_s  # another world's step is divided as the trial's was
        self.add(
            "time",
            f"{milliseconds(step_s)} a step on {counted(self.world, 'worker')}: compute "
            f"{milliseconds(trial.compute_s * scale)}, storage {milliseconds(trial.storage_s * scale)}, decode "
            f"{milliseconds(trial.decode_s * scale)}, transfer {milliseconds(trial.transfer_s * scale)}; "
            f"{amount(rate.images_per_s)} images/s ({rate.source}; {trial.hardware}, "
            f"{trial.memory_gib:.1f} GiB at most)",
        )
        # An evaluation is a forward pass, a third of a training step's work for an image.
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
            text += f" and evaluations ({duration(evaluations_s)}, a third of a step's time an image)"
        if mtbf_s is not None:
            text += f"; with {self.failures:.1f} failures {span(seconds, seconds)}"
        hours = seconds * self.world / HOUR_S
        self.add("finish", f"{text}; {bill(hours, hours, self.assumed.price)}")
        if mtbf_s is None:
            return
        best_s = best_save_seconds(trial, mtbf_s)
        best_every = min(max(1, round(best_s / work_s * steps)), steps)
        with_best_s, _ = seconds_with_failures(work_s, best_every * work_s / steps, trial, mtbf_s)
        text = f"every {cfg.save_every:,} steps; "
        if with_best_s < (1 - LEAST_GAIN) * seconds:
            sooner = "at all" if math.isinf(seconds) else f"{1 - with_best_s / seconds:.0%} sooner"
            text += f"every {best_every:,} ends {sooner} (Young 1974): type {self.name}.save_every={best_every}"
        else:
            text += f"no other number ends {LEAST_GAIN:.0%} sooner (Young 1974)"
        self.add(
            "save",
            f"{text}; a save holds up {milliseconds(trial.save_stall_s)} and is kept after "
            f"{milliseconds(trial.save_s)}, {milliseconds(trial.until_steady_s)} from a start until steps are steady",
        )

    def add_estimate(self, gpu: Gpu) -> None:
        """Say what the steps' FLOPs take at the least and at the most of a GPU's peak that is to be expected."""
        trained_images = len(self.taken) * self.cfg.batch_size
        low, high = estimated_rates(self.flops / trained_images, gpu, self.world)
        images = trained_images + self.evaluated_images() / 3
        self.least_s = images / high
        self.most_s = images / low
        self.add(
            "time",
            f"ESTIMATE, not measured: {amount(low)} to {amount(high)} images/s, 20 to 40 % of the peak of "
            f"{self.world} {gpu.name}; {TRY} measures it",
        )
        text = f"{span(self.least_s, self.most_s)} for {len(self.taken):,} steps, without saves and failures"
        money = bill(self.least_s * self.world / HOUR_S, self.most_s * self.world / HOUR_S, self.assumed.price)
        self.add("finish", f"{text}; {money}")

    def evaluated_images(self) -> int:
        """Return the images that the workers evaluate in all, of the sets that are there."""
        images = 0
        for path in (self.cfg.data.evaluate, self.cfg.probe.train, self.cfg.probe.test):
            index = index_if_made(self.campaign.path_of(path)) if path else None
            if index is not None:
                images += index.samples
        times = 1  # at the end
        if self.cfg.evaluate_every and not self.is_asynchronous:
            times += (self.steps - 1) // self.cfg.evaluate_every - self.taken.start // self.cfg.evaluate_every
        return images * times
