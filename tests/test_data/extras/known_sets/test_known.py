"""Original archives are read as downloaded: every image keeps its label, and damaged files are reported."""

import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.extras.known_sets.archive import samples_of_archive
from data.extras.known_sets.known import FLOWERS, known_archive, listed_samples
from data.extras.shards.packing import pack
from data.extras.sources.members import members
from data.images.decode import decode
from data.index.document import load_index
from jobs.__main__ import main
from tests.support import archives
from tests.support.archives import packed, picture, write_folder

# ------------------------------------------------------------------------------------------- what is checked


def test_unknown_split_is_rejected_immediately(capsys):
    assert main(["pack", "pets", "/nowhere", "OUT", "--split", "validation"]) == 64
    assert "split is validation, but source pets has only the splits train, test" in capsys.readouterr().err
    assert main(["pack", "folder", "/nowhere", "OUT", "--partial"]) == 64
    assert "`partial` applies only to known data sets, but source is folder" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- Pets and Flowers


def test_pets_follow_the_official_lists_and_log_leftovers_and_gifs(tmp_path, caplog):
    folder = archives.pets(tmp_path / "pets")
    test = packed(tmp_path, "pets", folder, "--split", "test")
    labels = {key: label for key, (_, label) in test.items()}
    assert labels == {f"{breed}_{n}": str(i).encode() for i, breed in enumerate(archives.BREEDS) for n in (2, 4)}
    assert test["american_bulldog_4"][0] == picture(44)
    assert np.array_equal(decode(test["Egyptian_Mau_2"][0]), np.full((8, 8, 3), 22, np.uint8)), "the GIF's pixels"
    for line in (
        "1 × image that is not in any list, first american_bulldog_99.jpg",
        "1 × member type .mat, first Abyssinian_100.mat",
        "1 × GIF converted to PNG without loss, first Egyptian_Mau_2.jpg",
    ):
        assert line in caplog.text
    train = packed(tmp_path, "pets", folder)
    assert set(train) == {f"{breed}_{n}" for breed in archives.BREEDS for n in (1, 3)}
    assert load_index(tmp_path / "set0").names == load_index(tmp_path / "set1").names == archives.BREEDS


def test_unpacked_pets_are_read_and_a_missing_image_is_named(tmp_path, capsys):
    folder = archives.pets(tmp_path / "pets")
    unpacked = tmp_path / "unpacked"
    for name in ("images.tar.gz", "annotations.tar.gz"):
        write_folder(unpacked, {member.name: member.read() for member in members(folder / name)})
    assert packed(tmp_path, "pets", unpacked) == packed(tmp_path, "pets", folder)
    (unpacked / "images" / "Abyssinian_3.jpg").unlink()
    assert main(["pack", "pets", str(unpacked), str(tmp_path / "OUT"), "--partial"]) == 65
    assert "1 images of split train are missing: 'Abyssinian_3'" in capsys.readouterr().err
    os.remove(folder / "annotations.tar.gz")
    assert main(["pack", "pets", str(folder), str(tmp_path / "OUT")]) == 65
    assert "expected one of annotations.tar.gz" in capsys.readouterr().err


def test_flowers_follow_the_official_matlab_files(tmp_path):
    folder = archives.flowers(tmp_path / "flowers")
    for split, numbers in {"train": {5, 3}, "validation": {1}, "trainval": {1, 3, 5}, "test": {2, 4, 6, 7}}.items():
        expected = {}
        for number in numbers:
            label = archives.FLOWER_LABELS[number - 1] - 1
            expected[f"image_{number:05d}"] = (picture(number), str(label).encode())
        assert packed(tmp_path, "flowers102", folder, "--split", split) == expected
    names = load_index(tmp_path / "set0").names
    assert len(names) == 102
    assert names[0] == "pink primrose"
    assert names[101] == "blackberry lily"
    (folder / "setid.mat").write_bytes((folder / "setid.mat").read_bytes()[:150])
    with pytest.raises(DataError, match=r"setid\.mat: no array 'trnid'"):
        list(listed_samples(FLOWERS, folder, "train"))


# ------------------------------------------------------------------------------------------------ ImageNet


def test_killed_packing_of_a_compressed_archive_resumes_to_the_same_bytes(tmp_path):
    path = archives.write_tar_gz(tmp_path / "winter21_whole.tar.gz", archives.class_tars(5))

    def samples():
        archive = known_archive("imagenet-21k")
        assert archive is not None
        return samples_of_archive(archive, path, "train", "21k", partial=True)

    def dying():
        yield from itertools.islice(samples(), 11)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(dying(), tmp_path / "killed", shard_samples=4)
    kept = (tmp_path / "killed" / "train-000001.tar").stat().st_mtime_ns
    for name in ("killed", "whole"):
        pack(samples(), tmp_path / name, shard_samples=4)
    assert (tmp_path / "killed" / "train-000001.tar").stat().st_mtime_ns == kept
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()


# --------------------------------------------------------------------------------------------------- CIFAR


def cifar_by_hand(images: archives.CifarImages, batches: list[str]) -> dict[str, tuple[list, bytes]]:
    """Return pixels (H, W, RGB) and label of every image in some batches, by a loop over planes, rows and columns."""
    samples = {}
    for batch in batches:
        for number, row in enumerate(images.pixels[batch]):
            pixels = [[[int(row[c * 1024 + y * 32 + x]) for c in range(3)] for x in range(32)] for y in range(32)]
            samples[f"{batch}-{number:05d}"] = (pixels, str(images.labels[batch][number]).encode())
    return samples


@pytest.mark.parametrize("name", archives.CIFAR)
def test_cifar_shards_are_equal_from_archive_and_folder(tmp_path, name):
    source = name.replace("-", "")
    batches, names, _ = archives.CIFAR[name]
    images = archives.cifar_images(batches, len(names))
    archive = archives.cifar(tmp_path / "downloads", name, images)
    split = {"train": [], "test": []}
    for batch in sorted(batches):
        split["test" if "test" in batch else "train"].append(batch)
    for part, wanted in split.items():
        expected = cifar_by_hand(images, wanted)
        samples = packed(tmp_path, source, archive, "--split", part)
        assert {key: (decode(image).tolist(), label) for key, (image, label) in samples.items()} == expected
        assert packed(tmp_path, source, tmp_path / "downloads", "--split", part) == samples
    unpacked = write_folder(tmp_path / "unpacked", {member.name: member.read() for member in members(archive)})
    assert packed(tmp_path, source, unpacked) == packed(tmp_path, source, archive)
    assert {load_index(folder).names for folder in tmp_path.glob("set*")} == {names}


def test_wrong_cifar_version_and_truncated_batch_are_rejected(tmp_path, capsys):
    python = archives.write_tar_gz(tmp_path / "cifar-100-python.tar.gz", {"cifar-100-python/train": b"pickle"})
    assert main(["pack", "cifar100", str(python), str(tmp_path / "OUT")]) == 65
    assert "expected the binary version, cifar-100-binary.tar.gz, which has the same" in capsys.readouterr().err
    torn = {"cifar-100-binary/train.bin": bytes(3000), "cifar-100-binary/fine_label_names.txt": b"a\nb\n"}
    binary = archives.write_tar_gz(tmp_path / "cifar-100-binary.tar.gz", torn)
    assert main(["pack", "cifar100", str(binary), str(tmp_path / "OUT"), "--partial"]) == 65
    assert "train.bin: 3,000 bytes are not a multiple of the record size of 3,074 bytes" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- ObjectNet


# ------------------------------------------------------------------------------------------- what is published


def test_published_sizes_agree_with_the_papers():
    """The expected numbers are copied by hand from the papers and the web pages of the data sets."""
    expected = {
        ("imagenet-train", "train"): (1_281_167, 1000),
        ("imagenet-21k", "train"): (13_153_500, 19_167),
        ("imagenet-21k-fall11", "train"): (14_197_122, 21_841),
        ("cifar10", "train"): (50_000, 10),
        ("cifar10", "test"): (10_000, 10),
        ("cifar100", "train"): (50_000, 100),
        ("cifar100", "test"): (10_000, 100),
        ("pets", "train"): (3_680, 37),
        ("pets", "test"): (3_669, 37),
        ("flowers102", "train"): (1_020, 102),
        ("flowers102", "validation"): (1_020, 102),
        ("flowers102", "trainval"): (2_040, 102),
        ("flowers102", "test"): (6_149, 102),
        ("objectnet", "test"): (18_574, 113),
        ("imagenet-validation", "train"): (50_000, 1000),
    }
    for (source, split), numbers in expected.items():
        archive = known_archive(source)
        assert archive is not None
        published = archive.published[split]
        assert (published.samples, published.classes) == numbers
    real = known_archive("imagenet-validation", real=Path("real.json"))
    assert real is not None
    assert real.published["train"].samples == 46_837


def test_pickled_or_damaged_cifar_and_parquet_without_bytes_are_rejected(tmp_path, capsys):
    """Pickles are never loaded. Each of these files used to end with an internal error (exit code 70)."""
    batch = {b"data": bytes(3072), b"labels": [3], b"filenames": [b"a.png"]}
    for number in range(1, 6):
        write_folder(tmp_path / "python", {f"data_batch_{number}": pickle.dumps(batch)})
        write_folder(tmp_path / "odd", {f"data_batch_{number}.bin": bytes(3073)})
        write_folder(tmp_path / "beyond", {f"data_batch_{number}.bin": b"\xc8" + bytes(3072)})
    write_folder(tmp_path / "odd", {"batches.meta.txt": b"cat\xff dog"})
    write_folder(tmp_path / "beyond", {"batches.meta.txt": b"a b c d e f g h i j"})
    for name, message in (
        ("python", "expected the binary version, cifar-10-binary.tar.gz"),
        ("odd", "batches.meta.txt: invalid UTF-8 at byte 3"),
        ("beyond", "data_batch_1-00000 has label 200, but there are 10 class names"),
    ):
        assert main(["pack", "cifar10", str(tmp_path / name), str(tmp_path / "OUT"), "--partial"]) == 65
        assert message in capsys.readouterr().err
    for number, (cell, message) in enumerate(
        [
            ({"data": b"x", "path": "a.png"}, "row 0 contains no key 'bytes' but data, path"),
            ({"bytes": None, "path": "a.png"}, "row 0 contains a path instead of bytes"),
            ("a.png", "row 0 contains a str"),
            ([1, 2], "row 0 contains a list"),
        ]
    ):
        folder = tmp_path / f"parquet{number}"
        folder.mkdir()
        parquet.write_table(pyarrow.Table.from_pylist([{"image": cell, "label": 1}]), folder / "a.parquet")
        assert main(["pack", "parquet", str(folder), str(tmp_path / "OUT")]) == 65
        assert message in capsys.readouterr().err
