"""What `analyze` refuses."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import models
from jobs.__main__ import main


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of three images of other sizes than the models take, and a file that is none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
    (folder / "notes.txt").write_text("no image")
    return folder


def saved(folder: Path, name: str = "mu/8", image_size=(16, 24), **config) -> str:
    torch.manual_seed(0)
    models.save(models.build(name, image_size, 5, **config), folder / "weights")
    return str(folder / "weights")


def test_what_cannot_be_analysed_is_refused_by_name(tmp_path, photos, capsys):
    output = ["--output", str(tmp_path / "out")]
    assert main(["analyze", saved(tmp_path / "axial", "Axial-mu/8", 16), str(photos), *output]) == 64
    assert "found family axial" in capsys.readouterr().err
    weights = saved(tmp_path)
    assert main(["analyze", weights, str(photos / "notes.txt"), *output]) == 64
    assert "expected image files (jpg, jpeg, png, webp), folders of images or tar shards" in capsys.readouterr().err
    assert main(["analyze", weights, str(photos), *output, "--limit", "0"]) == 64
    assert main(["analyze", weights, str(photos / "absnt.png"), *output]) == 64
    assert main(["analyze", weights, str(photos / "absent.png"), *output]) == 64
    (photos / "0.png").write_bytes(b"broken")
    assert main(["analyze", weights, str(photos / "0.png"), *output]) == 65
    assert "can be read: not a JPEG, PNG or WebP, first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["analyze", weights, str(photos), *output]) == 0
    assert "left out 1 that cannot be read: not a JPEG, PNG or WebP, first" in capsys.readouterr().out
