"""Writes down how many bytes of tensors live at every moment of a computation, and what each of them is for.

1. Inside the block of a `LiveBytes` every operation of torch is seen, those of the backward pass too.
2. Memory that an operation made is counted once, however many views there are of it, until its last tensor is gone.
3. What it is for (`Kind`) follows from the phase that the caller has named, and from the operation.

In:  with LiveBytes() as live: live.enter("forward"); y = x @ w; live.enter("backward"); y.backward(…)
Out: live.events = [("forward", Kind.ACTIVATIONS, 4096), …, ("backward", Kind.ACTIVATIONS, -4096)], in their order

With fake tensors no number is ever computed: it is the same memory to the byte, of a model of any size, on any machine.
"""

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kind(enum.IntEnum):
    """Says what memory is for."""

    STATES = 0  # weights, masters, moments, average: all that lives from the engine's start to its end
    ACTIVATIONS = 1  # what the forward pass made, or a block's second forward pass in the backward pass
    GRADIENTS = 2  # gradients, their buckets and sums, and what the optimizer computes on the way
    GATHERED = 3  # weights that ZeRO 3 has gathered from the other workers
    IMAGES = 4  # the micro-batch


PHASES = {
    "build": Kind.STATES,
    "batch": Kind.IMAGES,
    "forward": Kind.ACTIVATIONS,
    "backward": Kind.GRADIENTS,
    "recompute": Kind.ACTIVATIONS,  # amid the backward pass
    "update": Kind.GRADIENTS,
}


Event = tuple[str, Kind, int]  # (phase, what the memory is for, bytes more or less)


class LiveBytes(TorchDispatchMode):
    """Counts, inside its block, the bytes that live; `events` are changes of that number with their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._phase = "build"
        self._living: dict[int, tuple[weakref.ref[Any], Kind, int]] = {}  # by the storage's address

    def enter(self, phase: str) -> None:
        """Name what is computed from here on: one of `PHASES`."""
        assert phase in PHASES, phase
        self._phase = phase

    def watch(self, block: nn.Module) -> None:
        """Tell a block's second forward pass, amid the backward pass, from the backward pass itself."""

        def begin(*_: object) -> None:
            if self._phase == "backward":
                self._phase = "recompute"

        def end(*_: object) -> None:
            if self._phase == "recompute":
                self._phase = "backward"

        block.register_forward_pre_hook(begin)
        # A second forward pass ends as soon as everything that is needed is there: by an exception.
        block.register_forward_hook(end, always_call=True)

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and is_fake(arguments[0]):
            return number_in(arguments[0])
        result = function(*arguments, **(options or {}))
        # Collectives are operations too: DeepSpeed's are c10d's.
        gathers = "c10d::" in function.name() and "allgather" in function.name()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        # A collective fills tensors that were made before it: only now it is known what they are for.
        if gathers:
            for leaf in tree_leaves(arguments[:1]):
                if isinstance(leaf, Tensor):
                    self._change_kind(leaf, Kind.GATHERED)
        return result

    def _see(self, tensor: Tensor) -> None:
        # A tensor of the meta device has a size and no memory; DeepSpeed keeps the shapes of parameters in some.
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        size = storage.nbytes()
        if address in self._living:
            reference, kind, known_size = self._living[address]
            # Storages are resized in place: ZeRO 3 does so with what it has gathered.
            if size != known_size:
                self._living[address] = (reference, kind, size)
                self.events.append((self._phase, kind, size - known_size))
            return
        kind = PHASES[self._phase]
        # ZeRO 3 gathers weights by hooks of the forward pass, for which none are recorded.
        if self._phase == "forward" and not torch.is_grad_enabled():
            kind = Kind.GATHERED
        self._living[address] = (weakref.ref(storage, self._forgetting(address)), kind, size)
        self.events.append((self._phase, kind, size))

    def _change_kind(self, tensor: Tensor, kind: Kind) -> None:
        address = tensor.untyped_storage()._cdata
        if address not in self._living:
            return
        reference, before, size = self._living[address]
        if before is not Kind.STATES and before is not kind:
            self._living[address] = (reference, kind, size)
            self.events += [(self._phase, before, -size), (self._phase, kind, size)]

    def _forgetting(self, address: int) -> Callable[[object], None]:
        """Return what is called when the memory at this address is given back."""

        def forget(_: object) -> None:
            _, kind, size = self._living.pop(address)
            self.events.append((self._phase, kind, -size))

        return forget


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has no numbers."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def number_in(tensor: Tensor) -> float | int | bool:
    """Return a number that lets a step of training go on: flags say no, norms and losses are finite."""
    if tensor.dtype.is_floating_point:
        return 1.0
    if tensor.dtype == torch.bool:
        return False
    return 0
