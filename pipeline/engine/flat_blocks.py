"""Two flat parameters a block instead of twelve: what DeepSpeed is given, while a model keeps its names and its code.

What the host does in a step of ZeRO grows with the number of parameters, whatever their size: hooks, buckets, norms,
gathering. The 392 of H/14 become 72, and a step costs the host little more than in plain torch (benchmarks/README.md).

1. `FlatBlocks` takes the parameters out of every block (`models.blocks`) and leaves two in it: its kernels end to end,
   which decay, and all the rest, which does not.
2. When the block is called, views of the two are put where its layers look for their weights and biases; when it
   returns they are taken away. At ZeRO 3 they would keep the gathered block in memory. Until the backward pass
   autograd's saved views do so all the same: only `checkpoint_blocks` frees it earlier.
3. Nothing outside the engine knows of it: `members` says which elements of which parameter are those of today.

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

# Names of a block's two parameters. Their order is that of every torch optimizer's groups and of every gradient.
DECAYED = "flat_decayed"
REST = "flat_rest"
# What layers hold while their block does not compute: None would be a layer without weights, which computes something
# else; with no elements every layer raises, and it can still be printed.
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class FlatMember:
    """Says which elements of a parameter that the engine holds are a parameter of the model as it was."""

    holder: str  # name of the parameter that the engine holds; the model's own, where it was left alone
    start: int  # its element at which this one begins
    size: int  # elements


@dataclass(frozen=True)
class Spot:
    """Says where a layer looks for a weight or a bias."""

    layer: nn.Module
    name: str
    shape: torch.Size

    def fill(self, value: Tensor) -> None:
        """Put a tensor there that is no parameter."""
        # Past `Module.__setattr__`, which takes 1.1 µs instead of 0.1 to find that this is none.
        self.layer.__dict__[self.name] = value


@dataclass(frozen=True)
class Flat:
    """Holds how a flat parameter of a block is cut: the n-th of `sizes` goes to the n-th of `spots`."""

    name: str  # of the parameter in its block
    sizes: list[int] = field(default_factory=list)  # elements
    spots: list[Spot] = field(default_factory=list)


@dataclass(frozen=True)
class Views:
    """Gives the layers of one block their weights and biases while the block computes."""

    flats: list[Flat]

    def put(self, block: nn.Module, inputs: object) -> None:
        """Cut the flat parameters, and put each view where its layer looks for it."""
        for flat in self.flats:
            parts = getattr(block, flat.name).split(flat.sizes)
            for part, spot in zip(parts, flat.spots, strict=True):
                # A vector has its shape already: two thirds of them are, and each view costs the backward pass a node.
                spot.fill(part if part.shape == spot.shape else part.view(spot.shape))

    def take_away(self, block: nn.Module, inputs: object, output: object) -> None:
        """Leave the layers as `FlatBlocks` left them, without weights."""
        for flat in self.flats:
            for spot in flat.spots:
                spot.fill(NOTHING)


class FlatBlocks:
    """Replaces the parameters of each block of a model, in place.

    `members` says of every parameter, under its name and in the order that it had in the model, where it is now;
    `decayed` names those with weight decay now.
    """

    def __init__(self, model: nn.Module, decayed: Set[str]) -> None:
        """`decayed` names the parameters with weight decay as they are in the model."""
        self.members: dict[str, FlatMember] = {}
        for name, parameter in model.named_parameters():
            self.members[name] = FlatMember(name, 0, parameter.numel())
        self.decayed = set(decayed)
        self._views: list[tuple[nn.Module, Views]] = []  # of each block
        for block_name, block in models.blocks(model).items():
            names_of: dict[str, list[str]] = {DECAYED: [], REST: []}  # in the block
            for name, _ in block.named_parameters():
                is_decayed = f"{block_name}.{name}" in self.decayed
                names_of[DECAYED if is_decayed else REST].append(name)
            flats = []
            for flat_name, names in names_of.items():
                if names:
                    flats.append(self._flatten(block_name, block, flat_name, names))
            self._views.append((block, Views(flats)))

    def _flatten(self, block_name: str, block: nn.Module, flat_name: str, names: list[str]) -> Flat:
        """Take these parameters out of a block's layers, and give the block a new one that holds them end to end."""
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
    def while_deepspeed_is_made(self) -> Iterator[None]:
        """Hide the layers of all blocks in here; behind it the model computes again.

        At ZeRO 3 DeepSpeed puts four hooks on every layer that it sees; in a block none has anything to gather any
        more. Its own way of leaving layers out, "leaf modules", brings a backward hook of torch with it, which costs
        as much and does not go with `torch.autograd.grad` (pipeline/engine/exact.py).
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
        # Only now: hooks run in the order in which they came, and ZeRO 3 has to gather a block before it is cut.
        for block, views in self._views:
            block.register_forward_pre_hook(views.put)
            # Also where the block raises, which recomputing does on purpose once it has what the backward pass needs.
            block.register_forward_hook(views.take_away, always_call=True)
