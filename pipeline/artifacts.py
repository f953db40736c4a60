"""Writes the records of a stage, and verifies that the stage's records and output files have not changed.

1. A record (stage.json, task.json, provenance.json, done.json) is JSON that ends with its own sha256 (`write_record`).
2. A stage's done.json, or the provenance.json of imported or exported weights, lists the size and sha256 of every
   output file (`digests`).
3. Files are verified before they are read: `check_files` verifies all files of a finished stage, `check_weights`
   verifies initial weights. A mismatch raises DataError, which names the file, what wrote it, and the remedy.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"schema": 1, "key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, one entry per line (data/seal.py)
"""

import hashlib
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import models
from data.checks import check_file_name
from data.errors import CheckpointError, DataError
from data.files import path_in_errors, write_atomically
from data.seal import Unsealed, check_schema, seal, unseal
from data.storage import Storage
from models.weights.folder import CLASSES, CONFIG, PREPROCESSING, WEIGHTS
from pipeline.checkpoints.manifest import FileRecord

if TYPE_CHECKING:  # importing torch takes a second, and records do not need it
    from torch import Tensor

SCHEMA = 1  # version of the record format
DONE = "done.json"
TASK = "task.json"
PROVENANCE = "provenance.json"
# Results of a trained stage's latest evaluation: some samples with their predictions, and counts per class.
EXAMPLES = "examples.json"
# Excluded ranges [first, stop) of steps, counted from 0, because of non-finite gradients.
EXCLUDED_STEPS = "excluded-steps.json"
# Folder in a trained stage with the requests and results of spike searches, which find the samples that cause a
# gradient spike (`health.on_spike: bisect`).
SEARCHES = "searches"
# Folder in a trained stage with the requests and results of evaluations on other workers (`evaluate_on: spare`).
EVALUATIONS = "evaluations"
REQUESTED = ".requested"  # end of the name of a request
# Key in done.json: why this run of a sweep diverged.
DIVERGED = "diverged"
REQUIRED_FILES = (WEIGHTS, CONFIG)  # required in every folder of weights
OPTIONAL_FILES = (CLASSES, PREPROCESSING)  # optional files in a folder of weights
WEIGHT_FILES = (*REQUIRED_FILES, *OPTIONAL_FILES)
# Output files that other stages and commands read. Logs are excluded: they keep growing, and no result depends on them.
OUTPUT_FILES = (*WEIGHT_FILES, "metrics.json", "evaluation.json", "report.txt", "stage.json", TASK, PROVENANCE)
LOG_AFTER_S = 5.0  # log a verification that takes longer, in seconds


# ------------------------------------------------------------------------ records


def write_record(path: Path, values: Mapping[str, object]) -> None:
    """Write a record atomically, sealed with its own sha256."""
    write_atomically(path, seal({"schema": SCHEMA, **values}))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record and verify its digest.

    The values are plain JSON types. Raises DataError if the record is truncated, altered or of a newer version, or
    OSError if it is unreadable.
    """
    try:
        values = unseal(path.read_bytes())
        check_schema(path, values.pop("schema", SCHEMA), SCHEMA)
        # Callers join these file names to the record's folder, so they must not lead outside it.
        files = values.get("files")
        for name in files if isinstance(files, dict) else ():
            check_file_name(name, str(path))
    except Unsealed as error:
        raise altered(path, str(error), None) from None
    return values


def read_done(folder: Path) -> dict[str, Any] | None:
    """Return the content of a stage's done.json; None if the stage has not finished.

    Raises DataError if the file was altered.
    """
    path = folder / DONE
    if not path.exists():
        return None
    return read_record(path)


def requested_steps(stage: Path) -> list[int]:
    """Return the steps with a pending evaluation request, the oldest first."""
    steps = []
    for path in (stage / EVALUATIONS).glob(f"step-*{REQUESTED}"):
        steps.append(int(path.stem.removeprefix("step-")))
    return sorted(steps)


# ------------------------------------------------------------------------ files


def digests(folder: Path, names: Iterable[str] = OUTPUT_FILES) -> dict[str, FileRecord]:
    """Return the size and sha256 of each of these files in the folder; missing files are omitted."""
    records: dict[str, FileRecord] = {}
    for name in names:
        path = folder / name
        if path.exists():
            records[name] = digest_of(path)
    return records


def digest_of(path: Path) -> FileRecord:
    """Read a file and return its size and sha256."""
    with path_in_errors(path), open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


class DigestRecord(NamedTuple):
    """The record (done.json or provenance.json) that lists the digests of a folder's files."""

    path: Path
    values: dict[str, Any]
    files: dict[str, FileRecord]


def digest_record(folder: Path) -> DigestRecord | None:
    """Return the record with the digests of a folder's files, or None if the folder has no record.

    Raises DataError if the record was altered.
    """
    for name in (DONE, PROVENANCE):
        path = folder / name
        if not path.exists():
            continue
        values = read_record(path)
        if "files" in values:
            return DigestRecord(path, values, values["files"])
    return None


def recorded_sha256(folder: Path) -> str | None:
    """Return the recorded sha256 of a folder's weights, or None if no record contains it.

    Raises DataError if the record was altered.
    """
    covering = digest_record(folder)
    if covering is None or WEIGHTS not in covering.files:
        return None
    return covering.files[WEIGHTS]["sha256"]


def check_files(folder: Path, log: Callable[[str], None]) -> bool:
    """Verify every output file recorded for a folder against its digest; return False if no digests are recorded.

    Logs a line if the verification took long. Raises DataError for the first altered file.
    """
    began = time.monotonic()
    covering = digest_record(folder)
    if covering is None:
        return False
    total_bytes = 0
    for name, expected in covering.files.items():
        total_bytes += check_file(folder / name, expected, covering)["bytes"]
    log_if_slow(began, total_bytes, folder, log)
    return True


def log_if_slow(began: float, checked_bytes: int, folder: Path, log: Callable[[str], None]) -> None:
    """Log a verification that took more than a few seconds, to explain the delay to the user."""
    seconds = time.monotonic() - began
    if seconds > LOG_AFTER_S:
        log(f"verified {checked_bytes / 1e9:.1f} GB in {folder} in {seconds:.0f} s")


def check_file(path: Path, expected: FileRecord, covering: DigestRecord) -> FileRecord:
    """Return a file's size and sha256. Raises DataError if they differ from the values in the record, `expected`."""
    if not path.is_file():
        raise altered(path, f"it is missing, although {covering.path.name} lists it", covering)
    actual = digest_of(path)
    if actual["bytes"] != expected["bytes"]:
        difference = f"it has {actual['bytes']} bytes, but {covering.path.name} lists {expected['bytes']}"
        raise altered(path, difference, covering)
    if actual["sha256"] != expected["sha256"]:
        difference = (
            f"its sha256 is {actual['sha256'][:12]}…, but {covering.path.name} lists {expected['sha256'][:12]}…"
        )
        raise altered(path, difference, covering)
    return actual


class CheckedWeights(NamedTuple):
    """The result of verifying initial weights."""

    sha256: str  # digest of weights.safetensors, computed from the file just now
    is_verified: bool  # False if no expected digest is recorded


def check_weights(folder: Path, log: Callable[[str], None]) -> CheckedWeights:
    """Verify weights.safetensors and model.json against their recorded digests, reading each file once.

    Logs a line if no digests are recorded or if the verification took long. Raises DataError if a file is missing or
    altered, or OSError if it cannot be read.
    """
    began = time.monotonic()
    covering = digest_record(folder)
    is_verified = covering is not None and set(REQUIRED_FILES) <= covering.files.keys()
    if covering is not None and is_verified:
        check_file(folder / CONFIG, covering.files[CONFIG], covering)
        # Class names and preprocessing are optional, but must be absent if the record does not list them.
        for name in OPTIONAL_FILES:
            if name in covering.files:
                check_file(folder / name, covering.files[name], covering)
            elif (folder / name).exists():
                raise altered(folder / name, f"it exists, but {covering.path.name} does not list it", covering)
        weights = check_file(folder / WEIGHTS, covering.files[WEIGHTS], covering)
    else:
        if not (folder / WEIGHTS).is_file():
            way_out = "pass a folder that contains this file, or @stage"
            finished = sorted(path.parent for path in folder.glob(f"*/{WEIGHTS}"))
            if finished:
                way_out = f"pass the folder of a stage: {', '.join(map(str, finished[:5]))}"
            elif folder.name == WEIGHTS:
                way_out = f"pass its folder: {folder.parent}"
            elif folder.suffix in (".npz", ".safetensors") or (folder / "model.safetensors").is_file():
                place = shlex.quote(str(folder))
                way_out = f"to use the weights of another project, import them: python -m jobs import {place} FOLDER"
            raise DataError(f"no {WEIGHTS} in {folder}\n  {way_out}")
        if not (folder / CONFIG).is_file():
            raise DataError(
                f"{folder} has no {CONFIG}, so the architecture of the weights is unknown\n"
                "  expected a folder written by a stage or by python -m jobs import, or @stage"
            )
        weights = digest_of(folder / WEIGHTS)
        log(f"unverified: {folder} has no recorded digests, so changes to its weights cannot be detected")
    log_if_slow(began, weights["bytes"], folder, log)
    return CheckedWeights(weights["sha256"], is_verified)


def load_weights(folder: Path) -> tuple[dict[str, "Tensor"], models.ModelConfig]:
    """Load the state dict and the model config from a folder of weights in Patchline's format.

    Raises DataError if the files are invalid, do not match, or contain NaN or infinity, or OSError if a file cannot be
    read.
    """
    try:
        return models.load_weights(folder)
    except ValueError as error:
        raise DataError(f"cannot load {folder}: {error}") from None


def fetch_weights(storage: Storage, stage: str) -> None:
    """Download the exported weights of a finished stage to this node if necessary, and verify their digests.

    Raises DataError if the stage has not finished or its files are altered, or StorageError or OSError if the storage
    fails.
    """
    if storage.is_shared:
        return  # every node can read the files, and the driver has already verified them
    folder = storage.local / stage
    record = storage.read(f"{stage}/{DONE}")
    if record is None:
        raise DataError(
            f"{storage.address(stage)} has no {DONE}, because the stage has not finished\n  run the stage first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / DONE, record)
    files: dict[str, FileRecord] = read_record(folder / DONE).get("files", {})
    for name in WEIGHT_FILES:
        if name in files:
            try:
                storage.ensure_local(f"{stage}/{name}", files[name]["bytes"], files[name]["sha256"])
            except CheckpointError as error:
                raise DataError(str(error)) from None
    # Delete stale class names and preprocessing, left on this node by a previous owner of the run.
    for name in OPTIONAL_FILES:
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    check_weights(folder, lambda text: None)


# ------------------------------------------------------------------------ errors


def altered(path: Path, difference: str, covering: DigestRecord | None) -> DataError:
    """Build the error for an altered file; its message says what was expected and how to recover."""
    folder = path.parent
    copy = f"  restore {path.name} from a copy"
    values = covering.values if covering is not None else {}
    if "imported" in values:
        expected = f"the file that was imported from {values['imported']}"
        remedy = f"{copy}, or move {folder} away and import again"
    elif "exported" in values:
        expected = f"the file that was exported from {values['exported']}"
        remedy = f"{copy}, or move {folder} away and export again"
    elif path.name == PROVENANCE and not (folder / "stage.json").exists():
        expected = "the original record of these weights"
        remedy = f"{copy}, or move {folder} away and import again"
    else:
        # Without done.json a stage is unfinished: a training stage then exports its files again from its last
        # checkpoint.
        expected = f"the file that stage {folder.name} wrote"
        bad_files = [str(path)]
        if path.name != DONE:
            bad_files.append(str(folder / DONE))
        remedy = (
            f"{copy}, or {shlex.join(['rm', '-f', *bad_files])}\n"
            "  and run its recipe again: the stage recreates the file, from its last checkpoint if it has one"
        )
    return DataError(f"{path} has changed: {difference}\n  expected {expected}\n{remedy}")
