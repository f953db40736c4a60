"""Find the samples that caused a spike by masking parts of the batch.

`bisect RUN step=N` repeats one step many times in one attempt (pipeline/extras/replays/search.py). It prints the
smallest group of samples without which the step's metric is normal: their keys, labels and shards, and their images,
both as stored in the data set and as seen by the model.
"""

import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import UsageError
from data.extras.pages.page import jpeg_bytes
from data.files import write_atomically
from data.reader import ShardReader
from jobs.cluster.supervisor import supervise
from jobs.extras.replays.stretch import Replays
from jobs.resolved_recipe import Context
from jobs.stages import training
from jobs.stages.training import allowed_worlds
from jobs.terminal import echo
from pipeline.extras.replays.batch import TrainedStage
from pipeline.health import RECENT
from pipeline.monitoring.telemetry import without_nan
from pipeline.training_config import TrainConfig

METRICS = ("grad_norm", "loss")  # fields of pipeline.extras.replays.batch.RecordedStep
MAX_SHOWN = 16  # maximum number of samples to print and to write as pictures


def bisect(run: str, words: Sequence[str], *, output: str | None) -> dict[str, Any]:
    """Find the samples that caused the spike at a step, and write bisect.json; return its content.

    Raises UsageError if the arguments are invalid, or any error raised by a run.
    """
    values: dict[str, str] = {}
    overrides = []
    for word in words:
        key, separator, value = word.partition("=")
        if word.startswith("cluster."):
            overrides.append(word)
        elif separator and key in ("step", "metric"):
            values[key] = value
        else:
            raise UsageError(f"unknown argument {word!r}\n  expected step=N, metric=METRIC or cluster.KEY=VALUE")
    if "step" not in values:
        raise UsageError("no step is given\n  expected step=N, numbered as in the log")

    replays = Replays("bisect", run, output, overrides)
    steps = replays.stage.steps
    text = values["step"]
    if not text.isdigit() or not 0 < int(text) <= steps:
        raise UsageError(f"step is {text}, expected a number from 1 to {steps}, as in the log")
    metric = values.get("metric", METRICS[0])
    if metric not in METRICS:
        raise UsageError(f"metric is {metric}, expected one of {', '.join(METRICS)}")
    return bisect_step(replays, int(text), metric)


def bisect_step(replays: Replays, step: int, metric: str) -> dict[str, Any]:
    """Find the samples that caused the unusual loss or gradient norm at a step."""
    # 1. Determine the normal value.
    stage = replays.stage
    recent = []
    for number in range(step - RECENT, step):
        if number in stage.step_records:
            value = getattr(stage.step_records[number], metric)
            if math.isfinite(value):
                recent.append(value)
    if not recent:
        raise UsageError(f"the {metric} of step {step} cannot be compared, because no earlier step has recorded it")
    usual = statistics.median(recent)
    start = stage.commit_before(step)
    batch_size = stage.cfg.batch_size
    replays.log(
        f"{replays.name}: step {step} from commit {start}, {metric} compared with {usual:.4g}, the median of the "
        f"{len(recent)} preceding steps; at most {2 * math.ceil(math.log2(batch_size))} repetitions of the step"
    )

    # 2. Search in one attempt.
    request = {"step": step, "metric": metric, "usual": usual}

    def search(cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        from pipeline.extras.replays.search import search

        began = time.time()

        def make_task(attempt: int) -> dict[str, Any]:
            kind = context.stage.kind
            assert isinstance(kind, training.Training)
            task = training.make_training_task(cfg, context, began, kind.extras, attempt, until=step)
            return {**task, "search": request}

        worlds = allowed_worlds(cfg, context.campaign.cluster)
        return supervise(search, make_task, context, worlds=worlds, stall_s=cfg.stall_s, can_commit=False)

    folder = replays.folder / f"step-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    outcome = replays.repeat(start, step, folder / "run", work=search).outcome
    shutil.rmtree(folder / "run")

    # 3. Print the result, and whether the repeated step agrees with the record.
    if step in stage.step_records:
        recorded = without_nan([stage.step_records[step].loss, stage.step_records[step].grad_norm])
        is_same = [outcome["loss"], outcome["grad_norm"]] == recorded
        comparison = "agrees with the record bit for bit" if is_same else "DIFFERS from the record"
        echo(f"the repeated step {step} {comparison}")
    value = "not finite" if outcome["value"] is None else f"{outcome['value']:.4g}"
    shown = f"{metric} is {value}"
    samples = found_samples(stage, step, outcome, folder)
    if not outcome["is_spike"]:
        replays.log(f"no spike: {shown}, normal is {usual:.4g}")
    elif outcome["is_found"]:
        replays.log(
            f"{shown} with {len(samples)} of {batch_size} samples, and {outcome['value_without']:.4g} without them, "
            f"after {outcome['replays']} repetitions of the step:"
        )
    else:
        replays.log(
            f"no single sample is the cause: {shown}; at least {len(samples)} of {batch_size} samples must be masked "
            f"to bring the value below {outcome['limit']:.4g} (after {outcome['replays']} repetitions)"
        )
    for sample in samples[:MAX_SHOWN]:
        replays.log(
            f"  slot {sample['slot']}: {sample['shard']} {sample['key']}, labels {sample['labels']}; "
            f"{sample['picture']}"
        )
    return replays.report(folder / "bisect.json", {**request, "start": start, **outcome, "samples": samples})


def found_samples(stage: TrainedStage, step: int, outcome: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the samples found by a search, and save the images of the first few to a folder."""
    if not outcome["rows"]:
        return []
    samples: list[dict[str, Any]] = []
    batch = stage.batch(step)
    reader = ShardReader(batch.source)
    folder.mkdir(parents=True, exist_ok=True)
    for sample in outcome["samples"]:
        row = sample["slot"]
        picture = ""
        if len(samples) < MAX_SHOWN:
            shard, number, _ = sample["range"]
            _, encoded, _ = reader.read(shard, number)
            picture = str(folder / f"slot-{row}.jpg")
            write_atomically(Path(picture), jpeg_bytes(batch.images[row]))
            write_atomically(folder / f"slot-{row}-as-stored", encoded)
        labels = [batch.source.class_name(label) for label in batch.labels[row] if label >= 0]
        samples.append({**sample, "labels": labels, "picture": picture})
    return samples
