"""Create an index of selected samples of a data set, which refers to the same tars; nothing is repacked.

How subsets of a data set are created, in one pass for all of them (`make_subsets`):
1. Labels come from the tables, which contain a digest of each label: the digest of `17` identifies the text without
   reading the tar. Other texts, such as several labels, are read once per shard. If no rule needs labels, only those
   of chosen samples are determined.
2. Each rule selects samples. Its parts apply in order, each to the remaining samples:
   `keep` classes, `only` the samples in a list or all `but` these, a `part`, a number of `shots` per class.
3. Each shard with chosen samples gets a table of these rows; other shards are not in the subset.
4. The JSON refers to the same tars, and records the parent index and the rule (`index.Origin`).

    make_subsets(load_index("shards/train"), [Part(folder, Rule(shots=10, seed=0), "train-10shot")])
    →   folder/train-10shot.index.json     directory: ../train
        folder/train-000000.npy  …         the table rows of the chosen samples

Class ids, class names and the order of samples do not change. Subsets of one index with equal seeds are consistent:
`:98%` and `98%:` are disjoint and together complete; 5 shots are among the 10.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.checks import check_name
from data.draws import few_shot_rows, stratified
from data.errors import ConfigError, DataError
from data.extras.shards.parallel import Progress, in_parallel
from data.extras.sources.numbering import kept_ids
from data.index.document import SUFFIX, load_index, write_index
from data.index.index import Index, Origin
from data.index.names import Names, parse_labels
from data.index.shard import Shard, label_digest, table_path, write_table
from data.optional import load_optional
from data.reader import ShardReader, check_sizes
from data.remote.config import CacheConfig

# N: number of samples in the set

LISTED_ROWS = "data.extras.listed:listed_rows"
NO_LABEL = -1  # replaces a missing or unusable label
AT_ONCE = 1 << 22  # samples whose labels are processed at a time
BOUND = r"-?\d+|\d+(?:\.\d+)?%|"  # a bound of a part: a number of samples, a percentage, or nothing


@dataclass(frozen=True)
class Rule:
    """The rule that selects a subset's samples; at least one part must be set.

    Raises ConfigError for invalid combinations.
    """

    keep: Sequence[int | str] = ()  # classes, by id or by name: samples with at least one of them
    only: str | None = None  # path of a list of samples (data.extras.listed)
    but: str | None = None  # path of a list of samples to exclude, or of a leaks.json
    part: str | None = None  # first:stop, in samples or percent: ":98%"; with a seed, the same fraction of each class
    shots: int | None = None  # samples per class
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.part is not None:
            bounds_of(self.part, 1)
        check_seed(self.seed)
        if self.shots is not None and self.shots < 1:
            raise ConfigError(f"shots is {self.shots}, expected 1 or more")
        if self.shots is not None and self.seed is None:
            raise ConfigError("shots needs a seed, but no seed is set\n  set a seed, for example seed: 0 (--seed 0)")
        if self.seed is not None and self.shots is None and self.part is None:
            raise ConfigError(
                "a seed is set, but neither shots nor part, which use it\n  remove the seed, or add shots or part"
            )
        has_any = self.keep or self.only or self.but or self.part is not None or self.shots is not None
        if not has_any:
            raise ConfigError("the subset has no rule\n  expected one or more of keep, only, but, part, shots")

    @property
    def needs_labels(self) -> bool:
        """Whether the choice of samples depends on all samples' labels."""
        return bool(self.keep) or self.seed is not None

    def described(self) -> dict[str, Any]:
        """Return the rule's non-empty parts as plain values for the index; lists are given by path and digest."""
        parts: dict[str, Any] = {}
        if self.keep:
            parts["keep"] = list(self.keep)
        for option, path in (("only", self.only), ("but", self.but)):
            if path is not None:
                content = Path(path).read_bytes()
                parts[option] = {"path": os.path.abspath(path), "sha256": sha256(content).hexdigest()}
        for option, value in (("part", self.part), ("shots", self.shots), ("seed", self.seed)):
            if value is not None:
                parts[option] = value
        return parts


def check_seed(seed: int | None) -> None:
    """Raise ConfigError if a seed is outside the range that NumPy accepts and that a recipe's other seeds have."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}, expected 0 to {2**63 - 1}")


class Labels(NamedTuple):
    """The labels of all samples, concatenated: those of sample n are `values[ends[n − 1] : ends[n]]`."""

    values: np.ndarray  # int32 class ids
    ends: np.ndarray  # (N,) int64

    def any_of_sample(self, marked: np.ndarray) -> np.ndarray:
        """Return a boolean array (N,): whether each sample has a marked label; `marked` has one boolean per value."""
        has_marked = np.zeros(len(self.ends), bool)
        # Process in pieces: an array with the sample of each of three billion labels would take 24 GB.
        for first in range(0, len(self.ends), AT_ONCE):
            ends = self.ends[first : first + AT_ONCE]
            start = int(self.ends[first - 1]) if first > 0 else 0
            owners = np.repeat(np.arange(first, first + len(ends)), np.diff(ends, prepend=start))
            has_marked[owners[marked[start : ends[-1]]]] = True
        return has_marked


@dataclass
class Part:
    """A subset to be written."""

    folder: Path
    rule: Rule
    name: str  # name of the set
    chosen: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # (N,)
    shards: list[Shard] = field(default_factory=list)
    # Hash of the positions of all chosen samples; identifies the subset independently of rule and table format.
    places: Any = field(default_factory=sha256)

    @property
    def path(self) -> Path:
        """The path of the subset's JSON."""
        return self.folder / f"{self.name}{SUFFIX}"


def make_subsets(
    parent: Index,
    parts: Sequence[Part],
    *,
    workers: int = 1,
    cache: CacheConfig | None = None,
    report: Progress | None = None,
) -> list[Index]:
    """Write an index of the chosen samples of `parent` for each part, each to a separate folder.

    `report` is called with the number of examined shards and the total; `cache` configures downloads of remote shards.
    Raises DataError if a rule chooses no samples or refers to missing ones, or if a tar is missing.
    """
    # 1. A subset must not overwrite a set, the tables of a set, or another subset.
    tables = {table_path(Path(), shard.name) for shard in parent.shards}
    for part in parts:
        check_name(part.name, "a set", "give its name: --name train-10shot")
        for other in parts:
            if other is not part and other.folder.resolve() == part.folder.resolve():
                raise DataError(f"{part.folder} is used for two subsets\n  expected a separate folder for each")
        for other_path in sorted(part.folder.glob(f"*{SUFFIX}")):
            try:
                index = load_index(other_path)
            except DataError:
                # Ignore a damaged subset of this name: its error tells the user to create it again.
                if other_path == part.path:
                    continue
                raise
            is_this_subset = other_path == part.path and index.origin is not None
            if is_this_subset:
                continue
            shares_table = any(table_path(Path(), shard.name) in tables for shard in index.shards)
            if other_path == part.path or shares_table:
                raise DataError(
                    f"the subset would overwrite the tables of {other_path}\n"
                    "  expected a separate folder for the subset\n  use another --output"
                )
    check_sizes([parent])

    # 2. Choose samples. If no rule needs labels, only the labels of chosen samples are needed, to count classes.
    labels = None
    if any(part.rule.needs_labels for part in parts):
        labels = read_all_labels(parent, workers, cache or CacheConfig(), report)
    for part in parts:
        part.chosen = choose(parent, labels, part.rule)
        if not part.chosen.any():
            raise DataError(
                f"{parent.tables}: the rule selects none of the {parent.samples:,} samples: {part.rule.described()}"
            )
    if labels is None:
        wanted = np.logical_or.reduce([part.chosen for part in parts])
        labels = read_all_labels(parent, workers, cache or CacheConfig(), report, wanted)
    return write_subsets(parent, parts, labels)


# -------------------------------------------------------------------------------------------------- labels


def read_all_labels(
    index: Index,
    workers: int,
    cache: CacheConfig,
    report: Progress | None,
    wanted: np.ndarray | None = None,
) -> Labels:
    """Return the labels of all samples, or only of the `wanted` (N,) samples."""
    jobs = []
    counts = np.zeros(index.samples, np.int32)  # number of labels of each sample
    rows_of_jobs = []
    for number in range(len(index.shards)):
        rows = index.rows(number)
        of_shard = None if wanted is None else wanted[rows]
        if of_shard is None or of_shard.any():
            jobs.append(partial(read_shard_labels, index.single_shard(number), cache, of_shard))
            rows_of_jobs.append(rows)
    values = [np.empty(0, np.int32)]
    # Jobs that download shards mostly wait, for which threads suffice.
    with in_parallel(jobs, workers, report, in_threads=index.remote) as results:
        for rows, (shard_values, shard_counts) in zip(rows_of_jobs, results, strict=True):
            values.append(shard_values)
            counts[rows] = shard_counts
    return Labels(np.concatenate(values), counts.cumsum(dtype=np.int64))


def read_shard_labels(
    index: Index, cache: CacheConfig, wanted: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated labels of a shard's samples, and the number of labels per sample; omit unusable labels.

    `index` contains only this shard; only labels of `wanted` (N,) samples are read. A text is identified by its digest
    if it is a class id or name; for any other digest, the label of one sample is read.
    """
    rows = np.arange(index.samples) if wanted is None else np.flatnonzero(wanted)
    digests, first, text_of = np.unique(index.table(0)["label_digest"][rows], return_index=True, return_inverse=True)
    known = known_texts(index.classes, index.names)
    # Skip the sha256 of the tar, because each label is compared with its own digest.
    reader = ShardReader(index, verify=False, cache=cache)
    values: list[int] = []  # labels of all texts, concatenated
    lengths = []  # number of labels per text
    for digest, row in zip(digests.tolist(), rows[first].tolist(), strict=True):
        text = known[digest] if digest in known else next(reader.labels(0, [row]))
        try:
            labels = parse_labels(text, index.ids)
        except ValueError:
            labels = ()
        # A run counts labels beyond the classes as bad, so they belong to no class here either.
        if max(labels, default=0) >= index.classes:
            labels = ()
        values += labels
        lengths.append(len(labels))

    # For each label of each sample, compute the position of its value: the start of its text, plus its number.
    of_text = np.array(lengths, np.int64)
    counts = np.zeros(index.samples, np.int32)
    counts[rows] = of_text[text_of]
    ends = counts[rows].cumsum()
    starts = (of_text.cumsum() - of_text)[text_of] - (ends - counts[rows])
    places = np.repeat(starts, counts[rows]) + np.arange(counts.sum())
    return np.array(values, np.int32)[places], counts


@lru_cache(maxsize=1)
def known_texts(classes: int, names: Names) -> Mapping[int, bytes]:
    """Return {digest: text} for the most common labels: an empty text, class ids and class names."""
    texts = {}
    for label in ("", *map(str, range(classes)), *names):
        texts[label_digest(label.encode())] = label.encode()
    return texts


# ------------------------------------------------------------------------------------------------ choosing


def choose(index: Index, labels: Labels | None, rule: Rule) -> np.ndarray:
    """Return a boolean array (N,): whether the rule chooses each sample; `labels` is None if the rule needs none."""
    chosen = np.ones(index.samples, bool)
    first_labels = np.full(len(chosen), NO_LABEL, np.int64)
    if labels is not None:
        # Parts and shots with a seed use only the first label of a sample.
        starts = np.append(0, labels.ends[:-1]).astype(np.int64)
        has_label = labels.ends > starts
        first_labels[has_label] = labels.values[starts[has_label]]
    if rule.keep:
        assert labels is not None, "a rule that keeps classes needs labels"
        wanted_ids = kept_ids(index.names, rule.keep, str(index.tables), index.classes)
        assert wanted_ids is not None, "there are classes to keep"
        chosen &= labels.any_of_sample(np.isin(labels.values, wanted_ids))
    for path, is_wanted in ((rule.only, True), (rule.but, False)):
        if path is not None:
            listed = np.zeros(index.samples, bool)
            listed_rows = load_optional(LISTED_ROWS, "a list of samples")
            listed[listed_rows(path, index)] = True
            chosen &= listed == is_wanted
    if rule.part is not None:
        # In the order of the set; or with a seed, the same fraction of each class.
        rows = np.flatnonzero(chosen)
        first, stop = bounds_of(rule.part, len(rows))
        if rule.seed is not None:
            rows = stratified(rows, first_labels[rows], rule.seed)
        chosen = only_rows(chosen, rows[first:stop])
    if rule.shots is not None:
        assert rule.seed is not None, "Rule rejects shots without a seed"
        candidates = np.where(chosen, first_labels, NO_LABEL)
        chosen = only_rows(chosen, few_shot_rows(candidates, rule.shots, rule.seed))
    return chosen


def only_rows(chosen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a boolean array with the shape of `chosen` that is True only at these rows."""
    mask = np.zeros_like(chosen)
    mask[rows] = True
    return mask


def bounds_of(part: str, samples: int) -> tuple[int, int]:
    """Return (first, stop) for a part such as ":98%" of this many samples, like TensorFlow Datasets slices.

    Percentages are rounded to the nearest sample; negative numbers count from the end. Raises ConfigError if the part
    has a different format.
    """
    match = re.fullmatch(rf"\[?({BOUND}):({BOUND})\]?", part)
    if match is None:
        raise ConfigError(
            f"part is {part!r}, expected first:stop, in samples or percent\n"
            "  for example ':98%' and '98%:', or ':50000' and '50000:', each in quotes"
        )
    ends = []
    for text, default in zip(match.groups(), ("0", "100%"), strict=True):
        end = text or default
        if end.endswith("%"):
            number = round(float(end[:-1]) * samples / 100)
        else:
            number = int(end)
            if number < 0:
                number = max(number + samples, 0)
        ends.append(min(number, samples))
    first, stop = ends
    return first, stop


# ------------------------------------------------------------------------------------------------- writing


def write_subsets(parent: Index, parts: Sequence[Part], labels: Labels) -> list[Index]:
    """Write the tables of all parts shard by shard, then the JSON of each part; return the indexes."""
    replaced: list[Sequence[Shard]] = []  # per part, the shards with existing tables
    for part in parts:
        part.folder.mkdir(parents=True, exist_ok=True)
        shards: Sequence[Shard] = ()
        if part.path.exists():
            try:
                shards = load_index(part.path).shards
            except DataError:  # damaged: any shard of the set may have a table
                shards = parent.shards
        replaced.append(shards)
        # Delete the JSON first, so that no process reads a subset with tables of two different rules.
        part.path.unlink(missing_ok=True)

    for number, shard in enumerate(parent.shards):
        table = None
        for part in parts:
            rows = np.flatnonzero(part.chosen[parent.rows(number)])
            if len(rows) == 0:
                continue
            if table is None:
                table = parent.table(number)
            chosen = table[rows]
            for column in ("image", "label"):
                part.places.update(np.ascontiguousarray(chosen[column]).astype("<u8").tobytes())
            part.shards.append(write_table(part.folder, chosen, shard.name, shard.bytes, shard.sha256))

    indexes = []
    for part, shards in zip(parts, replaced, strict=True):
        kept_names = {shard.name for shard in part.shards}
        for shard in shards:
            if shard.name not in kept_names:
                table_path(part.folder, shard.name).unlink(missing_ok=True)
        place = os.path.relpath(parent.tables / f"{parent.name}{SUFFIX}", part.folder)
        origin = Origin(place, parent.digest, part.rule.described(), part.places.hexdigest())
        counts = count_classes(labels, part.chosen, parent.classes)
        indexes.append(write_index(part.path, parent.directory, part.shards, counts, parent.names, origin=origin))
    return indexes


def count_classes(labels: Labels, chosen: np.ndarray, classes: int) -> list[int]:
    """Return the number of chosen samples per class; a repeated label of a sample counts once."""
    labels_of_sample = np.diff(labels.ends, prepend=0).astype(np.int32)
    has_several = labels_of_sample > 1
    alone = labels.values[np.repeat(chosen & ~has_several, labels_of_sample)]
    samples_of_class = np.bincount(alone, minlength=classes)
    # Only these can repeat a label: at 300 million samples the pairs of all would take tens of gigabytes.
    positions = np.flatnonzero(np.repeat(chosen & has_several, labels_of_sample))
    owners = np.searchsorted(labels.ends, positions, side="right")
    pairs = np.unique(owners * classes + labels.values[positions])
    samples_of_class += np.bincount(pairs % classes, minlength=classes)
    return samples_of_class.tolist()


def summary(index: Index, parent: Index) -> list[str]:
    """Describe a subset, one fact per line, including classes with fewer samples than requested."""
    assert index.origin is not None, "a subset has an origin"
    share = index.samples / parent.samples
    lines = [
        f"{index.samples:,} of {parent.samples:,} samples ({share:.3%}) in {len(index.shards)} of "
        f"{len(parent.shards)} shards, {index.classes} classes; digest {index.digest[:12]}",
        f"subset of {parent.tables} (digest {parent.digest[:12]}), by {index.origin.words}",
    ]
    shots = index.origin.rule.get("shots", 0)
    lost = []  # classes with samples only in the parent
    short = []  # classes with fewer samples than requested
    for label, count in enumerate(index.class_counts):
        if count == 0 and parent.class_counts[label]:
            lost.append(label)
        elif 0 < count < shots:
            short.append(label)
    if lost and "keep" not in index.origin.rule:
        lines.append(f"{len(lost)} of its classes have no sample here, the first is {index.class_name(lost[0])}")
    if short:
        lines.append(f"{len(short)} classes have fewer than {shots} samples, the first is {index.class_name(short[0])}")
    return lines
