"""Compressed WebDataset tars are repacked like uncompressed tars."""

import gzip
import io
import lzma
import subprocess
import sys
import tarfile

import pytest

from data.errors import DataError
from data.extras.sources.members import Member
from data.extras.sources.tars import tars
from data.shards.indexing import build_index
from data.sources.samples import Sample
from tests.support.archives import packed, picture, tar_bytes
from tests.support.tars import open_tar


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
