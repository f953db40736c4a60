"""Measures in which seconds of a step a worker worked, and in which it waited for others.

A step is cut at the phases that the loop enters: data, forward, backward and reduce. The last two contain collectives,
in which a worker waits for the slowest, so only its processor time counts there.

1. data: seconds in the phase `data`, in which a worker waits only for its own files and decoding processes.
2. compute: processor time of the forward pass, backward pass and update. On a GPU the time between two events on the
   device before and after the forward pass, times BACKWARD for the backward pass, which contains collectives.
3. host: seconds of the forward pass in which the worker's thread did not run: another program had its processor, a
   signal had stopped it, or it had used up its quota. The other phases lose the same share.
4. gc: seconds in which Python collected garbage.

At ZeRO 3 the forward pass contains collectives, too. Then the kernel's count of the seconds in which the thread was
ready but did not run is the time lost on the host, and on a GPU the seconds of computing are the same for all workers.

In:  perf_counter 4 ms apart at `forward` and `backward`, of which the thread ran 3 ms; 9 ms of processor time after it
Out: compute 12 ms, host 1 ms + 9 ms · 1/3 = 4 ms
"""

import gc
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any

PHASES = ("data", "forward", "backward", "reduce")
BACKWARD = 3.0  # a backward pass takes twice as long as its forward pass
LARGEST_SHARE = 0.95  # of the time that a thread did not run
SCHEDULER = "/proc/thread-self/schedstat"  # nanoseconds of running and of waiting for a processor
# Places in Linux's struct tcp_info of the smoothed round-trip time in µs, and of the acknowledged bytes.
ROUND_TRIP = 68
ACKNOWLEDGED = 120
TCP_INFO_BYTES = 128


class Stopwatch:
    """Adds up the seconds of the current step; the loop's phases call `enter` in the thread that trains."""

    def __init__(self, *, on_gpu: bool, has_forward_collectives: bool) -> None:
        self.events: list[tuple[str, Any]] | None = [] if on_gpu else None  # of the step, on the device
        self.has_forward_collectives = has_forward_collectives
        self.thread = threading.get_ident()
        self.phase = ""
        self.since = 0.0
        self.ran_since = 0.0
        self.collected = 0.0  # seconds of garbage collection since the start
        self.collecting_since = 0.0
        self.collected_before = 0.0  # the same at the beginning of the phase
        self.scheduler = -1
        if has_forward_collectives:
            with suppress(OSError):
                self.scheduler = os.open(SCHEDULER, os.O_RDONLY)
        self.ready_before = self.ready_s()
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
        self.wall = dict.fromkeys(PHASES, 0.0)  # without garbage collection
        self.ran = dict.fromkeys(PHASES, 0.0)  # processor time of the thread, without garbage collection
        self.gc = 0.0
        if self.events is not None:
            self.events.clear()

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Measure a garbage collection of the thread that trains; called by Python before and after."""
        if threading.get_ident() != self.thread:
            return
        if phase == "start":
            self.collecting_since = perf_counter()
        else:
            self.collected += perf_counter() - self.collecting_since

    def enter(self, phase: str) -> None:
        """Count the time since the last call for the last phase."""
        now = perf_counter()
        ran = thread_time()
        collected = self.collected - self.collected_before
        if self.phase in self.wall:
            self.wall[self.phase] += now - self.since - collected
            self.ran[self.phase] += ran - self.ran_since - collected
            self.gc += collected
        self.phase = phase
        self.since = now
        self.ran_since = ran
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

    def step(self) -> tuple[float, float, float, float, float]:
        """Return the seconds of the finished step: data, compute, host, gc, and the whole step; begin the next step."""
        wall = self.wall
        ran = self.ran
        whole = sum(wall.values()) + self.gc
        after_forward = ran["backward"] + ran["reduce"]
        if self.has_forward_collectives:
            ready = self.ready_s()
            host = max(ready - self.ready_before, 0.0)
            self.ready_before = ready
            data = max(wall["data"] - host, ran["data"])
            compute = ran["forward"] + after_forward
        else:
            lost = max(wall["forward"] - ran["forward"], 0.0)
            share = min(lost / max(wall["forward"], 1e-9), LARGEST_SHARE)
            per_second = share / (1 - share)  # lost for each second of running
            lost_in_data = min(ran["data"] * per_second, max(wall["data"] - ran["data"], 0.0))
            host = lost + lost_in_data + after_forward * per_second
            data = wall["data"] - lost_in_data
            compute = ran["forward"] + after_forward
        collected = self.gc
        if self.events is not None:
            data, forward = device_seconds(self.events)
            # The device's time contains what the host lost, as far as the device had to wait for it.
            host = min(max(wall["forward"] - ran["forward"], 0.0), forward)
            collected = min(collected, data + forward - host)
            compute = max(BACKWARD * forward - host - collected, 0.0)
        self.clear()
        return data, compute, host, collected, whole


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
