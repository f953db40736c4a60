"""Tars are scanned, never extracted: all members that tarfile reads are found, hostile ones counted or refused."""

import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.extras.sources.refusals import Refusals
from data.extras.sources.tar_offsets import (
    BLOCK,
    DOTTED,
    HIDDEN,
    REPEATED,
    PaxRecords,
    check_end,
    members,
    normal_name,
    read_pax,
    walk,
)
from data.index.names import parse_labels
from tests.support.foreign_tars import header, members_by_tarfile, old, padded
from tests.support.tars import tar_of

pytestmark = pytest.mark.quick


NAMES = [
    "a.jpg",
    "b/c.jpg",
    "x" * 150 + ".jpg",
    "y" * 90 + "/" + "z" * 90 + ".cls",
    "ü" * 80 + ".png",
    "q.tar.gz",
]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_member_that_tarfile_reads_is_found_with_its_bytes(format):
    bodies = [(name, name.encode() * (number * 37)) for number, name in enumerate(NAMES)]
    data = tar_of(bodies, format)
    read_members = [(name.decode(), data[at : at + size]) for name, at, size in members(data, "t", Refusals())]
    assert read_members == bodies


def test_a_name_ends_at_its_first_zero_as_in_tarfile():
    # Some programs leave bytes of an earlier, longer name behind the zero.
    data = header(b"a.jpg\0.txt", 5, prefix=b"b\0rest") + padded(b"image")
    data += header(b"x", 14, kind=b"L") + padded(b"long.cls\0rest\0") + header(b"x", 1) + padded(b"1") + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["b/a.jpg", "long.cls"]
    assert [name for name, _, _ in members(data, "t", Refusals())] == [b"b/a.jpg", b"long.cls"]


def test_samples_are_grouped_as_webdataset_groups_them():
    entries = [
        ("a/1.jpg", b"A"),
        ("a/1.cls", b"3"),
        ("a/1.seg.png", b"no"),
        ("a/2.cls", b"4"),
        ("b.c/3.PNG", b"B"),
    ]
    result = walk(tar_of(entries), "t")
    assert [(row[0], row[2], row[4]) for row in result.rows] == [
        (b"a/1", 1, 1),
        (b"a/2", 0, 1),
        (b"b.c/3", 1, 0),
    ]
    assert result.refused.counts == {"member type .seg.png": 1}


def test_a_label_in_cls_wins_over_json_and_repeated_members_are_counted():
    data = tar_of([("a.json", b"{}"), ("a.cls", b"7"), ("a.jpg", b"A"), ("a.jpg", b"BB")])
    result = walk(data, "t")
    _, image, size, label, _ = result.rows[0]
    assert (data[image : image + size], data[label : label + 1]) == (b"A", b"7")
    assert result.refused.counts == {"repeated member": 1}


def test_header_bombs_are_stepped_over():
    bomb = tar_of([("a.jpg", b"A")], pax_headers={"comment": "x" * 200_000, "path": "p" * 100_000})
    result = walk(bomb, "t")
    assert result.refused.counts["oversize extension header"] == 1
    assert len(result.rows) == 1
    digits = tar_of([("b.jpg", b"B")], pax_headers={"size": "9" * 5000})
    assert [row[0] for row in walk(digits, "t").rows] == [b"b"]


@pytest.mark.parametrize(
    ("body", "long_name", "size"),
    [
        (b"15 path=longer\n", b"longer", None),
        (b"11 size=77\n15 path=longer\n", b"longer", 77),
        (b"9 size=7\n9 size=8\n", b"told", 8),
        (b"11 mtime=1\n15 path=longer\n", b"longer", None),
        (b"12 size=-77\n", b"told", None),
        (b"path=longer\n", b"told", None),
        (b"x5 path=longer\n", b"told", None),
        (b" 15 path=longer\n", b"told", None),
        (b"0 path=longer\n", b"told", None),
        (b"16 path=longer\n", b"told", None),  # longer than the available data
        (b"0000000015 path=longer\n", b"told", None),  # ten digits
        (b"", b"told", None),
    ],
)
def test_pax_records_are_read_as_far_as_their_lengths_fit(body, long_name, size):
    assert read_pax(body, PaxRecords(b"told")) == PaxRecords(long_name, size)


@pytest.mark.parametrize(
    ("content", "zeros", "is_whole"),
    [
        (1, 1, True),
        (1, 2, True),
        (1, 22, True),  # two blocks, and a record of twenty
        (1, 23, False),
        (30, 34, True),  # fills a record of 32
        (29, 35, True),  # fills one of 64
        (61, 35, False),  # 96 blocks: three records of 32, of which the last alone may be zeros
        (1, 2047, True),
        (1, 2048, False),
        (2046, 2050, True),  # the largest record
        (2045, 2051, False),
    ],
)
def test_only_the_padding_that_writers_add_may_follow_a_tar(content, zeros, is_whole):
    tar = b"x" * (content * 512) + bytes(zeros * 512)
    if is_whole:
        check_end(tar, "t", content * 512)
        return
    with pytest.raises(DataError, match=f"only zeros after byte {content * 512}, {zeros * 512:,} of"):
        check_end(tar, "t", content * 512)


@pytest.mark.parametrize("size", [b"-1000", b"-1", b"+1", b"1_0"])
def test_a_size_with_a_sign_is_refused(size):
    """A negative size would lead back to the same header in an endless loop."""
    data = bytearray(tar_of([("a.jpg", b"A")]))
    data[124:136] = size.ljust(12, b"\0")
    data[148:156] = b"%06o\0 " % (sum(data[:512]) - sum(data[148:156]) + 8 * 32)
    with pytest.raises(DataError, match="no valid tar header at byte 0"):
        walk(bytes(data), "t")


def test_links_devices_and_sparse_files_are_counted():
    data = b"".join(
        tar_of([("a.jpg", b"")], format=tarfile.GNU_FORMAT, type=kind, linkname="/etc/passwd")[:512]
        for kind in (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.FIFOTYPE,
            tarfile.GNUTYPE_SPARSE,
        )
    )
    result = walk(data + bytes(1024), "t")
    assert not result.rows
    assert result.refused.counts == {"link or device": 4, "sparse member": 1}


@pytest.mark.parametrize("cut", [100, 600, 1100, 2048])
def test_truncated_tar_is_refused_or_read_up_to_its_end(cut):
    data = tar_of([("a.jpg", b"A" * 700), ("b.jpg", b"B" * 700)])
    with pytest.raises(DataError, match="t: "):
        walk(data[:cut], "t")
    kept = walk(data[:cut], "t", lenient=True)
    assert kept.broken
    assert [row[0] for row in kept.rows] == [b"a"] * (cut > 1500)


def test_no_bytes_do_more_than_raise_a_data_error():
    rng = np.random.default_rng(0)
    whole = tar_of([("a.jpg", b"A" * 300), ("x" * 150 + ".cls", b"3"), ("b.png", b"B")])
    for _ in range(500):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(0, 256)
        for row in walk(bytes(data), "t", lenient=True).rows:
            assert row[1] + row[2] <= len(data)
            assert row[3] + row[4] <= len(data)


@pytest.mark.parametrize(
    "raw, labels",
    [(b"7", (7,)), (b" 3 17\n", (3, 17)), (b"3,17", (3, 17)), (b"[3, 17]", (3, 17)), (b'{"label": 5}', (5,)),
     (b'{"labels": [1, 2], "x": 0}', (1, 2)), (b'{"cls": "4"}', (4,))],
)  # fmt: skip
def test_labels_are_read_in_every_form(raw, labels):
    assert parse_labels(raw) == labels


NO_LABELS = [
    b'{"label": false}',
    b"",
    b"cat",
    b"-1",
    b"3.5",
    b"[]",
    b"{}",
    b"[null]",
    b"[true]",
    b"[1.5]",
    b"1_000",
    b"+3",
    "٣".encode(),
    b'{"label": "1_000"}',
    b'{"label": {}}',
    b"\xff",
]


@pytest.mark.parametrize("raw", [*NO_LABELS, b"[" * 9999])
def test_invalid_class_id_is_refused(raw):
    with pytest.raises(ValueError):
        parse_labels(raw)


# ------------------------------------------------------------------------------------------ members of other writers


def sparse_file(path: Path, holes: int) -> None:
    """Write a file of this many holes, each followed by 4 KiB of data."""
    with open(path, "wb") as file:
        for number in range(holes):
            file.seek(number * 200_000 + 100_000)
            file.write(bytes([number % 256]) * 4096)


@pytest.mark.parametrize("holes", [1, 3, 4, 5, 26, 60])
@pytest.mark.parametrize("kind", ["gnu", "pax-0.0", "pax-0.1", "pax-1.0"])
def test_sparse_members_are_counted_by_their_names_and_the_others_read(tmp_path: Path, kind: str, holes: int) -> None:
    """GNU tar writes sparse members in all its formats; a header has space for four holes, each extra block for 21."""
    for number in range(3):
        (tmp_path / f"plain{number}.jpg").write_bytes(b"image" * (number + 1))
        (tmp_path / f"plain{number}.cls").write_bytes(b"1")
        sparse_file(tmp_path / f"sparse{number}.jpg", holes)
    names = sorted(path.name for path in tmp_path.iterdir())
    form, _, version = kind.partition("-")
    options = [f"--format={form}", *([f"--sparse-version={version}"] if version else [])]
    command = ["tar", "--sparse", *options, "-cf", "set.tar", *names]
    if subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this tar cannot write the format")
    with tarfile.open(tmp_path / "set.tar") as archive:
        sparse = [member.name for member in archive if member.issparse()]
    if not sparse:
        pytest.skip("this file system has no holes")

    result = walk((tmp_path / "set.tar").read_bytes(), "set.tar")
    assert sparse == [f"sparse{number}.jpg" for number in range(3)]
    assert [(row.key, row.image_size) for row in result.rows] == [(b"plain0", 5), (b"plain1", 10), (b"plain2", 15)]
    assert result.refused.counts == {"sparse member": 3}
    assert result.refused.first["sparse member"] == "sparse0.jpg"


def test_contiguous_files_are_regular_files() -> None:
    data = tar_of([("a.jpg", b"image"), ("a.cls", b"1")], type=tarfile.CONTTYPE)
    (row,) = walk(data, "t").rows
    assert (row.key, row.image_size, row.label_size) == (b"a", 5, 1)


def test_a_long_link_target_does_not_change_the_name_of_the_next_member() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        link = tarfile.TarInfo("a/" + "n" * 120 + ".jpg")
        link.type = tarfile.SYMTYPE
        link.linkname = "t" * 200
        archive.addfile(link)
        plain = tarfile.TarInfo("b.jpg")
        plain.size = 5
        archive.addfile(plain, io.BytesIO(b"image"))
    result = walk(out.getvalue(), "t")
    assert [row.key for row in result.rows] == [b"b"]
    assert result.refused.counts == {"link or device": 1}


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("a/b.jpg", "a/b.jpg"),
        ("./a/b.jpg", "a/b.jpg"),
        ("././a/./b.jpg", "a/b.jpg"),
        ("/a/b.jpg", "a/b.jpg"),
        ("a//b.jpg", "a/b.jpg"),
        ("a.b/c..d/e.jpg", "a.b/c..d/e.jpg"),
        ("a./b.jpg", "a./b.jpg"),
        ("../a/b.jpg", None),
        ("a/../b.jpg", None),
        ("./../b.jpg", None),
    ],
)
def test_file_has_the_same_key_whatever_program_wrote_its_tar(name: str, normal: str | None) -> None:
    assert normal_name(name.encode()) == (None if normal is None else normal.encode())
    result = walk(tar_of([(name, b"image")]), "t")
    if normal is None:
        assert result.refused.counts == {"name with a folder ..": 1}
    else:
        assert [row.key.decode() for row in result.rows] == [normal.removesuffix(".jpg")]


IMAGES_AND_LABELS = [("cat/0.jpg", b"a" * 700), ("cat/0.cls", b"1"), ("dog/1.png", b"b" * 512), ("dog/1.cls", b"0")]


@pytest.mark.parametrize("kind", [b"1", b"2", b"5"])
@pytest.mark.parametrize("size", [0, 700, 5000])
def test_links_and_folders_that_have_a_size_and_no_content_are_stepped_over(kind: bytes, size: int) -> None:
    members = IMAGES_AND_LABELS[:2]
    link = header(b"cat/9.jpg", size, kind, link=b"cat/0.jpg")
    for tar in (link + old(members), old(members)[: -2 * BLOCK] + link + bytes(2 * BLOCK)):
        assert [row.key for row in walk(tar, "t.tar").rows] == [b"cat/0"]
        assert members_by_tarfile(tar).keys() >= {"cat/0.jpg", "cat/0.cls"}


@pytest.mark.parametrize("size", [1, 700])
def test_the_content_of_a_link_is_stepped_over(size: int) -> None:
    """POSIX allows hard links to store their content; pax writes this with `-o linkdata`."""
    link = header(b"cat/9.jpg", size, b"1", link=b"cat/0.jpg") + padded(b"\xff" * size)
    assert [row.key for row in walk(link + old(IMAGES_AND_LABELS[:2]), "t.tar").rows] == [b"cat/0"]


def test_tars_joined_by_gnu_tar_are_one_tar(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(old(IMAGES_AND_LABELS[2 * number :][:2]))
    subprocess.run(["tar", "-Af", "0.tar", "1.tar"], cwd=tmp_path, check=True)
    assert [row.key for row in walk((tmp_path / "0.tar").read_bytes(), "0.tar").rows] == [b"cat/0", b"dog/1"]


def test_names_cut_off_by_a_dot_are_counted_unless_their_sample_has_an_image() -> None:
    names = ["IMG.1.jpg", "IMG.1.cls", "IMG.2.jpg", "IMG.2.cls", "a.depth.png", "a.jpg", "a.cls", "a.seg.png", ".x.jpg"]
    tar = tar_of([(name, b"content") for name in names])
    result = walk(tar, "t.tar")
    assert [row.key for row in result.rows] == [b"a"]
    counts = {DOTTED: 4, "member type .depth.png": 1, "member type .seg.png": 1, HIDDEN: 1}
    assert result.refused.counts == counts
    assert result.refused.first[DOTTED] == "IMG.1.jpg"
    assert [row.key for row in walk(tar, "t.tar", rename=True).rows if row.label_size] == [b"IMG_1", b"IMG_2", b"a"]


def test_samples_with_the_key_of_an_earlier_one_are_kept_and_counted() -> None:
    result = walk(
        tar_of([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3"), ("b.jpg", b"4"), ("a.jpg", b"5")]), "t.tar"
    )
    assert len(result.rows) == 5
    assert result.refused.counts == {REPEATED: 3}
