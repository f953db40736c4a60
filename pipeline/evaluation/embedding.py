"""Which training images a model takes for test images: features whose cosine is above a threshold, shard by shard.

1. The features of all test images are brought to length 1 and kept, (T, D).
2. Training shards stream past; a pair is a match where the inner product of its features is `cosine` or more.
3. The journal gets one line a shard, so that a killed search goes on.

What is alike depends on the weights: with those of a classifier, images of one class are. Look at the page first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.index import Index
from data.journal import Journal
from data.leaks.search import Embeddings, Match, ShardMatches, key_of, matches_of
from data.remote.cache import CacheConfig
from data.shards.reader import ShardReader
from pipeline.evaluation.features import normalise

# T test images, D features

JOURNAL = "embedding.partial"
BATCH = 64  # images that go through the model at once


def find_alike(
    model: nn.Module,
    weights: tuple[str, str],  # their path and digest
    train: Sequence[Index],
    test: Sequence[Index],
    folder: Path,
    *,
    cosine: float,
    device: torch.device,
    cache: CacheConfig | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Embeddings:
    """Find the pairs whose features have a cosine of at least `cosine`; safe to kill and run again.

    `report` is told how many training shards are done, of how many. The journal stays in `folder` until the document
    is written (`forget`).
    """
    path, digest = weights
    settings = {"weights": path, "digest": digest, "cosine": cosine}
    setting = ["embedding", digest, cosine, [index.digest for index in test]]
    shards = [index.alone(number) for index in train for number in range(len(index.shards))]
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL, setting) as journal:
        missing = [shard for shard in shards if key_of(shard.shards[0]) not in journal.records]
        if missing:
            of_tests, numbers = all_features(model, test, device, cache)
            for done, shard in enumerate(missing, start=1):
                journal.add(key_of(shard.shards[0]), alike(model, shard, of_tests, numbers, cosine, device, cache))
                if report:
                    report(done, len(missing))
        return Embeddings({key: matches_of(record) for key, record in journal.records.items()}, settings)


def forget(folder: Path) -> None:
    """Delete the journal: what it says stands in the document."""
    (folder / JOURNAL).unlink(missing_ok=True)


def all_features(
    model: nn.Module, sets: Sequence[Index], device: torch.device, cache: CacheConfig | None
) -> tuple[Tensor, np.ndarray]:
    """(features (n, D) of length 1 of all images that can be decoded, their numbers (n,) through all sets)."""
    parts = []
    numbers = []
    start = 0
    for index in sets:
        for shard, samples in enumerate(index.shard_samples):
            for rows, features in features_of(model, index, shard, device, cache):
                parts.append(features)
                numbers.append(np.array(rows) + start)
            start += samples
    if not parts:
        return torch.empty(0, 0), np.empty(0, np.int64)
    return torch.cat(parts), np.concatenate(numbers)


def alike(
    model: nn.Module,
    shard: Index,
    of_tests: Tensor,
    numbers: np.ndarray,
    cosine: float,
    device: torch.device,
    cache: CacheConfig | None,
) -> ShardMatches:
    """Find the matches of an index's only shard."""
    matches = []
    decoded = 0
    for rows, features in features_of(model, shard, 0, device, cache):
        decoded += len(rows)
        if len(of_tests) == 0:
            continue
        products = features @ of_tests.T  # (b, T)
        for row, test in (products >= cosine).nonzero().tolist():
            distance = round(max(0.0, 1 - float(products[row, test])), 4)
            matches.append(Match(rows[row], int(numbers[test]), "embedding", distance))
    return ShardMatches(sorted(matches), shard.samples, shard.samples - decoded, 0)


def features_of(
    model: nn.Module, index: Index, shard: int, device: torch.device, cache: CacheConfig | None
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (rows, features (b, D) of length 1 on the CPU) of a shard's images, those that can be decoded."""
    reader = ShardReader(index, cache=cache)
    height, width = model.config.image_size  # type: ignore[union-attr,misc]
    model.eval()
    samples = index.shards[shard].samples
    for start in range(0, samples, BATCH):
        rows: list[int] = []
        images: list[np.ndarray] = []
        for row in range(start, min(start + BATCH, samples)):
            _, encoded, _ = reader.read(shard, row)
            # What cannot be decoded is in no batch of a run either.
            with suppress(BadImage):
                images.append(preprocess(decode(encoded), f"resize(({height}, {width}))"))
                rows.append(row)
        if images:
            batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
            with torch.no_grad():
                features = model.features(normalise(batch, torch.float32, device))  # type: ignore[operator]
            yield rows, torch.nn.functional.normalize(features.float().cpu(), dim=1)
