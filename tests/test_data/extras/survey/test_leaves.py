import csv
import os
from pathlib import Path

import pytest

from data.errors import DataError
from data.extras.sources.folders import class_folders
from data.extras.sources.samples import digits
from data.extras.survey.leaves import write_leaf_table
from data.extras.survey.survey import survey

pytestmark = pytest.mark.quick


def plant(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(next(digits(train=False, image_size=16)).image)


def labels_in(table: Path) -> dict[str, str]:
    with open(table, newline="") as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


def test_each_innermost_folder_is_a_class(tmp_path):
    plant(tmp_path / "train", "animals/cat/1.jpg", "animals/dog/2.jpg", "things/ship/3.jpg", "things/4.jpg")
    write_leaf_table(str(tmp_path / "train"), str(tmp_path / "all.csv"))
    assert labels_in(tmp_path / "all.csv") == {
        f"{tmp_path}/train/animals/cat/1.jpg": "cat",
        f"{tmp_path}/train/animals/dog/2.jpg": "dog",
        f"{tmp_path}/train/things/ship/3.jpg": "ship",
        f"{tmp_path}/train/things/4.jpg": "things",
    }


def test_folders_with_equal_names_are_told_apart_by_their_paths(tmp_path):
    plant(tmp_path / "t", "car/red/1.jpg", "bus/red/2.jpg", "bus/blue/3.jpg")
    write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))
    assert sorted(labels_in(tmp_path / "all.csv").values()) == ["blue", "bus/red", "car/red"]


def test_names_with_commas_quotes_and_line_breaks_survive_the_table(tmp_path):
    plant(tmp_path / "t", 'a/x, "y"\nz/1.jpg', "a/b/2.jpg")
    write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))
    assert sorted(labels_in(tmp_path / "all.csv").values()) == ["b", 'x, "y"\nz']


def test_name_that_is_not_text_is_refused(tmp_path):
    plant(tmp_path / "t", "a/b/1.jpg")
    os.rename(tmp_path / "t/a/b/1.jpg", os.fsencode(tmp_path) + b"/t/a/b/\xff.jpg")
    with pytest.raises(DataError, match="must be UTF-8"):
        write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))


def test_flat_folder_and_existing_table_are_refused(tmp_path):
    plant(tmp_path / "t", "1.jpg")
    with pytest.raises(DataError, match="expects a folder with sub-folders"):
        write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))
    plant(tmp_path / "t", "a/1.jpg")
    (tmp_path / "all.csv").write_text("mine")
    with pytest.raises(DataError, match="will not be overwritten"):
        write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))
    assert (tmp_path / "all.csv").read_text() == "mine"


def test_survey_reports_merged_folders_and_reads_either_way(tmp_path):
    plant(tmp_path / "train", "animals/cat/1.jpg", "animals/dog/2.jpg", "things/ship/3.jpg", "things/bus/5.jpg")
    merged = survey(str(tmp_path / "train"), report=lambda count: None)
    assert dict(merged.train.class_counts) == {"animals": 2, "things": 2}
    [note] = merged.train.notes
    assert "animals: 'cat', 'dog'; things: 'bus', 'ship'" in note
    assert "--leaf-classes" in note
    leaves = survey(str(tmp_path / "train"), leaf_tables=str(tmp_path / "t"), report=lambda count: None)
    assert dict(leaves.train.class_counts) == {"cat": 1, "dog": 1, "ship": 1, "bus": 1}


def test_evaluation_part_gets_its_own_table(tmp_path):
    plant(tmp_path, "train/a/cat/1.jpg", "train/a/dog/2.jpg", "val/a/cat/3.jpg", "val/a/dog/4.jpg")
    sets = survey(str(tmp_path), leaf_tables=str(tmp_path / "t"), report=lambda count: None)
    assert sets.test is not None
    assert dict(sets.train.class_counts) == {"cat": 1, "dog": 1}
    assert sorted(labels_in(tmp_path / "t-test.csv").values()) == ["cat", "dog"]


def test_packing_reports_merged_folders(tmp_path, caplog):
    plant(tmp_path / "t", "animals/cat/1.jpg", "animals/dog/2.jpg", "plain/3.jpg")
    list(class_folders(tmp_path / "t"))
    assert "(animals: 'cat', 'dog')" in caplog.text


def test_one_sub_folder_is_not_reported(tmp_path, caplog):
    plant(tmp_path / "t", "animals/images/1.jpg", "plain/3.jpg")
    list(class_folders(tmp_path / "t"))
    assert caplog.text == ""


def test_images_outside_the_class_folders_are_reported(tmp_path, caplog):
    plant(tmp_path / "t", "a/cat/1.jpg", "a/dog/2.jpg", "3.jpg", "4.jpg")
    write_leaf_table(str(tmp_path / "t"), str(tmp_path / "all.csv"))
    assert sorted(labels_in(tmp_path / "all.csv").values()) == ["cat", "dog"]
    assert "2 images outside the class folders are excluded, first 3.jpg" in caplog.text
