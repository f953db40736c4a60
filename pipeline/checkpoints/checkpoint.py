"""Checkpoints that exist only when they are whole, and one decision of all workers about which to load.

On disk, under `<stage>/checkpoints/`:
    step-0000001200/           committed: a valid MANIFEST.json lies in it, written last; "-000007" is appended where
                               another attempt has committed that step already
        rank-00000.safetensors   that worker's fragments, keys "name|kind|start"
        MANIFEST.json            schema, step, ledger, attempt, world, zero, files with bytes and sha256, …
    .tmp-0000001250-000007/    a save in flight, or one that died; swept by the next attempt
    bad-0000001100-000007/     quarantined: a digest did not match; never loaded, never deleted by us

`pipeline/checkpoints/saver.py` writes them. Loading, in order:
1. rank 0 sweeps what died and reads every byte of the newest checkpoint (`choose`, `verify`);
2. one that is not whole is renamed to `bad-…`, and the one before it is tried;
3. all workers are told which it is (`choose_together`), and each reads the fragments that it needs (`load`, `Reader`):
   they know nothing of world size or ZeRO stage, so any topology loads what any other has saved.

In:  step-0000001200/rank-00000.safetensors with "head.bias|master|0", five numbers, and rank-00001 with
     "head.bias|master|5", five more
Out: reader("head.bias", "master", 3, 4) → elements 3, 4, 5 and 6 of that parameter's fp32 master
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CheckpointError
from data.files import sync
from pipeline.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    NewerSchema,
    committed,
    read_manifest,
    step_of,
    verify_file,
)
from pipeline.engine import Engine

# ------------------------------------------------------------------------ which one to load


def verify(checkpoint: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises CheckpointError naming the file and what differs, OSError where the storage fails.
    """
    manifest = read_manifest(checkpoint)
    expected = set(manifest.files)
    # A file too many is refused like one too few: it is not what was committed.
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    if present != expected:
        missing = sorted(expected - present)
        extra = sorted(present - expected)
        raise CheckpointError(f"{checkpoint}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    for name, record in manifest.files.items():
        verify_file(checkpoint / name, record)
    # The headers too: a digest may be right for a file that never was a checkpoint, such as a pickle.
    Reader(checkpoint, manifest.files)
    return manifest


class Chosen(NamedTuple):
    """Holds the checkpoint that an attempt goes on from."""

    folder: Path
    manifest: Manifest


def choose(folder: Path, attempt: int, say: Callable[[str], None]) -> Chosen | None:
    """Return the newest checkpoint whose every file verifies; bad ones are renamed out of the way and named.

    None where nothing was ever committed. Leftovers of saves that never committed are swept here, before anything
    is written. Raises CheckpointError where the storage fails, where a checkpoint is of a newer schema, and where
    all are bad: to start from nothing again is a person's decision.
    """
    # No save of ours is in flight yet, so whatever is temporary is of an attempt that died or lost the run.
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    checkpoints = committed(folder)
    try:
        for checkpoint in checkpoints:
            try:
                return Chosen(checkpoint, verify(checkpoint))
            except NewerSchema:
                raise
            except CheckpointError as error:
                # Renamed, not deleted: a person may still want to read it, and no later attempt tries it again.
                aside = folder / f"bad-{checkpoint.name.removeprefix('step-')}-{attempt:06d}"
                os.rename(checkpoint, aside)
                say(f"checkpoint refused: {error}; kept as {aside.name}, trying the one before it")
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoints: {error}\n  nothing was changed; see to the storage"
        ) from None
    if checkpoints:
        raise CheckpointError(
            f"none of {len(checkpoints)} checkpoints in {folder} is whole; they are kept as bad-*\n"
            "  bring one back from a copy as step-*, or run the same command again to start from step 0"
        )
    return None


def choose_together(folder: Path, attempt: int, say: Callable[[str], None]) -> Chosen | None:
    """Collective: rank 0 verifies and decides, every worker is told; None where there is nothing to load.

    Raises CheckpointError on every worker alike, with what `choose` found on rank 0.
    """
    # One decision before anything is built on it: no worker may find out half-way that the rest cannot be read.
    decision: list[Chosen | CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            decision = [choose(folder, attempt, say)]
        except CheckpointError as error:
            decision = [error]
    dist.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], CheckpointError):
        raise decision[0]
    return decision[0]


# ------------------------------------------------------------------------ reading


class Piece(NamedTuple):
    """Says where elements [start, start + length) of a parameter's master or moment lie: under `key` of a file."""

    start: int
    length: int
    file: str
    key: str


class Reader:
    """Gives random access to the fragments of one checkpoint, whatever world size and stage wrote it."""

    def __init__(self, checkpoint: Path, files: Iterable[str], share: float | None = None) -> None:
        """Open all files; or, with a `share`, each when something is not found in those before it.

        `share`, from 0 to 1, tells where among the files lies what will be asked for: near 0 for the first worker, near
        1 for the last. A worker of the world that saved them needs one file, of any other a few, and not those of all.

        Raises CheckpointError where a file that is opened is no safetensors file of fragments.
        """
        self.checkpoint = checkpoint
        self.handles: dict[str, Any] = {}  # safetensors.safe_open has no type of its own
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # by (parameter name, kind)
        self.unopened = sorted(files, reverse=True)  # the next one last
        if share is None:
            while self.unopened:
                self.open_next()
            return
        middle = share * len(self.unopened) - 0.5
        numbered = list(enumerate(sorted(self.unopened)))
        numbered.sort(key=lambda number_and_file: -abs(number_and_file[0] - middle))
        self.unopened = [file for _, file in numbered]

    def open_next(self) -> None:
        """Open one more file. Raises CheckpointError where it holds no fragments."""
        file = self.unopened.pop()
        try:
            self.add_file(file)
        except (safetensors.SafetensorError, ValueError) as error:
            raise CheckpointError(f"{self.checkpoint / file} holds no fragments: {error}") from None

    def add_file(self, file: str) -> None:
        """Note which pieces a file holds; their data is read when it is asked for."""
        handle = safetensors.safe_open(self.checkpoint / file, "pt")
        self.handles[file] = handle
        for key in handle.keys():  # noqa: SIM118 (not a mapping)
            # From the right: a parameter's name may hold the separator, the other two cannot.
            name, kind, start = key.rsplit("|", 2)
            count = handle.get_slice(key).get_shape()[0]
            self.pieces.setdefault((name, kind), []).append(Piece(int(start), count, file, key))

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master or moment, flat fp32.

        Raises CheckpointError where the checkpoint holds no such parameter or not all of the range.
        """
        # The range may lie across files of several workers, wherever the world that saved it made its cuts.
        wanted = torch.empty(count)
        filled = 0
        looked_at = 0  # of the pieces that are known
        while True:
            pieces = self.pieces.get((name, kind), [])
            for piece in pieces[looked_at:]:
                first = max(start, piece.start)
                stop = min(start + count, piece.start + piece.length)
                if first < stop:
                    stored = self.handles[piece.file].get_slice(piece.key)
                    wanted[first - start : stop - start] = stored[first - piece.start : stop - piece.start]
                    filled += stop - first
            looked_at = len(pieces)
            if filled >= count or not self.unopened:
                break
            self.open_next()
        # What is missing would be memory that was never set: weights of noise, and no error.
        if filled != count:
            raise CheckpointError(
                f"the checkpoint holds {filled} of {count} elements of {name} ({kind}); it belongs to another model"
            )
        return wanted

    def weights(self, shapes: Mapping[str, torch.Size], kind: str = "master") -> dict[str, Tensor]:
        """Return whole fp32 parameters (or their "average"), of no world size: what the next stage starts from."""
        return {name: self(name, kind, 0, shape.numel()).view(shape) for name, shape in shapes.items()}


def load(engine: Engine, chosen: Chosen) -> None:
    """Collective: fill the engine with what every worker reads of the checkpoint."""
    share = (dist.get_rank() + 0.5) / dist.get_world_size()
    engine.restore(Reader(chosen.folder, chosen.manifest.files, share))
    # Adam's bias correction counts updates, not steps: steps that were skipped are not among them.
    engine.updates = chosen.manifest.updates


def prune(folder: Path, keep: int, keep_every: int) -> list[Path]:
    """Delete old checkpoints: the newest `keep` (2 at least) stay, and every multiple of `keep_every` steps.

    A folder is renamed, durably, before it is deleted: no crash leaves half a checkpoint under a valid name.
    Raises OSError where the renaming fails; nothing is half deleted then.
    """
    removed = []
    # Two at least: the newest may turn out to be damaged when it is read.
    for checkpoint in committed(folder)[max(keep, 2) :]:
        is_milestone = keep_every > 0 and step_of(checkpoint) % keep_every == 0
        if is_milestone:
            continue
        doomed = folder / f".tmp-old-{checkpoint.name}"
        os.rename(checkpoint, doomed)
        sync(folder)
        # What is left of it when this fails is swept by the next attempt, as any temporary folder.
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(checkpoint)
    return removed
