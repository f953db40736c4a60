"""What a large placement group costs Ray's head and the driver, with resources that nobody has.

    nice -n 5 .venv/bin/python -m benchmarks.bundles 8 64 256 1000

Starts a Ray head on this machine that counts eight CPUs for each bundle of the largest group, and asks for one group of
so many bundles after the other, through what a campaign asks with (RayNodes). A row each: the seconds until Ray has
placed it, what the driver asks once a second (`status`) and before an attempt (`nodes_held`), the seconds until it is
given back, and the memory of Ray's processes and of this one. All bundles lie on one node: on a cluster `status` grows
with the nodes too.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import psutil
import ray
from ray.util.placement_group import placement_group_table

from jobs.cluster.ray_nodes import RayNodes
from jobs.cluster_config import ClusterConfig

CPUS = 8  # of a bundle
REPEATS = 5


def memory_mib(words: tuple[str, ...]) -> dict[str, float]:
    """Return the private memory of Ray's processes with these names, and of this one."""
    memory = {"driver": psutil.Process().memory_full_info().uss / 2**20}
    for process in psutil.Process().children(recursive=True):
        if process.name() in words:
            memory[process.name()] = process.memory_full_info().uss / 2**20
    return memory


def median_ms(call: Callable[[], object]) -> float:
    """Return the median time of a few calls."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def main() -> int:
    """Print a row for each number of bundles."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bundles", description=__doc__)
    parser.add_argument("bundles", type=int, nargs="+")
    numbers = parser.parse_args().bundles
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray.init(num_cpus=CPUS * max(numbers), include_dashboard=False, log_to_driver=False)
    print("bundles  placed s  status ms  held ms  given back s   memory MiB", flush=True)
    for number in [0, *numbers]:
        cluster = ClusterConfig(workers=max(1, number), cpus_per_worker=CPUS, backend="ray")
        nodes = RayNodes(cluster, is_embedded=False)
        placed_s = 0.0
        if number:
            began = time.perf_counter()
            nodes.reserve(f"/runs/{number}", [number], print, lambda: None)
            placed_s = time.perf_counter() - began
        status_ms = median_ms(nodes.status)
        held_ms = median_ms(lambda nodes=nodes, number=number: nodes.nodes_held(number))  # type: ignore[misc]
        memory = memory_mib(("gcs_server", "raylet"))
        began = time.perf_counter()
        nodes.release()
        while any(row["state"] == "CREATED" for row in placement_group_table().values()):
            time.sleep(0.01)
        removed_s = time.perf_counter() - began
        sizes = ", ".join(f"{name} {size:.0f}" for name, size in sorted(memory.items()))
        print(f"{number:7} {placed_s:9.2f} {status_ms:10.1f} {held_ms:8.1f} {removed_s:13.2f}   {sizes}", flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
