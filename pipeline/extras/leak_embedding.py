"""Finds training images that a model takes for test images: features whose cosine is above a threshold, shard by shard.

1. The features of all test images are brought to length 1 and kept, (T, D).
2. Training shards stream past; a pair is a match where the inner product of its features is `cosine` or more.
3. The journal gets one line a shard, so that a killed search goes on.

Which images are alike depends on the weights: to a classifier, images of a class are. Look at the page first.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.extras.leaks.search import Embeddings, Match, ShardMatches, key_of, matches_of
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.index import Index
from data.remote.config import CacheConfig
from data.seal import Journal
from data.shards.parallel import Progress
from data.shards.reader import ShardReader
from models.catalog import normalise

# T test images, D features

JOURNAL = "embedding.partial"
BATCH = 64  # images that go through the model at once


def find_alike(
    model: nn.Module,
    weights: tuple[str, str],  # their path and digest
    train: Collection[Index],
    test: Collection[Index],
    folder: Path,
    *,
    cosine: float,
    device: torch.device,
    cache: CacheConfig | None = None,
    report: Progress | None = None,
) -> Embeddings:
    """Find the pairs whose features have a cosine of at least `cosine`; safe to kill and run again.

    `report` is told how many training shards are done, of how many. The journal stays in `folder` until the
    document is written.
    """
    path, digest = weights
    settings = {"weights": path, "digest": digest, "cosine": cosine}
    setting = ["embedding", digest, cosine, [index.digest for index in test]]
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL, setting) as journal:
        # An earlier search that was killed has looked at the shards of the journal.
        missing: list[Index] = []
        for index in train:
            for number, shard in enumerate(index.shards):
                if key_of(shard) not in journal.records:
                    missing.append(index.single_shard(number))

        # 1. The features of all test images that can be decoded, and their numbers through all sets.
        parts: list[Tensor] = []
        numbers: list[int] = []
        if missing:
            start = 0
            for index in test:
                for number, samples in enumerate(index.shard_samples):
                    for rows, features in features_of(model, index, number, device, cache):
                        parts.append(features)
                        numbers += [start + row for row in rows]
                    start += int(samples)  # of NumPy's kind, which the journal cannot hold as a number
        of_tests = torch.empty(0, 0)  # (T, D) of length 1
        if parts:
            of_tests = torch.cat(parts)

        # 2. and 3. Each training shard's matches become a line of the journal.
        for done, alone in enumerate(missing, start=1):
            matches = []
            decoded = 0
            for rows, features in features_of(model, alone, 0, device, cache):
                decoded += len(rows)
                if not numbers:
                    continue
                products = features @ of_tests.T  # (b, T)
                for row, number in (products >= cosine).nonzero().tolist():
                    distance = round(max(0.0, 1 - float(products[row, number])), 4)
                    matches.append(Match(rows[row], numbers[number], "embedding", distance))
            shard_matches = ShardMatches(sorted(matches), alone.samples, alone.samples - decoded, 0)
            journal.add(key_of(alone.shards[0]), shard_matches)
            if report:
                report(done, len(missing))
        return Embeddings({key: matches_of(record) for key, record in journal.records.items()}, settings)


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
            # An image that cannot be decoded is in no batch of a run either.
            with suppress(BadImage):
                images.append(preprocess(decode(encoded), f"resize(({height}, {width}))"))
                rows.append(row)
        if images:
            batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
            with torch.no_grad():
                features = model.features(normalise(batch, torch.float32, device))  # type: ignore[operator]
            yield rows, torch.nn.functional.normalize(features.float().cpu(), dim=1)
