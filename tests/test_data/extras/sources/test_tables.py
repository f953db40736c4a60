"""Tables of paths and Parquet files with images, written by hand."""

import cv2
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.extras.sources.tables import image_parquet, parquet_classes, path_table, table_classes

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
        ("file,class_id\n", "expected columns path and label, found"),
        ("path,label\ndog/9.png,1\n", "does not exist"),
    ],
)
def test_invalid_table_is_rejected(text, message, photos):
    (photos / "table.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        list(path_table(photos / "table.csv"))


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
