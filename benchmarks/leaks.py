"""Measure recall, false pairs and cost of the leak search on planted copies of photographs.

    python benchmarks/leaks.py --shards FOLDER [--draws 3] [--workers 2] [--cifar]

The photographs of FOLDER/imagenet1k-*.tar are the test set. Copies of all photographs, transformed in many ways, are
packed as the training set; any pair except a photograph and its own copy is false. False pairs of the same two
photographs count once, because their copies are not independent trials; neither are pairs with a common photograph.
Then the roles are swapped: the copies become the test set. With --cifar, the search also compares
FOLDER/cifar10-train-*.tar with cifar10-test-*.tar. These contain no copies except for the known duplicates of CIFAR, so
the printed pairs must be checked by eye.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from scipy.special import betaincinv

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.extras.leaks.document import Leaks
from data.extras.leaks.search import find_leaks
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.index.index import Index
from data.reader import ShardReader

Draw = Callable[[np.ndarray, np.random.Generator], bytes]


def jpeg(image: np.ndarray, quality: float = 85) -> bytes:
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])[1].tobytes()


def resized(image: np.ndarray, scale: float) -> np.ndarray:
    return cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)


def crop(image: np.ndarray, rng: np.random.Generator, least: float, most: float = 1.0) -> np.ndarray:
    """Return a random crop with the image's aspect ratio and a random share of its area."""
    height, width = image.shape[:2]
    side = np.sqrt(rng.uniform(least, most))
    y = rng.uniform(0, 1 - side)
    x = rng.uniform(0, 1 - side)
    return image[int(y * height) : int((y + side) * height), int(x * width) : int((x + side) * width)]


def middle(image: np.ndarray) -> np.ndarray:
    """Return the central crop of evaluation, 224 of 256 pixels."""
    height, width = image.shape[:2]
    scale = 256 / min(height, width)
    small = cv2.resize(image, (round(width * scale), round(height * scale)), interpolation=cv2.INTER_AREA)
    y = (small.shape[0] - 224) // 2
    x = (small.shape[1] - 224) // 2
    return small[y : y + 224, x : x + 224]


def several(image: np.ndarray, rng: np.random.Generator) -> bytes:
    """Return a random crop, possibly mirrored, with a smaller size, lower quality and slightly different brightness."""
    changed = crop(image, rng, 0.6)
    if rng.uniform() < 0.5:
        changed = changed[:, ::-1]
    changed = resized(changed, rng.uniform(0.5, 1))
    changed = np.clip(changed * rng.uniform(0.85, 1.15) + rng.uniform(-15, 15), 0, 255).astype(np.uint8)
    return jpeg(changed, rng.uniform(50, 90))


def bordered(image: np.ndarray, colour: int, y: int, x: int) -> np.ndarray:
    """Add borders of uniform colour: y pixels above and below, x pixels left and right."""
    return cv2.copyMakeBorder(image, y, y, x, x, cv2.BORDER_CONSTANT, value=(colour, colour, colour))


def to_square(image: np.ndarray, rng: np.random.Generator) -> bytes:
    height, width = image.shape[:2]
    side = max(height, width)
    return jpeg(bordered(image, int(rng.choice([0, 114, 255])), (side - height) // 2, (side - width) // 2))


def framed(image: np.ndarray, rng: np.random.Generator) -> bytes:
    height, width = image.shape[:2]
    return jpeg(bordered(image, int(rng.choice([0, 255])), height // 5, width // 5))


def cut(image: np.ndarray, rng: np.random.Generator, share: float) -> bytes:
    """Cut a share off one of the four sides, which changes the aspect ratio."""
    quarters = int(rng.integers(4))
    turned = np.rot90(image, quarters)
    kept = np.rot90(turned[int(share * len(turned)) :], -quarters)
    return jpeg(np.ascontiguousarray(kept))


def screenshot(image: np.ndarray, rng: np.random.Generator) -> bytes:
    """Show the image at 60 % of its size on a page, below a line of text."""
    page = bordered(resized(image, 0.6), 255, 60, 40)
    cv2.putText(page, "photograph - viewer", (8, 28), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (40, 40, 40), 1, cv2.LINE_AA)
    return jpeg(page)


WAYS: dict[str, Draw] = {
    "same pixels, PNG": lambda image, rng: cv2.imencode(".png", image)[1].tobytes(),
    "JPEG quality 50 … 90": lambda image, rng: jpeg(image, rng.uniform(50, 90)),
    "resized, 0.3 … 1.5": lambda image, rng: jpeg(resized(image, rng.uniform(0.3, 1.5))),
    "squashed to 224 × 224": lambda image, rng: jpeg(cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA)),
    "mirrored": lambda image, rng: jpeg(image[:, ::-1]),
    "crop of 60 … 100 % of the area": lambda image, rng: jpeg(crop(image, rng, 0.6)),
    "crop of 60 … 70 %": lambda image, rng: jpeg(crop(image, rng, 0.6, 0.7)),
    "crop of 50 … 60 %": lambda image, rng: jpeg(crop(image, rng, 0.5, 0.6)),
    "middle 224 of 256": lambda image, rng: jpeg(middle(image)),
    "crop ≥ 60 %, mirrored or not, smaller, quality 50 … 90, brighter or darker": several,
    "padded to a square": to_square,
    "border of 20 % at every side": framed,
    "screenshot at 60 %, with a line of text (not promised)": screenshot,
    "15 % cut off one side": lambda image, rng: cut(image, rng, 0.15),
    "30 % cut off one side (not promised)": lambda image, rng: cut(image, rng, 0.3),
    "grey": lambda image, rng: jpeg(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)),
}


def photographs(index: Index) -> list[np.ndarray]:
    """Return the decoded images of a set, upright."""
    reader = ShardReader(index)
    images = []
    for shard, samples in enumerate(index.shard_samples):
        for sample in range(samples):
            _, encoded, _ = reader.read(shard, sample)
            images.append(cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR))
    return images


def keys_of(index: Index) -> list[str]:
    return [row["key"].decode() for shard in range(len(index.shards)) for row in index.table(shard)]


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def searched(train: Index, test: Index, folder: Path, workers: int) -> tuple[Leaks, float, float]:
    """Run the search; return the pairs, CPU seconds and wall seconds."""
    began = time.perf_counter()
    cpu_before = cpu_s()
    leaks = find_leaks({"train": train}, {"test": test}, folder, workers=workers)
    return leaks, cpu_s() - cpu_before, time.perf_counter() - began


def bound_of(found: int, trials: int) -> float:
    """Return the one-sided 95 % upper bound on a rate (Clopper & Pearson 1934)."""
    return float(betaincinv(found + 1, trials - found, 0.95))


def bound_of_pairs(found: int, photographs: int) -> float:
    """Return the upper bound on the rate among all pairs of these photographs."""
    trials = photographs // 2
    pairs = photographs * (photographs - 1) // 2
    return bound_of(math.ceil(found * trials / pairs), trials)


def show(leaks: Leaks, originals: list[str], draws: int, side: str) -> None:
    """Print how many copies of each kind were paired with their original, and the false pairs.

    `side` is the side of the search on which the copies are.
    """
    hits = Counter()
    false = []
    false_pairs = []
    for pair in leaks.pairs:
        copy, original = (pair.train, pair.test) if side == "train" else (pair.test, pair.train)
        way, _, number = copy[1].split("-")
        if originals[int(number)] == original[1]:
            hits[int(way)] += 1
        else:
            false.append((pair.distance, list(WAYS)[int(way)], number, original[1]))
            false_pairs.append((originals[int(number)], original[1]))
    count = len(originals) * draws
    for way, name in enumerate(WAYS):
        print(f"| {name} | {side} | {hits[way]:,} of {count:,} | {hits[way] / count:.2%} |")
    # Copies of one photograph are not independent trials, nor are two pairs with a photograph in common: of n
    # photographs, n / 2 disjoint pairs are independent. The share over all pairs is their mean over all pairings, so
    # its bound is that of n / 2 trials (Hoeffding 1963, 5a).
    count = len(originals)
    unrelated = count * (count - 1) // 2
    distinct = {frozenset(pair) for pair in false_pairs}
    bound = bound_of_pairs(len(distinct), count)
    print(
        f"false: {len(distinct)} of {unrelated:,} distinct pairs of {count} photographs, which count as {count // 2} "
        f"independent trials: below {bound:.2g} at 95 %"
    )
    print(*false[:10], sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cifar", action="store_true")
    options = parser.parse_args()
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = sorted(map(str, options.shards.glob("imagenet1k-*.tar")))
        originals = build_index(paths, output=root / "originals", name="originals")
        images = photographs(originals)
        rng = np.random.default_rng(0)
        samples = []
        for draw in range(options.draws):
            for way, make in enumerate(WAYS.values()):
                for number, image in enumerate(images):
                    samples.append(Sample(f"{way:02d}-{draw}-{number}", make(image, rng), (0,)))
        copies = pack(samples, root / "copies", name="copies", shard_samples=1000)
        print(f"{originals.samples} photographs, {copies.samples} copies")
        for side, train, test in (("train", copies, originals), ("test", originals, copies)):
            leaks, cpu, wall = searched(train, test, root / side, options.workers)
            show(leaks, keys_of(originals), options.draws, side)
            print(f"{cpu:.1f} CPU s, {wall:.1f} s for {train.samples} training and {test.samples} test images")
        if options.cifar:
            train = build_index(sorted(map(str, options.shards.glob("cifar10-train*"))), output=root / "a", name="a")
            test = build_index(sorted(map(str, options.shards.glob("cifar10-test*"))), output=root / "b", name="b")
            leaks, cpu, wall = searched(train, test, root / "cifar", options.workers)
            print(
                f"CIFAR-10: {len(leaks.pairs)} pairs of {train.samples * test.samples:,}; {cpu:.1f} CPU s, {wall:.1f} s"
            )
            for pair in sorted(leaks.pairs, key=lambda pair: pair.distance):
                print(f"  {pair.train[1]} {pair.test[1]} {pair.kind} {pair.distance}")


if __name__ == "__main__":
    main()
