"""Checkpoints that exist only when they are whole, and one decision of all workers about which to load.

On disk, under `<stage>/checkpoints/`:
    step-0000001200/           committed: a valid MANIFEST.json lies in it, written last
        rank-00000.safetensors   that worker's fragments, keys "name|kind|start"
        MANIFEST.json            schema, step, ledger, attempt, world, zero, files with bytes and sha256, …
    .tmp-0000001250-000007/    a save in flight, or one that died; swept by the next attempt
    bad-0000001100-000007/     quarantined: a digest did not match; never loaded, never deleted by us

The commit, in order: every worker serialises its fragments (the only part the training loop waits for), then in a
thread writes, hashes and fsyncs its file; the per-step status vector tells everybody that all are done; sizes and
digests are gathered; the lead checks that it still owns the run, writes the manifest, fsyncs, renames the folder and
fsyncs its parent.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine import Engine
from pipeline.errors import CheckpointError

SCHEMA = 1
MANIFEST = "MANIFEST.json"


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


def write_file(path: Path, blob: bytes) -> None:
    """Write and fsync; the name is not final, the caller renames the folder."""
    with open(path, "wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`, visible only when whole and durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_file(temporary, text.encode())
    os.replace(temporary, path)
    sync_folder(path.parent)


def newest_attempt(directory: Path) -> int:
    """The highest attempt number claimed in a run directory; 0 where there is none."""
    return max((int(p.stem) for p in (directory / "attempts").glob("*.json")), default=0)


class Saver:
    """One save in flight: `begin` costs the loop a serialisation, `finish` commits what the threads wrote."""

    def __init__(self, folder: Path, run: Path, attempt: int) -> None:
        self.folder, self.run, self.attempt = folder, run, attempt
        self.thread: threading.Thread | None = None
        self.stalled_s = self.began = 0.0
        folder.mkdir(parents=True, exist_ok=True)

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
        tensors = {
            f"{f.name}|{kind}|{f.start}": view.detach().contiguous().cpu()
            for f in engine.fragments()
            for kind, view in f.tensors.items()
        }
        blob = safetensors.torch.save(tensors)
        self.name = f"rank-{dist.get_rank():05d}.safetensors"
        self.result: dict[str, Any] = {"error": "never ran"}
        self.thread = threading.Thread(target=self._write, args=(blob,), name="checkpoint", daemon=True)
        self.thread.start()
        self.stalled_s = time.monotonic() - self.began

    def _write(self, blob: bytes) -> None:
        try:
            self.temporary.mkdir(exist_ok=True)
            write_file(self.temporary / self.name, blob)
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
        errors = [r["error"] for r in results if "error" in r]
        if errors:
            shutil.rmtree(self.temporary, ignore_errors=True)
            return None, "; ".join(errors), False
        newest = newest_attempt(self.run)
        if newest > self.attempt:
            shutil.rmtree(self.temporary, ignore_errors=True)
            message = (
                f"step {self.manifest.step} is not committed: attempt {newest} owns {self.run} now, this is "
                f"attempt {self.attempt}\n  nothing of the newer attempt was touched; this process should end"
            )
            return None, message, True
        files = {r["name"]: {"bytes": r["bytes"], "sha256": r["sha256"]} for r in results}
        manifest = Manifest(**{**asdict(self.manifest), "files": files})
        final = self.folder / f"step-{manifest.step:010d}"
        try:
            body = json.dumps(asdict(manifest), indent=1, sort_keys=True)
            write_file(self.temporary / MANIFEST, json.dumps({"sha256": _sha(body), "body": body}).encode())
            sync_folder(self.temporary)
            if final.exists():  # this step was saved before, and lost to a quarantine race or replayed: same content
                shutil.rmtree(self.temporary)
            else:
                os.rename(self.temporary, final)
            sync_folder(self.folder)
        except OSError as error:
            return None, f"{MANIFEST}: {error}", False
        return manifest, "", False


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises CheckpointError where the manifest is missing, torn, altered or newer than this code."""
    try:
        envelope = json.loads((checkpoint / MANIFEST).read_text())
        body = envelope["body"]
        if _sha(body) != envelope["sha256"]:
            raise CheckpointError(f"{checkpoint / MANIFEST} does not match its own digest")
        values = json.loads(body)
    except OSError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{checkpoint / MANIFEST} is torn or not a manifest") from None
    if values["schema"] > SCHEMA:
        raise CheckpointError(
            f"{checkpoint} has schema {values['schema']}, this code reads up to {SCHEMA}\n  update Patchline to load it"
        )
    return Manifest(**values)


def verify(checkpoint: Path) -> Manifest:
    """Read every byte and compare with the manifest. Raises CheckpointError naming the file and what differs."""
    manifest = read_manifest(checkpoint)
    found = {p.name for p in checkpoint.iterdir()} - {MANIFEST}
    if found != set(manifest.files):
        missing, extra = sorted(set(manifest.files) - found), sorted(found - set(manifest.files))
        raise CheckpointError(f"{checkpoint}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    for name, expected in manifest.files.items():
        digest, size = hashlib.sha256(), 0
        with open(checkpoint / name, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                size += len(block)
        if size != expected["bytes"]:
            raise CheckpointError(f"{checkpoint / name}: {size} bytes, the manifest says {expected['bytes']}")
        if digest.hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{checkpoint / name}: its sha256 is not the manifest's; the file has changed")
    return manifest


def committed(folder: Path) -> list[Path]:
    """Checkpoints whose folder was renamed into place, newest step first (by name, never by time)."""
    return sorted(folder.glob("step-*"), reverse=True)


def choose(folder: Path, attempt: int, say: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose every file verifies; bad ones are renamed out of the way and named.

    Leftovers of saves that never committed are swept here, before anything is written.
    """
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for checkpoint in committed(folder):
        try:
            return checkpoint, verify(checkpoint)
        except CheckpointError as error:
            if "has schema" in str(error):
                raise
            aside = folder / f"bad-{checkpoint.name.removeprefix('step-')}-{attempt:06d}"
            os.rename(checkpoint, aside)
            say(f"checkpoint refused: {error}; kept as {aside.name}, trying the one before it")
    return None


class Reader:
    """Random access to the fragments of one checkpoint, whatever world and stage wrote it."""

    def __init__(self, checkpoint: Path, files: Iterable[str]) -> None:
        self.handles = {name: safetensors.safe_open(checkpoint / name, "pt") for name in sorted(files)}
        self.pieces: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
        for file, handle in self.handles.items():
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

    A folder is renamed before it is deleted, so that a crash leaves no half checkpoint under a valid name.
    """
    removed = []
    for checkpoint in committed(folder)[max(keep, 2) :]:
        step = int(checkpoint.name.removeprefix("step-"))
        if not (keep_every and step % keep_every == 0):
            doomed = folder / f".tmp-old-{checkpoint.name}"
            os.rename(checkpoint, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(checkpoint)
    return removed
