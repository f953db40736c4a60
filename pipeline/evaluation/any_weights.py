"""Weights to evaluate, of any kind that the project reads: their digest, their model and the names of its classes.

1. A folder of ours is compared with what its maker recorded; its digest is the sha256 of weights.safetensors.
2. Weights of others are read where they take pixels from −1 to 1, as ours do; other means and deviations are refused.
3. An official .npz, and a timm or Hugging Face folder or file, have no record: their digest is the sha256 of the file,
   with that of the config.json beside it where that tells the model.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors

import models
from data.errors import DataError
from models.weights.folder import CONFIG, THEIR_CONFIG, THEIR_PREPROCESSOR, THEIR_WEIGHTS
from pipeline import artifacts

# Whatever refuses a file: torch, numpy, safetensors and our own checks each raise their own.
UNREADABLE = (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError)


def is_foreign(path: str) -> bool:
    """Return whether there are weights of another project at a path, and no folder that a stage or `import` wrote."""
    is_ours = (Path(path) / CONFIG).is_file()
    return not is_ours and files_of(path)[0].is_file()


def files_of(path: str) -> list[Path]:
    """Return the file of foreign weights, and the config beside it; `file.npz:img` names a part of a file."""
    if ".npz" in Path(path).name:
        file = Path(path)
        if not file.exists():
            file = Path(path.rpartition(":")[0] or path)
        return [file]
    file = Path(path)
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    return [file, file.parent / THEIR_CONFIG]


def digest_of(path: str, log: Callable[[str], None]) -> str:
    """Return the digest of weights. Raises DataError where they are missing or not what their maker wrote, OSError."""
    if not is_foreign(path):
        return artifacts.check_weights(Path(path), log).sha256
    file, *beside = files_of(path)
    digest = artifacts.digest_of(file)["sha256"]
    # The config beside the file decides the model, and the part after a colon which tensors are read.
    described = []
    for config in beside:
        if config.is_file():
            described.append(artifacts.digest_of(config)["sha256"])
    part = ""
    if not Path(path).exists():
        part = path.rpartition(":")[2]
    if not described and not part:
        return digest
    return hashlib.sha256(" ".join([digest, *described, part]).encode()).hexdigest()


def load(path: str, overrides: Mapping[str, object]) -> "models.Model":
    """Load the model behind a path; `overrides` are what its file cannot tell. Raises DataError, which names it."""
    refuse_other_pixels(path)
    try:
        return models.load(path, **overrides)
    except UNREADABLE as error:
        raise DataError(f"cannot load {path}: {error}") from None


def training_sets(path: str) -> tuple[list[dict[str, str | None]], str]:
    """Return the sets that weights were trained on, {"path", "digest", "part_of"} each, and where the records end ("":
    nowhere).

    The records are the provenance.json of the weights' stage, of the stage that it started from, and so on; they hold
    the digests that the sets had then. Weights of others, and imported and exported ones, have no such record. Raises
    DataError for an altered record.
    """
    sets: dict[str, dict[str, str | None]] = {}
    sha256: str | None = None  # of the weights that the stage before has started from
    while True:
        folder = Path(path)
        inputs = None
        if (folder / artifacts.PROVENANCE).is_file():
            inputs = artifacts.read_record(folder / artifacts.PROVENANCE).get("inputs")
        # Other weights may lie there by now, whose sets are not these.
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


def recorded_preprocessing(path: str) -> models.Preprocessing | None:
    """Return how the pixels were made that weights were judged on; None where nothing says so. Raises DataError."""
    try:
        return models.load_preprocessing(path)
    except UNREADABLE as error:
        raise DataError(f"cannot read the preprocessing of {path}: {error}") from None


def refuse_other_pixels(path: str) -> None:
    """Raise DataError where the files beside weights of others say that pixels are not brought to −1 … 1.

    The values of such weights would be wrong, and nothing would show it.
    """
    if not is_foreign(path) or ".npz" in Path(path).name:
        return
    folder = Path(path)
    if not folder.is_dir():
        folder = folder.parent
    for name, section in ((THEIR_CONFIG, "pretrained_cfg"), (THEIR_PREPROCESSOR, "")):
        try:
            described = json.loads((folder / name).read_text())
            values = described
            if section:
                values = described.get(section, {})
            means = values.get("mean", values.get("image_mean")) or [0.5]
            deviations = values.get("std", values.get("image_std")) or [0.5]
        except (OSError, ValueError, AttributeError):  # there is none, or it is no JSON object
            continue
        if set(means) | set(deviations) != {0.5}:
            raise DataError(
                f"{folder / name}: pixels are normalised by mean {means} and deviation {deviations}\n"
                "  expected 0.5 and 0.5, pixels from −1 to 1, as everything here makes them: values would be wrong\n"
                "  give weights that take such pixels"
            )
