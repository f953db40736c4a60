"""Transfer weights to another image size, patch size, pooling or number of classes, and report on every parameter.

1. Check the weights against the source's config: a missing, unknown or mis-shaped key is an error.
2. Source and target may differ only in FREE fields. The ordinary ViT inside a masked model is extracted, or inserted.
3. Keep each parameter of the target, resize it (patch filters, position tables), or initialise it (a new head).
4. Report what happened to every parameter, and how much the positions changed.

    weights, source = load_weights("pretrained")                       # ViTConfig(image_size=(224, 224), classes=21843)
    state, report = transfer(weights, source, models.config_of("B/16", 384, classes=1000))
    print(report)        kept 149 parameters unchanged
                         resized  positions.0.table                       1x197x768 -> 1x577x768
                         new      head.weight                                     - -> 1000x768   ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from models import catalog, initial, positions
from models.catalog import Shape, check_weights, shape_text, tensor_shapes
from models.configs import BiTConfig, MaskedConfig, ModelConfig, ViTConfig, check_architecture, keeps_head
from models.vit import position_table

Change = tuple[str, Shape | None, Shape | None]  # name, old shape, new shape

HEAD = ("pre_logits.", "head.")


@dataclass(frozen=True)
class TransferReport:
    """The changes to every parameter, and the similarity of neighbouring positions before and after the transfer."""

    kept: tuple[Change, ...] = ()
    resized: tuple[Change, ...] = ()
    new: tuple[Change, ...] = ()
    dropped: tuple[Change, ...] = ()
    drift: tuple[float, float] | None = None  # mean cosine similarity; None if no position table is on the grid

    def __str__(self) -> str:
        lines = [f"kept {len(self.kept)} parameters unchanged"]
        for label, changes in (("resized", self.resized), ("new", self.new), ("dropped", self.dropped)):
            for name, old, new in changes:
                lines.append(f"{label:8} {name:32} {shape_text(old):>18} -> {shape_text(new)}")
        if self.drift:
            before, after = self.drift
            lines.append(f"similarity of neighbouring positions {before:.4f} -> {after:.4f}")
        return "\n".join(lines)


def transfer(
    weights: dict[str, Tensor],
    source: ModelConfig,
    target: ModelConfig,
    new_head: bool = False,
    generator: Generator | None = None,
) -> tuple[dict[str, Tensor], TransferReport]:
    """Convert the source's weights to a complete state dict for the target; return it and a report.

    The head (with its tanh layer) is replaced with a zero-initialised head if `new_head` is set or one of the family's
    `head_fields` differs (SPEC 1.5); its bias is the target's `head_bias`. Raises ValueError listing every key that
    does not fit.
    """
    check_weights(weights, source)
    if isinstance(source, MaskedConfig) and not isinstance(target, MaskedConfig):
        # Transfer the ordinary ViT inside the masked model; drop everything around it.
        inside: dict[str, Tensor] = {}
        around: list[Change] = []
        for name, weight in weights.items():
            if name.startswith("vit."):
                inside[name.removeprefix("vit.")] = weight
            else:
                around.append((name, tuple(weight.shape), None))
        # `new_head` is not needed: a masked model has no classes, so the target's head is always new.
        state, report = transfer(inside, source.vit, target, generator=generator)
        return state, replace(report, dropped=report.dropped + tuple(around))

    check_architecture(source, target)
    if isinstance(target, MaskedConfig) and not isinstance(source, MaskedConfig):
        # The other direction: the ViT keeps its parameters, and everything around it is new.
        inside, report = transfer(weights, source, target.vit, generator=generator)
        state = {}
        added: list[Change] = []
        for name, shape in tensor_shapes(catalog.empty(target).named_parameters()).items():
            if name.startswith("vit."):
                state[name] = inside[name.removeprefix("vit.")]
            else:
                state[name] = initial.fill(name, torch.empty(shape), target, generator)
                added.append((name, None, shape))
        return state, replace(report, new=report.new + tuple(added))

    # `startswith` of an empty tuple is False: then only parameters that the source lacks are new.
    replaced_prefixes: tuple[str, ...] = ()
    if not keeps_head(source, target, new_head):
        replaced_prefixes = HEAD
    state = {}
    kept: list[Change] = []
    resized: list[Change] = []
    new: list[Change] = []
    carried: set[str] = set()
    # In the order of the target's parameters, because each draw from the generator affects the next.
    for name, shape in tensor_shapes(catalog.empty(target).named_parameters()).items():
        old = weights.get(name)
        # A new class token's position embedding starts at zero, as in tables that already have entries (`fit_slots`).
        if old is None and name.endswith(".slot"):
            state[name] = torch.zeros(shape)
            new.append((name, None, shape))
            continue
        if old is None or name.startswith(replaced_prefixes):
            state[name] = initial.fill(name, torch.empty(shape), target, generator)
            new.append((name, None, shape))
            continue
        state[name] = resize(name, old, source, target)
        carried.add(name)
        change = (name, tuple(old.shape), shape)
        # Compare values, not identity: a table whose grid is unchanged is returned as a copy.
        if torch.equal(state[name], old):
            kept.append(change)
        else:
            resized.append(change)

    dropped: list[Change] = []
    for name, weight in weights.items():
        if name not in carried:
            dropped.append((name, tuple(weight.shape), None))
    # The rules above know which fields may differ; this check finds parameters that they failed to adapt.
    check_weights(state, target)
    # The similarity of neighbouring positions before and after, for tables added to tokens on the grid.
    drift = None
    if isinstance(source, ViTConfig) and isinstance(target, ViTConfig) and source.positions in positions.ADDED:
        drift = (neighbour_similarity(weights, source), neighbour_similarity(state, target))
    report = TransferReport(
        kept=tuple(kept),
        resized=tuple(resized),
        new=tuple(new),
        dropped=tuple(dropped),
        drift=drift,
    )
    return state, report


def resize(name: str, old: Tensor, source: ModelConfig, target: ModelConfig) -> Tensor:
    """Adapt one of the source's parameters to the target; most parameters are returned unchanged."""
    if isinstance(source, BiTConfig) or isinstance(target, BiTConfig):
        return old  # no parameter of a ResNet depends on the image size
    # Between two masked models, the ViT's names have this prefix.
    name = name.removeprefix("vit.")
    if name == "embedding.weight" and source.patch != target.patch:
        return resize_patches(old, target.patch)
    if not name.startswith("positions."):
        return old

    # Only position tables remain; the last part of the name is that of the parameter inside models.positions.
    parameter = name.rpartition(".")[2]
    rows, columns = source.grid
    new_rows, new_columns = target.grid
    slots = source.position_slots
    new_slots = target.position_slots
    if parameter == "slot":
        return fit_slots(old, slots, new_slots)
    # Resize the two axes of learned2d separately, each as a grid of one row or one column.
    if parameter == "x":
        return positions.resize_positions(old, (1, columns), (1, new_columns), 0)
    if parameter == "y":
        return positions.resize_positions(old, (rows, 1), (new_rows, 1), 0)
    if source.positions == "relative":
        return positions.resize_relative(old, source.grid, target.grid, slots, new_slots)
    return positions.resize_positions(fit_slots(old, slots, new_slots), source.grid, target.grid, new_slots)


def fit_slots(table: Tensor, slots: int, new_slots: int) -> Tensor:
    """Adapt a position table (1, S, D) from `slots` leading entries for prefix tokens to `new_slots` entries."""
    # Registers are not in FREE, so only the class token can be added or removed. Its entry is the first one: remove it,
    # or add zeros.
    without_slots = table[:, max(slots - new_slots, 0) :]
    return F.pad(without_slots, (0, 0, max(new_slots - slots, 0), 0))


def resize_patches(weight: Tensor, patch: tuple[int, int]) -> Tensor:
    """Resize patch filters (D, C, h, w) by the pseudo-inverse resize of FlexiViT (Beyer et al. 2023).

    The new filter responds to a bilinearly enlarged patch as the old filter does to the original patch.
    """
    old = tuple(weight.shape[2:])
    # Enlarging is linear: its results for single pixels form its matrix.
    basis = torch.eye(math.prod(old), dtype=torch.float64).view(-1, 1, *old)  # one patch per old pixel
    enlarge = F.interpolate(basis, size=patch, mode="bilinear", align_corners=False).flatten(1)  # (old, new)
    filters = weight.flatten(2).double() @ torch.linalg.pinv(enlarge).T
    return filters.unflatten(-1, patch).to(weight.dtype)


def neighbour_similarity(state: dict[str, Tensor], config: ViTConfig) -> float:
    """Return the mean cosine similarity of adjacent position embeddings in the first table; 1.0 for a single patch."""
    table = position_table(state, config)[0, config.position_slots :]
    image = F.normalize(table.double().reshape(*config.grid, -1), dim=-1)  # (rows, columns, D)
    down = (image[1:] * image[:-1]).sum(-1)
    across = (image[:, 1:] * image[:, :-1]).sum(-1)
    pairs = torch.cat([down.flatten(), across.flatten()])
    # A grid of a single patch has no neighbours, and the mean of no values would be NaN.
    if pairs.numel() == 0:
        return 1.0
    return pairs.mean().item()
