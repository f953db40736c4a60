"""Record the origin of weights outside a run, and find out how weights were trained or imported."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.weights.folder import CONFIG, THEIR_CONFIG, foreign
from pipeline import artifacts
from pipeline.evaluation.any_weights import UNREADABLE
from pipeline.variables import restored


def record_weights(folder: Path, values: Mapping[str, object]) -> None:
    """Write provenance.json for weights outside a run: `values`, such as their origin, and the files' digests."""
    files = artifacts.digests(folder, artifacts.WEIGHT_FILES)
    artifacts.write_record(folder / artifacts.PROVENANCE, {**values, "files": files})


def recorded_loss(path: str) -> str | None:
    """Return the loss with which the weights' head was trained, sigmoid or softmax; None if it is not recorded.

    The loss is read from the record of the stage that trained the weights, also after a resize, an import or an export,
    or from the `problem_type` in a transformers folder. Raises DataError for an altered record.
    """

    def loss_of(weights: str) -> str | None:
        loss: str | None = None
        with suppress(OSError, ValueError, AttributeError):  # missing, or not a JSON object
            folder = Path(weights) if Path(weights).is_dir() else Path(weights).parent
            loss = foreign().loss_of(json.loads((folder / THEIR_CONFIG).read_text()))
        return loss

    return recorded(path, "loss", loss_of)


def recorded_form(path: str) -> dict[str, Any] | None:
    """Return the name, in another library, of the architecture of imported weights; None for all other weights.

    It is the result of `form_of` in models/extras/weights/formats.py, recorded by the import from which the weights'
    first stage started. Raises DataError for an altered record.
    """

    def foreign_form(weights: str) -> dict[str, Any] | None:
        try:
            return foreign().form_of(weights) or None
        except UNREADABLE:
            return None

    return recorded(path, "form", foreign_form)


def recorded(path: str, name: str, read: Callable[[str], Any]) -> Any:
    """Return the recorded value for our weights, or the value from `read` for another project's; None if unknown."""
    sha256: str | None = None  # digest of the weights that the previous stage started from
    while True:
        folder = Path(path)
        if not folder.is_dir():
            folder = folder.parent
        if ".npz" in Path(path).name or not (folder / CONFIG).is_file():
            return read(path)
        is_other = sha256 is not None and sha256 != artifacts.recorded_sha256(folder)
        if is_other or not (folder / artifacts.PROVENANCE).is_file():
            return None
        record = artifacts.read_record(folder / artifacts.PROVENANCE)
        value = record.get(name, record.get("config", {}).get(name))
        if value is not None or "init" not in record.get("inputs", {}):
            return value
        path = restored(record["inputs"]["init"]["path"], folder / artifacts.PROVENANCE)
        sha256 = record["inputs"]["init"]["digest"]
