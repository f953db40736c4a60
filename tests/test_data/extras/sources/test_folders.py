"""Folders of images, written by hand."""

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.extras.sources.folders import class_folders, folder_classes, unlabelled_folder

pytestmark = pytest.mark.quick

IMAGE = cv2.imencode(".png", np.full((4, 4, 3), 7, np.uint8))[1].tobytes()


@pytest.fixture
def photos(tmp_path):
    for name in ("dog/1.png", "cat/a.b.png", "cat/deep/2.PNG", "cat/notes.txt", "cat/._1.png", ".hidden/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IMAGE)
    return tmp_path / "photos"


def test_classes_are_the_sorted_visible_folders(photos):
    assert folder_classes(photos) == ("cat", "dog")


def test_every_image_is_a_sample_of_its_folder_s_class(photos, caplog):
    samples = {sample.key: sample.labels for sample in class_folders(photos)}
    assert samples == {"cat/a_b": (0,), "cat/deep/2": (0,), "dog/1": (1,)}
    assert ".txt" in caplog.text


def test_an_empty_class_is_refused(photos):
    (photos / "emu").mkdir()
    with pytest.raises(DataError, match="emu: class 2 has no images"):
        list(class_folders(photos))


def test_folders_are_not_classes_if_labels_are_ignored(photos):
    samples = list(unlabelled_folder(photos))
    assert len(samples) == 3
    assert {sample.labels for sample in samples} == {None}
