"""Report the result of a leak search: a summary for the terminal, and an HTML page that shows the pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.checks import printable
from data.extras.leaks.document import Leaks, Pair, Side, in_pairs
from data.extras.pages import page
from data.images.decode import BadImage, decode
from data.index.index import Index
from data.reader import ShardReader
from data.remote.config import CacheConfig

MAX_EXAMPLES = 5  # pairs listed in the summary
MAX_SHOWN = 200  # pairs on the page, spread evenly over all distances


def lines(leaks: Leaks, train: Mapping[str, Index], test: Mapping[str, Index]) -> list[str]:
    """Return the summary for the terminal: the leaked share of each set, the kinds of pairs, and examples."""
    report = []
    counts = leaks.looked_at
    report.append(
        f"{counts['train']:,} training and {counts['test']:,} test samples compared, {len(leaks.pairs):,} pairs"
    )
    sides: dict[Side, Mapping[str, Index]] = {"test": test, "train": train}
    for side, sets in sides.items():
        for path, index in sets.items():
            leaked = in_pairs(leaks, index, side)
            report.append(
                f"{side:5} {path}: {int(leaked.sum()):,} of {len(leaked):,} samples leak ({leaked.mean():.3%})"
            )
    kinds = Counter(pair.kind for pair in leaks.pairs)
    if kinds:
        report.append("  ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items())))
    own_pairs = leaks.settings.get("test_pairs")
    if own_pairs is not None:
        alike = own_pairs["alike"]
        report.append(
            f"{alike:,} of {own_pairs['compared']:,} pairs of different test images have similar low frequencies"
        )
    for pair in leaks.pairs[:MAX_EXAMPLES]:
        report.append(f"  {caption(pair)}")
    undecodable = counts["train_undecodable"] + counts["test_undecodable"]
    if undecodable or counts["train_flat"]:
        report.append(
            f"compared only by bytes: {undecodable:,} undecodable images; compared only by bytes and pixels: "
            f"{counts['train_flat']:,} training images of almost uniform colour"
        )
    return report


def caption(pair: Pair) -> str:
    """Describe a pair in one line."""
    text = f"{pair.train[0]} {pair.train[1]} = {pair.test[0]} {pair.test[1]}: {pair.kind}, distance {pair.distance:.3g}"
    return printable(text)


def write_page(
    path: Path, leaks: Leaks, train: Mapping[str, Index], test: Mapping[str, Index], cache: CacheConfig | None = None
) -> None:
    """Write a self-contained HTML page that shows the pairs."""
    farthest_first = sorted(leaks.pairs, key=lambda pair: -pair.distance)
    # Show the least similar pairs first, because these need a human check. If there are too many pairs, show a sample
    # from the whole range of distances.
    step = max(1, -(-len(farthest_first) // MAX_SHOWN))
    shown = farthest_first[::step]
    train_readers = [ShardReader(index, cache=cache) for index in train.values()]
    test_readers = [ShardReader(index, cache=cache) for index in test.values()]
    figures = []  # (training image, test image, caption); images as JPEG in base64
    for pair in shown:
        # Pairs with equal bytes may be undecodable: omit their pictures.
        with suppress(BadImage):
            images = []
            for reader, (shard, key) in (
                (train_readers[pair.train_set], pair.train),
                (test_readers[pair.test_set], pair.test),
            ):
                number = reader.index.numbers[shard]
                row = int(np.flatnonzero(reader.index.keys(number) == key)[0])
                _, encoded, _ = reader.read(number, row)
                images.append(page.jpeg(decode(encoded)))
            figures.append((*images, caption(pair)))
    summary = "\n".join(lines(leaks, train, test))
    page.write_page(
        path,
        "leaks.html",
        title="Leaks",
        summary=summary,
        shown=len(figures),
        pairs=len(leaks.pairs),
        figures=figures,
    )
