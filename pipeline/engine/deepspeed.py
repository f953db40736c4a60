"""DeepSpeed's insides, at each ZeRO stage: the only file with names that DeepSpeed's documentation lacks.

1. `import_deepspeed` imports the package, and checks that what `NAMES` says of its modules is there.
2. DeepSpeed makes its optimizer, which holds fp32 masters and moments. STATES has a ZeroState for it, which checks the
   names of that optimizer: Replicas at ZeRO 0, Partitions at 1 and 2, Shards at 3.
3. Every step: `gradients` gives what this worker owns of the averaged gradient, as the few flat tensors that the
   optimizer steps. The engine adds up their norm over the workers, and decides. `apply` has the optimizer step, and
   brings the weights that compute up to the masters; or `drop` makes the gradient, and the step, not have been.
4. A checkpoint: `owned` gives views of what this worker owns of a parameter, `refresh` follows a restore.

DeepSpeed's own `step` would look for overflow and take the norm parameter by parameter, and read each from the device.
What else its `step` does is done here in its order, with its own functions.

In:  ZeRO 2, two workers, and on rank 0 the gradient of "head.weight" elements 0 … 4 lies in DeepSpeed's buckets
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

# What this worker has of one of DeepSpeed's parameters: (first element, flat views of what follows it, by kind).
Part: TypeAlias = tuple[int, dict[str, Tensor]]

EXPECTED = "0.19.8"  # whose insides these are; pyproject.toml pins it, and a test compares the two

# Every name that is used here and that DeepSpeed's documentation does not have, by what has it.
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
    """Raise ConfigError where what NAMES calls `of` lacks a name: DeepSpeed is another version than was tested."""
    missing = [name for name in NAMES[of].split() if not has_name(owner, name)]
    if missing:
        version = import_module("deepspeed").__version__
        raise ConfigError(
            f"DeepSpeed {version}: {of} has no {', '.join(missing)}\n"
            f"  expected DeepSpeed {EXPECTED}, whose insides Patchline uses (pipeline/engine/deepspeed.py)\n"
            f"  type: pip install deepspeed=={EXPECTED}"
        )


def has_name(owner: object, name: str) -> bool:
    """Return whether something has an attribute, without computing one that a module makes at its first access."""
    if not isinstance(owner, ModuleType) or name in vars(owner):
        return hasattr(owner, name)
    # `deepspeed.ops.__getattr__` compares its argument with the one name that it makes.
    make = vars(owner).get("__getattr__")
    return make is not None and name in make.__code__.co_consts


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without what it loads for a worker that never uses it; a fork server does so for its workers.

    Raises ConfigError where it lacks a name that is used here.
    """
    # DeepSpeed looks for an accelerator when it is imported; the import waits until the variable is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # DeepSpeed finds out at the first access which of its operators it could build: it starts compilers, asks every GPU
    # for its properties, and on CPUs builds this operator (81 CPU-seconds), which it never uses. A build that is killed
    # leaves a lock on which every later run hangs; one that loads leaves 69 MB per worker in /dev/shm. Nothing here
    # needs another operator, so the answer is set before anything reads it.
    check_names(deepspeed.ops, "deepspeed.ops")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}

    # Torch's optimizers import it at their first step, for a CPU-second of every worker; a fork server pays it once.
    import_module("torch._dynamo")
    for name in NAMES:
        if not name.startswith("deepspeed."):
            continue  # of what there is only with an engine
        owner: object = None  # has nothing
        with suppress(ModuleNotFoundError):
            module, _, class_name = name.rpartition(".")
            is_class = class_name[0].isupper()
            owner = getattr(import_module(module), class_name, None) if is_class else import_module(name)
        check_names(owner, name)
    from deepspeed.runtime import compiler

    # ZeRO asks whether the optimizer is Muon, which wraps its functions in torch.compile where it is imported, for
    # 0.9 CPU-seconds. With this in its place they stay as they are.
    compile_of_deepspeed = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = compile_of_deepspeed
    return deepspeed


def check_zero_section(section: Mapping[str, Any]) -> None:
    """Raise ValueError, pydantic's with `errors()`, where DeepSpeed's schema refuses a value of zero_optimization."""
    # Left to find out what it computes on, DeepSpeed warns where there is no GPU. The environment stays as it was:
    # workers that inherit it may have other devices.
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
    """Have DeepSpeed engines that are made in the block take at stage 1 the optimizer class that stage 2 takes.

    Where bf16 gradients are added up in fp32 DeepSpeed has another class for stage 1, which has no fragments, though
    the class that it has for both stages can do it at either.
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
    """Have ZeRO 3 take it, within the block, that the other workers run the layers in the same order, unasked."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    original = partitioned_param_coordinator.assert_ints_same_as_other_ranks
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda order: None
    try:
        yield
    finally:
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = original


def over_gloo() -> bool:
    """Return whether the workers reach one another over gloo; a traced step answers as real workers would."""
    return dist.get_backend() == "gloo"


# ------------------------------------------------------------------------------------------------ the stages


class ZeroState(ABC):
    """Knows what differs from stage to stage; `zero` is the optimizer that DeepSpeed has made, at stage 0 torch's.

    `optimizer` is torch's. `flats` are the fp32 tensors that it steps on this worker; its state hangs on them.
    """

    is_shared = True  # every worker owns a part of the gradient, not all of it

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, flats: list[Tensor]) -> None:
        self.engine = engine  # DeepSpeed's
        self.zero = engine.optimizer
        self.optimizer = optimizer
        self.flats = flats

    @abstractmethod
    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return what this worker owns of one of DeepSpeed's parameters; every element has exactly one owner."""

    def held(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return what this worker holds of a parameter: where all hold everything, more than it owns."""
        return self.owned(p, kinds)

    def link_state(self) -> None:
        """Have `owned` find the optimizer's state, which has just been made."""
        return

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this worker's part of the step's averaged gradient."""

    def note_norm(self, norm: float) -> None:
        """Tell DeepSpeed, which counts the steps that were skipped, the gradient's norm; infinite for a skipped one."""
        if self.is_shared:  # DeepSpeed has no count of them at stage 0
            self.zero.overflow = math.isinf(norm)
            self.zero._global_grad_norm = norm

    @abstractmethod
    def apply(self) -> None:
        """Collective: step, and bring the weights that compute up to the masters."""

    def drop(self) -> None:
        """Forget the gradient: neither weights nor moments change."""
        for flat in self.flats:
            flat.grad = None

    def step_flat(self, number: int) -> None:
        """Have the optimizer step one of `flats` with the gradient that it holds."""
        self.zero._optimizer_step(number)

    def refresh(self) -> None:
        """Collective: bring the weights that compute up to the masters, which have been changed from outside."""
        return


class Replicas(ZeroState):
    """ZeRO 0: every worker has the whole gradient, in the parameters; DeepSpeed's engine calls torch's optimizer."""

    is_shared = False

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        super().__init__(engine, zero, [p for group in zero.param_groups for p in group["params"]])

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return an equal part of what every worker has, for the last worker a shorter one."""
        part = math.ceil(p.numel() / dist.get_world_size())
        start = min(dist.get_rank() * part, p.numel())
        stop = min(start + part, p.numel())
        _, views = self.held(p, kinds)
        return start, {kind: view[start:stop] for kind, view in views.items()}

    def held(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return everything."""
        views = {}
        for kind in kinds:
            views[kind] = p.data.view(-1) if kind == "master" else self.zero.state[p][kind].view(-1)
        return 0, views

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter that has one."""
        return [p.grad for p in self.flats if p.grad is not None]

    def apply(self) -> None:
        """Do nothing: `step` of DeepSpeed's engine, called next, is the optimizer's. In the others it takes no step.

        A parameter whose gradient `drop` has taken away is passed over there.
        """

    def step_flat(self, number: int) -> None:
        """Step all parameters where the last one's turn has come: torch's optimizer steps them together."""
        if number + 1 == len(self.flats):
            self.zero.step()


class Partitions(ZeroState):
    """ZeRO 1 and 2: a flat fp32 tensor for each parameter group holds this worker's part of it."""

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        check_names(zero, "the optimizer of ZeRO 1 and 2")
        super().__init__(engine, zero.optimizer, zero.single_partition_of_fp32_groups)  # a master for each group
        for p in engine.module.parameters():
            check_names(p, "a parameter of ZeRO 1 and 2")
            if p._hp_mapping is not None:
                check_names(p._hp_mapping, "the mapping of a parameter of ZeRO 1 and 2")
        # `apply` or `drop` is called in place of DeepSpeed's own step.
        zero.step = lambda: None

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return what this worker's flat partition holds of the parameter, perhaps nothing: DeepSpeed has a map."""
        mapping = p._hp_mapping
        if mapping is None:
            return 0, {}
        views = {}
        for kind in kinds:
            views[kind] = mapping.get_hp_fragment(None if kind == "master" else kind)
        return mapping.lp_fragment_address.start, views

    def link_state(self) -> None:
        """Link parameters to their state anew: DeepSpeed does it once, and fails with several parameter groups."""
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()

    def gradients(self) -> list[Tensor]:
        """Put the reduced gradients end to end, in fp32; what they lay in is free afterwards."""
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
        # The next accumulation counts anew, as behind DeepSpeed's own step.
        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        return [flat.grad for flat in self.flats]  # type: ignore[misc]

    def apply(self) -> None:
        """Step group by group, then gather the weights of all workers."""
        for group, flat in enumerate(self.flats):
            self.step_flat(group)
            flat.grad = None
        self.zero.update_lp_params()

    def refresh(self) -> None:
        """Gather the weights of all workers; gloo's all-gather, which DeepSpeed calls, takes four times as long."""
        if not over_gloo():
            self.zero.update_lp_params()
            return
        for parts, master in zip(self.zero.parallel_partitioned_bit16_groups, self.flats, strict=True):
            parts[dist.get_rank()].data.copy_(master.data)
            for owner, part in enumerate(parts):
                dist.broadcast(part.data, owner)


class Shards(ZeroState):
    """ZeRO 3: the flat tensors of a sub-group hold this worker's part of every parameter in it."""

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        check_names(zero, "the optimizer of ZeRO 3")
        super().__init__(engine, zero.optimizer, zero.fp32_partitioned_groups_flat)  # a master for each sub-group
        for p in engine.module.parameters():
            check_names(p, "a parameter of ZeRO 3")
        # `apply` or `drop` is called in place of DeepSpeed's own step.
        zero.step = lambda: None
        # At the end of every backward pass DeepSpeed's host waits until the gradients are reduced, and the device has
        # nothing to do until the next micro-batch is launched. Nothing is read there: it is enough that what the device
        # computes next waits for the stream of the reduction.
        stream = zero.reduce_and_partition_stream
        if stream is not None:  # a CPU has none
            from deepspeed.accelerator import get_accelerator

            stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)

    def owned(self, p: Any, kinds: tuple[str, ...]) -> Part:
        """Return one of the equal parts that every parameter is cut into, without the padding of the last."""
        part = p.ds_tensor.numel()
        start = dist.get_rank() * part
        length = max(min(part, p.ds_numel - start), 0)
        views = {}
        for kind in kinds:
            padded, _ = self.zero._get_fp32_opt_state_partition(p, False, None if kind == "master" else kind)
            views[kind] = padded[:length]
        return start, views

    def gradients(self) -> list[Tensor]:
        """Put the reduced gradients end to end, in fp32; the weights that were gathered are given back."""
        zero = self.zero
        zero._pre_step()
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._prepare_sub_group(group, set())
        # The flat gradients are copies of what lies in the parameters.
        zero.zero_grad(set_to_none=True)
        return [flat.grad for flat in self.flats]  # type: ignore[misc]

    def apply(self) -> None:
        """Step sub-group by sub-group, then gather the parameters that are never partitioned."""
        zero = self.zero
        for group in range(len(zero.fp16_groups)):
            self.step_flat(group)
            zero._reassign_or_swap_out_partitioned_parameters(group)
            zero._release_sub_group(group, set())
        zero._post_step(set())

    def refresh(self) -> None:
        """Copy masters to weights, which DeepSpeed does only in its own step, and gather them anew."""
        zero = self.zero
        for group, flat in enumerate(self.flats):
            zero.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(group)
        # Parameters gathered before, and the small ones that are never partitioned, still have the old values, and the
        # next forward pass would compute with them.
        self.engine.empty_partition_cache()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


# By ZeRO stage, to be made of DeepSpeed's engine; raises ConfigError where DeepSpeed's optimizer or its parameters lack
# a name that is used here.
STATES: dict[int, Callable[[Any], ZeroState]] = {0: Replicas, 1: Partitions, 2: Partitions, 3: Shards}
