"""A model under DeepSpeed ZeRO: backward, the optimizer's step, and the fp32 state that a checkpoint takes and gives.

A step:
1. `backward` adds gradients, reduced over the workers as ZeRO does.
2. At the last micro-batch every worker adds up the squares of its part of the gradient, on the device.
3. One reduction adds these over the workers, and beside them the numbers of the training loop: loss, bad samples, how
   many workers are asked to stop, how many have written their file.
4. The sums are read by one copy to the host. It is the only point of a step at which the host waits for the device,
   and it must: the norm decides whether the optimizer steps at all. DeepSpeed has four such points for the norm alone,
   two kernels for every parameter, and two reductions more.
5. The optimizer steps, or the gradient is dropped, on all workers alike (pipeline/engine/deepspeed.py).

In:  two workers with the gradients (3, 0) and (0, 4), and each with the numbers (loss 0.5, stop 1)
Out: norm 5.0 and the sums (1.0, 2.0), on both

The state leaves and enters as fragments, which know nothing of the world size or the ZeRO stage, so that every topology
reads what another one wrote: a parameter "head.bias" of 10 elements, with two workers at ZeRO 2, is
Fragment("head.bias", 0, {"master": (5,), "exp_avg": (5,), "exp_avg_sq": (5,)}) on rank 0, and on rank 1 the same from
element 5 on. DeepSpeed's own checkpoints are not used: they cannot cross stages and load flipped bits silently.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
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

# (parameter name, "master" or a state's name, first element, how many) → flat fp32 tensor
ReadState: TypeAlias = Callable[[str, str, int, int], Tensor]

# Elements whose squares are added in fp32. Torch adds one long vector on a CPU in a few running fp32 sums: over 67
# million elements the norm was 0.5 % too small; by rows of 4,096 it is right to 4e-9, in the same time.
ROW = 4096


class Fragment(NamedTuple):
    """Holds what this worker owns of one parameter: `tensors` are flat views, elements [start, start + len)."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "master" and the optimizer's per-element state


class Trace(NamedTuple):
    """Describes what a step was made of, to the bit."""

    losses: list[float]  # of every part
    gradients: list[float]  # checksum of every part's
    states: list[float]  # checksum of the masters and moments of every worker, before the step


class Engine:
    """A model under DeepSpeed ZeRO with an optimizer whose masters and moments are fp32.

    With `polyak` > 0 also an fp32 "average" of the masters: after each applied update it becomes
    polyak · average + (1 − polyak) · master. It starts as the initial weights: the paper (B.1.1) gives the factor and
    does not say where the average starts. After n updates the initial weights still have the share polyakⁿ, which is
    14 % after 20,000 updates with the factor 0.9999.
    """

    def __init__(
        self, model: nn.Module, decayed: Set[str], optim: OptimConfig, settings: Settings, polyak: float = 0.0
    ) -> None:
        """Collective. `decayed` names the parameters with weight decay, `settings` are `deepspeed_config`'s.

        Raises ConfigError where DeepSpeed is another version than its insides are known of.
        """
        deepspeed = import_deepspeed()
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
        self.updates = 0  # of the optimizer so far; skipped steps are none
        # The global norm of the last step's averaged gradient before clipping; not finite where the step was skipped.
        self.gradient_norm = 0.0
        self.trace: Trace | None = None  # of the last step; None: the sums have no fixed order, and no two runs agree
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
        self.state = STATES[self.zero](self.engine)
        self.model: nn.Module = self.engine.module
        self.forward: nn.Module = self.engine  # what a training step computes logits with

        # DeepSpeed made its masters from weights that it had rounded to bf16: put the ones before rounding there.
        if is_bf16:
            with torch.no_grad():
                for name, start, tensors in self.fragments(("master",), held=True):
                    view = tensors["master"]
                    view.copy_(masters[name][start : start + view.numel()])
                self.state.refresh()
            masters.clear()

        # Torch makes an optimizer's state at its first update; a checkpoint of step 0 and a resume need it earlier.
        optimizer = self.state.optimizer
        for flat in self.state.flats:
            state = optimizer.state[flat]
            for name in self.state_names:
                state[name] = torch.zeros_like(flat)
            if polyak:
                state["average"].copy_(flat.detach())
            # Adam counts its updates in a tensor. Torch's fused kernel wants it on the device, the others on the CPU.
            if "exp_avg" in self.state_names:
                device = flat.device if optimizer.defaults.get("fused") else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.state.link_state()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` / (accumulation × world), reduced over workers as ZeRO does."""
        self.engine.backward(loss)

    def end_micro_batch(self, rate: float, numbers: Tensor | None = None) -> list[float]:
        """Close a micro-batch; at the last of an accumulation the optimizer steps with this learning rate.

        Collective then: returns the sums over the workers of their `numbers` (n,), float64, on the device. They travel
        with the gradient's norm, so that the host waits for the device once a step.
        """
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
        # Asked before DeepSpeed's step, which moves on to the next micro-batch. Until the last one it only counts.
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()
            return []
        with torch.no_grad():
            # 1. The squares of this worker's part. Where every worker has the whole gradient (ZeRO 0), rank 0 gives its
            #    norm and the others add 0.
            gradients = self.state.gradients()
            vector = sum_of_squares(gradients).reshape(1)
            if not self.state.is_shared and dist.get_rank() != 0:
                vector = torch.zeros_like(vector)
            if numbers is not None:
                vector = torch.cat([vector, numbers])

            # 2. The sums over all workers. The host waits here until the device has computed everything so far.
            dist.all_reduce(vector)
            squares, *sums = vector.tolist()
            norm = math.sqrt(squares)

            # 3. All workers have read the same bits, so all of them skip a step together: a gradient that is not finite
            #    touches nothing, on any worker.
            is_finite = math.isfinite(norm)
            self.gradient_norm = norm if is_finite else math.inf
            self.state.note_norm(self.gradient_norm)
            if is_finite:
                factor = clipping(norm, self.clip)
                if factor < 1:
                    torch._foreach_mul_(gradients, factor)
                # A group's gradient is free once the optimizer has stepped it; this list would keep all of them.
                del gradients
                self.state.apply()
            else:
                self.state.drop()

        # 4. At stage 0 the optimizer steps in here; at the others it has, and this only counts.
        self.engine.step()
        # A skipped step is no update: it must not pull the average towards the masters once more.
        if is_finite:
            self._count_update()
        return sums

    def mean_loss(self, loss_sum: float, samples: int) -> float:
        """Return the last step's mean loss over so many samples; the sum is that over all workers."""
        return loss_sum / samples

    def report_start(self, cfg: TrainConfig, telemetry: Telemetry, step: int) -> None:
        """Collective: measure and report, at the start of an attempt, what depends on this cluster."""

    @torch.no_grad()
    def _count_update(self) -> None:
        """Note that the optimizer has changed the masters."""
        self.updates += 1
        if not self.polyak:
            return
        for flat in self.state.flats:
            self.state.optimizer.state[flat]["average"].mul_(self.polyak).add_(flat, alpha=1 - self.polyak)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Collective: within the block the model's weights are the average; the masters come back unchanged."""
        self._swap_average()
        yield
        # Not where the block raises: a worker that does so alone would wait here for the others, and no log would
        # have its error. An engine whose block has raised is of no more use.
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for flat in self.state.flats:
            average = self.state.optimizer.state[flat]["average"]
            master = flat.detach().clone()
            flat.copy_(average)
            # The masters wait in the average's place; the second swap brings both back to the bit.
            average.copy_(master)
        self.state.refresh()

    def fragments(self, kinds: tuple[str, ...] = (), *, held: bool = False) -> Iterator[Fragment]:
        """Iterate views of the fp32 masters and state that this worker owns; every element has exactly one owner.

        `kinds` are "master" and names of states; all of them, where none is named. With `held`, views of what this
        worker holds: the same, but at stage 0 every parameter whole.
        """
        kinds = kinds or ("master", *self.state_names)
        part_of = self.state.held if held else self.state.owned
        parts: dict[str, Part] = {}
        for name, p in self.model.named_parameters():
            parts[name] = part_of(p, kinds)
        # DeepSpeed's parameters are flat ones of whole blocks: their parts are cut into those of the model's own.
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

    @torch.no_grad()
    def restore(self, read: ReadState, kinds: tuple[str, ...] = ()) -> None:
        """Collective: fill the state in place with what `read` returns; bring the weights that compute up to it."""
        world = dist.get_world_size()
        for name, start, tensors in self.fragments(kinds, held=True):
            for kind, view in tensors.items():
                count = view.numel()
                if self.state.is_shared or world == 1:
                    view.copy_(read(name, kind, start, count))
                    continue
                # At stage 0 every worker holds everything. Each reads an equal part, and they tell each other. The last
                # parts may be shorter, and a collective wants all of one length.
                part = math.ceil(count / world)
                first = min(dist.get_rank() * part, count)
                stop = min(first + part, count)
                mine = torch.zeros(part, device=view.device)
                if first < stop:
                    mine[: stop - first] = read(name, kind, start + first, stop - first)
                whole = torch.empty(part * world, device=view.device)
                dist.all_gather_into_tensor(whole, mine)
                view.copy_(whole[:count])
        self.state.refresh()

    def load(self, read: ReadState, updates: int) -> None:
        """Collective: fill the state from a checkpoint that was saved after so many updates."""
        self.restore(read)
        self.updates = updates
        # Adam's bias correction depends on a count of its own.
        for state in self.state.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(updates)

    def close(self) -> None:
        """Give back DeepSpeed's hooks and buffers."""
        self.engine.destroy()


# ------------------------------------------------------------------------------------------------ the norm


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum over all elements' squares, a float64 scalar on the device; not finite where an element is not.

    Nor where a row's norm is beyond fp32: an element above 1.8e19 makes it infinite, and the step is skipped.
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
        # What `torch.nn.utils.get_total_norm` is made of: one kernel for all of them on a GPU.
        norms.append(torch.stack(torch._foreach_norm(tails)))
    return torch.cat(norms).double().square().sum()


def clipping(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient of this norm; 1.0 where there is no limit or it is not reached."""
    if not limit:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return the host's numbers as a float64 tensor on the device, without a wait."""
    # From memory that is not pinned the host would wait until the device has come to the copy.
    numbers = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)
