"""Losses, targets and mixup, compared with arrays from the original code and with hand calculations."""

import numpy as np
import pytest
import torch

from pipeline.losses import LOSSES, dense_targets, mixup
from pipeline.training_config import MAX_SEED, MIN_SEED
from tests.support.golden import read_golden

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
@pytest.mark.parametrize("kind", ["onehot", "multihot", "mixed"])
def test_losses_match_golden_values(loss, kind):
    arrays = read_golden("losses.npz")
    ours = LOSSES[loss](torch.from_numpy(arrays["logits"]), torch.from_numpy(arrays[f"labels_{kind}"]).float())
    np.testing.assert_allclose(ours.numpy(), arrays[f"{loss}_{kind}_per_example"], rtol=1e-5, atol=1e-5)


def test_padded_label_lists_become_multi_hot_targets():
    labels = torch.tensor([[2, -1, -1], [0, 3, -1], [-1, -1, -1]])
    expected = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).float()
    assert torch.equal(dense_targets(labels, 4), expected)
    assert torch.allclose(dense_targets(labels[:1], 4, smoothing=0.2), torch.tensor([[0.05, 0.05, 0.85, 0.05]]))


def test_mixup_gives_the_image_itself_the_larger_share():
    images, targets = torch.eye(4).reshape(4, 1, 2, 2), torch.eye(4)
    mixed, labels = mixup(images, targets, 0.2, (0, 5))
    share = labels.max().item()
    assert share >= 0.5
    assert torch.allclose(labels.sum(1), torch.ones(4))
    assert torch.allclose(mixed.flatten(1), share * torch.eye(4) + (1 - share) * torch.eye(4).roll(1, 0))
    assert torch.equal(labels, mixed.flatten(1)), "a target has other neighbours than its image"
    assert torch.equal(labels, mixup(images, targets, 0.2, (0, 5))[1])


def test_every_seed_of_a_recipe_draws_its_own_ratio():
    images, targets = torch.eye(4).reshape(4, 1, 2, 2), torch.eye(4)
    shares = {float(mixup(images, targets, 0.2, (seed, 5))[1][0, 0]) for seed in (MIN_SEED, -1, 0, 1, MAX_SEED)}
    assert len(shares) == 5
    drawn = np.random.default_rng((1, 5)).beta(0.2, 0.2)  # NumPy accepts this seed, so its ratio stays the same
    assert float(mixup(images, targets, 0.2, (1, 5))[1][0, 0]) == pytest.approx(max(drawn, 1 - drawn))
