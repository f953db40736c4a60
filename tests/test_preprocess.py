"""Preprocessing equals the original repositories' on golden arrays."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.images import preprocess as preprocessing
from data.images.augment import AugmentConfig, Draws, inception_box
from data.images.preprocess import preprocess, shape_of

GOLDEN = Path(__file__).parents[1].parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden is not beside this checkout")


def test_the_example_at_the_top_of_the_module_is_what_happens():
    small = preprocess(np.zeros((500, 375, 3), np.uint8), "decode|resize_small(256)")
    crop = preprocess(small, "central_crop(224)")
    example = (
        f"an image (500, 375, 3) becomes {small.shape} by resize_small(256), and {crop.shape} by central_crop(224)"
    )
    assert example in preprocessing.__doc__


@needs_golden
@pytest.mark.parametrize("case", range(8))
def test_op_strings_match_the_original(case):
    golden = np.load(GOLDEN / "preprocess.npz")
    config = json.loads(str(golden["cases_json"]))[str(case)]
    expected = golden[f"out_{case}"]
    image = preprocess(golden[f"in_{case}"], config["pp"])
    assert image.shape == expected.shape and image.dtype == expected.dtype
    error = np.abs(image.astype(float) - expected)
    level = 1.001 if expected.dtype == np.uint8 else 0.00785  # one uint8 level
    growing = config["pp"].startswith("decode|resize_small(56)")  # ties of exact integers fall either way
    assert error.max() <= level and (error > 1e-6).mean() < (0.2 if growing else 0.01)


@needs_golden
def test_the_inception_crop_is_distributed_as_the_original():
    golden = np.load(GOLDEN / "inception_crop_stats.npz")
    height = 300
    width = 400
    boxes = np.array([inception_box(height, width, Draws(n), AugmentConfig()) for n in range(10_000)])
    y, x, h, w = boxes.T
    drawn = {"area": h * w / height / width, "aspect": w / h, "height": h / height, "width": w / width}
    drawn |= {"y0": y / height, "x0": x / width}
    scale = {"height": height, "width": width, "y0": height, "x0": width}
    for name, values in drawn.items():
        quantiles = golden[f"{name}_quantiles"] / scale.get(name, 1)
        assert np.abs(np.quantile(values, golden["quantiles"]) - quantiles).max() < 0.02, name


@pytest.mark.parametrize("height, width", [(1, 1), (1, 500), (500, 1), (3, 4)])
def test_a_box_lies_inside_any_image(height, width):
    for n in range(200):
        y, x, h, w = inception_box(height, width, Draws(n), AugmentConfig())
        assert y >= 0 and x >= 0 and h > 0 and w > 0 and y + h <= height and x + w <= width


def test_unknown_ops_and_crops_of_small_images_are_refused():
    image = np.zeros((10, 20, 3), np.uint8)
    with pytest.raises(ValueError, match=r"'resise' .* unknown; there are decode, resize"):
        preprocess(image, "decode|resise(3)")
    with pytest.raises(ValueError, match="put a resize before"):
        preprocess(image, "central_crop(12)")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("resize(0)", r"resize\(0\): a side of 0 pixels, expected a whole number from 1 on"),
        ("decode|resize(-1)", r"resize\(-1\): a side of -1 pixels"),
        ("resize(1e9)", r"resize\(1000000000.0\): 1,000,000,000,000,000,000 pixels, expected 16,777,216 at most"),
        (
            "resize()",
            r"resize\(\): .*missing 1 required positional argument: 'size'; expected for example resize",
        ),
        ("resize(16, 1, 2)", "takes from 2 to 3 positional arguments but 4 were given"),
        ("resize(16", r"'resize\(16' lacks a bracket"),
        ("resize_float((16, 8))", r"resize_float\(\(16, 8\)\): .*; expected for example resize\(224\)"),
        ("central_crop(2000)", "put a resize before it"),
        ("resize(16)|value_range(-1, 1)", "scales the pixels, which evaluation does itself; leave that op out"),
        ("VIT_JAX_EVAL(16)", "scales the pixels"),
    ],
)
def test_ops_that_could_not_preprocess_are_refused_with_their_arguments(ops, message):
    with pytest.raises(ValueError, match=message):
        shape_of(ops)


@pytest.mark.parametrize(
    ("ops", "shape"),
    [
        ("decode|resize_small(256)|central_crop(224)", (224, 224, 3)),
        ("resize((16, 24), antialias=True)", (16, 24, 3)),
        ("resize_float(30)", (30, 30, 3)),
        ("resize_tf1(7)|value_range(0, 255)", (7, 7, 3)),
        ("resize_small(585)|central_crop(512)", (512, 512, 3)),
    ],
)
def test_the_shape_of_ops_is_that_of_every_image(ops, shape):
    assert shape_of(ops) == shape == preprocess(np.zeros((1000, 1500, 3), np.uint8), ops).shape
