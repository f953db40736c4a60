"""Our own and foreign weights: their digests, and the sets that they were trained on."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import models
from data.errors import DataError
from pipeline import artifacts
from pipeline.evaluation import any_weights
from tests.support.weights import save_small, sha256

pytestmark = pytest.mark.quick


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save_small(tmp_path / "weights")


def test_digest_of_our_weights_is_that_of_their_file(weights):
    assert not any_weights.is_foreign(str(weights))
    assert any_weights.digest_of(str(weights), print) == sha256(weights / "weights.safetensors")


def test_digest_of_a_part_of_an_npz_includes_the_part_name(tmp_path):
    file = tmp_path / "theirs.npz"
    file.write_bytes(b"anything")
    assert any_weights.digest_of(str(file), print) == sha256(file)
    part = hashlib.sha256(f"{sha256(file)} img".encode()).hexdigest()
    assert any_weights.digest_of(f"{file}:img", print) == part


def test_digest_of_foreign_weights_includes_the_config_next_to_them(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"anything")
    (tmp_path / "config.json").write_text("{}")
    assert any_weights.is_foreign(str(tmp_path))
    both = f"{sha256(tmp_path / 'model.safetensors')} {sha256(tmp_path / 'config.json')} "
    assert any_weights.digest_of(str(tmp_path), print) == hashlib.sha256(both.encode()).hexdigest()


def test_digest_of_foreign_weights_includes_the_image_processor(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"anything")
    digests = set()
    for mean in (0.4, 0.5):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [mean] * 3}))
        digests.add(any_weights.digest_of(str(tmp_path), print))
    assert len(digests) == 2


def test_file_without_weights_is_reported(tmp_path):
    file = tmp_path / "broken.npz"
    file.write_bytes(b"no zip")
    with pytest.raises(DataError, match=f"cannot load {file}"):
        any_weights.load(str(file), {})


def test_training_sets_are_collected_from_all_previous_stages(tmp_path, weights):
    digest = sha256(weights / "weights.safetensors")
    first = {"data.train": {"path": "/a", "digest": "1", "part_of": None}}
    artifacts.write_record(weights / artifacts.PROVENANCE, {"inputs": first})
    done = {"files": artifacts.digests(weights)}
    artifacts.write_record(weights / artifacts.DONE, done)
    second = tmp_path / "second"
    second.mkdir()
    later = {"data.train": {"path": "/b", "digest": "2", "part_of": None}, "data.evaluate": {"digest": "3"}}
    later["init"] = {"path": str(weights), "digest": digest}
    artifacts.write_record(second / artifacts.PROVENANCE, {"inputs": later})
    sets, end = any_weights.training_sets(str(second))
    assert [source["path"] for source in sets] == ["/b", "/a"]
    assert end == "", "the first stage began with random weights"


def test_end_of_the_training_records_is_reported(weights):
    assert any_weights.training_sets(str(weights)) == ([], str(weights))


@pytest.mark.parametrize("format", ["safetensors", "timm", "hf"])
def test_weights_with_infinity_are_refused_for_evaluation(format, tmp_path):
    model = models.build("mu/8", 16, 5, activation="gelu", norm_eps=1e-6)
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] = float("-inf")
    models.save(model, tmp_path, format)
    with pytest.raises(DataError, match=r"cannot load .*1 of \d+ tensors contain NaN or infinity: .*norm"):
        any_weights.load(str(tmp_path), {})
