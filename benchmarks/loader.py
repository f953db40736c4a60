"""From tar shards to batches of 224-pixel crops: images per CPU-second of this loader and of others.

    python benchmarks/loader.py --shards FOLDER [--python OTHER/bin/python] [--rounds 5] [--images 1500]

Every contender runs by itself, with two decoding processes or threads unless its name says otherwise, in turn
and `--rounds` times; CPU-seconds are those of its process and their children after a warm-up of one pass.
`--python` names an interpreter that has what this one lacks (tensorflow, DALI, torchvision); a contender that
cannot run is left out, by name.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SIZE = 224  # pixels of a crop
BATCH = 32
PROCESSES = 2  # that decode


def ours(shards: list[str], folder: str, processes: int = PROCESSES, restarts: bool = False) -> Iterator:
    from data.loader import TrainLoader
    from data.order import Order
    from data.shards.index import load_index
    from data.shards.indexing import build_index
    from data.shards.packing import pack
    from data.shards.sources import tars

    if restarts and not Path(folder, "fast.index.json").exists():
        pack(tars(shards), folder, name="fast", shard_samples=100, classes=1000, restarts=True)
    if restarts:
        index = load_index(Path(folder, "fast.index.json"))
    else:
        index = build_index(shards, output=folder, name="plain", classes=1000)
    order = Order(index.shard_samples, seed=0, batch_size=BATCH)
    loader = TrainLoader(index, order, image_size=SIZE, slots=range(BATCH), micro_batch=BATCH, processes=processes)
    return (batch.images for batch in loader)


def fallback(shards: list[str], folder: str) -> Iterator:
    import os

    os.environ["PATCHLINE_JPEG"] = "opencv"
    return ours(shards, folder)


def webdataset_with(decode, shards: list[str], processes: int = PROCESSES) -> Iterator:
    """The usual pipeline: sequential tars, a shuffle buffer, decode in Python, stack."""
    import numpy as np
    import torch
    import webdataset

    from data.images.augment import AugmentConfig, Draws, inception_box

    cfg = AugmentConfig()
    draws = Draws(0)

    def load(sample):
        return decode(sample["jpg"], lambda h, w: inception_box(h, w, draws, cfg), draws.uniform() < 0.5), int(
            sample["cls"]
        )

    def stack(rows):
        images = [image for image, _ in rows]
        return torch.stack(images) if torch.is_tensor(images[0]) else torch.from_numpy(np.stack(images))

    samples = webdataset.WebDataset(shards, shardshuffle=False, resampled=True, nodesplitter=None)
    samples = samples.shuffle(100).map(load).batched(BATCH, collation_fn=stack)
    return iter(webdataset.WebLoader(samples, batch_size=None, num_workers=processes) if processes else samples)


def with_pillow(data, box, flip):
    """Crop and resize in one call, which reads only what it needs of the decoded image."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    y, x, h, w = box(image.height, image.width)
    image = image.resize((SIZE, SIZE), Image.BILINEAR, (x, y, x + w, y + h))
    return np.asarray(image.transpose(Image.FLIP_LEFT_RIGHT) if flip else image)


def random_pillow(data, number: int):
    """The same with everything drawn from a number."""
    from data.images.augment import AugmentConfig, Draws, inception_box

    draws = Draws(number)
    return with_pillow(data, lambda h, w: inception_box(h, w, draws, AugmentConfig()), draws.uniform() < 0.5)


def pillow(shards: list[str], folder: str, processes: int = PROCESSES) -> Iterator:
    return webdataset_with(with_pillow, shards, processes)


def usual(shards: list[str], folder: str) -> Iterator:
    """What webdataset's documentation shows: its own Pillow decoder, torchvision's transforms, a loader."""
    import webdataset
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE, (0.05, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    samples = webdataset.WebDataset(shards, shardshuffle=False, resampled=True, nodesplitter=None).shuffle(100)
    samples = samples.decode("pil").to_tuple("jpg", "cls").map_tuple(v2.Compose(steps)).batched(BATCH)
    return iter(webdataset.WebLoader(samples, batch_size=None, num_workers=PROCESSES))


def opencv(shards: list[str], folder: str) -> Iterator:
    import cv2
    import numpy as np

    cv2.setNumThreads(1)

    def decode(data, box, flip):
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        y, x, h, w = box(*image.shape[:2])
        image = cv2.resize(image[y : y + h, x : x + w], (SIZE, SIZE))
        return cv2.flip(image, 1) if flip else image

    return webdataset_with(decode, shards)


def torchvision(shards: list[str], folder: str) -> Iterator:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resized_crop

    torch.set_num_threads(1)

    def decode(data, box, flip):
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        y, x, h, w = box(*image.shape[1:])
        image = resized_crop(image, y, x, h, w, [SIZE, SIZE], antialias=False)
        return image.flip(2) if flip else image

    return webdataset_with(decode, shards)


def tfdata(shards: list[str], folder: str) -> Iterator:
    """big_vision's: crop inside the decoder, no antialias."""
    import tensorflow as tf
    import webdataset

    def jpegs():
        for sample in webdataset.WebDataset(shards, shardshuffle=False, resampled=True, nodesplitter=None):
            yield sample["jpg"]

    def load(data):
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data), tf.zeros([0, 0, 4]), 0, area_range=(0.05, 1.0),
            min_object_covered=0.0, use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        window = tf.concat([begin[:2], size[:2]], 0)
        image = tf.image.resize(tf.image.decode_and_crop_jpeg(data, window, channels=3), [SIZE, SIZE])
        return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)

    samples = tf.data.Dataset.from_generator(jpegs, output_signature=tf.TensorSpec([], tf.string))
    return iter(samples.shuffle(100).map(load, PROCESSES).batch(BATCH).prefetch(1).as_numpy_iterator())


def dali(shards: list[str], folder: str) -> Iterator:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=PROCESSES, device_id=None)
    def pipeline():
        jpeg = fn.readers.webdataset(paths=shards, ext=["jpg"], random_shuffle=True)
        image = fn.decoders.image_random_crop(jpeg, random_area=(0.05, 1.0), random_aspect_ratio=(0.75, 1.33))
        image = fn.resize(image, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=False)
        return fn.flip(image, horizontal=fn.random.coin_flip())

    made = pipeline()
    made.build()
    while True:
        yield made.run()


def jpegs(shards: list[str]) -> list[bytes]:
    from data.shards.sources import tars

    return [sample.read() for sample in tars(shards)]


def grain(shards: list[str], folder: str) -> Iterator:
    """From memory: grain reads ArrayRecord or what one gives it, but no tars."""
    from absl import flags
    from grain import python as pygrain

    flags.FLAGS(["loader"])  # its processes refuse to start before
    samples = pygrain.MapDataset.source(jpegs(shards)).seed(0).shuffle().repeat()
    samples = samples.random_map(lambda data, rng: random_pillow(data, int(rng.integers(2**60)))).batch(BATCH)
    return iter(samples.to_iter_dataset().mp_prefetch(pygrain.MultiprocessingOptions(num_workers=PROCESSES)))


def streaming(shards: list[str], folder: str) -> Iterator:
    import random

    import torch
    from streaming import MDSWriter, StreamingDataset

    class Crops(StreamingDataset):
        def __getitem__(self, at):
            return random_pillow(super().__getitem__(at)["jpg"], random.getrandbits(60)).copy()

    place = tempfile.mkdtemp(dir=folder)
    with MDSWriter(out=place, columns={"jpg": "bytes"}) as writer:
        for data in jpegs(shards):
            writer.write({"jpg": data})
    samples = Crops(local=place, shuffle=True, batch_size=BATCH, epoch_size=1 << 17)
    return iter(torch.utils.data.DataLoader(samples, BATCH, num_workers=PROCESSES))


def energon(shards: list[str], folder: str) -> Iterator:
    import random
    import shutil

    import numpy as np
    import torch
    from megatron import energon
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    @energon.stateless
    def cook(sample):
        return energon.ImageSample(**energon.basic_sample_keys(sample), image=sample["jpg"])

    class Crops(energon.DefaultTaskEncoder):
        decoder = None

        def encode_sample(self, sample):
            return random_pillow(sample.image, random.getrandbits(60))

        def batch(self, samples):
            return torch.from_numpy(np.stack(samples))

        cookers = (energon.Cooker(cook),)

    place = Path(tempfile.mkdtemp(dir=folder))
    names = [Path(shutil.copy(shard, place)).name for shard in shards]
    WebdatasetPreparator.prepare_dataset(place, names, split_parts_ratio=[("train", 1.0)], workers=1)
    (place / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {}\n"
    )
    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=PROCESSES)
    options = {"batch_size": BATCH, "shuffle_buffer_size": 100, "max_samples_per_sequence": 100}
    samples = energon.get_train_dataset(place, worker_config=workers, task_encoder=Crops(), **options)
    return iter(energon.get_loader(samples))


def ffcv(shards: list[str], folder: str) -> Iterator:
    """Encoded again, at quality 90 and full size, into its own file."""
    import numpy as np
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Photos:
        def __init__(self):
            self.jpegs = jpegs(shards)

        def __len__(self):
            return len(self.jpegs)

        def __getitem__(self, at):
            return (np.asarray(Image.open(io.BytesIO(self.jpegs[at])).convert("RGB")),)

    path = Path(folder, "ffcv.beton")
    if not path.exists():
        DatasetWriter(str(path), {"image": RGBImageField("jpg", jpeg_quality=90)}, num_workers=1).from_indexed_dataset(
            Photos()
        )
    steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE), scale=(0.05, 1)), RandomHorizontalFlip(), ToTensor()]
    loader = Loader(str(path), BATCH, PROCESSES, True, OrderOption.RANDOM, pipelines={"image": steps}, drop_last=True)
    while True:
        yield from loader


CONTENDERS = {
    "webdataset + Pillow": pillow,
    "webdataset + Pillow + torchvision": usual,
    "patchline": ours,
    "patchline, in the loop's process": lambda shards, folder: ours(shards, folder, processes=0),
    "webdataset + Pillow, likewise": lambda shards, folder: pillow(shards, folder, processes=0),
    "patchline, restart markers": lambda shards, folder: ours(shards, folder, restarts=True),
    "patchline, without the binding": fallback,
    "webdataset + OpenCV": opencv,
    "webdataset + torchvision.io": torchvision,
    "tf.data, decode and crop": tfdata,
    "DALI on the CPU": dali,
    "grain + Pillow": grain,
    "MosaicML Streaming + Pillow": streaming,
    "Megatron Energon + Pillow": energon,
    "FFCV, encoded again": ffcv,
}

HERE = ("webdataset + Pillow", "webdataset + Pillow, likewise", "webdataset + OpenCV")  # need no other Python


def tree_cpu_s() -> float:
    """CPU-seconds of this process and its living children."""
    import psutil

    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [here, *here.children(recursive=True)])


def measure(name: str, shards: list[str], folder: str, images: int) -> dict[str, float]:
    batches = CONTENDERS[name](shards, folder)
    for _ in range(300 // BATCH):
        next(batches)
    cpu = tree_cpu_s()
    wall = time.perf_counter()
    for _ in range(images // BATCH):
        next(batches)
    images = images // BATCH * BATCH
    return {"per_cpu_s": images / (tree_cpu_s() - cpu), "per_s": images / (time.perf_counter() - wall)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shards = sorted(str(path) for path in Path(args.shards).glob("imagenet*.tar"))
    if args.one:
        print(json.dumps(measure(args.one, shards, args.folder, args.images)))
        return
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name in CONTENDERS:
                mine = name.startswith("patchline") or name in HERE
                command = [
                    sys.executable if mine else args.python,
                    __file__,
                    "--one",
                    name,
                    "--folder",
                    folder,
                ]
                command += ["--shards", args.shards, "--images", str(args.images)]
                done = subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **_env()})
                if done.returncode:
                    print(f"left out: {name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                else:
                    results.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
    base = statistics.median(run["per_cpu_s"] for run in results["webdataset + Pillow"])
    for name, runs in sorted(results.items(), key=lambda item: -statistics.median(r["per_cpu_s"] for r in item[1])):
        rates = [run["per_cpu_s"] for run in runs]
        middle = statistics.median(rates)
        spread = f"({min(rates):.0f} … {max(rates):.0f})"
        print(f"{name:34} × {middle / base:.2f}   {middle:6.0f} img per CPU-second {spread}")


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


if __name__ == "__main__":
    main()
