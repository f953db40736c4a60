"""Compute how many workers fit on each node of a Ray cluster, and which campaigns hold the remaining resources.

The resources of one worker are called a share. A share is never split across nodes.

>>> room_for({"CPU": 2}, {"n1": {"CPU": 5.0}, "n2": {"CPU": 1.0}})
2
>>> missing(2, {"CPU": 4}, open_to_us={"n1": {"CPU": 6.0}}, cluster=ClusterState.now())
room for 1 of 2 workers with 4 CPUs each; free: 6 CPUs on n1; held: 8 CPUs by /runs/photographs

Only public interfaces of Ray are used: its list of nodes, its table of placement groups, and the status printed by
`ray status`, which sends one request to the head.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.placement_group import placement_group_table

from data.checks import few

OWNER = "patchline "  # prefix of our placement groups' names; the run and a random suffix follow
DRAINING = "DRAINING"  # Ray's status of a node about to leave the cluster

Resources = Mapping[str, float]  # Ray's resource name → amount


@dataclass(frozen=True)
class ClusterState:
    """The total and free resources of a cluster's live nodes, by node id."""

    total: dict[str, dict[str, float]]
    free: dict[str, dict[str, float]]
    draining: set[str]  # ids of draining nodes

    @classmethod
    def now(cls, without: Set[str] = frozenset()) -> "ClusterState":
        """Query the head node for the current state, excluding the nodes in `without`. Thread-safe."""
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        total: dict[str, dict[str, float]] = {}
        free: dict[str, dict[str, float]] = {}
        unreserved: dict[str, dict[str, float]] = {}
        draining: set[str] = set()
        for node in [*status.active_nodes, *status.idle_nodes]:
            if node.node_id is None or node.node_id in without:
                continue
            total[node.node_id] = node.total_resources()
            free[node.node_id] = node.available_resources()
            unreserved[node.node_id] = node.total_resources()  # reservations are subtracted below
            if node.node_status == DRAINING:
                draining.add(node.node_id)
        # Ray reports free resources up to a second late, but lists placement groups at once.
        for row in placement_group_table().values():
            if row["state"] == "CREATED":
                for bundle, node_id in row["bundles_to_node_id"].items():
                    for name, amount in row["bundles"][bundle].items():
                        if name in unreserved.get(node_id, {}):
                            unreserved[node_id][name] -= amount
        for node_id, resources in unreserved.items():
            for name, amount in resources.items():
                free[node_id][name] = min(free[node_id].get(name, 0.0), amount)
        return cls(total, free, draining)

    @property
    def staying(self) -> dict[str, dict[str, float]]:
        """Return the free resources by node, excluding draining nodes."""
        return {node: resources for node, resources in self.free.items() if node not in self.draining}


def room_for(share: Mapping[str, int], nodes: Mapping[str, Resources]) -> int:
    """Return how many workers fit on the nodes; one worker's resources are never split across nodes."""
    workers = 0
    for resources in nodes.values():
        workers += min(int(resources.get(name, 0) // count) for name, count in share.items())
    return workers


def missing(workers: int, share: Mapping[str, int], open_to_us: Mapping[str, Resources], cluster: ClusterState) -> str:
    """Describe why workers must wait: how many fit, what is free on each node, and which campaigns hold the rest."""
    parts = [f"room for {min(room_for(share, open_to_us), workers)} of {workers} workers with {in_words(share)} each"]
    room_when_empty = room_for(share, cluster.total)
    if room_when_empty < workers:
        parts.append(f"the whole cluster has room for only {room_when_empty}")

    names = {}
    for row in ray.nodes():
        names[row["NodeID"]] = row["NodeManagerHostname"]
    free = []
    for node, resources in cluster.staying.items():
        available = {}
        for name in share:
            if resources.get(name, 0) >= 1:
                available[name] = int(resources[name])
        if available:
            free.append(f"{in_words(available)} on {names.get(node, node[:8])}")

    # The name of a placement group contains the run that holds it.
    amounts_held: dict[str, Counter[str]] = {}
    for row in placement_group_table().values():
        if row["state"] == "CREATED" and row["name"].startswith(OWNER):
            run, _, _ = row["name"].removeprefix(OWNER).rpartition(" ")
            amounts = amounts_held.setdefault(run, Counter())
            for bundle in row["bundles"].values():
                for name in ("CPU", "GPU"):
                    amounts[name] += int(bundle.get(name, 0))
    held = []
    for run, amounts in amounts_held.items():
        held.append(f"{in_words(+amounts)} by {run}")  # unary + removes zero amounts

    for title, texts in (("free", free), ("held", held)):
        if texts:
            parts.append(f"{title}: {few(texts)}")
    return "; ".join(parts)


def in_words(amounts: Mapping[str, float]) -> str:
    """Return resource amounts as text, such as "4 CPUs and 1 GPUs"."""
    return " and ".join(f"{count:g} {name}s" for name, count in amounts.items())
