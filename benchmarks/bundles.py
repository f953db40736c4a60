"""Measure the cost of large placement groups for Ray's head node and the driver, on simulated resources.

    nice -n 5 .venv/bin/python -m benchmarks.bundles 64 512 2048 8000
    nice -n 5 .venv/bin/python -m benchmarks.bundles 64 512 2048 8000 --bundle 1      # as if no node had room for two

Starts a Ray head on this machine that claims one CPU for each worker of the largest group. Then it requests placement
groups of the given sizes, one after another, with the code of a campaign (RayNodes), in bundles of eight workers like
nodes with room for eight each. Each row shows the seconds until Ray has placed the group, the time of the driver's
status request (once per second), the seconds until the group is removed, the driver's CPU time for a round of
heartbeats (one per bundle, from four actors), and the memory of Ray's processes and of this one. All bundles are on one
node; on a cluster, the time of `status` also grows with the number of nodes.
"""

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import wait
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table

from jobs.cluster.agent import NodeReport, WorkerState
from jobs.cluster.ray_agent import call_actor
from jobs.cluster.ray_nodes import RayNodes
from jobs.cluster.ray_places import bundle_sizes
from jobs.cluster_config import ClusterConfig
from pipeline.monitoring.watchdog import PhaseReport

REPEATS = 5
ACTORS = 4


def memory_mib() -> str:
    """Describe the private memory of Ray's processes and of this one."""
    sizes = [f"driver {psutil.Process().memory_full_info().uss / 2**20:.0f}"]
    for process in psutil.Process().children(recursive=True):
        if process.name() in ("gcs_server", "raylet"):
            sizes.append(f"{process.name()} {process.memory_full_info().uss / 2**20:.0f}")
    return ", ".join(sizes)


class Answerer:
    """Actor that replaces the agents of a quarter of the nodes."""

    def poll(self, wait_s: float) -> NodeReport:
        """Respond like an agent with eight workers."""
        time.sleep(wait_s)
        place = PhaseReport(812, "reduce", 1200, "")
        return NodeReport(1, [WorkerState(rank, 4711, phase=place) for rank in range(8)])


def heartbeat_cpu_ms(actors: list[Any], nodes: int) -> float:
    """Return the driver's CPU time for a round of polls, one per node; each gets a response within a second."""
    began = time.process_time()
    answers = [call_actor(actors[node % len(actors)], "poll", 1.0) for node in range(nodes)]
    wait(answers)
    return 1000 * (time.process_time() - began)


def main() -> int:
    """Print a row for each number of bundles."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bundles", description=__doc__)
    parser.add_argument("workers", type=int, nargs="+")
    parser.add_argument("--bundle", type=int, default=8, help="workers per node")
    words = parser.parse_args()
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray.init(num_cpus=max(words.workers), include_dashboard=False, log_to_driver=False)
    at_once = max(words.workers) // words.bundle // ACTORS + 1
    remote: Any = ray.remote(Answerer).options(num_cpus=0, max_concurrency=at_once)
    actors = [remote.remote() for _ in range(ACTORS)]
    heartbeat_cpu_ms(actors, ACTORS)
    print("workers bundles  placed s  status ms     removed s  round, CPU ms   memory MiB", flush=True)
    for number in words.workers:
        nodes = RayNodes(ClusterConfig(workers=number, backend="ray"), is_embedded=False)
        sizes = bundle_sizes(number, [words.bundle] * (number // words.bundle))
        nodes.sizes = lambda workers, there, sizes=sizes: sizes  # type: ignore[method-assign]
        began = time.perf_counter()
        nodes.reserve(f"/runs/{number}", [number], print, lambda: None)
        placed_s = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(REPEATS):
            nodes.status()
        status_ms = 1000 * (time.perf_counter() - began) / REPEATS
        round_ms = statistics.median([heartbeat_cpu_ms(actors, len(sizes)) for _ in range(REPEATS)])
        memory = memory_mib()
        began = time.perf_counter()
        nodes.release()
        while any(row["state"] == "CREATED" for row in placement_group_table().values()):
            time.sleep(0.01)
        removed_s = time.perf_counter() - began
        row = f"{number:7} {len(sizes):7} {placed_s:9.2f} {status_ms:10.1f} {removed_s:13.2f} {round_ms:14.0f}"
        print(f"{row}   {memory}", flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
