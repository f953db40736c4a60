"""The sets of a pack stage: where the images of each come from, and how its classes are numbered.

Classes are numbered once for all sets of a stage, so that a class has one id in train and in test:
1. the set `train`, or else the first, numbers its classes as its source does, or as `names` or `classes_of` say;
2. every other set whose source knows its class names takes this numbering, by name; what it lacks is refused;
3. a set with `names` or `classes_of` of its own follows these instead. Sources that have no names keep their ids.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from data.archives.cifar import cifar, cifar_classes
from data.archives.sources import KNOWN, known_classes, known_published, known_samples, splits_of
from data.archives.tars import rows
from data.checks import at_least
from data.errors import DataError
from data.shards.index import load_index
from data.shards.names import Names, Numbering, check_unmistakable, ids_of, number, read_class_list
from data.shards.sources import DIGITS, Sample, class_folders, digits, folder_classes, numbered, tars, tars_classes
from data.shards.tables import image_parquet, parquet_classes, path_table, table_classes
from pipeline.config import Tags, require, tags

# Sources that need no more than their path: their samples, and the names of their classes.
SOURCES: dict[str, tuple[Callable[[str], Iterator[Sample]], Callable[[str], Names]]] = {
    "folder": (class_folders, folder_classes),
    "parquet": (image_parquet, parquet_classes),
}
# CIFAR's binary version has fixed file names and fixed records (cs.toronto.edu/~kriz/cifar.html).
CIFAR_FILES = {"train": ("data_batch_*.bin", "train.bin"), "test": ("test_batch.bin", "test.bin")}
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class SetConfig:
    """One set of shards and where its images come from."""

    source: Literal[
        "folder",  # one sub-folder a class
        "table",  # CSV or parquet with columns path and label
        "tars",  # a folder of WebDataset tars, compressed or not, img2dataset's too
        "parquet",  # Hugging Face image parquet: a file, or a folder of them
        "imagenet-train",  # ILSVRC2012_img_train.tar, or a folder of class tars or class folders
        "imagenet-validation",  # ILSVRC2012_img_val.tar or a folder of images, with wnids or real; or class folders
        "cifar",  # a folder of the binary version, whatever it holds
        "digits",  # scikit-learn's, which need no path
        "imagenet-21k",  # winter21_whole.tar.gz, or a folder of class tars or class folders
        "imagenet-21k-fall11",  # fall11_whole.tar, or a folder as above
        "cifar10",  # cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or the folder of either
        "cifar100",  # cifar-100-python.tar.gz or cifar-100-binary.tar.gz, or the folder of either
        "pets",  # folder of images.tar.gz and annotations.tar.gz
        "flowers102",  # folder of 102flowers.tgz, imagelabels.mat and setid.mat
        "objectnet",  # folder objectnet-1.0
    ] = "folder"
    path: str | None = None  # the file or folder that the source reads; digits need none
    root: str | None = None  # table: what its paths are relative to; None: its own folder
    wnids: str | None = None  # imagenet-validation: the devkit, or a file of one wnid a line; imagenet-21k: the file
    real: str | None = None  # imagenet-validation: real.json of Beyer et al. 2020, all labels of each image
    split: Literal["train", "validation", "trainval", "test"] = "train"  # of cifar, digits and the known data sets
    keep: list[int | str] | None = None  # classes to keep, by id or by name; ids stay what they are
    names: str | None = None  # file of class names in the order of ids: one a line, or .json; the set is numbered so
    classes_of: str | None = None  # index, its folder, or "@stage/set", whose numbering of classes the set takes
    rename: dict[str, str] = field(default_factory=dict)  # class name of the source → name in the numbering it takes
    image_size: int = 32  # digits: pixels
    classes: int | None = None  # labels must be below; None: as many as are found
    partial: bool = False  # known data sets: a part on purpose; false: refused unless it holds what is published

    RESUME: ClassVar[Tags] = tags(
        forbid="source path root wnids real split keep image_size classes names classes_of rename partial"
    )
    LATER: ClassVar[tuple[str, ...]] = ("names", "classes_of", "rename", "partial")  # as `config.tagged` means it

    def __post_init__(self) -> None:
        at_least(self, 1, "image_size classes")
        lowest = min((entry for entry in self.keep or [] if isinstance(entry, int)), default=0)
        require(lowest >= 0, f"keep is {self.keep}, expected classes from 0 on, or names")
        require(not (self.names and self.classes_of), "names and classes_of are two numberings: give one of them")
        require(self.source == "digits" or self.path is not None, f"source {self.source} needs a path")
        require(not (self.wnids and self.real), "wnids and real are two kinds of labels: give one of them")
        require(
            not self.partial or self.source in KNOWN, f"partial is of known data sets; source {self.source} is none"
        )
        splits = splits_of(self.source) if self.source in KNOWN else ("train", "test")
        is_split = not splits or self.split in splits
        require(is_split, f"source {self.source} has the splits {', '.join(splits)}; split is {self.split}")


# ------------------------------------------------------------------------------------------------ numbering


def numberings_of(sets: Mapping[str, SetConfig], say: Callable[[str], None]) -> dict[str, Numbering]:
    """Return how the classes of each set are numbered, so that a class has one id in all; `say` is told who follows.

    Raises DataError as `numbering_of`.
    """
    giver = "train" if "train" in sets else next(iter(sets))
    first = numbering_of(sets[giver], giver)
    numberings = {}
    for name, cfg in sets.items():
        if name == giver:
            numberings[name] = first
            continue
        numberings[name] = numbering_of(cfg, name, first, f"the set {giver}")
        follows = not cfg.names and not cfg.classes_of
        changed = any(label != own for own, label in (numberings[name].ids or {}).items())
        if follows and changed:
            say(f"{name}: classes are numbered as those of {giver}")
    return numberings


# -------------------------------------------------------------------------------------------------- samples


def paths_of(cfg: SetConfig) -> dict[str, str]:
    """Return the fields that name a file or folder of a source, where they are set."""
    if cfg.source == "digits":
        return {}
    paths = {"path": cfg.path, "root": cfg.root, "wnids": cfg.wnids, "real": cfg.real, "names": cfg.names}
    return {key: path for key, path in paths.items() if path is not None}


def source_names(cfg: SetConfig) -> Names:
    """Return the class names that a source itself knows, in the order of its ids; none where it knows none.

    Raises DataError where there is nothing at its path.
    """
    if cfg.source == "digits":
        return DIGITS
    check_paths(cfg)
    assert cfg.path is not None, "every other source has a path: SetConfig sees to it"
    if cfg.source == "table":
        return table_classes(cfg.path)
    if cfg.source == "tars":
        return tars_classes(cfg.path)
    if cfg.source == "cifar":
        return cifar_classes(cfg.path)
    if cfg.source in KNOWN:
        return known_classes(cfg.source, Path(cfg.path), path_of(cfg.wnids), path_of(cfg.real))
    _, names_of_classes = SOURCES[cfg.source]
    return names_of_classes(cfg.path)


def numbering_of(cfg: SetConfig, name: str, first: Numbering | None = None, giver: str = "") -> Numbering:
    """Return how the classes of a set are numbered: as `names` or `classes_of` say, or as a `first` set, or by itself.

    `name` is the set's, `giver` the first one's. Raises DataError naming the classes that the numbering lacks.
    """
    own = source_names(cfg)
    wanted: Names = ()
    if cfg.names:
        giver = cfg.names
        wanted = read_class_list(cfg.names)
        if cfg.source == "tars":
            check_unmistakable(wanted, cfg.names)
    elif cfg.classes_of:
        giver = cfg.classes_of
        wanted = load_index(cfg.classes_of).names
        if not wanted:
            raise DataError(
                f"{name}.classes_of: {cfg.classes_of} has no class names\n"
                "  expected the index of a set that was packed or indexed with them; make it again with --names FILE"
            )
    elif own and first is not None:
        wanted = first.names
    # Labels of tars that are names are renamed as they are read (`samples_of`): nobody knows the tars' own numbering.
    rename = {} if cfg.source == "tars" and not own else cfg.rename
    return number(own, wanted, rename=rename, keep=cfg.keep, name=name, giver=giver)


def samples_of(cfg: SetConfig, numbering: Numbering) -> Iterator[Sample]:
    """Return the samples of a set, read one by one, with their classes numbered; raises DataError as `source_names`."""
    return numbered(unnumbered(cfg, numbering), numbering)


def unnumbered(cfg: SetConfig, numbering: Numbering) -> Iterator[Sample]:
    """Return the source's samples with its own class ids."""
    if cfg.source == "digits":
        return digits(train=cfg.split == "train", image_size=cfg.image_size)

    check_paths(cfg)
    assert cfg.path is not None, "every other source has a path: SetConfig sees to it"
    if cfg.source == "table":
        return path_table(cfg.path, cfg.root)
    if cfg.source == "tars":
        ids = ids_of(tars_classes(cfg.path) or numbering.names)
        # A text of the tars that the numbering calls otherwise.
        for text, renamed in cfg.rename.items():
            if renamed in ids:
                ids[text] = ids[renamed]
        return tars(cfg.path, ids, rows)
    if cfg.source == "cifar":
        return cifar(cifar_files(cfg))
    if cfg.source in KNOWN:
        return known_samples(
            cfg.source, Path(cfg.path), cfg.split, path_of(cfg.wnids), path_of(cfg.real), partial=cfg.partial
        )
    samples, _ = SOURCES[cfg.source]
    return samples(cfg.path)


def path_of(text: str | None) -> Path | None:
    """Return a field that names a file or folder as a path; None where it is not set."""
    return None if text is None else Path(text)


def check_paths(cfg: SetConfig) -> None:
    """Raise DataError where there is nothing at one of a source's paths."""
    # The sources are generators, which open nothing before the first sample: a wrong path is better named here.
    for path in paths_of(cfg).values():
        if not Path(path).exists():
            raise DataError(f"source {cfg.source}: there is nothing at {path}")


def cifar_files(cfg: SetConfig) -> list[Path]:
    """Return the files of a split in the binary version: CIFAR-10's data_batch_1 … 5 or test_batch, CIFAR-100's own."""
    folder = Path(cfg.path or "")
    patterns = CIFAR_FILES[cfg.split]
    files: list[Path] = []
    for pattern in patterns:
        files.extend(folder.glob(pattern))
    if not files:
        raise DataError(f"{cfg.path}: no {' or '.join(patterns)}; take CIFAR's binary version")
    return sorted(files)


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
        return load_index(index_path).samples if index_path.exists() else None
    if cfg.source == "cifar":
        return sum(file.stat().st_size for file in cifar_files(cfg)) // CIFAR10_RECORD_BYTES
    if cfg.source in KNOWN:
        return known_published(cfg.source, cfg.split, path_of(cfg.real)).samples
    return None
