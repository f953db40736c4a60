"""`patchline checkpoints verify|inspect|diff|export RUN`: read what checkpoints hold.

A run is named as in jobs/commands/checkpoints.py. Nothing here opens anything but safetensors and JSON. Every command
prints its lines as it finds them, for a checkpoint can take minutes to read.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import models
from data.errors import CheckpointError, UsageError
from data.files import atomic_file
from jobs.commands.arguments import Debug
from jobs.commands.checkpoints import SavedRun
from jobs.commands.stored_runs import OpenedRun, opened
from jobs.terminal import activity, echo
from pipeline import artifacts
from pipeline.architecture import preprocessing_of
from pipeline.checkpoints.manifest import read_manifest, step_of
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.config import differences
from pipeline.identity import code_version

if TYPE_CHECKING:  # it imports torch, for which a refusal does not wait
    from torch import Tensor

    from pipeline.checkpoints.reader import Reader

Step = Annotated[int | None, typer.Option(help="The checkpoint of this step; else the newest, or all.")]
OtherRun = Annotated[str | None, typer.Option("--with", metavar="RUN", help="The run or checkpoint to compare with.")]
OtherStep = Annotated[int | None, typer.Option("--with-step", help="The step to compare with.")]
Target = Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Write weights.safetensors and model.json there.")]

# ------------------------------------------------------------------------------------------------ which checkpoints


class Saved(NamedTuple):
    """Names one checkpoint of a stage."""

    checkpoints: StageCheckpoints
    name: str


def selected(run: OpenedRun, step: int | None) -> list[Saved]:
    """Return the checkpoint whose folder is named, or those of a step, or all, the newest of each stage first.

    Raises UsageError where there are none.
    """
    if run.only:
        return [Saved(run.stages[0], run.only)]
    saved: list[Saved] = []
    for checkpoints in run.stages:
        saved += [Saved(checkpoints, name) for name in checkpoints.committed()]
    if not saved:
        raise UsageError(f"nothing is committed in {run.name} yet")
    if step is None:
        return saved
    # A step can be there several times: of several stages, or of attempts of which a later one took it again.
    of_step: list[Saved] = []
    known_steps: list[str] = []
    for checkpoint in saved:
        known_step = step_of(Path(checkpoint.name))
        known_steps.append(str(known_step))
        if known_step == step:
            of_step.append(checkpoint)
    if not of_step:
        raise UsageError(f"no checkpoint of step {step} in {run.name}; there are {', '.join(known_steps)}")
    return of_step


def newest_verified(run: OpenedRun, step: int | None) -> Path:
    """Return a folder with the newest checkpoint of a stage, or of a step, every byte of which was compared.

    Raises UsageError where several stages have one, CheckpointError where it is bad.
    """
    saved = selected(run, step)
    stages = sorted({checkpoint.checkpoints.stage for checkpoint in saved})
    if len(stages) > 1:
        first = run.storage.address(stages[0])
        raise UsageError(f"{run.name} has several stages with checkpoints: {', '.join(stages)}\n  name one: {first}")
    return saved[0].checkpoints.verify(saved[0].name)


# ------------------------------------------------------------------------------------------------ the commands


def verify_all(path: SavedRun, step: Step = None, _debug: Debug = False) -> None:
    """Read every byte and compare it with the manifest."""
    # A bad checkpoint does not end the reading: CheckpointError is raised after the last one.
    bad = 0
    with opened(path) as run:
        for saved in selected(run, step):
            # Two stages may have a checkpoint of the same step.
            title = f"{saved.checkpoints.stage}/{saved.name}"
            activity.now(f"reading {title} …")
            began = time.monotonic()
            try:
                saved.checkpoints.verify(saved.name)
            except CheckpointError as error:
                bad += 1
                echo(run.in_words(f"{title}  BAD: {error}"))
            else:
                echo(f"{title}  whole ({time.monotonic() - began:.1f}s)")
    if bad:
        raise CheckpointError(f"bad checkpoints: {bad}\n  a start sets them aside and loads the newest whole one")


def inspect(path: SavedRun, step: Step = None, _debug: Debug = False) -> None:
    """Print the manifest, and every parameter with its size and norms."""
    with opened(path) as run:
        # Verified first: the norms of damaged tensors would mislead.
        folder = newest_verified(run, step)
        manifest = read_manifest(folder)
        for field, value in asdict(manifest).items():
            # The digests of the chunks are for machines: a line of a hundred thousand digits would hide the others.
            if field == "files":
                value = {name: {"bytes": file["bytes"], "sha256": file["sha256"]} for name, file in value.items()}
            if isinstance(value, dict):
                value = json.dumps(value)
            echo(f"{field:13} {value}")

        from pipeline.checkpoints.reader import Reader

        # The tensors lie in pieces, a file a rank; a reader puts them together whatever the number of ranks was.
        reader = Reader(folder, manifest.files)
        kinds: dict[str, list[str]] = {}  # parameter → "master" and the moments that are saved of it
        for name, kind in reader.pieces:
            kinds.setdefault(name, []).append(kind)
        for name in sorted(kinds):
            norms = []
            largest = 0
            for kind in kinds[name]:
                state = whole_state(reader, name, kind)
                norms.append(f"|{kind}| {state.norm():.4g}")
                largest = max(largest, state.numel())
            echo(f"{name:40} {largest:>12,}  {'  '.join(norms)}")


def whole_state(reader: "Reader", name: str, kind: str) -> "Tensor":
    """Return a parameter's master or moment as one flat fp32 tensor, joined from the pieces of all ranks."""
    elements = 0
    for start, count, _, _ in reader.pieces[name, kind]:
        elements = max(elements, start + count)
    return reader(name, kind, 0, elements)


def compare(
    path: SavedRun,
    step: Step = None,
    other_path: OtherRun = None,
    other_step: OtherStep = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    _debug: Debug = False,
) -> None:
    """Compare two checkpoints, their manifests and then their states: what changes from the other to this one."""
    if more:
        raise UsageError(
            f"diff takes one run, found {' '.join([path, *more])}\n"
            f"  what has changed from the first to the second: diff {more[0]} --with {path}"
        )
    # Without --with, another step of the same run.
    other_path = other_path or path
    if other_path == path and other_step == step:
        raise UsageError("diff needs something to compare with: --with RUN, or --with-step N of the same run")
    with opened(path) as run, opened(other_path) as other_run:
        # Verified first: a damaged byte would look like a difference in training.
        second = newest_verified(run, step)
        first = newest_verified(other_run, other_step)
        first_manifest = read_manifest(first)
        second_manifest = read_manifest(second)
        echo(f"{other_run.in_words(str(first))} → {run.in_words(str(second))}")
        first_fields = asdict(first_manifest)
        second_fields = asdict(second_manifest)
        # Files differ with the number of workers, whatever they hold.
        del first_fields["files"]
        del second_fields["files"]
        for difference in differences(first_fields, second_fields):
            echo(f"  {difference}")

        import torch

        from pipeline.checkpoints.reader import Reader

        # Compare what is saved of each parameter, whatever number of workers wrote the one and the other.
        first_reader = Reader(first, first_manifest.files)
        second_reader = Reader(second, second_manifest.files)
        states = sorted(first_reader.pieces.keys() | second_reader.pieces.keys())
        equal = 0
        for name, kind in states:
            if (name, kind) not in first_reader.pieces:
                echo(f"  {name} {kind}: only in the second")
                continue
            if (name, kind) not in second_reader.pieces:
                echo(f"  {name} {kind}: only in the first")
                continue
            before = whole_state(first_reader, name, kind)
            after = whole_state(second_reader, name, kind)
            if before.shape != after.shape:
                echo(f"  {name} {kind}: another size")
            elif torch.equal(before, after):
                equal += 1
            else:
                echo(f"  {name} {kind}: largest difference {(before - after).abs().max():.3g}")
        echo(f"  {equal} of {len(states)} states are bit-equal")


def export_weights(path: SavedRun, target: Target, step: Step = None, _debug: Debug = False) -> None:
    """Write a checkpoint's weights as a finished stage would export them."""
    # Before the reading, which takes minutes.
    if target.exists() and not target.is_dir():
        raise UsageError(f"--to {target} is a file\n  expected a folder, which is made where there is none")
    with opened(path) as run:
        # The manifest stays behind: the exported file cannot be checked against these digests.
        folder = newest_verified(run, step)
        stage_folder = folder.parents[1]
        model = models.from_dict(artifacts.read_record(stage_folder / "stage.json")["model"])
        # The class names and the preprocessing, which a stage hands on with its weights.
        beside: dict[str, Any] = {}
        if (stage_folder / artifacts.TASK).exists():
            task = artifacts.read_record(stage_folder / artifacts.TASK)
            beside["class_names"] = task["job"].get("class_names", [])
            beside["preprocessing"] = preprocessing_of(task["config"].get("data", {}).get("preprocess"), model)
        from pipeline.checkpoints.reader import export

        target = target.resolve()
        target.mkdir(parents=True, exist_ok=True)
        models.save_weights(export(folder, model), target, model, writing=atomic_file, **beside)
        # A stage's own done.json speaks for its folder, and finds weights of another step there.
        if not (target / artifacts.DONE).exists():
            exported = run.in_words(str(folder))
            artifacts.record_weights(target, {"exported": exported, "code": code_version()})
        echo(f"step {step_of(folder)}: weights.safetensors and model.json in {target}")
