"""`python -m jobs pack|index|data`: make shards, index existing ones, look at them and mend them.

python -m jobs pack folder photos/train shards/photos/train --workers 4    resumes after a kill
python -m jobs index shards/theirs --workers 8
python -m jobs index s3://bucket/theirs --output indexes/theirs
python -m jobs data check shards/theirs --page report.html
"""

import argparse
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.shards.doctor import check as check_shards
from data.shards.doctor import repair as repair_shards
from data.shards.index import Index, load_index
from data.shards.indexing import build_index
from data.shards.packing import pack
from data.shards.page import write_page
from jobs.progress import Progress


def positive(text: str) -> int:
    """A whole number from 1 on; argparse shows the error."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


COUNT = ("--workers", {"type": positive, "default": 1, "help": "shards worked on side by side (default: 1)"})
CLASSES = ("--classes", {"type": positive, "default": None, "help": "labels must be below; else as many as are found"})
NAME = ("--name", {"default": None, "help": "of the set; else its folder's name"})


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pack`."""
    parser.add_argument(
        "source",
        help="folder (one sub-folder a class), table (CSV or parquet with columns path and label), tars (WebDataset, "
        "img2dataset), parquet (Hugging Face images), imagenet-train, imagenet-validation, cifar, digits",
    )
    parser.add_argument("path", help="where the images are; - for digits")
    parser.add_argument("directory", help="where the shards and their index go")
    parser.add_argument("--split", default="train", help="cifar, digits: train or test")
    parser.add_argument("--root", default=None, help="table: what its paths are relative to; else the table's folder")
    parser.add_argument("--wnids", default=None, help="imagenet-validation: text file of one wnid a line")
    parser.add_argument("--real", default=None, help="imagenet-validation: real.json instead, with all labels of each")
    parser.add_argument("--shard-samples", type=positive, default=10_000, help="at most (default: 10,000)")
    parser.add_argument("--shard-bytes", type=positive, default=1 << 30, help="of images, at most (default: 1 GiB)")
    parser.add_argument(
        "--restarts", action="store_true", help="add restart markers to JPEGs: same pixels, cropped faster"
    )
    _add(parser, NAME, CLASSES, COUNT)


def pack_command(options: argparse.Namespace) -> None:
    """Pack a source into shards; the same command again goes on after a kill."""
    from jobs.stages.pack import SetConfig, samples_of
    from jobs.stages.pack import expected_samples as expected
    from pipeline import config

    given = {"source": options.source, "path": None if options.path == "-" else options.path, "split": options.split}
    cfg = config.build(SetConfig, {**given, "root": options.root, "wnids": options.wnids, "real": options.real}, "pack")
    directory, progress = Path(options.directory), Progress("samples", expected(cfg))
    index = pack(
        samples_of(cfg),
        directory,
        name=options.name or directory.name,
        shard_samples=options.shard_samples,
        shard_bytes=options.shard_bytes,
        classes=options.classes,
        restarts=options.restarts,
        workers=options.workers,
        report=lambda shards, samples: progress(samples, f"{shards} shards"),
    )
    print(summary(index))


def add_index(parser: argparse.ArgumentParser) -> None:
    """Arguments of `index`."""
    parser.add_argument(
        "tars",
        nargs="+",
        help="a folder of WebDataset tars, or the tars themselves; or URLs (s3, gs, az, https) of either, quoted: "
        "s3://bucket/train, 's3://bucket/*/train-*.tar', 'https://host/train-{000000..000999}.tar'",
    )
    parser.add_argument("--output", default=None, help="folder of the index; else beside the shards, if they are here")
    parser.add_argument("--at", default=None, help="the URL that runs read the shards from, where it is another one")
    _add(parser, NAME, CLASSES, COUNT)


def index_command(options: argparse.Namespace) -> None:
    """Index existing tars, unchanged; the same command again goes on after a kill."""
    tars = options.tars if len(options.tars) > 1 or options.tars[0].endswith(".tar") else options.tars[0]
    progress = Progress("shards")
    index = build_index(
        tars,
        output=options.output,
        name=options.name,
        classes=options.classes,
        workers=options.workers,
        at=options.at,
        report=progress.of,
    )
    print(summary(index))


def add_data(parser: argparse.ArgumentParser) -> None:
    """Arguments of `data check|stats|repair`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="check|stats|repair")
    check = actions.add_parser("check", help="read and decode every sample; exit 65 where a run would miss one")
    stats = actions.add_parser("stats", help="the same from headers and labels alone, with how sizes are spread")
    repair = actions.add_parser("repair", help="pack every good sample into a new set")
    for action in (check, stats, repair):
        action.add_argument("set", help="an index, or its folder")
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS)
        _add(action, COUNT)
    for action in (check, stats):
        action.add_argument("--page", default=None, metavar="FILE.html", help="write a page that needs nothing else")
        action.add_argument("--world", type=positive, default=1, help="workers to give advice for")
    repair.add_argument("directory", help="where the new set goes; not the old one's folder")
    repair.add_argument("--unique", action="store_true", help="keep each image once")
    _add(repair, NAME)


def data_command(options: argparse.Namespace) -> int:
    """What `jobs data` was asked for; 65 where `check` found what a run would trip over."""
    index = load_index(options.set)
    if options.action == "repair":
        repair(index, options)
        return 0
    if options.page:
        Path(options.page).parent.mkdir(parents=True, exist_ok=True)  # before hours of looking
    progress = Progress("shards", len(index.shards))
    report = check_shards(index, decode=options.action == "check", workers=options.workers, report=progress.of)
    lines = report.lines(options.world)
    if options.action == "stats":
        lines += spreads(report)
    print("\n".join(lines))
    if options.page:
        print(f"page: {write_page(report, options.page, options.world)}")
    if options.action == "check" and not report.ok:
        way_out = f"; a set that can: python -m jobs data repair {options.set} NEW-FOLDER" if report.good else ""
        print(f"not all of it can be read{way_out}")
        return DataError.exit_code
    return 0


def repair(index: Index, options: argparse.Namespace) -> None:
    """Raises DataError where the new set would overwrite the old one."""
    directory = Path(options.directory)
    if directory.resolve() in (Path(index.directory), index.tables):
        raise DataError(f"{directory} holds the set that is to be repaired\n  give another folder")
    progress = Progress("samples", index.samples)
    made = repair_shards(
        index,
        directory,
        unique=options.unique,
        name=options.name or directory.name,
        workers=options.workers,
        report=lambda shards, samples: progress(samples, f"{shards} shards"),
    )
    print(f"{summary(made)}; {index.samples - made.samples:,} samples left out")


def spreads(report: Any) -> list[str]:
    """How image sides, bytes and classes are spread."""
    found = [
        f"{name}: "
        + ", ".join(f"{what} {spread.quantile(q):g}" for what, q in (("1 %", 0.01), ("median", 0.5), ("99 %", 0.99)))
        for name, spread in report.spreads.items()
    ]
    ranked = report.classes.most_common()
    shown = [("most", ranked[:5]), ("least", ranked[:-6:-1])]
    return [*found, *(f"{which}: " + ", ".join(f"class {c} {n:,}" for c, n in rows) for which, rows in shown)]


def summary(index: Index) -> str:
    """What a set holds and where, in one line."""
    return (
        f"{index.samples:,} samples in {len(index.shards)} shards, {index.classes} classes, "
        f"digest {index.digest[:12]}, in {index.tables}"
        + "".join(f"\nrefused: {count} × {what}" for what, count in index.refused.items())
    )


def _add(parser: argparse.ArgumentParser, *arguments: tuple[str, dict[str, Any]]) -> None:
    for flag, settings in arguments:
        parser.add_argument(flag, **settings)
