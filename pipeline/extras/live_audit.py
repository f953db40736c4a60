"""Hook that repeats randomly drawn parts of steps on another worker, and compares the results (`health.audit`).

Exact mode only: there, a part of a step (pipeline/engine/exact.py) has the same bits on every worker. In a drawn step:
1. Every worker records checksums of one of its parts: each parameter's gradient, and the loss.
2. Every worker decodes another worker's part again, and repeats its forward and backward passes.
3. During the update, every worker copies a slice of its master weights, moments and gradient, before and after. Another
   worker repeats the update of the slice.
4. Until the next step, checksums of the master weights and moments must stay the same.
5. If two results differ, all workers repeat the computation, and the majority is right. The worker that differs raises
   CorruptWorker. This happens before the next save begins, so no checkpoint contains the wrong values.

In:  health.audit 0.01, two workers; in step 70, counted from 0, bit 22 of an element of worker 1's gradient flips
Out: worker 1 raises "live audit of step 71: worker 1 computed wrong results: the gradient of blocks.0.mlp.up.weight …",
     and the run resumes from its last checkpoint, without the node of worker 1 if there are others
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CorruptWorker, PatchlineError
from data.loader import Batch, prefetched_to_device
from pipeline import config
from pipeline.batches import OBJECTIVES, begin_forward, planned_ids, samples_in_mean, without_rows
from pipeline.engine.exact import ExactEngine, checksum
from pipeline.extras.replays.spikes import SpikeConfig
from pipeline.hooks import Hook, masked_by
from pipeline.training_config import phase_at
from pipeline.training_data import training_loader

if TYPE_CHECKING:
    from pipeline.start import Worker
    from pipeline.worker import Progress, Setup

SLICE = 16  # a drawn step repeats the update of one sixteenth of each flat tensor
SMALLEST_SLICE = 64  # elements
AVERAGE = "average"  # changes after the optimizer's step, so it is not compared


class UndecidedAudit(PatchlineError):
    """Repetitions of a computation differ, and no majority shows which worker is wrong; no node is excluded."""

    exit_code = None  # ends the attempt, but not the stage


@dataclass(frozen=True)
class Draw:
    """The parts of a step that are repeated, drawn from the seed and the step; the same on all workers."""

    step: int  # counted from 0
    parts: frozenset[int]  # numbers of parts among the parts of each worker
    shift: int  # worker r's part is repeated by worker (r + shift) % world
    place: float  # 0 to 1: position of the slices in the flat tensors


def draw(seed: int, step: int, share: float, world: int, parts: int) -> Draw | None:
    """Draw the parts of a step to audit, each with the probability `share`; return None if no part is drawn.

    `parts` is the number of parts of each worker.
    """
    generator = random.Random(config.digest((seed, step, "audit")))
    drawn = frozenset(part for part in range(parts) if generator.random() < share)
    if not drawn:
        return None
    shift = generator.randrange(1, world) if world > 1 else 0
    return Draw(step, drawn, shift, generator.random())


@dataclass
class Update:
    """A slice of a flat tensor before and after an update of the optimizer, and the options of its group."""

    flat: Tensor
    where: slice
    options: dict[str, Any]
    before: list[Tensor]  # master, gradient, and the optimizer's state
    after: list[Tensor] = field(default_factory=list)  # master and state
    at_rest: list[Tensor] = field(default_factory=list)  # checksums of the whole master and state


class LiveAudit(Hook):
    """Hook that audits drawn steps of a run in exact mode."""

    Config = SpikeConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Register callbacks that the engine calls after each part and the optimizer calls around each update."""
        self.worker = cast("Worker", worker)
        self.progress = progress  # counts the steps
        assert isinstance(worker.engine, ExactEngine), "SpikeConfig requires exact mode"
        self.engine: ExactEngine = worker.engine
        self.rank = worker.group.rank
        self.world = worker.group.world
        self.state_names = [name for name in self.engine.state_names if name != AVERAGE]
        self.names = [*(f"gradient of {name}" for name in self.engine.sizes), "loss"]
        self.drawn: Draw | None = None
        self.updates: list[Update] = []
        self.audited = 0  # parts of this worker
        self.engine.note_part = self.audit_part
        optimizer = self.engine.state.optimizer
        optimizer.register_step_pre_hook(self.before_update)
        optimizer.register_step_post_hook(self.after_update)

    # -------------------------------------------------------------------- parts of steps

    def audit_part(self, number: int, part: Tensor) -> None:
        """Collective: if this part of the batch was selected at random for an audit, repeat it on another worker.

        Compare the checksums of both workers. Raises CorruptWorker or UndecidedAudit if they differ.
        """
        if number == 0:
            self.settle()
            step = self.progress.step
            self.drawn = draw(self.cfg.seed, step, self.cfg.health.audit, self.world, self.engine.parts_here)
        drawn = self.drawn
        if drawn is None or number not in drawn.parts:
            return
        own = self.checksums(part)
        other = self.repeat(drawn, number, (self.rank - drawn.shift) % self.world)
        self.audited += 1
        self.compare(own, other, lambda rank: self.repeat(drawn, number, rank), self.names)

    def checksums(self, part: Tensor) -> Tensor:
        """Return the checksums of each parameter's gradient and of the loss."""
        return torch.stack([checksum(span) for span in part.split(self.engine.spans)])

    def repeat(self, drawn: Draw, number: int, rank: int) -> Tensor:
        """Collective: recompute part `number` of a worker's batch, with reading and decoding; return its checksums."""
        worker = self.worker
        engine = self.engine
        part = None
        samples = samples_in_mean(planned_ids(worker, drawn.step))
        weight = self.world * worker.data.arithmetic.accumulation / samples
        with closing(self.batches(drawn, number, rank)) as batches:
            for batch in batches:
                images = begin_forward(worker, drawn.step, batch)
                loss = OBJECTIVES[worker.cfg.objective](worker, drawn.step, images, batch)
                part = engine.added(loss * weight, part)
        assert part is not None
        return self.checksums(part)

    def batches(self, drawn: Draw, number: int, rank: int) -> Generator[Batch]:
        """Read and decode the micro-batches of a worker's part again."""
        worker = self.worker
        data = worker.data
        length = self.engine.part_length
        samples = length * worker.cfg.micro_batch
        first = data.arithmetic.slots(rank).start + number * samples
        loader = training_loader(
            worker.cfg,
            data.index,
            data.order,
            image_size=phase_at(drawn.step, data.phases).image_size,
            slots=range(first, first + samples),
            start_step=drawn.step,
            micro_batch=worker.cfg.micro_batch,
            accumulation=length,
        )
        with closing(iter(loader)) as decoded:
            for batch in prefetched_to_device(islice(decoded, length), worker.group.device):
                _, shard, sample = batch.ids.numpy().T
                masked = masked_by(worker.hooks, drawn.step, shard, sample)
                yield batch if masked is None or not np.any(masked) else without_rows(batch, masked)

    # -------------------------------------------------------------------- the update, and the state at rest

    def before_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Copy the drawn slices of the flat tensors that the optimizer is about to update."""
        if self.drawn is None:
            return
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                length = min(flat.numel(), max(flat.numel() // SLICE, SMALLEST_SLICE))
                first = int(self.drawn.place * (flat.numel() - length + 1))
                where = slice(first, first + length)
                options = {name: value for name, value in group.items() if name != "params"}
                tensors = [flat, flat.grad, *self.states(flat)]
                before = [tensor.detach().view(-1)[where].clone() for tensor in tensors]
                options["step"] = optimizer.state[flat].get("step")
                if options["step"] is not None:
                    options["step"] = options["step"].clone()
                self.updates.append(Update(flat, where, options, before))

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
        kinds = ["weight", *self.state_names]
        # 1. The repetition on another worker, from copies of the values before the update.
        given = torch.cat([tensor for update in updates for tensor in update.before])
        given_of_all = gathered(given, self.world)
        own = torch.stack([checksum(tensor) for update in updates for tensor in update.after])
        names = [f"{kind} of {self.parameter(update)} after the update" for update in updates for kind in kinds]

        def repeat(rank: int) -> Tensor:
            return torch.stack([checksum(tensor) for tensor in self.repeated(updates, given_of_all[rank])])

        assert self.drawn is not None
        self.compare(own, repeat((self.rank - self.drawn.shift) % self.world), repeat, names)

        # 2. The state at rest: a worker can only compare its own.
        now = [checksum(tensor) for update in updates for tensor in (update.flat, *self.states(update.flat))]
        differs = torch.stack(now) != torch.stack([value for update in updates for value in update.at_rest])
        flags = gathered(differs.double(), self.world)
        for rank, of_rank in enumerate(flags):
            if of_rank.any():
                changed = [f"{kind} of {self.parameter(update)}" for update in updates for kind in kinds]
                number = int(of_rank.nonzero()[0])
                self.accuse(rank, f"the {changed[number]} changed in memory after the update")

    def repeated(self, updates: Sequence[Update], given: Tensor) -> list[Tensor]:
        """Repeat updates, starting from the values before them; return the resulting master weights and moments."""
        optimizer = self.engine.state.optimizer
        results = []
        values = iter(given.split([len(tensor) for update in updates for tensor in update.before]))
        for update in updates:
            master, gradient = next(values).clone(), next(values).clone()
            state = {name: next(values).clone() for name in self.state_names}
            options = {name: value for name, value in update.options.items() if name != "step"}
            master.grad = gradient
            # The class and its options are those of the run's optimizer, but without its hooks.
            alone = copy.copy(optimizer)
            alone.__dict__ = {**optimizer.__dict__}
            alone._optimizer_step_pre_hooks = {}  # type: ignore[assignment]
            alone._optimizer_step_post_hooks = {}  # type: ignore[assignment]
            alone.param_groups = [{**options, "params": [master]}]
            alone.state = {master: dict(state)}  # type: ignore[assignment]
            if update.options["step"] is not None:
                alone.state[master]["step"] = update.options["step"].clone()
            alone.step()
            results += [master, *(alone.state[master][name] for name in self.state_names)]
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

    def compare(self, own: Tensor, other: Tensor, repeat: Callable[[int], Tensor], names: Sequence[str]) -> None:
        """Collective: compare every worker's result with its repetition. Raises the errors of `accuse` if two differ.

        `own` is this worker's result, `other` its repetition of another worker's. `repeat(rank)` repeats a worker's
        computation once more. `names` are the names of the results' elements.
        """
        assert self.drawn is not None
        results = gathered(torch.cat([own, other]), self.world)
        for rank in range(self.world):
            repeater = (rank + self.drawn.shift) % self.world
            original = results[rank][: len(own)]
            repetition = results[repeater][len(own) :]
            if torch.equal(original, repetition):
                continue
            votes = [original, repetition, *gathered(repeat(rank), self.world)]
            accused, right = verdict(votes, rank, repeater)
            wrong = repetition if accused == repeater and accused != rank else original
            differing = (wrong != right).nonzero().flatten().tolist()
            text = names[differing[0]]
            if len(differing) > 1:
                text += f" and {len(differing) - 1} more of {len(names)} results"
            self.accuse(
                accused, f"the {text} differ{'s' if len(differing) == 1 else ''} from a repetition", (rank, repeater)
            )

    def accuse(self, rank: int | None, text: str, pair: tuple[int, int] = (0, 0)) -> None:
        """Collective: raise CorruptWorker on the accused worker first, or UndecidedAudit if `rank` is None."""
        assert self.drawn is not None
        step = self.drawn.step + 1
        remedy = "  the run resumes from its last checkpoint; test the node's memory and device before using it again"
        if rank is None:
            workers = " or ".join(f"worker {number}" for number in sorted(set(pair)))
            raise UndecidedAudit(
                f"live audit of step {step}: {workers} computes wrong results, and no majority shows which result is "
                f"right: {text}\n{remedy}"
            )
        if rank != self.rank:
            # The attempt ends as soon as the accused worker has raised; its error must be the first.
            dist.barrier()
        raise CorruptWorker(f"live audit of step {step}: worker {rank} computed wrong results: {text}\n{remedy}")

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
    if world == 1:
        return [tensor]
    whole = torch.empty(world * len(tensor), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(whole, tensor.contiguous())
    return list(whole.view(world, -1))


def verdict(votes: Sequence[Tensor], rank: int, repeater: int) -> tuple[int | None, Tensor]:
    """Return the worker whose result is wrong, and the right result.

    `votes` are the original result, its repetition by `repeater`, and one more repetition by each worker. More than
    half of them must agree; otherwise, the returned worker is None, and the returned result is the repetition.
    """
    keys = [vote.cpu().numpy().tobytes() for vote in votes]
    key, count = Counter(keys).most_common(1)[0]
    if 2 * count <= len(votes):
        return None, votes[1]
    right = votes[keys.index(key)]
    return (rank if keys[0] != key else repeater), right
