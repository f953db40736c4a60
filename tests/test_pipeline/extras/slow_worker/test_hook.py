"""A slow worker is named once with its factor, cause and remedy, from the parts that all workers have sent."""

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks import slow_workers as bench
from benchmarks.replay import STAGE
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from pipeline.extras.slow_worker.comparison import PART, WINDOW, SlowWorker
from pipeline.extras.slow_worker.hook import HEADER, KEPT, PARTS, Comparer, Exchange, text_of
from pipeline.extras.slow_worker.stopwatch import RoundTrips

NODES = ["n0", "n0", "n1", "n1"]


def part(world: int = 4, slow: int | None = None, extra: float = 0.05, column: int = 0) -> np.ndarray:
    """Return the steps of a part (W, PART, columns): 20 ms of data loading, 80 ms of computing, 0.2 s in all."""
    rows = np.zeros((world, PART, 5), np.float32)
    rows[..., 0] = 0.020
    rows[..., 1] = 0.080
    rows[..., -1] = 0.200
    if slow is not None:
        rows[slow, :, column] += extra
        rows[..., -1] += extra
    return rows


UNKNOWN = np.full(4, np.nan)


@pytest.mark.quick
def test_slow_worker_is_named_once_and_again_when_it_recovers():
    comparer = Comparer(NODES)
    entries = []
    for number in range(4 * PARTS):
        slow = 2 if PARTS <= number < 3 * PARTS else None
        entries += comparer.add(part(slow=slow), UNKNOWN, 5 + (number + 1) * PART)
    (values, line), (recovery, last_line) = entries
    assert (values["rank"], values["cause"], values["node"]) == (2, "data", "n1")
    assert values["factor"] == pytest.approx(1.5)
    # It became slow after 85 steps, and was slow for 80.
    assert 85 < values["step"] <= 85 + WINDOW
    first, remedy = line.split("\n  ")
    assert (values["about"], values["notice"], values["is_over"]) == ("worker 2", first, False)
    assert (recovery["about"], recovery["notice"], recovery["is_over"]) == ("worker 2", last_line, True)
    begin = values["step"] - WINDOW + 1
    assert first == (
        f"worker 2 on n1 takes 1.50 times as long as the others in steps {begin} to {values['step']}, because of "
        "loading data: 70 ms a step, the others 20 ms"
    )
    assert remedy.startswith("compare the nodes' storage and decoding speed")
    assert recovery["factor"] == 1.0
    assert last_line.startswith("worker 2 on n1 is as fast as the others again since step ")


@pytest.mark.quick
def test_worker_whose_cause_changes_is_named_again():
    comparer = Comparer(NODES)
    found = SlowWorker(3, 1.2, "host", 0.2, 0.001, 0.0005, 0.002)
    ((_, line),) = comparer.changes([found], 100)
    assert "because of other use of its processors: 200 ms a step, the others 1 ms (0.5 ms to 2 ms)" in line
    assert comparer.changes([found], 110) == []
    (changed,) = comparer.changes([SlowWorker(3, 1.2, "gc", 0.2, 0.0, 0.0, 0.0)], 120)
    assert "because of Python's garbage collection: 200 ms a step, the others 0 ms, on average\n" in changed[1]


@pytest.mark.quick
def test_link_of_two_workers_is_a_link_of_both():
    comparer = Comparer(["n0", "n1"])
    entries = []
    for number in range(3 * PARTS):
        trips = np.array([0.001, 0.001]) * (1 if number < PARTS else 20)
        rows = part(world=2)
        rows[..., -1] += 0.05 if number >= PARTS else 0.0
        entries += comparer.add(rows, trips, (number + 1) * PART)
    assert {values["cause"] for values, _ in entries} == {"link"}
    assert all("because of the link to the other worker: " in line for _, line in entries)


@pytest.mark.quick
def test_parts_of_all_workers_are_compared_after_the_next_part():
    store = dist.HashStore()
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    queues = []
    for rank in range(2):
        comparer = Comparer(["n0", "n1"]) if rank == 0 else None
        exchange = Exchange(store, rank, RoundTrips((), 0), np.array, comparer, news)
        queues.append(queue.SimpleQueue())
        threading.Thread(target=exchange.run, args=(queues[rank],), daemon=True).start()
    # Worker 1 sends first, as a worker that is ahead by less than a part may.
    for number in range(PARTS + 2):
        for rank in (1, 0):
            rows = part(2, slow=1, column=1)[rank]
            queues[rank].put((number, (number + 1) * PART, rows))
            store.wait([f"{number % KEPT}/{rank}"])
    values, line = news.get(timeout=60)
    assert (values["rank"], values["cause"], values["step"]) == (1, "compute", WINDOW)
    assert line.startswith("worker 1 on n1 takes 1.50 times as long")


@pytest.mark.quick
def test_parts_that_are_gone_begin_a_new_window():
    store = dist.HashStore()
    comparer = Comparer(["n0", "n1"])
    exchange = Exchange(store, 0, RoundTrips((), 0), np.array, comparer, queue.SimpleQueue())
    rows = part(2)

    def send(number: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            store.set(f"{number % KEPT}/{rank}", HEADER.pack(number, float("nan")) + rows[rank].tobytes())

    send(0)
    exchange.collect(comparer, 1, 10)
    assert len(comparer.parts) == 1
    # Worker 1 has not sent its part yet: the one in its place is older.
    send(KEPT, ranks=(0,))
    exchange.wanted = KEPT
    exchange.collect(comparer, KEPT + 1, 10)
    assert exchange.wanted == KEPT
    exchange.collect(comparer, 3 * KEPT, 10)
    assert (exchange.wanted, comparer.parts) == (3 * KEPT, [])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2345, "1,234 ms"), (0.0312, "31 ms"), (0.00031, "0.31 ms"), (0, "0 ms")]
)
def test_seconds_are_shown_with_two_digits(seconds, text):
    assert text_of(seconds) == text


# ------------------------------------------------------------------------ two real workers


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "shards"
    pack(digits(train=True, image_size=16), folder, name="train", shard_samples=100)
    return folder


def found(folder: Path, shards: Path, cause: str, factor: float) -> set[tuple[int, str]]:
    records = bench.real_case(folder, shards, cause, factor, rank=1)
    log = (folder / STAGE / "log.txt").read_text()
    late = [record for record in records if record["step"] > bench.BEGIN and record["factor"] > 1]
    for record in late:
        print(record)
        assert f"worker {record['rank']} on {record['node']} takes {record['factor']:.2f} times as long" in log
        # Other work on the machine may slow either worker, and may be named as well.
        assert 1.05 <= record["factor"] < 3 * factor
    return {(record["rank"], record["cause"]) for record in late}


@pytest.mark.slow
def test_real_worker_with_a_slow_decoder_is_named(shards, tmp_path):
    assert (1, "data") in found(tmp_path / "run", shards, "data", 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["compute", "host", "gc"])
def test_real_worker_that_is_slow_for_another_reason_is_named(shards, tmp_path, cause):
    assert (1, cause) in found(tmp_path / "run", shards, cause, 3.0)
