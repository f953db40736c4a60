"""What a Ray cluster has beside the places of a worker group: a bundle to borrow, and nodes without a worker.

An evaluation beside training borrows a bundle (SpareBundle); a preflight has the nodes without a worker examined
(`run_on_spare_nodes`).
"""

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.cluster.capacity import ClusterState, room_for, share_of_worker
from jobs.cluster.ray_nodes import RayNodes, Reservation

BORROW_S = 5.0  # for Ray to place what seems to be free
BORROW_LOOK_S = 1.0  # between two questions whether somebody wants the borrowed place


class SpareBundle(RayNodes):
    """A place for one worker beside the worker group: free resources of that size, borrowed as long as nobody waits.

    When training has ended the workers' places are kept for the next stage; until then one of them serves.
    """

    def __init__(self, training: RayNodes) -> None:
        super().__init__(training.cluster, is_embedded=training.is_embedded)
        self.training = training
        self.run = f"{training.run} evaluation"
        self.has_training_ended = False  # set from outside: the worker group's own places are free from then on
        self.next_look = 0.0

    def is_free(self) -> bool:
        """Tell whether there is a place on a node that stays, and nobody waits for places."""
        if self.has_training_ended and self.training.reservation is not None:
            return True
        free = ClusterState.now().staying
        for node in self.training.nodes_to_avoid():
            free.pop(node, None)
        return room_for(share_of_worker(self.cluster), free) >= 1 and not self.training.is_anything_asked_for()

    def is_wanted(self) -> bool:
        """Tell whether somebody waits for the place that was borrowed; asked of Ray once a second."""
        if not self.training.lent or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + BORROW_LOOK_S
        return self.training.is_anything_asked_for()

    def take(self) -> bool:
        """Take one of the places that training has left, or borrow another; tell whether Ray had it at once."""
        if self.has_training_ended and self.training.reservation is not None:
            self.reservation = self.training.reservation
            return True
        share = share_of_worker(self.cluster)
        # Others see who has it by its name, which is none of those that they wait for.
        group = placement_group([share], name=f"evaluation {self.run} {secrets.token_hex(4)}")
        self.reservation = Reservation(group, 1, share)
        self.training.lent.append(self.reservation)
        if group.wait(timeout_seconds=BORROW_S):
            return True
        self.give_back()
        return False

    def give_back(self) -> None:
        """Give back what was borrowed, where anything was."""
        self.reservation = None
        self.gpu_ids = {}
        while self.training.lent:
            remove_placement_group(self.training.lent.pop().group)

    def close(self) -> None:
        """End the agents of evaluations."""
        for node_id in list(self.actors):
            self.end_agent(node_id)


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
