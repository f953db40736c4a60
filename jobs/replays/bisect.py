"""From a spike to its samples, and from a lost point of accuracy to its shard, by masking halves in place.

`bisect RUN step=N` takes one step again and again in one attempt (pipeline/search.py), and shows the samples without
which its metric is usual: key, labels, shard, and the pictures as the set and as the model have them.
`bisect RUN shards --from A --to B` takes a whole stretch again for each half of the shards that it uses: it keeps the
half without which the metric comes back to more than the middle between its values at A and B.
"""

import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.checks import printable
from data.errors import UsageError
from data.files import write_whole
from data.page import jpeg_bytes
from data.shards.reader import ShardReader
from jobs.cluster.supervisor import supervise
from jobs.replays.stretch import Replays
from jobs.resolved_recipe import Context
from jobs.stages import training
from jobs.terminal import echo
from jobs.worlds import allowed_worlds
from pipeline.evaluation.best import evaluations_of
from pipeline.health import RECENT
from pipeline.monitoring.telemetry import without_nan
from pipeline.replay import TrainedStage
from pipeline.training_config import TrainConfig, training_order

METRICS = ("grad_norm", "loss")  # of a step, as `pipeline.replay.TakenStep` has them
MOST_SHOWN = 16  # samples of a set that are printed, and written as pictures


def bisect(run: str, words: Sequence[str], *, first: int | None, last: int | None, output: str | None) -> None:
    """Find what is behind a step or a stretch, and write bisect.json. Raises UsageError, and what a run raises."""
    values: dict[str, str] = {}
    overrides = []
    for word in words:
        key, separator, value = word.partition("=")
        if word.startswith("cluster."):
            overrides.append(word)
        elif word == "shards" or (separator and key in ("step", "metric", "limit")):
            values[key] = value
        else:
            raise UsageError(f"{word!r} is not understood\n  expected step=N or shards, metric=…, limit=…, cluster.…=…")
    if "step" in values and "shards" in values:
        raise UsageError("step=N asks for samples, shards for a shard\n  expected one of them")
    if "limit" in values and "shards" not in values:
        raise UsageError("limit=X is of shards; that of a step lies between its metric and the usual\n  leave it out")
    limit = None
    if "limit" in values:
        try:
            limit = float(values["limit"])
        except ValueError:
            raise UsageError(f"limit={values['limit']}: expected a number, as limit=0.7") from None

    replays = Replays("bisect", run, output, overrides)
    if "shards" in values:
        start, stop = replays.between(first, last)
        bisect_shards(replays, start, stop, values.get("metric", "accuracy"), limit)
        return
    steps = replays.stage.steps
    text = values.get("step", "")
    if not text.isdigit() or not 0 < int(text) <= steps:
        raise UsageError(f"step={text}: expected step=N, from 1 to {steps}, as the log counts them, or shards")
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
    echo(
        f"{replays.name}: step {step} from commit {start}, {metric} against the usual {usual:.4g} of {len(recent)} "
        f"steps before it; at most {2 * math.ceil(math.log2(batch_size))} times one step"
    )

    # 2. The search, in one attempt.
    request = {"step": step, "metric": metric, "usual": usual}

    def search(cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        from pipeline.search import search

        began = time.time()

        def make_task(attempt: int) -> dict[str, Any]:
            task = training.make_training_task(cfg, context, began, attempt, until=step)
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
        came_out = "otherwise than on record"
        if [outcome["loss"], outcome["grad_norm"]] == recorded:
            came_out = "as it is on record, to the bit"
        echo(f"step {step} came out {came_out}")
    shown = f"{metric} is not finite"
    if outcome["value"] is not None:
        shown = f"{metric} is {outcome['value']:.4g}"
    samples = found_samples(stage, step, outcome, folder)
    if not outcome["is_spike"]:
        echo(f"no spike: {shown}, usual is {usual:.4g}")
    elif outcome["is_found"]:
        echo(
            f"{shown} with {len(samples)} of {batch_size} samples and {outcome['value_without']:.4g} without, after "
            f"{outcome['replays']} times one step:"
        )
    else:
        echo(
            f"no single sample: {shown}, and the smallest set found without which it is below {outcome['limit']:.4g} "
            f"has {len(samples)} of {batch_size}, after {outcome['replays']} times one step"
        )
    for sample in samples[:MOST_SHOWN]:
        echo(
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
    for row in outcome["rows"]:
        _, shard, sample = batch.ids[row].tolist()
        key, encoded, _ = reader.read(shard, sample)
        picture = ""
        if len(samples) < MOST_SHOWN:
            picture = str(folder / f"slot-{row}.jpg")
            write_whole(Path(picture), jpeg_bytes(batch.images[row]))
            write_whole(folder / f"slot-{row}-as-stored", encoded)
        samples.append(
            {
                "slot": row,
                "shard": batch.source.shards[shard].name,
                "sample": sample,
                "key": printable(key),
                "labels": [batch.source.class_name(label) for label in batch.labels[row] if label >= 0],
                "is_twin": row in outcome["twins"],
                "picture": picture,
            }
        )
    return samples


# ------------------------------------------------------------------------ a stretch


def bisect_shards(replays: Replays, first: int, last: int, metric: str, limit: float | None) -> None:
    """Find the shard behind what a metric has lost between two commits, by taking the steps between them again."""
    # 1. What the metric is to be above without the shard.
    stage = replays.stage
    on_record: dict[int, float] = {}
    for step, scores in evaluations_of(stage.records).items():
        if metric in scores:
            on_record[step] = scores[metric]
    if limit is None:
        if first not in on_record or last not in on_record:
            raise UsageError(
                f"{metric} is not on record at both steps {first} and {last}; it is at {sorted(on_record)[-12:]}\n"
                "  type limit=X: what it is to be above once the shard is out"
            )
        limit = (on_record[first] + on_record[last]) / 2
    if last in on_record and on_record[last] >= limit:
        raise UsageError(
            f"{metric} is {on_record[last]:.4f} at step {last}, above {limit:.4f} already: nothing is lost there"
        )

    # 2. The shards that these steps use, in their order.
    index, order = training_order(stage.config_at(first + 1, last), stage.sets)
    used: set[int] = set()
    for step in range(first, last):
        used.update(np.unique(order.batch(step).shard).tolist())
    candidates = sorted(used)
    most = math.ceil(math.log2(max(len(candidates), 2))) + 1
    echo(
        f"{replays.name}: {len(candidates)} shards in the steps {first + 1} to {last}, {metric} above {limit:.4f} "
        f"wanted; at most {most} times {last - first} steps"
    )

    # 3. The half of them without which the metric is above the limit, until one is left.
    taken: list[dict[str, Any]] = []

    def value_without(shards: Sequence[int]) -> float:
        folder = replays.folder / f"replay-{len(taken) + 1}"
        masked = [[shard, 0, index.shards[shard].samples] for shard in shards]
        metrics = replays.take_again(first, last, folder, masked=masked, evaluates=True).outcome["metrics"]
        if metric not in metrics:
            raise UsageError(f"metric={metric}: expected one of {', '.join(metrics) or 'those evaluated'}")
        shutil.rmtree(folder)
        value = float(metrics[metric])
        taken.append({"without": [index.shards[shard].name for shard in shards], metric: value})
        echo(f"  without {len(shards)} shards, {index.shards[shards[0]].name} …: {metric} {value:.4f}")
        return value

    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        candidates = half if value_without(half) > limit else candidates[len(half) :]
    name = index.shards[candidates[0]].name
    value = value_without(candidates)
    is_found = value > limit
    report = {"from": first, "to": last, "metric": metric, "limit": limit, "replays": taken}
    replays.report(replays.folder / "bisect.json", {**report, "shard": name, "is_found": is_found})
    if is_found:
        echo(f"shard {name}: without it {metric} is {value:.4f} at step {last}, with it {on_record.get(last)}")
    else:
        echo(f"no single shard: {metric} is not above {limit:.4f} without {name}, the last one left")
