"""From JPEG bytes to a 224-pixel crop: images per CPU-second of ways to decode, interleaved in one process.

    python benchmarks/decode.py --shards FOLDER [--rounds 7]

Every way gets the same photographs and the same inception crops; what is not installed is left out. `floor`
reads only the Huffman codes of whole images, as a decoder without restart markers must down to the crop's
end.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.images import jpeg
from data.images.augment import AugmentConfig, Draws, augment, inception_box
from data.shards.sources import tars

SIZE = 224  # pixels
CONFIG = AugmentConfig()
OUT = np.empty((SIZE, SIZE, 3), np.uint8)


def patchline(data: bytes, number: int) -> None:
    augment(data, SIZE, Draws(number), CONFIG, OUT)


def full_scale(data: bytes, number: int) -> None:
    augment(data, SIZE, Draws(number), AugmentConfig(reduced=False), OUT)


def opencv(data: bytes, number: int) -> None:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    y, x, h, w = inception_box(*image.shape[:2], Draws(number), CONFIG)
    cv2.resize(image[y : y + h, x : x + w], (SIZE, SIZE), dst=OUT)


def pillow(data: bytes, number: int) -> None:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    y, x, h, w = inception_box(image.height, image.width, Draws(number), CONFIG)
    OUT[:] = np.asarray(image.resize((SIZE, SIZE), Image.BILINEAR, (x, y, x + w, y + h)))


def simple(data: bytes, number: int) -> None:
    import simplejpeg

    image = simplejpeg.decode_jpeg(data)
    y, x, h, w = inception_box(*image.shape[:2], Draws(number), CONFIG)
    cv2.resize(image[y : y + h, x : x + w], (SIZE, SIZE), dst=OUT)


def floor(data: bytes, number: int) -> None:
    from data.images.decode import read_header

    header = read_header(data)
    jpeg.decode_region(data, 8, (-(-header.height // 8) - 1, 0, 1, 1))


WAYS: dict[str, Callable[[bytes, int], None]] = {
    "floor: Huffman codes alone": floor,
    "patchline": patchline,
    "patchline, full scale": full_scale,
    "patchline, restart markers": patchline,
    "OpenCV": opencv,
    "simplejpeg + OpenCV": simple,
    "Pillow": pillow,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    photos = [sample.read() for sample in tars(sorted(Path(args.shards).glob("imagenet*.tar")))]
    marked = [jpeg.add_restarts(photo) for photo in photos]
    rates: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        for name, way in WAYS.items():
            start = time.process_time()
            try:
                for number, photo in enumerate(marked if "restart" in name else photos):
                    way(photo, turn * len(photos) + number)
            except ImportError:
                continue
            rates.setdefault(name, []).append(len(photos) / (time.process_time() - start))
    base = statistics.median(rates["Pillow"])
    for name, rates_of_rounds in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        middle = statistics.median(rates_of_rounds)
        spread = f"({min(rates_of_rounds):.0f} … {max(rates_of_rounds):.0f})"
        print(f"{name:28} × {middle / base:.2f}   {middle:6.0f} img per CPU-second {spread}")


if __name__ == "__main__":
    main()
