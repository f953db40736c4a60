"""Preprocessing equals that of the original repositories on golden arrays."""

import json
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from data.images import preprocess as preprocessing
from data.images.augment import AugmentConfig, Draws, inception_box
from data.images.preprocess import preprocess, shape_of
from tests.support.golden import GOLDEN, needs_golden

pytestmark = pytest.mark.quick


def test_example_in_the_module_docstring_is_correct():
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
    assert image.shape == expected.shape
    assert image.dtype == expected.dtype
    np.testing.assert_array_equal(image, expected)


def pattern(height, width):
    """Return an image (height, width, 3) with all values, computed only with integers."""
    y = np.arange(height)[:, None, None]
    x = np.arange(width)[None, :, None]
    channel = np.arange(3)
    return ((3 * y * y + 7 * x + 50 * channel + x * y // 5 * 11) % 256).astype(np.uint8)


# What TensorFlow 2.21 (tensorflow-cpu on x86-64) made of `pattern`, by big_vision's code around tf.image.resize
# (pp/ops_image.py) and, for resize_tf1, by tf.compat.v1.image.resize_images: sides, and the sha256 of all bytes.
TENSORFLOW = [
    # The sides in float32: in float64 the first three are 452, 878 and 795 wide.
    ("resize_small(448)", (384, 387), (448, 451), "73d4e5d1043c028f"),
    ("resize_small(585)", (500, 750), (585, 877), "ba156baa760cc629"),
    ("resize_small(592)", (288, 387), (592, 796), "c25082f3dbe0066b"),
    # The digests: reduced, enlarged, with a side of one pixel, and unchanged.
    ("resize_small(40)", (61, 83), (40, 54), "adf66fc505c663f3"),
    ("resize_small(3)", (7, 5), (4, 3), "d16575c7617afe6d"),
    ("resize_small(16)", (5, 7), (16, 22), "bb84903f4fe0e880"),
    ("resize_small(4)", (1, 9), (4, 36), "e4bed5484606d987"),
    ("resize_small(33)", (33, 47), (33, 47), "015b8cadb97a0591"),
    ("resize_small(256)", (375, 500), (256, 341), "8f4d6a0975373581"),
    ("resize_small(256)", (500, 375), (341, 256), "6e82cb8203c0f46c"),
    ("resize_small(24)", (37, 401), (24, 260), "02f9fdc512828863"),
    ("resize_small(128)", (256, 300), (128, 150), "beaf37ae735438d9"),
    ("resize(24, antialias=True)", (37, 53), (24, 24), "92267c9ad16dd414"),
    ("resize(48, antialias=True)", (20, 90), (48, 48), "65cc3e334a299a3b"),
    ("resize(224, antialias=True)", (301, 217), (224, 224), "2c3b07a6455c0092"),
    ("resize(224)", (301, 217), (224, 224), "a9ec4e23404d4883"),
    ("resize_float(48)", (20, 90), (48, 48), "5249100efc409753"),
    ("resize_float(224)", (301, 217), (224, 224), "0173a0615b17258c"),
    ("resize_tf1(24)", (37, 53), (24, 24), "237a935e5e73705e"),
    ("resize_tf1(224)", (301, 217), (224, 224), "e168f7252779f31b"),
]


@pytest.mark.parametrize("ops, sides, new_sides, digest", TENSORFLOW)
def test_resizes_give_tensorflow_s_bits(ops, sides, new_sides, digest):
    image = preprocess(pattern(*sides), ops)
    assert image.shape == (*new_sides, 3)
    assert sha256(image.tobytes()).hexdigest()[:16] == digest


def test_an_area_is_averaged_as_tensorflow_does():
    expected = [[4, 16, 28, 44], [16, 31, 52, 74], [42, 65, 93, 118]]  # the first channel, as TensorFlow 2.21 gives it
    assert preprocess(pattern(5, 7), "resize_small(3)")[..., 0].tolist() == expected


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("sides", [(61, 83), (83, 61), (24, 24), (20, 400)])
def test_pillow_ops_equal_torchvision_s_transforms(sides, filter):
    transforms = pytest.importorskip("torchvision.transforms")
    mode = transforms.InterpolationMode(filter)
    image = pattern(*sides)
    for size, op in ((29, f"resize_pillow(29, '{filter}')"), ((25, 40), f"resize_pillow((25, 40), '{filter}')")):
        theirs = transforms.Compose([transforms.Resize(size, mode), transforms.CenterCrop(24)])
        ours = preprocess(image, f"{op}|center_crop(24)")
        np.testing.assert_array_equal(ours, np.asarray(theirs(Image.fromarray(image))))


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
        assert y >= 0
        assert x >= 0
        assert h > 0
        assert w > 0
        assert y + h <= height
        assert x + w <= width


def test_unknown_ops_and_crops_of_small_images_are_refused():
    image = np.zeros((10, 20, 3), np.uint8)
    with pytest.raises(ValueError, match=r"'resise' .* unknown; expected one of decode, resize"):
        preprocess(image, "decode|resise(3)")
    with pytest.raises(ValueError, match="put a resize before"):
        preprocess(image, "central_crop(12)")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("resize(0)", r"resize\(0\) has a side of 0 pixels, expected a whole number of 1 or more"),
        ("decode|resize(-1)", r"resize\(-1\) has a side of -1 pixels"),
        (
            "resize(1e9)",
            r"resize\(1000000000.0\) produces 1,000,000,000,000,000,000 pixels, expected at most 16,777,216",
        ),
        (
            "resize()",
            r"resize\(\): .*missing 1 required positional argument: 'size'; expected something like resize",
        ),
        ("resize(16, 1, 2)", "takes from 2 to 3 positional arguments but 4 were given"),
        ("resize(16", r"'resize\(16' lacks a bracket"),
        ("resize_float((16, 8))", r"resize_float\(\(16, 8\)\): .*; expected something like resize\(224\)"),
        ("central_crop(2000)", "put a resize before it"),
        ("center_crop(2000)", "put a resize before it"),
        ("resize_pillow(24, 'box')", "does not support the filter 'box'; expected one of bilinear, bicubic, lanczos"),
        ("resize(16)|value_range(-1, 1)", "scales the pixel values, but evaluation scales them itself; remove the op"),
        ("VIT_JAX_EVAL(16)", "scales the pixel values"),
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
def test_shape_of_ops_equals_the_shape_of_every_image(ops, shape):
    assert shape_of(ops) == shape == preprocess(np.zeros((1000, 1500, 3), np.uint8), ops).shape


def test_corrections_are_listed_only_for_ops_in_use():
    assert preprocessing.corrections("decode|resize(256)|central_crop(224)|resize_tf1(30)") == {}
    assert preprocessing.corrections("resize_small(256)|central_crop(224)") == {"resize_small": 1}
    assert preprocessing.corrections("resize(24, antialias=False)") == {}
    assert preprocessing.corrections("resize(24, antialias=True)") == {"antialiased resize": 1}
