"""Tables of paths and Parquet files with images, written by hand."""

import os
from pathlib import Path

import cv2
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.extras.known_sets.imagenet import train as imagenet_train
from data.extras.sources.folders import class_folders
from data.extras.sources.tables import image_parquet, parquet_classes, path_table, table_classes
from tests.support.tars import picture, tar_of

pytestmark = pytest.mark.quick


IMAGE = cv2.imencode(".png", np.full((4, 4, 3), 7, np.uint8))[1].tobytes()


@pytest.fixture
def photos(tmp_path):
    for name in ("dog/1.png", "cat/a.b.png", "cat/deep/2.PNG", "cat/notes.txt", "cat/._1.png", ".hidden/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IMAGE)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("rows", "names", "labels"),
    [
        ("dog/1.png,dog\ncat/a.b.png,cat\n", ("cat", "dog"), {"dog/1": (1,), "cat/a_b": (0,)}),
        ("dog/1.png,3\ncat/a.b.png,0 2\n", (), {"dog/1": (3,), "cat/a_b": (0, 2)}),
    ],
)
def test_table_contains_ids_or_names(rows, names, labels, photos):
    table = photos / "table.csv"
    table.write_text(f"path,label\n{rows}", encoding="utf-8-sig")
    assert table_classes(table) == names
    assert {sample.key: sample.labels for sample in path_table(table)} == labels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\ndog/1.png,3\ncat/a.b.png,cat\n", "some labels are class ids"),
        (
            "file,class_id\n",
            r"expected a column of paths \(path, file_name, filename, image\) and one of labels \(label",
        ),
        ("path,label\ndog/9.png,1\n", "does not exist"),
    ],
)
def test_invalid_table_is_rejected(text, message, photos):
    (photos / "table.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        list(path_table(photos / "table.csv"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        # csv would read the rest of the file as the label of the first image.
        ("t.csv", 'path,label\ndog/1.png,"dog\ncat/a.b.png,cat\n', "not a valid CSV after line 1"),
        ("t.csv", f'path,label\ndog/1.png,"{"x" * 140_000}"\n', "not a valid CSV after line 1"),
        ("t.jsonl", '{"path": "dog/1.png", "label": 0}\n{"path": "cat/a.b.png"}\n', "a.b.png: '' contains no class"),
        ("t.jsonl", '{"path": "dog/1.png", "label": 0}\n{"label": 0}\n', "row 2 has no path"),
    ],
)
def test_damaged_row_is_an_error_and_swallows_no_other_row(name, text, message, photos):
    (photos / name).write_text(text)
    with pytest.raises(DataError, match=message):
        list(path_table(photos / name))


def test_hugging_face_parquet_has_images_labels_and_names(tmp_path):
    rows = {"image": [{"bytes": IMAGE, "path": None}] * 3, "label": [1, 0, 1]}
    features = '{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    table = pyarrow.table(rows).replace_schema_metadata({"huggingface": features})
    parquet.write_table(table, tmp_path / "train.parquet")
    assert parquet_classes(tmp_path) == ("cat", "dog")
    samples = list(image_parquet(tmp_path))
    assert [sample.labels for sample in samples] == [(1,), (0,), (1,)]
    assert {sample.image for sample in samples} == {IMAGE}


def test_text_labels_of_a_parquet_without_class_names_are_numbered_in_order_of_the_names(tmp_path):
    rows = {"image": [{"bytes": IMAGE, "path": None}] * 3, "label": ["dog", "cat", "dog"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "train.parquet")
    assert parquet_classes(tmp_path) == ("cat", "dog")
    assert [sample.labels for sample in image_parquet(tmp_path)] == [(1,), (0,), (1,)]


def test_parquet_files_of_equal_names_in_two_folders_have_distinct_keys(tmp_path):
    for label, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        rows = {"image": [{"bytes": picture(label), "path": None}], "label": [label]}
        parquet.write_table(pyarrow.table(rows), tmp_path / folder / "0000.parquet")
    samples = list(image_parquet(f"{tmp_path}/{{a,b}}/*.parquet"))
    assert [(s.key, s.labels) for s in samples] == [("0000-00000000", (0,)), ("0000_2-00000000", (1,))]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_of_paths_and_labels(tmp_path, kind):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "b.jpg").write_bytes(picture(2))
    if kind == "csv":
        (tmp_path / "t.csv").write_text('path,label\na.jpg,3\nb.jpg,"1 2"\n')
    else:
        rows = pyarrow.table({"path": ["a.jpg", "b.jpg"], "label": [[3], [1, 2]]})
        parquet.write_table(rows, tmp_path / "t.parquet")
    made = {sample.key: sample for sample in path_table(tmp_path / f"t.{kind}")}
    assert made["a"].labels == (3,)
    assert made["b"].labels == (1, 2)
    assert made["b"].read() == picture(2)


def test_foreign_tar_and_excel_table_are_read_by_their_content(tmp_path):
    (tmp_path / "flat.tar").write_bytes(tar_of({"a.jpg": picture(1)}))
    with pytest.raises(DataError, match=r"flat\.tar: a\.jpg: "):
        list(imagenet_train(tmp_path / "flat.tar"))
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "table.csv").write_text("\ufeffpath,label\na.jpg,3\n", encoding="utf-8")
    assert [s.labels for s in path_table(tmp_path / "table.csv")] == [(3,)]
    (tmp_path / "table.csv").write_bytes("path,label\nä.jpg,3\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8 at byte 11"):
        list(path_table(tmp_path / "table.csv"))


def test_error_names_the_file_with_an_invalid_name_or_label(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"image": [{"bytes": picture(1)}], "label": [-1]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"a\.parquet: row 0: '-1' contains no class ids, which are whole"):
        list(image_parquet(tmp_path / "a.parquet"))
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    Path(os.fsdecode(bytes(folder) + b"/\xff.jpg")).write_bytes(picture(1))
    with pytest.raises(DataError, match="must be UTF-8"):
        list(class_folders(folder.parent))


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label"), ("jpg", "label")])
def test_parquet_of_hugging_face_and_of_img2dataset_is_read(tmp_path, image, label):
    cells = [picture(n) if image == "jpg" else {"bytes": picture(n), "path": None} for n in range(3)]
    rows = [{image: cell, label: n} for n, cell in enumerate(cells)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    assert [(s.image, s.labels) for s in image_parquet(tmp_path)] == [(picture(n), (n,)) for n in range(3)]
