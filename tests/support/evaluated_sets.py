"""Data sets, their feature stores and a model for tests of evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from torch import nn

from data.index.index import Index
from data.index.shard import Shard
from models import ViTConfig
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.probes import Inputs
from tests.support.shards import Picture, digits, write_set

CPU = torch.device("cpu")
NAMES = ("zero", "one", "two")


def no_beat() -> None:
    pass


def inputs_of(train: FeatureStore | None, test: FeatureStore, name: str = "") -> Inputs:
    return Inputs(name, train, test, test.labels, CPU, no_beat)


def store_of(
    features: np.ndarray | None, labels: np.ndarray, folder: Path, predictions: np.ndarray | None = None
) -> FeatureStore:
    """Return rank 0's store with these rows, written in pieces of 100."""
    count = len(labels)
    lists = labels.reshape(count, -1)
    index = Index((Shard("a.tar", count, 0, ""),), 10, (), "d" * 64, "", Path(), names=NAMES)
    store = FeatureStore(index, folder)
    for first in range(0, count, 100):
        place = slice(first, first + 100)
        store.keep(
            torch.arange(count)[place],
            torch.from_numpy(lists[place]),
            None if features is None else torch.from_numpy(features[place]),
            None if predictions is None else torch.from_numpy(predictions[place]),
        )
    return store


def unreadable(features: np.ndarray | None, labels: np.ndarray, folder: Path, missing: list[int]) -> FeatureStore:
    """Return a store in which some samples of the set are unreadable."""
    store = store_of(features, labels, folder)
    store.is_there[missing] = False
    return store


class Sums(nn.Module):
    """A model whose features are sums of pixels over rows and columns; their bits depend on the batch's composition."""

    config = ViTConfig()  # for the normalisation of pixels

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.mix = nn.Linear(3 * 16 * 16, 64)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.mix(images.flatten(1)) + images.mean()  # the mean over the batch: it shows who was in it


def with_a_bad_one(folder: Path) -> Index:
    """Return 150 digits in shards of 40; the 78th digit is unreadable."""
    good = list(islice(digits(True, image_size=16), 150))
    samples = [Picture(s.key, s.image if n != 77 else b"junk", s.labels) for n, s in enumerate(good)]
    return write_set(samples, folder, shard_samples=40)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread: on a busy machine, waiting threads made small matrices 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def digit_features(folder: Path) -> tuple[FeatureStore, FeatureStore, dict[str, np.ndarray]]:
    """Return pixels of the digits as features: 1,000 training rows and 300 test rows."""
    pixels, labels = load_digits(return_X_y=True)
    arrays = {
        "train": pixels[:1000].astype(np.float32),
        "train_labels": labels[:1000],
        "test": pixels[1000:1300].astype(np.float32),
        "test_labels": labels[1000:1300],
    }
    train = store_of(arrays["train"], arrays["train_labels"], folder)
    return train, store_of(arrays["test"], arrays["test_labels"], folder), arrays
