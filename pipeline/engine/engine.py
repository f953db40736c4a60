"""DeepSpeed behind four verbs: backward, step, fragments, restore. Only this file and those of zero/ touch its insides.

The optimizer state leaves and enters as *fragments* (zero/fragments.py): (parameter name, first element, flat fp32
views). They know nothing of the world size or the ZeRO stage, so what one topology wrote any other can read.
DeepSpeed's own checkpoints are not used: they cannot cross stages and load flipped bits silently.
`tests/test_engine.py` guards every private attribute that is used.
"""

import math
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.engine.buckets import bucket_size
from pipeline.engine.deepspeed_file import merge_file
from pipeline.engine.flat_blocks import FlatBlocks
from pipeline.engine.fragments import Fragment, Fragments
from pipeline.engine.norm import clipping, norm_and_sums, sum_of_squares
from pipeline.engine.update import update_of
from pipeline.optimization.optimizer import STATE, OptimConfig, build_optimizer

# (parameter name, "master" or a state's name, first element, how many) → flat fp32 tensor
ReadState: TypeAlias = Callable[[str, str, int, int], Tensor]


def over_gloo() -> bool:
    """Return whether the workers reach one another over gloo; a traced step answers as real workers would."""
    return dist.get_backend() == "gloo"


def deepspeed_config(
    *, zero: int, precision: str, micro_batch: int, accumulation: int, clip: float, user_file: str | None
) -> dict[str, Any]:
    """Return our DeepSpeed settings, with the tuning of the user's own ds_config.json in them.

    Raises ConfigError where that file sets anything else (pipeline.engine.deepspeed_file).
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": None,
        # DeepSpeed refuses torch's SGD under ZeRO without this.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed would add bf16 gradients in bf16, which rounds at every worker: 0.8 % off over 64, 1.6 % over 256.
        "communication_data_type": "fp32",
        # DeepSpeed's speed, which nobody reads, has the host wait for the device twice a micro-batch.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": zero},
    }
    if zero == 3:
        # The default replaces torch's linear function for the whole process, even after the engine is closed, and
        # changes the bf16 results of models that come later.
        ours["zero_optimization"]["memory_efficient_linear"] = False
    if precision == "bf16":
        ours["bf16"] = {"enabled": True}
        # Left to itself DeepSpeed would add up micro-batches in bf16.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if user_file is None:
        return ours
    return merge_file(ours, user_file, zero)


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


class Engine:
    """A model under DeepSpeed ZeRO with an optimizer whose masters and moments are fp32.

    With `polyak` > 0 also an fp32 "average" of the masters: after each applied update it becomes
    polyak · average + (1 − polyak) · master. It starts as the initial weights: the paper (B.1.1) gives the factor and
    does not say where the average starts. After n updates the initial weights still have the share polyakⁿ, which is
    14 % after 20,000 updates with the factor 0.9999.
    """

    def __init__(
        self, model: nn.Module, decayed: Set[str], optim: OptimConfig, settings: dict[str, Any], polyak: float = 0.0
    ) -> None:
        """Collective. `decayed` names the parameters with weight decay, `settings` are `deepspeed_config`'s."""
        import deepspeed

        self.zero: int = settings["zero_optimization"]["stage"]
        self.polyak = polyak
        self.state_names: tuple[str, ...] = STATE[optim.name]
        if polyak:
            self.state_names = (*self.state_names, "average")
        self.clip: float = settings["gradient_clipping"]
        self.sums_in: str = settings["communication_data_type"]  # the type that gradients are added over workers in
        # We clip ourselves, with the norm that decides whether the optimizer steps (`end_micro_batch`).
        settings = {**settings, "gradient_clipping": 0.0}
        is_bf16 = "bf16" in settings
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        self._updates = 0
        self._norm = 0.0
        self.sizes: dict[str, int] = {}  # elements of every parameter, by its name in the plain model
        # DeepSpeed rounds the weights in place to bf16, so the fp32 values are copied before it sees the model.
        masters: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            self.sizes[name] = p.numel()
            if is_bf16:
                masters[name] = p.detach().clone().flatten()

        # Before the user's own, which may name another size.
        bucket = {"reduce_bucket_size": bucket_size(sum(self.sizes.values()))}
        settings = {**settings, "zero_optimization": {**bucket, **settings["zero_optimization"]}}
        flat_blocks = FlatBlocks(model, decayed)
        self.members = flat_blocks.members
        # A plain torch optimizer: those of DeepSpeed compile at first use, FusedAdam for 145 CPU-seconds.
        optimizer = build_optimizer(model, flat_blocks.decayed, optim)
        with one_optimizer_class(), flat_blocks.while_deepspeed_is_made():
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings, dist_init_required=False
            )
        self._update = update_of(self.zero, self.engine.optimizer)
        self.model: nn.Module = self.engine.module
        self._fragments = Fragments(self.zero, self.model, self.members, self.engine.optimizer)
        self.forward: nn.Module = self.engine  # what a training step computes logits with

        # DeepSpeed made its masters from weights that it had rounded to bf16: put the ones before rounding there.
        if is_bf16:

            def read_master(name: str, kind: str, start: int, count: int) -> Tensor:
                return masters[name][start : start + count]

            self.restore(read_master, ("master",))
            masters.clear()
        self._start_state()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer if self.zero else self.engine.optimizer

    @property
    def _flats(self) -> list[Tensor]:
        """Return the fp32 tensors that the optimizer steps on this worker; its state hangs on them."""
        if self.zero in (1, 2):
            return self.engine.optimizer.single_partition_of_fp32_groups
        if self.zero == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _start_state(self) -> None:
        """Allocate the optimizer's state before its first update."""
        # Torch makes an optimizer's state at its first update; a checkpoint of step 0 and a resume need it earlier.
        inner = self._optimizer
        for flat in self._flats:
            state = inner.state[flat]
            for name in self.state_names:
                state[name] = torch.zeros_like(flat)
            if self.polyak:
                state["average"].copy_(flat.detach())
            # Adam counts its updates in a tensor. Torch's fused kernel wants it on the device, the others on the CPU.
            if "exp_avg" in self.state_names:
                device = flat.device if inner.defaults.get("fused") else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        # DeepSpeed links parameters to their state once, when it is first asked. With several parameter groups its own
        # accessor fails without this, so the link is made anew, to the state above.
        if self.zero in (1, 2):
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` / (accumulation × world), reduced over workers as ZeRO does."""
        self.engine.backward(loss)

    def end_micro_batch(self, rate: float, numbers: Tensor | None = None) -> list[float]:
        """Close a micro-batch; at the last of an accumulation the optimizer steps with this learning rate.

        Collective then: returns the sums over workers of what each says in `numbers` (n,), float64, on its device. They
        travel with the gradient's norm, so that the host waits for the device once a step.
        """
        self._set_rate(rate)
        # Asked before the step, because the step moves on to the next micro-batch.
        is_stepping = self.engine.is_gradient_accumulation_boundary()
        sums: list[float] = []
        if is_stepping:
            sums = self._take_step(numbers)
        # At stage 0 the optimizer steps in here; at the others it has, in `_take_step`, and this only counts.
        self.engine.step()
        # A skipped step is no update: it must not pull the average
        # towards the masters once more.
        if is_stepping and math.isfinite(self._norm):
            self._count_update()
        return sums

    @torch.no_grad()
    def _take_step(self, numbers: Tensor | None) -> list[float]:
        """Clip and update; a gradient that is not finite touches nothing, on any worker. Returns sums of `numbers`."""
        gradients = self._update.gradients()
        squares = sum_of_squares(gradients)
        # Where every worker has the whole gradient (ZeRO 0), rank 0 says what its norm is and the others add 0.
        if not self._update.is_shared and dist.get_rank() != 0:
            squares = torch.zeros_like(squares)
        norm, sums = norm_and_sums(squares, numbers)
        # All workers have read the same bits, so all of them skip the step together.
        is_finite = math.isfinite(norm)
        self._norm = norm if is_finite else math.inf
        if self.zero:
            # For DeepSpeed's own count of skipped steps.
            self.engine.optimizer.overflow = not is_finite
            self.engine.optimizer._global_grad_norm = self._norm
        if not is_finite:
            self._update.drop()
            return sums
        factor = clipping(norm, self.clip)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        # A group's gradient is free once the optimizer has stepped it; this list would keep all of them.
        del gradients
        self._update.apply()
        return sums

    def _count_update(self) -> None:
        """Note that the optimizer has changed the masters."""
        self._updates += 1
        if self.polyak:
            self._average()

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def _average(self) -> None:
        for flat in self._flats:
            self._optimizer.state[flat]["average"].mul_(self.polyak).add_(flat, alpha=1 - self.polyak)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Collective: within the block the model's weights are the average; the masters come back unchanged."""
        self._swap_average()
        yield
        # Not where the block raises: a worker that does so alone would wait here for the others, and nobody would hear
        # of its error. An engine whose block has raised is of no more use.
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for flat in self._flats:
            average = self._optimizer.state[flat]["average"]
            master = flat.detach().clone()
            flat.copy_(average)
            # The masters wait in the average's place; the second swap brings both back to the bit.
            average.copy_(master)
        self._refresh()

    def gradient_norm(self) -> float:
        """Return the global norm of the last step's averaged gradient before clipping.

        It is not finite where the step was skipped.
        """
        return self._norm

    def fragments(self, kinds: tuple[str, ...] = ()) -> Iterator[Fragment]:
        """Iterate views of the fp32 masters and state that this worker owns; every element has exactly one owner.

        `kinds` are "master" and names of states; all of them, where none is named.
        """
        return self._fragments.owned(kinds or ("master", *self.state_names))

    def whole(self, kinds: tuple[str, ...] = ()) -> Iterator[Fragment]:
        """Iterate, at stage 0, where every worker has everything, every parameter as one fragment."""
        return self._fragments.whole(kinds or ("master", *self.state_names))

    @torch.no_grad()
    def restore(self, read: ReadState, kinds: tuple[str, ...] = ()) -> None:
        """Collective: fill the state in place with what `read` returns; bring the weights that compute up to it."""
        fragments = self.fragments(kinds)
        # At stage 0 every worker holds everything. Each reads an equal part, and they tell each other.
        if self.zero == 0:
            fragments = self.whole(kinds)
            read = shared_over_workers(read, next(self.model.parameters()).device)
        for fragment in fragments:
            for kind, view in fragment.tensors.items():
                view.copy_(read(fragment.name, kind, fragment.start, view.numel()))
        self._refresh()

    def load(self, read: ReadState, updates: int) -> None:
        """Collective: fill the state from a checkpoint that was saved after so many updates."""
        self.restore(read)
        self.updates = updates

    def _refresh(self) -> None:
        """Bring the weights that compute up to the masters."""
        if self.zero in (1, 2) and over_gloo():
            self._refresh_over_gloo()
        elif self.zero in (1, 2):
            self.engine.optimizer.update_lp_params()
        elif self.zero == 3:
            self._refresh_stage_3()

    def _refresh_over_gloo(self) -> None:
        # Gloo's all-gather, which DeepSpeed calls, takes four times as long as a broadcast of every worker's part.
        zero_2 = self.engine.optimizer
        for parts, master in zip(
            zero_2.parallel_partitioned_bit16_groups, zero_2.single_partition_of_fp32_groups, strict=True
        ):
            parts[dist.get_rank()].data.copy_(master.data)
            for owner, part in enumerate(parts):
                dist.broadcast(part.data, owner)

    def _refresh_stage_3(self) -> None:
        # DeepSpeed copies masters to the weights only in its own step; after a restore we do what that step does.
        zero_3 = self.engine.optimizer
        for group, flat in enumerate(zero_3.fp32_partitioned_groups_flat):
            zero_3.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
            zero_3._unflatten_partitioned_parameters(group)
        # Parameters gathered before, and the small ones that are never partitioned, still have the old values, and the
        # next forward pass would compute with them.
        self.engine.empty_partition_cache()
        if zero_3.persistent_parameters:
            zero_3.persistent_parameters[0].all_gather(zero_3.persistent_parameters)

    @property
    def updates(self) -> int:
        """Count the optimizer updates so far; skipped steps are none."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        # Adam's bias correction depends on a count of its own.
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)

    def close(self) -> None:
        """Give back DeepSpeed's hooks and buffers."""
        self.engine.destroy()


def shared_over_workers(read: ReadState, device: torch.device) -> ReadState:
    """Return a collective function that gives every worker what `read` gives, of which each reads an equal part."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    if world == 1:
        return read

    def read_a_part(name: str, kind: str, start: int, count: int) -> Tensor:
        part = math.ceil(count / world)
        first = min(rank * part, count)
        stop = min(first + part, count)
        # The last parts may be shorter, and a collective wants all of one length.
        mine = torch.zeros(part, device=device)
        if first < stop:
            mine[: stop - first] = read(name, kind, start + first, stop - first)
        whole = torch.empty(part * world, device=device)
        dist.all_gather_into_tensor(whole, mine)
        return whole[:count]

    return read_a_part
