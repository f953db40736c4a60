"""The sets of a pack stage: where the images of each come from, and how its classes are numbered.

Classes are numbered once for all sets of a stage, so that a class has one id in train and in test:
1. the set `train`, or else the first, numbers its classes as its source does, or as `names` or `classes_of` say;
2. every other set whose source knows its class names takes this numbering, by name; what it lacks is refused;
3. a set with `names` or `classes_of` of its own follows these instead. Sources that have no names keep their ids.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from data.checks import at_least
from data.errors import DataError
from data.index.document import load_index
from data.index.names import Names, ids_of
from data.optional import load_optional
from data.shards.subset import Rule, check_seed
from data.sources.folders import class_folders, folder_classes, unlabelled_folder
from data.sources.numbering import Numbering, check_unambiguous, number, read_class_list
from data.sources.samples import DIGITS, Archive, Sample, digits, numbered
from pipeline.config import Tags, require, tags

SUBSET_FIELDS = ("only", "but", "part", "shots", "seed")
OWN = ("folder", "table", "tars", "shards", "parquet", "digits", "subset")  # all other sources are published data sets
COUNTED_SAMPLES = "data.extras.known_sets.archive:samples_of_archive"
KNOWN_SETS = "data.extras.known_sets.known:known_archive"
SOURCES = "data.extras.sources."  # of images that are neither in folders of classes nor in a known set
VTAB_TASKS = "data.extras.known_sets.vtab_prepared:VTAB"
UNLABELLED = ("folder", "table", "tars", "shards", "parquet")  # sources of images of a user's own


@dataclass(frozen=True)
class SetConfig:
    """One set of shards and where its images come from."""

    source: Literal[
        "folder",  # one sub-folder a class
        "table",  # CSV or parquet with columns path and label
        "tars",  # a folder of WebDataset tars, compressed or not, img2dataset's too
        "shards",  # the same, not compressed: indexed where they lie, nothing is packed
        "parquet",  # Hugging Face image parquet: a file, or a folder of them
        "imagenet-train",  # ILSVRC2012_img_train.tar, or a folder of class tars or class folders
        "imagenet-validation",  # ILSVRC2012_img_val.tar or a folder of images, with wnids or real; or class folders
        "digits",  # UCI's handwritten digits, which Patchline brings along: no path
        "subset",  # of another set's index, or "@stage/set": some of its samples, nothing is packed (docs/subsets.md)
        "imagenet-21k",  # winter21_whole.tar.gz, or a folder of class tars or class folders
        "imagenet-21k-fall11",  # fall11_whole.tar, or a folder as above
        "cifar10",  # cifar-10-binary.tar.gz, or its folder
        "cifar100",  # cifar-100-binary.tar.gz, or its folder
        "pets",  # folder of images.tar.gz and annotations.tar.gz
        "flowers102",  # folder of 102flowers.tgz, imagelabels.mat and setid.mat
        "objectnet",  # folder objectnet-1.0
        "vtab",  # a task of VTAB-1k, from the folder that TensorFlow Datasets has prepared (docs/vtab.md)
    ] = "folder"
    path: str | None = None  # the file or folder that the source reads, or tars as a/train-*.tar; digits need none
    root: str | None = None  # table: what its paths are relative to; None: its own folder
    wnids: str | None = None  # imagenet-validation: the devkit, or a file of one wnid a line; imagenet-21k: the file
    real: str | None = None  # imagenet-validation: real.json of Beyer et al. 2020, all labels of each image
    # of digits and the known data sets; those with numbers are vtab's
    split: Literal["train", "validation", "trainval", "test", "train800", "val200", "train800val200"] = "train"
    task: str | None = None  # vtab: which of its 19
    unlabelled: bool = False  # of images of your own: labels are not looked at, for objective: masked
    keep: list[int | str] | None = None  # classes to keep, by id or by name; ids stay what they are
    only: str | None = None  # subset: file of the samples that it has
    but: str | None = None  # subset: file of samples that it does without; or leaks.json
    part: str | None = None  # subset: first:stop in samples or percent, ":98%"; with a seed, so much of each class
    shots: int | None = None  # subset: samples of each class, drawn by the seed as the few-shot probe draws them
    seed: int | None = None  # subset: of shots, or of part
    names: str | None = None  # file of class names in the order of ids: one a line, or .json; the set is numbered so
    classes_of: str | None = None  # index, its folder, or "@stage/set", whose numbering of classes the set takes
    rename: dict[str, str] = field(default_factory=dict)  # class name of the source → name in the numbering it takes
    image_size: int = 32  # digits: pixels
    classes: int | None = None  # labels must be below; None: as many as are found
    partial: bool = False  # known data sets but vtab: a part on purpose; false: has to hold what is published

    RESUME: ClassVar[Tags] = tags(
        forbid="source path root wnids real split keep only but part shots seed image_size classes names classes_of "
        "rename partial task unlabelled"
    )
    # As `config.tagged` means it.
    LATER: ClassVar[tuple[str, ...]] = (
        "names",
        "classes_of",
        "rename",
        "only",
        "but",
        "part",
        "shots",
        "seed",
        "partial",
        "task",
        "unlabelled",
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "image_size classes shots")
        check_seed(self.seed)
        for entry in self.keep or []:
            is_class = isinstance(entry, str) or entry >= 0
            require(is_class, f"keep is {self.keep}, expected classes from 0 on, or names")
        require(not (self.names and self.classes_of), "names and classes_of are two numberings: give one of them")
        require(
            self.source == "digits" or self.path is not None,
            f"source {self.source} needs a path\n  expected path: the folder or file of the images",
        )
        # A subset is chosen by a rule, and has the classes of its set; other sources have no such rule.
        if self.source == "subset":
            subset_rule(self)  # raises ConfigError where it chooses by nothing
            renumbers = self.names or self.classes_of or self.rename or self.classes
            require(
                not renumbers,
                "a subset has the class ids and names of its set\n"
                "  leave out names, classes_of, rename and classes, or pack the set again with them",
            )
        else:
            chooses = []
            for field_name in SUBSET_FIELDS:
                if getattr(self, field_name) is not None:
                    chooses.append(field_name)
            require(not chooses, f"{', '.join(chooses)}: of a subset alone\n  expected source: subset")
        if self.source == "shards":
            require(
                not self.rename and not self.keep,
                "source shards reads tars as they are\n  leave out rename and keep, or pack them anew: source: tars",
            )
        if self.unlabelled:
            has_classes = any([self.names, self.classes_of, self.rename, self.classes, self.keep])
            require(
                self.source in UNLABELLED and not has_classes,
                f"unlabelled is of the sources {', '.join(UNLABELLED)}, which then have no classes\n"
                "  leave out names, classes_of, rename, classes and keep",
            )
        # Tasks, splits and parts are of the sources that know which samples were published.
        if self.source == "vtab" or self.task is not None:
            tasks = load_optional(VTAB_TASKS, "source: vtab")
            require(
                self.source == "vtab" and self.task in tasks,
                f"task is {self.task}, expected with source vtab, and there alone, one of: {', '.join(tasks)}",
            )
        require(not (self.wnids and self.real), "wnids and real are two kinds of labels: give one of them")
        known = known_set(self)
        splits: tuple[str, ...] = ("train", "test")
        if known is not None:
            splits = tuple(known.published)
        require(self.split in splits, f"source {self.source} has the splits {', '.join(splits)}; split is {self.split}")
        require(not self.partial or known is not None, f"partial is of known data sets; {self.source} is none of them")
        require(
            not (self.partial and self.source == "vtab"),
            "partial with source vtab: the images of a task are chosen by their place in the whole set\n"
            "  leave partial out, and give the whole set as TensorFlow Datasets prepares it",
        )


def subset_rule(cfg: SetConfig) -> Rule:
    """Return which samples a subset has; raises ConfigError where its fields say nothing, or do not fit."""
    return Rule(tuple(cfg.keep or ()), cfg.only, cfg.but, cfg.part, cfg.shots, cfg.seed)


def known_set(cfg: SetConfig) -> Archive | None:
    """Return the published data set that a source names; None for a user's own images. Raises DataError."""
    if cfg.source in OWN:
        return None
    wnids = None
    if cfg.wnids is not None:
        wnids = Path(cfg.wnids)
    real = None
    if cfg.real is not None:
        real = Path(cfg.real)
    known_archive = load_optional(KNOWN_SETS, f"source: {cfg.source}")
    archive: Archive | None = known_archive(cfg.source, wnids, real, cfg.task)
    return archive


# ------------------------------------------------------------------------------------------------ numbering


def numberings_of(sets: Mapping[str, SetConfig], log: Callable[[str], None]) -> dict[str, Numbering]:
    """Return how the classes of each set are numbered, so that a class has one id in all; log which sets follow.

    Subsets are not among them, which have the numbering of their set, and neither are unlabelled sets. Raises DataError
    as `numbering_of`.
    """
    packed_sets = {}
    for name, cfg in sets.items():
        if cfg.source != "subset" and not cfg.unlabelled:
            packed_sets[name] = cfg
    if not packed_sets:
        return {}
    # The others take the numbering of the training set; without one, of the first.
    giver = next(iter(packed_sets))
    if "train" in packed_sets:
        giver = "train"
    first = numbering_of(packed_sets[giver], giver)
    numberings = {}
    for name, cfg in packed_sets.items():
        if name == giver:
            numberings[name] = first
            continue
        numberings[name] = numbering_of(cfg, name, first, f"the set {giver}")
        follows = not cfg.names and not cfg.classes_of
        changed = any(label != own for own, label in (numberings[name].ids or {}).items())
        if follows and changed:
            log(f"{name}: classes are numbered as those of {giver}")
    return numberings


# -------------------------------------------------------------------------------------------------- samples


def source_names(cfg: SetConfig) -> Names:
    """Return the class names that a source itself knows, in the order of its ids; none where it knows none.

    Raises DataError where there is nothing at its path.
    """
    if cfg.source == "digits":
        return DIGITS
    check_paths(cfg)
    assert cfg.path is not None, "every other source has a path: SetConfig sees to it"
    if cfg.source == "table":
        names: Names = reader_of(cfg, "tables:table_classes")(cfg.path)
        return names
    # Labels of shards stay as they are: their names are known when they have been indexed (pack.run).
    if cfg.source == "shards":
        return ()
    if cfg.source == "tars":
        names = reader_of(cfg, "tars:tars_classes")(cfg.path)
        return names
    known = known_set(cfg)
    if known is not None:
        return known.classes(Path(cfg.path))
    if cfg.source == "folder":
        return folder_classes(cfg.path)
    names = reader_of(cfg, "tables:parquet_classes")(cfg.path)
    return names


def reader_of(cfg: SetConfig, function: str) -> Callable[..., Any]:
    """Return a function that reads this kind of source; raises DataError if its extra is not installed."""
    reader: Callable[..., Any] = load_optional(SOURCES + function, f"source: {cfg.source}")
    return reader


def numbering_of(cfg: SetConfig, name: str, first: Numbering | None = None, giver: str = "") -> Numbering:
    """Return how the classes of a set are numbered: as `names` or `classes_of` say, or as a `first` set, or by itself.

    `name` is the set's, `giver` the first one's. Raises DataError naming the classes that the numbering lacks.
    """
    own = source_names(cfg)
    target: Names = ()
    if cfg.names:
        giver = cfg.names
        target = read_class_list(cfg.names)
        if cfg.source == "tars":
            check_unambiguous(target, cfg.names)
    elif cfg.classes_of:
        giver = cfg.classes_of
        target = load_index(cfg.classes_of).names
        if not target:
            raise DataError(
                f"{name}.classes_of: {cfg.classes_of} has no class names\n"
                "  expected the index of a set that was packed or indexed with them; make it again with --names FILE"
            )
    elif own and first is not None:
        target = first.names
    # Labels of tars that are names are renamed as they are read (`samples_of`): tars have no numbering of their own.
    rename = cfg.rename
    if cfg.source == "tars" and not own:
        rename = {}
    return number(own, target, rename=rename, keep=cfg.keep, name=name, giver=giver)


def samples_of(cfg: SetConfig, numbering: Numbering) -> Iterator[Sample]:
    """Return the samples of a set, read one by one, with their classes numbered; raises DataError as `source_names`."""
    if cfg.source == "digits":
        return numbered(digits(train=cfg.split == "train", image_size=cfg.image_size), numbering)
    check_paths(cfg)
    assert cfg.path is not None, "every other source has a path: SetConfig sees to it"
    known = known_set(cfg)
    if cfg.unlabelled and cfg.source == "folder":
        samples = unlabelled_folder(cfg.path)
    elif cfg.source == "table":
        samples = reader_of(cfg, "tables:path_table")(cfg.path, cfg.root, unlabelled=cfg.unlabelled)
    elif cfg.source == "tars":
        ids = ids_of(source_names(cfg) or numbering.names)
        # A text of the tars that the numbering calls otherwise.
        for text, renamed in cfg.rename.items():
            if renamed in ids:
                ids[text] = ids[renamed]
        samples = reader_of(cfg, "tars:tars")(cfg.path, ids, unlabelled=cfg.unlabelled)
    elif known is not None:
        label: str = cfg.source
        # The word for a split says nothing where there is no choice of them.
        if cfg.source != "imagenet-validation":
            label = f"{cfg.task or cfg.source}, {cfg.split}"
        counted_samples = load_optional(COUNTED_SAMPLES, f"source: {cfg.source}")
        samples = counted_samples(known, Path(cfg.path), cfg.split, label, partial=cfg.partial)
    elif cfg.source == "folder":
        samples = class_folders(cfg.path)
    else:
        samples = reader_of(cfg, "tables:image_parquet")(cfg.path, unlabelled=cfg.unlabelled)
    return numbered(samples, numbering)


def check_paths(cfg: SetConfig) -> None:
    """Raise DataError if there is nothing at one of a source's paths."""
    # The sources are generators, which open nothing before the first sample: a wrong path is better named here.
    for message in missing_paths(cfg).values():
        raise DataError(message)


def missing_paths(cfg: SetConfig) -> dict[str, str]:
    """Return the fields that name a file or folder of a source at which there is nothing, each with a message."""
    # The path of a subset may be "@stage/set": a campaign checks it as any other input.
    if cfg.source in ("digits", "subset"):
        return {}
    messages = {}
    for field_name in ("path", "root", "wnids", "real", "names"):
        path = getattr(cfg, field_name)
        if path is None or Path(path).exists():
            continue
        # The last part of a path may stand for several files: a/train-*.tar.
        place = Path(path)
        if "*" not in place.name or not any(place.parent.glob(place.name)):
            messages[field_name] = (
                f"source {cfg.source}: there is nothing at {path}\n  expected images: paths begin at {Path.cwd()}"
            )
    return messages


def check_apart(cfg: SetConfig, folder: Path) -> None:
    """Raise DataError where the folder that shards are to be written to lies in the source that they are made of."""
    if cfg.source == "digits" or cfg.path is None:
        return
    source = Path(cfg.path).resolve()
    target = folder.resolve()
    is_inside = source.is_dir() and source in target.parents
    # Tars may be named by a pattern: those that are written would lie among them, or replace them.
    holds_tars = cfg.source == "tars" and not source.is_dir() and target == source.parent
    if target == source or is_inside or holds_tars:
        raise DataError(
            f"{folder} lies in the source that it would be packed from, {cfg.path}\n"
            "  expected a folder apart from it: the shards would be taken for images, or tars, of the source\n"
            f"  type another one, for example {quote(str(source.parent / f'{source.stem}-shards'))}"
        )


def expected_samples(cfg: SetConfig) -> int | None:
    """Estimate how many samples a source will give, for the progress line; None where that takes long to know."""
    path = Path(cfg.path or "")
    if cfg.source == "folder":
        return sum(file.is_file() for file in path.rglob("*.*"))
    if cfg.source == "table" and path.suffix == ".csv" and path.exists():
        with open(path, "rb") as file:
            # A field in quotes may hold a line break; for a progress line the count is near enough.
            lines = sum(1 for _ in file)
        return lines - 1  # the header
    if cfg.source == "tars":
        # Tars without an index would have to be read whole to be counted.
        index_path = path / f"{path.name}.index.json"
        if not index_path.exists():
            return None
        return load_index(index_path).samples
    known = known_set(cfg)
    if known is None:
        return None
    return known.published[cfg.split].samples
