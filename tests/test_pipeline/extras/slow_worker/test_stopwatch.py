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
from pipeline.extras.slow_worker.stopwatch import RoundTrips, StepTimes, Stopwatch, device_seconds, seconds_by_cause

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    now = SimpleNamespace(wall=100.0, ran=7.0, ready=3.0)
    monkeypatch.setattr(module, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(module, "thread_time", lambda: now.ran)
    monkeypatch.setattr(Stopwatch, "ready_s", lambda self: now.ready)
    return now


@pytest.fixture
def stopwatch(clock) -> Iterator[Stopwatch]:
    gc.disable()  # a collection would take no time on this clock, but count as one
    stopwatch = Stopwatch(on_gpu=False)
    yield stopwatch
    stopwatch.close()
    gc.enable()


def pass_time(clock: SimpleNamespace, wall: float, ran: float, ready: float = 0.0) -> None:
    clock.wall += wall
    clock.ran += ran
    clock.ready += ready


def causes(*steps: StepTimes, has_forward_collectives: bool = False) -> list[list[float]]:
    """Return the seconds of each step: data, compute, host, gc, and the whole step."""
    return seconds_by_cause(steps, on_gpu=False, has_forward_collectives=has_forward_collectives).tolist()


def test_waits_for_others_do_not_count(clock, stopwatch):
    """Two micro-batches; the thread waits in `backward` and `reduce`, and is ready without a processor for 2 ms."""
    for _ in range(2):
        stopwatch.enter("data")
        pass_time(clock, 0.010, 0.0)
        stopwatch.enter("forward")
        pass_time(clock, 0.003, 0.003)
        stopwatch.enter("backward")
        pass_time(clock, 0.100, 0.008, ready=0.002)
        stopwatch.enter("reduce")
        pass_time(clock, 0.050, 0.001)
    stopwatch.enter("save")
    pass_time(clock, 5.0, 1.0, ready=1.0)
    stopwatch.enter("")
    ((data, compute, host, collected, whole),) = causes(stopwatch.step())
    assert data == pytest.approx(0.020)
    assert compute == pytest.approx(2 * (0.003 + 0.008 + 0.001))
    assert host == pytest.approx(2 * 0.002)
    assert collected == 0
    assert whole == pytest.approx(2 * 0.163)
    assert causes(stopwatch.step()) == [[0.0] * 5]


def test_stops_in_the_forward_passes_of_a_part_count_in_its_other_phases_in_proportion(clock, stopwatch):
    """A process that is stopped for a third of the time; it is seen in the second step only."""
    steps = []
    for stopped in (0.0, 0.004):
        stopwatch.enter("data")
        pass_time(clock, 0.009, 0.0)
        stopwatch.enter("forward")
        pass_time(clock, 0.004 + stopped, 0.004, ready=0.0)
        stopwatch.enter("backward")
        pass_time(clock, 0.100, 0.008)
        stopwatch.enter("")
        steps.append(stopwatch.step())
    first, second = causes(*steps)
    # The thread needs 12 ms to run for 8 ms, and the decoders were stopped for a third of 9 ms.
    assert first[:3] == [pytest.approx(0.006), pytest.approx(0.012), pytest.approx(0.003 + 0.004)]
    assert second[:3] == [pytest.approx(0.006), pytest.approx(0.012), pytest.approx(0.003 + 0.004 + 0.004)]


def test_waiting_for_a_processor_during_decoding_is_not_data_loading(clock, stopwatch):
    stopwatch.enter("data")
    pass_time(clock, 0.013, 0.006, ready=0.005)
    stopwatch.enter("forward")
    pass_time(clock, 0.020, 0.010, ready=0.010)
    stopwatch.enter("")
    ((data, compute, host, _, _),) = causes(stopwatch.step())
    assert data == pytest.approx(0.008)
    assert compute == pytest.approx(0.010)
    assert host == pytest.approx(0.005 + 0.010)


def test_without_the_kernels_count_the_forward_pass_shows_what_the_host_takes(clock, stopwatch, monkeypatch):
    """The thread decodes itself for 6 ms, and loses half of its time, as in the forward pass."""
    monkeypatch.setattr(Stopwatch, "ready_s", lambda self: 0.0)
    stopwatch.enter("data")
    pass_time(clock, 0.012, 0.006)
    stopwatch.enter("forward")
    pass_time(clock, 0.020, 0.010)
    stopwatch.enter("")
    ((data, compute, host, _, _),) = causes(stopwatch.step())
    assert data == pytest.approx(0.006)
    assert compute == pytest.approx(0.010)
    assert host == pytest.approx(0.010 + 0.006)


def test_kernel_without_the_count_is_recognised(tmp_path, monkeypatch):
    """Without CONFIG_SCHED_INFO, Linux returns zeros; other systems have no such file."""
    path = tmp_path / "schedstat"
    monkeypatch.setattr(module, "SCHEDULER", str(path))
    assert module.scheduler_file() == -1
    path.write_text("0 0 0\n")
    assert module.scheduler_file() == -1
    path.write_text("12 2500000 3\n")
    stopwatch = Stopwatch(on_gpu=False)
    assert stopwatch.ready_s() == 0.0025
    stopwatch.close()
    assert stopwatch.ready_s() == 0.0


def test_garbage_collections_are_counted_in_the_phase_where_they_happen(clock, stopwatch):
    stopwatch.enter("data")
    pass_time(clock, 0.010, 0.0)
    stopwatch.enter("forward")
    stopwatch.on_collection("start", {})
    pass_time(clock, 0.035, 0.030, ready=0.005)
    stopwatch.on_collection("stop", {})
    pass_time(clock, 0.004, 0.004)
    stopwatch.enter("")
    ((data, compute, host, collected, whole),) = causes(stopwatch.step())
    assert (data, compute, host) == (pytest.approx(0.010), pytest.approx(0.004), pytest.approx(0.005))
    assert collected == pytest.approx(0.030)
    assert whole == pytest.approx(0.049)


def test_real_collection_is_measured_and_other_threads_are_not():
    stopwatch = Stopwatch(on_gpu=False)
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


def test_with_collectives_in_the_forward_pass_only_processor_time_counts(clock, stopwatch):
    stopwatch.enter("data")
    pass_time(clock, 0.010, 0.001, ready=0.003)
    stopwatch.enter("forward")
    pass_time(clock, 0.500, 0.020)
    stopwatch.enter("")
    ((data, compute, host, _, _),) = causes(stopwatch.step(), has_forward_collectives=True)
    assert (data, compute, host) == (pytest.approx(0.007), pytest.approx(0.020), pytest.approx(0.003))


def test_on_a_gpu_the_device_measures_computing():
    """The device computes for 100 ms in the forward pass, 5 ms of which it waits for the host."""
    times = StepTimes((0.040, 0.025, 0.3, 0.1), (0.01, 0.020, 0.01, 0.01), (0.0, 0.0, 0.0, 0.0), 0.002, (0.030, 0.100))
    ((data, compute, host, collected, whole),) = seconds_by_cause(
        [times], on_gpu=True, has_forward_collectives=False
    ).tolist()
    assert (data, host, collected) == (pytest.approx(0.030), pytest.approx(0.005), pytest.approx(0.002))
    assert compute == pytest.approx(module.BACKWARD * 0.100 - 0.005 - 0.002)
    assert whole == pytest.approx(0.467)


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
