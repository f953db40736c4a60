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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.checks import printable
from data.errors import UsageError
from data.files import write_whole
from data.page import jpeg_bytes
from data.shards.reader import ShardReader
from jobs.cluster.supervisor import supervise
from jobs.replays.stretch import RecordedStage, made_by, output_folder, recorded_stage, take_again, without_evaluation
from jobs.resolved_recipe import Context
from jobs.stages import training
from jobs.terminal import echo
from jobs.worlds import allowed_worlds
from pipeline import artifacts
from pipeline.evaluation.best import scores_of
from pipeline.health import RECENT
from pipeline.monitoring.telemetry import read_metrics, without_nan
from pipeline.replay import rebuild_step
from pipeline.training_config import TrainConfig, training_order

METRICS = ("grad_norm", "loss")  # of a step, as StepValues has them
MOST_SHOWN = 16  # samples of a set that are printed, and written as pictures


def bisect(
    run: str,
    words: Sequence[str],
    *,
    first: int | None,
    last: int | None,
    output: str | None,
) -> None:
    """Find what is behind a step or a stretch, and write bisect.json. Raises UsageError, and what a run raises."""
    values = {"metric": ""}
    overrides = []
    for word in words:
        key, separator, value = word.partition("=")
        if word.startswith("cluster."):
            overrides.append(word)
        elif word == "shards":
            values["shards"] = "yes"
        elif separator and key in ("step", "metric", "limit"):
            values[key] = value
        else:
            raise UsageError(f"{word!r} is not understood\n  expected step=N or shards, metric=…, limit=…, cluster.…=…")
    if "step" in values and "shards" in values:
        raise UsageError("step=N asks for samples, shards for a shard\n  expected one of them")
    if "limit" in values and "shards" not in values:
        raise UsageError("limit=X is of shards; that of a step lies between its metric and the usual\n  leave it out")
    stage = recorded_stage(run)
    folder = output_folder(stage, "bisect", output)
    if "shards" in values:
        bisect_shards(stage, folder, values, first, last, overrides)
        return
    text = values.get("step", "")
    if not text.isdigit() or not 0 < int(text) <= stage.steps:
        raise UsageError(f"step={text}: expected step=N, from 1 to {stage.steps}, as the log counts them, or shards")
    metric = values["metric"] or METRICS[0]
    if metric not in METRICS:
        raise UsageError(f"metric={metric}: expected one of {', '.join(METRICS)} for a step")
    bisect_step(stage, folder, int(text), metric, overrides)


# ------------------------------------------------------------------------ a step


def bisect_step(stage: RecordedStage, folder: Path, step: int, metric: str, overrides: Sequence[str]) -> None:
    """Find the samples behind a step's loss or gradient norm."""
    recent = []
    for number in range(step - RECENT, step):
        if number in stage.values:
            value = getattr(stage.values[number], metric)
            if math.isfinite(value):
                recent.append(value)
    if not recent:
        raise UsageError(f"no step before {step} has a {metric} on record, with which it could be compared")
    usual = statistics.median(recent)
    start = stage.commit_before(step)
    cfg = without_evaluation(stage.config_at(start + 1, step))
    echo(
        f"{stage.folder.name}: step {step} from commit {start}, {metric} against the usual {usual:.4g} of "
        f"{len(recent)} steps before it; at most {2 * math.ceil(math.log2(cfg.batch_size))} times one step"
    )
    again = folder / f"step-{step}"
    shutil.rmtree(again, ignore_errors=True)
    request = {"step": step, "metric": metric, "usual": usual}
    target = take_again(
        stage, cfg, again / "run", start, stage.cluster(step, overrides), partial(run_search, request), quiet=True
    )
    outcome = artifacts.read_done(target)
    assert outcome is not None, "a run that returns has finished its stage"
    shutil.rmtree(again / "run")

    # What it was, and whether the step came out as it is on record.
    recorded = stage.values.get(step)
    if recorded is not None:
        is_same = [outcome["loss"], outcome["grad_norm"]] == without_nan([recorded.loss, recorded.grad_norm])
        echo(f"step {step} came out {'as it is on record, to the bit' if is_same else 'otherwise than on record'}")
    shown = "not finite" if outcome["value"] is None else f"{outcome['value']:.4g}"
    samples = described(stage, cfg, again, step, outcome)
    if not outcome["is_spike"]:
        echo(f"no spike: {metric} is {shown}, usual is {usual:.4g}")
    elif outcome["is_found"]:
        echo(
            f"{metric} is {shown} with {len(samples)} of {cfg.batch_size} samples and {outcome['value_without']:.4g} "
            f"without, after {outcome['replays']} times one step:"
        )
    else:
        echo(
            f"no single sample: {metric} is {shown}, and the smallest set found without which it is below "
            f"{outcome['limit']:.4g} has {len(outcome['rows'])} of {cfg.batch_size}, after {outcome['replays']} times "
            "one step"
        )
    for sample in samples[:MOST_SHOWN]:
        echo(
            f"  slot {sample['slot']}: {sample['shard']} {sample['key']}, labels {sample['labels']}; "
            f"{sample['picture']}"
        )
    report = {**made_by(stage), **request, "start": start, **outcome, "samples": samples}
    artifacts.write_record(again / "bisect.json", report)
    echo(f"written: {again / 'bisect.json'}")


def run_search(request: Mapping[str, Any], cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
    """Have workers search a step; returns what they have found."""
    from pipeline.search import search

    began = time.time()

    def make_task(attempt: int) -> dict[str, Any]:
        task = training.make_training_task(cfg, context, began, attempt, until=request["step"])
        return {**task, "search": dict(request)}

    worlds = allowed_worlds(cfg, context.campaign.cluster)
    return supervise(search, make_task, context, worlds=worlds, stall_s=cfg.stall_s, can_commit=False)


def described(
    stage: RecordedStage, cfg: TrainConfig, folder: Path, step: int, outcome: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the samples that a search has found, and write their pictures into the folder."""
    samples: list[dict[str, Any]] = []
    rows = outcome["rows"]
    if not rows:
        return samples
    batch = rebuild_step(stage.folder, step, stage.records)
    reader = ShardReader(batch.source)
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        _, shard, sample = batch.ids[row].tolist()
        key, encoded, _ = reader.read(shard, sample)
        labels = [batch.source.class_name(label) for label in batch.labels[row] if label >= 0]
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
                "labels": labels,
                "is_twin": row in outcome["twins"],
                "picture": picture,
            }
        )
    return samples


# ------------------------------------------------------------------------ a stretch


def bisect_shards(
    stage: RecordedStage,
    folder: Path,
    values: Mapping[str, str],
    first: int | None,
    last: int | None,
    overrides: Sequence[str],
) -> None:
    """Find the shard behind what a metric has lost between two commits, by taking the steps between them again."""
    metric = values["metric"] or "accuracy"
    first, last = stage.two_commits(first, last)
    at: dict[int, float] = {}
    for record in read_metrics(stage.folder, "evaluate"):
        scores = scores_of(record)
        if metric in scores:
            at[record["step"]] = scores[metric]
    if "limit" in values:
        try:
            limit = float(values["limit"])
        except ValueError:
            raise UsageError(f"limit={values['limit']}: expected a number, as limit=0.7") from None
    elif first in at and last in at:
        limit = (at[first] + at[last]) / 2
    else:
        raise UsageError(
            f"{metric} is not on record at both steps {first} and {last}; it is at {sorted(at)[-12:]}\n"
            "  type limit=X: what it is to be above once the shard is out"
        )
    if last in at and at[last] >= limit:
        raise UsageError(f"{metric} is {at[last]:.4f} at step {last}, above {limit:.4f} already: nothing is lost there")

    # The shards that these steps use, in their order.
    cfg = stage.config_at(first + 1, last)
    index, order = training_order(cfg, stage.sets)
    used: set[int] = set()
    for step in range(first, last):
        used.update(np.unique(order.batch(step).shard).tolist())
    candidates = sorted(used)
    most = math.ceil(math.log2(max(len(candidates), 2))) + 1
    echo(
        f"{stage.folder.name}: {len(candidates)} shards in the steps {first + 1} to {last}, {metric} above "
        f"{limit:.4f} wanted; at most {most} times {last - first} steps"
    )
    replays: list[dict[str, Any]] = []

    def value_without(shards: Sequence[int]) -> float:
        name = f"replay-{len(replays) + 1}"
        masked = [[shard, 0, index.shards[shard].samples] for shard in shards]
        work = partial(training.run, until=last, masked=masked)
        shutil.rmtree(folder / name, ignore_errors=True)
        again = take_again(stage, cfg, folder / name, first, stage.cluster(last, overrides), work, quiet=True)
        outcome = artifacts.read_done(again)
        assert outcome is not None, "a run that returns has finished its stage"
        if metric not in outcome["metrics"]:
            raise UsageError(f"metric={metric}: expected one of {', '.join(outcome['metrics']) or 'those evaluated'}")
        shutil.rmtree(folder / name)
        value = float(outcome["metrics"][metric])
        replays.append({"without": [index.shards[shard].name for shard in shards], metric: value})
        echo(f"  without {len(shards)} shards, {index.shards[shards[0]].name} …: {metric} {value:.4f}")
        return value

    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        candidates = half if value_without(half) > limit else candidates[len(half) :]
    name = index.shards[candidates[0]].name
    is_found = value_without(candidates) > limit
    folder.mkdir(parents=True, exist_ok=True)
    report = {**made_by(stage), "from": first, "to": last, "metric": metric, "limit": limit, "replays": replays}
    artifacts.write_record(folder / "bisect.json", {**report, "shard": name, "is_found": is_found})
    echo(f"written: {folder / 'bisect.json'}")
    if is_found:
        echo(f"shard {name}: without it {metric} is {replays[-1][metric]:.4f} at step {last}, with it {at.get(last)}")
    else:
        echo(f"no single shard: {metric} is not above {limit:.4f} without {name}, the last one left")
