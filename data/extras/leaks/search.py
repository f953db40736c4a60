"""Search training shards for images of test sets: what the test sets are recognised by is kept, training streams past.

How the pairs are found, in order (`find_leaks`):
1. `write_signatures` writes the signatures of all test images into a folder, an entry a shard, and maps them as arrays;
2. `alike_among` looks how often test images are alike that show different things: where they often are, pictures prove
   nothing, and the search is refused;
3. processes take one training shard after the other; `search_shard` reads each sample once, and asks of it
   a. whether its bytes are those of a test image: exact;
   b. whether it is a candidate, and its picture fits the test image's (data.extras.leaks.matching): perceptual;
   c. of a pair that fits, whether the decoded pixels are the same: exact too. So are pictures asked that are flat;
4. the journal gets one line a shard, so that a killed search goes on;
5. the pairs become leaks.json, and the signatures are deleted.

A process holds one batch of training images and one block of test images, whatever the sizes of the sets.
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
from data.files import atomic_file, path_in_errors
from data.images.decode import BadImage
from data.index.index import Index
from data.index.shard import Shard
from data.remote.config import CacheConfig
from data.seal import Journal, read_entry, write_entry
from data.shards.parallel import Progress, in_parallel
from data.shards.reader import ShardReader, check_sizes

# T test images of all sets, K crops of each, D coefficients of a crop

VERSION = 2  # of what signatures are and how they are compared; another one begins anew
FITS = 0.88  # likeness from which on a pair shows the same; at 1 bytes and pixels alone are compared
NEARLY_THE_SAME = 0.98  # likeness from which on the decoded pixels are compared: another encoder's may be the same
MOST_ALIKE = 0.01  # share of pairs of test images that may be candidates; of photographs 0.0002 are
FEWEST_ALIKE = 10  # candidates from which on such a share means something
SAMPLED = 256  # test images that are compared with each other for it
BATCH = 64  # training images that are compared at once
JOURNAL = "leaks.partial"
DOCUMENT = "leaks.json"


class Match(NamedTuple):
    """A training sample and a test image that show the same."""

    row: int  # of the training shard
    test: int  # number among all test images
    kind: Kind
    distance: float


class ShardMatches(NamedTuple):
    """What was found in a training shard."""

    matches: list[Match]
    samples: int
    bad: int  # that cannot be decoded
    flat: int  # that have nothing to be recognised by but their pixels


def key_of(shard: Shard) -> str:
    """Return what stands for a training shard: its tar, and the table of the samples of it that are looked at."""
    return f"{shard.sha256}-{shard.table}"


def matches_of(record: Sequence[Any]) -> ShardMatches:
    """Return what the journal holds of a training shard."""
    matches, *counts = record
    return ShardMatches([Match(*match) for match in matches], *counts)


class Embeddings(NamedTuple):
    """The pairs whose features are alike (pipeline.extras.leak_embedding), for each training shard by `key_of`."""

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
    """Find the pairs of training and test samples that show the same, and write them as `output`/leaks.json.

    Sets stand under the path that they are called by; `embeddings` are what features have found (see there). Safe to
    kill and run again. With `fits` 1, bytes and pixels alone are compared. `report` is told how many training shards
    are done, of how many that were left; `report_test` the same of test shards, which come first. Raises DataError
    where a shard is missing or not what was indexed, and where the test images are too much alike for pictures to tell
    copies from others.
    """
    for path, index in (*train.items(), *test.items()):
        if index.samples == 0:
            raise DataError(f"{path}: holds no samples\n  expected sets that can be compared: pack or index it again")
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

    # Whether the search can tell copies from other images is measured on these very sets.
    if fits < 1:
        alike, compared = alike_among(open_signatures(signatures).signatures)
        settings["test_pairs"] = {"alike": alike, "compared": compared}
        share = alike / max(compared, 1)
        if alike >= FEWEST_ALIKE and share > MOST_ALIKE:
            raise DataError(
                f"{', '.join(test)}: {alike:,} of {compared:,} pairs of different test images are "
                f"alike at first sight ({share:.1%}): of such images pictures do not tell copies from others\n"
                f"  expected {MOST_ALIKE:.0%} at most, photographs have 0.02 %\n"
                f"  compare bytes and pixels alone: the same command with --fits 1"
            )

    jobs = {}  # by the training shard that is searched
    for index in train.values():
        for number, shard in enumerate(index.shards):
            jobs[key_of(shard)] = partial(search_shard, index.single_shard(number), signatures, fits, cache)
    with Journal(output / JOURNAL, setting) as journal:
        # The training shards that an earlier, killed search has not finished; a line of the journal for each.
        missing = [key for key in jobs if key not in journal.records]
        with in_parallel(list(map(jobs.__getitem__, missing)), workers, report) as results:
            for key, shard_matches in zip(missing, results, strict=True):
                journal.add(key, shard_matches)
        # Only these: an earlier search of other training sets, killed here, may have left records of more shards.
        records = {key: matches_of(journal.records[key]) for key in jobs}

    # The pairs that only features have found are added.
    if embeddings is not None:
        for key, pixels in records.items():
            matches = {}
            for match in (*embeddings.records[key].matches, *pixels.matches):
                matches[match.row, match.test] = match  # that of the pixels takes the other's place
            records[key] = pixels._replace(matches=sorted(matches.values()))
    bad = int(np.load(signatures / "bad.npy").sum())  # test images that cannot be decoded
    leaks = document(train, test, records, bad, settings)
    write_leaks(output / DOCUMENT, leaks)
    (output / JOURNAL).unlink()
    shutil.rmtree(signatures)
    return leaks


# ---------------------------------------------------------------------------------------------- test images


def write_signatures(
    sets: Iterable[Index], folder: Path, workers: int, cache: CacheConfig, report: Progress | None = None
) -> None:
    """Write the signatures of all test images into a folder; those of an earlier, killed search are kept.

    Raises OSError where the disk is full.
    """
    folder.mkdir(exist_ok=True)
    paths = []  # of the entries, one a shard
    missing = []
    total = 0  # samples of all sets
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
    # Written, not mapped: a full disk is then an error of this command, and not the end of its process. They are mapped
    # to be read, so that all processes share one copy, which need not fit the memory.
    with ExitStack() as around:
        files = {}
        for name, (shape, kind) in shapes.items():
            temporary = around.enter_context(atomic_file(folder / f"{name}.npy"))
            files[name] = around.enter_context(open(temporary, "wb"))
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(files[name], header)
        # Each entry is read, and its digest compared, once for all five.
        for path in paths:
            entry = read_entry(path)
            if entry is None:
                raise StorageError(f"{path}: is not what was written a moment ago: see to the disk")
            with np.load(io.BytesIO(entry)) as part:
                for name, file in files.items():
                    with path_in_errors(folder / f"{name}.npy"):
                        file.write(part[name].tobytes())


def sign_shard(shard: Index, path: Path, cache: CacheConfig) -> None:
    """Write the signatures of the samples of an index of one test shard; undecodable ones have empty signatures."""
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
            # What has no structure is like anything else: its pixels alone are compared.
            if not sign.is_flat:
                crops[row] = sign.crops
    arrays = io.BytesIO()
    np.savez(arrays, crops=crops, pictures=pictures, proportions=proportions, digests=digests, bad=bad)
    write_entry(path, arrays.getvalue())


class TestImages(NamedTuple):
    """What is known of the test images, in one process."""

    signatures: TestSignatures
    by_bytes: dict[bytes, list[int]]  # sha256 of the encoded image → numbers
    by_pixels: dict[bytes, list[int]]


@lru_cache(maxsize=1)
def open_signatures(folder: Path) -> TestImages:
    """Map the signatures of a folder."""
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


def alike_among(tests: TestSignatures) -> tuple[int, int]:
    """Return how many pairs of different test images are candidates, and of how many: among SAMPLED drawn of them."""
    has_structure = np.flatnonzero(tests.crops[:, 0].any(axis=1))
    # Drawn, not at equal distances: sets that repeat themselves every so many images would be taken for copies.
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
    """A training image that waits for its batch."""

    row: int
    image: bytes
    signature: Signature


def search_shard(shard: Index, signatures: Path, fits: float, cache: CacheConfig) -> ShardMatches:
    """Find the test images that an index of one training shard holds."""
    test_images = open_signatures(signatures)
    reader = ShardReader(shard, cache=cache)
    matches: dict[tuple[int, int], Match] = {}  # by row and test image
    bad = 0
    flat = 0
    batch: list[PendingImage] = []
    # As many processes as cores: each is to use one.
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
    """Add the pairs of a batch of training images that fit; those that are known already stay as they are."""
    best: dict[tuple[int, int], float] = {}  # number in the batch, test image → likeness
    crops = np.stack([pending.signature.crops for pending in batch])
    for candidate in candidates(crops, test_images.signatures):
        pair = (candidate.train, candidate.test)
        pending = batch[candidate.train]
        # A pair may be a candidate in several ways; one that fits is enough.
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
    """Return what was found, with samples by shard and key."""
    wanted: set[int] = set()
    for record in records.values():
        for match in record.matches:
            wanted.add(match.test)
    test_samples: dict[int, tuple[int, tuple[str, str]]] = {}  # number → its set's number, (shard, key)
    start = 0
    for set_number, index in enumerate(test.values()):
        for number, shard in enumerate(index.shards):
            matched = wanted.intersection(range(start, start + shard.samples))
            # As in most shards, there is nothing: its table need not be opened.
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
            # As in most shards, there is nothing: its table need not be opened.
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
