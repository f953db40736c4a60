"""Where workers are placed: on this machine (nodes.py), or on the nodes of a Ray cluster (ray_nodes.py).

Ray takes seconds to import, so only a cluster that needs it imports it.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.nodes import ThisMachine
from jobs.cluster.ray import connect
from jobs.cluster_config import ClusterConfig

if TYPE_CHECKING:
    from jobs.cluster.ray_nodes import RayNodes

Nodes: TypeAlias = "ThisMachine | RayNodes"

_machines: dict[bool, ThisMachine] = {}  # of this process: with or without GPUs


def nodes_of(cluster: ClusterConfig) -> Nodes:
    """Return the nodes on which workers of this config start; a Ray cluster is joined, or started.

    What is kept warm there serves every command of this process.
    """
    if cluster.backend == "ray":
        # First: Ray reads some variables when it is imported, which `connect` has set then.
        info = connect(cluster)
        from jobs.cluster import ray_nodes

        return ray_nodes.ray_nodes_of(cluster, is_embedded=info.embedded)
    has_gpus = cluster.gpus_per_worker > 0
    if has_gpus not in _machines:
        _machines[has_gpus] = ThisMachine(cluster)
    machine = _machines[has_gpus]
    machine.cluster = cluster
    return machine


def start_early(cluster: ClusterConfig) -> None:
    """Begin what workers need and what takes seconds: the fork server, or the processes of an embedded Ray cluster."""
    if cluster.backend == "processes":
        nodes_of(cluster).warm_up()
    # A cluster that is joined is not touched before it is time.
    elif embedded.is_wanted() and not embedded.is_started():
        # The same failure comes again when the cluster is needed, and is reported then.
        with suppress(OSError, ClusterError):
            embedded.start(cluster)
