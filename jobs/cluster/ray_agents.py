"""The agents of a campaign as actors of Ray: one on each of its nodes, and how one of them is lost.

An actor takes no CPU of Ray's count. It belongs to its node, so that it stays warm from attempt to attempt. Ray ends it
when this process leaves the cluster.
"""

import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from jobs.cluster.agent import Agent, NodeOrder

AGENT_THREADS = 4  # of an agent: a poll, and what is asked of it meanwhile
ANSWER_S = 3.0  # for a node that is alive to take a connection
GAUGE_EVERY_S = 10.0  # Ray forgets a gauge that is not set again for about 25 s (measured with 2.60)
WORKER_GAUGE = "patchline_worker"


class RayAgent(Agent):
    """The agent as an actor: it also tells Prometheus which workers are on its node (ray_patchline_worker is 1)."""

    def __init__(self, has_gpus: bool) -> None:
        context = ray.get_runtime_context()
        super().__init__(context.get_node_id(), ray.util.get_node_ip_address(), has_gpus=has_gpus)
        # Who stops a node signals all its processes, and this one still has to report what the workers do.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        self.gauge = Gauge(WORKER_GAUGE, "1 for each worker on this node", tag_keys=("run", "stage", "rank"))
        self.labels: list[dict[str, str]] = []
        threading.Thread(target=self.keep_gauge, daemon=True).start()

    def start(self, order: NodeOrder) -> None:
        """Start this node's workers, and show them."""
        super().start(order)
        # An attempt's folder is <run>/<stage>-<key>/attempts/attempt-000001.
        *_, run, stage_and_key, _, _ = ("", "", *order.folder.parts)
        stage, _, _ = stage_and_key.rpartition("-")
        self.labels = [{"run": run, "stage": stage, "rank": str(info.rank)} for info in order.ranks]
        # At once, because an attempt may be shorter than the interval of the thread.
        for labels in self.labels:
            self.gauge.set(1.0, tags=labels)

    def end(self) -> None:
        """End this node's workers, and show them no more."""
        self.labels = []
        super().end()

    def keep_gauge(self) -> None:
        """Set the gauge again and again; Prometheus joins it with what Ray says of each node, by `instance`."""
        while True:
            for labels in self.labels:
                self.gauge.set(1.0, tags=labels)
            time.sleep(GAUGE_EVERY_S)


class RayAgents:
    """The actors that this process has in the cluster."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}  # by their node's id
        self.number = 0  # of actors that were started; in their names

    def start(self, node_id: str, run: str, *, has_gpus: bool) -> "Callable[..., Future[Any]]":
        """Start the agent of a node where none runs there, and have it import; return how its methods are called."""
        if node_id not in self.actors:
            self.number += 1
            remote: Any = ray.remote(RayAgent).options(
                # People find it by this name in the dashboard.
                name=f"{Path(run).name} agent {self.number} {secrets.token_hex(2)}",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=AGENT_THREADS,
                # Not soft: on any other node it would start the workers there.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self.actors[node_id] = remote.remote(has_gpus)
            self.actors[node_id].warm_up.remote()
        actor = self.actors[node_id]

        def call(method: str, *arguments: object) -> "Future[Any]":
            future: Future[Any] = getattr(actor, method).remote(*arguments).future()
            return future

        return call

    def kill(self, node_id: str) -> None:
        """End the agent of a node, and its workers with it, where there is one."""
        with suppress(Exception):
            ray.kill(self.actors[node_id])
        self.actors.pop(node_id, None)


def gpus_of_bundles(group: PlacementGroup, bundles: Sequence[int], gpus: int) -> str:
    """Return the GPUs that Ray has given to these bundles of one node, `gpus` to each, as CUDA_VISIBLE_DEVICES.

    Ray tells it in no table: a task in each bundle sees its own.
    """
    answers = []
    for bundle in bundles:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        task: Any = ray.remote(num_cpus=0, num_gpus=gpus)(ray.get_gpu_ids)
        answers.append(task.options(scheduling_strategy=place).remote())
    return ",".join(str(gpu) for of_bundle in ray.get(answers) for gpu in of_bundle)


def loss_of_node(node_id: str) -> str:
    """Say how a node was lost; "" where it is there and answers."""
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            # Ray's own health check takes 15 s for a node that refuses, and 65 s for one that is silent.
            try:
                socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S).close()
            except OSError:
                return "its node does not answer"
            return ""
    return "its node left the cluster"


def loss_of_agent(error: BaseException | None) -> str:
    """Say how an agent was lost whose node is there, by what its call raised; "" where that may pass."""
    if isinstance(error, OutOfMemoryError):
        return f"its node's agent was killed by Ray's out-of-memory killer: {str(error).splitlines()[0]}"
    if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
        return "its node's agent died (killed, or crashed), and its workers with it"
    return ""
