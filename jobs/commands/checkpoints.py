"""The work of `patchline checkpoints`: what a run has saved, looked at by a person.

A path is a run directory, a stage's folder in it, or one checkpoint's folder. Nothing here opens anything but
safetensors and JSON. Every function yields its lines as it finds them, for a checkpoint can take minutes to read.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import models
from data.errors import CheckpointError, UsageError
from data.files import whole_file
from pipeline import artifacts
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import Reader
from pipeline.checkpoints.manifest import MANIFEST, Manifest, attempt_of_stage, committed, read_manifest, step_of
from pipeline.config import differences
from pipeline.evaluation import async_evaluation
from pipeline.monitoring.telemetry import Record, read_metrics
from pipeline.versions import code_version

# ------------------------------------------------------------------------------------------------ which checkpoints


def stage_folders(path: Path) -> list[Path]:
    """Return the folders that hold checkpoints: all stages of a run, or the one stage that is named.

    Raises UsageError where there are none.
    """
    if (path / "checkpoints").is_dir():
        return [path]
    folders = sorted(checkpoints.parent for checkpoints in path.glob("*/checkpoints"))
    if not folders:
        raise UsageError(
            f"{path} holds no checkpoints\n  name a run directory, a stage's folder in it, or a step-* folder"
        )
    return folders


def selected(path: Path, step: int | None) -> list[Path]:
    """Return the checkpoint whose folder is named, or those of a step, or all, the newest of each stage first.

    Raises UsageError where there are none.
    """
    if (path / MANIFEST).exists():
        return [path]
    folders: list[Path] = []
    for stage in stage_folders(path):
        folders += committed(stage / "checkpoints")
    if not folders:
        raise UsageError(f"nothing is committed in {path} yet")
    if step is None:
        return folders
    # A step can be there several times: of several stages, or of attempts of which a later one took it again.
    of_step = [folder for folder in folders if step_of(folder) == step]
    if not of_step:
        known_steps = ", ".join(str(step_of(folder)) for folder in folders)
        raise UsageError(f"no checkpoint of step {step} in {path}; there are {known_steps}")
    return of_step


def newest(path: Path, step: int | None) -> Path:
    """Return the newest checkpoint of a stage, or of a step. Raises UsageError where several stages have one."""
    folders = selected(path, step)
    stages = sorted({folder.parents[1] for folder in folders})
    if len(stages) > 1:
        names = ", ".join(stage.name for stage in stages)
        raise UsageError(f"{path} has several stages with checkpoints: {names}\n  name one: {stages[0]}")
    return folders[0]


# ------------------------------------------------------------------------------------------------ the commands


def list_all(path: Path) -> Iterator[str]:
    """List every checkpoint folder of every stage, also those that are not committed."""
    for stage in stage_folders(path):
        yield f"{stage.name}:"
        # A step is evaluated after its commit, so its scores are not in its manifest.
        evaluations = {record["step"]: record for record in read_metrics(stage, "evaluate")}
        for folder in committed(stage / "checkpoints"):
            yield f"  {list_line(folder, evaluations.get(step_of(folder), {}))}"
        for folder in sorted((stage / "checkpoints").glob("bad-*")):
            yield f"  {folder.name}  refused by a start, kept for you to look at; delete it when you have"
        for folder in sorted((stage / "checkpoints").glob(".tmp-*")):
            if folder.name.startswith(".tmp-old-"):
                yield f"  {folder.name}  an old checkpoint on its way out; the next start sweeps what is left of it"
            else:
                yield f"  {folder.name}  a save in flight, or one that died; the next start sweeps it"


def list_line(folder: Path, evaluation: Record) -> str:
    """One checkpoint's size, world, attempt and scores, from its manifest and the record of its step's evaluation."""
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        return f"{folder.name}  BAD: {error}"
    size = sum(file["bytes"] for file in manifest.files.values())
    attempt = attempt_of_stage(folder.parents[1], manifest.attempt)
    line = (
        f"{folder.name}  {size / 1e6:9.1f} MB in {len(manifest.files)} files  world {manifest.world}  "
        f"ZeRO {manifest.zero}  attempt {attempt}  ledger {manifest.ledger[:12]}"
    )
    for name, value in evaluation.items():
        is_score = isinstance(value, float) and name not in ("time", "seconds")
        if is_score and not async_evaluation.is_of_one_seed(name):
            line += f"  {name} {value:.4f}"
    return line


def verify_all(path: Path, step: int | None) -> Iterator[str]:
    """Read every byte of every checkpoint meant. Raises CheckpointError in the end where one is bad."""
    # A bad one does not end the reading: whoever asks wants to know which are whole.
    bad = 0
    for folder in selected(path, step):
        began = time.monotonic()
        try:
            checkpoint.verify(folder)
        except CheckpointError as error:
            bad += 1
            yield f"{name_of(folder)}  BAD: {error}"
        else:
            yield f"{name_of(folder)}  whole ({time.monotonic() - began:.1f}s)"
    if bad:
        raise CheckpointError(f"bad checkpoints: {bad}\n  a start moves them aside and loads the newest whole one")


def name_of(folder: Path) -> str:
    """Return "pretrain-1/step-0000000050": two stages may have a checkpoint of the same step."""
    return f"{folder.parents[1].name}/{folder.name}"


def inspect(path: Path, step: int | None) -> Iterator[str]:
    """Show the manifest, and every parameter with its number of elements and the norms of its states."""
    folder = newest(path, step)
    # Verified first: the norms of damaged tensors would mislead.
    manifest = checkpoint.verify(folder)
    for field, value in asdict(manifest).items():
        # The digests of the chunks are for machines: a line of a hundred thousand digits would hide the others.
        if field == "files":
            value = {name: {"bytes": file["bytes"], "sha256": file["sha256"]} for name, file in value.items()}
        if isinstance(value, dict):
            value = json.dumps(value)
        yield f"{field:13} {value}"

    # The tensors lie in pieces, one file a rank; a reader puts them together whatever the number of ranks was.
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
        yield f"{name:40} {largest:>12,}  {'  '.join(norms)}"


def whole_state(reader: Reader, name: str, kind: str) -> torch.Tensor:
    """Return a parameter's master or moment as one flat fp32 tensor, joined from the pieces of all ranks."""
    elements = 0
    for start, count, _, _ in reader.pieces[name, kind]:
        elements = max(elements, start + count)
    return reader(name, kind, 0, elements)


def compare(path: Path, step: int | None, other_path: Path, other_step: int | None) -> Iterator[str]:
    """Show what changes from the other checkpoint (the first) to ours (the second): manifests, then states."""
    second = newest(path, step)
    first = newest(other_path, other_step)
    # Verified first: a damaged byte would look like a difference in training.
    first_manifest = checkpoint.verify(first)
    second_manifest = checkpoint.verify(second)
    yield f"{first} → {second}"
    for difference in differences(without_files(first_manifest), without_files(second_manifest)):
        yield f"  {difference}"

    # Compare what is saved of each parameter, whatever number of workers wrote the one and the other.
    first_reader = Reader(first, first_manifest.files)
    second_reader = Reader(second, second_manifest.files)
    states = sorted(first_reader.pieces.keys() | second_reader.pieces.keys())
    equal = 0
    for name, kind in states:
        if (name, kind) not in first_reader.pieces:
            yield f"  {name} {kind}: only in the second"
            continue
        if (name, kind) not in second_reader.pieces:
            yield f"  {name} {kind}: only in the first"
            continue
        before = whole_state(first_reader, name, kind)
        after = whole_state(second_reader, name, kind)
        if before.shape != after.shape:
            yield f"  {name} {kind}: another size"
        elif torch.equal(before, after):
            equal += 1
        else:
            yield f"  {name} {kind}: largest difference {(before - after).abs().max():.3g}"
    yield f"  {equal} of {len(states)} states are bit-equal"


def without_files(manifest: Manifest) -> dict[str, object]:
    """Return the manifest less its files, which differ with the number of workers."""
    fields = asdict(manifest)
    del fields["files"]
    return fields


def export_weights(path: Path, step: int | None, target: Path) -> Iterator[str]:
    """Write weights.safetensors and model.json, as a finished stage leaves them, from a verified checkpoint."""
    # Before the reading, which takes minutes.
    if target.exists() and not target.is_dir():
        raise UsageError(f"--to {target} is a file\n  expected a folder, which is made where there is none")
    folder = newest(path, step)
    # The manifest stays behind: whoever reads the exported file cannot check it against these digests.
    checkpoint.verify(folder)
    stage_record = artifacts.read_record(folder.parents[1] / "stage.json")
    if not stage_record.is_sealed:
        yield f"unverified: {folder.parents[1] / 'stage.json'}, which names the model, has no digest"
    model = models.from_dict(stage_record.values["model"])
    target = target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    names = class_names_of(folder.parents[1])
    models.save_weights(checkpoint.export(folder, model), target, model, writing=whole_file, class_names=names)
    # A stage's own done.json speaks for its folder, and finds weights of another step there.
    if not (target / artifacts.DONE).exists():
        artifacts.record_weights(target, {"exported": str(folder), "code": code_version()})
    yield f"step {step_of(folder)}: weights.safetensors and model.json in {target}"


def class_names_of(stage_folder: Path) -> list[str]:
    """Return the class names that a stage hands on with its weights; none where it knows none."""
    task = stage_folder / "task.json"
    if not task.exists():
        return []
    return artifacts.read_record(task).values["job"].get("class_names", [])


def check_keep(keep: int) -> None:
    """Raise UsageError for fewer than 2."""
    if keep < 2:
        raise UsageError(f"--keep is {keep}, expected 2 or more: one checkpoint alone can be bad")


def prune(path: Path, keep: int, keep_every: int) -> Iterator[str]:
    """Delete all but the newest `keep` of every stage, the multiples of `keep_every`, and those that are to be judged.

    Raises UsageError for fewer than 2, CheckpointError where one that is to stay is bad; nothing is deleted then.
    """
    check_keep(keep)
    stages = stage_folders(path)
    # Never delete in favour of a bad one; and of no stage, before all are known to be good.
    for stage in stages:
        for folder in committed(stage / "checkpoints")[:keep]:
            checkpoint.verify(folder)
    for stage in stages:
        for folder in checkpoint.prune(stage / "checkpoints", keep, keep_every, async_evaluation.due(stage)):
            yield f"{stage.name}: {folder.name} deleted"
