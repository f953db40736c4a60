"""How long, and how many bytes, until the first batch, where the shards lie in an object store and none is here.

    python -m benchmarks.cold_start               # before (whole shards) and after (ranges), in turn

The store is moto, which speaks S3's protocol, behind a proxy that answers after `LATENCY_S` and gives all connections
together `RATE` bytes a second. The set is `SHARDS` shards of 24 MB, of JPEGs of about 100 kB; the first batch has a few
samples of each. Each measurement is a process of its own with an empty cache; "before" is the code of commit 3e7c59f.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cv2
import numpy as np

from data.shards.indexing import build_index
from data.shards.packing import pack
from data.shards.sources import Sample
from tests.stores import Proxy, store

BEFORE = "3e7c59f"  # the last commit at which whole shards were waited for
SHARDS = 16
SAMPLES = 240  # of a shard
BATCH = 128
LATENCY_S = 0.03
RATE = 25e6  # bytes a second
CHUNK = 1 << 16  # bytes that a connection sends in its turn
ROUNDS = 3

FIRST_BATCH = """
import sys, time
from data.loader import TrainLoader
from data.order import Order
from data.shards.cache import CacheConfig
from data.shards.index import load_index
import s3fs
index = load_index(sys.argv[1])
order = Order(index.shard_samples, seed=0, batch_size=int(sys.argv[3]))
loader = TrainLoader(index, order, image_size=224, slots=range(order.batch_size), micro_batch=order.batch_size // 2,
                     processes=2, cache=CacheConfig(sys.argv[2]))
began = time.monotonic()
batches = iter(loader)
first, second = next(batches), next(batches)
print(time.monotonic() - began, int(first.images.sum()) + int(second.images.sum()), flush=True)
sys.stdin.read()
"""


class Link(Proxy):
    """A proxy with a latency and a rate, which all connections share."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = self.wait
        self.turn = threading.Lock()
        self.sent = 0  # bytes

    def wait(self, path: str) -> None:
        """Let the latency pass before a read is answered."""
        time.sleep(LATENCY_S)

    def handler(self):
        """The class whose objects answer one request each."""
        link = self

        class Handler(super().handler()):
            def answer(self, answered, is_short=False):
                answer, content = answered
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(content), CHUNK):
                    piece = content[start : start + CHUNK]
                    if self.command == "GET":
                        with link.turn:
                            time.sleep(len(piece) / RATE)
                            link.sent += len(piece)
                    self.wfile.write(piece)

        return Handler


def pictures() -> list[bytes]:
    """JPEGs of about 100 kB."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(8):
        coarse = rng.integers(0, 256, (60, 80, 3), np.uint8)
        image = cv2.resize(coarse, (640, 480)) // 2 + rng.integers(0, 70, (480, 640, 3), np.uint8)
        images.append(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 75])[1].tobytes())
    return images


def measure(link: Link, tree: Path, index: Path, folder: Path) -> tuple[float, float, int, int]:
    """(seconds to the first batch, MB sent until then, requests, the sum of its pixels) for one tree of code."""
    link.gets.clear()
    link.sent = 0
    words = [sys.executable, "-P", "-c", FIRST_BATCH, str(index), str(folder), str(BATCH)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PATCHLINE_CACHE": str(folder / "state")}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        seconds, pixels = process.stdout.readline().split()
        sent_mb, requests = link.sent / 1e6, len(link.gets)
        process.kill()
    return float(seconds), sent_mb, requests, int(pixels)


def main() -> None:
    """Measure both trees in turn, and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"whole shards (before)": folder / "before", "ranges": Path(__file__).parents[1]}
        (folder / "before").mkdir()
        archive = subprocess.run(["git", "archive", BEFORE, "data"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], check=True, input=archive)
        images = pictures()
        samples = (Sample(f"{n:06d}", images[n % 8], (0,), "jpg") for n in range(SHARDS * SAMPLES))
        local = pack(samples, folder / "set", shard_samples=SAMPLES)
        files = {f"set/{shard.name}": Path(local.location(number)) for number, shard in enumerate(local.shards)}
        link = Link()
        with store("s3", files, link):
            build_index(local.directory, output=folder / "index", name="train", at="s3://images/set")
            measured = {name: [] for name in trees}
            for turn in range(ROUNDS):
                for name in sorted(trees, reverse=turn % 2 == 0):
                    cache = folder / f"cache-{turn}-{name[:6]}"
                    measured[name].append(measure(link, trees[name], folder / "index", cache))
                    shutil.rmtree(cache, ignore_errors=True)  # a decoding process may be ending in there
    total_mb = sum(shard.bytes for shard in local.shards) / 1e6
    print(f"{SHARDS} shards, {total_mb:.0f} MB, batch {BATCH}; {RATE / 1e6:.0f} MB/s, {1000 * LATENCY_S:.0f} ms")
    print("| | s to the first batch, median (min) | MB sent until then | requests |\n|---|--:|--:|--:|")
    for name, rows in measured.items():
        seconds, sent_mb, requests, pixels = zip(*rows, strict=True)
        assert set(pixels) == {measured["ranges"][0][3]}, "the same pixels, whichever way they came"
        print(
            f"| {name} | {statistics.median(seconds):.1f} ({min(seconds):.1f}) | {statistics.median(sent_mb):.0f} "
            f"| {statistics.median(requests):.0f} |"
        )


if __name__ == "__main__":
    main()
