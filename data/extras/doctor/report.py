"""What the doctor has seen of one shard (`ShardReport`) and of a set (`Report`), with its lines for a terminal."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from data.checks import printable
from data.images.decode import Header
from data.index.index import Index, Refusals
from data.index.names import preview

FEW_SHARDS = 16  # so few shards are no trouble if they are small
SMALL_SHARD = 32 << 20  # bytes; below it a network mostly waits for the next request
LARGE_SHARD = 4 << 30  # bytes


class Spread(Counter[float]):
    """How often each value of some measure came; a few thousand counters, however many the images."""

    def quantile(self, q: float) -> float:
        """Return the least value that a part `q` of all does not exceed; raises IndexError where there is none."""
        values = sorted(self)
        reached = np.cumsum([self[value] for value in values])
        return values[int(np.searchsorted(reached, q * reached[-1]))]


@dataclass
class ShardReport:
    """What the doctor saw in one shard; classes, sizes, spreads and hashes are of the good samples alone."""

    name: str
    samples: int = 0
    problem: str = ""  # of the shard as a whole: missing, short, changed, no tar
    bad: Refusals = field(default_factory=Refusals)  # samples, the first of each reason by its key
    refused: Refusals = field(default_factory=Refusals)
    classes: Counter[int] = field(default_factory=Counter)
    most_labels: int = 0  # of one sample
    damaged: int = 0  # JPEGs that decode, with warnings
    good: int = 0
    size: int = 0  # bytes of their images
    spreads: dict[str, Spread] = field(default_factory=dict)
    hashes: array[int] = field(default_factory=lambda: array("Q"))  # of the encoded images, until they are compared
    grid: list[tuple[str, bytes]] = field(default_factory=list)  # for the page: key and classes, the encoded image

    def add_good(self, header: Header, image: bytes, labels: tuple[int, ...]) -> None:
        """Count and measure a good sample."""
        self.good += 1
        self.size += len(image)
        self.classes.update(set(labels))  # a label that is repeated counts once
        self.most_labels = max(self.most_labels, len(labels))
        # Rounded, so that a few thousand counters are enough for any number of images.
        measures = {
            "height": header.height,
            "width": header.width,
            "shorter side": min(header.height, header.width),
            "width / height": round(header.width / header.height, 2),
            "kB": round(len(image) / 1000, 1),
        }
        for name, value in measures.items():
            self.spreads.setdefault(name, Spread())[value] += 1
        # 64 bits of each image: among 300 million the chance that any two different ones meet is under 1 %.
        self.hashes.frombytes(blake2b(image, digest_size=8).digest())


@dataclass
class Report:
    """What is in a set."""

    index: Index
    shards: list[ShardReport]
    classes: Counter[int] = field(default_factory=Counter)
    spreads: dict[str, Spread] = field(default_factory=dict)  # sides, shape and size of the good images
    duplicates: int = 0  # good samples whose very bytes another one has already

    @property
    def bad(self) -> Refusals:
        """Bad samples, by reason."""
        total = Refusals()
        for shard in self.shards:
            total.add_all(shard.bad, shard.name)
        return total

    @property
    def refused(self) -> Refusals:
        """Members of the tars that were passed over, by reason."""
        total = Refusals()
        for shard in self.shards:
            total.add_all(shard.refused, shard.name)
        return total

    @property
    def good(self) -> int:
        """Good samples."""
        return sum(shard.good for shard in self.shards)

    @property
    def ok(self) -> bool:
        """Whether a run would read every sample."""
        return not self.bad.counts and not any(shard.problem for shard in self.shards)

    def add(self, shard: ShardReport) -> None:
        """Keep a shard's report, its counters only as part of the whole set's."""
        self.classes.update(shard.classes)
        for name, spread in shard.spreads.items():
            self.spreads.setdefault(name, Spread()).update(spread)
        # Of tens of thousands of shards these would fill the memory.
        shard.classes = Counter()
        shard.spreads = {}
        shard.hashes = array("Q")
        self.shards.append(shard)

    def lines(self, world: int = 1) -> list[str]:
        """Return the report for a terminal: one fact a line, always in the same order; advice for so many workers."""
        size = 0  # bytes of the images
        damaged = 0
        most_labels = 1
        for shard in self.shards:
            size += shard.size
            damaged += shard.damaged
            most_labels = max(most_labels, shard.most_labels)
        lines = [f"{len(self.shards)} shards  {self.good:,} good samples  {size / 1e6:,.1f} MB of images"]

        # What is wrong: with shards, then with samples, then with members of tars.
        for shard in self.shards:
            if shard.problem:
                lines.append(printable(f"shard {shard.name}: {shard.problem}"))
        bad = self.bad
        for reason, count in bad.counts.most_common():
            lines.append(f"bad: {count} × {reason}, first {printable(bad.first[reason])}")
        lines += self.refused.lines("refused: ")

        # What a run must be told.
        if most_labels > 1:
            lines.append(
                f"labels: up to {most_labels} a sample; a run needs data.max_labels={most_labels}, "
                "or replaces the others"
            )
        lines.append(f"damaged but decodable: {damaged}")
        lines.append(f"duplicates: {self.duplicates}")

        # How many classes there are, and how the samples are spread over them.
        empty = [label for label in range(self.index.classes) if self.classes[label] == 0]
        line = f"classes: {self.index.classes}, empty {len(empty)}"
        if empty:
            line += f" (first: {empty[:8]})"
        if self.index.names:
            line += f", called {preview(self.index.names)}"
        lines.append(line)
        if self.classes:
            counts = sorted(self.classes.values())
            median = counts[len(counts) // 2]
            lines.append(f"samples a class: least {counts[0]}, median {median}, most {counts[-1]}")

        # How the shards could be read better, if there is anything to say.
        sizes = np.array([shard.bytes for shard in self.index.shards])
        if len(sizes) > FEW_SHARDS and np.median(sizes) < SMALL_SHARD:
            mebibytes = np.median(sizes) / 2**20
            lines.append(f"advice: shards of {mebibytes:.0f} MiB are small for a network; 256 MiB – 1 GiB read best")
        if sizes.max(initial=0) > LARGE_SHARD:
            lines.append(
                "advice: shards over 4 GiB delay the first batch and the cache; pack with shard_bytes of 1 GiB"
            )
        if world > 1 and len(sizes) < world:
            lines.append(
                f"advice: {len(sizes)} shards for {world} workers: several read one shard, fine on local disks"
            )
        return lines
