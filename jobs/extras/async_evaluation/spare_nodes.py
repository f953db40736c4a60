"""Borrow free resources of a Ray cluster for an evaluation during training."""

import secrets
import time

from ray.util.placement_group import placement_group, remove_placement_group

from jobs.cluster.capacity import room_for
from jobs.cluster.ray_nodes import RayNodes
from jobs.cluster.ray_places import Reservation, without_nodes

BORROW_S = 5.0  # time for Ray to place a bundle that seems to fit
BORROW_CHECK_S = 1.0  # interval between checks whether other jobs need the borrowed resources


class SpareBundle(RayNodes):
    """Resources for one spare worker, borrowed until another job waits for them.

    After training, the resources of the training workers are kept for the next stage; until that stage starts, a spare
    worker can use them.
    """

    def __init__(self, training: RayNodes) -> None:
        super().__init__(training.cluster, is_embedded=training.is_embedded)
        self.training = training
        self.run = f"{training.run} evaluation"
        self.has_training_ended = False  # set by the spare worker: from then on, the training's resources are free
        self.next_look = 0.0

    def is_free(self) -> bool:
        """Return whether a non-draining node has room and no other job is waiting for resources."""
        if self.has_training_ended and self.training.reservation is not None:
            return True
        free = self.training.state().staying
        for node in self.training.avoided_now():
            free.pop(node, None)
        return room_for(self.share, free) >= 1 and not self.training.has_pending_requests()

    def is_needed_elsewhere(self) -> bool:
        """Return whether another job is waiting for the borrowed resources; query Ray at most once a second."""
        if not self.training.borrowed or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + BORROW_CHECK_S
        return self.training.has_pending_requests()

    def take(self) -> bool:
        """Take training's resources if training has ended; otherwise, reserve others. Return False after a timeout."""
        if self.has_training_ended and self.training.reservation is not None:
            self.reservation = self.training.reservation
            return True
        # Use a unique name: Ray refuses a second group of the same name.
        group = placement_group(
            [self.share],
            name=f"evaluation {self.run} {secrets.token_hex(4)}",
            bundle_label_selector=without_nodes(self.training.avoided_now(), 1),
        )
        self.reservation = Reservation(group, [1], self.share)
        self.training.borrowed.append(self.reservation)
        if group.wait(timeout_seconds=BORROW_S):
            return True
        self.release_borrowed()
        return False

    def release_borrowed(self) -> None:
        """Release the borrowed resources, if any."""
        self.reservation = None
        while self.training.borrowed:
            remove_placement_group(self.training.borrowed.pop().group)

    def close(self) -> None:
        """Stop the agents that ran evaluations."""
        for node_id in list(self.actors):
            self.end_agent(node_id)
