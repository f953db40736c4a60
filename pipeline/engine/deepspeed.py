"""Wraps DeepSpeed's internals at each ZeRO stage; no other file uses undocumented DeepSpeed names.

1. `import_deepspeed` imports the package and checks that its modules have the names in `NAMES`.
2. DeepSpeed creates its optimizer, which holds fp32 master weights and moments. STATES has a ZeroState for each kind
   of optimizer and checks its names: Replicas at ZeRO 0, Partitions at 1 and 2, Shards at 3.
3. In each step `gradients` returns this worker's part of the averaged gradient, as the few flat tensors that the
   optimizer steps. The engine sums their norm over the workers and decides: `apply` steps the optimizer and updates the
   model weights from the master weights; `drop` discards the gradient and the step.
4. For a checkpoint, `owned` returns views of the part of a parameter that this worker owns; `refresh` is called after a
   restore.

DeepSpeed's own `step` would check for overflow and compute the norm parameter by parameter, and would copy each result
from the device. Everything else that it does is repeated here in the same order, with DeepSpeed's own functions.

In:  ZeRO 2, two workers; on rank 0 the gradient of "head.weight", elements 0 … 4, is in DeepSpeed's buckets
Out: one fp32 tensor for each parameter group on rank 0, and after `apply` the same weights on both workers
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import ConfigError

# This worker's part of one of DeepSpeed's parameters: (first element, flat views from that element on, by kind).
Part: TypeAlias = tuple[int, dict[str, Tensor]]

EXPECTED = "0.19.8"  # the version with these private names; pyproject.toml pins it, and a test compares the two

# The undocumented names of DeepSpeed used here, by their owner.
NAMES: dict[str, str] = {
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.compiler": "compile",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.engine.DeepSpeedEngine": "_do_optimizer_sanity_check empty_partition_cache",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig ZERO_OPTIMIZATION",
    "deepspeed.runtime.zero.partitioned_param_coordinator": "assert_ints_same_as_other_ranks",
    "deepspeed.runtime.zero.stage_1_and_2": "INITIAL_MICRO_STEP_ID",
    "the optimizer of ZeRO 1 and 2": "_get_preflattened_grad_partition _global_grad_norm _hp_optimizer_states_linked "
    "_lazy_init_hp_params_optimizer_state _optimizer_step _release_preflattened_grad_buffers all_grad_tensors "
    "averaged_gradients flatten free_grad_in_param_list micro_step_id optimizer overflow "
    "parallel_partitioned_bit16_groups params_in_partition params_not_in_partition single_partition_of_fp32_groups "
    "step update_lp_params",
    "a parameter of ZeRO 1 and 2": "_hp_mapping",
    "the mapping of a parameter of ZeRO 1 and 2": "get_hp_fragment lp_fragment_address",
    "the optimizer of ZeRO 3": "_get_fp32_opt_state_partition _global_grad_norm _optimizer_step "
    "_partition_all_parameters _post_step _pre_step _prepare_sub_group _reassign_or_swap_out_partitioned_parameters "
    "_release_sub_group _unflatten_partitioned_parameters fp16_groups fp16_partitioned_groups_flat "
    "fp32_partitioned_groups_flat optimizer overflow persistent_parameters reduce_and_partition_stream step zero_grad",
    "a parameter of ZeRO 3": "all_gather ds_numel ds_tensor",
}


def check_names(owner: object, of: str) -> None:
    """Raise ConfigError if the object lacks a name in NAMES[of]: this DeepSpeed version is not supported."""
    missing = [name for name in NAMES[of].split() if not has_name(owner, name)]
    if missing:
        version = import_module("deepspeed").__version__
        raise ConfigError(
            f"DeepSpeed {version}: {of} has no {', '.join(missing)}\n"
            f"  expected DeepSpeed {EXPECTED}, whose private names Patchline uses (pipeline/engine/deepspeed.py)\n"
            f"  run: pip install deepspeed=={EXPECTED}"
        )


def has_name(owner: object, name: str) -> bool:
    """Return whether an object has an attribute, without triggering the lazy creation of a module's attribute."""
    if not isinstance(owner, ModuleType) or name in vars(owner):
        return hasattr(owner, name)
    # `deepspeed.ops.__getattr__` compares its argument with the single name that it creates.
    make = vars(owner).get("__getattr__")
    return make is not None and name in make.__code__.co_consts


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without the parts that workers never use; a fork server does this once for its workers.

    Raises ConfigError if DeepSpeed lacks a name used here.
    """
    # DeepSpeed looks for an accelerator when it is imported; the import waits until the variable is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # On first access DeepSpeed determines which operators it can build: it starts compilers, queries every GPU, and
    # on CPUs builds this operator (81 CPU-seconds) but never uses it. A killed build leaves a lock on which every later
    # run hangs; a loaded one leaves 69 MB per worker in /dev/shm. No operator is needed here, so the answer is set
    # before anything reads it.
    check_names(deepspeed.ops, "deepspeed.ops")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}

    # Torch's optimizers import this at their first step: one CPU-second per worker, but only once in a fork server.
    import_module("torch._dynamo")
    for name in NAMES:
        if not name.startswith("deepspeed."):
            continue  # this object exists only after an engine is created
        owner: object = None  # stands for a missing module
        with suppress(ModuleNotFoundError):
            module, _, class_name = name.rpartition(".")
            is_class = class_name[0].isupper()
            owner = getattr(import_module(module), class_name, None) if is_class else import_module(name)
        check_names(owner, name)
    from deepspeed.runtime import compiler

    # ZeRO checks whether the optimizer is Muon. Importing Muon wraps its functions in torch.compile, which takes 0.9
    # CPU-seconds; with this replacement they stay unwrapped.
    compile_of_deepspeed = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = compile_of_deepspeed
    return deepspeed


def check_zero_section(section: Mapping[str, Any]) -> None:
    """Raise pydantic.ValidationError (a ValueError) if DeepSpeed's schema rejects a value in zero_optimization."""
    # Without the variable DeepSpeed warns on machines without a GPU. It is removed again, because workers that inherit
    # the environment may have other devices.
    key = "DS_ACCELERATOR"
    is_named = key in os.environ
    os.environ.setdefault(key, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    finally:
        if not is_named:
            del os.environ[key]
    DeepSpeedZeroConfig(**section)


@contextmanager
def one_optimizer_class() -> Iterator[None]:
    """Make DeepSpeed use the same optimizer class at ZeRO 1 as at ZeRO 2, for engines created in the `with` block.

    If bf16 gradients are summed in fp32, DeepSpeed uses a different class at ZeRO 1. That class does not map parameters
    to fragments of its state; the class for ZeRO 2 does, and it supports both stages.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    original = DeepSpeedEngine._do_optimizer_sanity_check

    def choose_class(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
        chosen = original(engine, optimizer)
        return ZERO_OPTIMIZATION if engine.zero_optimization() else chosen

    DeepSpeedEngine._do_optimizer_sanity_check = choose_class
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = original


@contextmanager
def one_order_of_layers() -> Iterator[None]:
    """Disable, inside the `with` block, ZeRO 3's check that all workers run the layers in the same order."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    original = partitioned_param_coordinator.assert_ints_same_as_other_ranks
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda order: None
    try:
        yield
    finally:
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = original


def over_gloo() -> bool:
    """Return whether the workers communicate over gloo; the memory tracer replaces this function."""
    return dist.get_backend() == "gloo"


# ------------------------------------------------------------------------------------------------ the stages


class ZeroState(ABC):
    """Base class for the behaviour that differs between ZeRO stages.

    `zero` is DeepSpeed's optimizer (torch's at ZeRO 0), `optimizer` is torch's. `flats` are the fp32 tensors that
    torch's optimizer updates on this worker; they are the keys of the optimizer's state.
    """

    is_shared = True  # whether every worker owns only a part of the gradient

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, flats: list[Tensor]) -> None:
        self.engine = engine  # DeepSpeed's engine
        self.zero = engine.optimizer
        self.optimizer = optimizer
        self.flats = flats

    @abstractmethod
    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return the part of a DeepSpeed parameter that this worker owns; each element has exactly one owner."""

    def held(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return the part of a parameter that this worker holds: more than it owns if parameters are replicated."""
        return self.owned(p, kinds)

    def link_state(self) -> None:
        """Link parameters to the optimizer's newly created state, so that `owned` can return this state."""
        return

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this worker's part of the averaged gradient."""

    def note_norm(self, norm: float) -> None:
        """Pass the gradient norm to DeepSpeed, which counts skipped steps; pass infinity for a skipped step."""
        if self.is_shared:  # at ZeRO 0 DeepSpeed does not count them
            self.zero.overflow = math.isinf(norm)
            self.zero._global_grad_norm = norm

    @abstractmethod
    def apply(self) -> None:
        """Collective: step the optimizer, and update the model weights from the master weights."""

    def drop(self) -> None:
        """Discard the gradient; weights and moments stay unchanged."""
        for flat in self.flats:
            flat.grad = None

    def step_flat(self, number: int) -> None:
        """Step the optimizer for one of the tensors in `flats`, with the gradient stored in that tensor."""
        self.zero._optimizer_step(number)

    def refresh(self) -> None:
        """Collective: update the model weights after code outside the optimizer has changed the master weights."""
        return


class Replicas(ZeroState):
    """ZeRO 0: every worker holds the complete gradient, in `grad`; DeepSpeed's engine calls torch's optimizer."""

    is_shared = False

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        super().__init__(engine, zero, [p for group in zero.param_groups for p in group["params"]])

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return this worker's equal share of the replicated parameter; the last share may be shorter."""
        part = math.ceil(p.numel() / dist.get_world_size())
        start = min(dist.get_rank() * part, p.numel())
        stop = min(start + part, p.numel())
        _, views = self.held(p, kinds)
        return start, {kind: view[start:stop] for kind, view in views.items()}

    def held(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return the complete parameter, which every worker holds."""
        views = {}
        for kind in kinds:
            views[kind] = p.data.view(-1) if kind == "master" else self.zero.state[p][kind].view(-1)
        return 0, views

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters that have one."""
        return [p.grad for p in self.flats if p.grad is not None]

    def apply(self) -> None:
        """Do nothing: at ZeRO 0 the engine's own `step` steps the optimizer, and skips parameters without a gradient.

        `drop` removes the gradients of a step that must be skipped. At the other stages `step` does not step the
        optimizer.
        """

    def step_flat(self, number: int) -> None:
        """Step all parameters when called for the last tensor, because torch's optimizer steps them all at once."""
        if number + 1 == len(self.flats):
            self.zero.step()


class Partitions(ZeroState):
    """ZeRO 1 and 2: for each parameter group, one flat fp32 tensor holds this worker's part of the group."""

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        check_names(zero, "the optimizer of ZeRO 1 and 2")
        super().__init__(engine, zero.optimizer, zero.single_partition_of_fp32_groups)  # one master for each group
        for p in engine.module.parameters():
            check_names(p, "a parameter of ZeRO 1 and 2")
            if p._hp_mapping is not None:
                check_names(p._hp_mapping, "the mapping of a parameter of ZeRO 1 and 2")
        # Replaces DeepSpeed's own step; `apply` or `drop` is called instead.
        zero.step = lambda: None

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return the part of the parameter in this worker's flat partition, from DeepSpeed's mapping; may be empty."""
        mapping = p._hp_mapping
        if mapping is None:
            return 0, {}
        views = {}
        for kind in kinds:
            views[kind] = mapping.get_hp_fragment(None if kind == "master" else kind)
        return mapping.lp_fragment_address.start, views

    def link_state(self) -> None:
        """Link the parameters to their state, because DeepSpeed's own linking fails with several parameter groups."""
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()

    def gradients(self) -> list[Tensor]:
        """Concatenate the reduced gradients in fp32, and free the memory that held them."""
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        zero = self.zero
        for group, flat in enumerate(self.flats):
            zero.free_grad_in_param_list(zero.params_not_in_partition[group])
            gradient = zero._get_preflattened_grad_partition(group)
            if gradient is None:
                gradient = zero.flatten(zero.averaged_gradients[group])
            assert gradient.numel() == flat.numel(), (gradient.numel(), flat.numel())
            flat.grad = gradient.to(flat.dtype)
            zero.free_grad_in_param_list(zero.params_in_partition[group])
            zero._release_preflattened_grad_buffers(group)
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None
        # Restart the count for the next accumulation, as DeepSpeed's own step does.
        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        return [flat.grad for flat in self.flats]  # type: ignore[misc]

    def apply(self) -> None:
        """Step the optimizer for each parameter group in turn, then all-gather the weights."""
        for group, flat in enumerate(self.flats):
            self.step_flat(group)
            flat.grad = None
        self.zero.update_lp_params()

    def refresh(self) -> None:
        """All-gather the weights; on gloo with broadcasts, because gloo's all-gather takes four times as long."""
        if not over_gloo():
            self.zero.update_lp_params()
            return
        for parts, master in zip(self.zero.parallel_partitioned_bit16_groups, self.flats, strict=True):
            parts[dist.get_rank()].data.copy_(master.data)
            for owner, part in enumerate(parts):
                dist.broadcast(part.data, owner)


class Shards(ZeroState):
    """ZeRO 3: the flat tensors of a sub-group hold this worker's part of every parameter in the sub-group."""

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        check_names(zero, "the optimizer of ZeRO 3")
        super().__init__(engine, zero.optimizer, zero.fp32_partitioned_groups_flat)  # one master for each sub-group
        for p in engine.module.parameters():
            check_names(p, "a parameter of ZeRO 3")
        # Replaces DeepSpeed's own step; `apply` or `drop` is called instead.
        zero.step = lambda: None
        # After every backward pass DeepSpeed's host waits until the gradients are reduced, and the device idles until
        # the next micro-batch is launched. The host reads nothing there, so it is enough that the device's next work
        # waits for the stream of the reduction.
        stream = zero.reduce_and_partition_stream
        if stream is not None:  # None on a CPU
            from deepspeed.accelerator import get_accelerator

            stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return this worker's equal share of the parameter, without the padding of the last share."""
        part = p.ds_tensor.numel()
        start = dist.get_rank() * part
        length = max(min(part, p.ds_numel - start), 0)
        views = {}
        for kind in kinds:
            padded, _ = self.zero._get_fp32_opt_state_partition(p, False, None if kind == "master" else kind)
            views[kind] = padded[:length]
        return start, views

    def gradients(self) -> list[Tensor]:
        """Concatenate the reduced gradients in fp32, and release the gathered weights."""
        zero = self.zero
        zero._pre_step()
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._prepare_sub_group(group, set())
        # The flat gradients are copies, so those in the parameters can be freed.
        zero.zero_grad(set_to_none=True)
        return [flat.grad for flat in self.flats]  # type: ignore[misc]

    def apply(self) -> None:
        """Step the optimizer for each sub-group in turn, then gather the parameters that ZeRO never partitions."""
        zero = self.zero
        for group in range(len(zero.fp16_groups)):
            self.step_flat(group)
            zero._reassign_or_swap_out_partitioned_parameters(group)
            zero._release_sub_group(group, set())
        zero._post_step(set())

    def refresh(self) -> None:
        """Copy the master weights to the model weights, and update their gathered copies.

        DeepSpeed does this only in its own step.
        """
        zero = self.zero
        for group, flat in enumerate(self.flats):
            zero.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(group)
        # Parameters gathered earlier, and small ones that ZeRO never partitions, still have the old values,
        # which the next forward pass would use.
        self.engine.empty_partition_cache()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


# The ZeroState class of each ZeRO stage, to be created from DeepSpeed's engine. Raises ConfigError if DeepSpeed's
# optimizer or its parameters lack a name used here.
STATES: dict[int, Callable[[Any], ZeroState]] = {0: Replicas, 1: Partitions, 2: Partitions, 3: Shards}
