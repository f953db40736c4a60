"""Loads weights in any supported format for evaluation, with their digest and everything recorded about them.

1. A folder written by this project is verified against its record; its digest is the sha256 of weights.safetensors.
2. An official .npz file, a .pth file, or a timm or Hugging Face folder or file has no record: its digest is the sha256
   of the file, combined with the sha256 of config.json and preprocessor_config.json next to it if they describe the
   model.
"""

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors

import models
from data.errors import DataError
from models.weights.folder import CONFIG, THEIR_CONFIG, THEIR_PREPROCESSOR, THEIR_WEIGHTS
from pipeline import artifacts
from pipeline.variables import restored

# Errors raised for unreadable files; torch, numpy, safetensors and our own checks raise different types.
UNREADABLE = (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError)


def is_foreign(path: str) -> bool:
    """Return whether a path contains another project's weights, rather than a folder written by a stage or `import`."""
    is_ours = (Path(path) / CONFIG).is_file()
    return not is_ours and files_of(path)[0].is_file()


def files_of(path: str) -> list[Path]:
    """Return another project's weights file and the files describing it; `file.npz:img` refers to a part of a file."""
    if ".npz" in Path(path).name:
        file = Path(path)
        if not file.exists():
            file = Path(path.rpartition(":")[0] or path)
        return [file]
    file = Path(path)
    if file.suffix == ".pth":
        return [file]
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    return [file, file.parent / THEIR_CONFIG, file.parent / THEIR_PREPROCESSOR]


def digest_of(path: str, log: Callable[[str], None]) -> str:
    """Return the digest of the weights at a path.

    Raises DataError if the weights are missing or altered, or OSError if they cannot be read.
    """
    file, *configs = files_of(path)
    if not is_foreign(path):
        return artifacts.check_weights(Path(path), log).sha256
    digest = artifacts.digest_of(file)["sha256"]
    # The files next to the weights determine the model and its pixels; the part after a colon selects the tensors.
    described = []
    for config in configs:
        if config.is_file():
            described.append(artifacts.digest_of(config)["sha256"])
    part = ""
    if not Path(path).exists():
        part = path.rpartition(":")[2]
    if not described and not part:
        return digest
    return hashlib.sha256(" ".join([digest, *described, part]).encode()).hexdigest()


def load(path: str, overrides: Mapping[str, object]) -> "models.Model":
    """Load the model at a path; `overrides` are options that the file does not determine.

    Raises DataError if the model cannot be loaded.
    """
    try:
        return models.load(path, **overrides)
    except UNREADABLE as error:
        # Some messages begin with the path.
        raise DataError(f"cannot load {path}: {str(error).removeprefix(f'{path} ')}") from None


def training_sets(path: str) -> tuple[list[dict[str, str | None]], str]:
    """Return the weights' training sets, each as {"path", "digest", "part_of"}, and the path at which the records end.

    That path is "" if the records are complete. The records are the provenance.json of the weights' stage, of the stage
    that it started from, and so on; they contain the digests that the data sets had during training. Imported and
    exported weights and other projects' weights have no such record. Raises DataError for an altered record.
    """
    sets: dict[str, dict[str, str | None]] = {}
    sha256: str | None = None  # digest of the weights that the previous stage started from
    while True:
        folder = Path(path)
        inputs = None
        if (folder / artifacts.PROVENANCE).is_file():
            path_of_record = folder / artifacts.PROVENANCE
            inputs = restored(artifacts.read_record(path_of_record).get("inputs"), path_of_record)
        # If other weights have replaced them, this record lists the sets of the other weights.
        is_other = sha256 is not None and sha256 != artifacts.recorded_sha256(folder)
        if inputs is None or is_other:
            return list(sets.values()), path
        for field, source in inputs.items():
            if field.startswith("data.") and field.endswith("train"):
                sets[source["digest"]] = source
        if "init" not in inputs:
            return list(sets.values()), ""
        path = inputs["init"]["path"]
        sha256 = inputs["init"]["digest"]


def recorded_preprocessing(path: str, size: tuple[int, int] | None = None) -> models.Preprocessing | None:
    """Return the preprocessing with which the weights were evaluated; None if unknown.

    `size` is the model's image size: if another library's file contains a different size, the preprocessing is scaled.
    Raises DataError if the recorded preprocessing is invalid or not supported.
    """
    try:
        preprocessing = models.load_preprocessing(path)
        if preprocessing is not None and size is not None:
            preprocessing = preprocessing.at_size(size)
        return preprocessing
    except UNREADABLE as error:
        raise DataError(f"cannot read the preprocessing of {path}: {error}") from None
