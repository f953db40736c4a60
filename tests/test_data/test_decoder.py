"""Memory of a micro-batch, and micro-batches against plain reading of the same samples."""

import mmap
from dataclasses import replace

import cv2
import numpy as np
import pytest

from data.decoder import PAGE, BatchLayout, Decoder, DecodeTask
from data.images.augment import AugmentConfig
from data.order import Order
from data.reader import ShardReader
from tests.support.shards import digits, write_set

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("b", "size", "labels"), [(1, 8, 1), (3, 16, 2), (32, 224, 1)])
def test_the_arrays_of_a_micro_batch_share_no_byte_and_fit_in_whole_pages(b, size, labels):
    layout = BatchLayout(b, size, labels)
    assert layout.bytes % PAGE == 0
    assert 0 <= layout.bytes - (b * size * size * 3 + b * labels * 8 + b * 3 * 8) < PAGE
    memory = mmap.mmap(-1, 2 * layout.bytes)
    first = layout.arrays(memory)
    second = layout.arrays(memory, layout.bytes)
    for number, array in enumerate([*first, *second], 1):
        array[...] = number
    for number, array in enumerate([*first, *second], 1):
        assert (array == number).all()


def test_task_contains_the_samples_defined_by_the_order(tmp_path):
    samples = list(digits(train=False, image_size=16))[:12]
    index = write_set(samples, tmp_path, name="t", shard_samples=5)
    order = Order(index.shard_samples, batch_size=4, seed=3)
    layout = BatchLayout(4, 16, 1)
    cfg = AugmentConfig(crop="none", flip=False)
    decoder = Decoder(index, order, layout, cfg, 3, ShardReader(index))
    for step in range(3):
        arrays = layout.arrays(bytearray(layout.bytes))
        done = decoder.run(DecodeTask(step, 0, 4), arrays)
        assert done.bad == ()
        _, shards, numbers = order.batch(step)
        assert arrays.ids[:, 1].tolist() == list(shards)
        for row, (shard, number) in enumerate(zip(shards, numbers, strict=True)):
            sample = samples[5 * shard + number]
            pixels = cv2.imdecode(np.frombuffer(sample.image, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
            np.testing.assert_array_equal(arrays.images[row], pixels)
            assert arrays.labels[row].tolist() == list(sample.labels)


def test_a_bad_image_is_replaced_and_named(tmp_path):
    samples = list(digits(train=False, image_size=16))[:8]
    samples[3] = replace(samples[3], image=b"no image")
    index = write_set(samples, tmp_path, name="t")
    order = Order(index.shard_samples, batch_size=8, seed=0)
    layout = BatchLayout(8, 16, 1)
    decoder = Decoder(index, order, layout, AugmentConfig(crop="none"), 0, ShardReader(index))
    arrays = layout.arrays(bytearray(layout.bytes))
    done = decoder.run(DecodeTask(0, 0, 8), arrays)
    assert [bad.key for bad in done.bad] == [samples[3].key]
    assert 3 not in arrays.ids[:, 2].tolist()
