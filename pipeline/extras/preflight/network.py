"""Measure the network between workers: an all-reduce over all workers, and messages between pairs.

In:  the process group, and the node of each worker
Out: {"latency_s": 0.0002, "bytes": 16777216, "seconds": 0.031, "pairs": [{"ranks": [0, 1], …}, …], …}

1. Time an all-reduce of one number, and then of increasing sizes, until one takes long enough to measure.
2. Send messages back and forth between pairs of workers; disjoint pairs run at the same time. With few workers, all
   pairs are measured. With many workers, only two kinds of pairs are measured: neighbours in the ring that collectives
   use, and the first workers of nodes at distances of 1, 2, 4, … nodes.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

MAX_FOR_ALL_PAIRS = 8  # workers; with more, only some pairs are measured
FIRST_BYTES = 2**20  # size of the first large all-reduce
LONG_ENOUGH_S = 0.1  # duration of an all-reduce that is sufficient to measure the rate
LATENCY_ROUNDS = 20
SLOW_ROUND_S = 0.05  # an all-reduce of one number that takes longer is repeated fewer times
MESSAGE_S = 0.02  # target duration of a message between two workers, at the rate of the all-reduce
MIN_MESSAGE = 2**16  # size of the smallest message in bytes
LARGEST_MESSAGE = 2**26


class PairTime(TypedDict):
    """One-way message latencies between two workers."""

    ranks: list[int]
    latency_s: float
    seconds: float  # for a message of `message_bytes`


class Network(TypedDict):
    """Network measurements between the workers, in JSON-serialisable form."""

    latency_s: float  # time of an all-reduce of one number
    bytes: int  # size of the largest all-reduce
    seconds: float  # time of the largest all-reduce
    message_bytes: int
    pairs: list[PairTime]
    all_pairs: bool


def measure(device: torch.device, nodes: Sequence[str], largest_bytes: int) -> Network:
    """Collective: measure the network between all workers.

    `nodes` is the node of each rank, and `largest_bytes` limits the size of an all-reduce.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()

    # 1. The minimum time of an all-reduce of one number. The first call opens connections.
    number = torch.zeros(1, device=device)
    slowest_seconds(dist.all_reduce, number)
    latency_s = slowest_seconds(dist.all_reduce, number)
    rounds = LATENCY_ROUNDS
    if latency_s >= SLOW_ROUND_S:
        rounds = 2
    for _ in range(rounds):
        latency_s = min(latency_s, slowest_seconds(dist.all_reduce, number))

    # 2. The faster of two all-reduces, with increasing sizes until they take long enough.
    size = min(FIRST_BYTES, largest_bytes)
    while True:
        numbers = torch.zeros(size // 4, device=device)
        seconds = min(slowest_seconds(dist.all_reduce, numbers), slowest_seconds(dist.all_reduce, numbers))
        if seconds > LONG_ENOUGH_S or size == largest_bytes:
            break
        size = min(4 * size, largest_bytes)

    # 3. Messages between pairs. All workers have the same times, so all choose the same message size.
    message_bytes = int(size / seconds * MESSAGE_S)
    message_bytes = min(max(message_bytes, MIN_MESSAGE), LARGEST_MESSAGE)
    large = torch.zeros(message_bytes // 4, device=device)
    pairs = pairs_to_measure(nodes)
    times_here: list[PairTime] = []  # for the pairs in which this worker has the lower rank
    for pairs_at_once in rounds_of(pairs):
        dist.barrier()
        for low, high in pairs_at_once:
            if rank not in (low, high):
                continue
            begins = rank == low
            peer = low
            if begins:
                peer = high
            round_trip_seconds(number, peer, begins)  # opens the connection
            pair_latency_s = math.inf
            for _ in range(3):
                pair_latency_s = min(pair_latency_s, round_trip_seconds(number, peer, begins))
            pair_s = math.inf
            for _ in range(2):
                pair_s = min(pair_s, round_trip_seconds(large, peer, begins))
            if begins:
                times_here.append({"ranks": [low, high], "latency_s": pair_latency_s / 2, "seconds": pair_s / 2})
    times: list[list[PairTime]] = [times_here] * world
    dist.all_gather_object(times, times_here)
    return {
        "latency_s": latency_s,
        "bytes": size,
        "seconds": seconds,
        "message_bytes": message_bytes,
        "pairs": list(chain.from_iterable(times)),
        "all_pairs": len(pairs) == world * (world - 1) // 2,
    }


def slowest_seconds(communicate: Callable[[Tensor], object], numbers: Tensor) -> float:
    """Collective: time a call on all workers; return the longest duration in seconds, on all workers."""
    # Without the barrier, the time would include the delay of the last worker.
    dist.barrier()
    began = time.monotonic()
    communicate(numbers)
    # GPU calls return early: reading an element waits for the result.
    float(numbers[0])
    seconds = torch.tensor([time.monotonic() - began], device=numbers.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds[0])


def pairs_to_measure(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure, lower rank first; `nodes` lists the node of each rank."""
    world = len(nodes)
    if world <= MAX_FOR_ALL_PAIRS:
        return list(combinations(range(world), 2))
    # Neighbours in the ring, and the first workers of nodes at distances of 1, 2, 4, … nodes.
    both_ways = set()
    for rank in range(world):
        both_ways.add((rank, (rank + 1) % world))
    first_of_node: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        first_of_node.setdefault(node, rank)
    firsts = list(first_of_node.values())
    distance = 1
    while distance < len(firsts):
        for number, rank in enumerate(firsts):
            both_ways.add((rank, firsts[(number + distance) % len(firsts)]))
        distance *= 2
    pairs = set()
    for pair in both_ways:
        pairs.add((min(pair), max(pair)))
    return sorted(pairs)


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Schedule the pairs in rounds, such that each worker is in at most one pair per round."""
    rounds: list[list[tuple[int, int]]] = []
    waiting = list(pairs)
    while waiting:
        busy: set[int] = set()
        chosen = []
        postponed = []
        for pair in waiting:
            if busy.isdisjoint(pair):
                busy.update(pair)
                chosen.append(pair)
            else:
                postponed.append(pair)
        rounds.append(chosen)
        waiting = postponed
    return rounds


def round_trip_seconds(message: Tensor, peer: int, begins: bool) -> float:
    """Exchange a message with a worker (send first if `begins`), and return the round-trip time in seconds."""
    began = time.monotonic()
    if begins:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, peer)
        dist.send(message, peer)
    float(message[0])
    return time.monotonic() - began
