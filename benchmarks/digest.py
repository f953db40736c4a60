"""Measure the cost of verifying the digest of every sample, as a share of the loader's CPU time.

    python benchmarks/digest.py --shards FOLDER [--rounds 9]

Each round reads and decodes the same photographs to 224-pixel crops, like a decoding process, and then computes the
digest of each contender for a fresh copy of the same bytes, in the same process. Shares are medians of the per-round
shares. A contender that is not installed is skipped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.decoder import BatchLayout, Decoder, DecodeTask
from data.extras.shards.packing import pack
from data.extras.sources.tars import tars
from data.images.augment import AugmentConfig
from data.index.index import Index
from data.index.shard import sample_digest
from data.order import Order
from data.reader import ShardReader

SIZE = 224  # pixels of a crop
BATCH = 32


def crc32c(image: bytes, label: bytes) -> int:
    import google_crc32c

    return google_crc32c.value(image) ^ google_crc32c.value(label)


def zlib_crc32(image: bytes, label: bytes) -> int:
    return zlib.crc32(image, zlib.crc32(label))


CONTENDERS: dict[str, Callable[[bytes, bytes], int]] = {
    "xxh3, 64 bits (ours)": sample_digest,
    "crc32c (google-crc32c)": crc32c,
    "crc32 (zlib)": zlib_crc32,
}


def decoder_of(index: Index) -> Decoder:
    order = Order(index.shard_samples, seed=0, batch_size=BATCH)
    layout = BatchLayout(BATCH, SIZE, 1)
    return Decoder(index, order, layout, AugmentConfig(), 0, ShardReader(index))


def loading_s(decoder: Decoder, steps: range) -> float:
    """Return the CPU-seconds per image for reading and decoding, including the digest of every sample."""
    memory = bytearray(decoder.layout.bytes)
    start = time.process_time()
    for step in steps:
        decoder.run(DecodeTask(step, 0, BATCH), decoder.layout.arrays(memory))
    return (time.process_time() - start) / (len(steps) * BATCH)


def digest_s(decoder: Decoder, steps: range, contender: Callable[[bytes, bytes], int]) -> float:
    """Return the CPU-seconds per image for a digest of the same samples, each copied just before, as in a reader."""
    seconds = 0.0
    for step in steps:
        for _, shard, sample in zip(*decoder.order.batch(step), strict=True):
            _, image, label = decoder.reader.read(int(shard), int(sample))
            start = time.process_time_ns()
            contender(image, label)
            seconds += (time.process_time_ns() - start) / 1e9
    return seconds / (len(steps) * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    photos = sorted(str(path) for path in Path(args.shards).glob("imagenet*.tar"))
    with tempfile.TemporaryDirectory() as folder:
        for kind, restarts in (("plain", False), ("restart markers", True)):
            index = pack(tars(photos), Path(folder, kind), shard_samples=100, classes=1000, restarts=restarts)
            measure(kind, decoder_of(index), args.rounds)


def measure(kind: str, decoder: Decoder, rounds: int) -> None:
    steps_of_round = decoder.index.samples // BATCH
    loading_s(decoder, range(2))  # opens and verifies the shards
    shares: dict[str, list[float]] = {}
    micros: dict[str, list[float]] = {}
    loading: list[float] = []
    for number in range(rounds):
        steps = range(number * steps_of_round, (number + 1) * steps_of_round)
        loading.append(loading_s(decoder, steps))
        for name, contender in CONTENDERS.items():
            try:
                seconds = digest_s(decoder, steps, contender)
            except ImportError:
                continue
            shares.setdefault(name, []).append(seconds / loading[-1])
            micros.setdefault(name, []).append(seconds * 1e6)
    print(f"{kind}: {statistics.median(loading) * 1e6:.0f} µs of CPU per image")
    for name, of_rounds in shares.items():
        spread = f"({min(of_rounds):.2%} … {max(of_rounds):.2%})"
        print(f"  {name:24} {statistics.median(micros[name]):5.1f} µs  {statistics.median(of_rounds):.2%} {spread}")


if __name__ == "__main__":
    main()
