"""`python -m jobs checkpoints list|verify|inspect|diff|export|prune RUN`: what a run has saved, looked at by a person.

RUN is a run directory, a stage's folder in it, or one checkpoint's folder. Nothing here loads anything but safetensors.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch

import models
from data.errors import CheckpointError, UsageError
from data.files import whole_file
from pipeline import checkpoint
from pipeline.checkpoint import Manifest, Reader, committed, read_manifest, step_of
from pipeline.config import differences
from pipeline.train import export


def stages(path: Path) -> list[Path]:
    """Folders that hold checkpoints: of a run's stages, or of the one that is named."""
    found = [path] if (path / "checkpoints").is_dir() else sorted(p.parent for p in path.glob("*/checkpoints"))
    if not found:
        raise UsageError(
            f"{path} holds no checkpoints\n  name a run directory, a stage's folder in it, or a step-* folder"
        )
    return found


def selected(options: argparse.Namespace) -> list[Path]:
    """The checkpoints that a command is about: all, those of --step, or the one whose folder is named."""
    path = Path(options.run).resolve()
    if (path / checkpoint.MANIFEST).exists():
        return [path]
    found = [c for stage in stages(path) for c in committed(stage / "checkpoints")]
    if options.step is not None:
        known = [step_of(c) for c in found]
        found = [c for c in found if step_of(c) == options.step]
        if not found:
            raise UsageError(f"no checkpoint of step {options.step} in {path}; there are {', '.join(map(str, known))}")
    if not found:
        raise UsageError(f"nothing is committed in {path} yet")
    return found


def newest(options: argparse.Namespace) -> Path:
    found = selected(options)
    folders = sorted({c.parent for c in found})
    if len(folders) > 1:
        names = ", ".join(str(folder.parent.name) for folder in folders)
        raise UsageError(f"{options.run} has several stages with checkpoints: {names}\n  name one: {folders[0].parent}")
    return found[0]


def listed(options: argparse.Namespace) -> Iterable[str]:
    """Every folder of every stage, what is not committed too."""
    for stage in stages(Path(options.run).resolve()):
        yield f"{stage.name}:"
        for folder in committed(stage / "checkpoints"):
            yield "  " + line(folder)
        for folder in sorted((stage / "checkpoints").glob("bad-*")):
            yield f"  {folder.name}  refused by a start, kept for you to look at; delete it when you have"
        for folder in sorted((stage / "checkpoints").glob(".tmp-*")):
            yield f"  {folder.name}  a save in flight, or one that died; the next start sweeps it"


def line(folder: Path) -> str:
    try:
        found = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        return f"{folder.name}  BAD: {error}"
    size = sum(file["bytes"] for file in found.files.values())
    scores = "".join(f"  {name} {value:.4f}" for name, value in found.metrics.items() if "seed" not in name)
    return (
        f"{folder.name}  {size / 1e6:9.1f} MB in {len(found.files)} files  world {found.world}  ZeRO {found.zero}  "
        f"attempt {found.attempt}  ledger {found.ledger[:12]}{scores}"
    )


def verified(options: argparse.Namespace) -> Iterable[str]:
    """Read every byte. Raises CheckpointError in the end where one is bad."""
    bad = 0
    for folder in selected(options):
        began = time.monotonic()
        try:
            checkpoint.verify(folder)
            yield f"{folder.name}  whole ({time.monotonic() - began:.1f}s)"
        except CheckpointError as error:
            bad += 1
            yield f"{folder.name}  BAD: {error}"
    if bad:
        raise CheckpointError(f"{bad} checkpoints are bad\n  a start moves them aside and loads the newest whole one")


def inspected(options: argparse.Namespace) -> Iterable[str]:
    """The manifest, and every parameter with its shape's size and norm."""
    folder = newest(options)
    found = checkpoint.verify(folder)
    for name, value in asdict(found).items():
        yield f"{name:13} {json.dumps(value) if isinstance(value, dict) else value}"
    reader = Reader(folder, found.files)
    for name, kinds in sorted(kinds_of(reader).items()):
        sizes = {kind: elements(reader, name, kind) for kind in kinds}
        norms = "  ".join(f"|{kind}| {reader(name, kind, 0, size).norm():.4g}" for kind, size in sizes.items())
        yield f"{name:40} {max(sizes.values()):>12,}  {norms}"


def kinds_of(reader: Reader) -> dict[str, list[str]]:
    """Parameter → "master" and the moments that the checkpoint holds of it."""
    found: dict[str, list[str]] = {}
    for name, kind in reader.pieces:
        found.setdefault(name, []).append(kind)
    return found


def elements(reader: Reader, name: str, kind: str) -> int:
    return max(start + count for start, count, _, _ in reader.pieces[name, kind])


def compared(options: argparse.Namespace) -> Iterable[str]:
    """What differs between the newest (or --step) and another checkpoint: manifest, then states."""
    ours, theirs = newest(options), newest(argparse.Namespace(run=options.other, step=options.other_step))
    manifests = [checkpoint.verify(folder) for folder in (theirs, ours)]
    yield f"{theirs} → {ours}"
    yield from (f"  {text}" for text in differences(*map(said, manifests)))
    old, new = (Reader(folder, found.files) for folder, found in zip((theirs, ours), manifests, strict=True))
    same = 0
    for name, kind in sorted(old.pieces.keys() | new.pieces.keys()):
        if (name, kind) not in new.pieces or (name, kind) not in old.pieces:
            yield f"  {name} {kind}: only in {'the second' if (name, kind) in new.pieces else 'the first'}"
            continue
        a, b = (r(name, kind, 0, elements(r, name, kind)) for r in (old, new))
        if a.shape == b.shape and torch.equal(a, b):
            same += 1
        else:
            far = f"largest difference {(a - b).abs().max():.3g}" if a.shape == b.shape else "another size"
            yield f"  {name} {kind}: {far}"
    yield f"  {same} of {len(old.pieces.keys() | new.pieces.keys())} states are bit-equal"


def said(found: Manifest) -> dict[str, object]:
    """The manifest without its files, which differ with the topology."""
    return {name: value for name, value in asdict(found).items() if name != "files"}


def exported(options: argparse.Namespace) -> Iterable[str]:
    """weights.safetensors and model.json, as a finished stage leaves them, from a verified checkpoint."""
    folder = newest(options)
    checkpoint.verify(folder)
    record = json.loads((folder.parents[1] / "stage.json").read_text())
    model = models.from_dict(record["model"])
    target = Path(options.to).resolve()
    target.mkdir(parents=True, exist_ok=True)
    models.save_weights(export(folder, model), target, model, writing=whole_file)
    yield f"step {step_of(folder)}: weights.safetensors and model.json in {target}"


def pruned(options: argparse.Namespace) -> Iterable[str]:
    """Keep the newest --keep of every stage, and the multiples of --keep-every."""
    for stage in stages(Path(options.run).resolve()):
        for folder in committed(stage / "checkpoints")[: options.keep]:
            checkpoint.verify(folder)  # never delete in favour of a bad one
        for folder in checkpoint.prune(stage / "checkpoints", options.keep, options.keep_every):
            yield f"{stage.name}: {folder.name} deleted"


ACTIONS: dict[str, Callable[[argparse.Namespace], Iterable[str]]] = {
    "list": listed,
    "verify": verified,
    "inspect": inspected,
    "diff": compared,
    "export": exported,
    "prune": pruned,
}


def command(options: argparse.Namespace) -> None:
    """Run one action and print what it finds as it finds it."""
    if options.action == "export" and not options.to:
        raise UsageError("export needs a folder to write to: --to FOLDER")
    if options.action == "diff":
        options.other = options.other or options.run
        if options.other == options.run and options.step == options.other_step:
            raise UsageError("diff needs something to compare with: --with RUN, or --with-step N of the same run")
    if options.action == "prune" and options.keep < 2:
        raise UsageError(f"--keep is {options.keep}, expected 2 or more: one checkpoint alone can be bad")
    for text in ACTIONS[options.action](options):
        print(text, flush=True)
