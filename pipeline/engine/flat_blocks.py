"""Merges the parameters of each block into two flat parameters for DeepSpeed, without changing the model's code.

The host's work in a ZeRO step (hooks, buckets, norms, gathering) grows with the number of parameters, not with their
sizes. The 392 parameters of H/14 become 72, and a step then costs the host hardly more than in plain torch
(benchmarks/README.md).

1. `FlatBlocks` removes the parameters of every block (`models.blocks`) and adds two: a flat parameter with weight decay
   that concatenates all kernels, and a flat parameter without weight decay that concatenates all others.
2. When the block is called, its layers get views of the flat parameters as their weights and biases; when it returns,
   the views are removed, because at ZeRO 3 they would keep the gathered block in memory. Views saved by autograd still
   keep it there until the backward pass; only `checkpoint_blocks` frees it earlier.
3. Nothing outside the engine depends on this: `members` maps each original parameter to elements of a flat parameter.

In:  a block "blocks.0" with norm1.weight and norm1.bias of 32 elements, attention.qkv.weight (96, 32), …
Out: parameters "blocks.0.flat_decayed", "blocks.0.flat_rest", and {"blocks.0.norm1.weight": FlatMember(rest, 0, 32),
     "blocks.0.norm1.bias": FlatMember(rest, 32, 32), "blocks.0.attention.qkv.weight": FlatMember(decayed, 0, 3072), …}
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import models

# Names of a block's two parameters, in the order of the optimizer's groups and of every gradient.
DECAYED = "flat_decayed"
REST = "flat_rest"
# Placeholder for a layer's weights while its block does not compute. With an empty tensor every layer raises an error
# but can still be printed; with None a layer would silently compute without its bias.
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class FlatMember:
    """The location of an original parameter: a range of elements in one of the engine's parameters."""

    holder: str  # name of the engine's parameter; the original name if the parameter was not merged
    start: int  # first element in that parameter
    size: int  # number of elements


@dataclass(frozen=True)
class Spot:
    """The attribute of a layer that holds a weight or a bias."""

    layer: nn.Module
    name: str
    shape: torch.Size

    def fill(self, value: Tensor) -> None:
        """Set the attribute to a plain tensor, not a parameter."""
        # Bypasses `Module.__setattr__`, which takes 1.1 µs instead of 0.1.
        self.layer.__dict__[self.name] = value


@dataclass(frozen=True)
class Flat:
    """The layout of a block's flat parameter: `sizes[n]` consecutive elements belong to `spots[n]`."""

    name: str  # name of the flat parameter in its block
    sizes: list[int] = field(default_factory=list)  # numbers of elements
    spots: list[Spot] = field(default_factory=list)


@dataclass(frozen=True)
class Views:
    """Sets views of a block's flat parameters as its layers' weights and biases during the block's forward pass."""

    flats: list[Flat]

    def set_views(self, block: nn.Module, inputs: object) -> None:
        """Split the flat parameters, and set each view as the weight or bias of its layer."""
        for flat in self.flats:
            parts = getattr(block, flat.name).split(flat.sizes)
            for part, spot in zip(parts, flat.spots, strict=True):
                # Two thirds of the views are vectors and need no reshaping, which would cost the backward pass a node.
                spot.fill(part if part.shape == spot.shape else part.view(spot.shape))

    def remove_views(self, block: nn.Module, inputs: object, output: object) -> None:
        """Remove the views from the layers, restoring their state before the call."""
        for flat in self.flats:
            for spot in flat.spots:
                spot.fill(NOTHING)


class FlatBlocks:
    """Replaces the parameters of each block of a model in place.

    `members` maps the name of every original parameter, in the original order, to its new location; `decayed` names the
    new parameters with weight decay.
    """

    def __init__(self, model: nn.Module, decayed: Set[str]) -> None:
        """Replace the parameters; `decayed` names the original parameters with weight decay."""
        self.members: dict[str, FlatMember] = {}
        for name, parameter in model.named_parameters():
            self.members[name] = FlatMember(name, 0, parameter.numel())
        self.decayed = set(decayed)
        self._views: list[tuple[nn.Module, Views]] = []  # (block, its views)
        for block_name, block in models.blocks(model).items():
            names_of: dict[str, list[str]] = {DECAYED: [], REST: []}  # flat parameter → original names in the block
            for name, _ in block.named_parameters():
                is_decayed = f"{block_name}.{name}" in self.decayed
                names_of[DECAYED if is_decayed else REST].append(name)
            flats = []
            for flat_name, names in names_of.items():
                if names:
                    flats.append(self._flatten(block_name, block, flat_name, names))
            self._views.append((block, Views(flats)))

    def _flatten(self, block_name: str, block: nn.Module, flat_name: str, names: list[str]) -> Flat:
        """Remove these parameters from a block's layers, and add a flat parameter with all of them to the block."""
        holder = f"{block_name}.{flat_name}"
        flat = Flat(flat_name)
        values: list[Tensor] = []
        start = 0
        for name in names:
            layer_name, _, own_name = name.rpartition(".")
            layer = block.get_submodule(layer_name)
            parameter = layer.get_parameter(own_name)
            values.append(parameter.detach().flatten())
            flat.sizes.append(parameter.numel())
            spot = Spot(layer, own_name, parameter.shape)
            delattr(layer, own_name)
            spot.fill(NOTHING)
            flat.spots.append(spot)
            self.members[f"{block_name}.{name}"] = FlatMember(holder, start, parameter.numel())
            self.decayed.discard(f"{block_name}.{name}")
            start += parameter.numel()
        if flat_name == DECAYED:
            self.decayed.add(holder)
        block.register_parameter(flat_name, nn.Parameter(torch.cat(values)))
        return flat

    @contextmanager
    def during_deepspeed_setup(self) -> Iterator[None]:
        """Hide the layers of all blocks from DeepSpeed during the `with` block; afterwards add the hooks for the views.

        At ZeRO 3, DeepSpeed adds four hooks to every visible layer, but the layers inside a block have no parameters to
        gather. DeepSpeed's own option to skip layers, "leaf modules", adds a torch backward hook, which costs as much
        and is incompatible with `torch.autograd.grad` (pipeline/engine/exact.py).
        """
        layers_of: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
        for block, _ in self._views:
            layers_of.append((block, block._modules))
            block._modules = {}
        try:
            yield
        finally:
            for block, layers in layers_of:
                block._modules = layers
        # Added last: hooks run in the order of their registration, and ZeRO 3 must gather a block before it is split.
        for block, views in self._views:
            block.register_forward_pre_hook(views.set_views)
            # Also if the block raises, as recomputation does on purpose once it has all that the backward pass needs.
            block.register_forward_hook(views.remove_views, always_call=True)
