"""Compare ways to decode a JPEG crop to 224 × 224 pixels, in images per CPU-second, with each other and with limits.

    python benchmarks/decode.py --shards FOLDER [--python OTHER/bin/python] [--rounds 7]

1. The boxes are drawn before the timing, by the sampler of training. All decoders get the same photographs and boxes,
   with new boxes in each round. Reading shards, shuffling and batching are not included (see loader.py).
2. The decoders run in turn, in an order that rotates between rounds. A decoder whose library is missing here runs in a
   process of the interpreter `--python`; if it is missing there too, the decoder is skipped and named.
3. The table shows medians, and the median of the per-round ratios to the base.

Rows that begin with "limit" are not decoders. "Huffman codes" is the time in which libjpeg-turbo reads the necessary
codes for the crop: all codes down to its last row or, with restart markers, those of the intervals that contain it.
"libraries" is only the crop by libjpeg-turbo and the resize by OpenCV, without our header parsing, drawing and flip.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.draws import Draws
from data.extras.shards.packing import add_restarts
from data.extras.sources.tars import tars
from data.images.augment import AugmentConfig, fit, inception_box
from data.images.decode import Box, decode_crop, decode_region, read_header, reduced_box, reduction

SIZE = 224  # pixels
OUT = np.empty((SIZE, SIZE, 3), np.uint8)
BASE = "TensorFlow, decode and crop, resize"


class Crop(NamedTuple):
    """Input of a decoder: a file, the crop box, and the scale and region to request from libjpeg."""

    data: bytes
    box: Box
    denominator: int
    region: Box


RegionOf = Callable[[bytes, Box], tuple[int, Box]]
Way = Callable[[list[Crop]], None]


def read_photos(shards: list[str], marked: bool) -> list[bytes]:
    """Read the photographs from some tars; add restart markers if `marked` is True."""
    photos = [sample.read() for sample in tars(shards)]
    return [add_restarts(photo) or photo for photo in photos] if marked else photos


def crops_of(photos: list[bytes], turn: int, region_of: RegionOf) -> list[Crop]:
    """Draw a training crop for each photograph; the crops differ between turns."""
    crops = []
    for number, photo in enumerate(photos):
        header = read_header(photo)
        box = inception_box(header.height, header.width, Draws(turn * len(photos) + number), AugmentConfig())
        crops.append(Crop(photo, box, *region_of(photo, box)))
    return crops


# ----------------------------------------------------------------------------- regions to request from libjpeg


def region_of_crop(data: bytes, box: Box) -> tuple[int, Box]:
    """Return the scale and region that `decode_crop` requests."""
    denominator = reduction(min(box.height, box.width), SIZE)
    return denominator, box if denominator == 1 else reduced_box(box, read_header(data), denominator)


def last_pixel(data: bytes, box: Box) -> tuple[int, Box]:
    """Return a pixel in the crop's last row: for a file without restart markers, all codes above must be read."""
    return 1, Box(box.y + box.height - 1, box.x, 1, 1)


def codes_of_runs(data: bytes, box: Box) -> tuple[int, Box]:
    """Return the crop at 1/8 scale, at which libjpeg computes one pixel per block, so that almost only the codes cost.

    The region is in the same restart intervals as the crop.
    """
    y, height = eighths(box.y, box.height)
    x, width = eighths(box.x, box.width)
    return 8, Box(y, x, height, width)


def eighths(start: int, length: int) -> tuple[int, int]:
    """Return a span's start and length at 1/8 scale, without reading pixels that the span does not need."""
    # libjpeg also reads one pixel around a region: from `start` − 1 at full scale, and an 8 × 8 block at 1/8 scale.
    first = -(-(start - 1) // 8) + 1
    stop = (start + length + 1) // 8 - 1
    return first, max(stop - first, 1)


# ----------------------------------------------------------------------------- decoders


def each(decode: Callable[[Crop], None]) -> Way:
    """Return a decoder that processes the crops one after another."""

    def run(crops: list[Crop]) -> None:
        for crop in crops:
            decode(crop)

    return run


def region_alone(crop: Crop) -> None:
    decode_region(crop.data, crop.denominator, crop.region)


def libraries(crop: Crop) -> None:
    pixels = decode_region(crop.data, crop.denominator, crop.region)
    cv2.resize(pixels, (SIZE, SIZE), dst=OUT)


def ours(crop: Crop) -> None:
    fit(decode_crop(crop.data, read_header(crop.data), crop.box, SIZE), False, OUT)


def ours_full_scale(crop: Crop) -> None:
    fit(decode_crop(crop.data, read_header(crop.data), crop.box, 0), False, OUT)


def opencv(crop: Crop) -> None:
    image = cv2.imdecode(np.frombuffer(crop.data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    y, x, h, w = crop.box
    cv2.resize(image[y : y + h, x : x + w], (SIZE, SIZE), dst=OUT)


def pillow(crop: Crop) -> None:
    image = Image.open(io.BytesIO(crop.data)).convert("RGB")
    y, x, h, w = crop.box
    OUT[:] = np.asarray(image.resize((SIZE, SIZE), Image.BILINEAR, (x, y, x + w, y + h)))


def torchvision(crop: Crop) -> None:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resized_crop

    image = decode_jpeg(torch.frombuffer(bytearray(crop.data), dtype=torch.uint8), ImageReadMode.RGB)
    y, x, h, w = crop.box
    resized_crop(image, y, x, h, w, [SIZE, SIZE], antialias=False)


def tensorflow(crops: list[Crop]) -> None:
    """Decode like big_vision, in a graph, with 10 calls from Python in total."""
    data, boxes, samples = tensorflow_graph(len(crops))
    data.assign([crop.data for crop in crops])
    boxes.assign([crop.box for crop in crops])
    for _ in samples:
        pass


@cache
def tensorflow_graph(count: int):
    """Return variables for `count` files and boxes, and a dataset that decodes them when iterated; traced once."""
    import tensorflow as tf

    data = tf.Variable([b""] * count)
    boxes = tf.Variable(np.zeros((count, 4), np.int32))
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.experimental_optimization.inject_prefetch = False

    def load(number):
        image = tf.image.decode_and_crop_jpeg(data[number], boxes[number], channels=3)
        image = tf.cast(tf.clip_by_value(tf.image.resize(image, [SIZE, SIZE]), 0, 255), tf.uint8)
        # The other decoders do not copy the pixels into a batch, so this one does not either.
        return image[-1, -1]

    samples = tf.data.Dataset.range(count).map(load).batch(-(-count // 10)).with_options(options)
    return data, boxes, samples


class Decoder(NamedTuple):
    """A decoder and its requirements."""

    way: Way
    needs: str = "cv2"
    marked: bool = False  # whether it needs photographs with restart markers
    region_of: RegionOf = region_of_crop


DECODERS = {
    "limit: Huffman codes, restart markers": Decoder(each(region_alone), marked=True, region_of=codes_of_runs),
    "limit: Huffman codes, plain files": Decoder(each(region_alone), region_of=last_pixel),
    "limit: libraries, restart markers": Decoder(each(libraries), marked=True),
    "limit: libraries, plain files": Decoder(each(libraries)),
    "ours, restart markers": Decoder(each(ours), marked=True),
    "ours, plain files": Decoder(each(ours)),
    "ours, plain files, full scale": Decoder(each(ours_full_scale)),
    BASE: Decoder(tensorflow, "tensorflow"),
    "OpenCV, whole image": Decoder(each(opencv)),
    "torchvision, whole image": Decoder(each(torchvision), "torchvision"),
    "Pillow, whole image": Decoder(each(pillow)),
}


# ----------------------------------------------------------------------------- one interpreter


def serve(shards: list[str]) -> None:
    """For each input line `[name, turn]`, print the CPU-seconds per image; null if a library fails."""
    cv2.setNumThreads(1)
    photos = cache(lambda marked: read_photos(shards, marked))
    for line in sys.stdin:
        name, turn = json.loads(line)
        decoder = DECODERS[name]
        try:
            crops = crops_of(photos(decoder.marked), turn, decoder.region_of)
            start = time.process_time()
            decoder.way(crops)
            answer = (time.process_time() - start) / len(crops)
        except (ImportError, OSError, RuntimeError) as error:  # an installed library may fail to load
            print(f"skipped {name}: {error}", file=sys.stderr)
            answer = None
        print(json.dumps(answer), flush=True)


class Interpreter:
    """A process of some Python interpreter that runs decoders, one at a time."""

    def __init__(self, python: str, shards: str):
        # Turn off threads of libraries and TensorFlow's startup messages.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        command = [python, __file__, "--shards", shards, "--serve"]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def cpu_s(self, name: str, turn: int) -> float | None:
        """Return a decoder's CPU-seconds per image; raises ValueError if the process has exited."""
        assert self.child.stdin is not None and self.child.stdout is not None, "both are pipes"
        print(json.dumps([name, turn]), file=self.child.stdin, flush=True)
        return json.loads(self.child.stdout.readline())

    def end(self) -> None:
        """End the process."""
        assert self.child.stdin is not None, "it is a pipe"
        self.child.stdin.close()
        self.child.wait()


def python_of(needs: str, other: str) -> str | None:
    """Return the Python interpreter that has a module: this one, the other one, or None."""
    if importlib.util.find_spec(needs) is not None:
        return sys.executable
    has = subprocess.run([other, "-c", f"import importlib.util as u; exit(u.find_spec({needs!r}) is None)"])
    return other if has.returncode == 0 else None


# ----------------------------------------------------------------------------- rounds


def run_rounds(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU-seconds per image of each decoder in each round."""
    interpreters: dict[str, Interpreter] = {}
    runs_in: dict[str, Interpreter] = {}
    for name, decoder in DECODERS.items():
        python = python_of(decoder.needs, args.python)
        if python is None:
            print(f"skipped {name}: needs {decoder.needs}; pass --python with this module", file=sys.stderr)
            continue
        if python not in interpreters:
            interpreters[python] = Interpreter(python, args.shards)
        runs_in[name] = interpreters[python]

    seconds: dict[str, list[float]] = {}
    # The first round is a warm-up, with imports, compilation and tracing.
    for turn in range(args.rounds + 1):
        names = list(runs_in)
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            needed = runs_in[name].cpu_s(name, turn)
            if needed is None:
                del runs_in[name]
            elif turn > 0:
                seconds.setdefault(name, []).append(needed)
    for interpreter in interpreters.values():
        interpreter.end()
    return seconds


def print_table(seconds: dict[str, list[float]]) -> None:
    """Print the medians, fastest first, as rows of a Markdown table."""
    base = BASE if BASE in seconds else "Pillow, whole image"
    print(f"| | µs an image (least … most) | speed × {base} |\n|---|--:|--:|")
    for name, mine in sorted(seconds.items(), key=lambda item: statistics.median(item[1])):
        # Other load on the machine varies between rounds, but less within a round.
        ratios = [base_now / mine_now for mine_now, base_now in zip(mine, seconds[base], strict=True)]
        middle = f"{1e6 * statistics.median(mine):,.0f} ({1e6 * min(mine):,.0f} … {1e6 * max(mine):,.0f})"
        print(f"| {name} | {middle} | {statistics.median(ratios):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="folder of imagenet*.tar")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the modules missing in this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(sorted(str(path) for path in Path(args.shards).glob("imagenet*.tar")))
    else:
        print_table(run_rounds(args))


if __name__ == "__main__":
    main()
