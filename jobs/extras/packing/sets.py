"""The data sets of a pack stage: their image sources and class numbering.

All data sets of a stage share one class numbering, so that a class has the same id in train and test:
1. The data set `train` (or the first data set, if there is no `train`) is numbered like its source, or according to its
   `names` or `classes_of`.
2. Other data sets whose sources have class names get the same ids for the same names; unknown names are an error.
3. A data set with its own `names` or `classes_of` uses those instead. Sources without class names keep their ids.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from data.checks import at_least, redacted
from data.errors import DataError
from data.extras.shards.subset import Rule, check_seed
from data.extras.sources.folders import class_folders, folder_classes, images_below, unlabelled_folder
from data.extras.sources.numbering import Numbering, check_unambiguous, number
from data.extras.sources.samples import DIGITS, Archive, Sample, digits, numbered
from data.extras.sources.walk import class_folders_in, matching
from data.index.document import load_index
from data.index.names import Names, ids_of
from data.optional import load_optional
from pipeline.config import Tags, require, tags

SUBSET_FIELDS = ("only", "but", "part", "shots", "seed")
USER_SOURCES = (
    "folder",
    "table",
    "tars",
    "shards",
    "parquet",
    "digits",
    "subset",
)  # all other sources are published data sets
COUNTED_SAMPLES = "data.extras.known_sets.archive:samples_of_archive"
KNOWN_SETS = "data.extras.known_sets.known:known_archive"
SOURCES = "data.extras.sources."  # readers of sources other than class folders and known data sets
CLASS_LISTS = "data.extras.class_lists:read_class_list"  # reads `names`
VTAB_TASKS = "data.extras.known_sets.vtab_prepared:VTAB"
FROM_URLS = ("shards", "parquet")  # sources that can be URLs; parquet only on the Hub
UNLABELLED = ("folder", "table", "tars", "shards", "parquet")  # sources that can be used without labels


@dataclass(frozen=True)
class SetConfig:
    """A data set to pack, and the source of its images."""

    source: Literal[
        "folder",  # one subfolder per class
        "table",  # CSV or parquet with columns path and label
        "tars",  # a folder of WebDataset tars, compressed or not, including those of img2dataset
        "shards",  # the same, not compressed: indexed in place, not packed again; or a URL of tars
        "parquet",  # Hugging Face image parquet: a file, or a folder of files, or hf://datasets/OWNER/NAME/…
        "imagenet-train",  # ILSVRC2012_img_train.tar, or a folder of class tars or class folders
        "imagenet-validation",  # ILSVRC2012_img_val.tar or a folder of images, with wnids or real; or class folders
        "digits",  # UCI's handwritten digits, included in Patchline: no path
        "subset",  # some samples of another data set (an index, or "@stage/set"); not packed again (docs/subsets.md)
        "imagenet-21k",  # winter21_whole.tar.gz, or a folder of class tars or class folders
        "imagenet-21k-fall11",  # fall11_whole.tar, or a folder as above
        "cifar10",  # cifar-10-binary.tar.gz, or its folder
        "cifar100",  # cifar-100-binary.tar.gz, or its folder
        "pets",  # folder of images.tar.gz and annotations.tar.gz
        "flowers102",  # folder of 102flowers.tgz, imagelabels.mat and setid.mat
        "objectnet",  # folder objectnet-1.0
        "vtab",  # a task of VTAB-1k, from the folder prepared by TensorFlow Datasets (docs/vtab.md)
    ] = "folder"
    path: str | None = None  # file or folder of the source, or tars as a/train-*.tar; not used for digits
    root: str | None = None  # table: base folder of its relative paths; None: the table's folder
    wnids: str | None = None  # imagenet-validation: the devkit, or a file with one wnid per line; imagenet-21k: a file
    real: str | None = None  # imagenet-validation: real.json of Beyer et al. 2020 with all labels of each image
    # digits and known data sets; splits with numbers exist only in vtab
    split: Literal["train", "validation", "trainval", "test", "train800", "val200", "train800val200"] = "train"
    task: str | None = None  # vtab: one of its 19 tasks
    unlabelled: bool = False  # ignore labels; for training with objective: masked
    keep: list[int | str] | None = None  # classes to keep, by id or name; ids do not change
    only: str | None = None  # subset: file of the samples to include
    but: str | None = None  # subset: file of the samples to exclude, or a leaks.json
    part: str | None = None  # subset: first:stop in samples or percent, such as ":98%"; with a seed, drawn per class
    shots: int | None = None  # subset: number of samples per class, drawn with the seed, as in the few-shot probe
    seed: int | None = None  # subset: seed of shots or part
    names: str | None = None  # file of class names in the order of ids: one per line, or .json
    classes_of: str | None = None  # use the class numbering of this data set: an index, its folder, or "@stage/set"
    rename: dict[str, str] = field(default_factory=dict)  # class name in the source → name in the numbering
    image_size: int = 32  # digits: pixels
    classes: int | None = None  # number of classes (labels must be smaller); None: taken from the labels
    partial: bool = False  # known data sets except vtab: accept fewer images than were published

    RESUME: ClassVar[Tags] = tags(
        forbid="source path root wnids real split keep only but part shots seed image_size classes names classes_of "
        "rename partial task unlabelled"
    )
    # Fields added later; see `config.tagged`.
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
            require(is_class, f"keep is {self.keep}, expected class ids (0 or greater) or class names")
        require(
            not (self.names and self.classes_of),
            "names and classes_of both determine the class numbering\n  remove one of the two",
        )
        require(
            self.source == "digits" or self.path is not None,
            f"source {self.source} needs a path, but path is not set\n  set path to the folder or file of the images",
        )
        # Only subsets select samples by a rule; they keep the classes of their parent data set.
        if self.source == "subset":
            subset_rule(self)  # raises ConfigError if there is no rule
            renumbers = self.names or self.classes_of or self.rename or self.classes
            require(
                not renumbers,
                "a subset has the class ids and names of its parent data set\n"
                "  remove the keys `names`, `classes_of`, `rename` and `classes`, or pack the parent again with these "
                "keys",
            )
        else:
            subset_fields = []
            for field_name in SUBSET_FIELDS:
                if getattr(self, field_name) is not None:
                    subset_fields.append(field_name)
            require(
                not subset_fields,
                f"{', '.join(subset_fields)} select samples of a subset, but source is {self.source}\n"
                "  expected source: subset",
            )
        if self.source == "shards":
            require(
                not self.rename and not self.keep,
                "source: shards indexes tars without changing them\n"
                "  remove the keys `rename` and `keep`, or pack the tars again with source: tars",
            )
        if self.unlabelled:
            has_classes = any([self.names, self.classes_of, self.rename, self.classes, self.keep])
            require(
                self.source in UNLABELLED and not has_classes,
                f"unlabelled works only with the sources {', '.join(UNLABELLED)}, and without settings of classes\n"
                "  remove the keys `names`, `classes_of`, `rename`, `classes` and `keep`",
            )
        # `task`, `split` and `partial` apply only to data sets whose published samples are known.
        if self.source == "vtab" or self.task is not None:
            tasks = load_optional(VTAB_TASKS, "source: vtab")
            require(
                self.source == "vtab" and self.task in tasks,
                f"task is {self.task} and source is {self.source}\n  expected source: vtab with one of its tasks: "
                + ", ".join(tasks),
            )
        require(not (self.wnids and self.real), "wnids and real both determine the labels\n  remove one of the two")
        known = known_set(self)
        splits: tuple[str, ...] = ("train", "test")
        if known is not None:
            splits = tuple(known.published)
        require(
            self.split in splits,
            f"split is {self.split}, but source {self.source} has only the splits {', '.join(splits)}",
        )
        require(
            not self.partial or known is not None,
            f"`partial` applies only to known data sets, but source is {self.source}\n  remove the key `partial`",
        )
        require(
            not (self.partial and self.source == "vtab"),
            "`partial` is not supported with source: vtab, whose tasks select images by their position in the full "
            "data set\n"
            "  remove the key `partial`, and use the full data set prepared by TensorFlow Datasets",
        )


def subset_rule(cfg: SetConfig) -> Rule:
    """Return the rule that selects a subset's samples. Raises ConfigError if fields are missing or conflicting."""
    return Rule(tuple(cfg.keep or ()), cfg.only, cfg.but, cfg.part, cfg.shots, cfg.seed)


def known_set(cfg: SetConfig) -> Archive | None:
    """Return the published data set named by a source; None for the user's own images.

    Raises DataError if the extra with the published data sets is missing, or if a table that it needs is invalid.
    """
    if cfg.source in USER_SOURCES:
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
    """Return a class numbering per data set, in which a class has the same id everywhere; log renumbered data sets.

    The result excludes unlabelled data sets, and subsets, which keep the numbering of their parent. Raises DataError if
    a data set has classes missing from its numbering (see `numbering_of`).
    """
    packed_sets = {}
    for name, cfg in sets.items():
        if cfg.source != "subset" and not cfg.unlabelled:
            packed_sets[name] = cfg
    if not packed_sets:
        return {}
    # All data sets use the numbering of `train`, or of the first one if there is no `train`.
    giver = next(iter(packed_sets))
    if "train" in packed_sets:
        giver = "train"
    first = numbering_of(packed_sets[giver], giver)
    numberings = {}
    for name, cfg in packed_sets.items():
        if name == giver:
            numberings[name] = first
            continue
        numberings[name] = numbering_of(cfg, name, first, f"the data set {giver}")
        follows = not cfg.names and not cfg.classes_of
        changed = any(label != own for own, label in (numberings[name].ids or {}).items())
        if follows and changed:
            log(f"{name}: using the class numbering of {giver}")
    return numberings


# -------------------------------------------------------------------------------------------------- samples


def source_names(cfg: SetConfig) -> Names:
    """Return the class names of a source in the order of its class ids; () if the source has no class names.

    Raises DataError if the source does not exist.
    """
    if cfg.source == "digits":
        return DIGITS
    check_paths(cfg)
    assert cfg.path is not None, "SetConfig requires a path for all other sources"
    if cfg.source == "table":
        names: Names = reader_of(cfg, "tables:table_classes")(cfg.path)
        return names
    # Indexing does not change labels, and the class names of shards are known only afterwards (`Pack.run`).
    if cfg.source == "shards":
        return ()
    if cfg.source == "tars":
        # With a class list, text labels refer to its names.
        names = reader_of(cfg, "tars:tars_classes")(cfg.path, with_labels=not (cfg.names or cfg.classes_of))
        return names
    known = known_set(cfg)
    if known is not None:
        return known.classes(Path(cfg.path))
    if cfg.source == "folder":
        return folder_classes(cfg.path)
    names = reader_of(cfg, "tables:parquet_classes")(cfg.path)
    return names


def reader_of(cfg: SetConfig, function: str) -> Callable[..., Any]:
    """Load the function that reads a source. Raises DataError if its extra is not installed."""
    reader: Callable[..., Any] = load_optional(SOURCES + function, f"source: {cfg.source}")
    return reader


def numbering_of(cfg: SetConfig, name: str, first: Numbering | None = None, giver: str = "") -> Numbering:
    """Return a data set's class numbering: by `names`, by `classes_of`, like the `first` data set, or like its source.

    `name` is the name of this data set, and `giver` the name of the first. If classes are missing from the numbering,
    raises DataError, which lists them.
    """
    own = source_names(cfg)
    target: Names = ()
    if cfg.names:
        giver = cfg.names
        target = load_optional(CLASS_LISTS, f"{name}.names")(cfg.names)
        if cfg.source == "tars":
            check_unambiguous(target, cfg.names)
    elif cfg.classes_of:
        giver = cfg.classes_of
        target = load_index(cfg.classes_of).names
        if not target:
            raise DataError(
                f"{name}.classes_of: {cfg.classes_of} has no class names\n"
                "  expected a data set with class names; pack or index it again with --names FILE"
            )
    elif own and first is not None:
        target = first.names
    # Tars define no numbering: their text labels are renamed when they are read (`samples_of`).
    rename = cfg.rename
    if cfg.source == "tars" and not own:
        rename = {}
    return number(own, target, rename=rename, keep=cfg.keep, name=name, target_name=giver)


def samples_of(cfg: SetConfig, numbering: Numbering) -> Iterator[Sample]:
    """Return an iterator over a data set's samples with class ids as labels.

    Raises DataError if the source does not exist.
    """
    if cfg.source == "digits":
        return numbered(digits(train=cfg.split == "train", image_size=cfg.image_size), numbering)
    check_paths(cfg)
    assert cfg.path is not None, "SetConfig requires a path for all other sources"
    known = known_set(cfg)
    if cfg.unlabelled and cfg.source == "folder":
        samples = unlabelled_folder(cfg.path)
    elif cfg.source == "table":
        samples = reader_of(cfg, "tables:path_table")(cfg.path, cfg.root, unlabelled=cfg.unlabelled)
    elif cfg.source == "tars":
        ids = ids_of(source_names(cfg) or numbering.names)
        # Map text labels to the ids of their new class names.
        for text, renamed in cfg.rename.items():
            if renamed in ids:
                ids[text] = ids[renamed]
        samples = reader_of(cfg, "tars:tars")(cfg.path, ids, unlabelled=cfg.unlabelled)
    elif known is not None:
        label: str = cfg.source
        # imagenet-validation has only one split, so its name is omitted.
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
    """Raise DataError if any of a source's paths does not exist."""
    # Sources are generators, so a wrong path would be noticed only at the first sample.
    for message in missing_paths(cfg).values():
        raise DataError(message)


def missing_paths(cfg: SetConfig) -> dict[str, str]:
    """Return error messages for missing files and folders, by the field that names them."""
    # A subset's path is an input of the stage, possibly "@stage/set", and is checked like other inputs.
    if cfg.source in ("digits", "subset"):
        return {}
    messages = {}
    for field_name in ("path", "root", "wnids", "real", "names"):
        path = getattr(cfg, field_name)
        if path is not None and "://" in path:
            # The store reports whether the files exist.
            if field_name != "path" or cfg.source not in FROM_URLS:
                messages[field_name] = (
                    f"source {cfg.source}: {field_name} is {redacted(path)}, expected a path on this machine\n"
                    "  URLs work with source: shards (tars) and source: parquet (image parquet at hf://datasets/…)"
                )
            continue
        # A path may be a pattern, such as a/train-*.tar.
        if path is not None and not all(file.exists() for file in matching(path)):
            messages[field_name] = (
                f"source {cfg.source}: no file or folder at {path}\n  relative paths are resolved against {Path.cwd()}"
            )
    return messages


def check_apart(cfg: SetConfig, folder: Path) -> None:
    """Raise DataError if the folder for the new shards is inside their source."""
    if cfg.source == "digits" or cfg.path is None or "://" in cfg.path:
        return
    source = Path(cfg.path).resolve()
    target = folder.resolve()
    is_inside = source.is_dir() and source in target.parents
    # If the source is a pattern of tars, new shards could match the pattern or replace the tars.
    holds_tars = cfg.source == "tars" and not source.is_dir() and target == source.parent
    if target == source or is_inside or holds_tars:
        raise DataError(
            f"{folder} is inside the source folder {cfg.path}, so the shards would become part of the source\n"
            f"  use another folder, for example {quote(str(source.parent / f'{source.stem}-shards'))}"
        )


def expected_samples(cfg: SetConfig) -> int | None:
    """Estimate a source's number of samples for the progress line; None if counting would be slow."""
    path = Path(cfg.path or "")
    if cfg.source == "folder":
        folders = [path] if cfg.unlabelled else [path / name for name in class_folders_in(path)]
        return sum(len(images_below(folder, Counter())) for folder in folders)
    if cfg.source == "table" and path.suffix == ".csv" and path.exists():
        with open(path, "rb") as file:
            # Quoted fields may contain line breaks, but an estimate is enough for a progress line.
            lines = sum(1 for _ in file)
        return lines - 1  # the header
    if cfg.source == "tars":
        # Without an index, counting the samples would require reading all tars.
        index_path = path / f"{path.name}.index.json"
        if not index_path.exists():
            return None
        return load_index(index_path).samples
    known = known_set(cfg)
    if known is None:
        return None
    return known.published[cfg.split].samples
