"""Search training shards for images of test sets: index the test images, then stream the training images once.

`find_leaks` works in this order:
1. `write_signatures` computes the signatures of all test images, one file per shard, and merges them into arrays that
   all processes map;
2. `similar_pairs_among` measures how often different test images look similar. If this is frequent, similar pictures do
   not prove a leak, and the search stops with an error;
3. worker processes take one training shard after another. `search_shard` reads each sample once, and reports a pair
   a. if its bytes equal those of a test image: exact;
   b. if it is a candidate and its picture fits the test image (data.extras.leaks.matching): perceptual;
   c. if the decoded pixels of a fitting pair are equal: exact. Flat images are compared only by bytes and pixels;
4. each finished shard becomes one line of the journal, so that an interrupted search can resume;
5. the pairs are written to leaks.json, and the signatures are deleted.

A process holds one batch of training images and one block of test images in memory, independent of the set sizes.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from data.errors import DataError, StorageError
from data.extras.leaks.document import Compared, Kind, Leaks, Pair, write_leaks
from data.extras.leaks.matching import ALIKE, TestSignatures, candidates, likeness
from data.extras.leaks.signature import BOXES, COEFFICIENTS, PICTURE, Signature, pixel_digest, signature
from data.extras.shards.parallel import Progress, in_parallel
from data.files import atomic_file, path_in_errors
from data.images.decode import BadImage
from data.index.index import Index
from data.index.shard import Shard
from data.reader import ShardReader, check_sizes
from data.remote.config import CacheConfig
from data.seal import Journal, read_entry, write_entry

# T: test images of all sets, K: crops per image, D: coefficients per crop

VERSION = 2  # version of the signatures and their comparison; an interrupted search of another version restarts
FITS = 0.88  # minimum likeness of a perceptual pair; at 1, only bytes and pixels are compared
NEARLY_THE_SAME = 0.98  # minimum likeness to also compare decoded pixels, which a lossless re-encoding preserves
MAX_SIMILAR_SHARE = 0.01  # largest accepted share of candidates among pairs of test images; photographs have 0.0002
MIN_SIMILAR = 10  # with fewer candidates, the share is not significant
SAMPLED = 256  # test images compared with each other to measure the share
BATCH = 64  # training images compared at once
JOURNAL = "leaks.partial"
DOCUMENT = "leaks.json"


class Match(NamedTuple):
    """A training sample and a test sample with the same image."""

    row: int  # row of the training sample in its shard
    test: int  # number among all test images
    kind: Kind
    distance: float


class ShardMatches(NamedTuple):
    """Result for one training shard."""

    matches: list[Match]
    samples: int
    bad: int  # number of undecodable samples
    flat: int  # samples without structure, compared only by bytes and pixels


def key_of(shard: Shard) -> str:
    """Return the journal key of a training shard: the digests of its tar and of its table of samples."""
    return f"{shard.sha256}-{shard.table}"


def matches_of(record: Sequence[Any]) -> ShardMatches:
    """Convert a journal record to the result of its training shard."""
    matches, *counts = record
    return ShardMatches([Match(*match) for match in matches], *counts)


class Embeddings(NamedTuple):
    """Pairs with similar features (pipeline.extras.leak_embedding), grouped by the `key_of` of the training shard."""

    records: Mapping[str, ShardMatches]
    settings: Mapping[str, Any]


def find_leaks(
    train: Mapping[str, Index],
    test: Mapping[str, Index],
    output: Path,
    *,
    fits: float = FITS,
    embeddings: Embeddings | None = None,
    workers: int = 1,
    cache: CacheConfig | None = None,
    report: Progress | None = None,
    report_test: Progress | None = None,
) -> Leaks:
    """Find the pairs of training and test samples with the same image, and write them to `output`/leaks.json.

    `train` and `test` map the paths of data sets to their indexes. `embeddings` adds pairs found by model features.
    `fits` is the minimum similarity of two thumbnails for a match; with 1, only bytes and pixels are compared. `report`
    is called with the number of finished training shards and the number to search; `report_test` is called in the same
    way for the test shards, which come first. An interrupted search resumes.

    Raises DataError if a shard is missing or has changed since indexing, or if the test images are too similar to each
    other for copies to be recognised by visual similarity.
    """
    for path, index in (*train.items(), *test.items()):
        if index.samples == 0:
            raise DataError(f"{path}: the data set is empty\n  pack or index it again")
    check_sizes([*train.values(), *test.values()])
    cache = cache or CacheConfig()
    output.mkdir(parents=True, exist_ok=True)
    digests = [index.digest for index in test.values()]
    setting = [VERSION, fits, digests]
    settings: dict[str, Any] = {"version": VERSION, "alike": ALIKE, "fits": fits}
    if embeddings is not None:
        settings["embedding"] = dict(embeddings.settings)
    signatures = output / f"signatures-{sha256(json.dumps([VERSION, digests]).encode()).hexdigest()[:12]}"
    write_signatures(test.values(), signatures, workers, cache, report_test)

    # Measure on these test sets whether the search can distinguish copies from other images.
    if fits < 1:
        alike, compared = similar_pairs_among(open_signatures(signatures).signatures)
        settings["test_pairs"] = {"alike": alike, "compared": compared}
        share = alike / max(compared, 1)
        if alike >= MIN_SIMILAR and share > MAX_SIMILAR_SHARE:
            raise DataError(
                f"{', '.join(test)}: {alike:,} of {compared:,} pairs of different test images have similar low "
                f"frequencies ({share:.1%}), so copies cannot be recognised by the look of the images\n"
                f"  expected at most {MAX_SIMILAR_SHARE:.0%} of the pairs; in photographs, it is 0.02 %\n"
                f"  to compare only bytes and pixels, add --fits 1 to the command"
            )

    jobs = {}  # `key_of` a training shard → its search
    for index in train.values():
        for number, shard in enumerate(index.shards):
            jobs[key_of(shard)] = partial(search_shard, index.single_shard(number), signatures, fits, cache)
    with Journal(output / JOURNAL, setting) as journal:
        # Skip training shards in the journal of an earlier, interrupted search.
        missing = [key for key in jobs if key not in journal.records]
        with in_parallel(list(map(jobs.__getitem__, missing)), workers, report) as results:
            for key, shard_matches in zip(missing, results, strict=True):
                journal.add(key, shard_matches)
        # Use only these shards: the journal may also contain shards of other training sets, from an interrupted search.
        records = {key: matches_of(journal.records[key]) for key in jobs}

    # Add the pairs that only the features have found.
    if embeddings is not None:
        for key, pixels in records.items():
            matches = {}
            for match in (*embeddings.records[key].matches, *pixels.matches):
                matches[match.row, match.test] = match  # a match by pixels replaces one by features
            records[key] = pixels._replace(matches=sorted(matches.values()))
    bad = int(np.load(signatures / "bad.npy").sum())  # number of undecodable test images
    leaks = document(train, test, records, bad, settings)
    write_leaks(output / DOCUMENT, leaks)
    (output / JOURNAL).unlink()
    shutil.rmtree(signatures)
    return leaks


# ---------------------------------------------------------------------------------------------- test images


def write_signatures(
    sets: Iterable[Index], folder: Path, workers: int, cache: CacheConfig, report: Progress | None = None
) -> None:
    """Write the signatures of all test images to a folder; reuse existing files from an interrupted search.

    Raises OSError if the disk is full.
    """
    folder.mkdir(exist_ok=True)
    paths = []  # signature files, one per shard
    missing = []
    total = 0  # number of samples in all sets
    for index in sets:
        total += index.samples
        for number, shard in enumerate(index.shards):
            path = folder / f"{VERSION}-{shard.sha256[:32]}-{shard.table[:32]}.signatures"
            paths.append(path)
            if read_entry(path) is None:
                missing.append(partial(sign_shard, index.single_shard(number), path, cache))
    with in_parallel(missing, workers, report) as results:
        for _ in results:
            pass

    shapes = {
        "crops": ((total, BOXES, COEFFICIENTS), np.float16),
        "pictures": ((total, PICTURE, PICTURE), np.uint8),
        "proportions": ((total,), np.float32),
        "digests": ((total, 2, 32), np.uint8),
        "bad": ((total,), np.bool_),
    }
    # Use ordinary writes: on a full disk they raise an error, but a write to a mapped file would kill the process.
    # Readers map the files, so that all processes share one copy, which may be larger than memory.
    with ExitStack() as around:
        files = {}
        for name, (shape, kind) in shapes.items():
            temporary = around.enter_context(atomic_file(folder / f"{name}.npy"))
            files[name] = around.enter_context(open(temporary, "wb"))
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(files[name], header)
        # Read and verify each signature file once for all five arrays.
        for path in paths:
            entry = read_entry(path)
            if entry is None:
                raise StorageError(f"{path}: content differs from what was just written; check the disk")
            with np.load(io.BytesIO(entry)) as part:
                for name, file in files.items():
                    with path_in_errors(folder / f"{name}.npy"):
                        file.write(part[name].tobytes())


def sign_shard(shard: Index, path: Path, cache: CacheConfig) -> None:
    """Write the signatures of one test shard; undecodable samples get empty signatures."""
    reader = ShardReader(shard, cache=cache)
    count = shard.samples
    crops = np.zeros((count, BOXES, COEFFICIENTS), np.float16)
    pictures = np.zeros((count, PICTURE, PICTURE), np.uint8)
    proportions = np.ones(count, np.float32)
    digests = np.zeros((count, 2, 32), np.uint8)
    bad = np.zeros(count, bool)
    with threadpool_limits(1):
        for row in range(count):
            _, image, _ = reader.read(0, row)
            digests[row, 0] = np.frombuffer(sha256(image).digest(), np.uint8)
            try:
                sign = signature(image)
                digests[row, 1] = np.frombuffer(pixel_digest(image), np.uint8)
            except BadImage:
                bad[row] = True
                continue
            pictures[row] = sign.picture
            proportions[row] = sign.proportion
            # A flat image would be similar to any other: leave its crops empty and compare only its pixels.
            if not sign.is_flat:
                crops[row] = sign.crops
    arrays = io.BytesIO()
    np.savez(arrays, crops=crops, pictures=pictures, proportions=proportions, digests=digests, bad=bad)
    write_entry(path, arrays.getvalue())


class TestImages(NamedTuple):
    """Signatures and digests of the test images, opened once per process."""

    signatures: TestSignatures
    by_bytes: dict[bytes, list[int]]  # sha256 of the encoded image → numbers of test images
    by_pixels: dict[bytes, list[int]]  # `pixel_digest` → numbers of test images


@lru_cache(maxsize=1)
def open_signatures(folder: Path) -> TestImages:
    """Map the signature arrays of a folder, and build the tables of digests."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in TestSignatures._fields}
    digests = np.load(folder / "digests.npy", mmap_mode="r")
    bad = np.load(folder / "bad.npy")
    by_bytes: dict[bytes, list[int]] = {}
    by_pixels: dict[bytes, list[int]] = {}
    for number in range(len(digests)):
        by_bytes.setdefault(digests[number, 0].tobytes(), []).append(number)
        if not bad[number]:
            by_pixels.setdefault(digests[number, 1].tobytes(), []).append(number)
    return TestImages(TestSignatures(**arrays), by_bytes, by_pixels)


def similar_pairs_among(tests: TestSignatures) -> tuple[int, int]:
    """Return the number of candidates among all pairs of SAMPLED randomly chosen test images, and that of all pairs."""
    has_structure = np.flatnonzero(tests.crops[:, 0].any(axis=1))
    # Draw at random and not at equal distances: in a periodic set, equal distances would select similar images.
    drawn = np.sort(np.random.default_rng(0).permutation(has_structure)[:SAMPLED])
    sample = TestSignatures(*(array[drawn] for array in tests))
    count = len(drawn)
    alike = set()
    for start in range(0, count, BATCH):
        for candidate in candidates(sample.crops[start : start + BATCH], sample):
            first = start + candidate.train
            if first != candidate.test:
                alike.add((min(first, candidate.test), max(first, candidate.test)))
    return len(alike), count * (count - 1) // 2


# ------------------------------------------------------------------------------------------ training images


class PendingImage(NamedTuple):
    """A training image in an incomplete batch."""

    row: int
    image: bytes
    signature: Signature


def search_shard(shard: Index, signatures: Path, fits: float, cache: CacheConfig) -> ShardMatches:
    """Find the test images that occur in one training shard."""
    test_images = open_signatures(signatures)
    reader = ShardReader(shard, cache=cache)
    matches: dict[tuple[int, int], Match] = {}  # (row, test image) → match
    bad = 0
    flat = 0
    batch: list[PendingImage] = []
    # There is one process per core, so use one thread in each.
    with threadpool_limits(1):
        for row in range(shard.samples):
            _, image, _ = reader.read(0, row)
            for number in test_images.by_bytes.get(sha256(image).digest(), []):
                matches[row, number] = Match(row, number, "exact", 0.0)
            try:
                sign = signature(image)
                flat += sign.is_flat
                if sign.is_flat or fits >= 1:
                    for number in test_images.by_pixels.get(pixel_digest(image), []):
                        matches[row, number] = Match(row, number, "exact", 0.0)
                else:
                    batch.append(PendingImage(row, image, sign))
            except BadImage:
                bad += 1
            if len(batch) == BATCH:
                add_fitting(batch, test_images, fits, matches)
                batch = []
        if batch:
            add_fitting(batch, test_images, fits, matches)
    return ShardMatches(sorted(matches.values()), shard.samples, bad, flat)


def add_fitting(
    batch: Sequence[PendingImage], test_images: TestImages, fits: float, matches: dict[tuple[int, int], Match]
) -> None:
    """Add the perceptual pairs of a batch of training images to `matches`, without replacing known pairs."""
    best: dict[tuple[int, int], float] = {}  # number in the batch, test image → likeness
    crops = np.stack([pending.signature.crops for pending in batch])
    for candidate in candidates(crops, test_images.signatures):
        pair = (candidate.train, candidate.test)
        pending = batch[candidate.train]
        # A pair may be a candidate with several crops; one good fit is enough.
        is_settled = best.get(pair, -1.0) >= NEARLY_THE_SAME or (pending.row, candidate.test) in matches
        if not is_settled:
            value = likeness(candidate, pending.signature, test_images.signatures)
            best[pair] = max(value, best.get(pair, -1.0))
    for (number, test), value in best.items():
        if value >= fits:
            pending = batch[number]
            is_same = value >= NEARLY_THE_SAME and test in test_images.by_pixels.get(pixel_digest(pending.image), [])
            match = Match(pending.row, test, "perceptual", round(1 - value, 4))
            if is_same:
                match = Match(pending.row, test, "exact", 0.0)
            matches[pending.row, test] = match


# ------------------------------------------------------------------------------------------------ document


def document(
    train: Mapping[str, Index],
    test: Mapping[str, Index],
    records: Mapping[str, ShardMatches],
    bad: int,
    settings: Mapping[str, Any],
) -> Leaks:
    """Build the contents of leaks.json, in which each sample is identified by its shard and key."""
    wanted: set[int] = set()
    for record in records.values():
        for match in record.matches:
            wanted.add(match.test)
    test_samples: dict[int, tuple[int, tuple[str, str]]] = {}  # number → (number of the set, (shard, key))
    start = 0
    for set_number, index in enumerate(test.values()):
        for number, shard in enumerate(index.shards):
            matched = wanted.intersection(range(start, start + shard.samples))
            # Most shards have no match: do not read their tables.
            if matched:
                keys = index.keys(number)
                for test_number in matched:
                    test_samples[test_number] = (set_number, (shard.name, str(keys[test_number - start])))
            start += shard.samples

    pairs = []
    counts = {"train": 0, "train_undecodable": 0, "train_flat": 0}
    for train_set, index in enumerate(train.values()):
        for number, shard in enumerate(index.shards):
            record = records[key_of(shard)]
            counts["train"] += record.samples
            counts["train_undecodable"] += record.bad
            counts["train_flat"] += record.flat
            # Most shards have no match: do not read their tables.
            if not record.matches:
                continue
            keys = index.keys(number)
            for row, test_number, kind, distance in record.matches:
                test_set, sample = test_samples[test_number]
                pairs.append(Pair((shard.name, str(keys[row])), sample, kind, distance, train_set, test_set))
    counts["test"] = start
    counts["test_undecodable"] = bad
    return Leaks(
        tuple(Compared(path, index.digest) for path, index in train.items()),
        tuple(Compared(path, index.digest) for path, index in test.items()),
        tuple(pairs),
        settings,
        counts,
    )
