"""Where a spare worker is placed: on a core of this machine that training leaves, or on a bundle of a Ray cluster."""

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
    """Return the place next to a worker group of `cluster.world`, which keeps so many cores of this machine busy."""
    if cluster.backend == "processes":
        return SpareCore(cluster, cluster.world, busy_cores)
    training = nodes_of(cluster)
    from jobs.extras.async_evaluation.spare_nodes import SpareBundle

    assert not isinstance(training, ThisMachine), training
    return SpareBundle(training)


class SpareCore(ThisMachine):
    """A place for one worker beside the worker group: a core, and where workers have GPUs a GPU, that those leave free.

    It is never taken from training. `SpareBundle` has the same methods, for a Ray cluster.
    """

    def __init__(self, cluster: ClusterConfig, world: int, busy_cores: int) -> None:
        """`world` workers of the config train on this machine and keep so many cores busy."""
        super().__init__(cluster)
        self.busy_cores = busy_cores
        self.gpus_in_use = world * cluster.gpus_per_worker
        self.has_training_ended = False  # set from outside: the worker group's own cores and GPUs are free from then on

    def is_free(self) -> bool:
        """Tell whether there is a place that nobody wants."""
        if self.has_training_ended:
            return True
        if cores() <= self.busy_cores:
            return False
        gpus = self.cluster.gpus_per_worker
        return not gpus or self.gpus_present()[0] >= self.gpus_in_use + gpus

    def is_wanted(self) -> bool:
        """Tell whether somebody waits for the place that is used."""
        return False  # other commands of this machine do not know of one another

    def take(self) -> bool:
        """Take the place; tell whether that succeeded."""
        return True  # nobody else takes it meanwhile

    def give_back(self) -> None:
        """Give the place back."""

    def close(self) -> None:
        """End the agent."""
        self.agent.close()

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agent of this machine, for one worker on a GPU that training leaves."""
        (agent,) = super().agents(world)
        if not self.cluster.gpus_per_worker:
            return [agent]
        visible = list(map(str, range(self.gpus_present()[0] // workers_per_gpu())))
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is not None:
            visible = named.split(",")
        # Workers that share GPUs have them in turn (gpu_of_worker in pipeline/process_group.py).
        places = visible * workers_per_gpu()
        first = 0 if self.has_training_ended else self.gpus_in_use
        # CUDA takes no GPU twice.
        free = dict.fromkeys(places[first:])
        return [dataclasses.replace(agent, visible_gpus=",".join(free))]
