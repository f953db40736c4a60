"""Images and model weights for tests of `jobs analyze`."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import models


def make_photos(folder: Path) -> Path:
    """Write three images whose sizes differ from the models' input size, and a text file among them."""
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
    (folder / "notes.txt").write_text("not an image")
    return folder


def save_model(folder: Path, name: str = "mu/8", image_size: Any = (16, 24), **config: Any) -> str:
    """Save a model with random weights; return the folder of its weights."""
    torch.manual_seed(0)
    models.save(models.build(name, image_size, 5, **config), folder / "weights")
    return str(folder / "weights")
