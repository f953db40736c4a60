"""ObjectNet images get ImageNet class ids and lose their red border."""

import zipfile

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.extras.known_sets import objectnet
from data.extras.sources.members import members
from data.images.decode import decode
from tests.support import archives
from tests.support.archives import packed

pytestmark = pytest.mark.quick


def test_objectnet_images_get_all_imagenet_ids_and_lose_their_border(tmp_path, caplog):
    folder = archives.objectnet(tmp_path / "objectnet-1.0")
    samples = packed(tmp_path, "objectnet", folder, "--split", "test")
    labels = {key: label for key, (_, label) in samples.items()}
    # In the miniature's files, analog clock is on line 3 (class 1), and digital clock on line 0 (class 3).
    assert labels == {"alarm_clock/aa": b"1 3", "alarm_clock/bb_v2": b"1 3", "banana/cc": b"4"}
    for key, value in (("alarm_clock/aa", 10), ("alarm_clock/bb_v2", 20), ("banana/cc", 30)):
        assert np.array_equal(decode(samples[key][0]), np.full((8, 12, 3), value, np.uint8))
    assert "1 × image with a border that is not red, cropped anyway, first images/banana/cc.png" in caplog.text
    assert "1 × image of an object that is not in ImageNet-1k, first images/wine_glass_2/dd.png" in caplog.text
    assert "found 2 classes, expected 18,574 samples of 113 classes" in caplog.text
    with zipfile.ZipFile(tmp_path / "objectnet-1.0.zip", "w") as archive:
        for member in members(folder):
            archive.writestr(f"objectnet-1.0/{member.name}", member.read())
    assert packed(tmp_path, "objectnet", tmp_path / "objectnet-1.0.zip", "--split", "test") == samples


def test_ambiguous_objectnet_name_is_rejected(tmp_path):
    folder = archives.objectnet(tmp_path / "objectnet-1.0")
    (folder / "mappings" / "objectnet_to_imagenet_1k.json").write_text('{"Banana": "crane"}')
    with pytest.raises(DataError, match="'crane' is not the name of exactly one ImageNet class"):
        list(objectnet.samples(folder))


@pytest.mark.parametrize("sides", [(4, 16), (12, 4)])
def test_image_that_is_all_border_is_rejected(sides, tmp_path):
    folder = archives.objectnet(tmp_path / "objectnet-1.0")
    red = np.full((*sides, 3), (0, 0, 255), np.uint8)
    (folder / "images/banana/cc.png").write_bytes(cv2.imencode(".png", red)[1].tobytes())
    with pytest.raises(DataError, match=r"images/banana/cc\.png: not an image, or too small to remove its border"):
        list(objectnet.samples(folder))
