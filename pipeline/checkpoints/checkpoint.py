"""Checkpoints that exist only when they are whole, and one decision of all workers about which to load.

On disk, under `<stage>/checkpoints/`:
    step-0000001200/           committed: a valid MANIFEST.json lies in it, written last; "-000007" is appended where
                               another attempt has committed that step already
        rank-00000.safetensors   that worker's fragments, keys "name|kind|start"
        MANIFEST.json            schema, step, ledger, attempt, world, zero, files with bytes and sha256, …
    .tmp-0000001250-000007/    a save in flight, or one that died; swept by the next attempt
    .tmp-old-step-0000001100/  an old checkpoint on its way out; swept too, where its deletion was cut short
    bad-0000001100-000007/     quarantined: a digest did not match; never loaded, never deleted by us

`pipeline/checkpoints/saver.py` writes them. Loading, in order:
1. rank 0 sweeps what died, takes the newest checkpoint whose manifest is whole and whose files are all there in their
   sizes, and tells all workers (`choose`, `choose_together`);
2. each reads the fragments that it needs, compared with their digests as they are read (`load_together`, `Reader`):
   they know nothing of world size or ZeRO stage, so any topology loads what any other has saved;
3. where a worker has read bytes that were not committed, rank 0 reads them all: a checkpoint that is bad is renamed to
   `bad-…`, and all load the one before it.
Steps 2 and 3 are in restore.py.

In:  step-0000001200/rank-00000.safetensors with "head.bias|master|0", five numbers, and rank-00001 with
     "head.bias|master|5", five more
Out: reader("head.bias", "master", 3, 4) → elements 3, 4, 5 and 6 of that parameter's fp32 master
"""

import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import models
from data.errors import CheckpointError
from data.files import sync
from models import ModelConfig
from pipeline.checkpoints.fragment_file import FragmentFile
from pipeline.checkpoints.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    Manifest,
    NewerSchema,
    check_size,
    committed,
    read_manifest,
    step_of,
    verify_file,
)

MOST_OPEN = 256  # files of a Reader at a time; a process may open 1,024 of all kinds on most systems

# ------------------------------------------------------------------------ which one to load


def verify(checkpoint: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises CheckpointError naming the file and what differs, OSError where the storage fails.
    """
    manifest = look_at(checkpoint)
    for name, record in manifest.files.items():
        actual = verify_file(checkpoint / name, record)
        # The head too: a digest may be right for a file that never was a checkpoint, such as a pickle.
        FragmentFile(checkpoint / name, actual).close()
    return manifest


def look_at(checkpoint: Path) -> Manifest:
    """Read the manifest, and look whether the folder holds the files that it names, in their sizes, and no others.

    Raises CheckpointError naming the file and what differs, OSError where the storage fails.
    """
    manifest = read_manifest(checkpoint)
    expected = set(manifest.files)
    # A file too many is refused like one too few: it is not what was committed.
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    if present != expected:
        missing = sorted(expected - present)
        extra = sorted(present - expected)
        raise Damaged(f"{checkpoint}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    for name, record in manifest.files.items():
        check_size(checkpoint / name, record)
    return manifest


class Chosen(NamedTuple):
    """Holds the checkpoint that an attempt goes on from."""

    folder: Path
    manifest: Manifest


def choose(folder: Path, attempt: int, say: Callable[[str], None], refused: int = 0) -> Chosen | None:
    """Return the newest checkpoint that is there with all its files; bad ones are renamed out of the way and named.

    None where nothing was ever committed. Leftovers of saves that never committed are swept here, before anything
    is written. `refused` counts those that this start has renamed before. Raises CheckpointError where the storage
    fails, where a checkpoint is of a newer schema, and where all are bad: to start from nothing again is a person's
    decision.
    """
    # No save of ours is in flight yet, so whatever is temporary is of an attempt that died or lost the run.
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        for checkpoint in committed(folder):
            try:
                return Chosen(checkpoint, look_at(checkpoint))
            except NewerSchema:
                raise
            except CheckpointError as error:
                refuse(checkpoint, attempt, error, say)
                refused += 1
    except OSError as error:
        raise cannot_read(error) from None
    if refused:
        raise CheckpointError(
            f"none of {refused} checkpoints in {folder} is whole; they are kept as bad-*\n"
            "  bring one back from a copy as step-*, or run the same command again to start from step 0"
        )
    return None


def refuse(checkpoint: Path, attempt: int, problem: object, say: Callable[[str], None]) -> None:
    """Rename a checkpoint out of the way: a person may still want to read it, and no later attempt tries it again."""
    aside = checkpoint.with_name(f"bad-{checkpoint.name.removeprefix('step-')}-{attempt:06d}")
    os.rename(checkpoint, aside)
    say(f"checkpoint refused: {problem}; kept as {aside.name}, trying the one before it")


def cannot_read(error: Exception) -> CheckpointError:
    """Return the error of a start that cannot reach its checkpoints, none of which is to blame."""
    return CheckpointError(f"cannot read the checkpoints: {error}\n  nothing was changed; see to the storage")


def choose_together(folder: Path, attempt: int, say: Callable[[str], None], refused: int = 0) -> Chosen | None:
    """Collective: rank 0 decides, every worker is told; None where there is nothing to load.

    Raises CheckpointError on every worker alike, with what `choose` found on rank 0.
    """
    # One decision before anything is built on it: no worker may start anew while the others resume.
    decision: list[Chosen | CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            decision = [choose(folder, attempt, say, refused)]
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

    def __init__(self, checkpoint: Path, files: Mapping[str, FileRecord], share: float | None = None) -> None:
        """Open all files of a manifest; or, with a `share`, each when something is not found in those before it.

        `share`, from 0 to 1, tells where among the files lies what will be asked for: near 0 for the first worker, near
        1 for the last. The files nearest to there are opened first: a worker of the world that saved them needs one
        file, of any other a few, and not those of all.

        Raises Damaged where a file that is opened is not that of its record, or none of fragments.
        """
        self.checkpoint = checkpoint
        self.records = files
        self.opened: dict[str, FragmentFile] = {}
        self.with_handle: list[FragmentFile] = []  # those of `opened` that hold a file descriptor, MOST_OPEN at most
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # by (parameter name, kind)
        by_rank = sorted(files)
        if share is None:
            self.unopened = deque(by_rank)
            while self.unopened:
                self.open_next()
        else:
            middle = share * len(files) - 0.5  # a rank, and perhaps a half
            rank_of = {file: rank for rank, file in enumerate(by_rank)}
            self.unopened = deque(sorted(by_rank, key=lambda file: abs(rank_of[file] - middle)))

    def open_next(self) -> None:
        """Open one more file, and note which pieces it holds; their data is read when it is asked for."""
        file = self.unopened.popleft()
        self.make_room()
        fragments = FragmentFile(self.checkpoint / file, self.records[file])
        self.with_handle.append(fragments)
        self.opened[file] = fragments
        for key, (_, count) in fragments.places.items():
            # From the right: a parameter's name may hold the separator, the other two cannot.
            name, kind, start = key.rsplit("|", 2)
            self.pieces.setdefault((name, kind), []).append(Piece(int(start), count, file, key))

    @property
    def hashed_bytes(self) -> int:
        """Count the bytes that were compared with digests."""
        return sum(fragments.hashed_bytes for fragments in self.opened.values())

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master or moment, flat fp32.

        Raises CheckpointError where the checkpoint holds no such parameter or not all of the range, Damaged where it is
        not what was committed.
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
                    self.read(piece, first, wanted[first - start : stop - start])
                    filled += stop - first
            looked_at = len(pieces)
            if filled >= count or not self.unopened:
                break
            self.open_next()
        check_complete(filled, count, name, kind)
        return wanted

    def read(self, piece: Piece, first: int, wanted: Tensor) -> None:
        """Fill a flat tensor with the elements of a parameter from its element `first` on, which lie in one piece."""
        fragments = self.opened[piece.file]
        if fragments.handle is None:
            self.make_room()
            self.with_handle.append(fragments)
        fragments.read(piece.key, first - piece.start, wanted)

    def make_room(self) -> None:
        """Give back all file descriptors where one more file would be too many: a save has a file per worker."""
        if len(self.with_handle) >= MOST_OPEN:
            for fragments in self.with_handle:
                fragments.close()
            self.with_handle.clear()

    def weights(self, shapes: Mapping[str, torch.Size], kind: str = "master") -> dict[str, Tensor]:
        """Return whole fp32 parameters (or their "average"), of no world size: what the next stage starts from.

        Raises CheckpointError as a call does; all files must be open.
        """
        flats = {name: torch.empty(shape.numel()) for name, shape in shapes.items()}
        wanted: dict[str, list[tuple[str, Piece]]] = {file: [] for file in self.opened}
        for name, flat in flats.items():
            pieces = self.pieces.get((name, kind), [])
            check_complete(sum(piece.length for piece in pieces), flat.numel(), name, kind)
            for piece in pieces:
                wanted[piece.file].append((name, piece))
        # File by file: by parameter, the files of a thousand workers would be opened again for each.
        for of_file in wanted.values():
            for name, piece in of_file:
                self.read(piece, piece.start, flats[name][piece.start : piece.start + piece.length])
        return {name: flats[name].view(shape) for name, shape in shapes.items()}


def check_complete(count: int, expected: int, name: str, kind: str) -> None:
    """Raise CheckpointError where a checkpoint holds fewer elements of a parameter than are asked for, or more."""
    # What is missing would be memory that was never set: weights of noise, and no error.
    if count != expected:
        raise CheckpointError(
            f"the checkpoint holds {count} of {expected} elements of {name} ({kind}); it belongs to another model"
        )


def export(folder: Path, model_config: ModelConfig) -> dict[str, Tensor]:
    """Return the whole fp32 weights of a committed checkpoint; the averaged ones where it holds them."""
    manifest = read_manifest(folder)
    # Only the shapes are wanted: on the meta device the model takes no memory.
    with torch.device("meta"):
        model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kind = "average" if manifest.config.get("polyak") else "master"
    return Reader(folder, manifest.files).weights(shapes, kind)


def prune(folder: Path, keep: int, keep_every: int, needed: Collection[int] = ()) -> list[Path]:
    """Delete old checkpoints: the newest `keep` (2 at least) stay, every multiple of `keep_every`, and steps `needed`.

    A folder is renamed, durably, before it is deleted: no crash leaves half a checkpoint under a valid name.
    Raises OSError where the renaming fails, and nothing is half deleted then; or in the end, where a renamed folder
    could not be deleted whole.
    """
    removed = []
    left: list[str] = []
    # Two at least: the newest may turn out to be damaged when it is read.
    for checkpoint in committed(folder)[max(keep, 2) :]:
        is_milestone = keep_every > 0 and step_of(checkpoint) % keep_every == 0
        if is_milestone or step_of(checkpoint) in needed:
            continue
        doomed = folder / f".tmp-old-{checkpoint.name}"
        os.rename(checkpoint, doomed)
        sync(folder)
        # What is left of it when this fails is swept by the next attempt, as any temporary folder.
        shutil.rmtree(doomed, ignore_errors=True)
        if doomed.exists():
            left.append(str(doomed))
        removed.append(checkpoint)
    if left:
        raise OSError(f"{', '.join(left)}: could not be deleted whole, the next start tries again")
    return removed
