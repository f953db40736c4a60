"""Measures in which seconds of a step a worker worked, and in which it waited for others.

A step is cut at the phases that the loop enters: data, forward, backward and reduce. The last two contain collectives,
in which a worker waits for the slowest.

1. compute: processor time of the forward pass, backward pass and update. On a GPU the time between two events on the
   device before and after the forward pass, times BACKWARD for the backward pass, which contains collectives.
2. host, in two parts. The kernel counts the seconds in which the thread was ready, but another program had its
   processor or its quota was used up: these are known for every phase. If a signal stops the process, no counter
   shows it. Such stops are measured in the forward pass, where a worker waits for nothing: the seconds in which its
   thread neither ran nor was ready. The other phases lose the same share, on average over the steps of a part.
3. data: the other seconds in the phase `data`, in which a worker waits only for its own files and decoding processes.
4. gc: processor time in which Python collected garbage.

If the kernel does not count the seconds in which a thread is ready, they are part of those of step 2 that are measured
in the forward pass. At ZeRO 3 the forward pass contains collectives, too, so that only the kernel's count remains; on a
GPU the seconds of computing are then the same for all workers.

In:  perf_counter 4 ms apart at `forward` and `backward`, of which the thread ran 3 ms; 9 ms of processor time after it
Out: compute 12 ms, host 1 ms + 9 ms · 1/3 = 4 ms
"""

import gc
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PHASES = ("data", "forward", "backward", "reduce")
BACKWARD = 3.0  # a backward pass takes twice as long as its forward pass
LARGEST_SHARE = 0.95  # of the time that a thread is stopped
SCHEDULER = "/proc/thread-self/schedstat"  # nanoseconds of running and of waiting for a processor
# Places in Linux's struct tcp_info of the smoothed round-trip time in µs, and of the acknowledged bytes.
ROUND_TRIP = 68
ACKNOWLEDGED = 120
TCP_INFO_BYTES = 128


class StepTimes(NamedTuple):
    """The seconds of a step in each phase, without garbage collection, and on the device."""

    wall: tuple[float, ...]
    ran: tuple[float, ...]  # processor time of the thread
    ready: tuple[float, ...]  # not running because the thread had no processor; 0 if unknown
    gc: float
    device: tuple[float, float]  # before and in the forward passes


class Stopwatch:
    """Adds up the seconds of the current step; the loop's phases call `enter` in the thread that trains."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.events: list[tuple[str, Any]] | None = [] if on_gpu else None  # of the step, on the device
        self.thread = threading.get_ident()
        self.phase = ""
        self.since = 0.0
        self.ran_since = 0.0
        self.ready_since = 0.0
        self.collected = 0.0  # seconds of garbage collection since the start
        self.collecting_since = 0.0
        self.collected_before = 0.0  # the same at the beginning of the phase
        self.scheduler = scheduler_file()
        self.clear()
        gc.callbacks.append(self.on_collection)

    def close(self) -> None:
        """Stop counting garbage collections."""
        gc.callbacks.remove(self.on_collection)
        if self.scheduler >= 0:
            os.close(self.scheduler)
            self.scheduler = -1

    def clear(self) -> None:
        """Begin a step."""
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.ran = dict.fromkeys(PHASES, 0.0)
        self.ready = dict.fromkeys(PHASES, 0.0)
        self.gc = 0.0
        if self.events is not None:
            self.events.clear()

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Measure a garbage collection of the thread that trains; called by Python before and after."""
        if threading.get_ident() != self.thread:
            return
        if phase == "start":
            self.collecting_since = thread_time()
        else:
            self.collected += thread_time() - self.collecting_since

    def enter(self, phase: str) -> None:
        """Count the time since the last call for the last phase."""
        now = perf_counter()
        ran = thread_time()
        ready = self.ready_s()
        last = self.phase
        if last in self.wall:
            collected = self.collected - self.collected_before
            self.wall[last] += now - self.since - collected
            self.ran[last] += ran - self.ran_since - collected
            self.ready[last] += ready - self.ready_since
            self.gc += collected
        self.phase = phase
        self.since = now
        self.ran_since = ran
        self.ready_since = ready
        self.collected_before = self.collected
        if self.events is not None:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((phase, event))

    def ready_s(self) -> float:
        """Return the seconds in which the thread was ready but did not run, since its start; 0 if unknown."""
        if self.scheduler < 0:
            return 0.0
        return int(os.pread(self.scheduler, 64, 0).split()[1]) / 1e9

    def step(self) -> StepTimes:
        """Return the seconds of the finished step; begin the next step."""
        device = (0.0, 0.0) if self.events is None else device_seconds(self.events)
        wall, ran, ready = (tuple(seconds.values()) for seconds in (self.wall, self.ran, self.ready))
        times = StepTimes(wall, ran, ready, self.gc, device)
        self.clear()
        return times


def scheduler_file() -> int:
    """Open the kernel's count of a thread's seconds, for the calling thread; return -1 if the kernel has none."""
    with suppress(OSError, ValueError, IndexError):
        handle = os.open(SCHEDULER, os.O_RDONLY)
        # A kernel that does not count returns zeros.
        if int(os.pread(handle, 64, 0).split()[0]) > 0:
            return handle
        os.close(handle)
    return -1


def seconds_by_cause(steps: Sequence[StepTimes], *, on_gpu: bool, has_forward_collectives: bool) -> NDArray[np.float32]:
    """Return the seconds (S, 5) of each step of a part: data, compute, host, gc, and the whole step."""
    wall = np.array([step.wall for step in steps])  # each (S, phases)
    ran = np.array([step.ran for step in steps])
    ready = np.array([step.ready for step in steps])
    collected = np.array([step.gc for step in steps])
    whole = wall.sum(-1) + collected
    after_forward = ran[:, 2:].sum(-1)
    compute = ran[:, 1] + after_forward
    if on_gpu:
        device = np.array([step.device for step in steps])
        data, forward = device[:, 0], device[:, 1]
        # The device's time contains what the host lost, as far as the device had to wait for it.
        host = np.clip(wall[:, 1] - ran[:, 1], 0.0, forward)
        collected = np.minimum(collected, data + forward - host)
        compute = np.maximum(BACKWARD * forward - host - collected, 0.0)
    else:
        host = ready.sum(-1)
        data = np.maximum(wall[:, 0] - ready[:, 0], ran[:, 0])
        if not has_forward_collectives:
            available = np.maximum(wall[:, 1] - ready[:, 1], 0.0)
            stopped = np.maximum(available - ran[:, 1], 0.0)
            share = min(stopped.sum() / max(available.sum(), 1e-9), LARGEST_SHARE)
            stopped_in_data = np.minimum(share * data, data - ran[:, 0])
            host += stopped + stopped_in_data + after_forward * share / (1 - share)
            data -= stopped_in_data
    return np.stack([data, compute, host, collected, whole], -1, dtype=np.float32)


def device_seconds(events: list[tuple[str, Any]]) -> tuple[float, float]:
    """Return the device's seconds before and in the forward passes of a step whose kernels have all finished."""
    data = forward = 0.0
    last = None
    for phase, event in events:
        if phase == "forward" and last is not None:
            data += last.elapsed_time(event)
        elif phase == "backward" and last is not None:
            forward += last.elapsed_time(event)
        elif phase == "data" and last is not None:
            continue  # the device has been waiting since the last micro-batch
        last = event
    return data / 1000, forward / 1000


class RoundTrips:
    """Reads from the kernel how long this process's packets to the other workers take there and back."""

    def __init__(self, peers: Collection[str], excluded_port: int) -> None:
        """Watch the connections to these addresses, except those to or from a port, which do not carry gradients."""
        self.peers = frozenset(peers)
        self.excluded_port = excluded_port
        self.acknowledged: dict[tuple[Any, Any], int] = {}  # connection → bytes at the last measurement

    def shortest_s(self) -> float:
        """Return the shortest mean round trip of all connections in use since the last call; NaN if there are none.

        The shortest, because a slow link at the other end of a connection must not count: a worker is connected to
        several others.
        """
        shortest = float("nan")
        if not self.peers:
            return shortest
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                number = int(name)
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                connection = socket.socket(fileno=number)
                try:
                    round_trip = self.measure(connection)
                finally:
                    connection.detach()  # it belongs to others
                if round_trip is not None and not round_trip >= shortest:
                    shortest = round_trip
        return shortest

    def measure(self, connection: socket.socket) -> float | None:
        """Return the mean round trip of a connection in seconds; None if it is not in use between workers."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return None
        here = connection.getsockname()
        there = connection.getpeername()
        if there[0].removeprefix("::ffff:") not in self.peers or self.excluded_port in (here[1], there[1]):
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        if len(info) < TCP_INFO_BYTES:
            return None
        (microseconds,) = struct.unpack_from("=I", info, ROUND_TRIP)
        (acknowledged,) = struct.unpack_from("=Q", info, ACKNOWLEDGED)
        before = self.acknowledged.get((here, there))
        self.acknowledged[here, there] = acknowledged
        if before is None or acknowledged == before:
            return None
        return float(microseconds) / 1e6
