"""`patchline checkpoints verify|inspect RUN`: read the contents of checkpoints.

RUN has the same format as in stored.py. `diff` and `export` find their checkpoints through this module too. Only
safetensors and JSON files are opened. Reading one checkpoint can take minutes, so the commands show which one they
read.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import models
from data.errors import CheckpointError, UsageError
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug
from jobs.extras.checkpoints.stored import SavedRun
from jobs.extras.stored_runs import OpenedRun, opened
from jobs.named_stages import resume_command
from jobs.terminal import activity, echo
from models import ModelConfig
from pipeline import artifacts
from pipeline.checkpoints.manifest import read_manifest, step_of
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

if TYPE_CHECKING:  # imports torch, which takes seconds and would delay errors in the arguments
    from torch import Tensor

    from pipeline.checkpoints.reader import Reader

# ------------------------------------------------------------------------------------------------ which checkpoints


class Saved(NamedTuple):
    """Identifies one checkpoint of a stage."""

    checkpoints: StageCheckpoints
    name: str


def selected(run: OpenedRun) -> list[Saved]:
    """Return the named checkpoint, or all checkpoints, newest first within each stage.

    Raises UsageError if no checkpoint matches.
    """
    saved: list[Saved] = []
    for checkpoints in run.stages:
        saved += [Saved(checkpoints, name) for name in checkpoints.committed()]
    if not saved:
        raise UsageError(f"{run.name} has no committed checkpoint yet")
    if not run.only:
        return saved
    named = [checkpoint for checkpoint in saved if checkpoint.name == run.only]
    if named:
        return named
    # Several checkpoints can have the same step, in different stages or because an attempt has repeated the step.
    step = step_of(Path(run.only))
    of_step = [checkpoint for checkpoint in saved if step_of(Path(checkpoint.name)) == step]
    if not of_step:
        raise UsageError(
            f"{run.name} has no checkpoint of step {step}\n"
            f"  expected one of the steps {', '.join(str(step_of(Path(checkpoint.name))) for checkpoint in saved)}"
        )
    return of_step


def newest_verified(run: OpenedRun) -> Path:
    """Verify every byte of the named checkpoint or, for a run or a stage, of the newest; return its folder.

    Raises UsageError if several stages have a matching checkpoint, or CheckpointError if the checkpoint is damaged.
    """
    saved = selected(run)
    stages = sorted({checkpoint.checkpoints.stage for checkpoint in saved})
    if len(stages) > 1:
        first = "/".join(filter(None, [run.storage.address(stages[0]), run.only]))
        raise UsageError(
            f"several stages of {run.name} have checkpoints: {', '.join(stages)}\n"
            f"  use one of them, for example {first}"
        )
    return saved[0].checkpoints.verify(saved[0].name)


def model_of(folder: Path) -> ModelConfig:
    """Return the config of the model whose states are in a checkpoint's folder."""
    return models.from_dict(artifacts.read_record(folder.parents[1] / "stage.json")["model"])


# ------------------------------------------------------------------------------------------------ the commands


def verify_all(path: SavedRun, _debug: Debug = False) -> Answer:
    """Read every byte of the checkpoints, and verify the digests in the manifests."""
    entries: list[dict[str, Any]] = []
    with opened(path) as run:
        for saved in selected(run):
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


def inspect(path: SavedRun, _debug: Debug = False) -> Answer:
    """Print the manifest of a checkpoint (default: the newest), and every parameter with its size and norms."""
    with opened(path) as run:
        # Verify first, because the norms of damaged tensors would be misleading.
        folder = newest_verified(run)
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
