"""Select the resources for a spare worker: a free core of this machine, or a bundle in a Ray cluster."""

import dataclasses
import os
from typing import TYPE_CHECKING, TypeAlias

from jobs.cluster.agent import NodeAgent
from jobs.cluster.nodes import ThisMachine, nodes_of
from jobs.cluster_config import ClusterConfig, cores
from pipeline.identity import workers_per_gpu

if TYPE_CHECKING:
    from jobs.extras.async_evaluation.spare_nodes import SpareBundle  # imports ray, which takes seconds

SparePlace: TypeAlias = "SpareCore | SpareBundle"


def spare_place_of(cluster: ClusterConfig, busy_cores: int) -> SparePlace:
    """Return the resources for a spare worker while training uses `cluster.world` workers.

    On this machine, training keeps `busy_cores` cores busy.
    """
    if cluster.backend == "processes":
        return SpareCore(cluster, cluster.world, busy_cores)
    training = nodes_of(cluster)
    from jobs.extras.async_evaluation.spare_nodes import SpareBundle

    assert not isinstance(training, ThisMachine), training
    return SpareBundle(training)


class SpareCore(ThisMachine):
    """A free core for one spare worker, and a free GPU if workers use GPUs.

    Training never gives up resources for a spare worker. `SpareBundle` has the same methods for a Ray cluster.
    """

    def __init__(self, cluster: ClusterConfig, world: int, busy_cores: int) -> None:
        """Store how training uses this machine: `world` workers keep `busy_cores` cores busy."""
        super().__init__(cluster)
        self.busy_cores = busy_cores
        self.gpus_in_use = world * cluster.gpus_per_worker
        self.has_training_ended = False  # set by the spare worker: from then on, the training's resources are free

    def is_free(self) -> bool:
        """Return whether a core, and a GPU if needed, is free."""
        if self.has_training_ended:
            return True
        if cores() <= self.busy_cores:
            return False
        gpus = self.cluster.gpus_per_worker
        return not gpus or self.gpus_present()[0] >= self.gpus_in_use + gpus

    def is_needed_elsewhere(self) -> bool:
        """Return False: commands on a machine are unaware of each other, so none waits for the resources."""
        return False

    def take(self) -> bool:
        """Reserve the resources; this always succeeds, because no other command reserves them."""
        return True

    def release_borrowed(self) -> None:
        """Release the resources."""

    def close(self) -> None:
        """Stop the agent."""
        self.agent.close()

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agent of this machine; its worker sees only GPUs that training does not use."""
        (agent,) = super().agents(world)
        if not self.cluster.gpus_per_worker:
            return [agent]
        visible = list(map(str, range(self.gpus_present()[0] // workers_per_gpu())))
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is not None:
            visible = named.split(",")
        # Workers that share GPUs are assigned to them in turn (gpu_of_worker in pipeline/process_group.py).
        places = visible * workers_per_gpu()
        first = 0 if self.has_training_ended else self.gpus_in_use
        # Remove repeated GPUs, which CUDA does not accept in this list.
        free = dict.fromkeys(places[first:])
        return [dataclasses.replace(agent, visible_gpus=",".join(free))]
