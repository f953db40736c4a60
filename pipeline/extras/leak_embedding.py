"""Find training images whose model features are similar to those of test images, by cosine similarity.

1. Compute the features of all test images, normalise them to length 1, and keep them in memory, (T, D).
2. Stream the training shards; a pair of images is a match if the inner product of their features is at least `cosine`.
3. Write one journal line per shard, so that an interrupted search can resume.

The similarity depends on the weights: to a classifier, all images of a class are similar. Check the matches on the HTML
page before using them.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.extras.leaks.search import Embeddings, Match, ShardMatches, key_of, matches_of
from data.extras.shards.parallel import Progress
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.index import Index
from data.reader import ShardReader
from data.remote.config import CacheConfig
from data.seal import Journal
from models.catalog import normalise

# T: number of test images, D: number of features

JOURNAL = "embedding.partial"
BATCH = 64  # images per forward pass


def find_similar(
    model: nn.Module,
    weights: tuple[str, str],  # path and digest of the weights
    train: Collection[Index],
    test: Collection[Index],
    folder: Path,
    *,
    cosine: float,
    device: torch.device,
    cache: CacheConfig | None = None,
    report: Progress | None = None,
) -> Embeddings:
    """Find the image pairs whose features have a cosine similarity of at least `cosine`; interrupted searches resume.

    `report` is called with the number of finished training shards and the total. The journal stays in `folder` until
    leaks.json is written.
    """
    path, digest = weights
    settings = {"weights": path, "digest": digest, "cosine": cosine}
    setting = ["embedding", digest, cosine, [index.digest for index in test]]
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL, setting) as journal:
        # Skip the shards in the journal of an earlier, interrupted search.
        missing: list[Index] = []
        for index in train:
            for number, shard in enumerate(index.shards):
                if key_of(shard) not in journal.records:
                    missing.append(index.single_shard(number))

        # 1. The features of all decodable test images, and their numbers counted over all sets.
        parts: list[Tensor] = []
        numbers: list[int] = []
        if missing:
            start = 0
            for index in test:
                for number, samples in enumerate(index.shard_samples):
                    for rows, features in features_of(model, index, number, device, cache):
                        parts.append(features)
                        numbers += [start + row for row in rows]
                    start += int(samples)  # the journal cannot serialise NumPy integers
        of_tests = torch.empty(0, 0)  # (T, D), rows of length 1
        if parts:
            of_tests = torch.cat(parts)

        # 2. and 3. Match each training shard, and write its journal line.
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
    """Yield row numbers and normalised features (b, D), on the CPU, for batches of a shard's decodable images."""
    reader = ShardReader(index, cache=cache)
    height, width = model.config.image_size  # type: ignore[union-attr,misc]
    model.eval()
    samples = index.shards[shard].samples
    for start in range(0, samples, BATCH):
        rows: list[int] = []
        images: list[np.ndarray] = []
        for row in range(start, min(start + BATCH, samples)):
            _, encoded, _ = reader.read(shard, row)
            # Skip undecodable images, which training does not use either.
            with suppress(BadImage):
                images.append(preprocess(decode(encoded), f"resize(({height}, {width}))"))
                rows.append(row)
        if images:
            batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
            with torch.no_grad():
                features = model.features(normalise(batch, model.config, torch.float32, device))  # type: ignore[operator,arg-type]
            yield rows, torch.nn.functional.normalize(features.float().cpu(), dim=1)
