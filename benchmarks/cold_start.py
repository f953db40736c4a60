"""Measure the time and traffic from an empty cache to the first batches of a data set in an object store.

    python -m benchmarks.cold_start              # alternates between ranges, whole shards, and a full cache

The store is moto, an S3 server, behind a proxy that adds the latency `LATENCY_S` and limits all connections of the node
together to `RATE` bytes per second. The proxy answers reads from the files itself, because moto needs 10 ms of CPU time
per read, which a real store would not take from the client. The set is small, but has the proportions of a large one: a
lane reads about three shards at a time, a batch needs 0.4 % of each, and the first ten batches read the same shards.
This requires small images of 10 kB, because a shard of 16 MiB or less is always downloaded in full first.

Each measurement runs in a separate process with its own cache and two decoding processes:
- ranges: the cache is empty; samples are read by range, while shards are downloaded in the background;
- whole shards: the same without `data.remote.ranges`, as for an index without digests;
- all here: the cache contains every shard. The time is the startup of the decoding processes, part of all rows.
"""

import argparse
import http.server
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.index.index import Index
from tests.support.stores import Proxy, store

SHARDS = 16
SAMPLES = 1800  # per shard
BATCH = 64
BATCHES = 10
LATENCY_S = 0.03
RATE = 10e6  # bytes per second
WAYS = ("ranges", "whole shards", "all here")

LOADER = """
import sys, time
from data.loader import TrainLoader
from data.order import Order
from data.remote.cache import CacheConfig
from data.index.document import load_index
import s3fs
index_path, cache, way, batch_size, batches = sys.argv[1:]
index = load_index(index_path)
order = Order(index.shard_samples, seed=0, batch_size=int(batch_size), lanes=4, shuffle_block=4600)
loader = TrainLoader(index, order, image_size=224, slots=range(order.batch_size), micro_batch=order.batch_size // 2,
                     processes=2, cache=CacheConfig(cache))
if way == "whole shards":
    loader.decoder.reader.ranges = None
pixels = 0
began = time.monotonic()
for count, batch in enumerate(loader, 1):
    pixels += int(batch.images.sum())
    if count in (2, 2 * int(batches)):  # two micro-batches are a batch
        print(time.monotonic() - began, pixels, flush=True)
        sys.stdin.readline()
"""


@dataclass(frozen=True)
class RangeAnswer:
    """S3's response to a range request, without the body."""

    first: int
    length: int  # bytes
    size: int  # of the object
    status: int = 206

    def getheaders(self) -> list[tuple[str, str]]:
        """The header fields."""
        last = self.first + self.length - 1
        return [
            ("Content-Length", str(self.length)),
            ("Content-Range", f"bytes {self.first}-{last}/{self.size}"),
            ("ETag", '"0123456789abcdef"'),
            ("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT"),
        ]


class Link(Proxy):
    """Simulated network link of a node to the store: a latency, and a rate that all connections share."""

    def __init__(self, files: dict[str, Path]) -> None:
        super().__init__()
        self.files = files
        self.lock = threading.Lock()
        self.free_at = 0.0
        self.sent = 0  # bytes
        self.pace = self.send
        self.fault = self.wait

    def handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        """Return a request handler class that serves ranges of known objects like S3."""
        files = self.files

        class Handler(super().handler()):  # type: ignore[misc]
            def pass_on(self, body: bytes) -> Any:
                path = files.get(self.path.removeprefix("/images/"))
                if path is None or self.command != "GET":
                    return super().pass_on(body)
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                with open(path, "rb") as file:
                    file.seek(first)
                    content = file.read(last + 1 - first)
                return RangeAnswer(first, len(content), path.stat().st_size), content

        return Handler

    def wait(self, path: str) -> None:
        """Sleep for the latency before responding to a read."""
        time.sleep(LATENCY_S)

    def send(self, piece_bytes: int) -> None:
        """Wait until the link has transferred `piece_bytes` more bytes."""
        with self.lock:
            self.sent += piece_bytes
            self.free_at = max(self.free_at, time.monotonic()) + piece_bytes / RATE
            wait_s = self.free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))

    def begin(self) -> None:
        """Reset the counters."""
        self.sent = 0
        self.gets.clear()


@dataclass(frozen=True)
class Moment:
    """Time and traffic until a batch was available."""

    seconds: float
    sent_mb: float
    requests: int
    pixels: int  # the sum of all so far: the same whichever way they came


def pictures() -> list[bytes]:
    """Return JPEGs of about 10 kB."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(8):
        coarse = rng.integers(0, 256, (24, 32, 3), np.uint8)
        image = cv2.resize(coarse, (256, 192)) // 2 + rng.integers(0, 20, (192, 256, 3), np.uint8)
        images.append(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 75])[1].tobytes())
    return images


def fill(cache: Path, local: Index) -> None:
    """Copy every shard into a cache."""
    cache.mkdir(parents=True)
    for number, shard in enumerate(local.shards):
        os.link(local.location(number), cache / f"{shard.sha256}.tar")


def measure(link: Link, index: Path, folder: Path, way: str) -> list[Moment]:
    """Start a loader with the cache `folder/cache`; return time and traffic until its first and its tenth batch."""
    link.begin()
    words = [sys.executable, "-P", "-c", LOADER, str(index), str(folder / "cache"), way, str(BATCH), str(BATCHES)]
    tree = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PATCHLINE_CACHE": str(folder / "state")}
    moments = []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):
            seconds, pixels = process.stdout.readline().split()
            moments.append(Moment(float(seconds), link.sent / 1e6, len(link.gets), int(pixels)))
            process.stdin.write("\n")
            process.stdin.flush()
        process.kill()
    return moments


def main(words: list[str]) -> None:
    """Measure the three variants in turn, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(words).rounds
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = pictures()
        samples = (Sample(f"{n:06d}", images[n % 8], (0,), "jpg") for n in range(SHARDS * SAMPLES))
        local = pack(samples, folder / "set", shard_samples=SAMPLES)
        files = {f"set/{shard.name}": Path(local.location(number)) for number, shard in enumerate(local.shards)}
        measured: dict[str, list[list[Moment]]] = {way: [] for way in WAYS}
        link = Link(files)
        with store("s3", files, link):
            build_index(local.directory, output=folder / "index", name="train", at="s3://images/set")
            for turn in range(rounds):
                for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                    place = folder / f"{turn}-{way}"
                    if way == "all here":
                        fill(place / "cache", local)
                    measured[way].append(measure(link, folder / "index", place, way))
                    shutil.rmtree(place, ignore_errors=True)  # a decoding process may still be writing there
    total_mb = sum(shard.bytes for shard in local.shards) / 1e6
    print(f"{SHARDS} shards, {total_mb:.0f} MB, batch {BATCH}; {RATE / 1e6:.0f} MB/s, {1000 * LATENCY_S:.0f} ms")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}, {rounds} rounds")
    print_table(measured)


def print_table(measured: dict[str, list[list[Moment]]]) -> None:
    """Print medians, and the medians of the per-round ratios."""
    print("| until | | s, median (min … max) | MB sent | requests | time ÷ ranges' | bytes ÷ ranges' |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for number, what in enumerate(("the first batch", f"the first {BATCHES} batches")):
        base = [moments[number] for moments in measured["ranges"]]
        for way, rows in measured.items():
            moments = [row[number] for row in rows]
            assert {moment.pixels for moment in moments} == {base[0].pixels}, "the same pixels, whichever way they came"
            seconds = [moment.seconds for moment in moments]
            pairs = list(zip(moments, base, strict=True))
            time_ratio = statistics.median(mine.seconds / theirs.seconds for mine, theirs in pairs)
            bytes_ratio = statistics.median(mine.sent_mb / theirs.sent_mb for mine, theirs in pairs)
            sent_mb = statistics.median(moment.sent_mb for moment in moments)
            requests = statistics.median(moment.requests for moment in moments)
            print(
                f"| {what} | {way} | {statistics.median(seconds):.2f} ({min(seconds):.2f} … {max(seconds):.2f}) "
                f"| {sent_mb:.0f} | {requests:.0f} | {time_ratio:.2f} | {bytes_ratio:.2f} |"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
