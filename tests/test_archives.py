"""Owners' archives are read as they were downloaded: every image with its label, the damaged and the odd said aloud."""

import bz2
import gzip
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data.archives import flowers, pets
from data.archives.members import members, tar_members
from data.archives.published import Published
from data.errors import DataError
from data.images.decode import decode
from data.shards.index import load_index
from data.shards.reader import Reader
from jobs.__main__ import main
from tests import archives
from tests.archives import picture, tar_bytes, write_folder


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Image and label of every sample of a packed set, by its key."""
    index = load_index(folder)
    reader = Reader(index)
    samples = {}
    for shard, count in enumerate(index.shard_samples):
        for sample in range(count):
            key, image, label = reader.read(shard, sample)
            samples[key] = (image, label)
    return samples


def packed(tmp_path: Path, source: str, path: Path, *options: str) -> dict[str, tuple[bytes, bytes]]:
    """What `jobs pack` makes of a miniature, which is a part on purpose."""
    output = tmp_path / f"set{len(list(tmp_path.glob('set*')))}"
    assert main(["pack", source, str(path), str(output), "--partial", *options]) == 0
    return contents(output)


# ------------------------------------------------------------------------------------------------ archives

FILES = {"a/x.jpg": picture(1), "a/._x.jpg": b"no", "b.txt": b"hello" * 3000, "./c/d.jpg": picture(3)}
READ = {"a/x.jpg": picture(1), "b.txt": b"hello" * 3000, "c/d.jpg": picture(3)}


def read(path: Path) -> dict[str, bytes]:
    return {member.name: member.read() for member in members(path)}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_a_tar_is_read_whatever_it_was_compressed_with_and_refused_wherever_it_is_cut(tmp_path, compress):
    """Python's own tarfile takes a tar that ends between two members, or within a header, for whole."""
    path = tmp_path / "named-like-nothing"
    whole = compress(tar_bytes(FILES))
    path.write_bytes(whole)
    assert read(path) == READ
    is_plain = compress is bytes
    cuts = [100, 512, 4 * 512, len(whole) // 2] if is_plain else [9, len(whole) // 2, len(whole) - 3]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"named-like-nothing.*(cut short|no valid tar header)"):
            read(path)


def test_what_follows_a_tar_s_end_and_a_damaged_header_are_refused(tmp_path):
    plain = tar_bytes(FILES)
    (tmp_path / "two.tar").write_bytes(plain + plain)
    with pytest.raises(DataError, match="more follows behind the end"):
        read(tmp_path / "two.tar")
    damaged = bytearray(plain)
    damaged[plain.index(b"b.txt")] ^= 1
    (tmp_path / "damaged.tar").write_bytes(damaged)
    with pytest.raises(DataError, match="no valid tar header at byte"):
        read(tmp_path / "damaged.tar")
    (tmp_path / "page.tar").write_bytes(b"<html>Please log in to download</html>" * 40)
    with pytest.raises(DataError, match="no valid tar header at byte 0"):
        read(tmp_path / "page.tar")


def test_a_zip_and_a_folder_are_read_like_a_tar_and_an_encrypted_zip_is_refused(tmp_path):
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
    with pytest.raises(DataError, match="cut short or damaged"):
        read(tmp_path / "cut.zip")


def test_a_tar_inside_a_compressed_tar_is_read_without_unpacking_either(tmp_path):
    inner = tar_bytes({"n1_1.JPEG": picture(1)})
    path = archives.write_tar_gz(tmp_path / "outer.tar.gz", {"w/n1.tar": inner, "w/n2.tar": inner[:700]})
    outer = members(path)
    assert [member.read() for member in tar_members(next(outer).opened(), "n1.tar")] == [picture(1)]
    with pytest.raises(DataError, match=r"n2\.tar: .*cut short"):
        for member in tar_members(next(outer).opened(), "n2.tar"):
            member.read()


# ------------------------------------------------------------------------------------------- what is checked


def test_a_set_that_is_not_what_is_published_is_refused_before_it_has_an_index(tmp_path, monkeypatch, capsys, caplog):
    folder = archives.pets(tmp_path / "pets")
    command = ["pack", "pets", str(folder), str(tmp_path / "set"), "--split", "test"]
    monkeypatch.setitem(pets.PUBLISHED, "test", Published(6, 3, "by hand"))
    assert main(command) == 0
    monkeypatch.setitem(pets.PUBLISHED, "test", Published(7, 3, "by hand"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:]]) == 65
    said = capsys.readouterr().err
    assert "pets, test: found 6 samples of 3 classes, expected 7 samples of 3 classes (by hand)" in said
    assert "--partial" in said and not list((tmp_path / "seven").glob("*.index.json"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:], "--partial"]) == 0
    assert "found 6 samples of 3 classes, expected 7" in caplog.text
    assert contents(tmp_path / "seven") == contents(tmp_path / "set")
    monkeypatch.setitem(pets.PUBLISHED, "test", Published(6, 37, "by hand"))
    assert main([*command[:3], str(tmp_path / "more"), *command[4:]]) == 65
    assert "pets, test: found 3 classes, expected 6 samples of 37 classes" in capsys.readouterr().err


def test_a_split_that_a_set_does_not_have_is_refused_at_once(capsys):
    assert main(["pack", "pets", "/nowhere", "OUT", "--split", "validation"]) == 78
    assert "source pets has the splits train, test; split is validation" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- Pets and Flowers


def test_pets_are_split_by_the_owners_lists_and_leftovers_and_gifs_are_said(tmp_path, caplog):
    folder = archives.pets(tmp_path / "pets")
    test = packed(tmp_path, "pets", folder, "--split", "test")
    labels = {key: label for key, (_, label) in test.items()}
    assert labels == {f"{breed}_{n}": str(i).encode() for i, breed in enumerate(archives.BREEDS) for n in (2, 4)}
    assert test["american_bulldog_4"][0] == picture(44)
    assert np.array_equal(decode(test["Egyptian_Mau_2"][0]), np.full((8, 8, 3), 22, np.uint8)), "the GIF's pixels"
    for line in (
        "1 × image that no list names, first american_bulldog_99.jpg",
        "1 × member type .mat, first Abyssinian_100.mat",
        "1 × GIF made a PNG, pixel by pixel, first Egyptian_Mau_2.jpg",
    ):
        assert line in caplog.text
    train = packed(tmp_path, "pets", folder)
    assert set(train) == {f"{breed}_{n}" for breed in archives.BREEDS for n in (1, 3)}
    assert load_index(tmp_path / "set0").names == load_index(tmp_path / "set1").names == archives.BREEDS


def test_pets_may_lie_there_unpacked_and_a_lacking_image_is_named(tmp_path, capsys):
    folder = archives.pets(tmp_path / "pets")
    unpacked = tmp_path / "unpacked"
    for name in ("images.tar.gz", "annotations.tar.gz"):
        write_folder(unpacked, {member.name: member.read() for member in members(folder / name)})
    assert packed(tmp_path, "pets", unpacked) == packed(tmp_path, "pets", folder)
    (unpacked / "images" / "Abyssinian_3.jpg").unlink()
    assert main(["pack", "pets", str(unpacked), str(tmp_path / "OUT"), "--partial"]) == 65
    assert "lacks 1 images of trainval.txt: 'Abyssinian_3'" in capsys.readouterr().err
    os.remove(folder / "annotations.tar.gz")
    assert main(["pack", "pets", str(folder), str(tmp_path / "OUT")]) == 65
    assert "has none of annotations.tar.gz" in capsys.readouterr().err


def test_flowers_are_split_and_labelled_by_the_owners_matlab_files(tmp_path):
    folder = archives.flowers(tmp_path / "flowers")
    for split, numbers in {"train": {5, 3}, "validation": {1}, "trainval": {1, 3, 5}, "test": {2, 4, 6, 7}}.items():
        expected = {}
        for number in numbers:
            label = archives.FLOWER_LABELS[number - 1] - 1
            expected[f"image_{number:05d}"] = (picture(number), str(label).encode())
        assert packed(tmp_path, "flowers102", folder, "--split", split) == expected
    names = load_index(tmp_path / "set0").names
    assert len(names) == 102 and names[0] == "pink primrose" and names[101] == "blackberry lily"
    (folder / "setid.mat").write_bytes((folder / "setid.mat").read_bytes()[:150])
    with pytest.raises(DataError, match=r"setid\.mat: no array 'trnid'"):
        list(flowers.samples(folder, "train"))
