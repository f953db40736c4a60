"""Owners' archives are read as they were downloaded: every image with its label, the damaged and the odd said aloud."""

import itertools
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.extras.known_sets import objectnet
from data.extras.known_sets.archive import samples_of_archive
from data.extras.known_sets.known import FLOWERS, known_archive, listed_samples
from data.images.decode import decode
from data.index.document import load_index
from data.shards.packing import pack
from data.sources.members import members
from data.sources.samples import Published
from jobs.__main__ import main
from tests.support import archives
from tests.support.archives import contents, packed, picture, tar_bytes, write_folder

# ------------------------------------------------------------------------------------------- what is checked


def test_a_set_that_is_not_what_is_published_is_refused_before_it_has_an_index(tmp_path, monkeypatch, capsys, caplog):
    folder = archives.pets(tmp_path / "pets")
    command = ["pack", "pets", str(folder), str(tmp_path / "set"), "--split", "test"]
    published = known_archive("pets").published
    monkeypatch.setitem(published, "test", Published(6, 3, "by hand"))
    assert main(command) == 0
    monkeypatch.setitem(published, "test", Published(7, 3, "by hand"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:]]) == 65
    said = capsys.readouterr().err
    assert "pets, test: found 6 samples of 3 classes, expected 7 samples of 3 classes (by hand)" in said
    assert "--partial" in said and not list((tmp_path / "seven").glob("*.index.json"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:], "--partial"]) == 0
    assert "found 6 samples of 3 classes, expected 7" in caplog.text
    assert contents(tmp_path / "seven") == contents(tmp_path / "set")
    monkeypatch.setitem(published, "test", Published(6, 37, "by hand"))
    assert main([*command[:3], str(tmp_path / "more"), *command[4:]]) == 65
    assert "pets, test: found 3 classes, expected 6 samples of 37 classes" in capsys.readouterr().err


def test_a_split_that_a_set_does_not_have_is_refused_at_once(capsys):
    assert main(["pack", "pets", "/nowhere", "OUT", "--split", "validation"]) == 64
    assert "source pets has the splits train, test; split is validation" in capsys.readouterr().err
    assert main(["pack", "folder", "/nowhere", "OUT", "--partial"]) == 64
    assert "partial is of known data sets; folder is none of them" in capsys.readouterr().err


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
    assert "lacks 1 images of train: 'Abyssinian_3'" in capsys.readouterr().err
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
        list(listed_samples(FLOWERS, folder, "train"))


# ------------------------------------------------------------------------------------------------ ImageNet


def test_imagenet_s_training_images_are_the_same_from_a_tar_of_tars_a_folder_of_tars_and_class_folders(tmp_path):
    tars = archives.class_tars()
    (tmp_path / "train.tar").write_bytes(tar_bytes(tars))
    write_folder(tmp_path / "tars", tars)
    for name in tars:
        for member in members(tmp_path / "tars" / name):
            write_folder(tmp_path / "folders" / name.removesuffix(".tar"), {member.name: member.read()})
    whole = packed(tmp_path, "imagenet-train", tmp_path / "train.tar")
    by_hand = {
        f"{wnid}_{n}": (picture(50 * i + n), b"%d" % i) for i, wnid in enumerate(archives.WNIDS) for n in range(3)
    }
    assert whole == by_hand
    labels = [sample[1] for sample in whole.values()]
    assert labels != sorted(labels) and list(whole) != sorted(whole), "classes are mixed"
    for form in ("tars", "folders"):
        assert list(packed(tmp_path, "imagenet-train", tmp_path / form).items()) == list(whole.items())
    assert load_index(tmp_path / "set1").names == archives.WNIDS


def test_imagenet_s_validation_images_get_their_classes_from_the_devkit_a_list_or_their_folders(tmp_path, capsys):
    images = archives.validation_images()
    (tmp_path / "val.tar").write_bytes(tar_bytes(images))
    write_folder(tmp_path / "flat", images)
    by_class = {f"{archives.TRUTH[int(name[15:23]) - 1]}/{name}": body for name, body in images.items()}
    write_folder(tmp_path / "classes", by_class)
    devkit = archives.devkit(tmp_path / "ILSVRC2012_devkit_t12.tar.gz")
    (tmp_path / "wnids.txt").write_text("\n".join(archives.TRUTH))
    expected = {}
    for number, wnid in enumerate(archives.TRUTH, start=1):
        expected[f"ILSVRC2012_val_{number:08d}"] = (picture(number), b"%d" % archives.WNIDS.index(wnid))
    ways = [("val.tar", devkit), ("flat", devkit), ("val.tar", "wnids.txt"), ("classes", devkit), ("classes", None)]
    for form, wnids in ways:
        options = [] if wnids is None else ["--wnids", str(tmp_path / wnids)]
        assert packed(tmp_path, "imagenet-validation", tmp_path / form, *options) == expected, (form, wnids)
        assert load_index(sorted(tmp_path.glob("set*"))[-1]).names == archives.WNIDS
    (tmp_path / "wnids.txt").write_text("\n".join(archives.TRUTH[::-1]))
    command = ["pack", "imagenet-validation", str(tmp_path / "classes"), str(tmp_path / "OUT")]
    assert main([*command, "--wnids", str(tmp_path / "wnids.txt")]) == 65
    said = capsys.readouterr().err
    assert "ILSVRC2012_val_00000002.JPEG lies in the folder n01440764" in said and "says n02096294" in said
    assert main(["pack", "imagenet-validation", str(tmp_path / "flat"), str(tmp_path / "OUT")]) == 65
    assert "nothing says of which classes these images are" in capsys.readouterr().err


def test_real_labels_are_all_of_an_image_s_and_images_without_any_are_left_out(tmp_path, capsys):
    (tmp_path / "val.tar").write_bytes(tar_bytes(archives.validation_images()))
    (tmp_path / "real.json").write_text(json.dumps([[1], [], [0, 2], [1]]))
    options = ["--real", str(tmp_path / "real.json")]
    labels = {
        key: label
        for key, (_, label) in packed(tmp_path, "imagenet-validation", tmp_path / "val.tar", *options).items()
    }
    assert labels == {f"ILSVRC2012_val_0000000{n}": label for n, label in ((1, b"1"), (3, b"0 2"), (4, b"1"))}
    command = ["pack", "imagenet-validation", str(tmp_path / "val.tar"), str(tmp_path / "OUT"), *options]
    assert main(command) == 65
    said = capsys.readouterr().err
    assert "found 3 samples of 3 classes, expected 46,837 samples of 1,000 classes (Beyer et al. 2020" in said
    (tmp_path / "real.json").write_text(json.dumps([[1], [], [0, 2]]))
    assert main(command) == 65
    assert "4 images" in (said := capsys.readouterr().err) and "3 labels; they must be as many" in said


def test_imagenet_21k_is_read_from_its_archive_and_from_folders_of_class_tars_and_of_images(tmp_path, capsys, caplog):
    tars = archives.class_tars()
    winter = archives.write_tar_gz(
        tmp_path / "winter21_whole.tar.gz",
        {"winter21_whole/README": b"hi", **{f"winter21_whole/{k}": v for k, v in tars.items()}},
    )
    (tmp_path / "fall11_whole.tar").write_bytes(tar_bytes(tars))
    write_folder(tmp_path / "tars" / "winter21_whole", tars)
    for name in tars:
        for member in members(tmp_path / "tars" / "winter21_whole" / name):
            write_folder(tmp_path / "folders" / name.removesuffix(".tar"), {member.name: member.read()})
    by_hand = {
        f"{wnid}_{n}": (picture(50 * i + n), b"%d" % i) for i, wnid in enumerate(archives.WNIDS) for n in range(3)
    }
    for path in (winter, tmp_path / "tars", tmp_path / "folders"):
        assert packed(tmp_path, "imagenet-21k", path) == by_hand
    assert packed(tmp_path, "imagenet-21k-fall11", tmp_path / "fall11_whole.tar") == by_hand
    assert load_index(tmp_path / "set0").names == archives.WNIDS
    assert next(iter(contents(tmp_path / "set0"))) == "n02096294_0", "in the order of the archive"
    assert "1 × file that is of no class, first winter21_whole/README" in caplog.text
    assert "read through once for the names of its classes" in caplog.text
    caplog.clear()
    (tmp_path / "wnids.txt").write_text("\n".join(archives.WNIDS))
    listed = ["--wnids", str(tmp_path / "wnids.txt")]
    os.utime(winter)  # as if it had not been looked at before
    assert packed(tmp_path, "imagenet-21k", winter, *listed) == by_hand and "read through once" not in caplog.text
    (tmp_path / "wnids.txt").write_text("\n".join(archives.WNIDS[1:]))
    assert main(["pack", "imagenet-21k", str(winter), str(tmp_path / "OUT"), *listed, "--partial"]) == 65
    assert "n01440764 is not among its 2 classes" in capsys.readouterr().err
    assert main(["pack", "imagenet-21k", str(winter), str(tmp_path / "OUT")]) == 65
    assert "imagenet-21k, train: found 3 classes, expected 13,153,500 samples of 19,167" in capsys.readouterr().err


def test_a_killed_packing_of_a_compressed_archive_goes_on_and_ends_with_the_same_bytes(tmp_path):
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
    """Pixels (H, W, RGB) and label of every image of some batches, by a loop over planes, rows and columns."""
    samples = {}
    for batch in batches:
        for number, row in enumerate(images.pixels[batch]):
            pixels = [[[int(row[c * 1024 + y * 32 + x]) for c in range(3)] for x in range(32)] for y in range(32)]
            samples[f"{batch}-{number:05d}"] = (pixels, str(images.labels[batch][number]).encode())
    return samples


@pytest.mark.parametrize("name", archives.CIFAR)
def test_cifar_gives_the_same_shards_from_the_archive_and_from_its_folder(tmp_path, name):
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


def test_another_version_of_cifar_and_a_torn_batch_are_refused(tmp_path, capsys):
    python = archives.write_tar_gz(tmp_path / "cifar-100-python.tar.gz", {"cifar-100-python/train": b"pickle"})
    assert main(["pack", "cifar100", str(python), str(tmp_path / "OUT")]) == 65
    assert "expected the binary version, cifar-100-binary.tar.gz, which holds the same" in capsys.readouterr().err
    torn = {"cifar-100-binary/train.bin": bytes(3000), "cifar-100-binary/fine_label_names.txt": b"a\nb\n"}
    binary = archives.write_tar_gz(tmp_path / "cifar-100-binary.tar.gz", torn)
    assert main(["pack", "cifar100", str(binary), str(tmp_path / "OUT"), "--partial"]) == 65
    assert "train.bin: 3,000 bytes are no whole number of records" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- ObjectNet


def test_objectnet_s_images_have_all_ids_of_imagenet_and_lose_their_border(tmp_path, caplog):
    folder = archives.objectnet(tmp_path / "objectnet-1.0")
    samples = packed(tmp_path, "objectnet", folder, "--split", "test")
    labels = {key: label for key, (_, label) in samples.items()}
    # By the miniature's files: analog clock is line 3 and so class 1, digital clock is line 0 and so class 3.
    assert labels == {"alarm_clock/aa": b"1 3", "alarm_clock/bb_v2": b"1 3", "banana/cc": b"4"}
    for key, value in (("alarm_clock/aa", 10), ("alarm_clock/bb_v2", 20), ("banana/cc", 30)):
        assert np.array_equal(decode(samples[key][0]), np.full((8, 12, 3), value, np.uint8))
    assert "1 × image whose border is not red, cut all the same, first images/banana/cc.png" in caplog.text
    assert "1 × image of an object that ImageNet-1k lacks, first images/wine_glass_2/dd.png" in caplog.text
    assert "found 2 classes, expected 18,574 samples of 113 classes" in caplog.text
    with zipfile.ZipFile(tmp_path / "objectnet-1.0.zip", "w") as archive:
        for member in members(folder):
            archive.writestr(f"objectnet-1.0/{member.name}", member.read())
    assert packed(tmp_path, "objectnet", tmp_path / "objectnet-1.0.zip", "--split", "test") == samples


def test_an_objectnet_name_that_means_two_classes_is_refused(tmp_path):
    folder = archives.objectnet(tmp_path / "objectnet-1.0")
    (folder / "mappings" / "objectnet_to_imagenet_1k.json").write_text('{"Banana": "crane"}')
    with pytest.raises(DataError, match="'crane' is the name of no one class"):
        list(objectnet.samples(folder))


# ------------------------------------------------------------------------------------------- what is published


def test_the_table_of_known_sets_says_what_their_papers_say():
    """Written down here once more, by hand, from the papers and the owners' pages."""
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
    assert real is not None and real.published["train"].samples == 46_837


def test_cifar_as_pickles_or_with_odd_bytes_and_parquet_without_bytes_are_refused_by_name(tmp_path, capsys):
    """Nothing is unpickled; each of these once ended as `a bug`, exit 70."""
    batch = {b"data": bytes(3072), b"labels": [3], b"filenames": [b"a.png"]}
    for number in range(1, 6):
        write_folder(tmp_path / "python", {f"data_batch_{number}": pickle.dumps(batch)})
        write_folder(tmp_path / "odd", {f"data_batch_{number}.bin": bytes(3073)})
        write_folder(tmp_path / "beyond", {f"data_batch_{number}.bin": b"\xc8" + bytes(3072)})
    write_folder(tmp_path / "odd", {"batches.meta.txt": b"cat\xff dog"})
    write_folder(tmp_path / "beyond", {"batches.meta.txt": b"a b c d e f g h i j"})
    for name, said in (
        ("python", "expected the binary version, cifar-10-binary.tar.gz"),
        ("odd", "batches.meta.txt: not UTF-8 at byte 3"),
        ("beyond", "data_batch_1-00000 has label 200, and there are 10 class names"),
    ):
        assert main(["pack", "cifar10", str(tmp_path / name), str(tmp_path / "OUT"), "--partial"]) == 65
        assert said in capsys.readouterr().err
    for number, (cell, said) in enumerate(
        [
            ({"data": b"x", "path": "a.png"}, "row 0 holds no key 'bytes' but data, path"),
            ({"bytes": None, "path": "a.png"}, "row 0 holds a path instead of bytes"),
            ("a.png", "row 0 holds a str"),
            ([1, 2], "row 0 holds a list"),
        ]
    ):
        folder = tmp_path / f"parquet{number}"
        folder.mkdir()
        parquet.write_table(pyarrow.Table.from_pylist([{"image": cell, "label": 1}]), folder / "a.parquet")
        assert main(["pack", "parquet", str(folder), str(tmp_path / "OUT")]) == 65
        assert said in capsys.readouterr().err
