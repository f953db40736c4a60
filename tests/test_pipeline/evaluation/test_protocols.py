"""Evaluation protocols and document, compared with scipy, NumPy and golden results of the original."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.evaluation import document
from pipeline.evaluation.probes import COMPUTE
from pipeline.evaluation.protocols import PROTOCOLS, NeighboursConfig, protocols_of
from tests.support.evaluated_sets import NAMES, inputs_of, store_of
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.quick


def test_top_1_top_5_and_per_class_match_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(500, 10))
    labels = rng.integers(3, size=500)
    scores[np.arange(500), labels] += 1.0
    ranked = np.argsort(-scores, axis=1)[:, :5]
    store = store_of(None, labels, tmp_path, ranked)
    results = {}
    for protocol in protocols_of(("top-1", "top-5", "per-class"), None, {}):
        judged = COMPUTE[protocol.name](inputs_of(None, store, protocol.name), None)
        results[protocol.name] = document.result_of(judged, protocol, store, None, None)

    is_right = scores.argmax(1) == labels
    rank = (scores > scores[np.arange(500), labels][:, None]).sum(1)
    assert results["top-1"]["values"]["top-1"]["value"] == is_right.mean()
    assert results["top-5"]["values"]["top-5"]["value"] == (rank < 5).mean() > is_right.mean()
    by_class = [is_right[labels == label].mean() for label in range(3)]
    entries = results["per-class"]["classes"]
    assert [(entry["name"], entry["samples"]) for entry in entries] == [
        (name, (labels == label).sum()) for label, name in enumerate(NAMES)
    ]
    assert [entry["value"] for entry in entries] == pytest.approx(by_class)
    assert results["per-class"]["values"]["per-class"]["value"] == pytest.approx(np.mean(by_class))


def test_per_class_counts_a_sample_in_each_class_of_its_labels(tmp_path: Path) -> None:
    """Use up to three labels, unequal classes, an empty class, an unlabelled image and an unreadable one."""
    rng = np.random.default_rng(8)
    labels = np.full((90, 3), -1)
    for row in range(89):
        chosen = rng.choice([0, 1, 2, 2, 5], size=rng.integers(1, 4))
        labels[row, : len(set(chosen))] = sorted(set(chosen))
    predictions = rng.choice([0, 1, 2, 5], size=(90, 1))
    store = store_of(None, labels, tmp_path, predictions)
    store.is_there[13] = False
    (protocol,) = protocols_of(("per-class",), None, {})
    judged = COMPUTE[protocol.name](inputs_of(None, store, "per-class"), None)
    result = document.result_of(judged, protocol, store, None, None)
    shares = {}
    for label in (0, 1, 2, 5):
        of_class = [row for row in range(89) if row != 13 and label in labels[row]]
        shares[label] = (len(of_class), np.mean([predictions[row, 0] in labels[row] for row in of_class]))
    assert [entry["id"] for entry in result["classes"]] == list(shares)
    for entry in result["classes"]:
        assert (entry["samples"], entry["value"]) == pytest.approx(shares[entry["id"]])
    assert len({count for count, _ in shares.values()}) > 1
    entry = result["values"]["per-class"]
    assert entry["value"] == pytest.approx(np.mean([share for _, share in shares.values()]))
    assert entry["samples"] == 88 < sum(count for count, _ in shares.values()), "images, not labels"
    assert [entry["name"] for entry in result["classes"]] == [*NAMES, None]


def test_real_accuracy_matches_the_original(tmp_path: Path) -> None:
    """Accept any of several labels; images with an empty list are excluded, as when they are packed."""
    path = GOLDEN / "real_eval.json"
    if not path.exists():
        pytest.skip("golden data is absent: ../shared/golden/real_eval.json")
    golden = json.loads(path.read_text())
    judged_images = [(p, ls) for p, ls in zip(golden["predictions"], golden["real_labels"], strict=True) if ls]
    labels = np.full((len(judged_images), 16), -1)
    for row, (_, lists) in enumerate(judged_images):
        labels[row, : len(lists)] = lists
    predictions = np.array([[predicted] for predicted, _ in judged_images])
    store = store_of(None, labels, tmp_path, predictions)
    (is_right,) = COMPUTE["real"](inputs_of(None, store, "real"), None).right["real"]
    assert (is_right.sum(), len(is_right)) == (golden["n_correct"], golden["n_evaluated"])


def test_every_other_protocol_than_those_of_an_extra_has_a_function() -> None:
    assert PROTOCOLS.keys() - COMPUTE.keys() == {"linear", "knn", "logistic"}


def test_protocol_digest_covers_name_and_fields() -> None:
    (one, other) = protocols_of(("top-1", "knn"), SimpleNamespace(knn=NeighboursConfig()), {"precision": "fp32"})
    canonical = '{"fields": {"precision": "fp32"}, "protocol": "top-1"}'
    assert one.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert other.fields["options"] == {"k": [10, 20], "weighted": True, "temperature": 0.07}
