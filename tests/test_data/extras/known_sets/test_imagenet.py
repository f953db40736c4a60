"""Accuracy over label lists: the ReaL protocol, from the distributed files to the number."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.errors import DataError
from data.extras.known_sets.imagenet import labelled_images, real
from data.shards.packing import pack
from data.sources.samples import Sample
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator, Request
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.watchdog import Phases
from tests.support.golden import read_golden

pytestmark = pytest.mark.quick


CLASSES = 1000


class Written(nn.Module):
    """Predicts the class that is written in the first pixel: red · 256 + green."""

    def features(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]

    def head(self, pixels: Tensor) -> Tensor:
        red, green, _ = ((pixels + 1) * 127.5).round().long().unbind(1)
        return nn.functional.one_hot(red * 256 + green, CLASSES).float()


@pytest.fixture(scope="module")
def golden() -> dict:
    return read_golden("real_eval.json")


@pytest.fixture(scope="module")
def files(golden, tmp_path_factory) -> Path:
    """ILSVRC2012_img_val.tar with the predictions written into its images, out of order, and real.json."""
    folder = tmp_path_factory.mktemp("real")
    with tarfile.open(folder / "val.tar", "w") as tar:
        for number, predicted in reversed(list(enumerate(golden["predictions"], start=1))):
            pixels = np.full((4, 4, 3), (0, predicted % 256, predicted // 256), np.uint8)  # blue, green, red
            encoded = cv2.imencode(".png", pixels)[1].tobytes()
            member = tarfile.TarInfo(f"ILSVRC2012_val_{number:08d}.JPEG")
            member.size = len(encoded)
            tar.addfile(member, io.BytesIO(encoded))
    (folder / "real.json").write_text(json.dumps(golden["real_labels"]))
    return folder


def judge(samples: Iterator[Sample], folder: Path, max_labels: int) -> tuple[float, int]:
    pack(samples, folder, name="val", classes=CLASSES, shard_samples=128)
    phases = Phases(folder / "attempt", 0, 60.0)
    evaluator = Evaluator(
        group=EvaluationGroup(phases, torch.device("cpu"), wants_stop=lambda: False),
        model=Written(),
        dtype=torch.float32,
        folder=folder,
        preprocess="central_crop(4)",
        micro_batch=32,
        max_labels=max_labels,
    )
    (result,) = evaluator.evaluate([Request(str(folder), None, Protocol("real", {}))])
    phases.close()
    return result["values"]["real"]["value"], result["set"]["judged"]


def test_real_accuracy_from_the_distributed_files_is_the_originals(golden, files, tmp_path):
    share_right, judged = judge(real(files / "real.json", files / "val.tar"), tmp_path, max_labels=9)
    assert judged == golden["n_evaluated"] < golden["n_total"]  # images with an empty list are skipped
    assert share_right == pytest.approx(golden["n_correct"] / judged) == pytest.approx(golden["real_accuracy"])


def test_top_1_accuracy_on_the_original_labels_is_the_originals(golden, files, tmp_path):
    labels = [(label,) for label in golden["original_labels"]]
    share_right, judged = judge(labelled_images(files / "val.tar", labels, "labels"), tmp_path, max_labels=1)
    assert judged == golden["n_total"] and share_right == pytest.approx(golden["top1_original"])


def test_as_many_label_lists_as_images_are_asked_for(files, tmp_path):
    (tmp_path / "short.json").write_text("[[1], [2]]")
    with pytest.raises(DataError, match=r"300 images, .*short\.json: 2 labels"):
        next(real(tmp_path / "short.json", files / "val.tar"))
