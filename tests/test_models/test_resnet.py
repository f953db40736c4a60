"""Padding, standardised convolutions and the sizes of a ResNet, against NumPy and counts by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.resnet import BiTConv, StemConv, same_padding

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "borders"),
    [
        (224, 7, 2, (2, 3)),
        (5, 3, 1, (1, 1)),
        (6, 3, 2, (0, 1)),
        (7, 3, 2, (1, 1)),
        (5, 1, 2, (0, 0)),
        (4, 1, 3, (0, 0)),
    ],
)
def test_padding_is_that_of_tensorflow_with_the_odd_pixel_at_the_end(size, kernel, stride, borders):
    before, after = borders
    padded = same_padding(torch.ones(1, 1, size, size), kernel, stride)
    assert padded.shape[2:] == (before + size + after,) * 2
    is_border = (padded[0, 0, before if before < size else 0] == 0).tolist()
    assert is_border == [True] * before + [False] * size + [True] * after
    outputs = (padded.shape[2] - kernel) // stride + 1
    assert outputs == -(-size // stride)


@pytest.mark.parametrize(("convolution", "epsilon"), [(StemConv, "deviation"), (BiTConv, "variance")])
def test_filters_are_standardised_with_the_epsilon_of_their_origin(convolution, epsilon):
    layer = convolution(3, 4, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 1e-3 + 0.5)
    images = torch.randn(2, 3, 6, 6, generator=generator)
    weight = layer.weight.detach().numpy().astype(np.float64)
    mean = weight.mean((1, 2, 3), keepdims=True)
    deviation = np.sqrt(((weight - mean) ** 2).mean((1, 2, 3), keepdims=True))
    if epsilon == "deviation":
        filters = (weight - mean) / (deviation + 1e-5)
    else:
        filters = (weight - mean) / np.sqrt(deviation**2 + 1e-10)
    expected = F.conv2d(F.pad(images.double(), [1] * 4), torch.from_numpy(filters))
    torch.testing.assert_close(layer(images).double(), expected, atol=2e-3, rtol=1e-3)
