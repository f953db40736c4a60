"""The nodes of a Ray cluster on which no workers are placed: for a while, or as long as this process lives."""

import time
from collections.abc import Mapping, Sequence, Set

from jobs.cluster.capacity import Resources, room_for

AVOID_S = 600.0  # a node that was to leave, and is still there after so long, is used again
MISSED_S = 70.0  # Ray has noticed a dead node after so long; a node that is there is better than none


class NodeExclusion:
    """Which nodes are avoided or excluded, by their ids."""

    def __init__(self) -> None:
        self.avoided: dict[str, float] = {}  # nodes that are about to leave, or do not answer → since when
        self.excluded: set[str] = set()  # nodes that are not used any more

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Avoid these nodes for a while, if the others have room."""
        for node_id in node_ids:
            self.avoided[node_id] = time.monotonic()

    def add(self, other: "NodeExclusion") -> None:
        """Exclude and avoid the nodes of another exclusion too."""
        self.avoided |= other.avoided
        self.excluded |= other.excluded

    def now(self) -> set[str]:
        """Return the excluded nodes and those that are avoided at the moment."""
        now = time.monotonic()
        return self.excluded | {node for node, since in self.avoided.items() if now < since + AVOID_S}

    def of_places(self, least: int, share: Mapping[str, int], total: Mapping[str, Resources]) -> set[str]:
        """Return the nodes on which no places may lie, if the others have room for `least` workers.

        `total` is what each node of the cluster has. Avoided nodes are used if the others have too little room: a
        worker may have received a signal that its node has not.
        """
        avoided = self.now() & set(total)
        others = {node: resources for node, resources in total.items() if node not in avoided}
        if room_for(share, others) < least:
            avoided = set()
        return avoided | self.excluded

    def long_avoided(self, nodes: Set[str]) -> set[str]:
        """Return those of the nodes that are avoided for so long that they can be taken for alive."""
        now = time.monotonic()
        return {node for node in nodes - self.excluded if now > self.avoided[node] + MISSED_S}
