"""Labels, keys and class lists in users' formats: all sources use the same reader and give the same result."""

import json
import pickle
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.extras.class_lists import read_class_list
from data.extras.shards.indexing import build_index
from data.extras.sources.folders import class_folders, folder_classes, keys_of
from data.extras.sources.numbering import gap_in_ids, number
from data.extras.sources.tables import path_table, table_classes
from data.extras.survey.survey import survey
from data.index.names import NO_TEXT, ONE_HOT, NoLabel, parse_labels
from tests.support.tars import picture, tar_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("raw", "labels"),
    [
        (b"3.0", (3,)),
        (b"[3.0, 17.0]", (3, 17)),
        (b'{"label": 3.0}', (3,)),
        (b"\xef\xbb\xbf7", (7,)),
        (b"0 1", (0, 1)),
        (b"[1, 0]", (1, 0)),
        (b"3 3", (3, 3)),
    ],
)
def test_ids_are_read_in_the_forms_that_other_programs_write(raw: bytes, labels: tuple[int, ...]) -> None:
    assert parse_labels(raw) == labels


@pytest.mark.parametrize(
    "raw", [b"0 1 0", b"0,0,1", b"[0, 1, 0]", b'{"labels": [1, 0, 0]}', b"0.0 1.0 0.0", b"1 1 0 1"]
)
def test_vectors_of_zeros_and_ones_are_not_mistaken_for_ids(raw: bytes) -> None:
    with pytest.raises(NoLabel, match="vector of zeros and ones") as caught:
        parse_labels(raw)
    assert caught.value.reason == ONE_HOT


@pytest.mark.parametrize(
    "raw",
    [
        np.arange(3).tobytes() + b"\xff",
        "cat".encode("utf-16"),
        pickle.dumps({"label": 3}),
        b"\x93NUMPY\x01\x00v\x00",
        b"cat\0",
    ],
)
def test_binary_labels_are_not_class_names(raw: bytes) -> None:
    with pytest.raises(NoLabel) as caught:
        parse_labels(raw)
    assert caught.value.reason == NO_TEXT
    assert not caught.value.are_names


@pytest.mark.parametrize("name", ["cat", "🐱", "!", "+", "火", "grey wolf, timber wolf", "Ünïcode", "3d"])
@pytest.mark.parametrize("form", ["cls", "json", "json object"])
def test_names_are_the_same_in_every_form(name: str, form: str) -> None:
    raw = {"cls": name, "json": json.dumps(name), "json object": json.dumps({"label": name})}[form].encode()
    with pytest.raises(NoLabel) as caught:
        parse_labels(raw)
    assert caught.value.are_names
    assert caught.value.texts == [name]
    assert parse_labels(raw, {name: 4}) == (4,)


@pytest.mark.parametrize("raw", [b"-1", b"0.5", b"3;4", b"", b"2024-01-01"])
def test_other_numbers_are_neither_ids_nor_names(raw: bytes) -> None:
    with pytest.raises(NoLabel) as caught:
        parse_labels(raw)
    assert not caught.value.are_names


def test_a_gap_in_the_ids_is_reported() -> None:
    assert gap_in_ids(3, 70_001).startswith("only 3 of the class ids 0 to 70,000 occur in labels")
    assert gap_in_ids(3, 6) == gap_in_ids(0, 0) == ""


# ------------------------------------------------------------------------------------------------ class lists


@pytest.mark.parametrize(
    "content",
    [
        {"cat": 0, "dog": 1, "fox": 2},
        {"fox": 2, "cat": 0, "dog": 1},
        {"0": "cat", "1": "dog", "2": "fox"},
        {"id2label": {"0": "cat", "1": "dog", "2": "fox"}},
        ["cat", "dog", "fox"],
    ],
)
def test_class_lists_are_read_in_both_directions(tmp_path: Path, content: object) -> None:
    (tmp_path / "names.json").write_text(json.dumps(content))
    assert read_class_list(tmp_path / "names.json") == ("cat", "dog", "fox")


@pytest.mark.parametrize("content", [{"cat": 0, "dog": 2}, {"cat": 1, "dog": 2}, {"cat": 0, "dog": 0}])
def test_class_lists_with_missing_ids_are_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / "names.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="the class ids are not 0 to 1"):
        read_class_list(tmp_path / "names.json")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_that_differ_only_in_their_unicode_form_are_reported_as_such(form: str) -> None:
    other = "NFD" if form == "NFC" else "NFC"
    target = (unicodedata.normalize(form, "café"), "dog")
    own = (unicodedata.normalize(other, "café"), "dog")
    with pytest.raises(DataError, match=f"another Unicode form \\({other} here\\)"):
        number(own, target)


# ------------------------------------------------------------------------------------------------ keys of files


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["cat/1.jpg", "cat/v1.2.jpg"], ["cat/1", "cat/v1_2"]),
        (["../im/0.jpg", "/im/1.jpg", "./im/2.jpg", "a/../im/3.jpg"], ["im/0", "im/1", "im/2", "im/3"]),
        (["cat/5.jpg", "cat/5.png", "cat/6.jpg"], ["cat/5_jpg", "cat/5_png", "cat/6"]),
        (["a.b.jpg", "a_b.jpg"], None),
        (["im/0.jpg", "./im/0.jpg"], None),
        (["../im/0.jpg", "./../im/0.jpg"], None),
    ],
)
def test_every_file_has_a_unique_key_or_the_error_names_both_files(names: list[str], keys: list[str] | None) -> None:
    if keys is not None:
        assert keys_of(names) == keys
        return
    with pytest.raises(DataError) as caught:
        keys_of(names)
    assert all(name in str(caught.value) for name in names)


# ------------------------------------------------------------------------------------------------ sources agree


def folder_of(root: Path, suffix: str = ".jpg") -> Path:
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for image in range(3):
            (root / name / f"{image}{suffix}").write_bytes(picture(10 * label + image))
    return root


def test_links_and_thumbnails_in_class_folders_are_treated_alike_by_pack_and_new(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "photos")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "9.jpg").write_bytes(picture(99))
    (root / "cat" / "more").symlink_to(tmp_path / "store")
    for folder in (root / "cat" / "@eaDir" / "0.jpg", root / "@eaDir", root / "#recycle"):
        folder.mkdir(parents=True)
        (folder / "thumb.jpg").write_bytes(picture(1))
    assert folder_classes(root) == ("cat", "dog")
    assert Counter(sample.labels for sample in class_folders(root)) == {(0,): 4, (1,): 3}
    found = survey(str(root), report=lambda images: None).train
    assert found.class_counts == {"cat": 4, "dog": 3}


@pytest.mark.parametrize("target", ["..", "../..", "."])
def test_a_link_in_a_class_folder_to_a_folder_above_brings_no_images_of_other_classes(
    tmp_path: Path, target: str
) -> None:
    root = folder_of(tmp_path / "photos")
    (root / "cat" / "loop").symlink_to(target)
    assert Counter(sample.labels for sample in class_folders(root)) == {(0,): 3, (1,): 3}


@pytest.mark.parametrize("suffix", [".tif", ".bmp", ".gif", ".ppm"])
def test_a_class_of_other_image_formats_is_named_with_what_it_contains(tmp_path: Path, suffix: str) -> None:
    root = folder_of(tmp_path / "photos")
    for path in (root / "dog").iterdir():
        path.rename(path.with_suffix(suffix))
    with pytest.raises(DataError, match=rf"dog: class 1 has no images; it contains 3 × \{suffix}"):
        list(class_folders(root))


@pytest.mark.parametrize("labels", [["🐱", "🐶"], ["!", "+"], ["0.0", "1.0"], ["True", "False"], ["cat", "dog"]])
def test_a_table_is_read_alike_by_pack_and_new(tmp_path: Path, labels: list[str]) -> None:
    root = folder_of(tmp_path / "photos")
    rows = ["path,label"]
    for label, name in zip(labels, ("cat", "dog"), strict=True):
        rows += [f"photos/{name}/{image}.jpg,{label}" for image in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    samples = list(path_table(tmp_path / "t.csv"))
    assert Counter(sample.labels for sample in samples) == {(0,): 3, (1,): 3}
    found = survey(str(tmp_path / "t.csv"), report=lambda images: None).train
    assert found.classes == 2
    assert found.labelled == 6
    assert table_classes(tmp_path / "t.csv") == (() if labels == ["0.0", "1.0"] else tuple(sorted(labels)))
    assert root.exists()


def test_unreadable_labels_are_an_error_for_new_and_not_a_set_without_labels(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos")
    rows = [f"photos/{name}/{image}.jpg,0.5" for name in ("cat", "dog") for image in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    with pytest.raises(DataError, match=r"no label is usable; the first one failed with: .0\.5."):
        survey(str(tmp_path / "t.csv"), report=lambda images: None)


def test_metadata_jsonl_is_read_as_a_table(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "photos")
    lines = [
        json.dumps({"file_name": f"{name}/{image}.jpg", "label": name}) for name in ("cat", "dog") for image in range(3)
    ]
    (root / "metadata.jsonl").write_text("\n".join(lines))
    assert Counter(sample.labels for sample in path_table(root / "metadata.jsonl")) == {(0,): 3, (1,): 3}


# ------------------------------------------------------------------------------------------------ tars


@pytest.mark.parametrize("pattern", ["train-{000..001}.tar", "train-*.tar", "train-{000,001}.tar"])
def test_local_patterns_are_expanded_like_remote_ones(tmp_path: Path, pattern: str) -> None:
    for shard in range(2):
        entries = [
            (f"{shard}{image}{part}", picture(image) if part == ".jpg" else b"1")
            for image in range(2)
            for part in (".jpg", ".cls")
        ]
        (tmp_path / f"train-{shard:03}.tar").write_bytes(tar_of(entries))
    index = build_index([str(tmp_path / pattern)], output=tmp_path / "index", name="train")
    assert index.samples == 4


@pytest.mark.parametrize(
    ("start", "program"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh9", "bzip2"),
        (b"\x04\x22\x4d\x18", "lz4"),
    ],
)
def test_a_compressed_tar_is_named_with_its_program(tmp_path: Path, start: bytes, program: str) -> None:
    (tmp_path / "a-000.tar").write_bytes(start + bytes(600))
    with pytest.raises(DataError, match=f"compressed with {program}\n.*run {program} -d a-000.tar"):
        build_index(tmp_path, name="a")
