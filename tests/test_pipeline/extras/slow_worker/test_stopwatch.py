"""The stopwatch splits a step into a worker's own seconds by cause; round trips are those of the kernel."""

import gc
import math
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pipeline.extras.slow_worker import stopwatch as module
from pipeline.extras.slow_worker.stopwatch import RoundTrips, Stopwatch, device_seconds

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    now = SimpleNamespace(wall=100.0, ran=7.0)
    monkeypatch.setattr(module, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(module, "thread_time", lambda: now.ran)
    return now


@pytest.fixture
def stopwatch(clock) -> Iterator[Stopwatch]:
    gc.disable()  # a collection would take no time on this clock, but count as one
    stopwatch = Stopwatch(on_gpu=False, has_forward_collectives=False)
    yield stopwatch
    stopwatch.close()
    gc.enable()


def pass_time(clock: SimpleNamespace, wall: float, ran: float) -> None:
    clock.wall += wall
    clock.ran += ran


def test_waits_for_others_do_not_count(clock, stopwatch):
    """Two micro-batches; the thread waits in `backward` and `reduce`, and loses a quarter of the forward passes."""
    for _ in range(2):
        stopwatch.enter("data")
        pass_time(clock, 0.010, 0.0)
        stopwatch.enter("forward")
        pass_time(clock, 0.004, 0.003)
        stopwatch.enter("backward")
        pass_time(clock, 0.100, 0.008)
        stopwatch.enter("reduce")
        pass_time(clock, 0.050, 0.001)
    stopwatch.enter("save")
    pass_time(clock, 5.0, 1.0)
    stopwatch.enter("")
    data, compute, host, collected, whole = stopwatch.step()
    assert data == pytest.approx(0.020)
    assert compute == pytest.approx(2 * (0.003 + 0.008 + 0.001))
    # A third of a second is lost for each second of running.
    assert host == pytest.approx(2 * (0.001 + 0.009 / 3))
    assert collected == 0
    assert whole == pytest.approx(2 * 0.164)
    assert stopwatch.step() == (0, 0, 0, 0, 0)


def test_share_that_the_host_takes_from_decoding_is_not_data_loading(clock, stopwatch):
    """The thread decodes itself for 6 ms, and loses half of its time, as in the forward pass."""
    stopwatch.enter("data")
    pass_time(clock, 0.013, 0.006)
    stopwatch.enter("forward")
    pass_time(clock, 0.020, 0.010)
    stopwatch.enter("")
    data, compute, host, _, _ = stopwatch.step()
    assert data == pytest.approx(0.013 - 0.006)
    assert compute == pytest.approx(0.010)
    assert host == pytest.approx(0.010 + 0.006)


def test_garbage_collections_are_counted_in_the_phase_where_they_happen(clock, stopwatch):
    stopwatch.enter("data")
    pass_time(clock, 0.010, 0.0)
    stopwatch.enter("forward")
    stopwatch.on_collection("start", {})
    pass_time(clock, 0.030, 0.030)
    stopwatch.on_collection("stop", {})
    pass_time(clock, 0.004, 0.004)
    stopwatch.enter("")
    data, compute, host, collected, whole = stopwatch.step()
    assert (data, compute, host) == (pytest.approx(0.010), pytest.approx(0.004), pytest.approx(0))
    assert collected == pytest.approx(0.030)
    assert whole == pytest.approx(0.044)


def test_real_collection_is_measured_and_other_threads_are_not():
    stopwatch = Stopwatch(on_gpu=False, has_forward_collectives=False)
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    assert stopwatch.collected == 0
    gc.collect()
    assert 0 < stopwatch.collected < 60
    stopwatch.close()
    before = stopwatch.collected
    gc.collect()
    assert stopwatch.collected == before


def test_with_collectives_in_the_forward_pass_only_processor_time_counts(clock, monkeypatch):
    gc.disable()
    ready = [0.0]
    monkeypatch.setattr(Stopwatch, "ready_s", lambda self: ready[0])
    stopwatch = Stopwatch(on_gpu=False, has_forward_collectives=True)
    stopwatch.enter("data")
    pass_time(clock, 0.010, 0.001)
    stopwatch.enter("forward")
    pass_time(clock, 0.500, 0.020)
    ready[0] = 0.003
    stopwatch.enter("")
    data, compute, host, _, _ = stopwatch.step()
    stopwatch.close()
    gc.enable()
    assert (data, compute, host) == (pytest.approx(0.007), pytest.approx(0.020), pytest.approx(0.003))


class Event:
    """An event of a device at a given time, in milliseconds."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, other: "Event") -> float:
        return other.ms - self.ms


def test_device_seconds_are_those_between_the_phases_of_each_micro_batch():
    step = [("data", 0), ("forward", 30), ("backward", 130), ("reduce", 400)]
    step += [("data", 401), ("forward", 410), ("backward", 510), ("reduce", 780), ("", 999)]
    events = [(phase, Event(ms)) for phase, ms in step]
    assert device_seconds(events) == (pytest.approx(0.030 + 0.010), pytest.approx(0.200))


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            yield here, there


def test_round_trips_of_connections_in_use_are_read(connection):
    here, there = connection
    trips = RoundTrips({"127.0.0.1"}, excluded_port=1)
    assert math.isnan(trips.shortest_s())
    assert math.isnan(trips.shortest_s()), "not in use"
    here.sendall(b"x" * 100_000)
    there.recv(100_000)
    measured = math.nan
    # The acknowledgement may take a moment.
    deadline = time.monotonic() + 60
    while math.isnan(measured) and time.monotonic() < deadline:
        measured = trips.shortest_s()
    assert 0 < measured < 1
    here.sendall(b"still open")
    assert there.recv(100_000, socket.MSG_PEEK)


def test_connections_to_others_and_to_the_store_do_not_count(connection):
    here, there = connection
    for trips in (RoundTrips({"10.1.2.3"}, 1), RoundTrips({"127.0.0.1"}, here.getpeername()[1]), RoundTrips((), 1)):
        trips.shortest_s()
        here.sendall(b"x" * 1000)
        there.recv(1000)
        assert math.isnan(trips.shortest_s())
