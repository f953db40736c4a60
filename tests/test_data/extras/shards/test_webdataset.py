"""Shards can be exchanged in both directions with webdataset's `ShardWriter` and `WebDataset`."""

import json
from pathlib import Path

import cv2
import numpy as np
import webdataset as wds

from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample, digits
from data.images.augment import AugmentConfig
from data.images.decode import decode
from data.index.document import load_index
from data.loader import TrainLoader
from data.order import Order
from data.reader import ShardReader
from jobs.__main__ import main

CLASSES = 3


def noise(seed: int, kind: str = ".jpg") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    return cv2.imencode(kind, pixels)[1].tobytes()


def written_by_webdataset(folder: Path, count: int = 23, suffix: str = "tar") -> list[dict[str, object]]:
    """Write shards of seven samples with `wds.ShardWriter` as documented: an image, its class, and other members."""
    samples: list[dict[str, object]] = []
    folder.mkdir()
    with wds.ShardWriter(f"{folder}/theirs-%06d.{suffix}", maxcount=7, verbose=0) as writer:
        for number in range(count):
            # Keys with folders, one longer than a tar header's 100 bytes; PNG among JPEG; ignored members.
            key = f"part/{'long' * 30 if number == 5 else 'x'}{number:04d}"
            kind = "png" if number % 4 == 0 else "jpg"
            sample = {"__key__": key, kind: noise(number, f".{kind}"), "cls": number % CLASSES, "txt": "a caption"}
            writer.write(sample)
            samples.append({"key": key, "image": sample[kind], "label": number % CLASSES})
    return samples


def test_shards_of_webdatasets_writer_are_indexed_and_read_sample_by_sample(tmp_path):
    samples = written_by_webdataset(tmp_path / "theirs")
    index = build_index(tmp_path / "theirs", name="theirs")
    assert index.shard_samples.tolist() == [7, 7, 7, 2]
    assert index.class_counts == (8, 8, 7)
    assert not index.refused.counts
    reader = ShardReader(index)
    read = []
    for shard, count in enumerate(index.shard_samples.tolist()):
        read += [reader.read(shard, sample) for sample in range(count)]
    assert read == [(sample["key"], sample["image"], str(sample["label"]).encode()) for sample in samples]


def test_shards_of_webdatasets_writer_train_each_sample_once_per_epoch(tmp_path):
    samples = written_by_webdataset(tmp_path / "theirs", count=24)
    index = build_index(tmp_path / "theirs", name="theirs")
    order = Order(index.shard_samples, seed=3, batch_size=8)
    augment = AugmentConfig(crop="none", flip=False)
    loader = TrainLoader(index, order, image_size=16, slots=range(8), micro_batch=8, augment=augment)
    seen: dict[bytes, int] = {}
    for _, batch in zip(range(3), loader, strict=False):
        for image, label in zip(batch.images, batch.labels, strict=True):
            seen[image.permute(1, 2, 0).numpy().tobytes()] = int(label)
    assert seen == {decode(sample["image"]).tobytes(): sample["label"] for sample in samples}  # type: ignore[arg-type]


def test_json_labels_of_shard_writer_are_read_too(tmp_path):
    (tmp_path / "theirs").mkdir()
    with wds.ShardWriter(f"{tmp_path}/theirs/t-%06d.tar", verbose=0) as writer:
        writer.write({"__key__": "a", "jpg": noise(1), "json": {"label": 2, "url": "https://example.org/a.jpg"}})
        writer.write({"__key__": "b", "jpg": noise(2), "json": {"labels": [0, 1]}})
    index = build_index(tmp_path / "theirs")
    assert index.class_counts == (1, 1, 1)
    assert [json.loads(label) for label in ShardReader(index).labels(0)][1] == {"labels": [0, 1]}


def test_compressed_shards_of_shard_writer_are_repacked(tmp_path):
    samples = written_by_webdataset(tmp_path / "theirs", suffix="tar.gz")
    assert main(["pack", "tars", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--name", "ours"]) == 0
    index = load_index(tmp_path / "ours")
    reader = ShardReader(index)
    (count,) = index.shard_samples.tolist()
    read = [reader.read(0, sample)[1:] for sample in range(count)]
    assert read == [(sample["image"], str(sample["label"]).encode()) for sample in samples]


def test_webdataset_reads_packed_samples_in_the_same_order(tmp_path):
    samples = [
        *(sample for sample in digits(True) if sample.labels[0] < 2),
        Sample(f"deep/{'long' * 30}", noise(7, ".png"), (4, 2), "png"),
    ]
    index = pack(samples, tmp_path / "ours", name="ours", shard_samples=100)
    urls = [index.location(number) for number in range(len(index.shards))]
    assert len(urls) == 3
    theirs = list(wds.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in theirs] == [sample.key for sample in samples]
    for sample, read in zip(samples, theirs, strict=True):
        assert read[sample.extension] == sample.image
        assert read["cls"] == " ".join(map(str, sample.labels)).encode()


def test_webdataset_decodes_packed_shards(tmp_path):
    threes = [sample for sample in digits(True) if sample.labels == (3,)]
    index = pack(threes, tmp_path / "ours", name="ours", restarts=True)
    pipeline = wds.WebDataset(index.location(0), shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls")
    decoded = list(pipeline)
    assert len(decoded) == index.samples
    for (pixels, label), sample in zip(decoded, threes, strict=True):
        assert label == 3
        assert np.array_equal(pixels, decode(sample.read()))
