"""The exact counterfactual: a run as it would be, had some samples weighed nothing from its first step on.

1. The samples are masked in place (pipeline/masking.py): all others keep their rows, augmentation and draws, where
   `data.drop` would give every step other samples.
2. Up to the first step that uses one of them the run is what it was: the steps are taken again from the commit before.
   A bad sample may have been replaced by one of them earlier, so that the commit is one before the first bad sample.
3. What that costs is said first; then the steps are taken, in a run directory of its own, and evaluated at the end.
4. audit.json says what was removed, from which commit on, and which weights and ledger came out: nothing in them
   depends on these samples. Without any sample, weights and ledger are those of the run.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

import models
from data.errors import DataError, UsageError
from data.index.index import Index, called
from data.order import Mixture, Order
from data.shards.listed import listed_rows
from jobs.progress import activity
from jobs.replays.stretch import RecordedStage, commit_of, made_by, output_folder, recorded_stage, take_again
from jobs.stages import training
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import export
from pipeline.evaluation.best import scores_of
from pipeline.masking import Mask, ranges_of
from pipeline.monitoring.telemetry import account, duration, read_metrics
from pipeline.training_config import training_order

REQUEST = "without.json"  # which samples the folder's run is without


@dataclass(frozen=True)
class Removal:
    """Says what is removed from a run, and which of its steps that changes."""

    ranges: list[list[int]]
    samples: int
    digest: str  # sha256 of the ranges
    first_use: int | None  # step, counted from 1; None where none was used
    start: int  # commit, from which on steps are taken again
    to: int


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
    stage = recorded_stage(run)
    folder = output_folder(stage, "without", output)
    if samples is None and not shards:
        raise UsageError("nothing is named that the run is to be without\n  expected --samples FILE or --shards NAME")
    last = max(stage.commits, default=0)
    to = last if to is None else to
    if to not in stage.commits:
        raise UsageError(f"--to {to}: expected a commit, to compare with, of {stage.listed_commits}")
    # A sample's first use is that of the whole run: all of its steps must have one order.
    index, order = training_order(stage.config_at(1, to), stage.sets)
    removal = planned_removal(stage, order, masked_ranges(index, samples, shards), to)
    request = asdict(removal)
    if (folder / REQUEST).exists() and artifacts.read_record(folder / REQUEST) != request:
        raise UsageError(f"{folder} holds the run without other samples\n  type --output FOLDER, or move it away")

    # What it costs comes first: a step takes as long as it took.
    steps = to - removal.start
    booked = account(stage.records)
    step_s = (booked.compute + booked.data) / max(len(stage.values), 1)
    use = "none of them was used" if removal.first_use is None else f"first used in step {removal.first_use}"
    echo(
        f"{stage.folder.name}: {removal.samples:,} of {index.samples:,} samples, {use}; {steps:,} steps from commit "
        f"{removal.start} to {to}, {steps / stage.steps:.1%} of the run, about {duration(steps * step_s)}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(folder / REQUEST, request)
    cluster = stage.cluster(to, overrides)
    work = partial(training.run, until=to, masked=removal.ranges)
    again = take_again(stage, stage.config_at(removal.start + 1, to), folder, removal.start, cluster, work, quiet=False)
    report(stage, removal, folder, again)


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
        named = called(name, [index])
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"as {index.location(0)} is called"
            raise DataError(f"--shards {name}: {len(named)} shards are called so, expected one: {which}")
        for _, number in next(iter(named.values())):
            ranges.append([number, 0, index.shards[number].samples])
    return sorted(ranges)


def planned_removal(stage: RecordedStage, order: Order | Mixture, ranges: list[list[int]], to: int) -> Removal:
    """Return from which commit on the steps change."""
    mask = Mask(ranges)
    first_use = None
    step = 0
    while mask and first_use is None and step < to:
        planned = order.batch(step)
        step += 1
        if mask.of(planned.shard, planned.sample).any():
            first_use = step
        if step % 10_000 == 0:
            activity.now(f"looking for the first use: step {step:,} of {to:,} …")
    start = stage.commit_before(to if first_use is None else first_use)
    while mask and start and stage.manifest(start).bad_samples:
        start = stage.commit_before(start)
    text = sha256(str(ranges).encode()).hexdigest()
    return Removal(ranges, sum(stop - first for _, first, stop in ranges), text, first_use, start, to)


def report(stage: RecordedStage, removal: Removal, folder: Path, again: Path) -> None:
    """Say what the removal has changed, and write audit.json."""
    outcome = artifacts.read_done(again)
    assert outcome is not None, "a run that returns has finished its stage"
    manifest = read_manifest(commit_of(again, removal.to))
    before: dict[str, float] = {}
    for record in read_metrics(stage.folder, "evaluate"):
        if record["step"] == removal.to:
            before = scores_of(record)
    for name, value in outcome["metrics"].items():
        line = f"{name} {value:.4f} without them"
        if name in before:
            line += f", {before[name]:.4f} with them: they brought {before[name] - value:+.4f}"
        echo(line)
    weights = outcome["files"][artifacts.WEIGHTS]["sha256"]
    values = {
        **made_by(stage),
        "removed": asdict(removal),
        "commit_files": {},
        "weights": weights,
        "ledger": manifest.ledger,
        "world": manifest.world,
        "metrics": outcome["metrics"],
        "metrics_with": before,
        "statement": "these weights are those of the run in which the removed samples had the weight 0 from step 1 on",
    }
    if removal.start:
        files = stage.manifest(removal.start).files
        values["commit_files"] = {name: file["sha256"] for name, file in files.items()}
    echo(f"weights {weights[:12]}, ledger {manifest.ledger[:12]}")
    theirs = export(stage.commits[removal.to], models.from_dict(stage.record["model"]))
    are_equal = manifest.ledger == stage.manifest(removal.to).ledger
    for name, tensor in models.load_weights(again)[0].items():
        are_equal = are_equal and torch.equal(tensor, theirs[name])
    values["equals_run"] = are_equal
    echo("equal to the run's, bit for bit" if are_equal else "the run's are others")
    artifacts.write_record(folder / "audit.json", values)
    echo(f"written: {folder / 'audit.json'}; the run without them: {again}")
