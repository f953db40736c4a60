"""Exact mode: an engine whose weights have the same bits at every world size, because gradients are summed in a tree.

1. The global batch is divided into `parts` contiguous ranges of slots, independent of the world size.
2. A part's gradient is the sum over its micro-batches in order.
3. A worker owns neighbouring parts and sums them pairwise, neighbours first: ((0 + 1) + (2 + 3)) + …
4. The sums of the workers form the rest of the same tree (`tree_sum`).
5. Every worker clips the gradient, and updates the master weights in its ZeRO partition.

In:  4 parts at world size 2: rank 0 has g0, g1 and rank 1 has g2, g3
Out: (g0 + g1) + (g2 + g3) on both; one worker with all four parts adds the same numbers in the same order

Each step also records numbers (`Trace`) that show where a repeated step with a different result started to differ. All
of these numbers except for the last are the same at every world size.

The engine uses DeepSpeed's partitions of master weights and moments and its gathering of weights, but not its
reduction, clipping and step. `docs/exact.md` explains the reasons and the cost.
"""

import math
import statistics
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import config
from pipeline.engine.deepspeed import over_gloo
from pipeline.engine.engine import Engine, Trace, clipping, sum_of_squares
from pipeline.engine.settings import Settings
from pipeline.monitoring.telemetry import Telemetry, read_metrics
from pipeline.optimization import OptimConfig
from pipeline.training_config import TrainConfig
from pipeline.training_data import BYTES_BF16, BYTES_FP32


def exchange(outgoing: Tensor, incoming: Tensor, peer: int, sender: int | None = None) -> None:
    """Send `outgoing` to the worker `peer`, and receive the tensor of `sender` (default: peer) into `incoming`."""
    sender = peer if sender is None else sender
    if outgoing.is_cuda and over_gloo():
        # Workers that share a GPU use gloo, which only transfers host memory.
        received = torch.empty_like(incoming, device="cpu")
        exchange(outgoing.cpu(), received, peer, sender)
        incoming.copy_(received)
        return
    sending = dist.P2POp(dist.isend, outgoing, peer)
    receiving = dist.P2POp(dist.irecv, incoming, sender)
    # Both at once: two workers that both send first and then receive would wait for each other.
    for request in dist.batch_isend_irecv([sending, receiving]):
        request.wait()


def tree_sum(flat: Tensor) -> None:
    """Collective: sum a tensor in place over all workers (a power of two of them), as ((0 + 1) + (2 + 3)) + …

    Uses recursive halving, then doubling (Thakur, Rabenseifner, Gropp 2005), which transfers as many bytes as a ring.
    It does not matter which worker adds two elements, because a + b and b + a are bitwise equal.
    """
    rank = dist.get_rank()
    levels = dist.get_world_size().bit_length() - 1
    halves: list[tuple[Tensor, Tensor]] = []  # per level: (half summed by this worker, half summed by its peer)

    # Recursive halving: at level n the peer is 2ⁿ ranks away. Each of the two sums one half of the remaining span.
    span = flat
    for level in range(levels):
        # Both peers cut at the same place; if the length is odd, the first half is longer.
        low, high = span.tensor_split(2)
        if rank >> level & 1:
            own, sent = high, low
        else:
            own, sent = low, high
        received = torch.empty_like(own)
        exchange(sent, received, rank ^ 1 << level)
        halves.append((own, sent))
        span = own.add_(received)

    # Recursive doubling: going back through the levels, every worker receives the halves that others have summed.
    for level in reversed(range(levels)):
        own, sent = halves[level]
        exchange(own, sent, rank ^ 1 << level)


@dataclass(frozen=True)
class FlatPlan:
    """The mapping between a flat tensor of the optimizer and the complete gradient."""

    flat: Tensor
    places: list[tuple[slice, slice]]  # (range in `flat`, range in the whole gradient)


def checksum(flat: Tensor) -> Tensor:
    """Return a checksum of an fp32 tensor, exact in float64, that changes with any flipped bit."""
    # Two elements at a time, as one 64-bit integer: single elements take ten times as long on a CPU.
    bits = flat.detach().flatten().view(torch.int32)
    first = bits.storage_offset() % 2
    stop = first + (len(bits) - first) // 2 * 2
    total = bits[first:stop].view(torch.int64).sum() + bits[:first].sum() + bits[stop:].sum()
    # Both halves count: a flipped bit changes one of them, directly or by a missing carry into the other.
    return ((total & 0xFFFFFFFF) + (total >> 32 & 0xFFFFFFFF)).double()


class ExactEngine(Engine):
    """An Engine that sums in a fixed order; `loss` is the last step's mean loss, summed like the gradient."""

    def __init__(
        self,
        model: nn.Module,
        decayed: Set[str],
        optim: OptimConfig,
        settings: Settings,
        polyak: float = 0.0,
        *,
        parts: int,
    ) -> None:
        """Collective: create an Engine that sums `parts` parts, a power of two and a multiple of the world size."""
        super().__init__(model, decayed, optim, settings, polyak)
        world = dist.get_world_size()
        self.micro_batches = self.engine.gradient_accumulation_steps() * world  # micro-batches in the global batch
        assert parts % world == 0 and self.micro_batches % parts == 0, (parts, self.micro_batches)
        self.part_length = self.micro_batches // parts  # micro-batches per part
        self.parts_here = parts // world
        # Bypass DeepSpeed's hooks on the output, which would start a reduction whose order depends on the world size.
        self.forward = self.model
        self.loss = 0.0
        self.spans = [*self.sizes.values(), 1]  # lengths in the flat vector: the gradients of all parameters, the loss
        self.part: Tensor | None = None  # flat sum of the current part's micro-batches
        self._sums: list[Tensor] = []  # sums of 2ⁿ parts each that wait for their neighbours, the largest first
        self._seen = 0  # micro-batches of this step so far
        self.parts = parts
        self.trace: Trace = Trace([], [], [])  # trace of the last step
        self._of_parts: list[Tensor] = []  # loss and checksum of each completed part
        # Find the position of each flat tensor of the optimizer in the whole gradient.
        first_of: dict[str, int] = {}  # element of the whole gradient at which a parameter begins
        total = 0
        for name, size in self.sizes.items():
            first_of[name] = total
            total += size

        # Fragments are views; the storage of a view identifies its flat tensor. Compare the address of the storage
        # object, not of its data: the fake tensors used to plan a step's memory have no data.
        plans: dict[int, FlatPlan] = {}
        for flat in self.state.flats:
            plans[flat.untyped_storage()._cdata] = FlatPlan(flat, [])
        for fragment in self.fragments(("master",), held=True):
            view = fragment.tensors["master"]
            plan = plans[view.untyped_storage()._cdata]
            in_flat = view.storage_offset() - plan.flat.storage_offset()
            in_whole = first_of[fragment.name] + fragment.start
            count = view.numel()
            plan.places.append((slice(in_flat, in_flat + count), slice(in_whole, in_whole + count)))
        self._plans = list(plans.values())

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` / (accumulation × world) to the gradient of the current part."""
        with self.around_backward(loss):
            self.part = self.added(loss, self.part)

    def added(self, loss: Tensor, part: Tensor | None) -> Tensor:
        """Add the gradient of `loss` / (accumulation × world) to the flat sum of a part in place, and return the sum.

        `part` is None before the first micro-batch of the part.
        """
        # The divisor is the same at every world size.
        loss = loss / self.micro_batches
        addends = self.by_member(self.gradients_of(loss))
        if part is None:
            # In fp32 even if weights are bf16: sums of many small numbers would lose their last bits in bf16.
            part = torch.zeros(sum(self.spans), device=loss.device)
        # The loss follows the gradient, so that its mean over the batch is summed in the same order.
        addends.append(loss.detach().reshape(-1))
        for view, addend in zip(part.split(self.spans), addends, strict=True):
            view.add_(addend)
        return part

    def end_micro_batch(self, rate: float, numbers: Tensor | None = None) -> list[float]:
        """End a micro-batch; the last one of a part completes the part, and the last one of a step runs the step.

        Returns the same as Engine.end_micro_batch.
        """
        self._seen += 1
        if self._seen % self.part_length:
            return []
        # Add neighbouring sums of equally many parts, like the carries of a binary counter. After the fourth part (100
        # in binary: two carries) part 3 and the sum of parts 1 and 2 are waiting to be added.
        assert self.part is not None
        finished = self.part
        self.part = None
        self._of_parts.append(torch.stack([finished[-1].double(), checksum(finished[:-1])]))
        closed_parts = self._seen // self.part_length
        carries = (closed_parts & -closed_parts).bit_length() - 1  # trailing zeros of the number in binary
        for _ in range(carries):
            finished = self._sums.pop().add_(finished)
        self._sums.append(finished)
        if closed_parts < self.parts_here:
            return []
        self._seen = 0
        return self._step(rate, numbers)

    @torch.no_grad()
    def _step(self, rate: float, numbers: Tensor | None) -> list[float]:
        """Sum over the workers, clip and update; a non-finite gradient changes nothing on any worker."""
        # The number of parts is a power of two, so exactly one sum remains.
        (total,) = self._sums
        self._sums = []
        tree_sum(total)
        gradient = total[:-1]
        # For the trace every worker fills in its own entries, so the sum over the workers contains all of them.
        rank = dist.get_rank()
        of_parts = 2 * self.parts
        trace = torch.zeros(of_parts + dist.get_world_size(), dtype=torch.float64, device=total.device)
        own_parts = slice(rank * self.parts_here, (rank + 1) * self.parts_here)
        trace[:of_parts].view(2, self.parts)[:, own_parts] = torch.stack(self._of_parts, 1)
        self._of_parts = []
        for flat in self.state.flats:
            for tensor in (flat, *map(self.state.optimizer.state[flat].get, self.state_names)):
                trace[of_parts + rank] += checksum(tensor)
        # The norm of the whole gradient, on every worker: a sum over partitions would depend on the world size.
        norm_here = sum_of_squares([gradient]).sqrt()
        step_numbers = trace if numbers is None else torch.cat([trace, numbers])
        dist.all_reduce(step_numbers)
        # Read everything with a single copy: the host waits for the device once a step.
        norm, loss, *values = torch.cat([norm_here.reshape(1), total[-1:].double(), step_numbers]).tolist()
        self.gradient_norm = norm
        self.loss = loss
        self.trace = Trace(values[: self.parts], values[self.parts : of_parts], values[of_parts : len(trace)])
        sums = values[len(trace) :]
        # All workers have the same bits, so all of them skip the step without further communication.
        if not math.isfinite(norm):
            return sums
        if self.clip:
            gradient.mul_(clipping(norm, self.clip))
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate

        # Each flat tensor gets its elements of the gradient; padding gets 0.
        for number, plan in enumerate(self._plans):
            flat_gradient = torch.zeros_like(plan.flat)
            for in_flat, in_whole in plan.places:
                flat_gradient.view(-1)[in_flat] = gradient[in_whole]
            plan.flat.grad = flat_gradient
            self.state.step_flat(number)
        for plan in self._plans:
            plan.flat.grad = None
        self.state.refresh()
        self._count_update()
        return sums

    def mean_loss(self, loss_sum: float, samples: int) -> float:
        """Return the last step's mean loss, which was summed in the same fixed order as the gradient."""
        return self.loss

    def report_start(self, cfg: TrainConfig, telemetry: Telemetry, step: int) -> None:
        """Collective: measure and report the cost of the exact sum.

        Also reports changes since the previous attempt in conditions that affect results bitwise.
        """
        tree_s, plain_s = self.price()
        if dist.get_rank() != 0:
            return
        world = dist.get_world_size()
        # Memory per parameter of a worker: a micro-batch's gradient in the precision of computing; in fp32 the sum of a
        # part, one sum for each level of the worker's subtree, and its share of the optimizer's gradient.
        levels = (cfg.exact_parts // world).bit_length() - 1
        bytes_per_parameter = BYTES_FP32 * (1 + levels + 1 / world)
        bytes_per_parameter += BYTES_BF16 if cfg.precision == "bf16" else BYTES_FP32
        mb = sum(self.sizes.values()) * bytes_per_parameter / 1e6
        line = (
            f"exact in {cfg.exact_parts} parts: every step waits {tree_s:.3f}s for the sum over {world} workers "
            f"(one all-reduce: {plain_s:.3f}s); up to {mb:,.1f} MB of gradients per worker"
        )
        # Besides the config, the last bits depend on these values: with 2 threads instead of 1, 20,218,211 of the
        # 21,669,514 gradient elements of S/16 differed (docs/exact.md).
        computes_on = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_available():
            computes_on = torch.cuda.get_device_name()
        now = {"threads": torch.get_num_threads(), "torch": torch.__version__, "processor": computes_on}
        # Read before this attempt writes its own record.
        earlier = read_metrics(telemetry.directory, "exact", [])
        telemetry.report("exact", {"step": step, "sum_s": tree_s, "all_reduce_s": plain_s, **now}, line)
        if not earlier:
            return
        before = {key: earlier[-1][key] for key in now}
        changed = config.differences(before, now)
        if changed:
            telemetry.log(f"results may differ bitwise from here on: {'; '.join(changed.values())}")

    def price(self, rounds: int = 3) -> tuple[float, float]:
        """Collective: measure the duration, in seconds, of a tree sum over the workers and of an equal all-reduce."""
        flat = torch.zeros(sum(self.spans), device=next(self.model.parameters()).device)
        tree_seconds = []
        all_reduce_seconds = []
        for _ in range(rounds):
            tree_seconds.append(seconds_of(tree_sum, flat))
            all_reduce_seconds.append(seconds_of(dist.all_reduce, flat))
        return statistics.median(tree_seconds), statistics.median(all_reduce_seconds)


def seconds_of(add_up: Callable[[Tensor], object], flat: Tensor) -> float:
    """Collective: measure the duration in seconds of a sum over the workers, after a barrier."""
    # Without the barrier the time would include the wait for the slowest worker.
    dist.barrier()
    began = time.monotonic()
    add_up(flat)
    # A GPU still computes after the call returns; reading an element waits for it.
    float(flat[0])
    return time.monotonic() - began
