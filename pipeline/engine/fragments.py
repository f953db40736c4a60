"""Which part of the fp32 masters and of the optimizer's state this worker owns, where DeepSpeed keeps it at each stage.

1. DeepSpeed's engine holds flat parameters (flat_blocks.py). What a worker owns of one is a range of its elements:
   at ZeRO 0 an equal share of what all have, at 1 and 2 what its partition of a group holds, at 3 its partition.
2. That range is cut where the model's own parameters begin and end.

In:  a parameter "head.bias" of 10 elements, two workers, ZeRO 2
Out: Fragment("head.bias", 0, {"master": (5,), "exp_avg": (5,), "exp_avg_sq": (5,)}) on rank 0, and on rank 1 the same
     from element 5 on; where the parts are cut depends on the stage, and a part may be empty
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from pipeline.engine.flat_blocks import Member

# What this worker owns of one of the engine's parameters: (first element, flat views of what follows it, by kind).
Part: TypeAlias = tuple[int, dict[str, Tensor]]


class Fragment(NamedTuple):
    """Holds what this worker owns of one parameter: `tensors` are flat views, elements [start, start + len)."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "master" and the optimizer's per-element state


class Fragments:
    """Finds the masters and the state of a model's parameters in DeepSpeed's optimizer.

    `members` are the model's own parameters, by name, each with its place in one of `model`'s; `kinds` are "master" and
    names of states.
    """

    def __init__(self, zero: int, model: nn.Module, members: Mapping[str, Member], optimizer: Any) -> None:
        self.zero = zero  # stage
        self.model = model
        self.members = members
        self.optimizer = optimizer  # DeepSpeed's; at stage 0 torch's

    def owned(self, kinds: tuple[str, ...]) -> Iterator[Fragment]:
        """Iterate views of what this worker owns; every element has exactly one owner."""
        cut = self.part_of_a_replica
        if self.zero in (1, 2):
            cut = self.part_of_a_flat
        elif self.zero == 3:
            cut = self.part_of_a_partition
        parts: dict[str, Part] = {}
        for holder, p in self.model.named_parameters():
            parts[holder] = cut(p, kinds)
        yield from self.cut_by_name(parts)

    def whole(self, kinds: tuple[str, ...]) -> Iterator[Fragment]:
        """Iterate every parameter as one fragment. Only at stage 0, where every worker has all of it."""
        parts: dict[str, Part] = {}
        for holder, p in self.model.named_parameters():
            parts[holder] = (0, {kind: self.replica(p, kind) for kind in kinds})
        yield from self.cut_by_name(parts)

    def cut_by_name(self, parts: Mapping[str, Part]) -> Iterator[Fragment]:
        """Cut parts of the engine's parameters into those of the model's own."""
        for name, member in self.members.items():
            start, views = parts[member.holder]
            length = 0
            if views:
                length = next(iter(views.values())).numel()
            first = max(start, member.start)
            stop = min(start + length, member.start + member.size)
            # A worker may own nothing of a small parameter; an empty fragment would only be an empty entry in its file.
            if first < stop:
                tensors = {kind: view[first - start : stop - start] for kind, view in views.items()}
                yield Fragment(name, first - member.start, tensors)

    def part_of_a_replica(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Stage 0: every worker has everything; each saves an equal part, the last a shorter one."""
        part = math.ceil(p.numel() / dist.get_world_size())
        start = min(dist.get_rank() * part, p.numel())
        stop = min(start + part, p.numel())
        return start, {kind: self.replica(p, kind)[start:stop] for kind in kinds}

    def part_of_a_flat(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Stages 1 and 2: DeepSpeed maps a parameter to what this worker's flat partition holds of it, or nothing."""
        mapping = p._hp_mapping
        if mapping is None:
            return 0, {}
        views = {}
        for kind in kinds:
            views[kind] = mapping.get_hp_fragment(None if kind == "master" else kind)
        return mapping.lp_fragment_address.start, views

    def part_of_a_partition(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Stage 3: every parameter is cut into equal parts, one a worker, the last padded; we leave the padding out."""
        part = p.ds_tensor.numel()
        start = dist.get_rank() * part
        length = max(min(part, p.ds_numel - start), 0)
        return start, {kind: self.partition(p, kind)[:length] for kind in kinds}

    def replica(self, p: Any, kind: str) -> Tensor:
        """Return, at stage 0, the whole flat master or state, which every worker has."""
        if kind == "master":
            return p.data.view(-1)
        return self.optimizer.state[p][kind].view(-1)

    def partition(self, p: Any, kind: str) -> Tensor:
        """Return, at stage 3, this worker's part of a flat master or state, padded where the last part is short."""
        key = None if kind == "master" else kind
        return self.optimizer._get_fp32_opt_state_partition(p, False, key)[0]
