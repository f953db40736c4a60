"""The optimizer step on the flat partitions that DeepSpeed has made, at each ZeRO stage, in place of DeepSpeed's own.

1. `gradients`: what this worker owns of the averaged gradient, as the few flat tensors that the optimizer steps.
2. The engine adds up their norm over the workers, and decides (`pipeline.engine.norm`).
3. `apply` has the optimizer step with them, and brings the weights that compute up to the masters; or `drop` makes
   them, and the step, not have been.

DeepSpeed's `step` would look for overflow and take the norm parameter by parameter, and read each from the device.
What else its `step` does is done here in its order, with its own functions; `tests/test_engine.py` guards their names.

In:  ZeRO 2, two workers, and on rank 0 the gradient of "head.weight" elements 0 … 4 lies in DeepSpeed's buckets
Out: one fp32 tensor for each parameter group on rank 0, and after `apply` the same weights on both workers
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Update(ABC):
    """Takes the optimizer's step; `is_shared`: every worker owns a part of the gradient, not all of it."""

    is_shared = True

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this worker's part of the step's averaged gradient."""

    @abstractmethod
    def apply(self) -> None:
        """Collective: step, and bring the weights that compute up to the masters."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the gradient: neither weights nor moments change."""


class Replicas(Update):
    """ZeRO 0: every worker has the whole gradient, in the parameters; DeepSpeed's engine calls torch's optimizer."""

    is_shared = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter that has one."""
        gradients = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradients.append(p.grad)
        return gradients

    def apply(self) -> None:
        """Do nothing: `step` of DeepSpeed's engine, called next, is the optimizer's. In the others it takes no step."""

    def drop(self) -> None:
        """Take the gradients away: a parameter without one is passed over by the optimizer."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


class Partitions(Update):
    """ZeRO 1 and 2: a flat fp32 tensor for each parameter group holds this worker's part of it."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero  # DeepSpeed's optimizer
        zero.step = self.step

    def gradients(self) -> list[Tensor]:
        """Put the reduced gradients end to end, in fp32; what they lay in is free afterwards."""
        zero = self.zero
        flats = zero.single_partition_of_fp32_groups
        for group, flat in enumerate(flats):
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
        return [flat.grad for flat in flats]

    def step(self) -> None:
        """Do nothing in DeepSpeed's own step but to begin a new accumulation: `apply` or `drop` has been called."""
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        self.zero.micro_step_id = INITIAL_MICRO_STEP_ID

    def apply(self) -> None:
        """Step group by group, then gather the weights of all workers."""
        zero = self.zero
        for group, flat in enumerate(zero.single_partition_of_fp32_groups):
            zero._optimizer_step(group)
            flat.grad = None
        zero.update_lp_params()

    def drop(self) -> None:
        """Forget the flat gradients."""
        for flat in self.zero.single_partition_of_fp32_groups:
            flat.grad = None


class Shards(Update):
    """ZeRO 3: the flat tensors of a sub-group hold this worker's part of every parameter in it."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero  # DeepSpeed's optimizer
        zero.step = self.step
        order_on_the_device(zero.reduce_and_partition_stream)

    def gradients(self) -> list[Tensor]:
        """Put the reduced gradients end to end, in fp32; the weights that were gathered are given back."""
        zero = self.zero
        zero._pre_step()
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._prepare_sub_group(group, set())
        # The flat gradients are copies of what lies in the parameters.
        zero.zero_grad(set_to_none=True)
        return [flat.grad for flat in zero.fp32_partitioned_groups_flat]

    def step(self) -> None:
        """Do nothing in DeepSpeed's own step: `apply` or `drop` has been called."""

    def apply(self) -> None:
        """Step sub-group by sub-group, then gather the parameters that are never partitioned."""
        zero = self.zero
        for group in range(len(zero.fp16_groups)):
            zero._optimizer_step(group)
            zero._reassign_or_swap_out_partitioned_parameters(group)
            zero._release_sub_group(group, set())
        zero._post_step(set())

    def drop(self) -> None:
        """Forget the flat gradients."""
        for flat in self.zero.fp32_partitioned_groups_flat:
            flat.grad = None


def order_on_the_device(stream: Any) -> None:
    """Have what the device computes next wait for a stream of DeepSpeed's, where DeepSpeed would have the host wait.

    At the end of every backward pass DeepSpeed's host waits until the gradients of ZeRO 3 are reduced, and the device
    has nothing to do until the next micro-batch is launched. Nothing is read there: the order on the device is enough.
    """
    if stream is None:  # a CPU has none
        return
    from deepspeed.accelerator import get_accelerator

    def synchronize() -> None:
        get_accelerator().current_stream().wait_stream(stream)

    stream.synchronize = synchronize


def update_of(stage: int, zero: Any) -> Update:
    """Return what steps at a ZeRO stage; `zero` is the optimizer that DeepSpeed has made."""
    if stage == 0:
        return Replicas(zero)
    if stage == 3:
        return Shards(zero)
    return Partitions(zero)
