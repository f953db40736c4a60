"""Archives are read without unpacking, under any name; damaged, truncated and encrypted ones are rejected."""

import bz2
import gzip
import lzma
import zipfile
from pathlib import Path

import pytest

from data.errors import DataError
from data.extras.sources.members import members, tar_members
from tests.support import archives
from tests.support.archives import picture, tar_bytes, write_folder

FILES = {"a/x.jpg": picture(1), "a/._x.jpg": b"no", "b.txt": b"hello" * 3000, "./c/d.jpg": picture(3)}
READ = {"a/x.jpg": picture(1), "b.txt": b"hello" * 3000, "c/d.jpg": picture(3)}


def read(path: Path) -> dict[str, bytes]:
    return {member.name: member.read() for member in members(path)}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_tar_is_read_with_any_compression_and_rejected_if_truncated(tmp_path, compress):
    """Python's tarfile accepts a tar that ends between two members or within a header as complete."""
    path = tmp_path / "named-like-nothing"
    whole = compress(tar_bytes(FILES))
    path.write_bytes(whole)
    assert read(path) == READ
    is_plain = compress is bytes
    cuts = [100, 512, 4 * 512, len(whole) // 2] if is_plain else [9, len(whole) // 2, len(whole) - 3]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"named-like-nothing.*(truncated or damaged|no valid tar header)"):
            read(path)


def test_data_after_the_end_of_a_tar_and_a_damaged_header_are_rejected(tmp_path):
    plain = tar_bytes(FILES)
    damaged = bytearray(plain)
    damaged[plain.index(b"b.txt")] ^= 1
    page = b"<html>Please log in to download</html>" * 40
    for content, message in (
        (plain + plain, "data follows the end"),
        (damaged, "no valid tar header at byte"),
        (page, "no valid tar header at byte 0"),
    ):
        (tmp_path / "odd.tar").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "odd.tar")


def test_zip_and_folder_are_read_like_a_tar_and_an_encrypted_zip_is_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "files.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in FILES.items():
            archive.writestr(name, body)
    assert read(tmp_path / "files.zip") == READ
    assert read(write_folder(tmp_path / "files", FILES)) == READ
    locked = bytearray((tmp_path / "files.zip").read_bytes())
    entry = locked.index(b"PK\x01\x02")
    locked[entry + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(locked)
    with pytest.raises(DataError, match=r"a/x\.jpg is encrypted"):
        read(tmp_path / "locked.zip")
    (tmp_path / "cut.zip").write_bytes(bytes(locked[:-30]))
    with pytest.raises(DataError, match="truncated or damaged"):
        read(tmp_path / "cut.zip")


def test_tar_inside_a_compressed_tar_is_read_without_unpacking(tmp_path):
    inner = tar_bytes({"n1_1.JPEG": picture(1)})
    path = archives.write_tar_gz(tmp_path / "outer.tar.gz", {"w/n1.tar": inner, "w/n2.tar": inner[:700]})
    outer = members(path)
    assert [member.read() for member in tar_members(next(outer).opened(), "n1.tar")] == [picture(1)]
    with pytest.raises(DataError, match=r"n2\.tar: .*truncated"):
        for member in tar_members(next(outer).opened(), "n2.tar"):
            member.read()


@pytest.mark.parametrize(("start", "program"), [(b"\x28\xb5\x2f\xfd", "zstd"), (b"\x04\x22\x4d\x18", "lz4")])
def test_a_compression_that_python_cannot_read_is_named_with_its_program(tmp_path, start, program):
    (tmp_path / "a.tar.x").write_bytes(start + bytes(600))
    with pytest.raises(DataError, match=rf"compressed with {program}\n.*run {program} -d .*a\.tar\.x"):
        list(members(tmp_path / "a.tar.x"))


def test_skipped_files_of_a_folder_are_counted_in_a_warning(tmp_path, caplog):
    folder = write_folder(tmp_path / "files", {**FILES, "@eaDir/t.jpg": b"no", "c/._d.jpg": b"no"})
    assert read(folder) == READ
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: skipped 2 × hidden file, 1 × file in a system folder (@eaDir)"
    ]
    caplog.clear()
    (folder / "@eaDir/t.jpg").unlink()
    for name in ("a/._x.jpg", "c/._d.jpg"):
        (folder / name).unlink()
    assert read(folder) == READ
    assert not caplog.records
