"""The recorded loss of weights, from our records and from other projects' files."""

import json
from pathlib import Path

import pytest

import models
from pipeline import artifacts
from pipeline.extras.recorded_origin import recorded_loss
from tests.support.weights import save_small, sha256

pytestmark = pytest.mark.quick


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save_small(tmp_path / "weights")


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_recorded_loss_is_that_of_the_stage_that_trained_the_head(loss, weights, tmp_path):
    assert recorded_loss(str(weights)) is None
    # A trained stage, and a resize of its weights.
    artifacts.write_record(weights / "provenance.json", {"config": {"loss": loss}, "inputs": {}})
    digest = sha256(weights / "weights.safetensors")
    artifacts.write_record(weights / "done.json", {"files": {"weights.safetensors": {"bytes": 1, "sha256": digest}}})
    resized = tmp_path / "resized"
    models.save(models.load(weights), resized)
    init = {"path": str(weights), "digest": digest}
    artifacts.write_record(resized / "provenance.json", {"config": {"image_size": 16}, "inputs": {"init": init}})
    for path in (weights, weights / "weights.safetensors", resized):
        assert recorded_loss(str(path)) == loss
    # Other weights have replaced the resized ones' source.
    init["digest"] = "0" * 64
    artifacts.write_record(resized / "provenance.json", {"config": {"image_size": 16}, "inputs": {"init": init}})
    assert recorded_loss(str(resized)) is None


@pytest.mark.parametrize(
    ("described", "loss"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "regression"}, None),
        ({"problem_type": None}, None),
        ({}, None),
        ([], None),
    ],
)
def test_loss_of_a_transformers_folder_is_its_problem_type(described, loss, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"anything")
    assert recorded_loss(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert recorded_loss(str(tmp_path)) == loss
