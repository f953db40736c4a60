"""The exact counterfactual: a run as it would be, had some samples weighed nothing from its first step on.

1. The samples are masked in place (pipeline/extras/replays/masking.py): all others keep their rows, augmentation and
   draws, where `data.drop` would give every step other samples.
2. Up to the first step that uses one of them the run is what it was: the steps are taken again from the commit before.
   A bad sample may have been replaced by one of them earlier, so that the commit is one before the first bad sample.
3. What that costs is said first; then the steps are taken, in a run directory of its own, and evaluated at the end.
4. audit.json says what was removed, from which commit on, and which weights and ledger came out: nothing in them
   depends on these samples. Without any sample, weights and ledger are those of the run.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

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
from pipeline.checkpoints.needed import evaluations_of
from pipeline.checkpoints.reader import export
from pipeline.extras.replays.masking import Mask, ranges_of
from pipeline.monitoring.telemetry import account
from pipeline.training_data import training_order
from pipeline.values import duration

REQUEST = "without.json"  # which samples the folder's run is without


def without(
    run: str,
    *,
    samples: str | None,
    shards: Sequence[str],
    to: int | None,
    output: str | None,
    overrides: Sequence[str],
) -> None:
    """Take the steps of a run again without samples, and say what that has changed.

    Raises UsageError, DataError where a list or a shard is not of the run's set, and what a run raises.
    """
    replays = Replays("without", run, output, overrides)
    stage = replays.stage
    _, to = replays.between(0, to or max(stage.commits, default=0))

    # 1. From which step on the run changes. A sample's first use is that of the whole run: all steps have one order.
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
            activity.now(f"looking for the first use: step {step:,} of {to:,} …")
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
            f"{replays.folder} holds the run without other samples\n  type --output FOLDER, or move it away"
        )

    # 2. What it costs comes first: a step takes as long as it took. Then the steps.
    booked = account(stage.records)
    step_s = (booked.compute + booked.data) / max(len(stage.taken), 1)
    use = f"first used in step {first_use}"
    if first_use is None:
        use = "none of them was used"
    replays.say(
        f"{replays.name}: {removed['samples']:,} of {index.samples:,} samples, {use}; {to - start:,} steps from commit "
        f"{start} to {to}, {(to - start) / stage.steps:.1%} of the run, about {duration((to - start) * step_s)}"
    )
    replays.folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(request, removed)
    again = replays.take_again(start, to, replays.folder, masked=ranges, evaluates=True, goes_on=True)

    # 3. What that has changed: the metrics of the last step, its ledger, and its weights.
    outcome = again.outcome
    manifest = read_manifest(again.commits[to])
    before = evaluations_of(stage.records).get(to, {})
    for name, value in outcome["metrics"].items():
        line = f"{name} {value:.4f} without them"
        if name in before:
            line += f", {before[name]:.4f} with them: they brought {before[name] - value:+.4f}"
        replays.say(line)
    weights = outcome["files"][artifacts.WEIGHTS]["sha256"]
    echo(f"weights {weights[:12]}, ledger {manifest.ledger[:12]}")
    theirs = export(stage.commits[to], models.from_dict(stage.job["model"]))
    are_equal = manifest.ledger == read_manifest(stage.commits[to]).ledger
    for name, tensor in models.load_weights(again.folder)[0].items():
        are_equal = are_equal and torch.equal(tensor, theirs[name])
    replays.say("equal to the run's, bit for bit" if are_equal else "the run's are others")
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
    replays.report(replays.folder / "audit.json", values)
    echo(f"the run without them: {again.folder}")


def masked_ranges(index: Index, samples: str | None, shards: Sequence[str]) -> list[list[int]]:
    """Return the samples of a list and of shards as ranges. Raises DataError."""
    ranges = []
    # An empty list is a question too: whether the run comes out again.
    if samples is not None and (not Path(samples).is_file() or Path(samples).read_bytes().strip()):
        rows = listed_rows(samples, index)
        ends = np.cumsum(index.shard_samples)
        shard = np.searchsorted(ends, rows, side="right")
        ranges += ranges_of(shard, rows - (ends - index.shard_samples)[shard])
    for name in shards:
        named = shards_called(name, [index])
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"as {index.location(0)} is called"
            raise DataError(f"--shards {name}: {len(named)} shards are called so, expected one: {which}")
        for _, number in next(iter(named.values())):
            ranges.append([0, number, 0, index.shards[number].samples])
    return sorted(ranges)
