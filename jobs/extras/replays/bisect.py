"""Find the samples behind a spike by masking parts of its batch.

`bisect RUN step=N` repeats one step in one attempt (pipeline/extras/replays/search.py), and shows the samples without
which its metric is usual: key, labels, shard, and the pictures as the set and as the model have them.
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
from data.shards.reader import ShardReader
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

METRICS = ("grad_norm", "loss")  # of a step, as `pipeline.extras.replays.batch.RecordedStep` has them
MOST_SHOWN = 16  # samples of a set that are printed, and written as pictures


def bisect(run: str, words: Sequence[str], *, output: str | None) -> None:
    """Find the samples behind a step, and write bisect.json. Raises UsageError, and what a run raises."""
    values: dict[str, str] = {}
    overrides = []
    for word in words:
        key, separator, value = word.partition("=")
        if word.startswith("cluster."):
            overrides.append(word)
        elif separator and key in ("step", "metric"):
            values[key] = value
        else:
            raise UsageError(f"{word!r} is not understood\n  expected step=N, metric=…, cluster.…=…")
    if "step" not in values:
        raise UsageError("no step is named\n  expected step=N, as the log counts them")

    replays = Replays("bisect", run, output, overrides)
    steps = replays.stage.steps
    text = values["step"]
    if not text.isdigit() or not 0 < int(text) <= steps:
        raise UsageError(f"step={text}: expected step=N, from 1 to {steps}, as the log counts them")
    metric = values.get("metric", METRICS[0])
    if metric not in METRICS:
        raise UsageError(f"metric={metric}: expected one of {', '.join(METRICS)} for a step")
    bisect_step(replays, int(text), metric)


def bisect_step(replays: Replays, step: int, metric: str) -> None:
    """Find the samples behind a step's loss or gradient norm."""
    # 1. What is usual, and how long the search may take.
    stage = replays.stage
    recent = []
    for number in range(step - RECENT, step):
        if number in stage.taken:
            value = getattr(stage.taken[number], metric)
            if math.isfinite(value):
                recent.append(value)
    if not recent:
        raise UsageError(f"no step before {step} has a {metric} on record, with which it could be compared")
    usual = statistics.median(recent)
    start = stage.commit_before(step)
    batch_size = stage.cfg.batch_size
    replays.say(
        f"{replays.name}: step {step} from commit {start}, {metric} against the usual {usual:.4g} of {len(recent)} "
        f"steps before it; at most {2 * math.ceil(math.log2(batch_size))} times one step"
    )

    # 2. The search, in one attempt.
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
    outcome = replays.take_again(start, step, folder / "run", work=search).outcome
    shutil.rmtree(folder / "run")

    # 3. What it was, and whether the step came out as it is on record.
    if step in stage.taken:
        recorded = without_nan([stage.taken[step].loss, stage.taken[step].grad_norm])
        is_same = [outcome["loss"], outcome["grad_norm"]] == recorded
        echo(f"step {step} came out {'as it is on record, to the bit' if is_same else 'otherwise than on record'}")
    value = "not finite" if outcome["value"] is None else f"{outcome['value']:.4g}"
    shown = f"{metric} is {value}"
    samples = found_samples(stage, step, outcome, folder)
    if not outcome["is_spike"]:
        replays.say(f"no spike: {shown}, usual is {usual:.4g}")
    elif outcome["is_found"]:
        replays.say(
            f"{shown} with {len(samples)} of {batch_size} samples and {outcome['value_without']:.4g} without, after "
            f"{outcome['replays']} times one step:"
        )
    else:
        replays.say(
            f"no single sample: {shown}, and the smallest set found without which it is below {outcome['limit']:.4g} "
            f"has {len(samples)} of {batch_size}, after {outcome['replays']} times one step"
        )
    for sample in samples[:MOST_SHOWN]:
        replays.say(
            f"  slot {sample['slot']}: {sample['shard']} {sample['key']}, labels {sample['labels']}; "
            f"{sample['picture']}"
        )
    replays.report(folder / "bisect.json", {**request, "start": start, **outcome, "samples": samples})


def found_samples(stage: TrainedStage, step: int, outcome: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the samples that a search has found, and write pictures of the first ones into the folder."""
    if not outcome["rows"]:
        return []
    samples: list[dict[str, Any]] = []
    batch = stage.batch(step)
    reader = ShardReader(batch.source)
    folder.mkdir(parents=True, exist_ok=True)
    for sample in outcome["samples"]:
        row = sample["slot"]
        picture = ""
        if len(samples) < MOST_SHOWN:
            shard, number, _ = sample["range"]
            _, encoded, _ = reader.read(shard, number)
            picture = str(folder / f"slot-{row}.jpg")
            write_atomically(Path(picture), jpeg_bytes(batch.images[row]))
            write_atomically(folder / f"slot-{row}-as-stored", encoded)
        labels = [batch.source.class_name(label) for label in batch.labels[row] if label >= 0]
        samples.append({**sample, "labels": labels, "picture": picture})
    return samples
