"""Hook that repeats randomly drawn steps on another worker, and compares the results (`health.audit`).

In a drawn step:
1. Every worker records each parameter's gradient and the loss: in exact mode of each of its parts (a sum over several
   micro-batches, pipeline/engine/exact.py), otherwise of each micro-batch, before DeepSpeed reduces the gradient.
2. Every worker decodes another worker's micro-batches again, repeats the forward and backward passes, and returns the
   result to the other worker, which compares it.
3. During the update, every worker copies a slice of its master weights, moments and gradient, before and after. Another
   worker repeats the update of the slice. All slices have been repeated after SLICES drawn steps.
4. Until the next step, checksums of the master weights and moments must stay the same.
5. If two results differ, several workers repeat the computation, and the majority is right. The worker that differs
   raises CorruptWorker. This happens before the next save begins, so no checkpoint contains the wrong values.

In exact mode, results must have the same bits. Otherwise the attempt begins with repetitions of one micro-batch. If
these have the same bits, all others must have, too. If not, gradients are compared within the measured noise.

In:  health.audit 0.01, two workers; in step 70, counted from 0, bit 22 of an element of worker 1's gradient flips
Out: worker 1 raises "live audit of step 71: worker 1 computed wrong results: the gradient of blocks.0.mlp.up.weight …",
     and the run resumes from its last checkpoint, without the node of worker 1 if there are others
"""

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import ClusterError, CorruptWorker, PatchlineError
from data.loader import Batch, prefetched_to_device
from pipeline import config
from pipeline.batches import OBJECTIVES, begin_forward, planned_ids, samples_in_mean, without_rows
from pipeline.engine.exact import ExactEngine, checksum, exchange
from pipeline.extras.replays.comparison import (
    Noise,
    checksums,
    differing,
    first_difference,
    majority,
    sums,
    sums_of,
)
from pipeline.extras.replays.spikes import SpikeConfig
from pipeline.hooks import Hook, masked_by
from pipeline.training_config import phase_at
from pipeline.training_data import training_loader

if TYPE_CHECKING:
    from pipeline.start import Worker
    from pipeline.worker import Progress, Setup

Repeat = Callable[[int], Sequence[Tensor]]  # rank → a repetition of that worker's computation

SLICES = 16  # a drawn step repeats the update of one sixteenth of each flat tensor
SMALLEST_SLICE = 64  # elements
VOTERS = 8  # largest number of workers whose repetitions decide which result is wrong
AVERAGE = "average"  # changes after the optimizer's step, so it is not compared
REMEDY = "  the run resumes from its last checkpoint; test the node's memory and device before using it again"


class UndecidedAudit(PatchlineError):
    """Repetitions of a computation differ, and no majority shows which worker is wrong; no node is excluded."""

    exit_code = None  # ends the attempt, but not the stage


def drawn_shift(seed: int, step: int, share: float, world: int) -> int | None:
    """Draw whether to audit a step, with the probability `share`; the same on all workers.

    Returns None for other steps. Otherwise, worker r's results are repeated by worker (r + shift) % world.
    """
    generator = random.Random(config.digest((seed, step, "audit")))
    if generator.random() >= share:
        return None
    return generator.randrange(1, world) if world > 1 else 0


@dataclass
class Update:
    """A slice of a flat tensor before and after an update of the optimizer, and the options of its group."""

    flat: Tensor
    where: slice
    options: dict[str, Any]
    before: list[Tensor]  # master, gradient, and the optimizer's state
    steps: Tensor | None  # Adam's number of updates
    after: list[Tensor] = field(default_factory=list)  # master and state
    at_rest: list[Tensor] = field(default_factory=list)  # checksums of the whole master and state


@dataclass
class Representation:
    """A kind of results: how to represent them with numbers, and the names of these numbers' tensors."""

    split: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # into the tensors that have names
    names: Callable[[], Sequence[str]]
    noise: Noise | None = None

    def numbers(self, results: Sequence[Tensor]) -> Tensor:
        """Return the numbers that represent results: (2, n)."""
        tensors = self.split(results)
        return checksums(tensors) if self.noise is None else sums(tensors)


class LiveAudit(Hook):
    """Hook that audits drawn steps of a run."""

    Config = SpikeConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: register callbacks of the engine and the optimizer, and measure noise unless in exact mode."""
        self.worker = cast("Worker", worker)
        self.progress = progress  # counts the steps
        self.engine = worker.engine
        self.rank = worker.group.rank
        self.world = worker.group.world
        self.accumulation = worker.data.arithmetic.accumulation  # micro-batches of a step on this worker
        # Micro-batches whose gradients are compared together.
        self.length = self.engine.part_length if isinstance(self.engine, ExactEngine) else 1
        self.state_names = [name for name in self.engine.state_names if name != AVERAGE]
        self.step = 0  # of the audit, counted from 0
        self.shift: int | None = None  # drawn for the current step
        self.number = 0  # micro-batches of the current step so far
        self.repeated: Generator[Batch] | None = None  # micro-batches of the worker whose gradients this one repeats
        self.updates: list[Update] = []
        self.settled = 0  # audited updates; determines the slices
        self.audited = 0  # compared parts of this worker
        names = [*(f"gradient of {name}" for name in self.engine.sizes), "loss"]
        self.gradients = Representation(self.split, lambda: names)
        if not isinstance(self.engine, ExactEngine) and progress.step < worker.data.last_step:
            self.gradients.noise = self.measured_noise()
        if self.rank == 0:
            how = "bit for bit" if self.gradients.noise is None else "within the noise measured now"
            share = f"{self.cfg.health.audit:.2%} of the steps"
            worker.group.telemetry.log(f"live audit: another worker repeats {share}, compared {how}")
        self.engine.around_backward = self.audited_backward  # type: ignore[assignment]
        optimizer = self.engine.state.optimizer
        optimizer.register_step_pre_hook(self.before_update)
        optimizer.register_step_post_hook(self.after_update)

    # -------------------------------------------------------------------- gradients

    @contextmanager
    def audited_backward(self, loss: Tensor) -> Iterator[None]:
        """Collective: compare the gradient of a drawn step's micro-batch or part with a repetition on another worker.

        Raises CorruptWorker or UndecidedAudit if a worker's gradient, or its last update, is wrong.
        """
        number = self.number
        self.number = (number + 1) % self.accumulation
        if number == 0:
            self.settle()
            self.step = self.progress.step
            self.shift = drawn_shift(self.cfg.seed, self.step, self.cfg.health.audit, self.world)
            if self.shift is not None:
                self.compare_weights()
                self.repeated = self.batches((self.rank - self.shift) % self.world)
        if self.shift is None:
            yield
            return
        with self.noted_gradients(loss) as tensors:
            yield
        if (number + 1) % self.length == 0:
            assert self.repeated is not None
            self.audited += 1
            self.compare(self.gradients, tensors, self.gradients_again(self.repeated), partial(self.part_again, number))
        if self.number == 0 and self.repeated is not None:
            self.repeated.close()

    def compare_weights(self) -> None:
        """Collective: compare the model weights of all workers, which are copies of each other except at ZeRO 3."""
        engine = self.engine
        if self.world == 1 or engine.zero == 3:
            return
        parameters = dict(engine.model.named_parameters())
        weights = [p.detach() for p in parameters.values()]
        what = Representation(
            lambda tensors: engine.by_member(dict(zip(parameters, tensors, strict=True))),
            lambda: [f"weight of {name} in the model" for name in engine.sizes],
        )
        self.compare(what, weights, weights, lambda rank: weights)

    @contextmanager
    def noted_gradients(self, loss: Tensor) -> Iterator[list[Tensor]]:
        """Fill the list with the gradient of the backward pass in the `with` block and the loss, as `split` expects."""
        noted: list[Tensor] = []
        engine = self.engine
        if isinstance(engine, ExactEngine):
            yield noted
            assert engine.part is not None
            noted.append(engine.part)
            return
        found: dict[str, Tensor] = {}
        # Torch calls these hooks before DeepSpeed's, at every ZeRO stage. The gradient is copied, because torch may use
        # its memory to add the next one.
        handles = []
        for name, p in engine.model.named_parameters():
            handles.append(p.register_hook(lambda gradient, name=name: found.update({name: gradient.clone()})))
        yield noted
        for handle in handles:
            handle.remove()
        sizes: Counter[str] = Counter()
        for at in engine.members.values():
            sizes[at.holder] += at.size
        for name, _ in engine.model.named_parameters():
            # An unused parameter has no gradient.
            noted.append(found[name] if name in found else torch.zeros(sizes[name], device=loss.device))
        noted.append(loss.detach().reshape(1))

    def split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each parameter of the plain model, and the loss."""
        engine = self.engine
        if isinstance(engine, ExactEngine):
            return list(tensors[0].split(engine.spans))
        names = [name for name, _ in engine.model.named_parameters()]
        return [*engine.by_member(dict(zip(names, tensors, strict=False))), tensors[-1]]

    def gradients_again(self, batches: Iterator[Batch]) -> list[Tensor]:
        """Collective: compute the gradients and the loss of the next micro-batch or part again."""
        worker = self.worker
        engine = self.engine
        samples = samples_in_mean(planned_ids(worker, self.step))
        weight = self.world * self.accumulation / samples
        part: Tensor | None = None
        tensors: list[Tensor] = []
        forward = engine.forward
        engine.forward = engine.model  # DeepSpeed's engine would prepare a reduction
        for batch in islice(batches, self.length):
            images = begin_forward(worker, self.step, batch)
            loss = OBJECTIVES[worker.cfg.objective](worker, self.step, images, batch) * weight
            if isinstance(engine, ExactEngine):
                part = engine.added(loss, part)
                tensors = [part]
            else:
                # DeepSpeed's backward divides the loss, too.
                tensors = [*engine.gradients_of(loss / self.accumulation).values(), loss.detach().reshape(1)]
        engine.forward = forward
        return tensors

    def part_again(self, last: int, rank: int) -> list[Tensor]:
        """Collective: decode a worker's part, up to its micro-batch `last`, and compute its gradients again."""
        with closing(self.batches(rank)) as batches:
            return self.gradients_again(islice(batches, last + 1 - self.length, None))

    def batches(self, rank: int) -> Generator[Batch]:
        """Read and decode a worker's micro-batches of the step again."""
        worker = self.worker
        data = worker.data
        loader = training_loader(
            worker.cfg,
            data.index,
            data.order,
            image_size=phase_at(self.step, data.phases).image_size,
            slots=data.arithmetic.slots(rank),
            start_step=self.step,
            micro_batch=worker.cfg.micro_batch,
            accumulation=self.accumulation,
        )
        with closing(iter(loader)) as decoded:
            for batch in prefetched_to_device(islice(decoded, self.accumulation), worker.group.device):
                _, shard, sample = batch.ids.numpy().T
                masked = masked_by(worker.hooks, self.step, shard, sample)
                yield batch if masked is None or not np.any(masked) else without_rows(batch, masked)

    def measured_noise(self) -> Noise | None:
        """Collective: compute a micro-batch of worker 0 twice on each worker; return None if all have the same bits.

        On a GPU, equal bits can be chance, unless its kernels are deterministic. Raises ClusterError if the workers'
        devices differ, or if each worker computes the same bits twice, but not those of the others.
        """
        self.step = self.progress.step
        bits = []
        votes = []
        for _ in range(2):
            with closing(self.batches(0)) as batches:
                tensors = self.gradients_again(batches)
            bits.append(checksums(tensors)[0])
            votes.append(sums(self.split(tensors)))
        twice = gathered(torch.stack(bits).flatten(), self.world)
        is_equal = all(torch.equal(half, bits[0]) for both in twice for half in both.chunk(2))
        if is_equal and (not bits[0].is_cuda or torch.are_deterministic_algorithms_enabled()):
            return None
        name = torch.cuda.get_device_name() if bits[0].is_cuda else torch.backends.cpu.get_cpu_capability()
        names: list[str] = [""] * self.world
        dist.all_gather_object(names, name)
        if len(set(names)) > 1 or (not is_equal and all(torch.equal(*both.chunk(2)) for both in twice)):
            raise ClusterError(
                "health.audit needs equal workers, but their devices differ, or the gradients that each computes "
                f"repeatedly from the same images (devices: {', '.join(sorted(set(names)))})\n"
                "  use nodes with the same processors and cluster.cpus_per_worker, or set health.audit=0"
            )
        counts = [sums_of(size) for size in (*self.engine.sizes.values(), 1)]
        return Noise.of(self.shared(0, [], votes), counts, torch.finfo(self.engine.dtype).eps)

    # -------------------------------------------------------------------- the update, and the state at rest

    def before_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Copy slices of the flat tensors that the optimizer is about to update."""
        if self.shift is None:
            return
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                length = min(flat.numel(), max(-(-flat.numel() // SLICES), SMALLEST_SLICE))
                first = min(self.settled % SLICES * length, flat.numel() - length)
                where = slice(first, first + length)
                before = [tensor.detach().view(-1)[where].clone() for tensor in (flat, flat.grad, *self.states(flat))]
                steps = optimizer.state[flat].get("step")
                self.updates.append(Update(flat, where, options, before, None if steps is None else steps.clone()))

    def after_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Copy the same slices after the update, and record checksums of the whole state."""
        for update in self.updates:
            if update.after:
                continue
            tensors = [update.flat, *self.states(update.flat)]
            update.after = [tensor.detach().view(-1)[update.where].clone() for tensor in tensors]
            update.at_rest = [checksum(tensor) for tensor in tensors]

    def states(self, flat: Tensor) -> list[Tensor]:
        """Return the optimizer's moments for a flat tensor."""
        state = self.engine.state.optimizer.state[flat]
        return [state[name] for name in self.state_names]

    def settle(self) -> None:
        """Collective: compare a drawn step's updates with a repetition, and check that the state has not changed since.

        Raises CorruptWorker or UndecidedAudit if a worker's updates or state are wrong.
        """
        if not self.updates:
            return
        updates = self.updates
        self.updates = []
        self.settled += 1
        assert self.shift is not None

        # 1. The repetition on another worker, from copies of the values before the update.
        given = torch.cat([tensor for update in updates for tensor in update.before])

        def repeat(rank: int) -> list[Tensor]:
            of_rank = given.clone()
            dist.broadcast(of_rank, rank)
            return self.updated(updates, of_rank)

        own = [tensor for update in updates for tensor in update.after]
        other = self.updated(updates, self.passed(given, self.shift))
        named = Representation(list, lambda: self.kinds_of(updates, " after the update"))
        self.compare(named, own, other, repeat)

        # 2. The state at rest: a worker can only compare its own.
        now = [checksum(tensor) for update in updates for tensor in (update.flat, *self.states(update.flat))]
        differs = torch.stack(now) != torch.stack([value for update in updates for value in update.at_rest])
        for rank, of_rank in enumerate(gathered(differs.double(), self.world)):
            if of_rank.any():
                labels = [(name, rank) for name in self.kinds_of(updates, " changed in memory after the update")]
                mismatch = first_difference(labels, (of_rank > 0).tolist())
                assert mismatch is not None
                self.accuse(rank, f"the {mismatch.what}")

    def kinds_of(self, updates: Sequence[Update], suffix: str) -> list[str]:
        """Return a description of each result of the updates."""
        names = map(self.parameter, updates)
        return [f"{kind} of {name}{suffix}" for name in names for kind in ("weight", *self.state_names)]

    def updated(self, updates: Sequence[Update], given: Tensor) -> list[Tensor]:
        """Repeat updates, starting from the values before them; return the resulting master weights and moments."""
        values = iter(given.split([len(tensor) for update in updates for tensor in update.before]))
        make: Callable[..., torch.optim.Optimizer] = type(self.engine.state.optimizer)
        results = []
        for update in updates:
            master, gradient, *state = [value.clone() for value in islice(values, len(update.before))]
            master.grad = gradient
            # The class and the options of the run's optimizer, but without its hooks.
            alone = make([{**update.options, "params": [master]}])
            alone.state[master] = dict(zip(self.state_names, state, strict=True))
            if update.steps is not None:
                alone.state[master]["step"] = update.steps.clone()
            alone.step()
            results += [master, *state]
        return results

    def parameter(self, update: Update) -> str:
        """Describe the parameters in an update's slice: the name of the first, and the number of others."""
        names = []
        for fragment in self.engine.fragments(("master",), held=True):
            view = fragment.tensors["master"]
            if view.untyped_storage()._cdata != update.flat.untyped_storage()._cdata:
                continue
            first = view.storage_offset() - update.flat.storage_offset()
            if first < update.where.stop and first + view.numel() > update.where.start:
                names.append(fragment.name)
        more = f" (or {len(names) - 1} more)" if len(names) > 1 else ""
        return (names[0] if names else "padding") + more

    # -------------------------------------------------------------------- the verdict

    def passed(self, tensor: Tensor, shift: int) -> Tensor:
        """Collective: return the tensor of worker (rank − shift), which has the same shape."""
        received = tensor.clone()
        if shift % self.world:
            exchange(tensor, received, (self.rank + shift) % self.world, (self.rank - shift) % self.world)
        return received

    def compare(self, what: Representation, own: Sequence[Tensor], other: Sequence[Tensor], repeat: Repeat) -> None:
        """Collective: compare every worker's results with their repetition. Raises the errors of `accuse`.

        `own` are this worker's results, `other` its repetition of another worker's, and `repeat(rank)` repeats a
        worker's computation again.
        """
        assert self.shift is not None
        # Without noise, few numbers suffice until a difference must be named.
        measure = checksums if what.noise is None else what.numbers
        mine = measure(own)
        theirs = mine if other is own else measure(other)
        is_different = differing(mine, self.passed(theirs, -self.shift), what.noise).any()
        flags = torch.cat(gathered(is_different.double().reshape(1), self.world)).tolist()
        for rank, flag in enumerate(flags):
            if flag:
                self.decide(what, rank, own, other, repeat)

    def decide(
        self, what: Representation, rank: int, own: Sequence[Tensor], other: Sequence[Tensor], repeat: Repeat
    ) -> None:
        """Collective: repeat a worker's computation on several workers, and accuse the worker with a wrong result."""
        assert self.shift is not None
        repeater = (rank + self.shift) % self.world
        again = [what.numbers(repeat(rank)) for _ in range(1 if what.noise is None else 2)]
        votes = self.shared(rank, [what.numbers(own), what.numbers(other)], again)
        if what.noise is not None:
            what.noise = what.noise.grown(votes[2:])
        right = majority(list(votes), lambda first, second: not bool(differing(first, second, what.noise).any()))
        accused = None
        wrong, reference = votes[0], votes[1]
        if right is not None:
            reference = votes[right]
            accused = rank
            if not differing(wrong, reference, what.noise).any():
                accused = repeater
                wrong = votes[1]
        labels = [(name, rank) for name in what.names()]
        if what.noise is not None:
            labels = [label for label, count in zip(labels, what.noise.counts, strict=True) for _ in range(count)]
        mismatch = first_difference(labels, differing(wrong, reference, what.noise).tolist())
        if mismatch is None:  # noise has grown since the start
            return
        more = f" and {mismatch.others} more of {len(labels)} results" if mismatch.others else ""
        verb = "differ" if mismatch.others else "differs"
        self.accuse(accused, f"the {mismatch.what}{more} {verb} from a repetition", (rank, repeater))

    def shared(self, rank: int, pair: Sequence[Tensor], again: Sequence[Tensor]) -> Tensor:
        """Collective: return worker `rank`'s result, the repetition by its repeater, and those of up to VOTERS workers.

        Each worker gives its own numbers: its result and its repetition (`pair`, may be empty), and those of `again`.
        """
        size = len(pair) + len(again) * min(self.world, VOTERS)
        votes = torch.zeros(size, *again[0].shape, dtype=torch.float64, device=again[0].device)
        place = (self.rank - rank) % self.world
        for number, (tensor, owner) in enumerate(zip(pair, (0, self.shift), strict=False)):
            if place == owner:
                votes[number] = tensor
        begin = len(pair) + len(again) * place
        if begin < size:
            votes[begin : begin + len(again)] = torch.stack(list(again))
        # Each row is zero on all workers except one.
        dist.all_reduce(votes)
        return votes

    def accuse(self, rank: int | None, text: str, pair: tuple[int, int] = (0, 0)) -> None:
        """Collective: raise CorruptWorker on the accused worker first, or UndecidedAudit if `rank` is None."""
        step = self.step + 1
        if rank is None:
            workers = " or ".join(f"worker {number}" for number in sorted(set(pair)))
            raise UndecidedAudit(
                f"live audit of step {step}: {workers} computes wrong results, and no majority shows which result is "
                f"right: {text}\n{REMEDY}"
            )
        if rank != self.rank:
            # The attempt ends as soon as the accused worker has raised; its error must be the first.
            dist.barrier()
        raise CorruptWorker(f"live audit of step {step}: worker {rank} computed wrong results: {text}\n{REMEDY}")

    def before_save(self, progress: "Progress") -> None:
        """Collective: finish the audit of the last step, so that no checkpoint contains values found to be wrong."""
        self.settle()

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Add the number of this worker's audited parts to the training records."""
        if kind == "train":
            values["audited_parts"] = self.audited
        return ""


def gathered(tensor: Tensor, world: int) -> list[Tensor]:
    """Collective: return the tensors of all workers, which have the same length."""
    whole = torch.empty(world * len(tensor), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(whole, tensor.contiguous())
    return list(whole.view(world, -1))
