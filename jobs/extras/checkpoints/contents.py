"""`patchline checkpoints verify|inspect|diff|export RUN`: read the contents of checkpoints.

RUN has the same format as in stored.py. Only safetensors and JSON files are opened. Reading one
checkpoint can take minutes, so the commands show which one they read.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import models
from data.errors import CheckpointError, UsageError
from data.files import atomic_file
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug
from jobs.extras.checkpoints.stored import SavedRun
from jobs.extras.stored_runs import OpenedRun, opened
from jobs.named_stages import resume_command
from jobs.terminal import activity, echo
from pipeline import artifacts
from pipeline.architecture import preprocessing_of
from pipeline.checkpoints.manifest import read_manifest, step_of
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.config import differences
from pipeline.identity import code_version
from pipeline.variables import restored

if TYPE_CHECKING:  # imports torch, which takes seconds and would delay errors in the arguments
    from torch import Tensor

    from pipeline.checkpoints.reader import Reader

Step = Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest checkpoint, or all.")]
OtherRun = Annotated[str | None, typer.Option("--with", metavar="RUN", help="Run or checkpoint to compare with.")]
OtherStep = Annotated[int | None, typer.Option("--with-step", help="Step of the checkpoint to compare with.")]
Target = Annotated[
    Path,
    typer.Option("--to", metavar="FOLDER", help="Folder for weights.safetensors and model.json; created if missing."),
]

# ------------------------------------------------------------------------------------------------ which checkpoints


class Saved(NamedTuple):
    """Identifies one checkpoint of a stage."""

    checkpoints: StageCheckpoints
    name: str


def selected(run: OpenedRun, step: int | None) -> list[Saved]:
    """Return the named checkpoint, the checkpoints of a step, or all checkpoints, newest first within each stage.

    Raises UsageError if no checkpoint matches.
    """
    if run.only:
        return [Saved(run.stages[0], run.only)]
    saved: list[Saved] = []
    for checkpoints in run.stages:
        saved += [Saved(checkpoints, name) for name in checkpoints.committed()]
    if not saved:
        raise UsageError(f"{run.name} has no committed checkpoint yet")
    if step is None:
        return saved
    # Several checkpoints can have the same step, in different stages or because an attempt has repeated the step.
    of_step: list[Saved] = []
    known_steps: list[str] = []
    for checkpoint in saved:
        known_step = step_of(Path(checkpoint.name))
        known_steps.append(str(known_step))
        if known_step == step:
            of_step.append(checkpoint)
    if not of_step:
        raise UsageError(
            f"{run.name} has no checkpoint of step {step}; expected one of the steps {', '.join(known_steps)}"
        )
    return of_step


def newest_verified(run: OpenedRun, step: int | None) -> Path:
    """Verify every byte of the newest checkpoint, or of the checkpoint at `step`; return the checkpoint's folder.

    Raises UsageError if several stages have a matching checkpoint, or CheckpointError if the checkpoint is damaged.
    """
    saved = selected(run, step)
    stages = sorted({checkpoint.checkpoints.stage for checkpoint in saved})
    if len(stages) > 1:
        first = run.storage.address(stages[0])
        raise UsageError(
            f"several stages of {run.name} have checkpoints: {', '.join(stages)}\n"
            f"  use one of them, for example {first}"
        )
    return saved[0].checkpoints.verify(saved[0].name)


# ------------------------------------------------------------------------------------------------ the commands


def verify_all(path: SavedRun, step: Step = None, _debug: Debug = False) -> Answer:
    """Read every byte of the checkpoints, and verify the digests in the manifests."""
    entries: list[dict[str, Any]] = []
    with opened(path) as run:
        for saved in selected(run, step):
            # Include the stage, because two stages can have a checkpoint of the same step.
            entry: dict[str, Any] = {"checkpoint": f"{saved.checkpoints.stage}/{saved.name}", "problem": ""}
            activity.now(f"reading {entry['checkpoint']} …")
            began = time.monotonic()
            try:
                saved.checkpoints.verify(saved.name)
            except CheckpointError as error:
                entry["problem"] = run.in_words(str(error))
            entry["seconds"] = time.monotonic() - began
            entries.append(entry)
            # Print each line at once, because reading the next checkpoint can take minutes.
            echo(verified_line(entry))
    document: dict[str, Any] = {"run": run.storage.address(), "checkpoints": entries}
    bad = sum(bool(entry["problem"]) for entry in entries)
    if bad:
        # The error's document also lists the checkpoints.
        damaged = CheckpointError(
            f"damaged checkpoints: {bad}\n  the next start skips them and loads the newest intact checkpoint\n"
            f"  to resume, run {resume_command(run.storage.local)}"
        )
        damaged.details = document
        raise damaged
    return Answer(document)


def verified_line(entry: Document) -> str:
    """Return the line of one verified checkpoint."""
    if entry["problem"]:
        return f"{entry['checkpoint']}  DAMAGED: {entry['problem']}"
    return f"{entry['checkpoint']}  intact ({entry['seconds']:.1f}s)"


def inspect(path: SavedRun, step: Step = None, _debug: Debug = False) -> Answer:
    """Print a checkpoint's manifest, and every parameter with its size and norms."""
    with opened(path) as run:
        # Verify first, because the norms of damaged tensors would be misleading.
        folder = newest_verified(run, step)
        manifest = read_manifest(folder)
        fields = asdict(manifest)
        # Omit the digests of single chunks, which may have a hundred thousand digits.
        for name, file in fields["files"].items():
            fields["files"][name] = {"bytes": file["bytes"], "sha256": file["sha256"]}

        from pipeline.checkpoints.reader import Reader

        # Each rank has saved its pieces of the tensors to a separate file; Reader joins them.
        reader = Reader(folder, manifest.files)
        kinds: dict[str, list[str]] = {}  # parameter → "master" and the names of its saved moments
        for name, kind in reader.pieces:
            kinds.setdefault(name, []).append(kind)
        parameters: list[dict[str, Any]] = []
        for name in sorted(kinds):
            norms: dict[str, float] = {}
            largest = 0
            for kind in kinds[name]:
                state = whole_state(reader, name, kind)
                norms[kind] = float(state.norm())
                largest = max(largest, state.numel())
            parameters.append({"name": name, "elements": largest, "norms": norms})
        return Answer(
            {"checkpoint": run.in_words(str(folder)), "manifest": fields, "parameters": parameters}, inspected
        )


def inspected(document: Document) -> Iterator[str]:
    """Yield the lines of `checkpoints inspect`: the fields of the manifest, then the parameters."""
    for field, value in document["manifest"].items():
        text = json.dumps(value) if isinstance(value, dict) else value
        yield f"{field:13} {text}"
    for parameter in document["parameters"]:
        norms = "  ".join(f"|{kind}| {norm:.4g}" for kind, norm in parameter["norms"].items())
        yield f"{parameter['name']:40} {parameter['elements']:>12,}  {norms}"


def whole_state(reader: "Reader", name: str, kind: str) -> "Tensor":
    """Return a parameter's master weight, or a moment, as one flat fp32 tensor, concatenated from all ranks."""
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
) -> Answer:
    """Compare two checkpoints' manifests and tensors; print the changes from the other checkpoint to this one.

    To compare the settings of two runs, run `diff`.
    """
    if more:
        raise UsageError(
            f"diff expects a single run, found {' '.join([path, *more])}\n"
            f"  to see the changes from the first to the second, run diff {more[0]} --with {path}"
        )
    # Without --with, compare with another step of the same run.
    other_path = other_path or path
    if other_path == path and other_step == step:
        raise UsageError("diff needs a second checkpoint\n  pass --with RUN, or --with-step N for the same run")
    with opened(path) as run, opened(other_path) as other_run:
        # Verify first, because a damaged byte would look like a difference in training.
        second = newest_verified(run, step)
        first = newest_verified(other_run, other_step)
        first_manifest = read_manifest(first)
        second_manifest = read_manifest(second)
        first_fields = asdict(first_manifest)
        second_fields = asdict(second_manifest)
        # The list of files depends on the number of workers, even if the contents are equal.
        del first_fields["files"]
        del second_fields["files"]

        import torch

        from pipeline.checkpoints.reader import Reader

        # Compare whole parameters, because the checkpoints can come from different numbers of workers.
        first_reader = Reader(first, first_manifest.files)
        second_reader = Reader(second, second_manifest.files)
        states = sorted(first_reader.pieces.keys() | second_reader.pieces.keys())
        equal = 0
        tensors: list[dict[str, Any]] = []
        for name, kind in states:
            row: dict[str, Any] = {"name": name, "kind": kind}
            if (name, kind) not in first_reader.pieces:
                tensors.append(row | {"difference": "only in the second checkpoint"})
                continue
            if (name, kind) not in second_reader.pieces:
                tensors.append(row | {"difference": "only in the first checkpoint"})
                continue
            before = whole_state(first_reader, name, kind)
            after = whole_state(second_reader, name, kind)
            if before.shape != after.shape:
                tensors.append(row | {"difference": "sizes differ"})
            elif torch.equal(before, after):
                equal += 1
            else:
                tensors.append(row | {"largest": float((before - after).abs().max())})
        document = {
            "first": other_run.in_words(str(first)),
            "second": run.in_words(str(second)),
            "manifest": list(differences(first_fields, second_fields).values()),
            "tensors": tensors,
            "equal": equal,
            "compared": len(states),
        }
        return Answer(document, compared)


def compared(document: Document) -> Iterator[str]:
    """Yield the lines of `checkpoints diff`."""
    yield f"{document['first']} → {document['second']}"
    for difference in document["manifest"]:
        yield f"  {difference}"
    for row in document["tensors"]:
        difference = f"largest difference {row['largest']:.3g}" if "largest" in row else row["difference"]
        yield f"  {row['name']} {row['kind']}: {difference}"
    yield f"  {document['equal']} of {document['compared']} tensors are equal bit for bit"


def export_weights(path: SavedRun, target: Target, step: Step = None, _debug: Debug = False) -> Answer:
    """Export a checkpoint's weights to the same files as those of a finished stage.

    To convert them for timm, transformers or big_vision, run `export` on the result.
    """
    # Check before reading the checkpoint, which takes minutes.
    if target.exists() and not target.is_dir():
        raise UsageError(f"--to {target} is a file\n  expected a folder (created if it does not exist)")
    with opened(path) as run:
        # Do not copy the manifest, because its digests do not apply to the exported file.
        folder = newest_verified(run, step)
        stage_folder = folder.parents[1]
        model = models.from_dict(artifacts.read_record(stage_folder / "stage.json")["model"])
        # Like a finished stage, export class names and preprocessing with the weights.
        exported_with: dict[str, Any] = {}
        loss: dict[str, str] = {}
        if (stage_folder / artifacts.TASK).exists():
            task = restored(artifacts.read_record(stage_folder / artifacts.TASK), stage_folder / artifacts.TASK)
            exported_with["class_names"] = task["job"].get("class_names", [])
            preprocess = task["config"].get("data", {}).get("preprocess")
            exported_with["preprocessing"] = preprocessing_of(preprocess, model)
            loss["loss"] = task["config"]["loss"]
        from pipeline.checkpoints.reader import export

        target = target.resolve()
        target.mkdir(parents=True, exist_ok=True)
        models.save_weights(export(folder, model), target, model, writing=atomic_file, **exported_with)
        # If the target is a stage's folder, keep its done.json, whose digest then detects the replaced weights.
        if not (target / artifacts.DONE).exists():
            exported = run.in_words(str(folder))
            artifacts.record_weights(target, {"exported": exported, "code": code_version(), **loss})
        return Answer(
            {"checkpoint": run.in_words(str(folder)), "step": step_of(folder), "weights": target}, exported_line
        )


def exported_line(document: Document) -> list[str]:
    return [
        f"exported the weights of step {document['step']}: weights.safetensors and model.json in {document['weights']}"
    ]
