"""Read a data set from an emulated Hub with 48 simulated nodes for an hour, while the Hub refuses 30 % of requests.

    .venv/bin/python -m tests.support.hub_soak --minutes 60 --readers 48

1. A gated data set of JPEGs is served on loopback (tests/support/hub.py): 30 % of requests to the Hub are answered with
   429 and `Retry-After: 2`, and a signed address is valid for three requests.
2. The set is indexed from `hf://…/train/*.tar`: one listing, one commit. Then the branch moves to an empty commit.
3. Each reader is a thread with its own cache folder, its own signed addresses and its own part of every batch, as the
   worker of a node would be. It reads the samples in the order of training, spread over the given time. A shard arrives
   in about five pieces, so that addresses expire between two pieces.
4. At the end, no reader may have failed. Every reader must have read the samples of the local files, byte by byte, and
   the readers together at most 1.05 times the bytes of the shards that they need.

Not covered: the Hub itself, several processes, and shards above 16 MiB, whose first samples are read by range.
"""

import argparse
import hashlib
import os
import sys
import tarfile
import tempfile
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from data import reader as reader_module
from data.extras import hub as client
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample, digits
from data.index.index import Index
from data.order import Ledger, Order
from data.reader import ShardReader
from data.remote import cache as cache_module
from data.remote.config import CacheConfig
from tests.support.hub import TOKEN, Hub, hub

SHARDS_PER_MINUTE = 9
SHARD_SAMPLES = 50
SLOTS = 10  # samples of a batch for each reader
STEPS = 120
PIECE = 1 << 15  # bytes per request; a shard has about 150 KiB


class AddressesOfThread(UserDict[str, str]):
    """A dictionary with separate contents in each thread: a node does not know the addresses of another."""

    def __init__(self) -> None:
        self.local = threading.local()

    @property
    def data(self) -> dict[str, str]:  # type: ignore[override]
        """Return the contents of the current thread."""
        if not hasattr(self.local, "contents"):
            self.local.contents = {}
        contents: dict[str, str] = self.local.contents
        return contents


@dataclass(frozen=True)
class Outcome:
    """What the readers did, and what the Hub received."""

    failures: list[str]
    digests: list[str]  # one for each reader
    expected: list[str]  # the same from local files
    ledger: str
    expected_ledger: str
    bytes: int  # sent by the storage
    needed: int  # total size of the shards that each reader needs
    server: Hub
    seconds: float

    def claims(self) -> dict[str, bool]:
        """Return claims about the outcome, and whether they hold."""
        return {
            "no reader failed": self.failures == [],
            "every reader read the samples of the local files": self.digests == self.expected,
            "the ledger is that of the local files": self.ledger == self.expected_ledger,
            "at most 1.05 times the needed bytes were sent": self.bytes <= 1.05 * self.needed,
            "requests were refused, and addresses expired": min(
                self.server.requests["429"], self.server.requests["expired"]
            )
            > 0,
            "the storage received no token": self.server.tokens_at_storage == set(),
        }


def samples(shards: int) -> Iterator[Sample]:
    """Yield the samples for this number of shards: digits in sizes from 32 px on, with unique keys."""
    wanted = shards * SHARD_SAMPLES
    size = 32
    while wanted > 0:
        for is_train in (True, False):
            for sample in digits(is_train, image_size=size):
                if wanted == 0:
                    return
                wanted -= 1
                yield replace(sample, key=f"{sample.key}-{size}")
        size += 1


def parts_of(order: Order, reader: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (shard, sample) of a reader's slots, step by step."""
    for step in range(STEPS):
        _, shard, sample = order.batch(step)
        slots = slice(SLOTS * reader, SLOTS * (reader + 1))
        yield list(zip(shard[slots].tolist(), sample[slots].tolist(), strict=True))


def read(index: Index, order: Order, reader: int, cache: CacheConfig, duration_s: float) -> str:
    """Read a reader's samples of all steps, spread over a time; return a digest of their keys and contents."""
    shards = ShardReader(index, cache=cache)
    digest = hashlib.sha256()
    began = time.monotonic()
    for step, places in enumerate(parts_of(order, reader)):
        for shard, sample in places:
            key, image, label = shards.read(shard, sample)
            digest.update(b"\0".join([key.encode(), image, label]))
        time.sleep(max(0.0, began + (step + 1) * duration_s / STEPS - time.monotonic()))
    return digest.hexdigest()


def expected_digests(tars: list[Path], order: Order, readers: int) -> list[str]:
    """Return the digests that the readers must report, from the local tars as Python's tarfile reads them."""
    contents = []
    for path in tars:
        samples = []
        with tarfile.open(path) as tar:
            members = [(member.name, tar.extractfile(member).read()) for member in tar]
        # `pack` writes the label and the image of each sample, next to each other.
        for (_, label), (name, image) in zip(members[::2], members[1::2], strict=True):
            samples.append(b"\0".join([name.partition(".")[0].encode(), image, label]))
        contents.append(samples)
    digests = []
    for reader in range(readers):
        digest = hashlib.sha256()
        for places in parts_of(order, reader):
            for shard, sample in places:
                digest.update(contents[shard][sample])
        digests.append(digest.hexdigest())
    return digests


def needed_bytes(index: Index, order: Order, readers: int) -> int:
    """Return the total size of the distinct shards of each reader."""
    total = 0
    for reader in range(readers):
        needed = {shard for places in parts_of(order, reader) for shard, _ in places}
        total += sum(index.shards[shard].bytes for shard in needed)
    return total


def ledger_of(index: Index, order: Order) -> str:
    """Return the ledger after all steps."""
    ledger = Ledger.start(index.digest, 0)
    for step in range(STEPS):
        ledger = ledger.update(step, *order.batch(step))
    return ledger.hex


def soak(folder: Path, readers: int, duration_s: float, shards: int) -> Outcome:
    """Serve a set, read it with all readers, and compare with the local files."""
    local = pack(samples(shards), folder / "local", name="train", shard_samples=SHARD_SAMPLES)
    files = {f"train/{shard.name}": Path(local.location(number)) for number, shard in enumerate(local.shards)}
    order = Order(local.shard_samples, seed=0, batch_size=SLOTS * readers)
    expected = expected_digests(list(files.values()), order, readers)
    failures: list[str] = []

    def guarded(reader: int) -> str:
        cache = CacheConfig(str(folder / "caches" / str(reader)))
        try:
            return read(index, order, reader, cache, duration_s)
        except Exception as error:
            failures.append(f"reader {reader}: {type(error).__name__}: {error}")
            return ""

    with hub(files) as server:
        server.is_gated = True
        server.throttled = 0.3
        server.retry_after = "2"
        server.most_uses = 3
        server.page = 50
        os.environ["HF_TOKEN"] = TOKEN
        url = "hf://datasets/me/photos/train/*.tar"
        index = build_index(url, output=folder / "index", name="train", workers=16)
        server.commits["b" * 40] = {}
        server.main = "b" * 40
        server.bytes = 0
        print(f"hub-soak: {shards} shards indexed, requests at the Hub: {dict(server.requests)}", flush=True)
        server.requests.clear()
        began = time.monotonic()
        with ThreadPoolExecutor(readers) as pool:
            digests = list(pool.map(guarded, range(readers)))
        seconds = time.monotonic() - began
        del os.environ["HF_TOKEN"]
    return Outcome(
        failures,
        digests,
        expected,
        ledger_of(index, order),
        ledger_of(local, order),
        server.bytes,
        needed_bytes(local, order, readers),
        server,
        seconds,
    )


def main(words: list[str] | None = None) -> int:
    """Run the soak, print its outcome, and return 0 if all claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--readers", type=int, default=48)
    arguments = parser.parse_args(words)
    # Smaller pieces, separate addresses, and few open files for each of the many readers in this process.
    cache_module.PIECE = PIECE
    client._signed = AddressesOfThread()  # type: ignore[assignment]
    reader_module.most_open = lambda: 8
    with tempfile.TemporaryDirectory(prefix="hub-soak-") as folder:
        shards = max(18, round(SHARDS_PER_MINUTE * arguments.minutes))
        outcome = soak(Path(folder), arguments.readers, 60 * arguments.minutes, shards)
    print(f"hub-soak: {arguments.readers} readers, {shards} shards, {STEPS} steps in {outcome.seconds:.0f} s")
    print(f"hub-soak: requests at the Hub: {dict(outcome.server.requests)}")
    print(f"hub-soak: {outcome.bytes:,} bytes sent, {outcome.needed:,} needed: {outcome.bytes / outcome.needed:.4f}")
    for failure in outcome.failures:
        print(f"hub-soak: {failure}")
    for claim, is_true in outcome.claims().items():
        print(f"hub-soak: {claim}: {'yes' if is_true else 'NO'}")
    return 0 if all(outcome.claims().values()) else 1


if __name__ == "__main__":
    sys.exit(main())
