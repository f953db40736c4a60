"""DeepSpeed behind four verbs: backward, step, fragments, restore. Nothing else in Patchline touches its insides.

The optimizer state leaves and enters as *fragments*: (parameter name, first element, flat fp32 views). They know
nothing of the world size or the ZeRO stage, so what one topology wrote any other can read. DeepSpeed's own
checkpoints are not used: they cannot cross stages and load flipped bits silently. `tests/test_engine.py` guards
every private attribute used here.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.errors import ConfigError
from pipeline.config import require
from pipeline.optimizer import STATE, OptimConfig, build_optimizer


@dataclass(frozen=True)
class Fragment:
    """What this worker owns of one parameter: `tensors` are flat views, elements [start, start + len)."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "master" and the optimizer's per-element state


def join_group(timeout_s: float) -> torch.device:
    """Join (or adopt) the process group and return this worker's device; NCCL on GPUs, gloo otherwise.

    The time-out holds for every later group too: DeepSpeed makes groups of its own and forgets it.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # JIT-builds for minutes, never used, leaks /dev/shm
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    original = dist.new_group
    dist.new_group = lambda *args, **kwargs: original(*args, **{"timeout": timeout, **kwargs})
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


def deepspeed_config(
    *, zero: int, precision: str, micro_batch: int, accumulation: int, clip: float, user_file: str | None
) -> dict[str, Any]:
    """Our DeepSpeed settings, with the user's own ds_config.json merged in.

    Raises ConfigError where the user's file sets something that Patchline derives to another value.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # SGD with momentum
        "zero_optimization": {"stage": zero},
    }
    if zero == 3:
        # The default replaces torch's linear for the whole process and changes later models' bf16 numerics.
        ours["zero_optimization"]["memory_efficient_linear"] = False
    if precision == "bf16":
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if zero > 1:  # at stage 1 this selects another optimizer class, without fragments: bf16 accumulation there
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if user_file is None:
        return ours
    try:
        user = json.loads(Path(user_file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed file {user_file}: {error}") from None
    return _merge(ours, user, "deepspeed")


def _merge(ours: Mapping[str, Any], user: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in user.items():
        mine = ours.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(mine, value, f"{where}.{key}")
        else:
            conflict = key in ours and value not in (mine, "auto")
            require(
                not conflict,
                f"{where}.{key}: your file says {value!r}, the recipe {mine!r}; remove one of them",
            )
            merged[key] = mine if key in ours else value
    return merged


class Engine:
    """A model under DeepSpeed ZeRO with an optimizer whose masters and moments are fp32.

    With `polyak` > 0 also an fp32 "average" of the masters: after each applied update it becomes
    polyak · average + (1 − polyak) · master. It starts as the initial weights, which the paper does not say (B.1.1
    gives the factor alone); after n updates they weigh polyakⁿ, of 20,000 with factor 0.9999 that is 14 %.
    """

    def __init__(
        self, model: nn.Module, decayed: Set[str], optim: OptimConfig, settings: dict[str, Any], polyak: float = 0.0
    ) -> None:
        import deepspeed

        self.zero = settings["zero_optimization"]["stage"]
        self.polyak = polyak
        self.state_names = (*STATE[optim.name], *(("average",) if polyak else ()))
        self.clip = settings["gradient_clipping"]
        if self.zero == 0:
            # We clip: DeepSpeed cannot after a dropped gradient.
            settings = {**settings, "gradient_clipping": 0.0}
        self.sizes = {name: p.numel() for name, p in model.named_parameters()}
        rounds = "bf16" in settings
        masters = {name: p.detach().clone() for name, p in model.named_parameters() if rounds}
        optimizer = build_optimizer(model, decayed, optim)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.model: nn.Module = self.engine.module
        self.forward: nn.Module = self.engine  # what a training step computes logits with
        self.dtype = torch.bfloat16 if rounds else torch.float32
        if rounds:  # DeepSpeed made its masters from the rounded weights
            self.restore(lambda name, kind, start, count: masters[name].flatten()[start : start + count], ("master",))
            masters.clear()
        self._start_state()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer if self.zero else self.engine.optimizer

    @property
    def _flats(self) -> list[Tensor]:
        """The fp32 tensors that the optimizer steps on this worker; its state hangs on them."""
        if self.zero in (1, 2):
            return self.engine.optimizer.single_partition_of_fp32_groups
        if self.zero == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _start_state(self) -> None:
        """Allocate the state now, so that a checkpoint of step 0 and a resume find it."""
        inner = self._optimizer
        for flat in self._flats:
            state = inner.state[flat]
            state.update({name: torch.zeros_like(flat) for name in self.state_names})
            if self.polyak:
                state["average"].copy_(flat.detach())
            if "exp_avg" in self.state_names:
                device = flat.device if inner.defaults.get("fused") else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if self.zero in (1, 2):
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` / (accumulation × world), reduced over workers as ZeRO does."""
        self.engine.backward(loss)

    def end_micro_batch(self, rate: float) -> None:
        """Close a micro-batch; at the last of an accumulation the optimizer steps with this learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self.zero == 0 and self.engine.is_gradient_accumulation_boundary():
            self._guard_stage_0()
        stepping = self.engine.is_gradient_accumulation_boundary()
        self.engine.step()
        if self.polyak and stepping and math.isfinite(self.gradient_norm()):
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for flat in self._flats:
            self._optimizer.state[flat]["average"].mul_(self.polyak).add_(flat, alpha=1 - self.polyak)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Collective: within the block the model's weights are the average; the masters come back unchanged."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for flat in self._flats:
            average = self._optimizer.state[flat]["average"]
            master = flat.detach().clone()
            flat.copy_(average)
            average.copy_(master)
        self._refresh()

    def _guard_stage_0(self) -> None:
        """ZeRO 1–3 skip a non-finite step themselves; at stage 0 dropping the gradients makes it a no-op."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if not math.isfinite(self._norm):
            for p in parameters:
                p.grad = None
        elif self.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, torch.tensor(self._norm))

    def gradient_norm(self) -> float:
        """Global norm of the last step's averaged gradient before clipping; not finite where the step was skipped."""
        if self.zero == 0:
            return self._norm
        norm = self.engine.get_global_grad_norm()
        return math.inf if self.engine.optimizer.overflow or norm is None else float(norm)

    def fragments(self, kinds: tuple[str, ...] | None = None) -> Iterator[Fragment]:
        """Views of the fp32 masters and state that this worker owns, each element owned by exactly one worker."""
        kinds = kinds or ("master", *self.state_names)
        rank, world = dist.get_rank(), dist.get_world_size()
        p: Any  # DeepSpeed hangs its own attributes on parameters
        for name, p in self.model.named_parameters():
            if self.zero == 0:
                part = math.ceil(p.numel() / world)
                start, stop = min(rank * part, p.numel()), min((rank + 1) * part, p.numel())
                views = {kind: self._replica(p, kind)[start:stop] for kind in kinds}
            elif self.zero < 3:
                if p._hp_mapping is None:
                    continue
                start = p._hp_mapping.lp_fragment_address.start
                views = {k: p._hp_mapping.get_hp_fragment(None if k == "master" else k) for k in kinds}
            else:
                part = p.ds_tensor.numel()
                start, stop = rank * part, min((rank + 1) * part, p.ds_numel)
                views = {kind: self._partition(p, kind)[: max(stop - start, 0)] for kind in kinds}
            if views[kinds[0]].numel():
                yield Fragment(name, start, views)

    def _replica(self, p: Any, kind: str) -> Tensor:
        """Stage 0: the whole flat master or state, which every worker has."""
        return (p.data if kind == "master" else self._optimizer.state[p][kind]).view(-1)

    def _partition(self, p: Any, kind: str) -> Tensor:
        """Stage 3: this worker's part of a flat master or state, padded where the last part is short."""
        key = None if kind == "master" else kind
        return self.engine.optimizer._get_fp32_opt_state_partition(p, False, key)[0]

    @torch.no_grad()
    def restore(self, read: Any, kinds: tuple[str, ...] | None = None) -> None:
        """Fill the state in place: `read(name, kind, start, count)` → flat fp32 tensor; then refresh the weights.

        At stage 0 every worker holds everything, so everything is read, not the worker's own part alone.
        """
        for fragment in self._whole(kinds) if self.zero == 0 else self.fragments(kinds):
            for kind, view in fragment.tensors.items():
                view.copy_(read(fragment.name, kind, fragment.start, view.numel()))
        self._refresh()

    def _refresh(self) -> None:
        """Bring the weights that compute up to the masters."""
        if self.zero in (1, 2):
            self.engine.optimizer.update_lp_params()
        elif self.zero == 3:
            self._refresh_stage_3()

    def _whole(self, kinds: tuple[str, ...] | None) -> Iterator[Fragment]:
        for name, p in self.model.named_parameters():
            yield Fragment(name, 0, {kind: self._replica(p, kind) for kind in kinds or ("master", *self.state_names)})

    def _refresh_stage_3(self) -> None:
        zero = self.engine.optimizer
        for group, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(group)
        self.engine.empty_partition_cache()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    @property
    def updates(self) -> int:
        """Optimizer updates so far: Adam's bias correction depends on it; it is behind `step` by skipped steps."""
        state: dict[str, Any] = next(iter(self._optimizer.state.values()), {})
        return int(state["step"]) if "step" in state else 0

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)

    def close(self) -> None:
        """Give back DeepSpeed's hooks and buffers."""
        self.engine.destroy()
