"""What a training stage reports: the log line of the steps since the last one, and evaluations.

Both go through `Telemetry`, which writes log.txt, metrics.jsonl and TensorBoard on rank 0. Evaluations are collective:
every rank judges its part of the set.
"""

import time
from collections.abc import Iterator

import models
from data.evaluation import EvaluationBatch, EvaluationSet
from pipeline.evaluation.evaluate import accuracy, features, probe, watched
from pipeline.monitoring.telemetry import log_line, memory_gb, peak_flops
from pipeline.start import Progress, Worker


def report_training(worker: Worker, progress: Progress, rate: float) -> None:
    """Write the log line and the record of the steps since the last report; then begin the next window."""
    cfg = worker.cfg
    window = worker.window
    window.stalled_s = worker.saver.stalled_s
    samples = cfg.batch_size * len(window.losses)
    # The FLOPs of the algorithm, as published: blocks that are computed again in the backward pass do not count twice.
    flops = models.training_flops(worker.model_config, 1) * samples / worker.world
    values = {
        "step": progress.step,
        "steps": worker.steps,
        "lr": rate,
        **window.values(samples, flops, peak_flops(worker.device), worker.steps - progress.step),
        "memory_gb": memory_gb(),
        "world": worker.world,
        "samples_seen": progress.step * cfg.batch_size,
        "bad_samples": progress.bad_samples,
        "ledger": progress.ledger.hex,
    }
    worker.telemetry.report("train", values, log_line(values))
    # The next window begins behind the writing of this report, and the time of saves is booked in one window only.
    window.clear()
    worker.saver.stalled_s = 0.0


def evaluate(worker: Worker, progress: Progress, remark: str = "") -> None:
    """Collective: measure test accuracy and few-shot accuracy, as far as the recipe names sets for them."""
    job = worker.job
    began = time.monotonic()
    values: dict[str, float | int] = {}
    if job.evaluate:
        values |= measure_accuracy(worker, progress.step, job.evaluate)
    if job.probe_train and job.probe_test:
        values |= measure_few_shot(worker, progress.step, job.probe_train, job.probe_test)
    # Counts such as "judged" go to the record; checkpoints and results keep the measures, which are all floats.
    if values and worker.rank == 0:
        progress.last_metrics = {name: value for name, value in values.items() if isinstance(value, float)}
        shown = []
        for name, value in progress.last_metrics.items():
            if "seed" not in name:  # metrics.jsonl has every seed of the few-shot probe, the line their mean
                shown.append(f"{name} {value:.4f}")
        line = f"evaluate step {progress.step}  {'  '.join(shown)}{remark}"
        worker.telemetry.report("evaluate", {"step": progress.step, **values}, line)
    # Noted apart from training, whose images per second an evaluation would seem to slow down.
    worker.window.evaluated_s += time.monotonic() - began


def measure_accuracy(worker: Worker, step: int, path: str) -> dict[str, float | int]:
    """Collective: return {"accuracy": top-1, "judged": samples that could be read}.

    Rank 0 reports how many could not be read.
    """
    samples = samples_of(worker, step, path)
    share_right, judged = accuracy(worker.engine.model, samples, worker.engine.dtype, worker.device)
    # A damaged set must not pass for a worse or better model: what could not be judged is said.
    unreadable = worker.sets[path].samples - judged
    if unreadable and worker.rank == 0:
        worker.telemetry.say(f"evaluate: {unreadable} bad samples of {path} count neither way; see `jobs data check`")
    return {"accuracy": share_right, "judged": judged}


def measure_few_shot(worker: Worker, step: int, train: str, test: str) -> dict[str, float]:
    """Collective: every rank computes features of its part; rank 0 fits the probe, the others return {}."""
    model = worker.engine.model
    dtype = worker.engine.dtype
    train_features = features(model, samples_of(worker, step, train), dtype, worker.device)
    test_features = features(model, samples_of(worker, step, test), dtype, worker.device)
    # The others wait here while rank 0 solves, so that the watchdog takes rank 0 for the one that they wait for.
    with worker.phases.led("probe", step, worker.rank == 0):
        if worker.rank != 0:
            return {}
        return probe(train_features, test_features, worker.cfg.probe)


def samples_of(worker: Worker, step: int, path: str) -> Iterator[EvaluationBatch]:
    """Iterate this rank's batches of a set, preprocessed as the recipe says, each entered as a phase."""
    data = worker.cfg.data
    samples = EvaluationSet(
        worker.sets[path],
        # big_vision's few-shot evaluation squashes an image to a square (SPEC 2.5); a recipe names other ops.
        data.preprocess or f"resize({worker.model_config.image_size})",
        # Training fitted this many images in memory, so evaluation, which keeps no activations, does too.
        batch_size=worker.cfg.micro_batch,
        rank=worker.rank,
        world=worker.world,
        max_labels=data.max_labels,
        cache=data.cache,
    )
    return watched(samples, worker.phases, step)
