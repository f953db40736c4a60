"""Report what has changed in the source of a packed data set: images that were moved, added, removed or replaced.

A finished pack stage is never repeated by itself, so a corrected label in its source folder has no effect. `run` and
`plan` compare each source with its packed data set once per command, and read no image:

    source                    compared with                                       what is compared
    folder, table             the tables of the shards, which list every sample   path, class and size of each image
    tars, parquet, archives   the digest in done.json, recorded after packing     names and sizes of the source's files

A table stores paths without their extensions, so `cat/1.jpg` is listed as `cat/1`. Modification times are not compared,
because copies change them; only data sets with more than `MANY` samples are skipped unless a class folder is newer.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from data.checks import few, printable
from data.errors import PatchlineError
from data.extras.sources.folders import ListedFile, images_below, key_of, keys_of
from data.extras.sources.numbering import Numbering
from data.extras.sources.walk import class_folders_in, matching
from data.index.document import SUFFIX, load_index
from data.index.index import Index
from data.index.shard import label_digest
from data.optional import load_optional
from jobs.extras.packing.sets import CLASS_LISTS, SetConfig, numbering_of, numberings_of, reader_of
from jobs.extras.packing.stage import PackExtra
from jobs.resolved_recipe import Available, CheckResult, Stage
from pipeline.artifacts import DONE
from pipeline.values import counted

MANY = 20_000  # samples; listing and comparing them takes 0.6 to 0.8 s of a core (docs/data-sets.md)
MAX_NAMES = 3  # changed images named in a report
OWN_FILES = (SUFFIX, ".npy", ".columns")  # files that indexing may write next to tars


class Recorded(NamedTuple):
    """An image in a packed data set or in its source; `labels` is None if its class is part of its path."""

    size: int  # bytes
    labels: int | None  # digest of its class ids


class ChangedSources(PackExtra):
    """Compares the sources of a finished pack stage with its data sets."""

    def record(self, set_config: SetConfig) -> Mapping[str, object]:
        """Return the digest of the source's file names and sizes, unless the shards' tables suffice."""
        if set_config.source in ("folder", "table"):
            return {}
        files = files_in(set_config)
        return {"source_files": len(files), "source_digest": digest_of_files(files)} if files else {}

    def check_outputs(self, stage: Stage, done: Mapping[str, Any], available: Available) -> Iterator[CheckResult]:
        """Yield a warning for each changed source, and a note for each missing one; errors of a source are ignored."""
        folder = available.campaign.directory(stage)
        packed_at = done.get("finished", (folder / DONE).stat().st_mtime)
        for name, set_config in stage.config.sets.items():
            path = set_config.path
            # A subset's parent is an input of the stage, and a URL is pinned to a commit or to tars that are verified.
            if path is None or set_config.source == "subset" or "://" in path:
                continue
            try:
                if not any(file.exists() for file in matching(path)):
                    text = f"{stage.name}: {path} is no longer there; its images packed as {name} are used"
                    yield CheckResult("OK", "files", text)
                    continue
                change = change_of(stage, name, done["sets"][name], available, packed_at)
            except OSError:
                # A packed data set no longer depends on its source, for example on a lost file server.
                continue
            except PatchlineError as error:
                change = f"can no longer be packed as {name}: {str(error).splitlines()[0]}"
            if change:
                text = f"{stage.name}: {path} {change}; {name} is not packed again"
                yield CheckResult("WARN", "files", f"{text} (to pack it in a new run, set run=FOLDER)")


def change_of(stage: Stage, name: str, record: Mapping[str, Any], available: Available, packed_at: float) -> str:
    """Describe how the source of a data set differs from what was packed; "" if it does not or if this is unknown.

    Raises DataError if the source cannot be packed any more.
    """
    cfg: SetConfig = stage.config.sets[name]
    assert cfg.path is not None, "called only for sources with a path"
    index_path = available.campaign.directory(stage) / name / f"{name}{SUFFIX}"
    # The key has the path of a class list, but not its content.
    if cfg.names:
        listed = load_optional(CLASS_LISTS, f"{name}.names")(cfg.names)
        names = load_index(index_path).names
        if listed != names:
            renumbered = [printable(entry) for entry in listed if entry not in names] or map(printable, listed)
            return f"has other classes in {cfg.names} than {name}: {few([*renumbered], MAX_NAMES)}"
    if cfg.source not in ("folder", "table"):
        files = files_in(cfg)
        # Data sets packed by earlier versions have no digest.
        if record.get("source_digest") in (None, digest_of_files(files)):
            return ""
        newer = [os.path.basename(path) for path in sorted(files) if os.stat(path).st_mtime > packed_at]
        hint = f", newer than {name}: {few([printable(file) for file in newer], MAX_NAMES)}" if newer else ""
        packed_files = counted(record["source_files"], "file")
        return f"has changed: {name} was packed from {packed_files}, now there are {len(files)}{hint}"
    if record["samples"] > MANY and not is_newer(Path(cfg.path), packed_at):
        return ""
    index = load_index(index_path)
    numbering = numbering_today(stage, name, available) if cfg.source == "table" or cfg.keep else Numbering()
    if cfg.source == "table" and numbering.names != index.names:
        classes = sorted(set(numbering.names) ^ set(index.names)) or [*numbering.names]
        return f"has other classes than {name}: {few([printable(entry) for entry in classes], MAX_NAMES)}"
    # Restart markers change the size of a packed image.
    before = packed_images(index, with_labels=cfg.source == "table" and not cfg.unlabelled)
    now = source_images(cfg, numbering, before)
    return describe(name, before, now, same_sizes=not stage.config.restarts)


def describe(name: str, before: Mapping[str, Recorded], now: Mapping[str, Recorded], *, same_sizes: bool) -> str:
    """Describe the differences between packed images and the images of the source, by key; "" if there are none."""
    gone = [key for key in before if key not in now]
    new = [key for key in now if key not in before]
    # An image with the same file name and size in another folder was moved.
    places: dict[tuple[str, int], list[str]] = {}
    for key in new:
        places.setdefault((os.path.basename(key), now[key].size if same_sizes else 0), []).append(key)
    moved = []
    removed = []
    for key in gone:
        targets = places.get((os.path.basename(key), before[key].size if same_sizes else 0))
        if targets:
            moved.append(f"{key} → {targets.pop(0)}")
        else:
            removed.append(key)
    added = [key for keys in places.values() for key in keys]
    common = [key for key in before if key in now]
    relabelled = [key for key in common if before[key].labels != now[key].labels]
    replaced = [key for key in common if same_sizes and before[key].size != now[key].size]
    changes = {
        "moved": moved,
        "relabelled": relabelled,
        "added": added,
        "removed": removed,
        "of another size": replaced,
    }
    parts = []
    names: list[str] = []
    for kind, keys in changes.items():
        if keys:
            parts.append(f"{len(keys)} {kind}")
            names += [printable(key) for key in keys]
    if not parts:
        return ""
    text = f"now has {counted(len(now), 'image')}, but {name} was packed from {len(before)}"
    if len(now) == len(before):
        text = f"has changed since {name} was packed"
    return f"{text} ({', '.join(parts)}: {few(names, MAX_NAMES)})"


# ------------------------------------------------------------------------ both sides of the comparison


def packed_images(index: Index, *, with_labels: bool) -> dict[str, Recorded]:
    """Return the images of a packed data set by key; unreadable images are included."""
    images = {}
    for shard in range(len(index.shards)):
        table = index.table(shard)
        labels = table["label_digest"].tolist() if with_labels else [None] * len(table)
        for key, size, label in zip(index.keys(shard).tolist(), table["image_size"].tolist(), labels, strict=True):
            images[key] = Recorded(size, label)
    return images


def source_images(cfg: SetConfig, numbering: Numbering, packed: Mapping[str, Recorded]) -> dict[str, Recorded]:
    """Return the images of a folder or table by the key that packing would give them."""
    assert cfg.path is not None, "called only for sources with a path"
    root = Path(cfg.path)
    if cfg.source == "table":
        root = root.parent if cfg.root is None else Path(cfg.root)
    kept = []
    for entry in listed_files(cfg):
        labels = entry.labels
        if labels is not None:
            labels = numbering.labels(labels, entry.name)
        if labels != ():  # a class that `keep` excludes
            kept.append(ListedFile(entry.name, labels))
    images = {}
    for entry, key in zip(kept, keys_of([entry.name for entry in kept]), strict=True):
        try:
            size = os.stat(os.path.join(root, entry.name)).st_size
        except FileNotFoundError:  # listed in a table
            continue
        # Packing refuses an empty file, so it is not in the tables.
        if size == 0 and key not in packed:
            continue
        has_labels = cfg.source == "table" and entry.labels is not None
        digest = label_digest(" ".join(map(str, entry.labels or ())).encode()) if has_labels else None
        # A second image with the same name but another extension changes the keys of both (`keys_of`).
        old_key = key_of(entry.name)
        if key not in packed and old_key in packed and packed[old_key].size == size:
            key = old_key
        images[key] = Recorded(size, digest)
    return images


def listed_files(cfg: SetConfig) -> Sequence[ListedFile]:
    """List the images of a folder or table, relative to its root, in no particular order."""
    assert cfg.path is not None, "called only for sources with a path"
    path = Path(cfg.path)
    if cfg.source == "table":
        columns = reader_of(cfg, "tables:table_columns")(path, unlabelled=cfg.unlabelled)
        entries: list[ListedFile] = reader_of(cfg, "tables:table_entries")(path, *columns, unlabelled=cfg.unlabelled)
        return entries
    files = []
    prefix = len(os.path.join(path, ""))
    folders = [path] if cfg.unlabelled else [path / name for name in class_folders_in(path)]
    for label, folder in enumerate(folders):
        for image in images_below(folder, Counter()):
            files.append(ListedFile(str(image)[prefix:], None if cfg.unlabelled else (label,)))
    return files


def numbering_today(stage: Stage, name: str, available: Available) -> Numbering:
    """Return the class numbering that packing a data set again would use."""
    sets = {}
    for other, cfg in stage.config.sets.items():
        classes_of = available.campaign.path_of(cfg.classes_of)
        sets[other] = SetConfig(**{**vars(cfg), "classes_of": classes_of})
    return numberings_of(sets, lambda line: None).get(name) or numbering_of(sets[name], name)


def is_newer(root: Path, moment: float) -> bool:
    """Return whether a table, or a folder or one of its class folders, has changed since `moment` (Unix time, s)."""
    paths = [root]
    if root.is_dir():
        paths += [root / name for name in class_folders_in(root)]
    return any(path.stat().st_mtime > moment for path in paths)


def files_in(cfg: SetConfig) -> dict[str, int]:
    """Return the source's files with their sizes in bytes: a pattern's matches, or the files directly in a folder."""
    if cfg.path is None or cfg.source == "subset" or "://" in cfg.path:
        return {}
    files = {}
    for path in matching(cfg.path):
        for file in path.iterdir() if path.is_dir() else [path]:
            is_own = file.name.startswith(".") or file.name.endswith(OWN_FILES)
            if not is_own and file.is_file():
                files[str(file)] = file.stat().st_size
    return files


def digest_of_files(files: Mapping[str, int]) -> str:
    """Return a digest of files' names and sizes, equal for a copy of the files in another folder."""
    lines = sorted(f"{os.path.basename(path)}\0{size}" for path, size in files.items())
    return sha256(os.fsencode("\n".join(lines))).hexdigest()
