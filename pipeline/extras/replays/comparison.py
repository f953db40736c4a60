"""Compare results with repetitions of their computation: find the first difference, and decide which result is wrong.

Both the live audit (pipeline/extras/live_audit.py) and the audit of finished runs (jobs/extras/replays/audit.py) do so:
1. Results are numbers with labels: what was computed, and by which worker.
2. `first_difference` names the first differing quantity, and the worker if only one worker's numbers differ.
3. After a difference, the computation is repeated again. `majority` chooses the result that more than half of all
   repetitions agree with; without a majority, no result is called wrong.

Results agree if they have the same bits. If the kernels of a GPU add in any order, repetitions differ in the last bits.
Then `sums` replaces `checksums`, and `Noise` measures by how much the sums of correct repetitions differ.

In:  a part's gradient on worker 1 and its repetition by worker 0, with 1 flipped bit
Out: Mismatch("gradient of blocks.0.mlp.up.weight", worker=1, others=0)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.engine.exact import checksum

Vote = TypeVar("Vote")
Label = tuple[str, int | None]  # what was computed, and by which worker; None: by several

SUMS = 1024  # largest number of sums of a tensor; each covers neighbouring elements
# Two results agree up to this multiple of the largest deviation in a usual repetition. With the many sums of a tensor,
# that is 3 to 4 standard deviations, so the limit is at 25 or more (benchmarks/live_audit.py, `noise`).
MARGIN = 8.0

# n: results; a Result is (2, n) float64: values, and the scales that noise is relative to


@dataclass(frozen=True)
class Mismatch:
    """The first differing quantity of a comparison."""

    what: str
    worker: int | None  # None if several workers' numbers differ, or if the numbers belong to no single worker
    others: int  # number of other differing numbers


def first_difference(labels: Sequence[Label], differs: Sequence[bool]) -> Mismatch | None:
    """Return the first quantity that differs; None if all are equal."""
    differing = [label for label, is_different in zip(labels, differs, strict=True) if is_different]
    if not differing:
        return None
    what = differing[0][0]
    workers = {worker for name, worker in differing if name == what and worker is not None}
    return Mismatch(what, workers.pop() if len(workers) == 1 else None, len(differing) - 1)


def majority(votes: Sequence[Vote], agree: Callable[[Vote, Vote], bool]) -> int | None:
    """Return the first vote that more than half of all votes agree with, or None."""
    for number, vote in enumerate(votes):
        if 2 * sum(other is vote or agree(vote, other) for other in votes) > len(votes):
            return number
    return None


# ------------------------------------------------------------------------ numbers that represent tensors


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each tensor, as a result (2, n) with scales 0: any flipped bit is a difference."""
    values = torch.stack([checksum(tensor.float()) for tensor in tensors])
    return torch.stack([values, torch.zeros_like(values)])


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return up to SUMS sums of neighbouring elements of each flat tensor, as a result (2, n)."""
    results = []
    for tensor in tensors:
        # Values that are not finite become 1.8e308 in float64, whose squares overflow.
        elements = tensor.double().nan_to_num(nan=1e39, posinf=1e39, neginf=-1e39)
        rows = sums_of(len(elements))
        length = -(-len(elements) // rows)
        values = pad(elements, (0, rows * length - len(elements))).view(rows, length).sum(1)
        # Noise is relative to the whole tensor: in elements near 0, it comes from larger numbers that cancel.
        scale = elements.square().mean().sqrt() * length**0.5
        results.append(torch.stack([values, scale.expand(rows)]))
    return torch.cat(results, 1)


def sums_of(elements: int) -> int:
    """Return the number of sums of a tensor with this number of elements."""
    return min(elements, SUMS)


# ------------------------------------------------------------------------ noise


def deviations(votes: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the largest deviation of each vote from the median, relative to the scale: (votes, tensors).

    `votes` is (votes, 2, n), and `counts` are the numbers of sums of the tensors.
    """
    values, scales = votes.unbind(1)
    relative = (values - values.median(0).values).abs() / scales.median(0).values.clamp(min=1e-300)
    return torch.stack([part.amax(1) for part in relative.split(list(counts), 1)], 1)


@dataclass(frozen=True)
class Noise:
    """How much the sums of correct repetitions differ on these workers."""

    counts: Sequence[int]  # number of sums of each tensor
    levels: Tensor  # (tensors,): largest deviation in a usual repetition, relative to the scale

    @classmethod
    def of(cls, votes: Tensor, counts: Sequence[int], least: float) -> "Noise":
        """Measure the noise of repetitions of one computation, (votes, 2, n); each level is at least `least`."""
        # The median over the repetitions ignores a wrong one.
        usual = deviations(votes, counts).median(0).values
        # The few sums of a small tensor may deviate little by chance.
        return cls(counts, usual.clamp(min=max(float(usual.median()), least)))

    def grown(self, votes: Tensor) -> "Noise":
        """Return the noise including that of later repetitions; the level of a tensor never decreases."""
        return Noise(self.counts, torch.maximum(self.levels, Noise.of(votes, self.counts, 0.0).levels))

    def limits(self) -> Tensor:
        """Return the largest difference of correct results relative to their scale: (n,)."""
        counts = torch.tensor(self.counts, device=self.levels.device)
        return MARGIN * self.levels.repeat_interleave(counts)


def differing(first: Tensor, second: Tensor, noise: Noise | None) -> Tensor:
    """Return which of two results' numbers differ, (n,) bool: in any bit, or by more than noise."""
    gaps = (first[0] - second[0]).abs()
    if noise is None:
        return gaps > 0
    return gaps > noise.limits() * torch.minimum(first[1], second[1])
