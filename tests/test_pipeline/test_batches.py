"""From a micro-batch to images and a loss: values depend only on the samples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.loader import Batch, Wait
from data.order import Ids
from models.catalog import normalise
from models.configs import ViTConfig
from pipeline.batches import (
    classification_loss,
    planned_ids,
    samples_in_mean,
    seed_of_micro_batch,
    without_rows,
)
from pipeline.training_config import Phase, TrainConfig

pytestmark = pytest.mark.quick


def batch_of(labels: list[list[int]], masked: list[bool] | None = None) -> Batch:
    images = torch.full((len(labels), 3, 4, 4), 200, dtype=torch.uint8)
    ids = torch.tensor([[0, 0, number] for number in range(len(labels))])
    mask = None if masked is None else torch.tensor(masked)
    return Batch(0, images, torch.tensor(labels), ids, (), Wait(0.0, 0.0, 0.0), mask)


def test_pixels_are_scaled_to_minus_one_to_one() -> None:
    pixels = torch.tensor([0, 51, 128, 255], dtype=torch.uint8)
    images = normalise(pixels, ViTConfig(), torch.float32, torch.device("cpu"))
    np.testing.assert_allclose(images, [-1.0, -0.6, 0.003922, 1.0], atol=1e-6)


def test_pixels_are_normalised_by_mean_and_deviation_of_the_model() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 3, 1, 3)
    config = ViTConfig(pixel_mean=(0.5, 0.25, 0.0), pixel_std=(0.5, 0.25, 2.0))
    images = normalise(pixels, config, torch.float32, torch.device("cpu"))
    expected = [[-1.0, -0.6, 1.0], [-1.0, -0.2, 3.0], [0.0, 0.1, 0.5]]
    np.testing.assert_allclose(images[0, :, 0], expected, atol=1e-6)


def test_masked_row_is_grey_and_unlabelled() -> None:
    batch = without_rows(batch_of([[3], [4]]), np.array([False, True]))
    assert batch.labels.tolist() == [[3], [-1]]
    assert batch.images[0].unique().tolist() == [200]
    assert batch.images[1].unique().tolist() == [128]


def test_seed_depends_on_recipe_step_samples_and_purpose() -> None:
    ids = torch.tensor([[0, 1, 2]])
    seed = seed_of_micro_batch(0, 5, ids)
    others = {
        seed_of_micro_batch(1, 5, ids),
        seed_of_micro_batch(0, 6, ids),
        seed_of_micro_batch(0, 5, ids + 1),
        seed_of_micro_batch(0, 5, ids, 1),
    }
    assert seed == seed_of_micro_batch(0, 5, ids.clone())
    assert len(others | {seed}) == 5
    assert 0 <= seed < 2**60


def test_masked_samples_are_marked_and_excluded_from_the_mean() -> None:
    planned = Ids(np.zeros(3, np.int64), np.array([0, 0, 1]), np.array([4, 7, 7]))
    order = SimpleNamespace(batch=lambda step: planned)
    hook = SimpleNamespace(masked=lambda step, shard, sample: (shard == 0) & (sample == 7))
    worker: Any = SimpleNamespace(data=SimpleNamespace(order=order), hooks=[hook])
    marked = planned_ids(worker, 3)
    assert marked.sample.tolist() == [4, -8, 7]
    assert samples_in_mean(marked) == 2
    worker.hooks = []
    assert planned_ids(worker, 3) is planned


def test_loss_is_the_sum_over_unmasked_samples() -> None:
    logits = torch.tensor([[2.0, -1.0], [0.5, 0.5]])
    worker: Any = SimpleNamespace(
        cfg=TrainConfig(steps=1, loss="softmax"),
        model_config=SimpleNamespace(classes=2),
        data=SimpleNamespace(phases=[Phase(range(1), 4)]),
        engine=SimpleNamespace(forward=lambda images: logits),
    )
    images = torch.zeros(2, 3, 4, 4)
    of_each = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]), reduction="none")
    whole = classification_loss(worker, 0, images, batch_of([[0], [1]]))
    assert whole.item() == pytest.approx(of_each.sum().item())
    weighed = classification_loss(worker, 0, images, batch_of([[0], [1]], masked=[False, True]))
    assert weighed.item() == pytest.approx(of_each[0].item())
