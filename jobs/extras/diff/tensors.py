"""Compares the tensors of two checkpoints or weights, for `patchline diff MINE OTHER`.

1. Two checkpoints: the fields of their manifests, the master weights and the moments of the optimizer.
2. Otherwise, for example a checkpoint and exported weights: the weights.

    runs/digits/pretrain/step-50 → runs/digits/pretrain/step-100
      step: 50 → 100
      head.bias master: largest difference 0.0123
      0 of 120 tensors are equal bit for bit
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UsageError
from jobs.answer import Document
from jobs.commands.campaigns import shipped
from jobs.extras.checkpoint_names import names_checkpoint
from jobs.extras.named_weights import find_weights
from jobs.extras.stored_runs import opened
from jobs.stage_folders import stage_at
from jobs.terminal import activity
from models.weights.folder import CONFIG, THEIR_WEIGHTS
from pipeline.config import differences

if TYPE_CHECKING:  # imports torch, which takes seconds and would delay errors in the arguments
    from torch import Tensor

WEIGHTS = "weights"
FILES = (".safetensors", ".npz", ".pth")


@dataclass(frozen=True)
class Tensors:
    """The tensors of one side: states of parameters, such as ("head.bias", "master")."""

    states: dict[tuple[str, str], Callable[[], "Tensor"]]
    manifest: dict[str, Any]  # {} for weights


def has_tensors(path: str) -> bool:
    """Return whether a path names a checkpoint or weights, rather than a recipe, a run or a stage."""
    folder = Path(path)
    if names_checkpoint(path):
        return True
    if folder.is_dir():
        return stage_at(folder) is None and ((folder / CONFIG).exists() or (folder / THEIR_WEIGHTS).exists())
    return folder.suffix in FILES or ".npz:" in folder.name


def compare(mine: str, other: str, overrides: list[str]) -> Document:
    """Return the differences between the tensors of two checkpoints or weights. Raises UsageError for overrides."""
    if overrides:
        raise UsageError(
            f"overrides apply only to recipes, but {mine} or {other} has tensors\n  remove {' '.join(overrides)}"
        )
    for path, counterpart in ((mine, other), (other, mine)):
        if path.endswith(".yaml") or path in shipped():
            raise UsageError(
                f"{path} is a recipe, but {counterpart} has tensors\n"
                "  expected two recipes, runs or stages to compare their settings, or two checkpoints or weights"
            )
    is_exact = names_checkpoint(mine) and names_checkpoint(other)
    with tensors_of(mine, with_moments=is_exact) as first, tensors_of(other, with_moments=is_exact) as second:
        activity.now(f"diff: comparing {mine} and {other} …")
        rows: list[dict[str, Any]] = []
        equal = 0
        states = sorted(first.states.keys() | second.states.keys())
        for state in states:
            difference = difference_of(first.states.get(state), second.states.get(state))
            if difference:
                rows.append({"name": state[0], "kind": state[1], **difference})
            else:
                equal += 1
        return {
            "content": "tensors",
            "mine": mine,
            "other": other,
            "manifest": list(differences(first.manifest, second.manifest).values()) if is_exact else [],
            "tensors": rows,
            "equal": equal,
            "compared": len(states),
        }


def difference_of(
    read_first: Callable[[], "Tensor"] | None, read_second: Callable[[], "Tensor"] | None
) -> dict[str, Any]:
    """Return how two tensors differ; {} if they are equal bit for bit."""
    import torch

    if read_first is None:
        return {"difference": "only in the second"}
    if read_second is None:
        return {"difference": "only in the first"}
    first = read_first()
    second = read_second()
    if first.shape != second.shape:
        return {"difference": f"shapes {list(first.shape)} and {list(second.shape)}"}
    # Compare bytes: 0 and −0 count as different, and equal NaNs as equal.
    if first.dtype == second.dtype and torch.equal(*(side.flatten().view(torch.uint8) for side in (first, second))):
        return {}
    row: dict[str, Any] = {"largest": float((first.float() - second.float()).abs().max())}
    if first.dtype != second.dtype:
        row["difference"] = f"{first.dtype} and {second.dtype}".replace("torch.", "")
    return row


@contextmanager
def tensors_of(path: str, *, with_moments: bool) -> Iterator[Tensors]:
    """Yield the tensors of a checkpoint or weights; `with_moments`, all states in a checkpoint, else the weights."""
    if not names_checkpoint(path):
        from pipeline.evaluation import any_weights

        model = any_weights.load(find_weights(path), {})
        yield Tensors({(name, WEIGHTS): value.detach for name, value in model.named_parameters()}, {})
        return

    from jobs.extras.checkpoints.contents import model_of, newest_verified, whole_state
    from pipeline.checkpoints.manifest import read_manifest
    from pipeline.checkpoints.reader import Reader, export

    with opened(path) as run:
        # Verify first, because a damaged byte would look like a difference in training.
        folder = newest_verified(run)
        manifest = read_manifest(folder)
        fields = asdict(manifest)
        # The list of files depends on the number of workers, even if the contents are equal.
        del fields["files"]
        states: dict[tuple[str, str], Callable[[], Tensor]] = {}
        if with_moments:
            # Compare whole parameters, because the checkpoints can come from different numbers of workers.
            reader = Reader(folder, manifest.files)
            for name, kind in reader.pieces:
                states[name, kind] = partial(whole_state, reader, name, kind)
        else:
            for name, value in export(folder, model_of(folder)).items():
                states[name, WEIGHTS] = value.detach
        yield Tensors(states, fields)


def lines(document: Document) -> Iterator[str]:
    """Yield the lines of `diff` for tensors."""
    yield f"{document['mine']} → {document['other']}"
    for difference in document["manifest"]:
        yield f"  {difference}"
    for row in document["tensors"]:
        texts = [row["difference"]] if "difference" in row else []
        if "largest" in row:
            # NaN and infinity are null in a document.
            largest = "not finite" if row["largest"] is None else f"{row['largest']:.3g}"
            texts.append(f"largest difference {largest}")
        yield f"  {row['name']} {row['kind']}: {', '.join(texts)}"
    yield f"  {document['equal']} of {document['compared']} tensors are equal bit for bit"
