"""What room a Ray cluster has for workers: where, who holds the rest, and how that is said.

Workers are counted in shares: what one of them needs lies on one node.

>>> room_for({"CPU": 2}, {"n1": {"CPU": 5.0}, "n2": {"CPU": 1.0}})
2
>>> missing(2, {"CPU": 4}, room=1)
room for 1 of 2 workers of 4 CPUs; free: 6 CPUs on n1; held: 8 CPUs by /runs/photographs
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import placement_group_table

from data.errors import ClusterError
from jobs.cluster_config import ClusterConfig

OWNER = "patchline "  # how the names of our placement groups begin; the run follows, and what makes the name its own
LONGEST_LIST = 4  # nodes or campaigns that a word names

Resources = Mapping[str, float]  # amount by Ray's name of the resource


def share_of_worker(cluster: ClusterConfig) -> dict[str, int]:
    """Return what Ray reserves for one worker, by Ray's name of the resource; a share of nothing is left out."""
    share = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        share["GPU"] = cluster.gpus_per_worker
    return share


def room_for(share: Mapping[str, int], nodes: Mapping[str, Resources]) -> int:
    """Return how many workers the nodes can hold; what is left on two nodes does not make a place for one worker.

    >>> room_for({"CPU": 2}, {"n1": {"CPU": 5.0}, "n2": {"CPU": 1.0}})
    2
    """
    workers = 0
    for resources in nodes.values():
        workers += min(int(resources.get(name, 0) // count) for name, count in share.items())
    return workers


def refuse_what_never_fits(cluster: ClusterConfig, is_embedded: bool) -> None:
    """Raise ClusterError where an embedded cluster, which does not grow, is too small even when it is empty."""
    if not is_embedded:
        return
    share = share_of_worker(cluster)
    room = room_for(share, ray_state.total_resources_per_node())
    if room < cluster.least:
        raise too_small(f"room for {room} of {cluster.least} workers of {in_words(share)}", "this machine has no more")


def too_small(missing: str, reason: str) -> ClusterError:
    """Return the error of a cluster that has not enough places, with what to type."""
    return ClusterError(f"{missing}\n{reason}\ntype fewer cluster.workers, or RAY_ADDRESS=host:port of more machines")


# ------------------------------------------------------------------------ in Ray's tables


def draining_nodes() -> dict[str, int]:
    """Return the nodes that Ray was told will go: by id, until when in ms since 1970, or 0 where nobody said."""
    return ray_state.get_draining_nodes()


def staying(nodes: Mapping[str, Resources]) -> dict[str, dict[str, float]]:
    """Return the resources of the nodes that are not about to leave."""
    leaving = draining_nodes()
    return {node: dict(resources) for node, resources in nodes.items() if node not in leaving}


def held_by(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what a placement group holds on each node, from its row in Ray's table."""
    held: dict[str, dict[str, float]] = {}
    for bundle, node in row["bundles_to_node_id"].items():
        amounts = held.setdefault(node, {})
        for name, amount in row["bundles"][bundle].items():
            amounts[name] = amounts.get(name, 0) + amount
    return held


def add_to(free: dict[str, dict[str, float]], held: Mapping[str, Resources]) -> None:
    """Add what is held on nodes to what is free there; a node that is not there has nothing to give."""
    for node, resources in held.items():
        if node in free:
            for name, amount in resources.items():
                free[node][name] = free[node].get(name, 0) + amount


# ------------------------------------------------------------------------ in words


def missing(workers: int, share: Mapping[str, int], room: int) -> str:
    """Say that there is room for `room` of so many workers, what is free where, and which campaigns hold the rest."""
    parts = [f"room for {min(room, workers)} of {workers} workers of {in_words(share)}"]
    room_when_empty = room_for(share, ray_state.total_resources_per_node())
    if room_when_empty < workers:
        parts.append(f"even when the cluster is empty it has room for {room_when_empty}")

    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    free_somewhere = []
    for node, resources in staying(ray_state.available_resources_per_node()).items():
        left = {name: int(resources.get(name, 0)) for name in share if resources.get(name, 0) >= 1}
        if left:
            free_somewhere.append(f"{in_words(left)} on {names.get(node, node[:8])}")
    if free_somewhere:
        parts.append(f"free: {_some(free_somewhere)}")
    held = [f"{in_words(amounts)} by {run}" for run, amounts in _held_by_campaigns().items()]
    if held:
        parts.append(f"held: {_some(held)}")
    return "; ".join(parts)


def in_words(amounts: Mapping[str, float]) -> str:
    """Return "4 CPUs and 1 GPUs"."""
    return " and ".join(f"{count:g} {name}s" for name, count in amounts.items())


def _held_by_campaigns() -> dict[str, Counter[str]]:
    """Return what the placement groups of campaigns hold, by the run directory that their names tell."""
    held: dict[str, Counter[str]] = {}
    for row in placement_group_table().values():
        if row["state"] == "CREATED" and row["name"].startswith(OWNER):
            run, _, _ = row["name"].removeprefix(OWNER).rpartition(" ")
            amounts = held.setdefault(run, Counter())
            for bundle in row["bundles"].values():
                amounts.update({name: int(count) for name, count in bundle.items() if name in ("CPU", "GPU")})
    return held


def _some(texts: list[str]) -> str:
    """Join the first few texts, and count the rest."""
    shown = ", ".join(texts[:LONGEST_LIST])
    if len(texts) > LONGEST_LIST:
        shown += f" and {len(texts) - LONGEST_LIST} more"
    return shown
