"""Pages are self-contained and escape untrusted names."""

from base64 import b64decode

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure

from data.extras.pages.page import COLOURS, INK, THUMBNAIL, jpeg, jpeg_bytes, shown, svg

pytestmark = pytest.mark.quick


def test_chart_uses_page_colours_and_is_deterministic():
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([1, 2, 3], color=INK)
    first = svg(figure, 'loss <of> "a"')
    assert first.startswith('<svg role="img" aria-label="loss &lt;of&gt; &#34;a&#34;" ')
    assert COLOURS[INK] in first
    assert not [colour for colour in COLOURS if colour in first]
    assert svg(figure, 'loss <of> "a"') == first


@pytest.mark.parametrize(
    ("sides", "expected"),
    [((300, 150), (112, 56)), ((2, 2000), (1, 112)), ((2000, 2), (112, 1)), ((50, 40), (112, 89))],
)
def test_thumbnail_keeps_its_aspect_ratio_and_at_least_one_pixel_a_side(sides, expected):
    pixels = cv2.imdecode(np.frombuffer(jpeg_bytes(np.full((*sides, 3), 90, np.uint8)), np.uint8), cv2.IMREAD_COLOR)
    assert pixels.shape[:2] == expected
    assert max(pixels.shape) <= THUMBNAIL


def test_colour_channels_keep_their_order():
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = 255
    decoded = cv2.imdecode(np.frombuffer(b64decode(jpeg(red)), np.uint8), cv2.IMREAD_COLOR)  # BGR
    blue, green, red_mean = decoded.mean((0, 1))
    assert red_mean > 240
    assert max(blue, green) < 20


def test_values_are_escaped():
    assert shown("a\u202e\x1b") == "a\\u202e\\x1b"
    assert shown(3) == 3
