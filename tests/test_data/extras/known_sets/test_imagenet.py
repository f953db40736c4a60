"""ImageNet is read from its archives and from folders; ReaL accuracy equals the original evaluation."""

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
from data.extras.known_sets.imagenet import train as imagenet_train
from data.extras.known_sets.imagenet import validation as imagenet_validation
from data.extras.shards.packing import pack
from data.extras.sources.members import members
from data.extras.sources.samples import Sample
from data.index.document import load_index
from jobs.__main__ import main
from models import ViTConfig
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator, Request
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.watchdog import Phases
from tests.support import archives
from tests.support.archives import packed, picture, tar_bytes, write_folder
from tests.support.golden import read_golden
from tests.support.tars import tar_of

pytestmark = pytest.mark.quick


CLASSES = 1000


class Written(nn.Module):
    """Predicts the class encoded in the first pixel: red · 256 + green."""

    config = ViTConfig()  # for the normalisation of pixels

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
    """Write real.json, and an unordered ILSVRC2012_img_val.tar with the predictions encoded in its images."""
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


def test_real_accuracy_equals_the_original_evaluation(golden, files, tmp_path):
    share_right, judged = judge(real(files / "real.json", files / "val.tar"), tmp_path, max_labels=9)
    assert judged == golden["n_evaluated"] < golden["n_total"]  # images with an empty list are skipped
    assert share_right == pytest.approx(golden["n_correct"] / judged) == pytest.approx(golden["real_accuracy"])


def test_top_1_accuracy_equals_the_original_evaluation(golden, files, tmp_path):
    labels = [(label,) for label in golden["original_labels"]]
    share_right, judged = judge(labelled_images(files / "val.tar", labels, "labels"), tmp_path, max_labels=1)
    assert judged == golden["n_total"]
    assert share_right == pytest.approx(golden["top1_original"])


def test_different_numbers_of_images_and_labels_are_rejected(files, tmp_path):
    (tmp_path / "short.json").write_text("[[1], [2]]")
    with pytest.raises(DataError, match=r"300 images, but 2 labels in .*short\.json"):
        next(real(tmp_path / "short.json", files / "val.tar"))


def test_training_images_are_equal_from_nested_tar_class_tars_and_class_folders(tmp_path):
    tars = archives.class_tars()
    (tmp_path / "train.tar").write_bytes(tar_bytes(tars))
    write_folder(tmp_path / "tars", tars)
    for name in tars:
        for member in members(tmp_path / "tars" / name):
            write_folder(tmp_path / "folders" / name.removesuffix(".tar"), {member.name: member.read()})
    whole = packed(tmp_path, "imagenet-train", tmp_path / "train.tar")
    by_hand = {
        f"{wnid}_{n}": (picture(50 * i + n), b"%d" % i) for i, wnid in enumerate(archives.WNIDS) for n in range(3)
    }
    assert whole == by_hand
    labels = [sample[1] for sample in whole.values()]
    assert labels != sorted(labels), "classes are mixed"
    assert list(whole) != sorted(whole), "classes are mixed"
    for form in ("tars", "folders"):
        assert list(packed(tmp_path, "imagenet-train", tmp_path / form).items()) == list(whole.items())
    assert load_index(tmp_path / "set1").names == archives.WNIDS


def test_validation_classes_come_from_devkit_list_or_folders(tmp_path, capsys):
    images = archives.validation_images()
    (tmp_path / "val.tar").write_bytes(tar_bytes(images))
    write_folder(tmp_path / "flat", images)
    by_class = {f"{archives.TRUTH[int(name[15:23]) - 1]}/{name}": body for name, body in images.items()}
    write_folder(tmp_path / "classes", by_class)
    devkit = archives.devkit(tmp_path / "ILSVRC2012_devkit_t12.tar.gz")
    (tmp_path / "wnids.txt").write_text("\n".join(archives.TRUTH))
    expected = {}
    for number, wnid in enumerate(archives.TRUTH, start=1):
        expected[f"ILSVRC2012_val_{number:08d}"] = (picture(number), b"%d" % archives.WNIDS.index(wnid))
    ways = [("val.tar", devkit), ("flat", devkit), ("val.tar", "wnids.txt"), ("classes", devkit), ("classes", None)]
    for form, wnids in ways:
        options = [] if wnids is None else ["--wnids", str(tmp_path / wnids)]
        assert packed(tmp_path, "imagenet-validation", tmp_path / form, *options) == expected, (form, wnids)
        assert load_index(sorted(tmp_path.glob("set*"))[-1]).names == archives.WNIDS
    (tmp_path / "wnids.txt").write_text("\n".join(archives.TRUTH[::-1]))
    command = ["pack", "imagenet-validation", str(tmp_path / "classes"), str(tmp_path / "OUT")]
    assert main([*command, "--wnids", str(tmp_path / "wnids.txt")]) == 65
    said = capsys.readouterr().err
    assert "ILSVRC2012_val_00000002.JPEG is in folder n01440764" in said
    assert "is n02096294" in said
    assert main(["pack", "imagenet-validation", str(tmp_path / "flat"), str(tmp_path / "OUT")]) == 65
    assert "the classes of these images are unknown" in capsys.readouterr().err


def test_real_keeps_all_labels_and_excludes_unlabelled_images(tmp_path, capsys):
    (tmp_path / "val.tar").write_bytes(tar_bytes(archives.validation_images()))
    (tmp_path / "real.json").write_text(json.dumps([[1], [], [0, 2], [1]]))
    options = ["--real", str(tmp_path / "real.json")]
    labels = {
        key: label
        for key, (_, label) in packed(tmp_path, "imagenet-validation", tmp_path / "val.tar", *options).items()
    }
    assert labels == {f"ILSVRC2012_val_0000000{n}": label for n, label in ((1, b"1"), (3, b"0 2"), (4, b"1"))}
    command = ["pack", "imagenet-validation", str(tmp_path / "val.tar"), str(tmp_path / "OUT"), *options]
    assert main(command) == 65
    said = capsys.readouterr().err
    assert "found 3 samples of 3 classes, expected 46,837 samples of 1,000 classes (Beyer et al. 2020" in said
    (tmp_path / "real.json").write_text(json.dumps([[1], [], [0, 2]]))
    assert main(command) == 65
    assert "4 images" in (said := capsys.readouterr().err)
    assert "but 3 labels in" in said


def test_imagenet_is_read_as_it_is_distributed(tmp_path):
    inner = {f"n0{c}.tar": tar_of({f"n0{c}_{n}.JPEG": picture(10 * c + n) for n in range(3)}) for c in (2, 1)}
    (tmp_path / "train.tar").write_bytes(tar_of(inner))
    images_by_key = {s.key: (s.image, s.labels) for s in imagenet_train(tmp_path / "train.tar")}
    assert images_by_key == {f"n0{c}_{n}": (picture(10 * c + n), (c - 1,)) for c in (1, 2) for n in range(3)}
    (tmp_path / "val.tar").write_bytes(tar_of({f"v{n}.JPEG": picture(n) for n in (1, 0)}))
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    val = imagenet_validation(tmp_path / "wnids.txt", tmp_path / "val.tar")
    assert [(s.key, s.labels) for s in val] == [("v0", (1,)), ("v1", (0,))]
