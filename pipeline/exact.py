"""The engine whose weights have the same bits at every world: gradients summed by a fixed tree over fixed parts.

The global batch is cut into `parts` contiguous ranges of slots, whatever the world. A part's gradient is the sum of
its micro-batches in their order; parts are summed pairwise, neighbours first: ((0 + 1) + (2 + 3)) + … A worker owns a
whole subtree, and workers form the rest of the tree. DeepSpeed's own reduction, clipping and step are not used, its
partitions of masters and moments and its gathering of weights are. `docs/exact.md` has the reasons and the price.
"""

import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import config
from pipeline.arithmetic import exact_gradient_bytes
from pipeline.engine import Engine
from pipeline.telemetry import Telemetry, read_metrics
from pipeline.training_config import TrainConfig


def swap(give: Tensor, take: Tensor, peer: int) -> None:
    """Send `give` to a worker while `take` is filled with what it sends."""
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, give, peer), dist.P2POp(dist.irecv, take, peer)]):
        request.wait()


def tree_sum(flat: Tensor) -> None:
    """Collective, in place: the sum over a power of two of workers, as ((0 + 1) + (2 + 3)) + …, on all of them.

    Recursive halving, then doubling (Thakur, Rabenseifner, Gropp 2005): it sends as much as a ring does. Which worker
    adds an element does not matter, because a + b = b + a to the bit.
    """
    rank, span, halves = dist.get_rank(), flat, []
    for level in range(dist.get_world_size().bit_length() - 1):
        low, high = span.tensor_split(2)
        keep, give = (high, low) if rank >> level & 1 else (low, high)
        got = torch.empty_like(keep)
        swap(give, got, rank ^ 1 << level)
        halves.append((keep, give))
        span = keep.add_(got)
    for level, (keep, give) in reversed(list(enumerate(halves))):
        swap(keep, give, rank ^ 1 << level)


class ExactEngine(Engine):
    """Engine's verbs with sums in the fixed order; `loss` is the last step's mean, summed like a gradient."""

    def __init__(self, *given: Any, parts: int) -> None:
        """As an Engine is made, and the number of parts: a power of two, and a multiple of the world's workers."""
        super().__init__(*given)
        self.micro_batches = self.engine.gradient_accumulation_steps() * dist.get_world_size()  # of the global batch
        assert parts % dist.get_world_size() == 0 == self.micro_batches % parts, (parts, self.micro_batches)
        self.part_length, self.parts_here = self.micro_batches // parts, parts // dist.get_world_size()
        self.forward = self.model  # past DeepSpeed's hooks on the output, which start its own reduction
        self.loss = 0.0
        self._spans = [*self.sizes.values(), 1]  # of the flat vector: the gradient of every parameter, the loss
        self._part: Tensor | None = None  # the sum of a part's micro-batches so far, flat
        self._sums: list[Tensor] = []  # of 2ⁿ parts each, waiting for their neighbours; the largest first
        self._seen = 0  # micro-batches of this step
        self._plan = self._places()

    def _places(self) -> list[tuple[Tensor, list[tuple[slice, slice]]]]:
        """For each flat of the optimizer: which of its elements are which of the whole gradient's."""
        first, at = {}, 0
        for name, size in self.sizes.items():
            first[name], at = at, at + size
        plan: dict[int, tuple[Tensor, list[tuple[slice, slice]]]] = {
            flat.untyped_storage().data_ptr(): (flat, []) for flat in self._flats
        }
        for f in self._whole(("master",)) if self.zero == 0 else self.fragments(("master",)):
            view = f.tensors["master"]
            flat, places = plan[view.untyped_storage().data_ptr()]
            here, there, count = view.storage_offset() - flat.storage_offset(), first[f.name] + f.start, view.numel()
            places.append((slice(here, here + count), slice(there, there + count)))
        return list(plan.values())

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` / (accumulation × world) to that of its part."""
        loss = loss / self.micro_batches
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), materialize_grads=True)
        if self._part is None:
            self._part = torch.zeros(sum(self._spans), device=loss.device)
        for view, gradient in zip(self._part.split(self._spans), [*gradients, loss.detach()], strict=True):
            view.add_(gradient.reshape(-1))

    def end_micro_batch(self, rate: float) -> None:
        """Close a micro-batch, with it perhaps a part, with it perhaps the step."""
        self._seen += 1
        if self._seen % self.part_length:
            return
        self._close_part(self._seen // self.part_length)
        if self._seen == self.part_length * self.parts_here:
            self._seen = 0
            self._step(rate)

    def _close_part(self, count: int) -> None:
        """Neighbouring sums of equally many parts become one, as a binary counter carries."""
        assert self._part is not None
        done, self._part = self._part, None
        for _ in range((count & -count).bit_length() - 1):
            done = self._sums.pop().add_(done)
        self._sums.append(done)

    @torch.no_grad()
    def _step(self, rate: float) -> None:
        """Sum over workers, clip, update; a gradient that is not finite touches nothing, on any worker."""
        (total,) = self._sums
        self._sums = []
        tree_sum(total)
        gradient = total[:-1]
        self.loss, self._norm = float(total[-1]), float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(self._norm):
            return
        if self.clip:
            gradient.mul_(min(1.0, self.clip / (self._norm + 1e-6)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for number, (flat, places) in enumerate(self._plan):
            mine = torch.zeros_like(flat)
            for here, there in places:
                mine.view(-1)[here] = gradient[there]
            flat.grad = mine
            if self.zero:
                self.engine.optimizer._optimizer_step(number)
        if not self.zero:
            self._optimizer.step()
        for flat, _ in self._plan:
            flat.grad = None
        self._refresh()
        if self.polyak:
            self._average()

    def gradient_norm(self) -> float:
        """Global norm of the last step's gradient before clipping; not finite where the step was skipped."""
        return self._norm

    def price(self, rounds: int = 3) -> tuple[float, float]:
        """Collective: seconds of a sum over the workers, and of the backend's all-reduce of as many numbers."""
        flat = torch.zeros(sum(self._spans), device=next(self.model.parameters()).device)
        seconds: dict[Any, list[float]] = {tree_sum: [], dist.all_reduce: []}
        for _ in range(rounds):
            for add_up, found in seconds.items():
                dist.barrier()
                began = time.monotonic()
                add_up(flat)
                float(flat[0])  # waits for the device
                found.append(time.monotonic() - began)
        tree, plain = (statistics.median(found) for found in seconds.values())
        return tree, plain


def say_price(engine: ExactEngine, cfg: TrainConfig, telemetry: Telemetry, step: int) -> None:
    """Collective: measure and say it, and what the bits depend on that has changed since the attempt before."""
    tree_s, plain_s = engine.price()
    if dist.get_rank():
        return
    world = dist.get_world_size()
    mb = sum(engine.sizes.values()) * exact_gradient_bytes(cfg, world) / 1e6
    line = (
        f"exact in {cfg.exact_parts} parts: every step waits {tree_s:.3f}s for the sum over {world} workers "
        f"(one all-reduce: {plain_s:.3f}s); up to {mb:,.1f} MB of gradients a worker"
    )
    before, now = read_metrics(telemetry.directory, "exact")[-1:], conditions()
    telemetry.report("exact", {"step": step, "sum_s": tree_s, "all_reduce_s": plain_s, **now}, line)
    for changed in [config.differences({key: old[key] for key in now}, now) for old in before]:
        if changed:
            telemetry.say(f"the bits may differ from here on: {'; '.join(changed)}")


def conditions() -> dict[str, Any]:
    """What the last bits of a gradient depend on beside the config."""
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "processor": kind}
