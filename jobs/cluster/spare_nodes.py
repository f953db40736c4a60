"""Runs a function on the nodes of the Ray cluster that have no worker of ours, as a task pinned to each of them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def run_on_spare_nodes(
    function: Callable[[Mapping[str, Any]], Any], task: Mapping[str, Any], used: Collection[str], timeout_s: float
) -> tuple[list[Any], dict[str, str]]:
    """Return the function's values on all nodes but those called as in `used`, and why a node gave none, by its name.

    Nothing is reserved for it: a node that another campaign has filled is asked as well.
    """
    there = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerHostname"] not in used:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeManagerHostname"]] = there.options(scheduling_strategy=pinned).remote(task)
    values = []
    silent = {}
    for name, value in asked.items():
        try:
            values.append(ray.get(value, timeout=timeout_s))
        except RayError as error:  # a time-out too
            silent[name] = str(error).splitlines()[0] or f"no answer in {timeout_s:g} s"
    return values, silent
