"""The data check counts every kind of fault exactly, and a repaired set trains."""

import shlex
import shutil
import struct
import tarfile
import zlib
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.evaluation import EvaluationSet
from data.extras.doctor.doctor import check, repair
from data.extras.doctor.page import write_page
from data.extras.doctor.report import Report, ShardReport
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.shards.subset import Rule
from data.extras.sources.samples import Sample, digits
from data.images.decode import Header, library
from data.index.document import load_index
from data.index.index import Index, exclude, join
from data.index.shard import Shard
from data.loader import TrainLoader
from data.order import Order
from data.reader import ShardReader
from jobs.__main__ import main
from tests.support.archives import make_subset
from tests.support.tars import picture, tar_of, write_tar

pytestmark = pytest.mark.quick

GOOD = list(islice(digits(True), 60))


def sample(number: int, image: bytes | None = None, label: bytes | None = None):
    """Return the members of a sample; None means a good one, an empty image or label omits the member."""
    good = GOOD[number]
    image = good.image if image is None else image
    label = str(good.labels[0]).encode() if label is None else label
    return [(f"k{number}.{kind}", body) for kind, body in (("jpg", image), ("cls", label)) if body]


@pytest.fixture
def sick(tmp_path):
    """Make six shards of ten samples: two with faulty samples, three unusable, one intact."""
    folder = tmp_path / "sick"
    folder.mkdir()
    image = bytearray(GOOD[4].image)
    image[-60:-50] = b"\xff\x00" * 5  # in the coded pixels: decodable, with warnings
    faults = {
        0: sample(0, b"not an image"),
        1: sample(1, GOOD[1].image[:300]),
        2: sample(2, b""),
        3: sample(3, label=b""),
        4: sample(4, bytes(image)),
        5: sample(5, GOOD[6].image),  # a duplicate
        10: sample(10, label=b"cat"),
        11: sample(11, b"GIF89a" + bytes(50)),
        12: [*sample(12), ("k12.pyd", b"cos\nsystem\n.")],
        13: sample(
            13, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 60_000, 60_000) + b"\x08\x02\0\0\0IEND"
        ),  # a bomb
        14: [*sample(14), ("k14.jpg", GOOD[15].image)],
        15: sample(15, label=b"0 " * (1 << 20)),
    }
    for shard in range(6):
        numbers = range(10 * shard, 10 * shard + 10)
        write_tar(folder / f"s{shard}.tar", [m for n in numbers for m in faults.get(n, sample(n))])
    index = build_index(folder, output=tmp_path / "index", name="sick", classes=12)
    (folder / "s2.tar").unlink()
    with open(folder / "s3.tar", "r+b") as file:
        file.truncate(8 * 1024 * 3)
    with open(folder / "s4.tar", "r+b") as file:
        file.seek(5)
        changed = file.read(1)
        file.seek(600)
        file.write(changed)
    return index


def test_check_counts_every_kind_of_fault_exactly(sick):
    report = check(sick)
    assert report.bad.counts == Counter(
        {"not a JPEG, PNG or WebP": 2, "truncated": 1, "no image": 1, "no label": 3, "image too large": 1}
    ) + Counter({reason: n for reason, n in report.shards[4].bad.counts.items()})
    problems = {shard.name: shard.problem for shard in report.shards}
    assert problems.pop("s2.tar") == "No such file or directory"
    assert "bytes, but the index lists" in problems.pop("s3.tar")
    assert "sha256" in problems.pop("s4.tar")
    assert set(problems.values()) == {""}
    refused = {"member type .pyd": 1, "repeated member": 1, "label too large": 1}
    assert report.duplicates == 1
    assert report.shards[1].refused.counts == refused
    assert report.shards[0].bad.first["truncated"] == "k1"
    assert not report.ok
    assert report.shards[0].damaged == (1 if library() else 0)
    text = "\n".join(report.lines())
    assert "bad: 2 × not a JPEG, PNG or WebP, first k0 of s0.tar" in text
    assert "empty 2 (first: [10, 11])" in text


def test_repaired_set_passes_the_check_and_trains(sick, tmp_path):
    made = repair(sick, tmp_path / "well", unique=True, shard_samples=20)
    report = check(made, workers=2)
    assert report.ok
    assert report.duplicates == 0
    assert made.samples == report.good == check(sick).good - 1
    order = Order(made.shard_samples, seed=0, batch_size=8)
    batches = islice(iter(TrainLoader(made, order, image_size=16, slots=range(8), micro_batch=8)), 12)
    assert not any(batch.bad for batch in batches)


def test_healthy_set_has_no_problems(tmp_path):
    index = pack(GOOD, tmp_path, shard_samples=2)
    report = check(index)
    assert len(report.shards) == 30
    assert sum(len(shard.grid) for shard in report.shards) == 24
    assert report.ok
    assert report.good == 60
    assert report.classes == Counter(s.labels[0] for s in GOOD)


def test_report_shows_multiple_labels_and_very_narrow_images(tmp_path):
    sliver = cv2.imencode(".png", np.zeros((1, 10_000, 3), np.uint8))[1].tobytes()
    index = pack([Sample("a", sliver, (1, 2, 3), "png"), Sample("b", sliver, (0,), "png")], tmp_path)
    report = check(index)
    assert report.ok
    assert report.classes.total() == 4
    assert report.duplicates == 1
    assert "labels: up to 3 per sample; train with data.max_labels=3" in "\n".join(report.lines())
    assert "data:image/jpeg" in write_page(report, tmp_path / "page.html").read_text()


def test_page_is_self_contained(sick, tmp_path):
    text = write_page(check(sick, decode=False), tmp_path / "report.html").read_text()
    assert text.index("<td>s2.tar") < text.index("<td>s0.tar") < text.index("<td>s5.tar"), "the worst shards come first"
    assert "k6: 6" in text
    assert text.count("data:image/jpeg;base64,") >= 10
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text


def test_shard_statistics_agree_with_numpy():
    """Images of different sides and sizes; two are equal, one has a repeated label, and class 1 is absent."""
    images = [
        (3, 5, b"a" * 1049),
        (500, 333, b"b" * 1051),
        (7, 7, b"c" * 140),
        (3, 5, b"a" * 1049),
        (40, 20, b"d" * 9960),
    ]
    labels = [(0,), (2, 0, 2), (2,), (0,), (3, 2)]
    report = ShardReport("a.tar")
    for (height, width, image), of_image in zip(images, labels, strict=True):
        report.add_good(Header("jpeg", height, width, 3), image, of_image)
    heights, widths = np.array([(height, width) for height, width, _ in images]).T
    sizes = np.array([len(image) for _, _, image in images])
    assert (report.good, report.size, report.most_labels) == (5, sizes.sum(), 3)
    assert report.classes == {0: 3, 2: 3, 3: 1}
    assert len(set(report.hashes)) == 4
    expected = {
        "height": heights,
        "width": widths,
        "shorter side": np.minimum(heights, widths),
        "width / height": (widths / heights).round(2),
        "kB": (sizes / 1000).round(1),
    }
    assert report.spreads.keys() == expected.keys()
    for name, values in expected.items():
        assert sorted(report.spreads[name].elements()) == pytest.approx(sorted(values)), name
        for q in (0.01, 0.2, 0.21, 0.5, 0.8, 1.0):
            quantile = np.quantile(values, q, method="inverted_cdf")
            assert report.spreads[name].quantile(q) == pytest.approx(quantile), (name, q)


@pytest.mark.parametrize(
    ("shards", "mebibytes", "advice"),
    [(17, 31, "31 MiB are slow"), (17, 32, ""), (16, 1, ""), (1, 4096, ""), (1, 4097, "over 4 GiB")],
)
def test_report_advises_against_many_small_and_huge_shards(shards, mebibytes, advice, tmp_path):
    shard = Shard("x.tar", samples=1, bytes=mebibytes << 20, sha256="")
    report = Report(replace(pack(GOOD[:1], tmp_path), shards=(shard,) * shards), [])
    lines = [line for line in report.lines() if line.startswith("advice: ")]
    assert advice in "".join(lines)
    assert len(lines) == bool(advice)
    lacking = f"advice: {shards} shards for {shards + 1} workers: some workers share a shard, fine on local disks"
    assert report.lines(world=shards) == report.lines()
    assert lacking in report.lines(world=shards + 1)


def test_repair_makes_repeated_keys_unique(tmp_path):
    folder = tmp_path / "twice"
    folder.mkdir()
    write_tar(folder / "s.tar", [*sample(0), *sample(1), *((f"k0.{name[-3:]}", body) for name, body in sample(2))])
    index = build_index(folder, output=tmp_path / "index", classes=10)
    repair(index, tmp_path / "well")
    with tarfile.open(next((tmp_path / "well").glob("*.tar"))) as tar:
        images = {name: tar.extractfile(name).read() for name in tar.getnames() if name.endswith(GOOD[0].extension)}
    assert list(images) == ["s/k0.jpg", "s/k1.jpg", "s/k0-2.jpg"]
    assert list(images.values()) == [GOOD[number].image for number in (0, 1, 2)]


def test_repair_keeps_tars_of_equal_names_in_different_folders_apart(tmp_path):
    tars = []
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        tars.append(str(tmp_path / folder / "s.tar"))
        write_tar(Path(tars[-1]), [(f"k.{name[-3:]}", body) for name, body in sample(number)])
    repaired = repair(build_index(tars, output=tmp_path / "index", name="s", classes=10), tmp_path / "well")
    assert sorted(ShardReader(repaired).read(0, row)[0] for row in (0, 1)) == ["a/s/k", "b/s/k"]


def test_a_sample_that_has_changed_is_named_and_a_repaired_set_lacks_it(tmp_path):
    index = pack(GOOD[:50], tmp_path / "set", name="set", shard_samples=20)
    tar = tmp_path / "set" / "set-000000.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(GOOD[4].image) + 200] ^= 1
    tar.write_bytes(content)
    report = check(index)
    assert report.bad.counts == {"bytes changed since indexing": 1}
    assert report.good == 49
    repaired = repair(index, tmp_path / "repaired")
    keys = [ShardReader(repaired).read(0, row)[0] for row in range(repaired.shard_samples[0])]
    assert len(keys) == 49
    assert GOOD[4].key not in keys


def test_a_table_with_a_flipped_bit_or_of_another_set_is_reported(tmp_path):
    index = pack(GOOD[:50], tmp_path / "set", name="set", shard_samples=20)
    pack(GOOD[5:55], tmp_path / "other", name="set", shard_samples=20)
    table = tmp_path / "set" / "set-000000.npy"
    content = table.read_bytes()
    flipped = content[:200] + bytes([content[200] ^ 1]) + content[201:]
    for changed in (flipped, (tmp_path / "other" / table.name).read_bytes()):
        table.write_bytes(changed)
        report = check(index)
        assert not report.ok
        assert "set-000000.npy: not a valid table of set-000000.tar: its sha256" in "\n".join(report.lines(1))
    table.write_bytes(content)
    assert check(index).ok


def test_repair_keeps_the_declared_number_of_classes(tmp_path):
    """The labels of three digits end far below the 12 classes that the index declares."""
    folder = tmp_path / "few"
    folder.mkdir()
    write_tar(folder / "s.tar", [member for number in range(3) for member in sample(number)])
    index = build_index(folder, output=tmp_path / "index", classes=12)
    assert repair(index, tmp_path / "well").classes == 12


LABELS = [3, 0, 1, 1, 2, 0, 3, 3, 1, 0, 2, 1, 0, 0, 3, 1, 2, 3, 1, 0, 1, 3, 0, 1, 3]  # of s00, s01, …


NAMES = ("ant", "bee", "cat", "dog", "eel")  # no sample is an eel


@pytest.fixture
def parent(tmp_path) -> Index:
    """Return 25 samples in the shards train-000000.tar (7), …, train-000003.tar (4)."""
    samples = [Sample(f"s{number:02d}", picture(10 * number, 16), (label,)) for number, label in enumerate(LABELS)]
    return pack(samples, tmp_path / "shards" / "train", shard_samples=7, classes=5, names=NAMES)


def held(index: Index) -> list[int]:
    """Return the numbers of an index's samples in order, read from its tars; compare each with its label."""
    reader = ShardReader(index)
    numbers = []
    for shard, samples in enumerate(index.shard_samples):
        for sample in range(samples):
            key, image, label = reader.read(shard, sample)
            number = int(key[1:])
            assert image == picture(10 * number, 16)
            assert int(label) == LABELS[number]
            numbers.append(number)
    return numbers


def test_training_evaluation_and_the_doctor_take_a_subset_as_any_set(tmp_path, parent):
    index = make_subset(parent, tmp_path / "s", Rule(shots=2, seed=0))
    numbers = held(index)
    batches = list(EvaluationSet(index, batch_size=3, ops="resize(8)"))
    assert torch_labels(batches) == [LABELS[number] for number in numbers]
    report = check(index)
    assert report.ok
    assert report.good == len(numbers)
    assert join([index, parent], [1, 1]).samples == len(numbers) + 25
    dropped = exclude([index], [index.shards[0].name])[0]
    assert dropped.digest != index.digest
    assert dropped.samples < index.samples
    # A corrupt sample is bad, and named.
    tar = Path(index.location(0))
    row = index.table(0)[0]
    raw = bytearray(tar.read_bytes())
    raw[int(row["image"]) + 5] ^= 1
    tar.write_bytes(raw)
    assert row["key"].decode() in "\n".join(check(index).lines(1))


@pytest.mark.parametrize("is_lost", [True, False])
def test_subset_without_a_table_has_no_good_samples_and_is_not_packed(tmp_path, parent, is_lost):
    """Only the table excludes the held-out samples of its tar: the doctor must not use the whole tar instead."""
    index = make_subset(parent, tmp_path / "s", Rule(shots=2, seed=0))
    table = tmp_path / "s" / "train-000001.npy"
    intact = index.samples - next(shard.samples for shard in index.shards if shard.name == "train-000001.tar")
    if is_lost:
        table.unlink()
    else:
        shutil.copy(parent.tables / table.name, table)
    report = check(index)
    assert report.good == intact
    assert not report.ok
    assert f"run {index.command}" in "\n".join(report.lines(1))
    with pytest.raises(DataError, match=r"train-000001\.npy(?s:.*)jobs subset .*--shots=2 --seed=0"):
        repair(index, tmp_path / "repaired", name="s")
    assert not (tmp_path / "repaired").exists()
    # The command in the error restores the subset with the same samples.
    assert main(shlex.split(index.command)[3:]) == 0
    assert repair(load_index(tmp_path / "s"), tmp_path / "repaired", name="s").samples == index.samples


def torch_labels(batches) -> list[int]:
    labels = []
    for batch in batches:
        labels += batch.labels[batch.mask][:, 0].tolist()
    return labels


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write a tar with text labels, in a .cls and in a .json, and a file with the class names."""
    labels = [
        ("0.cls", b"tench"),
        ("1.json", b'{"label": "great white shark"}'),
        ("2.cls", b"1"),
        ("3.cls", b"tench\n"),
    ]
    members = []
    for name, label in labels:
        members += [(f"{name[0]}.jpg", picture(int(name[0]), 16)), (name, label)]
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "t.tar", members)
    (tmp_path / "classes.txt").write_text("goldfish\ngreat white shark\ntench\n")
    return tmp_path / "tars"


def test_text_labels_are_mapped_by_a_class_list(texts, tmp_path, capsys):
    assert main(["index", str(texts), "--names", f"{tmp_path}/classes.txt"]) == 0
    index = load_index(texts)
    assert index.class_counts == (0, 2, 2)
    assert index.names == ("goldfish", "great white shark", "tench")
    batches = list(EvaluationSet(index, "resize(16)", batch_size=4))
    assert batches[0].labels[:, 0].tolist() == [2, 1, 1, 2]
    assert all(batches[0].mask)
    report = check(index)
    assert report.ok
    assert report.classes == {1: 2, 2: 2}
    assert repair(index, tmp_path / "mended", name="m").names == index.names
    assert main(["pack", "tars", str(texts), f"{tmp_path}/packed"]) == 0, "by the names of the index beside them"
    assert load_index(tmp_path / "packed").class_counts == (0, 2, 2)
    assert main(["data", "stats", str(texts)]) == 0
    assert "most: tench 2, great white shark 2" in capsys.readouterr().out


def png_header(width: int, height: int) -> bytes:
    """Return a PNG header with these sides and without pixels."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, content in ((b"IHDR", body), (b"IDAT", b""), (b"IEND", b"")):
        chunks += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_packing_and_indexing_count_unusable_images_by_the_doctors_reasons(tmp_path, capsys, caplog):
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    files = {"a.jpg": picture(1), "b.jpg": b"", "c.jpg": picture(2)[:-20], "d.png": png_header(20_000, 12_000)}
    files |= {f"e{n}.jpg": b"<html>no such image</html>" for n in range(9)}
    for name, body in files.items():
        (folder / name).write_bytes(body)
    (folder / "f.jpg").symlink_to("/nowhere.jpg")
    assert main(["pack", "folder", str(folder.parent), str(tmp_path / "set"), "--name", "x"]) == 0
    packed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused: ")]
    assert "not packed" in caplog.text
    assert "1 × broken link or device" in caplog.text
    assert main(["index", str(tmp_path / "set"), "--output", str(tmp_path / "index"), "--name", "x"]) == 0
    indexed = capsys.readouterr().out.splitlines()
    assert packed
    assert set(packed) <= set(indexed)
    expected = Counter({"not a JPEG, PNG or WebP": 9, "no image": 1, "truncated": 1, "image too large": 1})
    made = load_index(tmp_path / "set")
    assert made.refused.counts == expected
    assert made.refused.first["truncated"] == "cat/c of x-000000.tar"
    assert check(made).bad.counts == expected
    # On request, both decode the whole image: a file with a header and an end may still be broken.
    whole = cv2.imencode(".png", np.zeros((9, 9, 3), np.uint8))[1].tobytes()
    torn = whole[:45] + bytes(20) + whole[65:]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "t.tar").write_bytes(
        tar_of({"a.jpg": picture(1), "a.cls": b"0", "b.png": torn, "b.cls": b"0"})
    )
    for command in (["pack", "tars"], ["index"]):
        output = [str(tmp_path / "o1")] if command == ["pack", "tars"] else ["--output", str(tmp_path / "o2")]
        assert main([*command, str(tmp_path / "torn"), *output, "--check"]) == 65
        assert "bad: 1 × not decodable" in capsys.readouterr().out


def test_members_of_odd_types_and_separated_halves_are_counted_as_while_indexing(tmp_path):
    odd = [(f"x{number}.e{number}", b"") for number in range(2000)]
    good = [member for number in range(5) for member in sample(number)]
    write_tar(tmp_path / "t.tar", [*good[::2], *good[1::2], *odd])
    index = build_index(tmp_path, name="t")
    report = check(index)
    assert report.good == 5
    assert report.refused.counts == index.refused.counts
    assert report.refused.counts.total() == 2000
