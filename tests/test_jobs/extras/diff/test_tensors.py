"""`python -m jobs diff` of weights; for checkpoints, see tests/test_jobs/extras/checkpoints/test_contents.py."""

import shutil
from pathlib import Path

import pytest
import torch

import models
from jobs.__main__ import main
from jobs.extras.diff.tensors import difference_of, has_tensors
from tests.support.documents import document_of

pytestmark = pytest.mark.quick


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder of weights."""
    torch.manual_seed(0)
    model = models.build("mu/8", 16, 5)
    torch.nn.init.normal_(model.head.weight)
    models.save(model, tmp_path / "weights")
    return tmp_path / "weights"


def changed(weights: Path, name: str, value: float) -> Path:
    """Write weights in which one element of a tensor was increased by `value`."""
    model = models.load(weights)
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] += value
    models.save(model, weights.with_name("changed"))
    return weights.with_name("changed")


def test_equal_weights_have_no_differences_in_any_format(weights: Path, tmp_path: Path) -> None:
    assert main(["export", str(weights), str(tmp_path / "timm"), "--format", "timm"]) == 0
    count = len(list(models.load(weights).parameters()))
    for other in (weights, weights / "weights.safetensors", tmp_path / "timm"):
        document = document_of(["diff", str(weights), str(other)])
        assert (document["equal"], document["compared"], document["tensors"]) == (count, count, [])


def test_a_difference_is_its_largest_element(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(weights, "head.weight", 0.25)
    assert main(["diff", str(weights), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(list(models.load(weights).parameters()))
    assert lines[1:] == [
        "  head.weight weights: largest difference 0.25",
        f"  {count - 1} of {count} tensors are equal bit for bit",
    ]


def test_tensors_of_other_models_are_listed_by_shape_and_side(weights: Path, tmp_path: Path) -> None:
    models.save(models.build("mu/8", 24, 0), tmp_path / "features")
    rows = {row["name"]: row for row in document_of(["diff", str(weights), str(tmp_path / "features")])["tensors"]}
    assert rows["head.bias"]["difference"] == "only in the first"
    width = models.load(weights).config.width
    positions = next(row for name, row in rows.items() if "pos" in name)
    assert positions["difference"] == f"shapes [1, 5, {width}] and [1, 10, {width}]"


def test_other_types_of_numbers_are_not_equal_bit_for_bit(weights: Path) -> None:
    model = models.load(weights).half()
    half = weights.with_name("half")
    models.save(model, half)
    document = document_of(["diff", str(weights), str(half)])
    assert document["compared"] == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("digits", False),
        ("mine.yaml", False),
        ("runs/a", False),
        ("runs/a/pretrain", False),
        ("runs/a/step-5", True),
        ("s3://bucket/a/pretrain/step-0000000005-000001", True),
        ("weights", True),
        ("vit.npz", True),
        ("siglip.npz:img", True),
        ("x.safetensors", True),
        ("stage-1a2b3c4d", False),
        ("step-x", False),
    ],
)
def test_checkpoints_and_weights_are_told_from_recipes_and_runs(
    path: str, expected: bool, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(weights.parent)
    # A finished stage has weights too, but its settings are compared.
    shutil.copytree(weights, "stage-1a2b3c4d")
    Path("stage-1a2b3c4d/stage.json").write_text("{}")
    assert has_tensors(path) == expected


def test_a_misspelled_path_is_refused(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(weights), f"{weights}s"]) == 65
    assert "did you mean" in capsys.readouterr().err


def test_bits_are_compared_and_not_values() -> None:
    nan = torch.tensor([[float("nan"), 1.0]])
    assert difference_of(lambda: nan, lambda: nan.clone()) == {}
    assert difference_of(lambda: torch.tensor(0.0), lambda: torch.tensor(-0.0)) == {"largest": 0.0}
    assert difference_of(lambda: torch.ones(3, 2).T.bfloat16(), lambda: torch.ones(2, 3).bfloat16()) == {}
