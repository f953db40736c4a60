"""`jobs predict` writes the classes that a plain loop over the model finds."""

import csv
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import models
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.__main__ import main
from jobs.extras.predict.predict import most_probable
from tests.support.photos import make_photos
from tests.support.shards import digits as written_digits
from tests.support.shards import write_set

NAMES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = models.build("mu/8", (16, 24), 5)
    with torch.no_grad():
        model.head.weight.normal_()  # zero at initialisation: all classes would be equally probable
    models.save(model, tmp_path / "weights", class_names=NAMES)
    return str(tmp_path / "weights")


def test_labels_and_scores_are_those_of_a_plain_loop(tmp_path, weights, capsys):
    photos = make_photos(tmp_path / "photos")
    (photos / "broken.jpg").write_bytes(b"broken")
    output = tmp_path / "out/new.csv"
    assert main(["predict", weights, str(photos), "--output", str(output), "--top", "2", "--batch", "2"]) == 0
    rows = list(csv.DictReader(output.open(newline="")))
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png", "2.png", "broken.jpg"]
    assert rows[3]["label"] == rows[3]["score"] == ""

    model = models.load(weights).eval()
    for row in rows[:3]:
        pixels = cv2.cvtColor(cv2.imread(row["file"]), cv2.COLOR_BGR2RGB)
        # Bilinear with half-pixel centres and without antialiasing, truncated, as evaluation's default resize.
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
        resized = torch.nn.functional.interpolate(batch, size=(16, 24), mode="bilinear", align_corners=False).floor()
        with torch.no_grad():
            expected = model(resized / 127.5 - 1).softmax(-1)[0].numpy()
        order = np.argsort(-expected)
        assert [row["label"], row["label_2"]] == [NAMES[order[0]], NAMES[order[1]]]
        # Truncation of a value next to an integer may differ by one of 255 levels.
        np.testing.assert_allclose([float(row["score"]), float(row["score_2"])], expected[order[:2]], rtol=2e-2)
    out = capsys.readouterr().out
    assert "predicted 3 images" in out
    assert "skipped 1 undecodable image" in out
    page = output.with_suffix(".html").read_text()
    assert page.count("<img") == 3
    assert rows[0]["label"] in page


def test_preprocessing_recorded_for_another_size_is_scaled_to_the_model(tmp_path):
    model = models.build("mu/8", 16, 5, pool="token", representation=None)
    models.save(model, tmp_path / "theirs", "hf", class_names=NAMES)
    processor = tmp_path / "theirs/preprocessor_config.json"
    described = json.loads(processor.read_text())
    processor.write_text(json.dumps({**described, "size": {"height": 32, "width": 32}}))
    photos = make_photos(tmp_path / "photos")
    output = tmp_path / "new.csv"
    assert main(["predict", str(tmp_path / "theirs"), str(photos), "--output", str(output)]) == 0
    assert len(list(csv.DictReader(output.open(newline="")))) == 3


def test_sigmoid_heads_give_independent_scores():
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    [(labels, scores)] = most_probable(logits, ("a", "b"), 3, is_sigmoid=True)
    assert labels == ("b", "a", "2")
    np.testing.assert_allclose(scores, 1 / (1 + np.exp([-2.0, 0.0, 1.0])), rtol=1e-6)


def test_equal_scores_are_ordered_by_class_id():
    [(labels, _)] = most_probable(torch.zeros(1, 4), (), 3, is_sigmoid=False)
    assert labels == ("0", "1", "2")


def test_samples_of_a_set_are_predicted_with_their_true_labels(tmp_path, weights, capsys):
    """The labels are counted from the source; the digits have ten classes without names, the weights five with."""
    pack(digits(train=False, image_size=16), tmp_path / "shards", name="test")
    output = tmp_path / "new.csv"
    words = ["predict", weights, str(tmp_path / "shards"), "--output", str(output), "--top", "9", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(output.open(newline="")))
    expected = []
    for sample in digits(train=False, image_size=16):
        [label] = sample.labels
        expected.append(NAMES[label] if label < 5 else str(label))
    assert [row["true_label"] for row in rows] == expected
    scores = [float(rows[0][name]) for name in ("score", "score_2", "score_3", "score_4", "score_5")]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=1e-4)
    right = sum(row["label"] == row["true_label"] for row in rows)
    assert f"right: {right} of {len(rows)} labelled images ({right / len(rows):.1%})" in document["report"]
    unknown = sum(label not in NAMES for label in expected)
    text = f"{unknown} of them have classes that the weights do not have, for example '5', and count as wrong"
    assert text in document["report"]
    assert [image["true_labels"] for image in document["images"]] == [[label] for label in expected]
    # The page marks the wrong ones among its first 200 images.
    wrong = sum(row["label"] != row["true_label"] for row in rows[:200])
    page = output.with_suffix(".html").read_text()
    assert page.count('<figure class="wrong">') == page.count("<span>wrong: is ") == wrong > 0


def test_a_tar_without_an_index_gives_the_same_table(tmp_path, weights):
    pack(digits(train=False, image_size=16), tmp_path / "shards", name="test")
    tars = tmp_path / "tars"
    tars.mkdir()
    tables = []
    for tar in sorted((tmp_path / "shards").glob("*.tar")):
        (tars / tar.name).write_bytes(tar.read_bytes())
    for source in ("shards", "tars"):
        assert main(["predict", weights, str(tmp_path / source), "--output", str(tmp_path / f"{source}.csv")]) == 0
        tables.append((tmp_path / f"{source}.csv").read_text())
    assert tables[0] == tables[1]


def test_a_subset_is_predicted_by_the_name_that_a_run_prints(tmp_path, weights, capsys, monkeypatch):
    """The subset's tars are in the folder of the whole set."""
    pack(digits(train=False, image_size=16), tmp_path / "shards", name="test")
    folder = tmp_path / "runs/mine/parts-1a2b3c4d"
    subset = ["subset", str(tmp_path / "shards"), "--part", ":10%", "--output", str(folder / "held-out")]
    assert main([*subset, "--name", "held-out"]) == 0
    (folder / "stage.json").write_text('{"name": "parts", "kind": "pack", "key": "1a2b3c4d"}')
    (folder / "done.json").write_text('{"files": {}, "summary": "", "seconds": 1}')
    listed = capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["predict", weights, "runs/mine/parts/held-out"]) == 0, listed
    keys = []
    assert main(["data", "list", "runs/mine/parts/held-out"]) == 0
    for line in capsys.readouterr().out.splitlines():
        parts = line.split("\t")
        if len(parts) == 4:
            keys.append(f"{parts[1]}:{parts[0]}")
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open(newline="")))
    assert [row["file"] for row in rows] == keys
    assert len(rows) > 10


def test_other_files_are_counted(tmp_path, weights, capsys):
    photos = make_photos(tmp_path / "photos")
    assert main(["predict", weights, str(photos), "--output", str(tmp_path / "new.csv")]) == 0
    assert f"skipped 1 file of other types, for example {photos / 'notes.txt'}" in capsys.readouterr().out
    assert "true_label" not in (tmp_path / "new.csv").read_text()


def test_weights_without_class_names_are_numbered_like_the_set(tmp_path, capsys):
    """Before, their labels were ids, which equalled no name of the set: all predictions counted as wrong."""
    torch.manual_seed(0)
    model = models.build("mu/8", 16, 10)
    with torch.no_grad():
        model.head.weight.normal_()
    models.save(model, tmp_path / "ids")
    fruits = tuple(f"fruit {number}" for number in range(10))
    pictures = list(written_digits(False, image_size=16))[:40]
    write_set(pictures, tmp_path / "named", name="test", names=fruits)
    write_set(pictures, tmp_path / "unnamed", name="test")
    lines = []
    for place in ("named", "unnamed"):
        output = str(tmp_path / f"{place}.csv")
        assert main(["predict", str(tmp_path / "ids"), str(tmp_path / place), "--output", output]) == 0
        lines.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("right: ")])
    assert lines[0] == lines[1] != ["right: 0 of 40 labelled images (0.0%)"]
    labels = [row["label"] for row in csv.DictReader((tmp_path / "named.csv").open(newline=""))]
    assert set(labels) <= set(fruits)
