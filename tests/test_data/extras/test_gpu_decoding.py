"""Device decoding gives the same samples, crops and replacements; OpenCV replaces nvJPEG in most tests."""

import importlib.util
import sys
from itertools import islice

import cv2
import numpy as np
import pytest
import torch

from data.errors import ConfigError, DataError
from data.extras.gpu_decoding import DeviceDecoder, torchcodec
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.images.augment import AugmentConfig, Encoded
from data.loader import TrainLoader
from data.order import Order
from pipeline.training_config import DataConfig

pytestmark = pytest.mark.quick


def picture(number: int, side: int, extension: str = ".jpg") -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (side + 20, side), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(extension, smooth)[1].tobytes()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Pack JPEGs of many sizes, a PNG, a truncated file, a file without an image, and one too large for its row."""
    images = {n: picture(n, 60 + 17 * n) for n in range(24)}
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    images |= {
        3: picture(3, 90, ".png"),
        7: images[7][:-400],
        11: b"junk",
        15: cv2.imencode(".jpg", noise)[1].tobytes(),
    }
    return pack([Sample(f"s{n:02d}", image, (n,)) for n, image in images.items()], tmp_path_factory.mktemp("jpegs"))


def stand_in(sources: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode like nvJPEG: all images of a call or none."""
    images = [cv2.imdecode(source.numpy(), cv2.IMREAD_COLOR_RGB) for source in sources]
    if any(image.shape[0] == 60 + 17 * 5 for image in images):
        raise RuntimeError("number 5 is not for this decoder")
    return [torch.from_numpy(image).permute(2, 0, 1).to(device) for image in images]


def batches(index, decode: str, **options):
    order = Order(index.shard_samples, seed=1, batch_size=12)
    loader = TrainLoader(index, order, image_size=96, slots=range(12), micro_batch=5, decode=decode, **options)
    return list(islice(loader, 6))


@pytest.mark.parametrize("processes", [0, 2])
def test_batch_of_the_device_decoder_is_equal_up_to_rounding(index, processes, monkeypatch):
    images_of_calls = []

    def counted(sources: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        images_of_calls.append(len(sources))
        return stand_in(sources, device)

    monkeypatch.setattr("data.extras.gpu_decoding.torchcodec", lambda: counted)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ours = batches(index, "cpu")
    theirs = batches(index, "gpu", processes=processes)
    refused = replaced = 0
    for batch, other in zip(ours, theirs, strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.labels, other.labels)
        assert sorted(bad.key for bad in batch.bad) == sorted(bad.key for bad in other.bad)
        replaced += len(batch.bad)
        for image, same, sample in zip(batch.images, other.images, batch.ids[:, 2].tolist(), strict=True):
            difference = (image.int() - same.int()).abs().float().mean()
            assert difference < 3
            if sample in (3, 5, 15):  # not a JPEG, refused, too large for its row: decoded here
                assert difference == 0
                refused += sample == 5
    assert refused, "the odd samples came up"
    assert replaced, "the odd samples came up"
    assert max(images_of_calls) > 1, "several images a call"


def test_images_rejected_by_both_decoders_have_the_same_replacement(index, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr("data.extras.gpu_decoding.torchcodec", lambda: refuse)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for batch, other in zip(batches(index, "cpu"), batches(index, "gpu"), strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.ids, other.ids)
        assert batch.bad == other.bad


def test_rows_hold_the_device_pixels_unless_the_sides_differ_from_the_header(monkeypatch):
    """The loader decodes rejected rows itself, so that the batch alone does not show who decoded them."""
    decoded = [torch.full((3, 10, 20), 77, dtype=torch.uint8), torch.full((3, 20, 10), 99, dtype=torch.uint8)]
    monkeypatch.setattr("data.extras.gpu_decoding.torchcodec", lambda: lambda sources, device: decoded)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    images = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    encoded = [Encoded(row, 50, sides=(10, 20), box=(1, 2, 8, 8), flip=False) for row in (0, 2)]
    rows, rejected = DeviceDecoder(reduced=False).rows(images, encoded)
    assert (rows[0] == 77).all()
    assert (rows[1:] == 0).all()
    assert rejected == [2]


def test_gpu_out_of_memory_raises_and_rejects_no_image(index, monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("data.extras.gpu_decoding.torchcodec", lambda: run_out)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(torch.OutOfMemoryError):
        batches(index, "gpu")


def test_missing_torchcodec_raises_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(DataError, match="install torchcodec for the CUDA version"):
        torchcodec()


def test_cpu_only_options_are_rejected_in_the_config():
    with pytest.raises(ConfigError, match="does not support"):
        DataConfig(train="x", decode="gpu", augment=AugmentConfig(randaug_layers=2))


@pytest.mark.skipif(importlib.util.find_spec("torchcodec") is None, reason="TorchCodec is not installed")
def test_torchcodec_gives_the_same_crops(index):
    for batch, other in zip(batches(index, "cpu"), batches(index, "gpu"), strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert (batch.images.int() - other.images.cpu().int()).abs().float().mean() < 3


@pytest.mark.gpu
def test_nvjpeg_gives_the_same_crops_and_leaves_them_on_the_gpu(index):
    pytest.importorskip("torchcodec", reason="TorchCodec is not installed: pip install torchcodec, for torch's CUDA")
    for batch, other in zip(batches(index, "cpu"), batches(index, "gpu"), strict=True):
        assert other.images.device.type == "cuda"
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.labels, other.labels)
        assert (batch.images.int() - other.images.cpu().int()).abs().float().mean() < 3
