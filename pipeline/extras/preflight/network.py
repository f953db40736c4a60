"""How fast the workers' links are: an all-reduce of all, and messages between pairs.

In:  the process group, and on which node each worker is
Out: {"latency_s": 0.0002, "bytes": 16777216, "seconds": 0.031, "pairs": [{"ranks": [0, 1], …}, …], …}

1. An all-reduce of one number, and then of more and more bytes, until one takes long enough to be measured.
2. A message to and fro between pairs of workers, pairs that share no worker at the same time. Of a few workers all
   pairs; of many the neighbours in the ring that collectives use, and the first workers of nodes, at distances of
   1, 2, 4, … nodes.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

MOST_FOR_ALL_PAIRS = 8  # workers, and nodes
FIRST_BYTES = 2**20  # of an all-reduce
LONG_ENOUGH_S = 0.1  # for an all-reduce to tell the rate
LATENCY_ROUNDS = 20
SLOW_ROUND_S = 0.05  # an all-reduce of one number that takes longer is not repeated as often
MESSAGE_S = 0.02  # that a message between two should take at the rate of the all-reduce
LEAST_MESSAGE = 2**16  # bytes
LARGEST_MESSAGE = 2**26


class PairTime(TypedDict):
    """How long messages took between two workers, one way."""

    ranks: list[int]
    latency_s: float
    seconds: float  # of a message of `message_bytes`


class Network(TypedDict):
    """What was measured between the workers; JSON."""

    latency_s: float  # of an all-reduce of one number
    bytes: int  # of the largest all-reduce
    seconds: float  # that it took
    message_bytes: int
    pairs: list[PairTime]
    all_pairs: bool


def measure(device: torch.device, nodes: Sequence[str], largest_bytes: int) -> Network:
    """Collective: measure the links; `nodes` names each worker's node, an all-reduce is of `largest_bytes` at most."""
    rank = dist.get_rank()
    world = dist.get_world_size()

    # 1. The least time of an all-reduce of one number. The first makes connections.
    number = torch.zeros(1, device=device)
    slowest_seconds(dist.all_reduce, number)
    latency_s = slowest_seconds(dist.all_reduce, number)
    rounds = LATENCY_ROUNDS
    if latency_s >= SLOW_ROUND_S:
        rounds = 2
    for _ in range(rounds):
        latency_s = min(latency_s, slowest_seconds(dist.all_reduce, number))

    # 2. The faster of two all-reduces of more and more bytes, until they take long enough.
    size = min(FIRST_BYTES, largest_bytes)
    while True:
        numbers = torch.zeros(size // 4, device=device)
        seconds = min(slowest_seconds(dist.all_reduce, numbers), slowest_seconds(dist.all_reduce, numbers))
        if seconds > LONG_ENOUGH_S or size == largest_bytes:
            break
        size = min(4 * size, largest_bytes)

    # 3. Messages between pairs. Every worker knows the same numbers here, so that all choose the same size.
    message_bytes = int(size / seconds * MESSAGE_S)
    message_bytes = min(max(message_bytes, LEAST_MESSAGE), LARGEST_MESSAGE)
    large = torch.zeros(message_bytes // 4, device=device)
    pairs = pairs_to_measure(nodes)
    times_here: list[PairTime] = []  # of the pairs in which this worker is the lower rank
    for pairs_at_once in rounds_of(pairs):
        dist.barrier()
        for low, high in pairs_at_once:
            if rank not in (low, high):
                continue
            begins = rank == low
            peer = low
            if begins:
                peer = high
            round_trip_seconds(number, peer, begins)  # makes the connection
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
    """Collective: return the seconds of a call on the worker where it took longest; the same on all workers."""
    # Without it the time would hold how much later the slowest worker came.
    dist.barrier()
    began = time.monotonic()
    communicate(numbers)
    # A GPU works on after the call has returned: reading an element waits for it.
    float(numbers[0])
    seconds = torch.tensor([time.monotonic() - began], device=numbers.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds[0])


def pairs_to_measure(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks, the lower one first, that are measured among workers on these nodes."""
    world = len(nodes)
    if world <= MOST_FOR_ALL_PAIRS:
        return list(combinations(range(world), 2))
    # The ring, and the first workers of nodes at distances of 1, 2, 4, … nodes.
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
    """Put the pairs into rounds, in each of which a worker is in one pair at most."""
    rounds: list[list[tuple[int, int]]] = []
    waiting = list(pairs)
    while waiting:
        busy: set[int] = set()
        chosen = []
        left = []
        for pair in waiting:
            if busy.isdisjoint(pair):
                busy.update(pair)
                chosen.append(pair)
            else:
                left.append(pair)
        rounds.append(chosen)
        waiting = left
    return rounds


def round_trip_seconds(message: Tensor, peer: int, begins: bool) -> float:
    """Send a message to a worker and get it back, or the other way round; return the seconds."""
    began = time.monotonic()
    if begins:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, peer)
        dist.send(message, peer)
    float(message[0])
    return time.monotonic() - began
