"""`jobs predict A SET --against B` compares two weights on the same images, or says why they cannot be compared."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import models
from jobs.__main__ import main
from tests.support.documents import document_of
from tests.support.photos import make_photos
from tests.support.shards import DIGIT_NAMES, Picture, digits, write_set

pytestmark = pytest.mark.quick

PICTURES = list(digits(False, image_size=16))[:60]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_set(PICTURES, tmp_path / "set", name="test", names=DIGIT_NAMES)
    return tmp_path


def make_weights(
    name: str, seed: int = 0, names: tuple[str, ...] = DIGIT_NAMES, size: int = 16, classes: int = 10
) -> str:
    """Save a model whose head has random rows; the same seed gives the same predictions in every order of `names`."""
    torch.manual_seed(seed)
    model = models.build("mu/8", size, classes)
    rows = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(seed))
    if set(names) == set(DIGIT_NAMES):
        rows = rows[[DIGIT_NAMES.index(label) for label in names]]
    with torch.no_grad():
        model.head.weight.copy_(rows)
    models.save(model, name, class_names=names)
    return name


def predictions(weights: str) -> list[int]:
    """Return the class of each picture by a plain loop over the model; 16 × 16 images need no preprocessing."""
    import cv2

    model = models.load(weights).eval()
    classes = []
    for picture in PICTURES:
        pixels = cv2.imdecode(np.frombuffer(picture.image, np.uint8), cv2.IMREAD_COLOR_RGB)
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            classes.append(int(model(image).argmax()))
    return classes


def test_counts_test_and_columns_are_those_of_a_plain_loop(here):
    a, b = make_weights("a", 1), make_weights("b", 2)
    document = document_of(["predict", a, "set", "--against", b])
    labels = [picture.labels[0] for picture in PICTURES if picture.labels]
    expected = []
    for label, of_a, of_b in zip(labels, predictions(a), predictions(b), strict=True):
        names = {(True, True): "both", (True, False): "A", (False, True): "B", (False, False): "neither"}
        expected.append(names[of_a == label, of_b == label])
    comparison = document["comparison"]
    counted = [comparison[name] for name in ("both", "only_a", "only_b", "neither")]
    assert counted == [expected.count(name) for name in ("both", "A", "B", "neither")]
    assert min(counted[1:]) > 0, "otherwise this test compares nothing"
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert [row["right"] for row in rows] == [image["right"] for image in document["images"]] == expected
    assert [int(row["other_label"]) for row in rows] == predictions(b)
    only_a, only_b = counted[1:3]
    assert comparison["difference"] == pytest.approx((only_b - only_a) / 60)
    assert comparison["low"] < comparison["difference"] < comparison["high"]
    assert comparison["p_value"] == pytest.approx(binomtest(only_a, only_a + only_b).pvalue)
    right = expected.count("both") + expected.count("A")
    ends = binomtest(right, 60).proportion_ci(method="wilson")
    assert comparison["a"] == {
        "weights": "a",
        "right": right,
        "accuracy": right / 60,
        "low": pytest.approx(ends.low),
        "high": pytest.approx(ends.high),
    }
    assert comparison["conclusion"] in document["report"]
    # The page has the images for which only one model is right.
    page = Path("predictions.html").read_text()
    assert page.count("<img") == only_a + only_b
    assert page.count("only A is right") == only_a


def test_images_can_have_other_sizes_and_classes_another_order(here, capsys):
    """B is A with the classes in reverse, so both are right for the same images."""
    make_weights("a", 1)
    make_weights("reverse", 1, names=DIGIT_NAMES[::-1])
    comparison = document_of(["predict", "a", "set", "--against", "reverse"])["comparison"]
    assert comparison["conclusion"] == "no difference: A and B are right for the same images"
    assert comparison["only_a"] == comparison["only_b"] == 0 < comparison["both"]
    assert not comparison["same_weights"]
    assert -0.1 < comparison["low"] < 0 < comparison["high"] < 0.1
    large = make_weights("large", 1, size=24)
    assert main(["predict", "a", "set", "--against", large, "--force"]) == 0
    assert "B: no preprocessing is recorded with the weights; used the evaluation default, resize((24, 24))" in (
        capsys.readouterr().out
    )
    # The labels of a set without names would be those of one model, but not of the other.
    write_set(PICTURES, here / "ids", name="test")
    assert main(["predict", "a", "ids", "--against", "reverse", "--force"]) == 65
    assert "number their classes differently, and ids has no class names" in capsys.readouterr().err


def test_the_same_weights_twice_are_recognised(here):
    make_weights("a")
    make_weights("copy")
    for other in ("a", "copy"):
        comparison = document_of(["predict", "a", "set", "--against", other, "--force"])["comparison"]
        assert comparison["conclusion"] == "A and B are the same weights"
        assert (comparison["same_weights"], comparison["better"], comparison["p_value"]) == (True, "", 1)
        assert comparison["low"] == comparison["high"] == 0


def test_weights_without_class_names_are_numbered_like_the_other_weights(here):
    make_weights("a", 1)
    make_weights("ids", 1, names=())
    for words in (["a", "set", "--against", "ids"], ["ids", "set", "--against", "a"]):
        document = document_of(["predict", *words, "--force"])
        assert any("has no class names; its classes are numbered like those of" in line for line in document["report"])
        assert document["comparison"]["neither"] < 60
        assert document["comparison"]["only_a"] == document["comparison"]["only_b"] == 0
    make_weights("other_ids", 2, names=())
    fruits = tuple(f"fruit {number}" for number in range(10))
    write_set(PICTURES, here / "fruits", name="test", names=fruits)
    document = document_of(["predict", "ids", "fruits", "--against", "other_ids", "--force"])
    assert document["comparison"]["neither"] < 60
    assert document["images"][0]["other"]["label"] in fruits


@pytest.mark.parametrize(
    ("names", "classes", "message"),
    [
        ((*DIGIT_NAMES[:9], "cat"), 10, "only A has '9'; only B has 'cat'"),
        (DIGIT_NAMES[:5], 5, "A has 10 classes, B 5; only A has '5', '6', '7', '8', '9'"),
        ((), 5, "A has 10 classes, B 5"),
    ],
)
def test_different_classes_are_refused(here, capsys, names, classes, message):
    make_weights("a")
    make_weights("b", 2, names=names, classes=classes)
    assert main(["predict", "a", "set", "--against", "b"]) == 65
    err = capsys.readouterr().err
    assert f"A and B have different classes, so they cannot be compared: {message}\n" in err
    assert not Path("predictions.csv").exists()


def test_images_without_labels_and_unknown_classes_are_refused(here, capsys):
    make_weights("a")
    make_weights("b", 2)
    make_photos(here / "photos")
    # No weights are loaded for images that cannot have labels.
    assert main(["predict", "a", "photos", "--against", "b"]) == 64
    assert "but photos has no labels\n  pass a labelled data set" in capsys.readouterr().err
    unlabelled = [Picture(picture.key, picture.image, None) for picture in PICTURES[:3]]
    write_set(unlabelled, here / "unlabelled", name="test")
    assert main(["predict", "a", "unlabelled", "--against", "b"]) == 64
    assert "unlabelled has no labels" in capsys.readouterr().err
    (here / "unlabelled" / "test.index.json").unlink()
    assert main(["predict", "a", "unlabelled", "--against", "b"]) == 65
    assert "no image that can be decoded has a label" in capsys.readouterr().err
    write_set([Picture("x", PICTURES[0].image, (11,))], here / "twelve", name="test")
    assert main(["predict", "a", "twelve", "--against", "b"]) == 65
    assert "test-000000.tar:x has the class '11', which A and B do not have" in capsys.readouterr().err
    write_set([], here / "empty", name="test", names=DIGIT_NAMES, classes=10)
    assert main(["predict", "a", "empty", "--against", "b"]) == 65
    assert "empty: found no samples with images" in capsys.readouterr().err
    assert not Path("predictions.csv").exists()


def test_images_with_several_labels_and_without_any_are_counted(here):
    make_weights("a", 1)
    make_weights("b", 2)
    several = [Picture("two", PICTURES[0].image, tuple(range(10))), Picture("none", PICTURES[1].image, None)]
    write_set([*PICTURES[2:9], *several], here / "several", name="test", names=DIGIT_NAMES)
    for place in ("several", "several/test-000000.tar"):
        document = document_of(["predict", "a", place, "--against", "b", "--force"])
        assert "not compared: 1 image without a label" in document["report"]
        assert any(line.startswith("1 image with several labels: a prediction is right") for line in document["report"])
        assert document["comparison"]["images"] == 8
        assert [image["right"] for image in document["images"]][-2:] == ["both", ""]
        # Few images: even if they all favoured one model, the test could not tell.
        conclusion = document["comparison"]["conclusion"]
        assert conclusion.endswith("fewer than 6 such images can never show which model is better"), conclusion


def test_the_other_weights_are_named_if_they_cannot_be_loaded(here, capsys):
    make_weights("a")
    assert main(["predict", "a", "set", "--against", "absent"]) == 65
    assert "no file or folder at absent" in capsys.readouterr().err
    assert main(["predict", "a", "set", "--against", "set"]) == 65
    assert "set is a data set, not weights" in capsys.readouterr().err
    damaged = Path(make_weights("damaged")) / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    assert main(["predict", "a", "set", "--against", "damaged"]) in (65, 74)
    assert "damaged" in capsys.readouterr().err
    models.save(models.build("mu/8", 16, 0), here / "headless")
    assert main(["predict", "a", "set", "--against", "headless"]) == 64
    assert "headless has no classification head" in capsys.readouterr().err
    diverged = models.load(make_weights("diverged"))
    with torch.no_grad():
        diverged.head.weight.fill_(3e38)
    models.save(diverged, here / "huge", class_names=DIGIT_NAMES)
    assert main(["predict", "a", "set", "--against", "huge"]) == 65
    assert "huge: the model's outputs contain NaN or infinity" in capsys.readouterr().err
    assert not Path("predictions.csv").exists()
