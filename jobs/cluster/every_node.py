"""A function run once on each of several nodes of a Ray cluster, beside whatever works there."""

from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def run_on_nodes(
    function: Callable[..., Any], *arguments: object, without: Collection[str], timeout_s: float
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Return node ids with the function's values there, and by the name of a node why it gave none.

    All nodes that are alive are asked, but those whose ids are in `without`. Nothing is reserved for it: a node that
    another campaign has filled is asked as well.
    """
    there: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in without:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked.append((node, there.options(scheduling_strategy=pinned).remote(*arguments)))
    # All wait together: a node that does not answer costs the others nothing.
    ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=timeout_s)
    values = []
    silent = {}
    for node, answer in asked:
        try:
            values.append((node["NodeID"], ray.get(answer, timeout=0)))
        except RayError as error:  # a time-out too
            silent[node["NodeManagerHostname"]] = str(error).splitlines()[0] or f"no answer in {timeout_s:g} s"
    return values, silent
