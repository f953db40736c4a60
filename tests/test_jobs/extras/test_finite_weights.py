"""Initial weights with NaN are refused before anything is packed or trained."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import models
from jobs.__main__ import main
from jobs.extras import finite_weights


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


def test_a_file_is_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.safetensors"
    check = finite_weights.check_finite_file
    read = []
    monkeypatch.setattr(finite_weights, "check_finite_file", lambda path: read.append(path) or check(path))
    save_file({"a": np.zeros(2, np.float32)}, file)
    for _ in range(2):
        finite_weights.check_once(file, file.stat().st_mtime_ns)
    assert read == [file]
    save_file({"a": np.full(2, np.nan, np.float32)}, file)
    os.utime(file, ns=(1, 1))  # the two files may have been written within a tick of the file system's clock
    for _ in range(2):
        with pytest.raises(ValueError, match="1 of 1 tensors contain NaN"):
            finite_weights.check_once(file, file.stat().st_mtime_ns)
