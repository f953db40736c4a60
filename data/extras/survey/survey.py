"""Look at somebody's images: which source reads them, how many there are, of which classes and sizes.

    survey("photos")      photos/train/cat/1.jpg …, photos/val/cat/7.jpg …
    →   Sets(train=FoundSet(source="folder", path="photos/train", images=600, class_counts={"cat": 300, …}, …),
             test=FoundSet(source="folder", path="photos/val", …))

What lies at a path is taken for, first match wins:
1. the archive of a known data set, by its file name (docs/data-sets.md);
2. a part called train (a folder, or files with that word in their names) with one called val or test beside it;
3. an index; WebDataset tars; image parquet; a table of paths; sub-folders of images, one a class; images alone.

Headers of tars, columns of labels and names of files are read for the counts. Of the images themselves a few hundred,
evenly spread, are opened, and their headers read.
"""

from __future__ import annotations

import csv
import os
import re
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
from data.extras.sources.tables import (
    IMAGE_COLUMNS,
    TABLE_PATH_COLUMNS,
    ImageParquet,
    classes_in,
    first_of,
    label_text,
    naming_parquet,
    table_columns,
)
from data.images.decode import BadImage, read_header
from data.index.document import SUFFIX, load_index
from data.index.names import NoLabel, parse_labels, preview
from data.index.shard import COMPRESSED, IMAGES, is_image
from data.index.tar import first_part, mapped, walk
from data.sources.folders import HIDDEN, files_of, images_below, refuse_loop

TRAIN = ("train", "training")
# What is evaluated on, in this order: a test set stays untouched where there is a validation set.
TEST = ("val", "validation", "valid", "test", "testing", "eval", "dev")
OPENED = 256  # images whose headers are read
KEPT = 32  # of these, whose bytes are kept, to measure how fast they decode
MOST_NAMED = 5  # of what is wrong
WORD = re.compile(r"[a-z]+")  # of a file's name in small letters: cifar10-train-000.tar has cifar, train, tar
# Archives as their owners call them: the source that reads them, the splits to train on and to evaluate on, and about
# how long the shorter side of an image is.
KNOWN = {
    "cifar-10-binary.tar.gz": ("cifar10", "train", "test", 32),
    "cifar-100-binary.tar.gz": ("cifar100", "train", "test", 32),
    "annotations.tar.gz": ("pets", "train", "test", 300),
    "102flowers.tgz": ("flowers102", "trainval", "test", 500),
    "ILSVRC2012_img_train.tar": ("imagenet-train", "train", "", 375),
    "winter21_whole.tar.gz": ("imagenet-21k", "train", "", 375),
    "fall11_whole.tar": ("imagenet-21k-fall11", "train", "", 375),
}
IN_FOLDER = ("pets", "flowers102")  # whose archives lie side by side: the folder is their path

Report = Callable[[int], None]  # hears how many images have been counted so far


@dataclass
class FoundSet:
    """One set of images, as it was found."""

    source: str  # as a pack stage calls it; "index" for a set that needs no packing
    path: str
    images: int = 0
    class_counts: Counter[str] = field(default_factory=Counter)  # a class's name, or its id, and how many images
    are_ids: bool = False  # of classes without names
    most_labels: int = 0  # of an image; 0: there are no labels
    labelled: int = 0  # images that have one
    split: str = ""  # of a known data set
    sides: list[tuple[int, int]] = field(default_factory=list)  # (height, width) of the images that were opened
    examples: list[bytes] = field(default_factory=list)  # some of these
    bad: Counter[str] = field(default_factory=Counter)  # why some of these cannot be read
    first_bad: str = ""  # the file of the first of them
    opened: int = 0
    notes: list[str] = field(default_factory=list)  # what is left out, or odd

    @property
    def classes(self) -> int:
        """Return how many outputs a model needs; 0 without labels."""
        if self.are_ids:
            return max(map(int, self.class_counts), default=-1) + 1
        return len(self.class_counts)

    @property
    def shorter_side(self) -> int:
        """Return the median of the shorter side in pixels; 224 where no image could be opened."""
        return round(median(map(min, self.sides or [(224, 224)])))

    def count(self, raw: bytes) -> None:
        """Count an image by its label, as a `.cls` or `.json` would hold it: ids, names, or none."""
        self.images += 1
        labels: Sequence[object] = ()
        try:
            labels = parse_labels(raw)
            # Beside ids, names are none: what was counted of them goes.
            if not self.are_ids:
                self.class_counts.clear()
                self.labelled = 0
            self.are_ids = True
        except NoLabel as error:
            if error.are_names and not self.are_ids:
                labels = error.texts
        self.labelled += bool(labels)
        self.most_labels = max(self.most_labels, len(labels))
        self.class_counts.update(map(str, dict.fromkeys(labels)))

    def open_some(self, images: Sequence[tuple[Path, int, int]], most: int = OPENED) -> None:
        """Read the headers of some of many images, (file, offset, bytes or −1 for all), evenly spread."""
        opened = min(most, len(images))
        for number in range(opened):
            path, offset, size = images[(2 * number + 1) * len(images) // (2 * opened)]
            with suppress(OSError), open(path, "rb") as file:
                file.seek(offset)
                self.open(file.read(size))
            if self.bad and not self.first_bad:
                self.first_bad = str(path)

    def open(self, encoded: bytes) -> None:
        """Read the header of an image."""
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
    """What is trained and evaluated on."""

    train: FoundSet
    test: FoundSet | None = None

    @property
    def held_out(self) -> int:
        """Return how many percent of each class to hold out; 0 with a set to evaluate on, or with too few images."""
        if self.test is not None or not self.train.classes:
            return 0
        counts = sorted(self.train.class_counts.values())
        if self.train.images < 10 or counts[len(counts) // 2] < 2:
            return 0
        if self.train.images < 1000:
            return 20
        return max(1, min(10, round(1_000_000 / self.train.images)))

    @property
    def images(self) -> int:
        """Return how many images are trained on."""
        return max(1, round(self.train.images * (100 - self.held_out) / 100))


def survey(place: str, *, unlabelled: bool = False, report: Report) -> Sets:
    """Return the set to train on, and the one to evaluate on, if there is one, of what lies at a path.

    An `unlabelled` set has its labels overlooked, and none to evaluate on. Raises DataError where there are no images,
    or where what there is cannot be read as it stands.
    """
    if "://" in place:
        raise DataError(
            f"{place}: images in a store are not looked at from here\n"
            f"  type python -m jobs index {place} --output indexes/NAME, which reads them once, then name that folder"
        )
    known = known_sets(Path(place))
    if known is not None:
        return known
    train_place, test_place = parts_of(place)
    train = look(train_place, unlabelled, report)
    if train.images == 0:
        others = "".join(f"\n  {note}" for note in train.notes)
        raise DataError(
            f"{train_place}: no images here or below{others}\n  expected {', '.join(IMAGES)}, in folders or tars"
        )
    if train.opened and train.bad.total() == train.opened:
        reason, _ = train.bad.most_common(1)[0]
        raise DataError(
            f"{train_place}: none of the {train.opened} images that were opened can be read: {reason}\n"
            f"  expected images that are whole, of {', '.join(IMAGES)}; bring them back from where they came"
        )
    if len(train.class_counts) == 1:
        raise DataError(
            f"{train_place}: {train.images:,} images of one class, {preview(list(train.class_counts))}: there is "
            "nothing to tell apart\n"
            "  expected two classes or more, as a sub-folder each; --unlabelled trains without labels"
        )
    without_label = train.images - train.labelled
    if train.classes and without_label:
        train.notes.append(f"{without_label:,} images have no label that can be used, and are not trained on")
    if test_place is None or train.classes == 0:
        return Sets(train)
    test = look(test_place, unlabelled, report)
    lacking = sorted(test.class_counts.keys() - train.class_counts.keys())
    # Images of a competition's test set have no labels, or lie in a single folder.
    if len(lacking) == len(test.class_counts):
        train.notes.append(f"{test_place} is not evaluated on: its images have no labels of these classes")
        return Sets(train)
    if lacking and not train.are_ids:
        raise DataError(
            f"{test_place}: {preview(lacking)}: classes that {train_place} lacks\n"
            "  expected the classes that are trained on; take these out"
        )
    return Sets(train, test)


def known_sets(place: Path) -> Sets | None:
    """Return the sets of a known archive, which is counted when it is packed; None where it is none."""
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
    """Return where the images to train on lie, and those to evaluate on, if they are apart."""
    path = Path(place)
    # A folder that holds nothing but another one is passed through.
    while path.is_dir():
        entries = sorted(path.glob("[!.]*"))
        is_wrapper = len(entries) == 1 and entries[0].is_dir() and has_folders(entries[0])
        if not is_wrapper:
            break
        path = entries[0]
    # 1. Parts below: folders, or files that have the words in their names; or the files of a pattern.
    if path.is_dir():
        folders = {}
        for entry in sorted(path.glob("[!.]*/")):
            folders[entry.name.lower()] = str(entry)
        kinds = [folders]
        for suffix in (".tar", ".parquet", ".csv"):
            kinds.append(parts_of_files(sorted(path.glob(f"[!.]*{suffix}"))))
    elif not path.exists():
        kinds = [parts_of_files(sorted(path.parent.glob(path.name)))]
    else:
        kinds = []
    for parts in kinds:
        train, test = train_and_test(parts)
        # A folder that is called train and stands alone may be a class, of trains.
        if train is not None and (test is not None or has_folders(Path(train))):
            return train, test
    # 2. Or what is named is one of two: train.tar beside test.tar, photos/train beside photos/val. Of a pattern that is
    # typed only what it matches is taken.
    if path.exists():
        for word in TRAIN:
            if word not in WORD.findall(path.name.lower()):
                continue
            for other_word in TEST:
                other = path.with_name(path.name.replace(word, other_word))
                if other.exists():
                    return str(path), str(other)
    return str(path), None


def train_and_test(parts: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the parts to train on and to evaluate on, of those that are there by their words; None for none."""
    return first_part(TRAIN, parts, None), first_part(TEST, parts, None)


def one_place(places: Sequence[str]) -> str:
    """Return the one path that stands for several: what a shell has made of photos/* or train-*.tar.

    Raises UsageError.
    """
    if len(places) == 1:
        return places[0]
    paths = sorted(map(Path, places))
    folder = paths[0].parent
    if paths == sorted(folder.glob("[!.]*")):
        return str(folder)
    pattern = pattern_of(paths)
    if pattern is None:
        whole = " ".join(places)
        if Path(whole).exists():
            raise UsageError(f"{len(places)} words, and {whole!r} is one folder\n  type it in quotes")
        raise UsageError(
            f"{len(places)} paths, {preview(places)}: no folder and no pattern holds these alone\n"
            f"  expected one set of images: a folder, or a pattern in quotes, as '{folder}/train-*.tar'"
        )
    return pattern


def pattern_of(files: Sequence[Path]) -> str | None:
    """Return a pattern that matches these files of a folder alone: cifar10-train-*.tar; None where there is none."""
    folder = files[0].parent
    beginning = os.path.commonprefix(list(map(os.path.basename, files)))  # noqa: RUF071  # by letters
    # Words stay whole, where that matches no more: cifar10-* of cifar10-train and cifar10-test.
    for prefix in (re.sub(r"[^\W_]+$", "", beginning), beginning):
        pattern = folder / f"{prefix}*{files[0].suffix}"
        if sorted(folder.glob(pattern.name)) == sorted(files):
            return str(pattern)
    return None


def has_folders(folder: Path) -> bool:
    """Return whether there are folders in a folder."""
    return any(folder.glob("[!.]*/"))


def parts_of_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the path, or the pattern, of those files that have a part's word in their names; raises DataError.

    All files have to be of a part, where one is called train; tables may lie beside others.
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
    if train is not None and test is not None and rest and files[0].suffix != ".csv":
        pattern = pattern_of(of_parts) or train
        raise DataError(
            f"{files[0].parent}: {preview(sorted(file.name for file in rest))} are of no part, beside others called "
            f"train\n  expected train or test in all names; to take those alone type python -m jobs new '{pattern}'"
        )
    return parts


# ------------------------------------------------------------------------------------------------ kinds


def look(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Return the set that lies at a path; raises DataError where nothing there can be read as it stands."""
    path = Path(place)
    if path.is_dir():
        if len(list(path.glob(f"[!.]*{SUFFIX}"))) == 1 and not unlabelled:
            return look_at_index(path, report)
        for suffix in (".tar", ".parquet"):
            if any(path.glob(f"[!.]*{suffix}")):
                return LOOKS[suffix](place, unlabelled, report)
        tables = list(filter(is_table, sorted(path.glob("[!.]*.csv"))))
        if len(tables) == 1:
            return look_at_table(str(tables[0]), unlabelled, report)
        for suffix in COMPRESSED:
            for file in path.glob(f"[!.]*{suffix}"):
                raise DataError(
                    f"{file}: a compressed tar, whose samples cannot be read from the middle\n"
                    f"  type gzip -d {file} (or zstd -d), and the same command again"
                )
        return look_at_folder(path, unlabelled, report)
    if path.suffix in LOOKS:
        return LOOKS[path.suffix](place, unlabelled, report)
    way_out = "expected a folder, .tar, .parquet or .csv"
    if place.endswith((".zip", *COMPRESSED)):
        way_out = "unpack it, and name the folder"
    raise DataError(f"{place}: no set of images that can be read as it is\n  {way_out}")


def look_at_folder(root: Path, unlabelled: bool, report: Report) -> FoundSet:
    """Look at sub-folders of images, one a class; or at images without labels."""
    image_set = FoundSet("folder", str(root))
    skipped: Counter[str] = Counter()
    paths: list[Path] = []
    empty = []
    for folder in sorted(root.glob("[!.]*/")):
        refuse_loop(folder)
        below = images_below(folder, skipped)
        if not below:
            empty.append(folder.name)
            continue
        paths += below
        image_set.class_counts[folder.name] = len(below)
        report(len(paths))
    here = [path for path in sorted(root.glob("[!.]*")) if path.is_file() and is_image(path)]
    if unlabelled or not image_set.class_counts:
        paths += here
        image_set.class_counts.clear()
    else:
        image_set.most_labels = 1
        image_set.labelled = len(paths)
        if empty:
            raise DataError(
                f"{root}: no images in {preview(empty)}\n"
                f"  expected {', '.join(IMAGES)} in every class; remove these folders or fill them"
            )
        if here:
            image_set.notes.append(
                f"{len(here):,} images lie in no class's folder, and are left out, first {here[0].name}"
            )
    image_set.images = len(paths)
    alike = len(image_set.class_counts) - len(set(map(str.lower, image_set.class_counts)))
    if alike:
        image_set.notes.append(f"{alike} classes differ from another one by upper and lower case alone")
    hidden = skipped.pop(HIDDEN, 0)
    if hidden:
        image_set.notes.append(
            f"{hidden:,} files are hidden, and are left out: their names, or their folder's, begin with ."
        )
    # Without a sub-folder of images, what lies here is what a person may have meant.
    if not paths:
        skipped.update(file.suffix or file.name for file in root.glob("[!.]*") if file.is_file())
    if skipped:
        kinds = ", ".join(f"{count:,} × {printable(kind)}" for kind, count in skipped.most_common(MOST_NAMED))
        image_set.notes.append(f"{kinds}: no {', '.join(IMAGES)}, left out")
    image_set.open_some(list(zip(paths, repeat(0), repeat(-1), strict=False)))
    return image_set


def is_table(path: Path) -> bool:
    """Return whether a CSV begins with a column of paths."""
    with suppress(OSError, ValueError), open(path, newline="", encoding="utf-8-sig") as file:
        return first_of(TABLE_PATH_COLUMNS, next(csv.reader(file), [])) is not None
    return False


def look_at_table(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Look at a table of paths and labels."""
    path = Path(place)
    image_set = FoundSet("table", place)
    # Without a column of labels the images have none.
    try:
        names, labels = table_columns(path, unlabelled=unlabelled)
    except DataError:
        names, labels = table_columns(path, unlabelled=True)
    classes_in(path, labels)  # raises DataError where there are ids and names
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
            f"{path}: {preview(missing)}: no such files\n"
            f"  expected paths relative to {path.parent}, or whole ones; move the table, or write them so"
        )
    repeated = len(names) - len(set(names))
    if repeated:
        image_set.notes.append(
            f"{repeated:,} rows name an image of another row: it counts twice, and may be held out once"
        )
    image_set.open_some(images)
    return image_set


def look_at_parquet(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Look at parquet, of images or of their paths."""
    from pyarrow import parquet

    files = files_of(place, "*.parquet")
    with naming_parquet(files[0]):
        columns = parquet.read_schema(files[0]).names
    if "path" in columns and first_of(IMAGE_COLUMNS, columns) is None:
        return look_at_table(str(files[0]), unlabelled, report)
    image_set = FoundSet("parquet", place)
    names: Sequence[str] = ()
    for path in files:
        file = ImageParquet(path, unlabelled=True)
        names = names or file.names
        if not file.label_column or unlabelled:
            with naming_parquet(path):
                image_set.images += parquet.read_metadata(path).num_rows
        else:
            for row in file.rows([file.label_column]):
                image_set.count(label_text(row[file.label_column]))
                report(image_set.images)
        for _, row in zip(range(OPENED // len(files) + 1), file.rows([file.image_column]), strict=False):
            image = row[file.image_column]
            if isinstance(image, dict):
                image = image.get("bytes")
            image_set.open(image or b"")
    if image_set.are_ids and names:
        count_of_id = image_set.class_counts
        image_set.class_counts = Counter()
        for label, name in enumerate(names):
            image_set.class_counts[name] = count_of_id[str(label)]
        image_set.are_ids = False
    return image_set


def look_at_tars(place: str, unlabelled: bool, report: Report) -> FoundSet:
    """Look at WebDataset tars, which are indexed where they lie."""
    image_set = FoundSet("shards", place)
    files = files_of(place, "*.tar")
    for path in files:
        images = []
        with open(path, "rb") as file, mapped(file) as tar:
            for row in walk(tar, str(path)).rows:
                if row.image_size == 0:
                    continue
                images.append((path, row.image, row.image_size))
                label = b""
                if not unlabelled:
                    label = bytes(row.label_in(tar))
                image_set.count(label)
                report(image_set.images)
        image_set.open_some(images, OPENED // len(files) + 1)
    return image_set


def look_at_index(folder: Path, report: Report) -> FoundSet:
    """Look at a set that has been packed or indexed."""
    index = load_index(folder)
    image_set = FoundSet("index", str(folder), index.samples, are_ids=not index.names)
    for label, count in enumerate(index.class_counts):
        name = str(label)
        if index.names:
            name = index.names[label]
        image_set.class_counts[name] = count
    if index.classes:
        image_set.most_labels = 1
        image_set.labelled = index.samples
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


# What looks at a set of files, by what these files are called.
LOOKS = {".tar": look_at_tars, ".parquet": look_at_parquet, ".csv": look_at_table}
