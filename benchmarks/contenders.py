"""The data loaders that loader.py compares: each yields endless batches of 224-pixel crops from tar shards.

A loader is a function of the shards and a shared folder, in which it may store converted data before the timing.
All crop in the same way: boxes follow tf.image.sample_distorted_bounding_box, drawn by our `inception_box` or by
TensorFlow itself (tests/test_data/images/test_preprocess.py compares the two), and crops are resized without
antialiasing if the library supports this. All read from the page cache, shuffle, flip and return uint8. Only DALI and
FFCV draw boxes with their own samplers.
"""

from __future__ import annotations

import io
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.draws import Draws
from data.extras.sources.tars import tars
from data.images.augment import AugmentConfig, Box, inception_box

if TYPE_CHECKING:  # other interpreters may lack these modules
    from multiprocessing.connection import Connection

    import numpy as np

    from data.index.index import Index

SIZE = 224  # pixels of a crop
BATCH = 32
MICRO_BATCHES = 32  # micro-batches of a global batch, for loaders with global batches
PROCESSES = 2  # processes or threads that decode
PLACES = 2  # batches that each process may prefetch in shared memory, as in our loader
BoxOf = Callable[[int, int], Box]


def index_of(shards: list[str], folder: str, restarts: bool) -> Index:
    """Return the index of the tars or, with `restarts`, of repacked tars whose JPEGs have restart markers."""
    from data.extras.shards.indexing import build_index
    from data.extras.shards.packing import pack
    from data.index.document import load_index

    if not restarts:
        return build_index(shards, output=folder, name="plain", classes=1000)
    if not Path(folder, "fast.index.json").exists():
        pack(tars(shards), folder, name="fast", shard_samples=100, classes=1000, restarts=True)
    return load_index(Path(folder, "fast.index.json"))


def ours(shards: list[str], folder: str, processes: int = PROCESSES, restarts: bool = False) -> Iterator:
    from data.loader import TrainLoader
    from data.order import Order

    index = index_of(shards, folder, restarts)
    # Use a global batch as large as in pretraining, because every process computes its order.
    slots = range(BATCH * MICRO_BATCHES)
    order = Order(index.shard_samples, seed=0, batch_size=len(slots))
    loader = TrainLoader(index, order, image_size=SIZE, slots=slots, micro_batch=BATCH, processes=processes)
    return (batch.images for batch in loader)


def fallback(shards: list[str], folder: str) -> Iterator:
    os.environ["PATCHLINE_JPEG"] = "opencv"
    return ours(shards, folder)


def random_box() -> BoxOf:
    """Return a function that draws a new Inception crop box for each image of (height, width)."""
    draws = Draws(random.getrandbits(60))
    return lambda height, width: inception_box(height, width, draws, AugmentConfig())


def webdataset_with(decode, shards: list[str], processes: int = PROCESSES) -> Iterator:
    """Yield batches from the usual webdataset pipeline: sequential tars, a shuffle buffer, decoding in Python."""
    import numpy as np
    import torch
    import webdataset

    box = random_box()

    def load(sample):
        return decode(sample["jpg"], box, random.random() < 0.5), int(sample["cls"])

    def stack(rows):
        images = [image for image, _ in rows]
        return torch.stack(images) if torch.is_tensor(images[0]) else torch.from_numpy(np.stack(images))

    samples = webdataset.WebDataset(shards, shardshuffle=False, resampled=True, nodesplitter=None)
    samples = samples.shuffle(100).map(load).batched(BATCH, collation_fn=stack)
    return iter(webdataset.WebLoader(samples, batch_size=None, num_workers=processes) if processes else samples)


def with_pillow(data, box, flip):
    """Crop and resize with Pillow in one call, which reads only the necessary part of the decoded image."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    y, x, h, w = box(image.height, image.width)
    image = image.resize((SIZE, SIZE), Image.BILINEAR, (x, y, x + w, y + h))
    return np.asarray(image.transpose(Image.FLIP_LEFT_RIGHT) if flip else image)


def random_pillow(data, number: int):
    """Like `with_pillow`, with box and flip drawn from a seed number."""
    draws = Draws(number)
    return with_pillow(data, lambda h, w: inception_box(h, w, draws, AugmentConfig()), draws.uniform() < 0.5)


def pillow(shards: list[str], folder: str, processes: int = PROCESSES) -> Iterator:
    return webdataset_with(with_pillow, shards, processes)


class InceptionCrop:
    """Replacement for torchvision's RandomResizedCrop, whose boxes are larger: a mean area of 0.42 instead of 0.34.

    Boxes are drawn as in all other contenders; torchvision crops and resizes.
    """

    def __init__(self) -> None:
        self.draw = random_box()

    def __call__(self, image):
        from torchvision.transforms.v2 import functional

        y, x, h, w = self.draw(image.height, image.width)
        return functional.resized_crop(image, y, x, h, w, [SIZE, SIZE], antialias=True)


def usual(shards: list[str], folder: str) -> Iterator:
    """Yield batches from webdataset's documented pipeline: its Pillow decoder, torchvision transforms, a loader."""
    import webdataset
    from torchvision.transforms import v2

    steps = [InceptionCrop(), v2.RandomHorizontalFlip(), v2.PILToTensor()]
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


def tfrecords(shards: list[str], folder: str) -> list[str]:
    """Write the samples as TFRecord files, one per tar, before the timing."""
    import tensorflow as tf

    paths = []
    for shard in shards:
        path = Path(folder, Path(shard).stem + ".tfrecord")
        paths.append(str(path))
        if path.exists():
            continue
        temporary = path.with_suffix(".tmp")
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for sample in tars([shard]):
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[sample.read()]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=sample.labels))
                features = tf.train.Features(feature={"image": image, "label": label})
                writer.write(tf.train.Example(features=features).SerializeToString())
        temporary.rename(path)
    return paths


def tfdata(shards: list[str], folder: str, threads: int = PROCESSES) -> Iterator:
    """Yield batches from big_vision's TFRecord pipeline: make_for_train, decode_jpeg_and_inception_crop|flip_lr.

    Python only receives finished batches. Its 48 threads and 100 parallel calls are both `threads` here.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    options.threading.max_intra_op_parallelism = 1
    options.experimental_optimization.inject_prefetch = False
    options.deterministic = False
    schema = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.VarLenFeature(tf.int64)}

    def load(record):
        example = tf.io.parse_single_example(record, schema)
        jpeg = example["image"]
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(jpeg), tf.zeros([0, 0, 4]), area_range=(0.05, 1.0),
            aspect_ratio_range=(0.75, 1.33), min_object_covered=0, use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        window = tf.concat([begin[:2], size[:2]], 0)
        image = tf.image.resize(tf.image.decode_and_crop_jpeg(jpeg, window, channels=3), [SIZE, SIZE])
        image = tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)
        return tf.image.random_flip_left_right(image), tf.sparse.to_dense(example["label"])[0]

    files = tf.data.Dataset.from_tensor_slices(tfrecords(shards, folder))
    samples = files.interleave(tf.data.TFRecordDataset, cycle_length=PROCESSES).with_options(options)
    samples = samples.shuffle(100).repeat().map(load, num_parallel_calls=threads)
    return samples.batch(BATCH, drop_remainder=True).prefetch(2).as_numpy_iterator()


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
    return [sample.read() for sample in tars(shards)]


def grain(shards: list[str], folder: str) -> Iterator:
    """Yield batches from grain, which reads from memory: it supports ArrayRecord and custom sources, but not tars."""
    from absl import flags
    from grain import python as pygrain

    flags.FLAGS(["loader"])  # required before its processes can start
    samples = pygrain.MapDataset.source(jpegs(shards)).seed(0).shuffle().repeat()
    samples = samples.random_map(lambda data, rng: random_pillow(data, int(rng.integers(2**60)))).batch(BATCH)
    return iter(samples.to_iter_dataset().mp_prefetch(pygrain.MultiprocessingOptions(num_workers=PROCESSES)))


def streaming(shards: list[str], folder: str) -> Iterator:
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
    """Yield batches from FFCV, after re-encoding the images into its own file format, at quality 90 and full size."""
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


def limit(shards: list[str], folder: str, decoder: str) -> Iterator:
    """Measure only a part of decoding (see decode.py), without a loader.

    Uses the same number of processes as the loaders, because sharing a core or its cache slows both down.
    """
    import multiprocessing

    forked = multiprocessing.get_context("fork")
    finished = forked.Queue(PROCESSES)  # a process waits until its batch is requested
    for _ in range(PROCESSES):
        forked.Process(target=repeat_limit, args=(shards, decoder, finished), daemon=True).start()
    while True:
        yield finished.get()


def repeat_limit(shards: list[str], decoder: str, finished) -> None:
    """Run a part of decoding for one batch after another; the boxes are drawn in advance."""
    import cv2

    from benchmarks.decode import DECODERS, crops_of, read_photos

    cv2.setNumThreads(1)
    way, _, marked, region_of = DECODERS[decoder]
    photos = read_photos(shards, marked)
    crops = []
    for turn in range(5):
        crops += crops_of(photos, turn, region_of)
    for first in cycle(range(0, len(crops) - BATCH, BATCH)):
        way(crops[first : first + BATCH])
        finished.put(None)


def least(shards: list[str], folder: str, restarts: bool) -> Iterator:
    """Do the minimum work that any loader with libjpeg-turbo and OpenCV must do.

    Each of two processes copies a sample's bytes from the tar, verifies their digest, draws crop and flip, decodes the
    crop, and resizes and mirrors it into shared memory. Headers are read in advance, labels are ignored, there is no
    sample order, and batches are not copied.
    """
    import multiprocessing
    from mmap import mmap

    import numpy as np

    index = index_of(shards, folder, restarts)
    shape = (PROCESSES, PLACES, BATCH, SIZE, SIZE, 3)
    batches = np.ndarray(shape, np.uint8, mmap(-1, math.prod(shape)))
    forked = multiprocessing.get_context("fork")
    connections = []
    for places in batches:
        here, there = forked.Pipe()
        forked.Process(target=fill_places, args=(index, places, there), daemon=True).start()
        for place in range(PLACES):
            here.send(place)
        connections.append(here)
    while True:
        for places, connection in zip(batches, connections, strict=True):
            place = connection.recv()
            yield places[place]
            connection.send(place)


def fill_places(index: Index, places: np.ndarray, connection: Connection) -> None:
    """Fill each requested element of `places` (PLACES, BATCH, SIZE, SIZE, 3) with a batch, and confirm it."""
    from mmap import ACCESS_READ, mmap

    import cv2
    import numpy as np

    from data.images.augment import draw
    from data.images.decode import decode_region, read_header, reduced_box, reduction
    from data.index.shard import sample_digest

    cv2.setNumThreads(1)
    samples = []
    for number, shard in enumerate(index.shards):
        with open(index.location(shard), "rb") as file:
            tar = mmap(file.fileno(), 0, access=ACCESS_READ)
        for row in index.table(number):
            image = slice(int(row["image"]), int(row["image"] + row["image_size"]))
            label = slice(int(row["label"]), int(row["label"] + row["label_size"]))
            samples.append((tar, image, label, int(row["digest"]), read_header(tar[image])))
    draws = Draws(random.getrandbits(60))
    cfg = AugmentConfig()
    resized = np.empty((SIZE, SIZE, 3), np.uint8)
    while True:
        random.shuffle(samples)
        for first in range(0, len(samples) - BATCH, BATCH):
            place = connection.recv()
            for out, sample in zip(places[place], samples[first : first + BATCH], strict=True):
                tar, image, label, digest, header = sample
                photo = tar[image]
                assert sample_digest(photo, tar[label]) == digest, "the tars are intact"
                box, flip = draw(header, draws, cfg)
                denominator = reduction(min(box.height, box.width), SIZE)
                region = box if denominator == 1 else reduced_box(box, header, denominator)
                pixels = decode_region(photo, denominator, region)
                cv2.resize(pixels, (SIZE, SIZE), dst=resized if flip else out)
                if flip:
                    cv2.flip(resized, 1, dst=out)
            connection.send(place)


@dataclass(frozen=True)
class Contender:
    """A loader to compare, and the additional modules that it needs."""

    batches: Callable[[list[str], str], Iterator]
    needs: tuple[str, ...] = ()


CONTENDERS = {
    "limit: Huffman codes, restart markers": Contender(partial(limit, decoder="limit: Huffman codes, restart markers")),
    "limit: Huffman codes, plain files": Contender(partial(limit, decoder="limit: Huffman codes, plain files")),
    "limit: libraries, restart markers": Contender(partial(limit, decoder="limit: libraries, restart markers")),
    "limit: libraries, plain files": Contender(partial(limit, decoder="limit: libraries, plain files")),
    "limit: least of a loader, restart markers": Contender(partial(least, restarts=True)),
    "limit: least of a loader, plain shards": Contender(partial(least, restarts=False)),
    "ours, plain shards": Contender(ours),
    "ours, restart markers": Contender(partial(ours, restarts=True)),
    "ours, plain shards, in the loop's process": Contender(partial(ours, processes=0)),
    "ours, without the binding": Contender(fallback),
    "tf.data, TFRecord, decode and crop": Contender(tfdata, ("tensorflow",)),
    "tf.data, TFRecord, decode and crop, 1 thread": Contender(partial(tfdata, threads=1), ("tensorflow",)),
    "webdataset + Pillow, tuned": Contender(pillow, ("webdataset",)),
    "webdataset + Pillow, tuned, in the loop's process": Contender(partial(pillow, processes=0), ("webdataset",)),
    "webdataset + Pillow + torchvision, as documented": Contender(usual, ("webdataset", "torchvision")),
    "webdataset + OpenCV": Contender(opencv, ("webdataset",)),
    "webdataset + torchvision.io": Contender(torchvision, ("webdataset", "torchvision")),
    "DALI on the CPU": Contender(dali, ("nvidia.dali",)),
    "grain + Pillow": Contender(grain, ("grain",)),
    "MosaicML Streaming + Pillow": Contender(streaming, ("streaming",)),
    "Megatron Energon + Pillow": Contender(energon, ("megatron.energon",)),
    "FFCV, encoded again": Contender(ffcv, ("ffcv",)),
}
