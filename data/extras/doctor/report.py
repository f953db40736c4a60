"""Results of a data check, for one shard (`ShardReport`) or a data set (`Report`), and their text for the terminal."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from data.checks import printable
from data.extras.sources.refusals import Refusals, refusal_lines
from data.images.decode import Header
from data.index.index import Index
from data.index.names import preview

FEW_SHARDS = 16  # up to this number, small shards are not a problem
SMALL_SHARD = 32 << 20  # bytes; below this size, latency dominates network reads
LARGE_SHARD = 4 << 30  # bytes; larger shards are reported


class Spread(Counter[float]):
    """Histogram of one measurement; rounding limits it to a few thousand distinct values for any number of images."""

    def quantile(self, q: float) -> float:
        """Return the quantile `q`: the smallest value with at least the fraction `q` of all values at or below it.

        Raises IndexError if the histogram is empty.
        """
        values = sorted(self)
        reached = np.cumsum([self[value] for value in values])
        return values[int(np.searchsorted(reached, q * reached[-1]))]


@dataclass
class ShardReport:
    """Results for one shard; classes, sizes, histograms and hashes cover only the good samples."""

    name: str
    samples: int = 0
    problem: str = ""  # problem of the whole shard: missing, truncated, changed, or not a tar
    bad: Refusals = field(default_factory=Refusals)  # bad samples by reason, with the key of the first one
    refused: Refusals = field(default_factory=Refusals)
    classes: Counter[int] = field(default_factory=Counter)
    most_labels: int = 0  # largest number of labels of one sample
    damaged: int = 0  # JPEGs that decode with warnings
    good: int = 0
    size: int = 0  # bytes of the images of good samples
    spreads: dict[str, Spread] = field(default_factory=dict)
    hashes: array[int] = field(default_factory=lambda: array("Q"))  # of encoded images; emptied by `Report.add`
    grid: list[tuple[str, bytes]] = field(default_factory=list)  # thumbnails: (key and classes, encoded image)

    def add_good(self, header: Header, image: bytes, labels: tuple[int, ...]) -> None:
        """Count and measure a good sample."""
        self.good += 1
        self.size += len(image)
        self.classes.update(set(labels))  # count a repeated label once
        self.most_labels = max(self.most_labels, len(labels))
        # Rounding keeps each histogram to a few thousand values for any number of images.
        ratio = header.width / header.height
        measures = {
            "height": header.height,
            "width": header.width,
            "shorter side": min(header.height, header.width),
            "width / height": round(ratio, 2) or float(f"{ratio:.1g}"),  # not 0 for a narrow image
            "kB": round(len(image) / 1000, 1),
        }
        for name, value in measures.items():
            self.spreads.setdefault(name, Spread())[value] += 1
        # With 64 bits, the chance of any collision among 300 million different images is below 1 %.
        self.hashes.frombytes(blake2b(image, digest_size=8).digest())


@dataclass
class Report:
    """Results for a whole data set."""

    index: Index
    shards: list[ShardReport]
    classes: Counter[int] = field(default_factory=Counter)
    spreads: dict[str, Spread] = field(default_factory=dict)  # sides, shape and size of the good images
    duplicates: int = 0  # good samples whose image has the same bytes as an earlier one

    @property
    def bad(self) -> Refusals:
        """Bad samples of all shards, by reason."""
        total = Refusals()
        for shard in self.shards:
            total.add_all(shard.bad, shard.name)
        return total

    @property
    def refused(self) -> Refusals:
        """Ignored members of all tars, by reason."""
        total = Refusals()
        for shard in self.shards:
            total.add_all(shard.refused, shard.name)
        return total

    @property
    def good(self) -> int:
        """Number of good samples in all shards."""
        return sum(shard.good for shard in self.shards)

    @property
    def ok(self) -> bool:
        """Whether training could read every sample."""
        return not self.bad.counts and not any(shard.problem for shard in self.shards)

    def add(self, shard: ShardReport) -> None:
        """Append a shard's report, and move its counts to the totals of the data set."""
        self.classes.update(shard.classes)
        for name, spread in shard.spreads.items():
            self.spreads.setdefault(name, Spread()).update(spread)
        # The counters of tens of thousands of shards would fill the memory.
        shard.classes = Counter()
        shard.spreads = {}
        shard.hashes = array("Q")
        self.shards.append(shard)

    def lines(self, world: int = 1) -> list[str]:
        """Return the report as lines for a terminal, in a fixed order, with advice for training on `world` workers."""
        size = 0  # total bytes of the images
        damaged = 0
        most_labels = 1
        for shard in self.shards:
            size += shard.size
            damaged += shard.damaged
            most_labels = max(most_labels, shard.most_labels)
        lines = [f"{len(self.shards)} shards  {self.good:,} good samples  {size / 1e6:,.1f} MB of images"]

        # Problems of shards, then of samples, then of tar members.
        for shard in self.shards:
            if shard.problem:
                lines.append(printable(f"shard {shard.name}: {shard.problem}"))
        bad = self.bad
        for reason, count in bad.counts.most_common():
            lines.append(f"bad: {count} × {reason}, first {printable(bad.first[reason])}")
        lines += refusal_lines(self.refused, "refused: ")

        # Labels, damaged images and duplicates.
        if most_labels > 1:
            lines.append(
                f"labels: up to {most_labels} per sample; train with data.max_labels={most_labels}, "
                "or samples with more labels are replaced"
            )
        lines.append(f"damaged but decodable: {damaged}")
        lines.append(f"duplicates: {self.duplicates}")

        # Classes, and the number of samples in each.
        empty = [label for label in range(self.index.classes) if self.classes[label] == 0]
        line = f"classes: {self.index.classes}, empty {len(empty)}"
        if empty:
            line += f" (first: {empty[:8]})"
        if self.index.names:
            line += f", names: {preview(self.index.names)}"
        lines.append(line)
        if self.classes:
            counts = sorted(self.classes.values())
            median = counts[len(counts) // 2]
            lines.append(f"samples per class: min {counts[0]}, median {median}, max {counts[-1]}")

        # Advice on shard sizes.
        sizes = np.array([shard.bytes for shard in self.index.shards])
        if len(sizes) > FEW_SHARDS and np.median(sizes) < SMALL_SHARD:
            mebibytes = np.median(sizes) / 2**20
            lines.append(f"advice: shards of {mebibytes:.0f} MiB are slow to read over a network; use 256 MiB to 1 GiB")
        if sizes.max(initial=0) > LARGE_SHARD:
            lines.append(
                "advice: shards over 4 GiB delay the first batch and fill the cache slowly; use shard_bytes of 1 GiB"
            )
        if world > 1 and len(sizes) < world:
            lines.append(
                f"advice: {len(sizes)} shards for {world} workers: some workers share a shard, fine on local disks"
            )
        return lines
