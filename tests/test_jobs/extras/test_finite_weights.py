"""Initial weights with NaN are refused before anything is packed or trained."""

from pathlib import Path

import pytest
import torch

import models
from jobs.__main__ import main


@pytest.mark.parametrize(("value", "code"), [(float("nan"), 65), (float("inf"), 65), (1.0, 0)])
def test_weights_that_are_not_finite_are_refused_with_the_recipe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, code: int
) -> None:
    model = models.build("mu/8", 16, 10)
    with torch.no_grad():
        model.norm.bias[1] = value
    models.save(model, tmp_path / "given")
    words = ["plan", str(recipe), f"pretrain.init={tmp_path / 'given'}", "pretrain.model={}"]
    assert main(words) == code
    error = capsys.readouterr().err
    if code:
        assert f"pretrain: cannot load {tmp_path / 'given'}: 1 of " in error
        assert "expected finite values only" in error
    assert not (tmp_path / "run").exists()
