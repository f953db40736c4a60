"""NaN and infinity in a safetensors file, found without torch: compared with torch's own check."""

import pytest
import torch
from safetensors.torch import save_file

from models.catalog import check_finite
from models.extras.finite import check_finite_file

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_the_error_equals_that_of_loaded_weights(tmp_path, dtype, value) -> None:
    largest = torch.finfo(dtype).max
    weights = {"a": torch.tensor([largest, -largest, 0.0, -0.0], dtype=dtype), "ids": torch.tensor([2**62])}
    save_file(weights, tmp_path / "good.safetensors")
    check_finite_file(tmp_path / "good.safetensors")

    weights["b"] = torch.tensor([[1.0, value], [value, 2.0]], dtype=dtype)
    save_file(weights, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="b ") as expected:
        check_finite(weights)
    with pytest.raises(ValueError, match=r"1 of 3 tensors contain NaN or infinity: b \(2 of 4 values\)") as error:
        check_finite_file(tmp_path / "bad.safetensors")
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("kept", [0, 3, 20, -1])
def test_a_truncated_file_is_left_to_its_reader(tmp_path, kept) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.tensor([float("nan")])}, file)
    file.write_bytes(file.read_bytes()[:kept])
    check_finite_file(file)
