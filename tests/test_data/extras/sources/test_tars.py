"""Compressed WebDataset tars are repacked like uncompressed tars."""

import gzip
import io
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from data.errors import DataError
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.members import Member
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Sample
from data.extras.sources.tar_offsets import BLOCK, HIDDEN, walk
from data.extras.sources.tars import compressed_samples, tars
from data.reader import ShardReader
from jobs.__main__ import main
from tests.support.archives import packed, picture, tar_bytes
from tests.support.foreign_tars import WRITERS, members_by_tarfile, old
from tests.support.tars import open_tar, tar_of, write_tar


def test_compressed_and_plain_webdataset_tars_give_the_same_set(tmp_path, caplog):
    files = {}
    for number in range(4):
        files |= {f"{number}.jpg": picture(number), f"{number}.cls": b"%d" % (number % 2), f"{number}.txt": b"hello"}
    half = {"lonely.jpg": picture(9)}
    for suffix, compress in ((".tar", bytes), (".tar.gz", gzip.compress), (".tar.xz", lzma.compress)):
        (tmp_path / suffix).mkdir()
        (tmp_path / suffix / f"train{suffix}").write_bytes(compress(tar_bytes({**files, **half})))
    plain = packed(tmp_path, "tars", tmp_path / ".tar")
    assert plain == {f"train/{number}": (picture(number), b"%d" % (number % 2)) for number in range(4)}
    for path in (tmp_path / ".tar.gz", tmp_path / ".tar.xz", tmp_path / ".tar.gz" / "train.tar.gz"):
        caplog.clear()
        assert packed(tmp_path, "tars", path) == plain
        assert "1 × no label, first lonely of train" in caplog.text


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_excluded_members_are_counted_as_in_an_index(tmp_path, caplog, compress):
    buffer = io.BytesIO()
    with open_tar(buffer) as add:
        add("a.jpg", picture(1))
        add("a.cls", b"1")
        add("a.jpg", picture(2))
        add("b.jpg", b"")
        add("b.cls", b"")
        add("c.tiff", b"II")
        add("d.txt", b"a caption is nothing to count")
        add("e.jpg", type=tarfile.SYMTYPE, linkname="a.jpg")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t.tar").write_bytes(buffer.getvalue())
    indexed = build_index(tmp_path / "in", output=tmp_path / "index", name="t").refused.counts
    assert indexed == {
        "repeated member": 1,
        "empty sample": 1,
        "member type .tiff": 1,
        "link or device": 1,
    }
    suffix = ".tar" if compress is bytes else ".tar.gz"
    (tmp_path / "in" / "t.tar").unlink()
    (tmp_path / "in" / f"t{suffix}").write_bytes(compress(buffer.getvalue()))
    assert packed(tmp_path, "tars", tmp_path / "in") == {"t/a": (picture(1), b"1")}
    for reason, count in indexed.items():
        if compress is bytes or "link" not in reason:
            assert f"{count} × {reason}, first " in caplog.text
    assert compress is bytes or "skipped 1 links" in caplog.text


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_an_empty_member_does_not_hide_another_one_of_its_sample(tmp_path, compress):
    names = {
        "a.cls": b"",
        "a.json": b'{"label": 3}',
        "a.jpg": b"",
        "a.png": picture(1),
        "b.jpg": picture(2),
        "b.cls": b"0",
    }
    path = tmp_path / ("t.tar" if compress is bytes else "t.tar.gz")
    path.write_bytes(compress(tar_of(names)))
    assert [(s.key, s.image, s.labels) for s in tars(path)] == [("t/a", picture(1), (3,)), ("t/b", picture(2), (0,))]


def test_huge_member_of_a_small_archive_is_rejected_without_using_much_memory(tmp_path, caplog):
    """300 MB of zeros are 300 kB of gzip: as much is read as an image may have, and no more is kept."""
    zeros = 300 << 20
    path = tmp_path / "t.tar.gz"
    good = tar_bytes({"a.jpg": picture(1), "a.cls": b"1"})
    end = good.rindex(b"1" + bytes(511)) + 512  # of the last member: the label
    good = good[:end]
    with gzip.open(path, "wb", 1) as file:
        file.write(good)
        for name, size in (("b.jpg", zeros), ("b.cls", zeros // 10)):
            header = tarfile.TarInfo(name)
            header.size = size
            file.write(header.tobuf())
            for _ in range(0, size, 1 << 20):
                file.write(bytes(1 << 20))
        file.write(bytes(1024))
    code = f"""
import resource
from data.extras.sources.tars import tars
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print([sample.key for sample in tars({str(path)!r})])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    keys, grown_kb = done.stdout.splitlines()
    assert keys == "['t/a']"
    assert int(grown_kb) < 250_000
    assert "1 × image file too large, first b of t.tar.gz" in done.stderr
    assert "1 × label too large, first b of t.tar.gz" in done.stderr


def test_huge_extension_header_and_huge_file_are_rejected(tmp_path):
    header = tarfile.TarInfo("././@PaxHeader")
    header.type = tarfile.XHDTYPE
    header.size = 3 << 30
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(header.tobuf() + bytes(1 << 20)))
    with pytest.raises(DataError, match=r"t\.tar\.gz: an extension header has 3,221,225,472 bytes"):
        list(tars(tmp_path / "t.tar.gz"))
    with open(tmp_path / "huge.jpg", "wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(DataError, match=r"huge\.jpg has 3,221,225,472 bytes, expected at most 100,000,000"):
        Sample("huge", tmp_path / "huge.jpg", (0,)).read()
    member = Member("m.jpg", lambda: io.BytesIO(bytes(101)), "an.tar")
    assert member.read(101) == bytes(101)
    with pytest.raises(DataError, match=r"an\.tar: m\.jpg is larger than the limit of 100 bytes"):
        member.read(100)


IMAGES_AND_LABELS = [("cat/0.jpg", b"a" * 700), ("cat/0.cls", b"1"), ("dog/1.png", b"b" * 512), ("dog/1.cls", b"0")]


LONG = "d/" + "x" * 60 + "/" + "y" * 70


LONG_AND_FOREIGN = [("ünï/火.jpg", b"c" * 513), ("ünï/火.cls", b"2"), (f"{LONG}.jpg", b"z" * 9), (f"{LONG}.cls", b"7")]


WITHOUT_LONG_NAMES = ("version 7", "slash", "folders", "contiguous")


@pytest.mark.parametrize("writer", WRITERS)
def test_tars_of_all_programs_have_the_members_that_tarfile_reads(writer: str, tmp_path: Path) -> None:
    members = list(IMAGES_AND_LABELS)
    if writer not in WITHOUT_LONG_NAMES:
        members += LONG_AND_FOREIGN
    tar = WRITERS[writer](members)
    by_tarfile = {name.lstrip("./"): content for name, content in members_by_tarfile(tar).items()}
    assert {name: content for name, content in by_tarfile.items() if name in dict(members)} == dict(members)
    result = walk(tar, "t.tar")
    view = memoryview(tar)
    pairs = {row.key.decode(): (bytes(row.image_in(view)), bytes(row.label_in(view))) for row in result.rows}
    expected = {}
    for (name, image), (_, label) in zip(members[::2], members[1::2], strict=True):
        expected[name.rpartition(".")[0]] = (image, label)
    assert pairs == expected
    assert set(result.refused.counts) <= {HIDDEN}
    # The reader of compressed tars gives the same samples and counts.
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(tar))
    refused = Refusals()
    samples = compressed_samples(tmp_path / "t.tar.gz", refused)
    streamed = {sample.key: (sample.image, sample.label) for sample in samples}
    assert streamed == expected
    assert not refused.counts


ENDS = {
    "no end": (b"", "truncated"),
    "one block": (bytes(BLOCK), ""),
    "two blocks": (bytes(2 * BLOCK), ""),
    "record of 20": (bytes(20 * BLOCK), ""),
    "garbage": (bytes(2 * BLOCK) + b"garbage", "the tar ends at byte"),
    "garbage instead of an end": (b"garbage" * 100, "no valid tar header"),
    "another tar": (bytes(2 * BLOCK) + old(IMAGES_AND_LABELS[:2]), "the tar ends at byte"),
}


@pytest.mark.parametrize("end", ENDS)
def test_ends_of_tars_are_accepted_or_refused_by_the_reader_of_plain_and_compressed_ones(
    end: str, tmp_path: Path
) -> None:
    content, problem = ENDS[end]
    tar = old(IMAGES_AND_LABELS[:2])[: -2 * BLOCK] + content
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(tar))
    if not problem:
        assert [row.key for row in walk(tar, "t.tar").rows] == [b"cat/0"]
        assert [sample.key for sample in compressed_samples(tmp_path / "t.tar.gz", Refusals())] == ["cat/0"]
        return
    with pytest.raises(DataError, match=problem):
        walk(tar, "t.tar")
    with pytest.raises(DataError):
        list(compressed_samples(tmp_path / "t.tar.gz", Refusals()))


def test_tars_with_restarting_keys_are_packed_together(tmp_path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.tar").write_bytes(tar_of({"0.jpg": picture(1), "0.cls": b"3"}))
    made = pack(tars(tmp_path), tmp_path / "set")
    assert [ShardReader(made).read(0, n)[0] for n in (0, 1)] == ["x/0", "y/0"]


def test_tars_of_img2dataset_are_repacked_with_labels_from_json(tmp_path):
    about = b'{"url": "http://x/1.jpg", "caption": "hi", "key": "000000001", "status": "success", "label": 4}'
    body = tar_of({"000000001.jpg": picture(1), "000000001.json": about, "000000001.txt": b"hi", "2.jpg": picture(2)})
    (tmp_path / "00000.tar").write_bytes(body)
    (tmp_path / "00000_stats.json").write_text("{}")
    (tmp_path / "00000.parquet").write_bytes(b"")
    assert list(tars(tmp_path)) == [Sample("00000/000000001", picture(1), (4,))], "what has no label is left out"
    (tmp_path / "00000.tar").write_bytes(tar_of({"a.jpg": picture(1), "a.json": b'{"caption": "hi"}'}))
    with pytest.raises(DataError, match="no sample has both a label and an image"):
        list(tars(tmp_path))


def samples(first: int, count: int) -> list[tuple[str, bytes]]:
    members = []
    for number in range(first, first + count):
        members += [(f"{number}.jpg", picture(number)), (f"{number}.cls", str(number % 3).encode())]
    return members


def test_halves_whose_other_half_is_missing_are_counted_by_name_and_not_packed(tmp_path, capsys, caplog):
    orphans = [("lonely.jpg", picture(1)), ("orphan.cls", b"1"), ("empty.jpg", b"")]
    write_tar(tmp_path / "t.tar", [*samples(0, 3), *orphans])
    assert main(["index", str(tmp_path), "--name", "t"]) == 0
    said = capsys.readouterr().out
    assert "refused: 1 × no image, first orphan of t.tar" in said
    assert "refused: 1 × no label, first lonely of t.tar" in said
    assert "refused: 1 × empty sample, first empty of t.tar" in said
    packed = pack(tars(tmp_path), tmp_path / "packed")
    assert packed.samples == 3
    assert all(packed.table(0)["image_size"])
    assert "samples were not packed" in caplog.text
    assert "1 × no image, first orphan of t.tar" in caplog.text
