"""What a training stage reports of its steps: a record in metrics.jsonl, and the log line.

Both go through `Telemetry`, which writes log.txt, metrics.jsonl and TensorBoard on rank 0.
"""

from pathlib import Path
from typing import Any

from pipeline.evaluation import async_evaluation
from pipeline.monitoring.telemetry import Window, log_line, memory_gb, peak_flops
from pipeline.token_dropping import flops_of, phases
from pipeline.worker import Progress, Worker


def report_training(worker: Worker, progress: Progress, rate: float, *, has_line: bool) -> None:
    """Write a record of the steps since the last one, and where asked the log line of those since the last line.

    A save writes records between two lines. A record that the disk refuses is written again with the next steps.
    """
    # Also where evaluate_on is training now: an earlier attempt may have left records.
    if worker.rank == 0:
        async_evaluation.report_records(Path(worker.job.directory), worker.telemetry.report)
    window = worker.window
    since_line = worker.since_line
    if not window.losses:  # all steps are in the last record
        return
    window.stalled_s += worker.saver.stalled_s
    worker.saver.stalled_s = 0.0
    values = training_values(worker, progress, rate, window)
    line = ""
    if has_line:
        since_line.extend(window)
        line = log_line(training_values(worker, progress, rate, since_line))
        since_line.clear()
    is_written = worker.telemetry.report("train", values, line)
    if is_written:
        if not has_line:
            since_line.extend(window)
        window.clear()


def training_values(worker: Worker, progress: Progress, rate: float, window: Window) -> dict[str, Any]:
    """Return what is recorded of a window that ends with the step of now."""
    cfg = worker.cfg
    samples = cfg.batch_size * len(window.losses)
    # The FLOPs of the algorithm, as published: blocks that are computed again in the backward pass do not count twice.
    in_order = phases(cfg.thinning, worker.steps, worker.model_config)
    steps = range(progress.step - len(window.losses), progress.step)
    flops = flops_of(in_order, worker.model_config, steps, cfg.batch_size) / worker.world
    return {
        "step": progress.step,
        "steps": worker.steps,
        "lr": rate,
        **window.values(samples, flops, peak_flops(worker.device), worker.steps - progress.step),
        "memory_gb": memory_gb(),
        "world": worker.world,
        "samples_seen": worker.health.samples_seen(progress.step),
        "bad_samples": progress.bad_samples,
        "ledger": progress.ledger.hex,
    }
