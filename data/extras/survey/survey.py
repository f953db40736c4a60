"""Inspect a folder or file of images: detect the source type, and count images, classes and sizes.

    survey("photos")      photos/train/cat/1.jpg …, photos/val/cat/7.jpg …
    →   Sets(train=FoundSet(source="folder", path="photos/train", images=600, class_counts={"cat": 300, …}, …),
             test=FoundSet(source="folder", path="photos/val", …))

The content of a path is recognised in this order, and the first match wins:
1. the archive of a public data set, by its file name (docs/data-sets.md);
2. a train split (a folder, or files with that word in their names), next to a val or test split;
3. an index; WebDataset tars; Parquet files with images; a table of paths; sub-folders of images, one per class; images
   without classes.

The counts come from tar headers, label columns and file names. Only the headers of a few hundred images, evenly spread
over the data set, are read.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import median

from data.checks import printable
from data.errors import DataError, UsageError
from data.extras.known_sets.known import known_archive
from data.extras.sources.folders import (
    files_of,
    images_below,
    keys_of,
    loose_images,
    merged_folders,
    refuse_loop,
    sub_folders_with_images,
)
from data.extras.sources.numbering import PAIRS, are_pairs, check_unicode_forms, gap_in_ids
from data.extras.sources.tables import (
    IMAGE_COLUMNS,
    TABLE_PATH_COLUMNS,
    ImageParquet,
    classes_in,
    first_of,
    label_text,
    naming_parquet,
    parquet_classes,
    table_columns,
    table_entries,
)
from data.extras.sources.tar_offsets import DOTTED, first_part, mapped, walk
from data.extras.sources.walk import HIDDEN, SYSTEM_FOLDERS, class_folders_in, matching
from data.extras.survey.leaves import write_leaf_table
from data.images.decode import BadImage, read_header
from data.index.document import SUFFIX, load_index
from data.index.names import NO_NAMES, NoLabel, ids_of, parse_labels, preview
from data.index.shard import COMPRESSED, IMAGES

TRAIN = ("train", "training")
# Names of the part to evaluate on, in order of preference: a test set is used only if there is no validation set.
TEST = ("val", "validation", "valid", "test", "testing", "eval", "dev")
OPENED = 1000  # images whose headers are read: all of a small set, so that `new` names its files that are no images
KEPT = 32  # images whose bytes are kept, to measure the decoding speed
MAX_NAMED = 5  # file types named in a note
# Share of unlabelled samples in tars, above which the tars are packed again without them: training replaces each such
# sample by the next one, which can be unlabelled too.
MAX_UNLABELLED = 0.1
WORD = re.compile(r"[a-z]+")  # words of a lower-case file name: cifar10-train-000.tar has cifar, train, tar
# Original file name → source, splits to train and to evaluate on, and approximate shorter side of an image in pixels.
KNOWN = {
    "cifar-10-binary.tar.gz": ("cifar10", "train", "test", 32),
    "cifar-100-binary.tar.gz": ("cifar100", "train", "test", 32),
    "annotations.tar.gz": ("pets", "train", "test", 300),
    "102flowers.tgz": ("flowers102", "trainval", "test", 500),
    "ILSVRC2012_img_train.tar": ("imagenet-train", "train", "", 375),
    "winter21_whole.tar.gz": ("imagenet-21k", "train", "", 375),
    "fall11_whole.tar": ("imagenet-21k-fall11", "train", "", 375),
}
IN_FOLDER = ("pets", "flowers102")  # sets with several archives, whose path is the folder that contains them

Report = Callable[[int], None]  # called with the number of images counted so far


@dataclass
class FoundSet:
    """Statistics of one set of images."""

    source: str  # the `source` of a pack stage; "index" for a set that is already packed or indexed
    path: str
    images: int = 0
    class_counts: Counter[str] = field(default_factory=Counter)  # class name, or class id as text → number of images
    are_ids: bool = False  # the keys of class_counts are ids, because the classes have no names
    most_labels: int = 0  # largest number of labels of an image; 0 without labels
    labelled: int = 0  # images with at least one label
    split: str = ""  # split of a public data set
    sides: list[tuple[int, int]] = field(default_factory=list)  # (height, width) of the opened images
    examples: list[bytes] = field(default_factory=list)  # encoded bytes of the first KEPT opened images
    bad: Counter[str] = field(default_factory=Counter)  # reason → number of opened images that cannot be read
    first_bad: str = ""  # file of the first unreadable image
    opened: int = 0
    first_unreadable: str = ""  # why the first label that is neither ids nor a name cannot be used
    notes: list[str] = field(default_factory=list)  # remarks on excluded files and anomalies, for the user

    @property
    def classes(self) -> int:
        """Number of outputs of a classifier for these images; 0 if they have no labels."""
        if self.are_ids:
            return max(map(int, self.class_counts), default=-1) + 1
        return len(self.class_counts)

    def gap_in_ids(self) -> str:
        """Return a note if most class ids below the largest have no images, a likely mistake; "" otherwise."""
        return gap_in_ids(len(self.class_counts), self.classes) if self.are_ids else ""

    @property
    def shorter_side(self) -> int:
        """Median of the shorter side in pixels; 224 if no image could be opened."""
        return round(median(map(min, self.sides or [(224, 224)])))

    def count(self, raw: bytes) -> None:
        """Count an image by the content of its label file: ids, class names, or neither."""
        self.images += 1
        labels: Sequence[object] = ()
        try:
            labels = parse_labels(raw)
            # If some labels are ids, names are not valid labels: discard their counts.
            if not self.are_ids:
                self.class_counts.clear()
                self.labelled = 0
            self.are_ids = True
        except NoLabel as error:
            if error.are_names and not self.are_ids:
                labels = error.texts
            elif raw.strip() and not error.are_names and not self.first_unreadable:
                self.first_unreadable = str(error)
        self.labelled += bool(labels)
        self.most_labels = max(self.most_labels, len(labels))
        self.class_counts.update(map(str, dict.fromkeys(labels)))

    def open_some(self, images: Sequence[tuple[Path, int, int]], most: int = OPENED) -> None:
        """Read the headers of up to `most` evenly spaced images, each given as (file, offset, size; −1: to the end)."""
        opened = min(most, len(images))
        for number in range(opened):
            path, offset, size = images[(2 * number + 1) * len(images) // (2 * opened)]
            with suppress(OSError), open(path, "rb") as file:
                file.seek(offset)
                self.open(file.read(size))
            if self.bad and not self.first_bad:
                self.first_bad = str(path)

    def open(self, encoded: bytes) -> None:
        """Read the header of an encoded image, and record its sides or the error."""
        self.opened += 1
        try:
            header = read_header(encoded)
        except BadImage as error:
            self.bad[str(error)] += 1
            return
        self.sides.append((header.height, header.width))
        if len(self.examples) < KEPT:
            self.examples.append(encoded)


@dataclass(frozen=True)
class Sets:
    """The training set, and the evaluation set if there is one."""

    train: FoundSet
    test: FoundSet | None = None

    @property
    def held_out(self) -> int:
        """Percentage of each class to hold out; 0 if there is a test set, or if there are too few images."""
        if self.test is not None or not self.train.classes:
            return 0
        counts = sorted(self.train.class_counts.values())
        images = self.train.labelled
        if images < 10 or counts[len(counts) // 2] < 2:
            return 0
        if images < 1000:
            return 20
        return max(1, min(10, round(1_000_000 / images)))

    @property
    def images(self) -> int:
        """Number of training images, excluding held-out images and, for classification, images without labels."""
        images = self.train.labelled if self.train.classes else self.train.images
        return max(1, round(images * (100 - self.held_out) / 100))


def survey(place: str, *, unlabelled: bool = False, leaf_tables: str | None = None, report: Report) -> Sets:
    """Return the training set, and the evaluation set if there is one, found at a path.

    With `unlabelled=True`, labels are ignored and there is no evaluation set. With `leaf_tables`, each innermost folder
    is a class: the images are listed in the tables `{leaf_tables}-train.csv` and, if there is an evaluation set,
    `{leaf_tables}-test.csv`. Raises DataError if there are no images, or if their format is not supported.
    """
    if "://" in place:
        raise DataError(
            f"{place}: images in an object store cannot be inspected without an index\n"
            f"  index them first: python -m jobs index {shlex.quote(place)} --output indexes/NAME; then use the path "
            "indexes/NAME"
        )
    known = known_sets(Path(place))
    if known is not None:
        return known
    train_place, test_place = parts_of(place)
    if leaf_tables is not None:
        train_place = write_leaf_table(train_place, f"{leaf_tables}-train.csv")
        if test_place is not None:
            test_place = write_leaf_table(test_place, f"{leaf_tables}-test.csv")
    train = inspect(train_place, unlabelled, report)
    if train.images == 0:
        others = "".join(f"\n  {note}" for note in train.notes)
        raise DataError(
            f"{train_place}: no images in this path or its sub-folders{others}\n"
            f"  expected {', '.join(IMAGES)}, in folders or tars"
        )
    if train.opened and train.bad.total() == train.opened:
        reason, _ = train.bad.most_common(1)[0]
        raise DataError(
            f"{train_place}: cannot read any of the {train.opened} sampled images: {reason}\n"
            f"  expected complete {', '.join(IMAGES)} files; copy them again from the original source"
        )
    if len(train.class_counts) == 1:
        raise DataError(
            f"{train_place}: all {train.images:,} images belong to one class, {preview(list(train.class_counts))}\n"
            "  expected two or more classes, each in a sub-folder; to train without labels, add --unlabelled"
        )
    without_label = train.images - train.labelled
    if train.classes == 0 and train.first_unreadable and not unlabelled:
        raise DataError(
            f"{train_place}: no label is usable; the first one failed with: {train.first_unreadable}\n"
            "  expected class ids (7, or 3 17) or class names; to train without labels, add --unlabelled"
        )
    if train.classes and without_label:
        first = f" (the first: {train.first_unreadable})" if train.first_unreadable else ""
        train.notes.append(f"{without_label:,} images have no usable label and are excluded from training{first}")
        if train.source == "shards" and without_label > MAX_UNLABELLED * train.images:
            train.source = "tars"
            train.notes.append("the tars are packed again without them")
    if train.are_ids and are_pairs([train.class_counts[str(label)] for label in range(train.classes)], train.labelled):
        raise DataError(f"{train_place}: {PAIRS}")
    gap = train.gap_in_ids()
    if gap:
        train.notes.append(gap)
    note = unused_tables(Path(place), [train.path, test_place])
    if note:
        train.notes.append(note)
    if test_place is None or train.classes == 0:
        return Sets(train)
    test = inspect(test_place, unlabelled, report)
    lacking = sorted(test.class_counts.keys() - train.class_counts.keys())
    # The test images of competitions have no labels, or are all in one folder.
    if len(lacking) == len(test.class_counts):
        train.notes.append(f"{test_place} is not used for evaluation: its images have no labels of these classes")
        return Sets(train)
    if lacking and not train.are_ids:
        check_unicode_forms(lacking, list(train.class_counts), test_place, train_place)
        raise DataError(
            f"{test_place}: the classes {preview(lacking)} do not occur in {train_place}\n"
            "  expected only classes of the training set; remove the other classes"
        )
    return Sets(train, test)


def known_sets(place: Path) -> Sets | None:
    """Return the splits of a public data set's archive with their published sizes, or None for any other path."""
    for name, (source, *splits, side) in KNOWN.items():
        archive = place if place.name == name else place / name
        if not archive.is_file():
            continue
        path = archive
        if source in IN_FOLDER:
            path = archive.parent
        published = known_archive(source, None, None)
        assert published is not None, source
        sets = []
        for split in filter(None, splits):
            size = published.published[split]
            image_set = FoundSet(source, str(path), size.samples, are_ids=True, split=split, sides=[(side, side)])
            for label in range(size.classes):
                image_set.class_counts[str(label)] = size.samples // size.classes
            image_set.most_labels = 1
            image_set.labelled = size.samples
            sets.append(image_set)
        return Sets(*sets)
    return None


# ------------------------------------------------------------------------------------------------ parts


def parts_of(place: str) -> tuple[str, str | None]:
    """Return the paths of training and evaluation images; the latter is None if there are no separate images."""
    path = Path(place)
    # Descend through folders that contain nothing except another folder.
    while path.is_dir():
        entries = sorted(entry for entry in path.glob("[!.]*") if entry.name not in SYSTEM_FOLDERS)
        is_wrapper = len(entries) == 1 and entries[0].is_dir() and has_folders(entries[0])
        if not is_wrapper:
            break
        path = entries[0]
    # 1. Parts inside the path: sub-folders named train or test, or files with these words in their names; or the files
    #    that match a pattern.
    if path.is_dir():
        folders = {}
        for name in class_folders_in(path):
            folders[name.lower()] = str(path / name)
        kinds = [folders]
        for suffix in (".tar", ".parquet", ".csv", ".jsonl"):
            kinds.append(parts_of_files(sorted(path.glob(f"[!.]*{suffix}"))))
    elif not path.exists():
        kinds = [parts_of_files(matching(place))]
    else:
        kinds = []
    for parts in kinds:
        train, test = train_and_test(parts)
        # A single folder named train could be a class (of trains) if it has no sub-folders.
        is_part = train is not None and (test is not None or has_folders(Path(train)) or tables_in(Path(train)))
        if train is not None and is_part:
            return train, test
    # 2. The path itself is the train part of a pair: train.tar next to test.tar, or photos/train next to photos/val. A
    #    pattern selects only the files that it matches.
    if path.exists():
        for word in TRAIN:
            if word not in WORD.findall(path.name.lower()):
                continue
            # Ignore case: Train next to Val.
            neighbours = {other.name.lower(): other for other in path.parent.glob("[!.]*")}
            for other_word in TEST:
                other = neighbours.get(path.name.lower().replace(word, other_word))
                if other is not None:
                    return str(path), str(other)
    return str(path), None


def train_and_test(parts: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the training and evaluation parts from a mapping of words to paths; None for a missing part."""
    return first_part(TRAIN, parts, None), first_part(TEST, parts, None)


def one_place(places: Sequence[str]) -> str:
    """Undo the shell's expansion of photos/* or train-*.tar: return the folder or pattern for several paths.

    Raises UsageError if no folder or pattern matches exactly these paths.
    """
    if len(places) == 1:
        return places[0]
    paths = sorted(map(Path, places))
    folder = paths[0].parent
    if paths == sorted(folder.glob("[!.]*")):
        return str(folder)
    pattern = pattern_of(paths)
    if pattern is None:
        joined = " ".join(places)
        if Path(joined).exists():
            raise UsageError(
                f"found {len(places)} paths, but {joined!r} is a single folder whose name contains spaces\n"
                "  quote its name"
            )
        raise UsageError(
            f"found {len(places)} paths, {preview(places)}, but no folder or pattern matches exactly these\n"
            f"  expected one set of images: a folder, or a quoted pattern such as '{folder}/train-*.tar'"
        )
    return pattern


def pattern_of(files: Sequence[Path]) -> str | None:
    """Return a pattern that matches exactly these files of a folder, such as cifar10-train-*.tar, or None."""
    folder = files[0].parent
    beginning = os.path.commonprefix(list(map(os.path.basename, files)))  # noqa: RUF071  # by letters
    # Prefer a prefix of complete words if it matches the same files: cifar10-* for cifar10-train and cifar10-test.
    for prefix in (re.sub(r"[^\W_]+$", "", beginning), beginning):
        pattern = folder / f"{prefix}*{files[0].suffix}"
        if sorted(folder.glob(pattern.name)) == sorted(files):
            return str(pattern)
    return None


def has_folders(folder: Path) -> bool:
    """Return whether a folder has sub-folders."""
    return folder.is_dir() and bool(class_folders_in(folder))


def parts_of_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the path or pattern of the files of each part (train, test, …), by the words in their names.

    Raises DataError if there are train and test files, and others that belong to no part (except for tables).
    """
    parts: dict[str, str] = {}
    of_parts: list[Path] = []
    rest = set(files)
    for word in (*TRAIN, *TEST):
        named = [file for file in files if word in WORD.findall(file.name.lower())]
        pattern = pattern_of(named) if len(named) > 1 else "".join(map(str, named))
        if pattern:
            parts[word] = pattern
            of_parts += named
            rest.difference_update(named)
    train, test = train_and_test(parts)
    if train is not None and test is not None and rest and files[0].suffix not in (".csv", ".jsonl"):
        pattern = pattern_of(of_parts) or train
        raise DataError(
            f"{files[0].parent}: {preview(sorted(file.name for file in rest))} have neither train nor test in their "
            f"names, but the other files do\n  rename these files; or, to use only the other files, run "
            f"python -m jobs new {shlex.quote(pattern)}"
        )
    return parts


# ------------------------------------------------------------------------------------------------ kinds


def inspect(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Return the statistics of the images at a path; raises DataError if their format is not supported."""
    path = Path(place)
    if path.is_dir():
        if len(list(path.glob(f"[!.]*{SUFFIX}"))) == 1 and not unlabelled:
            return inspect_index(path, report)
        for suffix in (".tar", ".parquet"):
            if any(path.glob(f"[!.]*{suffix}")):
                return INSPECTORS[suffix](place, unlabelled, report)
        tables = tables_in(path)
        if len(tables) == 1:
            return inspect_table(str(tables[0]), unlabelled, report)
        for suffix in COMPRESSED:
            for file in path.glob(f"[!.]*{suffix}"):
                raise DataError(
                    f"{file}: compressed tars do not allow random access to samples\n"
                    f"  run gzip -d {shlex.quote(str(file))} (or zstd -d), and run the same command again"
                )
        return inspect_folder(path, unlabelled, report)
    if path.suffix in INSPECTORS:
        return INSPECTORS[path.suffix](place, unlabelled, report)
    way_out = "expected a folder, .tar, .parquet or .csv"
    if place.endswith((".zip", *COMPRESSED)):
        way_out = "unpack it, and use the path of the folder"
    raise DataError(f"{place}: not a supported set of images\n  {way_out}")


def inspect_folder(root: Path, unlabelled: bool, report: Report) -> FoundSet:
    """Inspect a folder with one sub-folder of images per class, or a folder of unlabelled images."""
    image_set = FoundSet("folder", str(root))
    skipped: Counter[str] = Counter()
    paths: list[Path] = []
    empty = []
    sub_folders: dict[str, list[str]] = {}
    for name in class_folders_in(root, skipped):
        folder = root / name
        refuse_loop(folder)
        below = images_below(folder, skipped)
        if not below:
            empty.append(folder.name)
            continue
        paths += below
        image_set.class_counts[folder.name] = len(below)
        sub_folders[folder.name] = sub_folders_with_images(folder, below)
        report(len(paths))
    here, note = loose_images(root)
    if unlabelled or not image_set.class_counts:
        paths += here
        image_set.class_counts.clear()
    else:
        image_set.most_labels = 1
        image_set.labelled = len(paths)
        if empty:
            raise DataError(
                f"{root}: no images in the class folders {preview(empty)}\n"
                f"  expected {', '.join(IMAGES)} in every class folder; add images, or remove the empty folders"
            )
        if note:
            image_set.notes.append(note)
        merged = merged_folders(sub_folders)
        if merged:
            image_set.notes.append(f"{merged}; to make a class of each innermost folder, add --leaf-classes")
    image_set.images = len(paths)
    keys_of([str(path.relative_to(root)) for path in paths])  # raises the error of packing
    alike = len(image_set.class_counts) - len(set(map(str.lower, image_set.class_counts)))
    if alike:
        image_set.notes.append(f"{alike} class names differ from another class name only in case")
    hidden = skipped.pop(HIDDEN, 0)
    if hidden:
        image_set.notes.append(
            f"{hidden:,} hidden files are excluded: their names, or the names of their folders, begin with a dot"
        )
    # If there are no images at all, also count the other files here, which the user may have meant.
    if not paths:
        skipped.update(file.suffix or file.name for file in root.glob("[!.]*") if file.is_file())
    if skipped:
        kinds = ", ".join(f"{count:,} × {printable(kind)}" for kind, count in skipped.most_common(MAX_NAMED))
        image_set.notes.append(f"{kinds}: excluded, because they are not {', '.join(IMAGES)}")
    image_set.open_some(list(zip(paths, repeat(0), repeat(-1), strict=False)))
    return image_set


def tables_in(folder: Path) -> list[Path]:
    """Return the tables of paths in a folder, such as the metadata.csv or metadata.jsonl of Hugging Face's folders."""
    return list(filter(is_table, sorted(possible_tables(folder))))


def possible_tables(folder: Path) -> set[Path]:
    """Return the CSV and .jsonl files in a folder, whatever their columns are."""
    return {*folder.glob("[!.]*.csv"), *folder.glob("[!.]*.jsonl")}


def unused_tables(folder: Path, used: Sequence[str | None]) -> str:
    """Return a note on the CSV and .jsonl files of a folder that are not among the used paths and patterns, or ""."""
    tables = possible_tables(folder)
    for place in filter(None, used):
        tables.difference_update([Path(place)], matching(place))
    if not tables:
        return ""
    note = f"not used: {preview(sorted(path.name for path in tables))}"
    of_paths = sorted(filter(is_table, tables))
    if of_paths:
        note += f"; to use the images of a table, run python -m jobs new {shlex.quote(str(of_paths[0]))}"
    return note


def is_table(path: Path) -> bool:
    """Return whether the header of a CSV, or the first line of a .jsonl, names a column of paths."""
    with suppress(OSError, ValueError), open(path, newline="", encoding="utf-8-sig") as file:
        if path.suffix == ".jsonl":
            return first_of(TABLE_PATH_COLUMNS, list(json.loads(file.readline()))) is not None
        return first_of(TABLE_PATH_COLUMNS, next(csv.reader(file), [])) is not None
    return False


def inspect_table(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Inspect a table of paths and labels."""
    path = Path(place)
    image_set = FoundSet("table", place)
    # If the table has no column of labels, the images are unlabelled.
    try:
        names, labels = table_columns(path, unlabelled=unlabelled)
    except DataError:
        names, labels = table_columns(path, unlabelled=True)
    classes_in(path, labels)  # raises DataError if the table mixes ids and names
    missing = []
    images = []
    for name, label in zip(names, labels, strict=True):
        if not (path.parent / name).is_file():
            missing.append(name)
        images.append((path.parent / name, 0, -1))
        image_set.count(label_text(label))
        report(image_set.images)
    if missing:
        raise DataError(
            f"{path}: the files {preview(missing)} do not exist\n"
            f"  expected absolute paths, or paths relative to {path.parent}; move the table or correct the paths"
        )
    # The errors of packing, which would otherwise come only with `run`.
    keys_of(names)
    if image_set.labelled:
        table_entries(path, names, labels)
    image_set.open_some(images)
    return image_set


def inspect_parquet(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Inspect Parquet files of images or of image paths."""
    from pyarrow import parquet

    files = files_of(place, "*.parquet")
    with naming_parquet(files[0]):
        columns = parquet.read_schema(files[0]).names
    if "path" in columns and first_of(IMAGE_COLUMNS, columns) is None:
        return inspect_table(str(files[0]), unlabelled, report)
    image_set = FoundSet("parquet", place)
    names: Sequence[str] = ()
    ids: Mapping[str, int] | None = None
    invalid = ""  # the first label that packing would refuse
    for path in files:
        file = ImageParquet(path, unlabelled=True)
        names = names or file.names
        if ids is None and file.label_column and not unlabelled:
            ids = NO_NAMES if file.names else ids_of(parquet_classes(place))
        if not file.label_column or unlabelled:
            with naming_parquet(path):
                image_set.images += parquet.read_metadata(path).num_rows
        else:
            for number, row in enumerate(file.rows([file.label_column])):
                text = label_text(row[file.label_column])
                image_set.count(text)
                try:
                    parse_labels(text, ids or NO_NAMES)
                except NoLabel as error:
                    invalid = invalid or f"{path}: row {number}: {error}"
                report(image_set.images)
        for _, row in zip(range(OPENED // len(files) + 1), file.rows([file.image_column]), strict=False):
            image = row[file.image_column]
            if isinstance(image, dict):
                image = image.get("bytes")
            image_set.open(image or b"")
    if invalid and image_set.labelled:
        raise DataError(invalid)
    if image_set.are_ids and names:
        count_of_id = image_set.class_counts
        image_set.class_counts = Counter()
        for label, name in enumerate(names):
            image_set.class_counts[name] = count_of_id[str(label)]
        image_set.are_ids = False
    return image_set


def inspect_tars(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Inspect WebDataset tars, which will be indexed in place."""
    image_set = FoundSet("shards", place)
    files = files_of(place, "*.tar")
    dotted = 0
    first_dotted = ""
    for path in files:
        images = []
        with open(path, "rb") as file, mapped(file) as tar:
            result = walk(tar, str(path))
            dotted += result.refused.counts[DOTTED]
            first_dotted = first_dotted or result.refused.first.get(DOTTED, "")
            for row in result.rows:
                if row.image_size == 0:
                    continue
                images.append((path, row.image, row.image_size))
                label = b""
                if not unlabelled:
                    label = bytes(row.label_in(tar))
                image_set.count(label)
                report(image_set.images)
        image_set.open_some(images, OPENED // len(files) + 1)
    if dotted:
        image_set.notes.append(
            f"{dotted:,} × {DOTTED}, first {printable(first_dotted)}: excluded, because a key ends at the first dot, "
            "as in webdataset; to rewrite the tars with other names: python -m jobs pack tars FOLDER NEW-FOLDER"
        )
    return image_set


def inspect_index(folder: Path, report: Report) -> FoundSet:
    """Inspect a packed or indexed data set."""
    index = load_index(folder)
    image_set = FoundSet("index", str(folder), index.samples, are_ids=not index.names)
    for label, count in enumerate(index.class_counts):
        name = str(label)
        if index.names:
            name = index.names[label]
        image_set.class_counts[name] = count
    if index.classes:
        image_set.most_labels = 1
        # A sample with several labels counts several times.
        image_set.labelled = min(sum(index.class_counts), index.samples)
    if sum(index.class_counts) > index.samples:
        image_set.most_labels = int(index.table(0)["label_size"].max(initial=1) + 1) // 2
    if index.remote:
        return image_set
    for number in range(len(index.shards)):
        table = index.table(number)
        place = Path(index.location(number))
        images = []
        for offset, size in zip(table["image"].tolist(), table["image_size"].tolist(), strict=True):
            images.append((place, offset, size))
        image_set.open_some(images, OPENED // len(index.shards) + 1)
        report(index.samples)
    return image_set


# File extension → function that inspects a set of these files.
INSPECTORS = {".tar": inspect_tars, ".parquet": inspect_parquet, ".csv": inspect_table, ".jsonl": inspect_table}
