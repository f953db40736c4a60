"""What a stage hands on, and the proof that it is still what the stage wrote: sealed records, digests of files.

1. A record (stage.json, task.json, provenance.json, done.json) is JSON that ends with the sha256 of itself
   (`write_record`).
2. A stage's done.json, or the provenance.json of imported or exported weights, holds bytes and sha256 of every file
   that is handed on: `digests`.
3. A reader of such a file compares it first: `check_files` for all files of a finished stage, `check_weights` for
   weights that something starts from. A difference is a DataError that names the file, who wrote it, and the way out.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"schema": 1, "key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, one entry a line (data/seal.py)
"""

import hashlib
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import CheckpointError, DataError
from data.files import path_in_errors, write_atomically
from data.seal import Unsealed, seal, unseal
from data.storage import Storage
from models.weights.folder import CLASSES, CONFIG, PREPROCESSING, WEIGHTS
from pipeline.checkpoints.manifest import FileRecord

SCHEMA = 1  # of a record
DONE = "done.json"
TASK = "task.json"
PROVENANCE = "provenance.json"
# Samples with their predictions, and counts by class, of the newest evaluation of a trained stage.
EXAMPLES = "examples.json"
# Stretches [first, stop) of steps, counted from 0, that were not finite and are not tried again.
EXCLUDED_STEPS = "excluded-steps.json"
# Of a trained stage: what is wanted and known of the samples behind its spikes (`health.on_spike: bisect`).
SEARCHES = "searches"
# Entry of a done.json, with the reason: a run of a sweep diverged.
DIVERGED = "diverged"
NEEDED_FILES = (WEIGHTS, CONFIG)  # of every folder of weights
BESIDE_WEIGHTS = (CLASSES, PREPROCESSING)  # only where they are known
WEIGHT_FILES = (*NEEDED_FILES, *BESIDE_WEIGHTS)
# What stages leave in their folders for others to read. Logs are not among them: they grow, nothing is made of them.
HANDED_ON = (*WEIGHT_FILES, "metrics.json", "evaluation.json", "report.txt", "stage.json", TASK, PROVENANCE)
SAY_AFTER_S = 5.0  # a check that takes longer is worth a line


# ------------------------------------------------------------------------ records


def write_record(path: Path, values: Mapping[str, object]) -> None:
    """Write a record that carries its own digest; it appears whole or not at all."""
    write_atomically(path, seal({"schema": SCHEMA, **values}))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record, and compare it with its digest. Raises DataError where it is torn or altered, OSError.

    The values are JSON, of the types that the writer of the record gave them.
    """
    try:
        values = unseal(path.read_bytes())
    except Unsealed as error:
        raise altered(path, str(error), None) from None
    values.pop("schema", None)
    return values


def read_done(folder: Path) -> dict[str, Any] | None:
    """Return what a finished stage left behind; None where it has not finished. Raises DataError."""
    path = folder / DONE
    if not path.exists():
        return None
    return read_record(path)


def started_s(folder: Path) -> float:
    """Return when a stage was first started, seconds since 1970."""
    return recorded_s(folder / "stage.json", "started")


def recorded_s(path: Path, entry: str) -> float:
    """Return a time that a record holds, seconds since 1970; of an altered record, or an older one, the file's own."""
    # A record that has changed is named where the stage's line is made.
    with suppress(DataError):
        moment = read_record(path).get(entry)
        if moment is not None:
            return moment
    return path.stat().st_mtime


# ------------------------------------------------------------------------ files


def digests(folder: Path, names: Iterable[str] = HANDED_ON) -> dict[str, FileRecord]:
    """Return size and sha256 of those of the files that the folder holds, by name."""
    records: dict[str, FileRecord] = {}
    for name in names:
        path = folder / name
        if path.exists():
            records[name] = digest_of(path)
    return records


def digest_of(path: Path) -> FileRecord:
    """Return a file's size and sha256, as they are read."""
    with path_in_errors(path), open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def record_weights(folder: Path, values: Mapping[str, object]) -> None:
    """Write the provenance.json of weights outside a campaign: where they come from, and their digests."""
    write_record(folder / PROVENANCE, {**values, "files": digests(folder, WEIGHT_FILES)})


class Covering(NamedTuple):
    """Holds the record that speaks for the files of a folder."""

    path: Path
    values: dict[str, Any]
    files: dict[str, FileRecord]


def covering_record(folder: Path) -> Covering | None:
    """Return the record that holds the digests of a folder's files; None where there is none. Raises DataError."""
    for name in (DONE, PROVENANCE):
        path = folder / name
        if not path.exists():
            continue
        values = read_record(path)
        if "files" in values:
            return Covering(path, values, values["files"])
    return None


def recorded_sha256(folder: Path) -> str | None:
    """Return the sha256 of a folder's weights as their maker recorded it; None where nobody did. Raises DataError."""
    covering = covering_record(folder)
    if covering is None or WEIGHTS not in covering.files:
        return None
    return covering.files[WEIGHTS]["sha256"]


def check_files(folder: Path, log: Callable[[str], None]) -> bool:
    """Compare every file that a folder hands on with its digest; False where the folder has no digests.

    `log` is told of a check that took long. Raises DataError for the first file that is not what was written.
    """
    began = time.monotonic()
    covering = covering_record(folder)
    if covering is None:
        return False
    total_bytes = 0
    for name, expected in covering.files.items():
        total_bytes += check_file(folder / name, expected, covering)["bytes"]
    log_if_slow(began, total_bytes, folder, log)
    return True


def log_if_slow(began: float, checked_bytes: int, folder: Path, log: Callable[[str], None]) -> None:
    """Say how long a check took, where a user may wonder why the command waits."""
    seconds = time.monotonic() - began
    if seconds > SAY_AFTER_S:
        log(f"checked {checked_bytes / 1e9:.1f} GB in {folder} in {seconds:.0f} s")


def check_file(path: Path, expected: FileRecord, covering: Covering) -> FileRecord:
    """Return the file's size and sha256. Raises DataError unless they are those of its record."""
    if not path.is_file():
        raise altered(path, f"it is missing, {covering.path.name} names it", covering)
    actual = digest_of(path)
    if actual["bytes"] != expected["bytes"]:
        difference = f"it has {actual['bytes']} bytes, {covering.path.name} says {expected['bytes']}"
        raise altered(path, difference, covering)
    if actual["sha256"] != expected["sha256"]:
        difference = f"its sha256 is {actual['sha256'][:12]}…, {covering.path.name} says {expected['sha256'][:12]}…"
        raise altered(path, difference, covering)
    return actual


class CheckedWeights(NamedTuple):
    """Holds what is known of weights that something is about to start from."""

    sha256: str  # of weights.safetensors, as it was read now
    is_verified: bool  # False where nothing says what it should be


def check_weights(folder: Path, log: Callable[[str], None]) -> CheckedWeights:
    """Read weights.safetensors and model.json once and compare both with what their maker recorded.

    `log` is told of weights that have no digests, and of a check that took long. Raises DataError where a file is
    missing or is not what was written, and OSError where it cannot be read.
    """
    began = time.monotonic()
    covering = covering_record(folder)
    is_verified = covering is not None and set(NEEDED_FILES) <= covering.files.keys()
    if covering is not None and is_verified:
        check_file(folder / CONFIG, covering.files[CONFIG], covering)
        # Class names and preprocessing that the record names, or none where it names none.
        for name in BESIDE_WEIGHTS:
            if name in covering.files:
                check_file(folder / name, covering.files[name], covering)
            elif (folder / name).exists():
                raise altered(folder / name, f"it is there, and {covering.path.name} does not name it", covering)
        weights = check_file(folder / WEIGHTS, covering.files[WEIGHTS], covering)
    else:
        if not (folder / WEIGHTS).is_file():
            way_out = "give a folder that holds one, or @stage"
            finished = sorted(path.parent for path in folder.glob(f"*/{WEIGHTS}"))
            if finished:
                way_out = f"give the folder of a stage: {', '.join(map(str, finished[:5]))}"
            elif folder.name == WEIGHTS:
                way_out = f"give its folder: {folder.parent}"
            elif folder.suffix in (".npz", ".safetensors") or (folder / "model.safetensors").is_file():
                way_out = f"weights of another project become ours by: python -m jobs import {folder} FOLDER"
            raise DataError(f"no {WEIGHTS} in {folder}\n  {way_out}")
        weights = digest_of(folder / WEIGHTS)
        log(f"unverified: {folder} has no digests, nobody would notice if its weights had changed")
    log_if_slow(began, weights["bytes"], folder, log)
    return CheckedWeights(weights["sha256"], is_verified)


def fetch_weights(storage: Storage, stage: str) -> None:
    """Make sure that this node has the weights that a finished stage of the run handed on, in the bytes of its record.

    Raises DataError where the stage has not finished or its files are not what it wrote, StorageError, OSError.
    """
    if storage.is_shared:
        return  # they are here, and the driver has compared them
    folder = storage.local / stage
    record = storage.read(f"{stage}/{DONE}")
    if record is None:
        raise DataError(f"{storage.address(stage)} has no {DONE}: the stage has not finished\n  run it first")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / DONE, record)
    files: dict[str, FileRecord] = read_record(folder / DONE).get("files", {})
    for name in WEIGHT_FILES:
        if name in files:
            try:
                storage.ensure_local(f"{stage}/{name}", files[name]["bytes"], files[name]["sha256"])
            except CheckpointError as error:
                raise DataError(str(error)) from None
    # Class names and preprocessing that an earlier owner has left here are not of these weights.
    for name in BESIDE_WEIGHTS:
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    check_weights(folder, lambda text: None)


# ------------------------------------------------------------------------ errors


def altered(path: Path, difference: str, covering: Covering | None) -> DataError:
    """Return the error about a file that is not what was written: which, what was expected, and the way out."""
    folder = path.parent
    copy = f"  bring {path.name} back from a copy"
    values = covering.values if covering is not None else {}
    if "imported" in values:
        expected = f"the file as it was imported from {values['imported']}"
        remedy = f"{copy}, or move {folder} away and import again"
    elif "exported" in values:
        expected = f"the file as it was exported from {values['exported']}"
        remedy = f"{copy}, or move {folder} away and export again"
    elif path.name == PROVENANCE and not (folder / "stage.json").exists():
        expected = "the record as it was written with these weights"
        remedy = f"{copy}, or move {folder} away and import again"
    else:
        # A stage without done.json is not finished: a trained one makes its outputs anew from its last checkpoint.
        expected = f"the file as the stage {folder.name} wrote it"
        bad_files = [str(path)]
        if path.name != DONE:
            bad_files.append(str(folder / DONE))
        remedy = (
            f"{copy}, or {shlex.join(['rm', '-f', *bad_files])}\n"
            "  and run its recipe again: the stage makes it anew, from its last checkpoint where it has one"
        )
    return DataError(f"{path} has changed: {difference}\n  expected {expected}\n{remedy}")
