"""Folders of images are recognised by their content, and counted by class."""

import pytest

from data.errors import DataError
from data.extras.survey.survey import FoundSet, Sets, survey
from data.sources.samples import digits

pytestmark = pytest.mark.quick


def write_images(folder, counts: dict[str, int]) -> None:
    """Write this many images per class, each into its class folder."""
    images = [sample.image for sample in digits(train=False, image_size=16)]
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(images.pop())


def test_folders_named_train_and_val_are_two_sets(tmp_path) -> None:
    write_images(tmp_path / "train", {"cat": 4, "dog": 3})
    write_images(tmp_path / "val", {"cat": 1, "dog": 2})
    sets = survey(str(tmp_path), report=lambda _: None)
    assert sets.train.source == "folder"
    assert sets.train.class_counts == {"cat": 4, "dog": 3}
    assert sets.train.shorter_side == 16
    assert sets.test is not None
    assert sets.test.class_counts == {"cat": 1, "dog": 2}
    assert sets.held_out == 0


def test_missing_path_is_rejected(tmp_path) -> None:
    with pytest.raises(DataError):
        survey(str(tmp_path / "nowhere"), report=lambda _: None)


@pytest.mark.parametrize(("count", "percent"), [(4, 0), (499, 20), (500, 10), (250_000, 2), (10_000_000, 1)])
def test_small_set_holds_out_a_larger_share_than_a_large_one(count, percent) -> None:
    found = FoundSet("folder", "photos", images=2 * count)
    found.class_counts.update({"cat": count, "dog": count})
    assert Sets(found).held_out == percent
