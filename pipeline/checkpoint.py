"""Checkpoints that exist only when they are whole, and one decision of all workers about which to load.

On disk, under `<stage>/checkpoints/`:
    step-0000001200/           committed: a valid MANIFEST.json lies in it, written last; "-000007" is appended where
                               another attempt has committed that step already
        rank-00000.safetensors   that worker's fragments, keys "name|kind|start"
        MANIFEST.json            schema, step, ledger, attempt, world, zero, files with bytes and sha256, …
    .tmp-0000001250-000007/    a save in flight, or one that died; swept by the next attempt
    bad-0000001100-000007/     quarantined: a digest did not match; never loaded, never deleted by us

The commit, in order: every worker serialises its fragments (the only part the training loop waits for), then in a
thread writes, hashes and fsyncs its file; the per-step status vector tells everybody that all are done; sizes and
digests are gathered; the lead checks that it still owns the run, writes the manifest, fsyncs, renames the folder and
fsyncs its parent.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CheckpointError
from data.files import make_folder, sync, write_durably
from pipeline.engine import Engine

SCHEMA = 1
MANIFEST = "MANIFEST.json"
NAME = re.compile(r"step-\d{10}(-\d{6})?")  # of a committed checkpoint
UNREADABLE = {errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR}  # this file is bad; any other error: the storage is


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself; plain data that prints."""

    step: int
    samples_seen: int
    updates: int  # optimizer updates: step less skipped ones
    ledger: str
    attempt: int
    world: int
    zero: int
    config: dict[str, Any]  # forbidden fields of the stage, for the diff at resume
    key: str  # of the stage
    code: str  # version of the code that wrote it
    bad_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name → {"bytes", "sha256"}
    schema: int = SCHEMA


def newest_attempt(directory: Path) -> int:
    """The highest attempt number claimed in a run directory; 0 where there is none."""
    return max((int(p.stem) for p in (directory / "attempts").glob("*.json") if p.stem.isdigit()), default=0)


class Saver:
    """One save in flight: `begin` costs the loop a serialisation, `finish` commits what the threads wrote."""

    def __init__(self, folder: Path, run: Path, attempt: int) -> None:
        self.folder, self.run, self.attempt = folder, run, attempt
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.thread: threading.Thread | None = None
        self.stalled_s = self.began = 0.0
        make_folder(folder, run)

    @property
    def in_flight(self) -> bool:
        return self.thread is not None

    @property
    def written(self) -> bool:
        """This worker's thread has ended, well or badly."""
        return self.thread is not None and not self.thread.is_alive()

    def begin(self, engine: Engine, manifest: Manifest) -> None:
        """Snapshot to host memory and start writing; the caller has finished the save before."""
        assert not self.in_flight
        self.began = time.monotonic()
        self.manifest = manifest
        self.temporary = self.folder / f".tmp-{manifest.step:010d}-{self.attempt:06d}"
        blob = self._snapshot({f"{f.name}|{k}|{f.start}": v for f in engine.fragments() for k, v in f.tensors.items()})
        self.name = f"rank-{dist.get_rank():05d}.safetensors"
        self.result: dict[str, Any] = {"error": "never ran"}
        self.thread = threading.Thread(target=self._write, args=(blob,), name="checkpoint", daemon=True)
        self.thread.start()
        self.stalled_s = time.monotonic() - self.began

    def _snapshot(self, views: dict[str, Tensor]) -> memoryview:
        """The views as a safetensors file in host memory: one copy, into memory that is kept for the next save."""
        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for key, view in views.items():
            assert view.dtype == torch.float32 and view.dim() == 1, (key, view.dtype, view.shape)
            offsets[key] = end, end + view.nbytes
            end += view.nbytes
        described = {
            k: {"dtype": "F32", "shape": [(b - a) // 4], "data_offsets": [a, b]} for k, (a, b) in offsets.items()
        }
        head = json.dumps(described).encode()
        head += b" " * (-len(head) % 8)  # so that the data begins aligned
        start = 8 + len(head)
        if self.buffer.numel() != start + end:
            self.buffer = torch.empty(start + end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.buffer[:start] = torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
        data = self.buffer[start:].view(torch.float32)
        for key, view in views.items():
            first, stop = offsets[key]
            data[first // 4 : stop // 4].copy_(view.detach())
        return self.buffer.numpy().data

    def _write(self, blob: memoryview) -> None:
        try:
            self.temporary.mkdir(exist_ok=True)
            write_durably(self.temporary / self.name, blob)
            self.result = {"name": self.name, "bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        except OSError as error:
            self.result = {"error": f"{self.name}: {error}"}

    def finish(self) -> Manifest | None:
        """Collective: wait for every worker's file and commit. Returns the manifest, or None on every worker where
        the save failed (what failed is in `failure`). Raises CheckpointError when the run has a newer owner."""
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, self.result)
        verdict: list[Any] = [None]
        if dist.get_rank() == 0:
            verdict = [self._commit(results)]
        dist.broadcast_object_list(verdict, src=0)
        committed, self.failure, fenced = verdict[0]
        if fenced:
            raise CheckpointError(self.failure)
        self.took_s = time.monotonic() - self.began
        return committed

    def _commit(self, results: list[dict[str, Any]]) -> tuple[Manifest | None, str, bool]:
        """The lead's part: (manifest, what failed, whether a newer attempt owns the run)."""
        try:
            errors = [r["error"] for r in results if "error" in r]
            newest = newest_attempt(self.run)
            if not errors and newest <= self.attempt:
                return (
                    self._publish({r["name"]: {"bytes": r["bytes"], "sha256": r["sha256"]} for r in results}),
                    "",
                    False,
                )
        except OSError as error:
            errors, newest = [str(error)], self.attempt
        shutil.rmtree(self.temporary, ignore_errors=True)
        if newest <= self.attempt:
            return None, "; ".join(errors), False
        message = (
            f"step {self.manifest.step} is not committed: attempt {newest} owns {self.run} now, this is "
            f"attempt {self.attempt}\n  nothing of the newer attempt was touched; this process should end"
        )
        return None, message, True

    def _publish(self, files: dict[str, dict[str, Any]]) -> Manifest:
        manifest = replace(self.manifest, files=files)
        write_durably(self.temporary / MANIFEST, seal(manifest).encode())
        sync(self.temporary)
        final = self.folder / f"step-{manifest.step:010d}"
        if final.exists():  # a former owner's, unfrozen after our start; the later attempt sorts before it
            final = final.with_name(f"{final.name}-{self.attempt:06d}")
        os.rename(self.temporary, final)  # refused by the kernel where another folder has come there meanwhile
        sync(self.folder)
        return manifest


def seal(manifest: Manifest) -> str:
    """The text of a manifest file: the values and their digest; there is exactly one text for given values."""
    body = json.dumps(asdict(manifest), indent=1, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises CheckpointError where the manifest is missing, torn, altered, of another step or newer than this code.

    Raises OSError where the storage fails, which says nothing about the checkpoint.
    """
    path = checkpoint / MANIFEST
    try:
        text = path.read_text()
        body = json.loads(text)["body"]
        if text != json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}):
            raise CheckpointError(f"{path} does not match its own digest")
        values = json.loads(body)
        if values["schema"] > SCHEMA:
            raise NewerSchema(
                f"{checkpoint} has schema {values['schema']}, this code reads up to {SCHEMA}\n"
                "  update Patchline to load it"
            )
        manifest = Manifest(**values)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is torn or not a manifest") from None
    if checkpoint.name.startswith("step-") and step_of(checkpoint) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, the folder's name says {step_of(checkpoint)}")
    return manifest


class NewerSchema(CheckpointError):
    """Written by a newer Patchline: sound, only not for this code; never quarantined."""


def _unreadable(path: Path, error: OSError) -> Exception:
    if error.errno in UNREADABLE:
        return CheckpointError(f"{path}: {error.strerror or error}")
    return error


def verify(checkpoint: Path) -> Manifest:
    """Read every byte and compare with the manifest. Raises CheckpointError naming the file and what differs,
    OSError where the storage fails."""
    manifest = read_manifest(checkpoint)
    found = {p.name for p in checkpoint.iterdir()} - {MANIFEST}
    if found != set(manifest.files):
        missing, extra = sorted(set(manifest.files) - found), sorted(found - set(manifest.files))
        raise CheckpointError(f"{checkpoint}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    for name, expected in manifest.files.items():
        _verify_file(checkpoint / name, expected)
    Reader(checkpoint, manifest.files)  # the headers: a digest made over a pickle does not make it a checkpoint
    return manifest


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():  # a pipe would keep us waiting for ever
        raise CheckpointError(f"{path} is not a regular file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path}: {size} bytes, the manifest says {expected['bytes']}")
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest != expected["sha256"]:
        raise CheckpointError(f"{path}: its sha256 is not the manifest's; the file has changed")


def committed(folder: Path) -> list[Path]:
    """Checkpoints whose folder was renamed into place, newest step first, then attempt (by name, never by time).

    Folders of other names, copies that somebody made say, are none.
    """
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a committed checkpoint's folder."""
    return int(checkpoint.name.split("-")[1])


def choose(folder: Path, attempt: int, say: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose every file verifies; bad ones are renamed out of the way and named.

    None where nothing was ever committed. Leftovers of saves that never committed are swept here, before anything
    is written. Raises CheckpointError where the storage fails, where a checkpoint is of a newer schema, and where
    all are bad: to start from nothing again is a person's decision.
    """
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = committed(folder)
    try:
        for checkpoint in found:
            try:
                return checkpoint, verify(checkpoint)
            except NewerSchema:
                raise
            except CheckpointError as error:
                aside = folder / f"bad-{checkpoint.name.removeprefix('step-')}-{attempt:06d}"
                os.rename(checkpoint, aside)
                say(f"checkpoint refused: {error}; kept as {aside.name}, trying the one before it")
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoints: {error}\n  nothing was changed; see to the storage"
        ) from None
    if found:
        raise CheckpointError(
            f"none of {len(found)} checkpoints in {folder} is whole; they are kept as bad-*\n"
            "  bring one back from a copy as step-*, or run the same command again to start from step 0"
        )
    return None


class Reader:
    """Random access to the fragments of one checkpoint, whatever world and stage wrote it."""

    def __init__(self, checkpoint: Path, files: Iterable[str]) -> None:
        self.handles: dict[str, Any] = {}
        self.pieces: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
        for file in sorted(files):
            try:
                self._open(checkpoint, file)
            except (safetensors.SafetensorError, ValueError) as error:
                raise CheckpointError(f"{checkpoint / file} holds no fragments: {error}") from None

    def _open(self, checkpoint: Path, file: str) -> None:
        self.handles[file] = handle = safetensors.safe_open(checkpoint / file, "pt")
        for key in handle.keys():  # noqa: SIM118 (not a mapping)
            name, kind, start = key.rsplit("|", 2)
            count = handle.get_slice(key).get_shape()[0]
            self.pieces.setdefault((name, kind), []).append((int(start), count, file, key))

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Elements [start, start + count) of one parameter's master or moment, flat fp32.

        Raises CheckpointError where the checkpoint holds no such parameter or not all of the range.
        """
        out = torch.empty(count)
        filled = 0
        for piece_start, piece_count, file, key in self.pieces.get((name, kind), ()):
            low, high = max(start, piece_start), min(start + count, piece_start + piece_count)
            if low < high:
                part = self.handles[file].get_slice(key)[low - piece_start : high - piece_start]
                out[low - start : high - start] = part
                filled += high - low
        if filled != count:
            raise CheckpointError(
                f"the checkpoint holds {filled} of {count} elements of {name} ({kind}); it belongs to another model"
            )
        return out

    def weights(self, shapes: Mapping[str, torch.Size], kind: str = "master") -> dict[str, Tensor]:
        """Whole fp32 parameters (or their "average"), the world-size-free weights that the next stage starts from."""
        return {name: self(name, kind, 0, shape.numel()).view(shape) for name, shape in shapes.items()}


def restore(engine: Engine, folder: Path, attempt: int, say: Callable[[str], None]) -> Manifest | None:
    """Collective: the lead verifies and decides, everybody loads that one; None where there is nothing to load."""
    decision: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            decision = [choose(folder, attempt, say)]
        except CheckpointError as error:
            decision = [error]
    dist.broadcast_object_list(decision, src=0)
    if decision[0] is None:
        return None
    if isinstance(decision[0], CheckpointError):
        raise decision[0]
    checkpoint, manifest = decision[0]
    engine.restore(Reader(checkpoint, manifest.files))
    engine.updates = manifest.updates
    return manifest


def prune(folder: Path, keep: int, keep_every: int) -> list[Path]:
    """Delete old checkpoints: the newest `keep` (2 at least) stay, and every multiple of `keep_every` steps.

    A folder is renamed, durably, before it is deleted: no crash leaves half a checkpoint under a valid name.
    Raises OSError where the renaming fails; nothing is half deleted then.
    """
    removed = []
    for checkpoint in committed(folder)[max(keep, 2) :]:
        if not (keep_every and step_of(checkpoint) % keep_every == 0):
            doomed = folder / f".tmp-old-{checkpoint.name}"
            os.rename(checkpoint, doomed)
            sync(folder)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(checkpoint)
    return removed
