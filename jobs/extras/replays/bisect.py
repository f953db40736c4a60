"""From a spike to its samples, and from a lost point of accuracy to its shard, by masking halves in place.

`bisect RUN step=N` takes one step again and again in one attempt (pipeline/extras/replays/search.py), and shows the
samples without which its metric is usual: key, labels, shard, and the pictures as the set and as the model have them.
`bisect RUN shards --from A --to B` takes a whole stretch again and again, each time without another half of the shards
that it uses: one shard is left that was out where the metric at B was high, and in where it was low.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import UsageError
from data.files import write_whole
from data.index.document import load_index
from data.page import jpeg_bytes
from data.shards.reader import ShardReader
from jobs.cluster.supervisor import supervise
from jobs.extras.replays.stretch import Replays
from jobs.resolved_recipe import Context
from jobs.stages import training
from jobs.terminal import echo
from jobs.worlds import allowed_worlds
from pipeline.extras.replays.batch import TrainedStage
from pipeline.health import RECENT
from pipeline.monitoring.telemetry import without_nan
from pipeline.training_config import TrainConfig
from pipeline.training_data import training_order

METRICS = ("grad_norm", "loss")  # of a step, as `pipeline.extras.replays.batch.TakenStep` has them
CLEAR = 0.6  # of the mean difference between replays with and without a shard: how far apart the nearest two are
MOST_SHOWN = 16  # samples of a set that are printed, and written as pictures


def bisect(run: str, words: Sequence[str], *, first: int | None, last: int | None, output: str | None) -> None:
    """Find what is behind a step or a stretch, and write bisect.json. Raises UsageError, and what a run raises."""
    values: dict[str, str] = {}
    overrides = []
    for word in words:
        key, separator, value = word.partition("=")
        if word.startswith("cluster."):
            overrides.append(word)
        elif word == "shards" or (separator and key in ("step", "metric")):
            values[key] = value
        else:
            raise UsageError(f"{word!r} is not understood\n  expected step=N or shards, metric=…, cluster.…=…")
    if ("step" in values) == ("shards" in values):
        raise UsageError("step=N asks for samples, shards for a shard\n  expected one of them")

    replays = Replays("bisect", run, output, overrides)
    if "shards" in values:
        start, stop = replays.between(first, last)
        bisect_shards(replays, start, stop, values.get("metric", "accuracy"))
        return
    steps = replays.stage.steps
    text = values["step"]
    if not text.isdigit() or not 0 < int(text) <= steps:
        raise UsageError(f"step={text}: expected step=N, from 1 to {steps}, as the log counts them")
    metric = values.get("metric", METRICS[0])
    if metric not in METRICS:
        raise UsageError(f"metric={metric}: expected one of {', '.join(METRICS)} for a step")
    bisect_step(replays, int(text), metric)


# ------------------------------------------------------------------------ a step


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
            write_whole(Path(picture), jpeg_bytes(batch.images[row]))
            write_whole(folder / f"slot-{row}-as-stored", encoded)
        labels = [batch.source.class_name(label) for label in batch.labels[row] if label >= 0]
        samples.append({**sample, "labels": labels, "picture": picture})
    return samples


# ------------------------------------------------------------------------ a stretch


def bisect_shards(replays: Replays, first: int, last: int, metric: str) -> None:
    """Find the shard behind what a metric has lost between two commits, by taking the steps between them again."""
    # 1. The shards that these steps use, in their order; and how many images the metric is over.
    stage = replays.stage
    index, order = training_order(stage.config_at(first + 1, last), stage.sets)
    used: set[int] = set()
    for step in range(first, last):
        used.update(np.unique(order.batch(step).shard).tolist())
    if len(used) == 1:
        raise UsageError(f"the steps {first + 1} to {last} use one shard, {index.shards[used.pop()].name}")
    judged_on = stage.job["evaluate" if metric == "accuracy" else "probe_test"]
    if judged_on is None:
        raise UsageError(
            f"metric={metric}: {replays.name} was not evaluated on it\n  expected one that a run ends with"
        )
    images = load_index(judged_on).samples
    replays.say(
        f"{replays.name}: {len(used)} shards in the steps {first + 1} to {last}; at most "
        f"{math.ceil(math.log2(len(used))) + 1} times {last - first} steps, each without half of the shards"
    )

    # 2. The search.
    taken: list[dict[str, Any]] = []

    def value_without(shards: Sequence[int]) -> float:
        folder = replays.folder / f"replay-{len(taken) + 1}"
        masked = [[0, shard, 0, index.shards[shard].samples] for shard in shards]
        metrics = replays.take_again(first, last, folder, masked=masked, evaluates=True).outcome["metrics"]
        if metric not in metrics:
            raise UsageError(f"metric={metric}: expected one of {', '.join(metrics)}")
        shutil.rmtree(folder)
        names = [index.shards[shard].name for shard in shards]
        taken.append({"without": names, metric: metrics[metric]})
        echo(f"  without {len(names)} shards, {names[0]} …: {metric} {metrics[metric]:.4f}")
        return float(metrics[metric])

    shard, values_without, values_with = shard_behind(value_without, sorted(used))

    # 3. A shard is named where the two kinds of replays lie apart, by more than the noise of the evaluation.
    gap = statistics.mean(values_without) - statistics.mean(values_with)
    share = statistics.mean(values_with)
    noise = 2 * math.sqrt(max(2 * share * (1 - share), 0.0) / images)
    is_found = gap > noise and min(values_without) - max(values_with) > CLEAR * gap
    name = index.shards[shard].name
    verdict = f"shard {name}"
    if not is_found:
        verdict = f"no single shard stands out, the likeliest is {name}"
    replays.say(
        f"{verdict}: {metric} is {min(values_without):.4f} or more in {len(values_without)} replays without it, "
        f"{max(values_with):.4f} or less in {len(values_with)} with it; {noise:.4f} is noise of {images:,} images"
    )
    report = {"from": first, "to": last, "metric": metric, "noise": noise, "replays": taken}
    replays.report(replays.folder / "bisect.json", {**report, "shard": name, "is_found": is_found})
    echo(f"to do without it alone type python -m jobs without {stage.folder} --shards {name} --to {last}")


def shard_behind(
    value_without: Callable[[Sequence[int]], float], shards: Sequence[int]
) -> tuple[int, list[float], list[float]]:
    """Return the shard without which values are the highest, the values without it, and those with it.

    ⌈log₂ n⌉ + 1 values are taken, each without half of all shards: with other amounts of data left they could not be
    compared, because a stretch that lacks half of its data is worse for that alone.
    """
    middle = len(shards) // 2
    suspects = list(shards[:middle])
    cleared = list(shards[middle:])
    high = [value_without(suspects)]
    low = [value_without(cleared)]
    if low > high:
        suspects, cleared = cleared, suspects
        high, low = low, high
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        others = suspects[len(half) :]
        value = value_without([*half, *cleared[: middle - len(half)]])
        if value > (statistics.mean(low) + statistics.mean(high)) / 2:
            high.append(value)
            suspects = half
            cleared = cleared + others
        else:
            low.append(value)
            suspects = others
            cleared = cleared + half
    return suspects[0], high, low
