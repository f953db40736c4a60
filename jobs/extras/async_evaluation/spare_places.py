"""Chooses the resources of a spare worker: a free core of this machine, or a bundle of a Ray cluster."""

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
    """Return the resources next to a worker group of `cluster.world` that keeps `busy_cores` of this machine busy."""
    if cluster.backend == "processes":
        return SpareCore(cluster, cluster.world, busy_cores)
    training = nodes_of(cluster)
    from jobs.extras.async_evaluation.spare_nodes import SpareBundle

    assert not isinstance(training, ThisMachine), training
    return SpareBundle(training)


class SpareCore(ThisMachine):
    """Room for one worker next to the worker group: a free core, and a free GPU if workers have GPUs.

    Training never loses resources to it. `SpareBundle` has the same methods for a Ray cluster.
    """

    def __init__(self, cluster: ClusterConfig, world: int, busy_cores: int) -> None:
        """Describe the training on this machine: `world` workers, which keep `busy_cores` busy."""
        super().__init__(cluster)
        self.busy_cores = busy_cores
        self.gpus_in_use = world * cluster.gpus_per_worker
        self.has_training_ended = False  # set from outside: from then on the worker group's cores and GPUs are free

    def is_free(self) -> bool:
        """Return whether a core, and a GPU if needed, is free."""
        if self.has_training_ended:
            return True
        if cores() <= self.busy_cores:
            return False
        gpus = self.cluster.gpus_per_worker
        return not gpus or self.gpus_present()[0] >= self.gpus_in_use + gpus

    def is_wanted(self) -> bool:
        """Return whether others wait for the resources; always False, because commands do not know of each other."""
        return False

    def take(self) -> bool:
        """Reserve the resources; always succeeds, because no other command reserves them."""
        return True

    def give_back(self) -> None:
        """Release the resources."""

    def close(self) -> None:
        """Stop the agent."""
        self.agent.close()

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agent of this machine, with only the GPUs visible that training leaves free."""
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
        # CUDA does not accept a GPU twice in this list.
        free = dict.fromkeys(places[first:])
        return [dataclasses.replace(agent, visible_gpus=",".join(free))]
