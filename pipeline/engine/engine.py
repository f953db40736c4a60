"""A model under DeepSpeed ZeRO: backward pass, optimizer step, and the fp32 state for checkpoints.

A step:
1. `backward` accumulates gradients, reduced over the workers as ZeRO does.
2. At the last micro-batch every worker sums the squares of its part of the gradient, on the device.
3. One reduction sums the squares over the workers, together with the training loop's numbers: loss, bad samples, number
   of workers with a stop request, number of workers with a completely written checkpoint file.
4. The sums are copied to the host together. Only here does the host wait for the device, and it must, because the norm
   decides whether the optimizer steps. DeepSpeed waits four times for the norm alone, launches two kernels for every
   parameter, and needs two more reductions.
5. All workers either step the optimizer or drop the gradient (pipeline/engine/deepspeed.py).

In:  two workers with the gradients (3, 0) and (0, 4), and each with the numbers (loss 0.5, stop 1)
Out: norm 5.0 and the sums (1.0, 2.0), on both

The state is read and written as fragments, which are independent of the world size and the ZeRO stage, so that state
written by one topology can be read by any other. For example, with two workers at ZeRO 2, the parameter "head.bias" of
10 elements is Fragment("head.bias", 0, {"master": (5,), "exp_avg": (5,), "exp_avg_sq": (5,)}) on rank 0, and a fragment
of the same form that begins at element 5 on rank 1. DeepSpeed's own checkpoints are not used, because they cannot be
loaded at another ZeRO stage, and flipped bits in them are not detected.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.engine.deepspeed import STATES, Part, import_deepspeed, one_optimizer_class
from pipeline.engine.flat_blocks import FlatBlocks
from pipeline.engine.settings import Settings, bucket_size
from pipeline.monitoring.telemetry import Telemetry
from pipeline.optimization import STATE, OptimConfig, build_optimizer
from pipeline.training_config import TrainConfig

# (parameter name, "master" or name of a state, first element, number of elements) → flat fp32 tensor
ReadState: TypeAlias = Callable[[str, str, int, int], Tensor]

# Number of elements whose squares are summed in fp32. On CPUs torch sums a long vector in a few running sums: over 67
# million elements the norm was 0.5 % too small; in rows of 4,096 it is accurate to 4e-9, in the same time.
ROW = 4096


class Fragment(NamedTuple):
    """The part of one parameter that this worker owns: `tensors` are flat views of elements [start, start + len)."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "master" and the optimizer's per-element state


class Trace(NamedTuple):
    """Checksums that identify a step's inputs and results bit for bit."""

    losses: list[float]  # loss of every part
    gradients: list[float]  # checksum of every part's gradient
    states: list[float]  # checksum of every worker's master weights and moments, before the step


class Engine:
    """A model under DeepSpeed ZeRO with an optimizer whose master weights and moments are fp32.

    With `polyak` > 0 it also holds an fp32 "average" of the master weights: after each applied update it becomes
    polyak · average + (1 − polyak) · master. It starts as the initial weights, because the paper (B.1.1) gives the
    factor but no initial value. After n updates, the weight of the initial weights in the average is polyakⁿ: 14 %
    after 20,000 updates with the factor 0.9999.
    """

    def __init__(
        self, model: nn.Module, decayed: Set[str], optim: OptimConfig, settings: Settings, polyak: float = 0.0
    ) -> None:
        """Collective: wrap a model in DeepSpeed; `decayed` names the parameters with weight decay.

        `settings` are the DeepSpeed settings returned by `deepspeed_config`. Raises ConfigError if this DeepSpeed
        version lacks private names that Patchline uses.
        """
        deepspeed = import_deepspeed()
        self.zero: int = settings["zero_optimization"]["stage"]
        self.polyak = polyak
        self.state_names: tuple[str, ...] = STATE[optim.name]
        if polyak:
            self.state_names = (*self.state_names, "average")
        self.clip: float = settings["gradient_clipping"]
        self.sums_in: str = settings["communication_data_type"]  # data type in which workers sum gradients
        # Clipping is done here, with the norm that decides whether the optimizer steps (`end_micro_batch`).
        settings = {**settings, "gradient_clipping": 0.0}
        is_bf16 = "bf16" in settings
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        self.updates = 0  # optimizer updates so far, without skipped steps
        # Global norm of the last step's averaged gradient before clipping; infinite if the step was skipped.
        self.gradient_norm = 0.0
        self.trace: Trace | None = None  # trace of the last step; None: sums have no fixed order, so runs differ
        self.sizes: dict[str, int] = {}  # number of elements of every parameter, by its name in the plain model
        # A context for each backward pass, collective; an extra may replace it.
        self.around_backward: Callable[[Tensor], AbstractContextManager[object]] = nullcontext
        # Copy the fp32 values before DeepSpeed rounds the weights to bf16 in place.
        masters: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            self.sizes[name] = p.numel()
            if is_bf16:
                masters[name] = p.detach().clone().flatten()

        # First, so that the user's settings can override it.
        bucket = {"reduce_bucket_size": bucket_size(sum(self.sizes.values()))}
        settings = {**settings, "zero_optimization": {**bucket, **settings["zero_optimization"]}}
        flat_blocks = FlatBlocks(model, decayed)
        self.members = flat_blocks.members
        # A plain torch optimizer: DeepSpeed's compile at first use, FusedAdam for 145 CPU-seconds.
        optimizer = build_optimizer(model, flat_blocks.decayed, optim)
        with one_optimizer_class(), flat_blocks.during_deepspeed_setup():
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings, dist_init_required=False
            )
        self.state = STATES[self.zero](self.engine)
        self.model: nn.Module = self.engine.module
        self.forward: nn.Module = self.engine  # computes the logits of a training step

        # DeepSpeed created its master weights from weights rounded to bf16: replace them with the unrounded values.
        if is_bf16:
            with torch.no_grad():
                for name, start, tensors in self.fragments(("master",), held=True):
                    view = tensors["master"]
                    view.copy_(masters[name][start : start + view.numel()])
                self.state.refresh()
            masters.clear()

        # Torch creates the optimizer's state at the first update; a checkpoint of step 0 and a resume need it earlier.
        optimizer = self.state.optimizer
        for flat in self.state.flats:
            state = optimizer.state[flat]
            for name in self.state_names:
                state[name] = torch.zeros_like(flat)
            if polyak:
                state["average"].copy_(flat.detach())
            # Adam counts its updates in a tensor: on the device for torch's fused kernel, on the CPU for the others.
            if "exp_avg" in self.state_names:
                device = flat.device if optimizer.defaults.get("fused") else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.state.link_state()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss` / (accumulation × world), reduced over the workers as ZeRO does."""
        with self.around_backward(loss):
            self.engine.backward(loss)

    def gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the gradient of `loss` for each of DeepSpeed's parameters, without reduction."""
        # Not loss.backward(), which would run DeepSpeed's hooks. Unused parameters get zeros and keep their places.
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))

    def by_member(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Split gradients of DeepSpeed's parameters into flat ones of the plain model's parameters."""
        members = self.members.values()
        return [gradients[at.holder].reshape(-1)[at.start : at.start + at.size] for at in members]

    def end_micro_batch(self, rate: float, numbers: Tensor | None = None) -> list[float]:
        """End a micro-batch; after the last one of a step, run the optimizer step with this learning rate.

        The call for the last micro-batch is collective, and returns the sums over all workers of `numbers` (n,),
        float64, on the device. They are reduced together with the gradient norm, so that the host waits for the device
        once per step.
        """
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
        # Checked before DeepSpeed's step(), which moves on to the next micro-batch; until the last it only counts.
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()
            return []
        with torch.no_grad():
            # 1. Sum the squares of this worker's part. If every worker has the whole gradient (ZeRO 0), rank 0 provides
            #    the norm and the others add 0.
            gradients = self.state.gradients()
            vector = sum_of_squares(gradients).reshape(1)
            if not self.state.is_shared and dist.get_rank() != 0:
                vector = torch.zeros_like(vector)
            if numbers is not None:
                vector = torch.cat([vector, numbers])

            # 2. Sum over all workers. The host waits here until the device has computed everything so far.
            dist.all_reduce(vector)
            squares, *sums = vector.tolist()
            norm = math.sqrt(squares)

            # 3. All workers have read the same bits, so all of them skip the step together if the gradient is not
            #    finite: then nothing changes on any worker.
            is_finite = math.isfinite(norm)
            self.gradient_norm = norm if is_finite else math.inf
            self.state.note_norm(self.gradient_norm)
            if is_finite:
                factor = clipping(norm, self.clip)
                if factor < 1:
                    torch._foreach_mul_(gradients, factor)
                # A group's gradient can be freed once the optimizer has stepped it; this list would keep all of them.
                del gradients
                self.state.apply()
            else:
                self.state.drop()

        # 4. With ZeRO stage 0 the optimizer steps here; with other stages it has already stepped, and this call only
        # advances the step counter.
        self.engine.step()
        # A skipped step is not an update: it must not move the average towards the master weights.
        if is_finite:
            self._count_update()
        return sums

    def mean_loss(self, loss_sum: float, samples: int) -> float:
        """Return the last step's mean loss; `loss_sum` is the sum over all workers."""
        return loss_sum / samples

    def report_start(self, cfg: TrainConfig, telemetry: Telemetry, step: int) -> None:
        """Collective: measure and report properties of this cluster at the start of an attempt."""

    @torch.no_grad()
    def _count_update(self) -> None:
        """Count an optimizer update, and update the averaged weights."""
        self.updates += 1
        if not self.polyak:
            return
        for flat in self.state.flats:
            self.state.optimizer.state[flat]["average"].mul_(self.polyak).add_(flat, alpha=1 - self.polyak)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Collective: use the averaged weights inside the `with` block; the master weights are unchanged afterwards."""
        self._swap_average()
        yield
        # Not in a `finally`: if only one worker raises, it would wait here for the others, and its error would not be
        # logged. After an exception the engine must not be used any more.
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for flat in self.state.flats:
            average = self.state.optimizer.state[flat]["average"]
            master = flat.detach().clone()
            flat.copy_(average)
            # The master weights are kept in the average's place; the second swap restores both to the bit.
            average.copy_(master)
        self.state.refresh()

    def fragments(self, kinds: tuple[str, ...] = (), *, held: bool = False) -> Iterator[Fragment]:
        """Iterate over views of the fp32 master weights and state that this worker owns; every element has one owner.

        `kinds` are "master" and the names of states; all of them by default. With `held`, iterate over everything that
        this worker holds: the same, except at ZeRO 0, where every worker holds every complete parameter.
        """
        kinds = kinds or ("master", *self.state_names)
        part_of = self.state.held if held else self.state.owned
        parts: dict[str, Part] = {}
        for name, p in self.model.named_parameters():
            parts[name] = part_of(p, kinds)
        # DeepSpeed's parameters are the flat ones of whole blocks: split their parts into the model's own parameters.
        for name, member in self.members.items():
            start, views = parts[member.holder]
            length = 0
            if views:
                length = next(iter(views.values())).numel()
            first = max(start, member.start)
            stop = min(start + length, member.start + member.size)
            # A worker may own nothing of a small parameter; an empty fragment would be an empty entry in its file.
            if first < stop:
                tensors = {kind: view[first - start : stop - start] for kind, view in views.items()}
                yield Fragment(name, first - member.start, tensors)

    @torch.no_grad()
    def restore(self, read: ReadState, kinds: tuple[str, ...] = ()) -> None:
        """Collective: fill the state in place with the values from `read`, and update the model weights from it."""
        world = dist.get_world_size()
        for name, start, tensors in self.fragments(kinds, held=True):
            for kind, view in tensors.items():
                count = view.numel()
                if self.state.is_shared or world == 1:
                    view.copy_(read(name, kind, start, count))
                    continue
                # At ZeRO 0 every worker holds everything: each reads an equal part and they exchange the parts. The
                # last parts may be shorter, but the collective needs equal lengths.
                part = math.ceil(count / world)
                first = min(dist.get_rank() * part, count)
                stop = min(first + part, count)
                own_part = torch.zeros(part, device=view.device)
                if first < stop:
                    own_part[: stop - first] = read(name, kind, start + first, stop - first)
                gathered = torch.empty(part * world, device=view.device)
                dist.all_gather_into_tensor(gathered, own_part)
                view.copy_(gathered[:count])
        self.state.refresh()

    def load(self, read: ReadState, updates: int) -> None:
        """Collective: load the state from a checkpoint saved after this number of optimizer updates."""
        self.restore(read)
        self.updates = updates
        # Adam's bias correction uses its own count.
        for state in self.state.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(updates)

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers."""
        self.engine.destroy()


# ------------------------------------------------------------------------------------------------ the norm


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, a float64 scalar on the device; non-finite if any element is.

    It is also infinite if the norm of a row exceeds the range of fp32, which requires an element above 1.8e19; the step
    is then skipped.
    """
    norms: list[Tensor] = []
    tails: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        in_rows = flat.numel() // ROW * ROW
        if in_rows:
            norms.append(torch.linalg.vector_norm(flat[:in_rows].view(-1, ROW), dim=1))
        if in_rows < flat.numel():
            tails.append(flat[in_rows:])
    if tails:
        # As in `torch.nn.utils.get_total_norm`: one kernel for all of them on a GPU.
        norms.append(torch.stack(torch._foreach_norm(tails)))
    return torch.cat(norms).double().square().sum()


def clipping(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient with this norm; 1.0 if there is no limit, or if the norm is below it."""
    if not limit:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))  # same formula as torch.nn.utils.clip_grad_norm_


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers from the host into a float64 tensor on the device, without waiting for the device."""
    # With unpinned memory the host would wait until the device reaches the copy.
    numbers = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)
