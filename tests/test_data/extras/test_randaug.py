"""RandAugment: every operation matches the original's NumPy reimplementation here, on a real photograph."""

import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from data.draws import Draws
from data.errors import ConfigError
from data.extras.randaug import OPERATIONS, distort, randaug
from data.images.augment import AugmentConfig
from data.index.document import load_index
from data.loader import TrainLoader
from data.order import Order

pytestmark = pytest.mark.quick

IMAGES = Path(__file__).parents[3].parent / "shared" / "images"
SIDE = 96


class Certain(Draws):
    """A generator of fixed draws: positive amounts, and always the same place."""

    def uniform(self) -> float:
        return 0.3


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    if not IMAGES.is_dir():
        pytest.skip("the real photographs are not beside this checkout")
    with tarfile.open(IMAGES / "imagenet1k-000000.tar") as tar:
        encoded = next(tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg"))  # type: ignore[union-attr]
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def apply(name: str, image: np.ndarray, magnitude: float) -> np.ndarray:
    return np.asarray(distort(name, Image.fromarray(image), magnitude / 10, Certain(0)))


def blend(image: np.ndarray, other: np.ndarray, factor: float) -> np.ndarray:
    mixed = image.astype(np.float32) + np.float32(factor) * (other.astype(np.float32) - image)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def grey(image: np.ndarray) -> np.ndarray:
    return (image @ np.array([0.2989, 0.587, 0.114])).astype(np.uint8)[..., None].repeat(3, 2)


def smooth(image: np.ndarray) -> np.ndarray:
    padded = image.astype(np.float32)
    total = sum(padded[y : y + SIDE - 2, x : x + SIDE - 2] for y in range(3) for x in range(3))
    result = image.copy()
    result[1:-1, 1:-1] = (total + 4 * padded[1:-1, 1:-1]) / 13
    return result


def stretched(image: np.ndarray) -> np.ndarray:
    low = image.min((0, 1)).astype(float)
    high = image.max((0, 1)).astype(float)
    return np.clip(image * (255 / (high - low)) - low * (255 / (high - low)), 0, 255).astype(np.uint8)


def equalized(image: np.ndarray) -> np.ndarray:
    result = np.empty_like(image)
    for channel in range(3):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        table = np.concatenate([[0], ((counts.cumsum() + step // 2) // step)[:-1]]).clip(0, 255)
        result[..., channel] = table[image[..., channel]]
    return result


def moved(image: np.ndarray, x_of, y_of) -> np.ndarray:
    """Transform an image by nearest-neighbour sampling at source coordinates; pixels from outside become 128."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(float)
    from_x = np.round(x_of(x, y)).astype(int)
    from_y = np.round(y_of(x, y)).astype(int)
    inside = (from_x >= 0) & (from_x < SIDE) & (from_y >= 0) & (from_y < SIDE)
    nearest = image[from_y.clip(0, SIDE - 1), from_x.clip(0, SIDE - 1)]
    return np.where(inside[..., None], nearest, 128).astype(np.uint8)


def turned(image: np.ndarray, degrees: float) -> np.ndarray:
    cos = np.cos(np.radians(degrees))
    sin = np.sin(np.radians(degrees))
    middle = (SIDE - 1) / 2
    return moved(
        image,
        lambda x, y: cos * (x - middle) - sin * (y - middle) + middle,
        lambda x, y: sin * (x - middle) + cos * (y - middle) + middle,
    )


def holed(image: np.ndarray, pad: int) -> np.ndarray:
    at = int(0.3 * SIDE)
    result = image.copy()
    result[max(at - pad, 0) : at + pad, max(at - pad, 0) : at + pad] = 128
    return result


def added(image: np.ndarray, amount: int) -> np.ndarray:
    return np.where(image < 128, np.minimum(image.astype(int) + amount, 255), image).astype(np.uint8)


def shift(level: float) -> int:
    """Return a shift of 0 to 7 bits, the limits of TensorFlow's shifts."""
    return min(max(8 - int(4 * level), 0), 7)


EXACT = {  # name: the original, from image and level = magnitude / 10
    "AutoContrast": lambda im, level: stretched(im),
    "Equalize": lambda im, level: equalized(im),
    "Invert": lambda im, level: 255 - im,
    "Posterize": lambda im, level: im >> shift(level) << shift(level),
    "Solarize": lambda im, level: np.where(im < int(256 * level), im, 255 - im),
    "SolarizeAdd": lambda im, level: added(im, int(110 * level)),
    "Brightness": lambda im, level: blend(0 * im, im, 1.8 * level + 0.1),
    "Cutout": lambda im, level: holed(im, int(40 * level)),
}
WITHIN = {  # Pillow rounds grey and smoothed values where TensorFlow truncates: a level off, before blending
    "Color": lambda im, level: blend(grey(im), im, 1.8 * level + 0.1),
    "Contrast": lambda im, level: blend(0 * im + int(grey(im).mean()), im, 1.8 * level + 0.1),
    "Sharpness": lambda im, level: blend(smooth(im), im, 1.8 * level + 0.1),
}
MOVED = {
    "Rotate": lambda im, level: turned(im, 30 * level),
    "ShearX": lambda im, level: moved(im, lambda x, y: x + 0.3 * level * y, lambda x, y: y),
    "ShearY": lambda im, level: moved(im, lambda x, y: x, lambda x, y: y + 0.3 * level * x),
    "TranslateX": lambda im, level: moved(im, lambda x, y: x + 100 * level, lambda x, y: y),
    "TranslateY": lambda im, level: moved(im, lambda x, y: x, lambda x, y: y + 100 * level),
}


@pytest.mark.parametrize("magnitude", [0, 5, 13, 20])
@pytest.mark.parametrize("name", EXACT)
def test_an_operation_on_levels_is_the_originals_exactly(photo, name, magnitude):
    np.testing.assert_array_equal(apply(name, photo, magnitude), EXACT[name](photo, magnitude / 10))


@pytest.mark.parametrize("magnitude", [0, 5, 13])
@pytest.mark.parametrize("name", WITHIN)
def test_a_blend_is_the_originals_within_the_rounding(photo, name, magnitude):
    factor = 1.8 * magnitude / 10 + 0.1
    off = np.abs(apply(name, photo, magnitude).astype(int) - WITHIN[name](photo, magnitude / 10))
    assert off.max() <= 1 + abs(1 - factor)
    assert factor > 1 or off.mean() < 1


@pytest.mark.parametrize("magnitude", [3, 8.7])
@pytest.mark.parametrize("name", MOVED)
def test_a_move_takes_the_originals_pixels_and_fills_with_128(photo, name, magnitude):
    moved_photo = apply(name, photo, magnitude)
    expected = MOVED[name](photo, magnitude / 10)
    assert (moved_photo != expected).any(2).mean() < 0.005, "but for ties of the nearest pixel"
    assert (expected == 128).all(2).any()
    assert not np.array_equal(expected, photo)


def test_all_sixteen_operations_are_drawn_equally_often(photo):
    assert len(OPERATIONS) == 16
    assert set(OPERATIONS) == EXACT.keys() | WITHIN.keys() | MOVED.keys()
    seen = np.bincount([Draws(key).below(16) for key in range(3200)], minlength=16)
    assert seen.min() > 140


def test_magnitude_0_is_no_no_op(photo):
    outcomes = {randaug(photo, 1, 0, Draws(key)).tobytes() for key in range(200)}
    assert len(outcomes) > 5
    assert set(np.unique(apply("Posterize", photo, 0))) == {0, 128}
    np.testing.assert_array_equal(apply("Solarize", photo, 0), 255 - photo)


def test_equal_draws_give_equal_pixels_and_do_not_change_the_image(photo):
    before = photo.copy()
    first, second = (randaug(photo, 2, 15, Draws(7)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(photo, before)
    assert len({randaug(photo, 2, 15, Draws(key)).tobytes() for key in range(50)}) > 30


@pytest.mark.parametrize("name", ["TranslateX", "TranslateY", "Cutout"])
def test_relative_sizes_are_the_originals_of_an_image_of_224(photo, name):
    """An image of 96 is moved by 96/224 of the pixels, and the whole of an image of 224 by all of them."""
    level = 0.75 * SIDE / 224
    expected = {**EXACT, **MOVED}[name](photo, level)
    scaled = np.asarray(distort(name, Image.fromarray(photo), 0.75, Certain(0), scale=SIDE / 224))
    assert (scaled != expected).any(2).mean() < 0.005, "but for ties of the nearest pixel"
    assert not np.array_equal(scaled, apply(name, photo, 7.5))


def test_relative_operations_change_nothing_at_224_and_keep_small_images(photo):
    large = cv2.resize(photo, (224, 224))
    small = cv2.resize(photo, (32, 32))
    empty = {False: 0, True: 0}
    for key in range(300):
        np.testing.assert_array_equal(
            randaug(large, 2, 15, Draws(key)), randaug(large, 2, 15, Draws(key), relative=True)
        )
        for relative in empty:
            picture = randaug(small, 1, 10, Draws(key), relative)
            empty[relative] += len(np.unique(picture)) == 1
    assert empty[False] > 20, "two of sixteen operations shift everything out"
    assert empty[True] == 0


def test_loader_pixels_do_not_depend_on_the_decoding_process(shards):
    index = load_index(shards / "train")
    order = Order(index.shard_samples, seed=1, batch_size=32)

    def batch(processes: int, micro_batch: int, **augment):
        loader = TrainLoader(
            index, order, image_size=16, slots=range(32), micro_batch=micro_batch, seed=1, processes=processes,
            augment=AugmentConfig(**augment),
        )  # fmt: skip
        batches = iter(loader)
        images = np.concatenate([next(batches).images.numpy().copy() for _ in range(32 // micro_batch)])
        batches.close()
        return images

    distorted = batch(0, 32, randaug_layers=2)
    np.testing.assert_array_equal(distorted, batch(2, 8, randaug_layers=2))
    assert (distorted != batch(0, 32)).any((1, 2, 3)).mean() > 0.9
    relative = batch(0, 32, randaug_layers=2, randaug_relative=True)
    assert (distorted != relative).any((1, 2, 3)).mean() > 0.1, "shifts and cut-outs, 3 of 16 operations"


@pytest.mark.parametrize("options", [{"randaug_layers": -1}, {"randaug_magnitude": 31.0}])
def test_option_out_of_range_is_refused(options):
    with pytest.raises(ConfigError, match=f"augment.{next(iter(options))} is .*, expected"):
        AugmentConfig(**options)
