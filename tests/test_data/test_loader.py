"""The loader yields the same pixels and labels with any topology, and replaces unusable samples."""

import contextlib
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import deque
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data.evaluation
import data.loader
from data.decoder import BadSample, BatchLayout
from data.errors import DataError
from data.evaluation import EvaluationSet
from data.images.augment import AugmentConfig
from data.index.index import Index
from data.index.shard import Shard
from data.loader import TrainLoader
from data.order import Order
from pipeline.batches import wait_for_first_batch
from pipeline.worker import StopRequest
from tests.support.shards import Picture, digits, write_set


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_set(islice(digits(True), 300), tmp_path_factory.mktemp("digits"), shard_samples=70)


@pytest.fixture(scope="module")
def order(index):
    return Order(index.shard_samples, seed=5, batch_size=24, lanes=4)


def run(index, order, *, steps, slots=range(24), micro_batch=24, start_step=0, **options):
    """Return all rows of some steps in slot order: (images, labels, ids)."""
    options = {"image_size": 32, "seed": 5} | options
    loader = TrainLoader(index, order, slots=slots, micro_batch=micro_batch, start_step=start_step, **options)
    batches = list(islice(iter(loader), steps * -(-len(slots) // micro_batch)))
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in ("images", "labels", "ids")]


def equal(columns, other_columns) -> bool:
    return all(torch.equal(column, other) for column, other in zip(columns, other_columns, strict=True))


def test_a_batch_is_uint8_images_labels_and_ids(index, order):
    batch = next(iter(TrainLoader(index, order, image_size=24, slots=range(8, 16), micro_batch=5, max_labels=3)))
    assert batch.images.shape == (5, 3, 24, 24)
    assert batch.images.dtype == torch.uint8
    assert batch.labels.shape == (5, 3)
    assert (batch.labels[:, 0] >= 0).all()
    assert (batch.labels[:, 1:] == -1).all()
    assert batch.ids.tolist() == np.stack(order.batch(0), 1)[8:13].tolist()
    assert batch.bad == ()


@pytest.mark.parametrize(
    ("b", "image_size", "max_labels", "pages"),
    [(1, 1, 1, 1), (1, 36, 23, 1), (1, 36, 24, 2), (2, 32, 1, 2), (3, 36, 22, 3), (64, 224, 1, 2353)],
)
def test_a_micro_batch_takes_whole_pages_and_its_arrays_share_nothing(b, image_size, max_labels, pages):
    layout = BatchLayout(b, image_size, max_labels)
    assert layout.bytes == pages * 4096
    memory = bytearray(2 * layout.bytes)
    arrays = layout.arrays(memory, layout.bytes)
    written = 0
    for array in (arrays.ids, arrays.labels, arrays.images):
        assert not array.any()
        array[...] = -1 if array.dtype == np.int64 else 255
        written += array.nbytes
    assert not any(memory[: layout.bytes])
    assert memory.count(255) == written == b * (3 * image_size**2 + 8 * max_labels + 24)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_global_sequence_does_not_depend_on_the_topology(index, order, world, processes):
    whole = run(index, order, steps=3)
    share = 24 // world
    parts = [
        run(index, order, steps=3, slots=range(r * share, (r + 1) * share), micro_batch=5, processes=processes)
        for r in range(world)
    ]
    for column, parts_of in zip(whole, zip(*parts, strict=True), strict=True):
        stacked = torch.cat([part.unflatten(0, (3, share)) for part in parts_of], 1).flatten(0, 1)
        assert torch.equal(stacked, column)


class Undone:
    """A fake decoding process inside this one that only reports its requested samples."""

    def __init__(self, decoder, prefetch):
        self.decoder = decoder
        self.pending = deque()

    def send_decoder(self):
        pass

    def submit(self, task):
        self.pending.append(task)

    def result(self, timeout_s):
        task = self.pending.popleft()
        self.arrays = self.decoder.layout.arrays(bytearray(self.decoder.layout.bytes))
        return task, 0, self.decoder.run(task, self.arrays)

    def arrays_at(self, offset):
        return self.arrays

    def close(self):
        pass


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),  # empty ones, of one sample, a single one
    batch_size=st.integers(1, 100),
    world=st.integers(1, 64),
    processes=st.integers(0, 8),
    micro_batch=st.integers(1, 9),
    lanes=st.integers(1, 9),
    start_step=st.integers(0, 3),
)
def test_every_topology_delivers_the_one_sequence(sizes, batch_size, world, processes, micro_batch, lanes, start_step):
    world = min(world, batch_size)
    index = Index(tuple(Shard(f"s{n}", size, 0, "") for n, size in enumerate(sizes)), 1, (sum(sizes),), "", "", Path())
    order = Order(sizes, seed=0, batch_size=batch_size, lanes=lanes)
    steps = range(start_step, start_step + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.loader.DecoderProcess", Undone)
        patch.setattr("data.decoder.Decoder.fill", lambda *_: None)
        delivered = {step: [] for step in steps}
        for rank in range(world):
            slots = range(batch_size * rank // world, batch_size * (rank + 1) // world)
            options = {"image_size": 1, "slots": slots, "micro_batch": micro_batch, "processes": processes}
            loader = TrainLoader(index, order, start_step=start_step, **options)
            for batch in islice(iter(loader), len(steps) * len(loader.parts)):
                delivered[batch.step] += batch.ids.tolist()
    assert delivered == {step: np.stack(order.batch(step), 1).tolist() for step in steps}


def test_example_in_the_module_docstring_is_correct(index, monkeypatch):
    dealt = []

    class Noted(Undone):
        def submit(self, task):
            dealt.append((self, f"step {task.step} slots {task.first} … {task.stop - 1}"))
            super().submit(task)

    monkeypatch.setattr("data.loader.DecoderProcess", Noted)
    order = Order(index.shard_samples, seed=5, batch_size=16)
    options = {"image_size": 224, "slots": range(8, 16), "micro_batch": 3, "start_step": 5, "processes": 2}
    batches = iter(TrainLoader(index, order, **options))
    batch, *_ = islice(batches, 3)
    batches.close()
    story = data.loader.__doc__
    for process, name in ((dealt[0][0], "process 0"), (dealt[1][0], "process 1")):
        assert f"{name}: {', '.join(task for to, task in dealt if to is process)}, …" in story
    assert f"its first batch has step {batch.step}, images {tuple(batch.images.shape)}" in story
    assert f"labels {tuple(batch.labels.shape)}, ids {tuple(batch.ids.shape)}" in story


def test_resuming_at_a_step_equals_never_having_stopped(index, order):
    whole = run(index, order, steps=20)
    resumed = run(index, order, steps=6, start_step=14)
    assert equal([column[14 * 24 :] for column in whole], resumed)


def test_seed_and_epoch_change_the_pixels_of_a_sample(index):
    order = Order(index.shard_samples, seed=5, batch_size=300)
    first = run(index, order, steps=1, slots=range(300))
    second = run(index, order, steps=1, slots=range(300), start_step=1)
    place = {tuple(row[1:].tolist()): n for n, row in enumerate(second[2])}
    again = second[0][[place[tuple(row[1:].tolist())] for row in first[2]]]
    assert (first[0] == again).flatten(1).all(1).float().mean() < 0.1
    other = run(index, order, steps=1, slots=range(300), seed=6)
    assert torch.equal(first[2], other[2])
    assert not torch.equal(first[0], other[0])


def test_without_crop_and_flip_the_pixels_are_the_image_s_own(index, order):
    images, _, ids = run(index, order, steps=1, augment=AugmentConfig(crop="none", flip=False))
    kept = list(islice(digits(True), 300))
    for image, (_, shard, sample) in zip(images, ids.tolist(), strict=True):
        original = cv2.imdecode(np.frombuffer(kept[shard * 70 + sample].image, np.uint8), cv2.IMREAD_COLOR_RGB)
        assert np.array_equal(image.permute(1, 2, 0), original)


def test_bad_samples_are_replaced_by_the_next_of_their_lane_and_reported(tmp_path):
    good = list(islice(digits(True), 40))
    broken = {3: b"", 11: b"not an image", 17: good[17].image[:100]}
    samples = [Picture(s.key, broken.get(n, s.image), s.labels) for n, s in enumerate(good)]
    index = write_set(samples, tmp_path, shard_samples=16)
    order = Order(index.shard_samples, seed=0, batch_size=8, lanes=2)

    def consumed(micro_batch: int) -> tuple[torch.Tensor, list[BadSample]]:
        loader = TrainLoader(index, order, image_size=16, slots=range(8), micro_batch=micro_batch)
        ids: list[torch.Tensor] = []
        bad: list[BadSample] = []
        for batch in islice(iter(loader), 5 * 8 // micro_batch):
            ids.append(batch.ids)
            bad += batch.bad
        return torch.cat(ids), bad

    ids, bad = consumed(micro_batch=8)
    ids_in_parts, bad_in_parts = consumed(micro_batch=2)
    assert {problem.key for problem in bad} >= {good[n].key for n in broken}
    assert sorted(map(str, bad)) == sorted(map(str, bad_in_parts))
    assert torch.equal(ids, ids_in_parts)
    used = {shard * 16 + sample for _, shard, sample in ids.tolist()}
    assert used == set(range(40)) - set(broken)


def test_a_set_without_a_good_sample_stops_with_a_data_error(tmp_path):
    index = write_set([Picture(f"s{n}", b"junk", (0,)) for n in range(5)], tmp_path)
    order = Order(index.shard_samples, seed=0, batch_size=4)
    with pytest.raises(DataError, match="100 consecutive samples cannot be used"):
        next(iter(TrainLoader(index, order, image_size=16, slots=range(4), micro_batch=4)))


def test_example_of_evaluation_is_correct(tmp_path):
    index = write_set(islice(digits(True), 10), tmp_path)
    given_by = []
    for rank in (0, 1):
        batches = []
        for batch in EvaluationSet(index, "resize(8)", batch_size=3, rank=rank, world=2):
            samples = [str(sample) if sample >= 0 else "−" for sample in batch.ids[:, 1].tolist()]
            batches.append(" ".join(samples))
        given_by.append(", ".join(batches))
    example = f"worker 0 yields the samples {given_by[0]}; worker 1 yields {given_by[1]}"
    assert f"10 samples, 2 workers, batches of 3: {example}" in data.evaluation.__doc__


@pytest.mark.parametrize("world", [1, 2, 7])
def test_evaluation_sees_every_sample_once_at_any_world_size(index, world):
    sets = [
        EvaluationSet(index, "resize_small(40)|central_crop(32)", batch_size=16, rank=r, world=world)
        for r in range(world)
    ]
    seen = []
    for part in sets:
        batches = list(part)
        assert len(batches) == len(part) == len(sets[0])
        for batch in batches:
            assert batch.images.shape == (16, 3, 32, 32)
            assert batch.images.dtype == torch.uint8
            assert (batch.labels[batch.mask] >= 0).all()
            assert (batch.labels[~batch.mask] == -1).all()
            seen += batch.ids[batch.mask].tolist()
    assert sorted(seen) == [[shard, n] for shard, count in enumerate(index.shard_samples) for n in range(count)]


def test_evaluation_yields_the_same_batches_with_threads_and_masks_bad_samples(tmp_path):
    good = list(islice(digits(True), 30))
    index = write_set([Picture(s.key, s.image if n != 7 else b"junk", s.labels) for n, s in enumerate(good)], tmp_path)
    batches = list(EvaluationSet(index, "resize(24)", batch_size=8, threads=1))
    with_threads = list(EvaluationSet(index, "resize(24)", batch_size=8, threads=4))
    for a, b in zip(batches, with_threads, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.mask, b.mask)
    assert [problem.key for batch in batches for problem in batch.bad] == [good[7].key]
    assert torch.cat([batch.mask for batch in batches]).tolist() == [n != 7 and n < 30 for n in range(32)]
    assert not batches[0].images[7].any()
    assert (batches[0].labels[7] == -1).all()


def test_float_resize_returns_float_pixels(index):
    batch = next(iter(EvaluationSet(index, "decode|resize_float(48)", batch_size=4)))
    assert batch.images.dtype == torch.float32
    assert batch.images.shape == (4, 3, 48, 48)
    assert batch.images.max() > 200


def children() -> set[int]:
    """Return the pids of this process's children that run `data.decoder`."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in pids if runs(pid)}


def runs(pid: str) -> bool:
    try:
        return b"data.decoder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# Within the timeout of a hung process another one must start, also on a busy machine.
@pytest.mark.parametrize(("blow", "timeout_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 20.0)])
def test_dead_or_hung_process_is_replaced_and_the_sequence_continues(index, order, blow, timeout_s):
    whole = run(index, order, steps=8)
    before = children()
    loader = TrainLoader(
        index, order, image_size=32, seed=5, slots=range(24), micro_batch=6, processes=2, timeout_s=timeout_s
    )
    batches = iter(loader)
    taken = [next(batches) for _ in range(5)]
    victim = (children() - before).pop()
    os.kill(victim, blow)
    taken += [next(batches) for _ in range(32 - 5)]
    assert victim not in children()
    assert len(children() - before) == 2
    batches.close()
    assert children() == before
    for name, column in zip(("images", "labels", "ids"), whole, strict=True):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in taken]), column)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4, 8])
def test_any_number_of_kills_leaves_the_sequence_as_it_is(index, order, processes):
    steps = 60
    chance = random.Random(processes)
    whole = run(index, order, steps=steps)
    before = children()
    loader = TrainLoader(index, order, image_size=32, seed=5, slots=range(24), micro_batch=6, processes=processes)
    batches = iter(loader)
    taken = []
    for _ in range(steps * 4):
        taken.append(next(batches))
        if chance.random() < 0.1:
            os.kill(chance.choice(sorted(children() - before)), signal.SIGKILL)
    batches.close()
    assert children() == before
    for name, column in zip(("images", "labels", "ids"), whole, strict=True):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in taken]), column)


@pytest.mark.parametrize("processes", [1, 2])
def test_batch_is_not_overwritten_while_part_of_it_is_in_use_and_others_are_not_copied(index, order, processes):
    whole = run(index, order, steps=12)[0].split(24)
    options = {"image_size": 32, "seed": 5, "slots": range(24), "micro_batch": 24}
    batches = iter(TrainLoader(index, order, processes=processes, **options))
    held = next(batches).images[20:, :, 3:5]
    lent = []
    for expected in whole[1:]:
        images = next(batches).images
        assert torch.equal(images, expected)
        lent.append(is_shared(images.data_ptr()))
        del images
    batches.close()
    assert torch.equal(held, whole[0][20:, :, 3:5])
    # The process of the held part has no other buffer to lend and must copy; the second process lends all its parts.
    assert lent == [number % 2 == 0 and processes == 2 for number in range(11)]
    assert is_shared(held.data_ptr())


def test_training_loop_reads_all_batches_from_shared_memory(index, order, tmp_path):
    # Waiting for the first batch must not hold it: one of its process's two buffers would never be free again.
    loader = TrainLoader(index, order, processes=1, image_size=32, seed=5, slots=range(24), micro_batch=24)
    stop = StopRequest(tmp_path / "stop", reads_file=True)
    worker: Any = SimpleNamespace(group=SimpleNamespace(device=torch.device("cpu")), stop=stop)
    batches = wait_for_first_batch(worker, loader)
    lent = []
    for _ in range(4):
        batch = next(batches)
        lent.append(is_shared(batch.images.data_ptr()))
        del batch
    batches.close()
    assert all(lent)


def is_shared(address: int) -> bool:
    """Return whether the kernel maps an address as memory shared with a decoding process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = line.split()[0].split("-")
        if int(low, 16) <= address < int(high, 16):
            return "patchline-batches" in line
    return False


def test_processes_end_with_their_killed_loader(index, order, tmp_path):
    script = (
        "import pickle, sys, time\n"
        "from data.loader import TrainLoader\n"
        "index, order = pickle.load(open(sys.argv[1], 'rb'))\n"
        "loader = TrainLoader(index, order, image_size=32, slots=range(24), micro_batch=6, processes=2)\n"
        "batches = iter(loader)\n"
        "next(batches)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "loader.pickle").write_bytes(pickle.dumps((index, order)))
    command = [sys.executable, "-c", script, str(tmp_path / "loader.pickle")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout.readline() == b"ready\n"
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(map(runs, workers))


def test_decoding_processes_import_neither_torch_nor_webdataset():
    check = "import data.decoder, sys; sys.exit(bool({'torch', 'webdataset', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[2]).returncode == 0


def test_a_data_error_in_a_process_reaches_the_loop(index, order):
    shards = (*index.shards[:-1], replace(index.shards[-1], sha256="0" * 64))
    with pytest.raises(DataError, match="sha256"):
        run(replace(index, shards=shards), order, steps=2, processes=1)


def test_system_error_in_a_process_is_not_mistaken_for_its_death(index, order):
    failing = copy(order)
    failing.batch = partial(os.open, "/nonexistent")  # called with a step, which it takes for its flags
    with pytest.raises(FileNotFoundError):
        run(index, failing, steps=1, processes=1)


def shared_memory() -> dict[int, int]:
    """Return the kernel's size in bytes of each anonymous file that this process's loaders hold open, by inode."""
    gc.collect()
    sizes = {}
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            if "memfd:patchline-batches" in os.readlink(handle):
                status = os.stat(handle)
                sizes[status.st_ino] = status.st_size
    return sizes


def test_shared_memory_is_bounded_and_waits_are_split(index, order):
    loader = TrainLoader(index, order, image_size=32, slots=range(24), micro_batch=6, processes=2, prefetch=3)
    before = shared_memory()
    batches = iter(loader)
    wait = next(batches).wait
    added = sum(shared_memory().values()) - sum(before.values())
    assert 2 * 3 * 6 * 32 * 32 * 3 <= added <= 2 * 3 * (6 * 32 * 32 * 3 + 3 * 4096)
    assert wait.storage_s > 0
    assert wait.decode_s > 0
    assert wait.transfer_s > 0
    batches.close()
    assert shared_memory() == before
