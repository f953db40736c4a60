"""`pack`, `index` and `new` find the same samples in every set of `tests/support/foreign_sets.py`, or all refuse it."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from data.decoder import BatchLayout, Decoder, DecodeTask
from data.errors import DataError
from data.extras.survey.survey import survey
from data.files import ROOT
from data.images.augment import AugmentConfig
from data.images.decode import BadImage
from data.index.document import load_index
from data.index.shard import IMAGES
from data.order import Order
from data.reader import ShardReader, read_labels
from jobs.__main__ import main
from tests.support.foreign_sets import FOLDERS, PARQUETS, TABLES, TARS, Samples, image

RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes}}
shards: {{kind: pack, shard_samples: 2, sets: {{train: {{source: {source}, path: "{path}"}}}}}}
"""
NUMBERS = {image(number): number for number in range(50)}
Read = Counter[tuple[str, object, int]]  # key, class, number of the image


def samples_in(folder: Path, *, with_tar: bool = False) -> Read:
    """Return the usable samples of an index; keys without the name of their tar if `with_tar`."""
    index = load_index(folder)
    reader = ShardReader(index)
    samples: Read = Counter()
    for shard in range(len(index.shards)):
        for sample in range(index.shards[shard].samples):
            key, content, raw = reader.read(shard, sample)
            try:
                labels = read_labels(raw, index, 9)
            except BadImage:
                continue
            classes = tuple(index.names[label] if index.names else label for label in labels)
            key = key.partition("/")[2] if with_tar else key
            samples[(key, classes[0] if len(classes) == 1 else classes, NUMBERS[content])] += 1
    return samples


def trained_on(folder: Path) -> set[object]:
    """Return the classes of a global batch as large as the set, as training decodes it."""
    index = load_index(folder)
    size = index.samples
    decoder = Decoder(
        index,
        Order(index.shard_samples, seed=0, batch_size=size),
        BatchLayout(size, 8, 9),
        AugmentConfig(),
        0,
        ShardReader(index),
    )
    arrays = decoder.layout.arrays(bytearray(decoder.layout.bytes))
    decoder.run(DecodeTask(0, 0, size), arrays)
    classes: set[object] = set()
    for row in arrays.labels.tolist():
        labels = tuple(index.names[label] if index.names else label for label in row if label >= 0)
        classes.add(labels[0] if len(labels) == 1 else labels)
    return classes


def assert_expected(samples: Read, expected: Samples, *, what: str) -> None:
    """Check keys and classes; a key that the case calls "… again" may be any other."""
    wanted = Counter(expected.values())
    assert Counter(found for _, found, _ in samples.elements()) == wanted, what
    keys = {key for key, _, _ in samples}
    assert {key for key in expected if not key.endswith(" again")} <= keys, what
    assert len({number for _, _, number in samples}) == len(expected), what


def packed(source: str, path: Path, out: Path, *options: str) -> int:
    return main(["pack", source, str(path), str(out), "--name", "train", *options])


def by_new(path: Path, tmp_path: Path) -> Path | None:
    """Run the pack stage of the recipe that `new` would write; return its set, or None if it is refused."""
    try:
        found = survey(str(path), report=lambda images: None).train
    except DataError:
        return None
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", source=found.source, path=found.path))
    # What `new` accepts, `run` accepts.
    assert main(["run", str(recipe)]) == 0
    [folder] = (tmp_path / "run").glob("shards*/train")
    index = load_index(folder)
    if not index.names:
        counts = Counter({str(label): count for label, count in enumerate(index.class_counts) if count})
    else:
        counts = Counter(dict(zip(index.names, index.class_counts, strict=True)))
    assert +found.class_counts == counts
    return folder


def all_accept(codes: dict[str, int], of_new: Path | None, expected: dict[str, int] | None) -> bool:
    """Assert that all commands refuse a set without expected samples, or that all accept it; return which."""
    assert set(codes.values()) == {65 if expected is None else 0}, codes
    assert (of_new is None) == (expected is None)
    return expected is not None


@pytest.mark.parametrize("case", TARS)
def test_tars_are_read_alike_by_index_pack_and_new(case: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    path, expected = TARS[case](tmp_path / "set")
    (tmp_path / "gz").mkdir()
    for tar in path.glob("*.tar"):
        (tmp_path / "gz" / f"{tar.name}.gz").write_bytes(gzip.compress(tar.read_bytes()))
    codes = {
        "index": main(["index", str(path), "--output", str(tmp_path / "index"), "--name", "train"]),
        "pack": packed("tars", path, tmp_path / "pack"),
        "pack in small shards": packed("tars", path, tmp_path / "small", "--shard-samples", "2"),
        "pack of compressed tars": packed("tars", tmp_path / "gz", tmp_path / "stream"),
    }
    of_new = by_new(path, tmp_path)
    if case == "dots in names":
        # Only `pack tars` of uncompressed ones can give other names.
        assert codes == {"index": 65, "pack": 0, "pack in small shards": 0, "pack of compressed tars": 65}
        assert of_new is None
        assert_expected(samples_in(tmp_path / "pack", with_tar=True), {f"IMG_{n}": n % 3 for n in range(6)}, what=case)
        return
    if case == "labels apart":
        # In a stream, labels cannot be joined with their images.
        assert codes.pop("pack of compressed tars") == 65
    if not all_accept(codes, of_new, expected):
        return
    assert of_new is not None
    samples = samples_in(tmp_path / "index")
    assert_expected(samples, expected, what="index")
    assert trained_on(of_new) == set(expected.values())
    of_pack = samples_in(tmp_path / "pack", with_tar=True)
    assert_expected(of_pack, expected, what="pack")
    # Tars with many unlabelled samples are packed, not indexed in place.
    is_packed = "source: tars" in (tmp_path / "recipe.yaml").read_text()
    assert samples_in(of_new, with_tar=is_packed) == (of_pack if is_packed else samples)
    assert samples_in(tmp_path / "small", with_tar=True) == of_pack
    if "pack of compressed tars" in codes:
        assert samples_in(tmp_path / "stream", with_tar=True) == of_pack


SOURCES = {"folder": FOLDERS, "table": TABLES, "parquet": PARQUETS}


@pytest.mark.parametrize(("source", "case"), [(source, case) for source in SOURCES for case in SOURCES[source]])
def test_folders_tables_and_parquets_are_read_alike_by_pack_and_new(source: str, case: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    path, expected = SOURCES[source][case](tmp_path / "set")
    codes = {
        "pack": packed(source, path, tmp_path / "pack"),
        "pack in small shards": packed(source, path, tmp_path / "small", "--shard-samples", "2"),
        "pack in shards of one": packed(source, path, tmp_path / "one", "--shard-samples", "1"),
    }
    of_new = by_new(path, tmp_path)
    if not all_accept(codes, of_new, expected):
        return
    assert of_new is not None
    samples = samples_in(tmp_path / "pack")
    assert_expected(samples, expected, what="pack")
    assert samples_in(tmp_path / "small") == samples_in(tmp_path / "one") == samples_in(of_new) == samples
    assert trained_on(of_new) == set(expected.values())


# ------------------------------------------------------------------------------------------------ others' cases

CASES = ROOT.parent / "shared" / "cases" / "data"


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not on this machine")
def test_cases_of_others_are_read_alike_whatever_the_shards(tmp_path: Path) -> None:
    wrong = []
    for number, folder in enumerate(sorted(CASES.glob("*/")) if CASES.is_dir() else []):
        for path in sources_in(folder):
            out = tmp_path / f"{number}-{path.name}"
            out.mkdir()
            source = "folder"
            if path.suffix == ".csv":
                source = "table"
            elif any(path.glob("*.tar")):
                source = "tars"
            codes = [packed(source, path, out / "pack"), packed(source, path, out / "small", "--shard-samples", "2")]
            if source == "tars":
                codes.append(main(["index", str(path), "--output", str(out / "index"), "--name", "train"]))
            if folder.name != "dots-in-names" and len(set(codes)) > 1:
                wrong.append((str(path), codes))
    assert not wrong


def sources_in(folder: Path) -> list[Path]:
    """Return the sets in the folder of a case: folders with tars or class folders, and tables."""
    paths = sorted(folder.glob("*.csv")) + sorted(folder.glob("tables/*.csv"))
    for path in sorted(folder.glob("*/")):
        has_images = any(file.suffix[1:] in IMAGES for file in path.glob("*/*"))
        if any(path.glob("*.tar")) or has_images:
            paths.append(path)
    return paths
