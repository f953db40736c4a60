"""Results and repetitions are compared bit for bit or within noise, and the majority decides which one is wrong."""

from typing import Any

import pytest
import torch

from benchmarks.replay import flip
from pipeline.extras.replays.comparison import (
    SUMS,
    Mismatch,
    Noise,
    checksums,
    differing,
    first_difference,
    majority,
    sums,
    sums_of,
)

SIZES = (10, 3 * SUMS + 5, 5 * SUMS)  # elements of tensors; the second fills its last sum only in part


def test_first_difference_names_the_quantity_and_its_only_worker():
    labels = [("state", 0), ("state", 1), ("loss", 0), ("loss", 1), ("norm", None)]
    assert first_difference(labels, [False] * 5) is None
    assert first_difference(labels, [False, False, False, True, True]) == Mismatch("loss", 1, 1)
    assert first_difference(labels, [True, True, False, False, False]) == Mismatch("state", None, 1)
    assert first_difference(labels, [False, False, False, False, True]) == Mismatch("norm", None, 0)


@pytest.mark.parametrize(
    ("votes", "right"),
    [
        # original, repetition by another worker, then one more repetition by each of the workers
        ("baaaaa", 1),
        ("bacaaa", 1),
        ("abaaaa", 0),
        ("babbaa", None),  # a tie
        ("baba", None),  # a lasting error with two workers
        ("baa", 1),
        ("abc", None),
    ],
)
def test_more_than_half_of_the_votes_decide(votes: str, right: int | None):
    assert majority(list(votes), str.__eq__) == right


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


@pytest.mark.parametrize("bit", range(32))
def test_checksums_differ_in_the_tensor_with_any_flipped_bit(bit: int):
    changed = gradients(0)
    flip(changed[1], 1234, bit)
    differs = differing(checksums(gradients(0)), checksums(changed), None)
    assert differs.tolist() == [False, True, False]


def noisy(seed: int, level: float) -> torch.Tensor:
    """Return the sums of gradients with noise."""
    tensors = []
    for number, tensor in enumerate(gradients(0)):
        generator = torch.Generator().manual_seed(10 * seed + number)
        tensors.append(tensor + level * torch.randn(len(tensor), generator=generator))
    return sums(tensors)


COUNTS = list(map(sums_of, SIZES))


def test_sums_cover_every_element():
    assert COUNTS == [10, SUMS, SUMS]
    totals = [part.sum() for part in sums(gradients(0))[0].split(COUNTS)]
    for total, tensor in zip(totals, gradients(0), strict=True):
        assert float(total) == pytest.approx(float(tensor.double().sum()), abs=1e-9)


def test_noise_is_no_difference_and_a_flip_above_it_is_one():
    noise = Noise.of(torch.stack([noisy(seed, 1e-5) for seed in range(4)]), COUNTS, 0.0)
    for seed in range(10, 40):
        assert not differing(noisy(seed, 1e-5), noisy(seed + 100, 1e-5), noise).any()
    changed = noisy(0, 1e-5)
    changed[0, 10 + 7] += 0.01
    assert differing(changed, noisy(1, 1e-5), noise).nonzero().flatten().tolist() == [17]


def test_noise_grows_with_later_repetitions_unless_a_single_one_differs():
    noise = Noise.of(torch.stack([noisy(seed, 1e-6) for seed in range(4)]), COUNTS, 0.0)
    assert differing(noisy(10, 1e-3), noisy(11, 1e-3), noise).any()
    grown = noise.grown(torch.stack([noisy(seed, 1e-3) for seed in range(20, 24)]))
    assert not differing(noisy(10, 1e-3), noisy(11, 1e-3), grown).any()
    votes = torch.stack([noisy(seed, 1e-6) for seed in range(30, 34)])
    votes[2, 0] += 1.0
    assert (noise.grown(votes).levels < 2 * noise.levels).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_agree_with_each_other_only(value: float):
    noise = Noise(COUNTS, torch.full((3,), 1e-6))

    def measured(*values: float) -> Any:
        tensors = gradients(0)
        tensors[2][: len(values)] = torch.tensor(values)
        return sums(tensors)

    assert not differing(measured(value), measured(value), noise).any()
    assert differing(measured(value), measured(1.0), noise).any()
