"""Implements `patchline without`: repeat a run, with loss weight zero for some samples from the first step on.

1. Samples are masked in place (pipeline/extras/replays/masking.py), so all others keep their slots, augmentation and
   random draws. `data.drop` would change the samples of every step.
2. Nothing changes before the first step that uses a masked sample, so repeat the run from the last commit before it.
   If a bad sample was replaced earlier, possibly by a masked one, start from a commit before the first bad sample.
3. Print the cost first; then repeat the steps in a separate run directory and evaluate the last one.
4. Write audit.json with the removed samples, the first commit, and the resulting weights and ledger, which do not
   depend on these samples. If no samples are removed, weights and ledger are identical to those of the run.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
from data.errors import DataError, UsageError
from data.extras.listed import listed_rows
from data.index.index import Index, shards_called
from jobs.extras.replays.stretch import Replays
from jobs.terminal import activity, echo
from pipeline import artifacts
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import export
from pipeline.extras.needed import evaluations_of
from pipeline.extras.replays.batch import TrainedStage
from pipeline.extras.replays.masking import Mask, ranges_of
from pipeline.monitoring.telemetry import account
from pipeline.training_data import training_order
from pipeline.values import duration

REQUEST = "without.json"  # records the samples that the run in this folder excludes


def without(
    run: str,
    *,
    samples: str | None,
    shards: Sequence[str],
    to: int | None,
    output: str | None,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Repeat the steps of a run without some samples; print and return how the results change.

    Raises UsageError if the arguments are invalid, DataError if a sample or shard is not in the run's data, or any
    error raised by a run.
    """
    replays = Replays("without", run, output, overrides)
    stage = replays.stage
    _, to = replays.between(stage.cfg.first_step, to or max(stage.commits, default=0))

    # 1. Find the first step that uses one of the samples. All attempts of a run use the same sample order.
    index, order = training_order(stage.config_at(1, to), stage.sets)
    ranges = masked_ranges(index, samples, shards)
    mask = Mask(ranges)
    first_use = None
    step = 0
    while mask and first_use is None and step < to:
        planned = order.batch(step)
        is_used = mask.of(step, planned.shard, planned.sample).any()
        step += 1
        if is_used:
            first_use = step
        if step % 10_000 == 0:
            activity.now(f"searching for the first use of a sample: step {step:,} of {to:,} …")
    begin = stage.cfg.first_step
    if first_use is not None and first_use <= begin:
        raise UsageError(
            f"{replays.name} is a branch that begins at step {begin}, but its trunk has trained with these samples "
            f"since step {first_use}, so its weights depend on them\n"
            "  repeat the trunk without the samples: python -m jobs without RUN/TRUNK"
        )
    start = stage.commit_before(first_use or to)
    while mask and start and read_manifest(stage.commits[start]).bad_samples:
        start = stage.commit_before(start)
    removed = {
        "ranges": ranges,
        "samples": sum(stop - first for *_, first, stop in ranges),
        "digest": sha256(str(ranges).encode()).hexdigest(),
        "first_use": first_use,
        "start": start,
        "to": to,
    }
    request = replays.folder / REQUEST
    if request.exists() and artifacts.read_record(request) != removed:
        raise UsageError(
            f"{replays.folder} contains a repetition with different samples removed\n"
            "  pass --output FOLDER, or move the existing folder"
        )

    # 2. Print the cost, assuming the recorded time per step; then repeat the steps.
    recorded_time = account(stage.records)
    step_s = (recorded_time.compute + recorded_time.data) / max(len(stage.step_records), 1)
    use = f"first used in step {first_use}"
    if first_use is None:
        use = "never used"
    replays.log(
        f"{replays.name}: {removed['samples']:,} of {index.samples:,} samples, {use}; {to - start:,} steps from commit "
        f"{start} to {to}, {(to - start) / stage.steps:.1%} of the run, about {duration((to - start) * step_s)}"
    )
    replays.folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(request, removed)
    repeated = replays.repeat(start, to, replays.folder, masked=ranges, evaluates=True, resumes=True)

    # 3. Compare the metrics of the last step, its ledger, and its weights.
    outcome = repeated.outcome
    manifest = read_manifest(repeated.commits[to])
    before = metrics_with(stage, to)
    for name, value in outcome["metrics"].items():
        line = f"{name} {value:.4f} without the samples"
        if name in before:
            line += f", {before[name]:.4f} with them (difference {before[name] - value:+.4f})"
        replays.log(line)
    weights = outcome["files"][artifacts.WEIGHTS]["sha256"]
    echo(f"weights {weights[:12]}, ledger {manifest.ledger[:12]}")
    original = export(stage.commits[to], models.from_dict(stage.job["model"]))
    are_equal = manifest.ledger == read_manifest(stage.commits[to]).ledger
    for name, tensor in models.load_weights(repeated.folder)[0].items():
        are_equal = are_equal and torch.equal(tensor, original[name])
    comparison = "weights or ledger differ from the run's"
    if are_equal:
        comparison = "weights and ledger are equal to the run's, bit for bit"
    replays.log(comparison)
    commit_files = {}
    if start:
        for name, file in read_manifest(stage.commits[start]).files.items():
            commit_files[name] = file["sha256"]
    values = {
        "removed": removed,
        "commit_files": commit_files,
        "weights": weights,
        "ledger": manifest.ledger,
        "world": manifest.world,
        "metrics": outcome["metrics"],
        "metrics_with": before,
        "statement": "these weights are those of the run in which the removed samples had the weight 0 from step 1 on",
        "equals_run": are_equal,
    }
    document = replays.report(replays.folder / "audit.json", values)
    echo(f"the run without the samples: {repeated.folder}")
    return {**document, "folder": str(repeated.folder)}


def metrics_with(stage: TrainedStage, step: int) -> dict[str, float]:
    """Return the run's metrics at a step; {} if the run did not evaluate the weights that a repetition evaluates there.

    A repetition ends at this step and evaluates averaged weights, but a run averages only for its last evaluation.
    """
    if stage.cfg.polyak and step < stage.steps:
        return {}
    return evaluations_of(stage.records).get(step, {})


def masked_ranges(index: Index, samples: str | None, shards: Sequence[str]) -> list[list[int]]:
    """Return the samples listed in a file, and those in the given shards, as ranges.

    Raises DataError if a listed sample does not exist, or if a shard name does not match exactly one shard.
    """
    ranges = []
    # An empty list is allowed and repeats the run unchanged.
    if samples is not None and (not Path(samples).is_file() or Path(samples).read_bytes().strip()):
        rows = listed_rows(samples, index)
        ends = np.cumsum(index.shard_samples)
        shard = np.searchsorted(ends, rows, side="right")
        ranges += ranges_of(shard, rows - (ends - index.shard_samples)[shard])
    for name in shards:
        named = shards_called(name, [index])
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"for example {index.location(0)}"
            raise DataError(
                f"--shards {name} matches {len(named)} shards of the data set\n  expected exactly one: {which}"
            )
        for _, number in next(iter(named.values())):
            ranges.append([0, number, 0, index.shards[number].samples])
    return sorted(ranges)
