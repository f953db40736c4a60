"""The agents of a driver in a Ray cluster: on each node with its workers one actor, warm over attempts and stages.

An agent belongs to the node and not to the places, which may change while the node does not. It takes no CPU of Ray's
count. jobs/cluster/ray_agent.py is the actor itself.
"""

import secrets
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from jobs.cluster.nodes import NodeAgent
from jobs.cluster.ray_agent import RayAgent, call_actor
from jobs.cluster_config import ClusterConfig

WARM_SPARES = 2  # nodes without a worker that have an agent: importing torch takes 4 s of two cores, 0.4 GB
AGENT_THREADS = 4  # of an agent: a poll, and calls during it

Places: TypeAlias = Mapping[str, Mapping[int, int]]  # by node id: how many workers in which bundle


class RayAgents:
    """The agents that this process has started, by the ids of their nodes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.run = ""
        self.actors: dict[str, Any] = {}
        self.used: Set[str] = frozenset()  # ids of the nodes on which workers were placed last
        self.actors_started = 0
        self.group_id = ""  # of the placement group that `gpu_ids` is about
        self.gpu_ids: dict[str, str] = {}  # by node: CUDA_VISIBLE_DEVICES of its workers

    def on(self, places: Places, group: PlacementGroup, avoided: Set[str]) -> list[NodeAgent]:
        """Return the agents of the nodes with these places, in the order of the ranks; start the missing ones.

        `places` are in a placement group: by node, how many in which bundle. Spare agents on `avoided` nodes end.
        """
        if group.id.hex() != self.group_id:
            self.group_id = group.id.hex()
            self.gpu_ids = {}
        rows = {node["NodeID"]: node for node in ray.nodes()}
        gpus = self.cluster.gpus_per_worker
        # Unused agents only take up memory; a few are kept for the next attempt.
        self.used = places.keys()
        kept = 0
        for node_id in self.actors.keys() - self.used:
            is_there = node_id in rows and rows[node_id]["Alive"] and node_id not in avoided
            if is_there and not gpus and kept < WARM_SPARES:
                kept += 1
            else:
                self.end(node_id)
        agents = []
        for node_id, bundles in places.items():
            # Which GPUs Ray has given to a bundle it tells in no table: a task in each bundle sees its own. They are
            # the same as long as the bundle lives.
            if gpus and node_id not in self.gpu_ids:
                answers = []
                for bundle, count in bundles.items():
                    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                    task: Any = ray.remote(num_cpus=0, num_gpus=gpus * count)(ray.get_gpu_ids)
                    answers.append(task.options(scheduling_strategy=place).remote())
                ids: list[str] = []
                for of_bundle in ray.get(answers):
                    ids += map(str, of_bundle)
                self.gpu_ids[node_id] = ",".join(ids)
            agents.append(
                NodeAgent(
                    name=rows[node_id]["NodeManagerHostname"],
                    node_id=node_id,
                    address=rows[node_id]["NodeManagerAddress"],
                    slots=sum(bundles.values()),
                    call=partial(call_actor, self.start(node_id)),
                    visible_gpus=self.gpu_ids.get(node_id, ""),
                )
            )
        return agents

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these nodes, to which a next attempt may move.

        Those of workers with GPUs import nothing ahead: there is nothing to gain, and an autoscaler takes no node away
        that has an agent.
        """
        if self.cluster.gpus_per_worker:
            return
        idle = (self.actors.keys() - self.used) & spare
        for node_id in sorted(spare - self.actors.keys())[: max(0, WARM_SPARES - len(idle))]:
            self.start(node_id)

    def start(self, node_id: str) -> Any:
        """Return the actor that is the agent of a node; where none runs there, one is started and imports."""
        if node_id not in self.actors:
            self.actors_started += 1
            remote: Any = ray.remote(RayAgent).options(
                # People find it by this name in the dashboard.
                name=f"{Path(self.run).name} agent {self.actors_started} {secrets.token_hex(2)}",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=AGENT_THREADS,
                # Not soft: on any other node it would start the workers there.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self.actors[node_id] = remote.remote(self.cluster.gpus_per_worker > 0)
            self.actors[node_id].warm_up.remote()
        return self.actors[node_id]

    def end(self, node_id: str) -> None:
        """End the agent of a node, and its workers with it, where there is one."""
        with suppress(Exception):
            ray.kill(self.actors[node_id])
        self.actors.pop(node_id, None)
