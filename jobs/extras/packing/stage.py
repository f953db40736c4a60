"""The pack stage: pack images into WebDataset shards with an index, as `python -m jobs pack` does without a recipe."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict

from data.checks import at_least, check_name, redacted
from data.errors import DataError
from data.extras.shards.indexing import build_index, pinned, problem_of
from data.extras.shards.packing import pack
from data.extras.shards.subset import Part, make_subsets, summary
from data.extras.sources.folders import files_of, folder_classes
from data.extras.sources.numbering import Numbering
from data.extras.sources.refusals import refusal_lines
from data.index.document import SUFFIX, load_index
from data.index.index import Index
from data.index.names import Names
from data.index.shard import table_path
from data.reader import MAX_LINES, unusable_shards
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from jobs.extras.packing.sets import (
    SetConfig,
    check_apart,
    expected_samples,
    known_set,
    missing_paths,
    numberings_of,
    samples_of,
    source_names,
    subset_rule,
)
from jobs.extras.progress import ProgressMeter
from jobs.resolved_recipe import Available, CheckResult, Context, MissingInput, Reads, Stage, StageKind
from pipeline.artifacts import DONE
from pipeline.config import Tags, require, tags
from pipeline.values import counted

UNREADABLE = "damaged"  # describes an unreadable index, which must be removed before packing again


@dataclass(frozen=True)
class PackConfig:
    """The data sets of a pack stage, and the size of their shards."""

    sets: dict[str, SetConfig] = field(default_factory=dict)  # data sets by name, at least one
    shard_samples: int = 10_000  # maximum number of samples per shard
    shard_bytes: int = 1 << 30  # maximum bytes of encoded images per shard; a single larger image gets its own shard
    restarts: bool = False  # add restart markers to JPEGs: same pixels, faster random crops
    workers: int = 1  # number of threads that write shards

    RESUME: ClassVar[Tags] = tags(forbid="sets shard_samples shard_bytes restarts", free="workers")

    def __post_init__(self) -> None:
        require(
            bool(self.sets), "sets is empty, expected at least one data set\n  add one, for example sets.train.path=…"
        )
        for name in self.sets:
            check_name(name, "a data set", "rename it, and all references to it (@stage/set)")
        at_least(self, 1, "shard_samples shard_bytes workers")


class PackedSet(TypedDict):
    """The record of a data set in the done.json of its pack stage."""

    samples: int
    shards: int
    digest: str  # digest of the index
    source: NotRequired[str]  # URL of the files, at hf:// with the commit


def problems_of_set(index_path: Path, digest: str, dropped: Sequence[str]) -> dict[Path, str]:
    """Return the missing or damaged files of a packed data set: path → problem. Shards in `dropped` may be missing."""
    if not index_path.is_file():
        return {index_path: "missing"}
    try:
        index = load_index(index_path)
    except DataError:
        return {index_path: UNREADABLE}
    if index.digest != digest:
        return {index_path: "index of another data set"}
    problems: dict[Path, str] = {}
    unusable = unusable_shards(index)
    for shard in index.shards:
        place = index.location(shard)
        # Dropped shards are given by the end of their paths.
        if f"/{place}".endswith(tuple(f"/{name}" for name in dropped)):
            continue
        if place in unusable:
            problems[Path(place)] = unusable[place]
        table = table_path(index.tables, shard.name)
        if not table.is_file():
            problems[table] = "missing"
    return problems


class PackExtra:
    """Base class for extras of pack stages; its methods do nothing by default."""

    def record(self, set_config: SetConfig) -> Mapping[str, object]:
        """Return additional entries for the record of a packed data set in done.json."""
        return {}

    def check_outputs(self, stage: Stage, done: Mapping[str, Any], available: Available) -> Iterable[CheckResult]:
        """Check a finished pack stage whose files are complete (`StageKind.check_outputs`)."""
        return ()


class Pack(StageKind):
    """The stage kind that packs images into data sets."""

    name = "pack"
    config = PackConfig
    inputs: ClassVar = {
        "sets.*.classes_of": Reads.SET,
        "sets.*.path": Reads.SET,
        "sets.*.only": Reads.FILE,
        "sets.*.but": Reads.FILE,
    }
    files = ("sets.*.root", "sets.*.wnids", "sets.*.real", "sets.*.names")
    needs_workers = False

    def __init__(self, extras: Sequence[PackExtra] = ()) -> None:
        self.extras = tuple(extras)

    def run(self, cfg: PackConfig, context: Context) -> dict[str, object]:
        """Pack each data set into a separate folder. If the stage was killed, running it again resumes it."""
        sets = {}
        for name, set_config in cfg.sets.items():
            sets[name] = replace(set_config, classes_of=context.campaign.path_of(set_config.classes_of))
            if set_config.source == "subset":
                sets[name] = replace(set_config, path=context.campaign.path_of(set_config.path))
            elif set_config.path is not None and "://" in set_config.path:
                # The record in the stage's folder: all sets, also after a restart, are read at the same commit.
                url = pinned(set_config.path, context.directory, Cache(CacheConfig()))
                sets[name] = replace(sets[name], path=url)
                context.log(f"{name}: from {redacted(url)}")
        numberings = numberings_of(sets, context.log)
        meter = partial(ProgressMeter, log=context.log, show=context.show_progress, every_s=10.0)
        packed: dict[str, PackedSet] = {}
        samples_seen = 0
        subsets: dict[str, Index] = {}  # finished subsets by name
        # "train" comes first, because it determines the class numbering; class names of tars are known after indexing.
        names_of_tars: Names = ()
        for name in sorted(sets, key=lambda name: name != "train"):
            set_config = sets[name]
            numbering = numberings.get(name, Numbering())
            folder = context.directory / name
            if set_config.source == "subset":
                # A subset is only an index of selected samples of its parent data set; nothing is packed.
                assert set_config.path is not None, "SetConfig refuses a subset without a path"
                parent = load_index(set_config.path)
                # Make all subsets of the same parent in one pass.
                if name not in subsets:
                    parts = []
                    for other, other_config in sets.items():
                        if other_config.source == "subset" and other_config.path == set_config.path:
                            parts.append(Part(context.directory / other, subset_rule(other_config), other))
                    names = [part.name for part in parts]
                    progress = meter(f"shards scanned for {', '.join(names)}")
                    indexes = make_subsets(parent, parts, workers=cfg.workers, report=progress.of)
                    subsets |= dict(zip(names, indexes, strict=True))
                index = subsets[name]
                for line in summary(index, parent):
                    context.log(f"{name}: {line}")
            elif set_config.source == "shards":
                assert set_config.path is not None, "SetConfig refuses shards without a path"
                tars: str | list[str] = set_config.path
                if "://" not in set_config.path and not Path(set_config.path).is_dir():
                    tars = list(map(str, files_of(set_config.path, "*.tar")))
                index = build_index(
                    tars,
                    output=folder,
                    name=name,
                    classes=set_config.classes,
                    names=() if set_config.unlabelled else numbering.names or names_of_tars,
                    unlabelled=set_config.unlabelled,
                    workers=cfg.workers,
                    report=meter(f"shards of {name}").of,
                    keep=True,
                )
                names_of_tars = names_of_tars or index.names
                report_set(name, index, context)
                problem = problem_of(index, unlabelled=set_config.unlabelled)
                if problem:
                    raise DataError(f"{set_config.path} is unusable: {problem}")
            else:
                check_apart(set_config, folder)
                # `pack` skips complete shards, so that the stage resumes.
                index = pack(
                    samples_of(set_config, numbering),
                    folder,
                    name=name,
                    names=numbering.names,
                    shard_samples=cfg.shard_samples,
                    shard_bytes=cfg.shard_bytes,
                    classes=set_config.classes,
                    restarts=cfg.restarts,
                    workers=cfg.workers,
                    report=meter(f"samples of {name}", expected_samples(set_config)).packed,
                )
                samples_seen += index.samples
                report_set(name, index, context)
            packed[name] = {"samples": index.samples, "shards": len(index.shards), "digest": index.digest}
            if set_config.path is not None and "://" in set_config.path:
                packed[name]["source"] = redacted(set_config.path)
            for extra in self.extras:
                packed[name].update(extra.record(set_config))  # type: ignore[typeddict-item]  # defined by extras
        return {"sets": packed, "samples_seen": samples_seen}

    def is_input(self, cfg: PackConfig, field_name: str) -> bool:
        """Return whether the key depends on a field's content: yes for a subset's parent, no for a path to images."""
        _, name, key = field_name.split(".")
        return key != "path" or cfg.sets[name].source == "subset"

    def sets(self, cfg: PackConfig) -> Collection[str]:
        """Return the names of the data sets that the stage packs."""
        return cfg.sets

    def set_classes(self, cfg: PackConfig, name: str) -> int | str | None:
        """Return a data set's minimum number of classes, from its folders or as published; None if it is unknown.

        For a subset, return its parent data set instead. Before packing, the number is unknown if the data set uses
        another data set's numbering or excludes classes.
        """
        set_config = cfg.sets[name]
        if set_config.keep or set_config.names or set_config.classes_of or set_config.rename:
            return None
        if set_config.source == "subset":
            return set_config.path
        giver = "train" if "train" in cfg.sets else next(iter(cfg.sets))
        known = known_set(set_config)
        if known is not None and not set_config.partial:
            return known.published[set_config.split].classes
        if set_config.source not in ("folder", "digits") or name != giver:
            return None
        try:
            return len(source_names(set_config))
        except (DataError, OSError):  # `missing` reports a missing folder
            return None

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Report each missing source path, and each folder without class folders."""
        if not available.checks_files:
            return
        cfg: PackConfig = stage.config
        for name, set_config in cfg.sets.items():
            for field_name, message in missing_paths(set_config).items():
                yield MissingInput.at(
                    stage.name, f"sets.{name}.{field_name}", Reads.FILE, getattr(set_config, field_name), message
                )
            has_class_folders = set_config.source == "folder" and not set_config.unlabelled
            if has_class_folders and set_config.path is not None and Path(set_config.path).is_dir():
                try:
                    folder_classes(set_config.path)
                except DataError as error:
                    yield MissingInput.at(stage.name, f"sets.{name}.path", Reads.FILE, set_config.path, str(error))

    def check_outputs(self, stage: Stage, done: Mapping[str, Any], available: Available) -> Iterator[CheckResult]:
        """Raise DataError if an index, table or shard of a finished stage is missing or has the wrong size.

        Shards listed in any stage's `data.drop` may be missing. The content of shards is verified when they are read.
        The extras may yield warnings, for example about a source that has changed since it was packed.
        """
        campaign = available.campaign
        folder = campaign.directory(stage)
        dropped: list[str] = []
        for other in campaign.stages:
            if other.kind.trains:
                dropped += other.config.data.drop
        packed: Mapping[str, PackedSet] = done["sets"]
        problems: dict[Path, str] = {}  # path → problem
        for name, record in packed.items():
            problems |= problems_of_set(folder / name / f"{name}{SUFFIX}", record["digest"], dropped)
        if problems:
            # A lost disk can mean thousands of shards: list a few and count the rest.
            lines = [f"{len(problems)} files packed by {folder.name} are missing or damaged:"]
            for path in list(problems)[:MAX_LINES]:
                lines.append(f"  {path}: {problems[path]}")
            if len(problems) > MAX_LINES:
                lines.append(f"  … and {len(problems) - MAX_LINES} more")
            # A damaged index would also prevent packing again, so the command removes it.
            unreadable = []
            for path, problem in problems.items():
                if problem == UNREADABLE:
                    unreadable.append(str(path))
            removal = shlex.join(["rm", "-f", *unreadable, str(folder / DONE)])
            lines.append("  restore them from a copy; or, to pack the data sets again, run")
            lines.append(f"  {removal}")
            lines.append("  and run the recipe again")
            raise DataError("\n".join(lines))
        for extra in self.extras:
            yield from extra.check_outputs(stage, done, available)


def report_set(name: str, index: Index, context: Context) -> None:
    """Log the size of a data set, and the samples skipped by packing or indexing."""
    classes = "without labels" if index.classes == 0 else f"{index.classes} classes"
    context.log(f"{name}: {index.samples} samples in {counted(len(index.shards), 'shard')}, {classes}")
    for line in refusal_lines(index.refused, "refused: "):
        context.log(f"{name}: {line}")
