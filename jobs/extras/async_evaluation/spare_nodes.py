"""What a Ray cluster has beside the places of a worker group: a bundle that an evaluation beside training borrows."""

import secrets
import time

from ray.util.placement_group import placement_group, remove_placement_group

from jobs.cluster.capacity import room_for
from jobs.cluster.ray_nodes import RayNodes
from jobs.cluster.ray_places import Reservation, without_nodes

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
        free = self.training.state().staying
        for node in self.training.avoided_now():
            free.pop(node, None)
        return room_for(self.share, free) >= 1 and not self.training.has_pending_requests()

    def is_wanted(self) -> bool:
        """Tell whether somebody waits for the place that was borrowed; asked of Ray once a second."""
        if not self.training.borrowed or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + BORROW_LOOK_S
        return self.training.has_pending_requests()

    def take(self) -> bool:
        """Take one of the places that training has left, or borrow another; tell whether Ray had it at once."""
        if self.has_training_ended and self.training.reservation is not None:
            self.reservation = self.training.reservation
            return True
        # Others see who has it by its name, which is none of those that they wait for.
        group = placement_group(
            [self.share],
            name=f"evaluation {self.run} {secrets.token_hex(4)}",
            bundle_label_selector=without_nodes(self.training.avoided_now(), 1),
        )
        self.reservation = Reservation(group, [1], self.share)
        self.training.borrowed.append(self.reservation)
        if group.wait(timeout_seconds=BORROW_S):
            return True
        self.give_back()
        return False

    def give_back(self) -> None:
        """Give back what was borrowed, where anything was."""
        self.reservation = None
        while self.training.borrowed:
            remove_placement_group(self.training.borrowed.pop().group)

    def close(self) -> None:
        """End the agents of evaluations."""
        for node_id in list(self.actors):
            self.end_agent(node_id)
