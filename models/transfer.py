"""Carry weights to another image size, patch size, pooling or classes; every parameter is accounted for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from models import catalog, initial, positions

Shape = tuple[int, ...]
Change = tuple[str, Shape | None, Shape | None]  # name, old shape, new shape

# What may differ between source and target; any other difference would silently change the function.
FREE = (
    *("image_size", "patch", "classes", "representation", "pool"),
    *("dropout", "drop_path", "head_bias", "position_std"),  # of training and of first values
)
HEAD = ("pre_logits.", "head.")


@dataclass(frozen=True)
class TransferReport:
    """What became of every parameter, and how similar neighbouring positions were before and are after."""

    kept: tuple[Change, ...] = ()
    resized: tuple[Change, ...] = ()
    new: tuple[Change, ...] = ()
    dropped: tuple[Change, ...] = ()
    drift: tuple[float, float] | None = None  # mean cosine similarity; None: no table on the grid

    def __str__(self) -> str:
        lines = [f"kept {len(self.kept)} parameters unchanged"]
        for label in ("resized", "new", "dropped"):
            for name, old, new in getattr(self, label):
                lines.append(f"{label:8} {name:32} {shape_text(old):>18} -> {shape_text(new)}")
        if self.drift:
            lines.append("similarity of neighbouring positions {:.4f} -> {:.4f}".format(*self.drift))
        return "\n".join(lines)


def shape_text(shape: Shape | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape))


def transfer(
    weights: dict[str, Tensor],
    source: Any,
    target: Any,
    new_head: bool = False,
    generator: Generator | None = None,
) -> tuple[dict[str, Tensor], TransferReport]:
    """The target's whole state dict made from the source's weights, and the report of how.

    The head (with its tanh layer) is replaced by a zero-initialised one if `new_head`, or if classes,
    representation or pooling differ (SPEC 1.5). Raises ValueError naming every key that does not fit.
    """
    check_weights(weights, source)
    if source.family == "masked" and target.family != "masked":
        return unmask(weights, source, target, generator)
    check_comparable(source, target)
    wanted = {name: tuple(p.shape) for name, p in catalog.empty(target).named_parameters()}
    fresh = changed_prefixes(source, target, new_head)
    result: dict[str, Tensor] = {}
    changes: dict[str, list[Change]] = {"kept": [], "resized": [], "new": []}
    for name, shape in wanted.items():
        old = weights.get(name)
        if old is None or name.startswith(fresh):
            result[name] = initial.fill(name, torch.empty(shape), target, generator)
            changes["new"].append((name, None, shape))
            continue
        result[name] = resize(name, old, source, target)
        kind = "kept" if torch.equal(result[name], old) else "resized"
        changes[kind].append((name, tuple(old.shape), shape))
    carried = {name for kind in ("kept", "resized") for name, *_ in changes[kind]}
    dropped = tuple((name, tuple(w.shape), None) for name, w in weights.items() if name not in carried)
    check_weights(result, target)
    kept, resized, new = (tuple(rows) for rows in changes.values())
    return result, TransferReport(kept, resized, new, dropped, drift(weights, source, result, target))


def unmask(
    weights: dict[str, Tensor], source: Any, target: Any, generator: Generator | None
) -> tuple[dict[str, Tensor], TransferReport]:
    """The ordinary ViT inside a masked model, carried over; what was around it is dropped."""
    inside = {name.removeprefix("vit."): w for name, w in weights.items() if name.startswith("vit.")}
    state, report = transfer(inside, source.vit, target, generator=generator)
    around = tuple((name, tuple(w.shape), None) for name, w in weights.items() if not name.startswith("vit."))
    return state, replace(report, dropped=report.dropped + around)


def check_comparable(source: Any, target: Any) -> None:
    if source.family != target.family:
        raise ValueError(f"weights of a {source.family} cannot become a {target.family}")
    differing = [f.name for f in fields(source) if getattr(source, f.name) != getattr(target, f.name)]
    fixed = [name for name in differing if name not in FREE]
    if fixed:
        shown = "; ".join(f"{name}: {getattr(source, name)!r} -> {getattr(target, name)!r}" for name in fixed)
        raise ValueError(f"weights cannot be carried over where the architecture differs: {shown}")


def check_weights(weights: dict[str, Tensor], config: Any) -> None:
    """ValueError naming every key of `weights` that is missing, unknown or mis-shaped for `config`."""
    wanted = {name: tuple(p.shape) for name, p in catalog.empty(config).named_parameters()}
    check_shapes({name: tuple(weight.shape) for name, weight in weights.items()}, wanted, config.family)


def check_shapes(found: dict[str, Shape], wanted: dict[str, Shape], family: str) -> None:
    wrong = [f"missing {name} {shape_text(shape)}" for name, shape in wanted.items() if name not in found]
    for name, shape in found.items():
        if name not in wanted:
            wrong.append(f"unknown {name} {shape_text(shape)}")
        elif shape != wanted[name]:
            wrong.append(f"{name} is {shape_text(shape)}, expected {shape_text(wanted[name])}")
    if wrong:
        raise ValueError(f"weights do not fit this {family}, {len(wrong)} keys: " + "; ".join(wrong))


def changed_prefixes(source: Any, target: Any, new_head: bool) -> tuple[str, ...]:
    """Beginnings of the names that are not carried over although both sides may have them."""
    pooling = getattr(source, "pool", None) != getattr(target, "pool", None)
    representation = getattr(source, "representation", None) != getattr(target, "representation", None)
    return HEAD if new_head or pooling or representation or source.classes != target.classes else ()


def resize(name: str, old: Tensor, source: Any, target: Any) -> Tensor:
    """One parameter of the source as the target needs it, most often the tensor itself."""
    name = name.removeprefix("vit.")
    if name == "embedding.weight" and source.patch != target.patch:
        return resize_patches(old, target.patch)
    if not name.startswith("positions."):
        return old
    leaf, (rows, columns) = name.rpartition(".")[2], source.grid
    slots, new_slots = source.position_slots, target.position_slots
    if leaf == "slot":
        return old
    if leaf == "x":
        return positions.resize_positions(old, (1, columns), (1, target.grid[1]), 0)
    if leaf == "y":
        return positions.resize_positions(old, (rows, 1), (target.grid[0], 1), 0)
    if source.positions == "relative":
        return positions.resize_relative(old, source.grid, target.grid, slots, new_slots)
    refitted = F.pad(old[:, max(slots - new_slots, 0) :], (0, 0, max(new_slots - slots, 0), 0))
    return positions.resize_positions(refitted, source.grid, target.grid, new_slots)


def resize_patches(weight: Tensor, patch: tuple[int, int]) -> Tensor:
    """Patch filters (D, C, h, w) for another size: the pseudo-inverse resize of FlexiViT (Beyer et al. 2023).

    A patch enlarged bilinearly gives the enlarged filter the same answer the old patch gave the old filter.
    """
    old = tuple(weight.shape[2:])
    basis = torch.eye(math.prod(old), dtype=torch.float64).view(-1, 1, *old)
    enlarge = F.interpolate(basis, size=patch, mode="bilinear", align_corners=False).flatten(1)  # (old, new)
    filters = weight.flatten(2).double() @ torch.linalg.pinv(enlarge).T
    return filters.unflatten(-1, patch).to(weight.dtype)


def drift(
    weights: dict[str, Tensor], source: Any, result: dict[str, Tensor], target: Any
) -> tuple[float, float] | None:
    if getattr(source, "positions", "none") in ("none", "relative"):
        return None
    before, after = (
        positions.neighbour_similarity(positions.whole_table(tensors, config)[0, config.position_slots :], config.grid)
        for tensors, config in ((weights, source), (result, target))
    )
    return before, after
