"""The nodes that a campaign works on, as the driver sees them, whichever form they have: the contract of both.

nodes = nodes_of(cluster)                                        # placement.py
world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # waits for places, and logs for what
agents = nodes.agents(world, on_tick)                            # one a node, warm over attempts and stages
agents[0].call("poll", 0, 1.0, {})                               # a Future
"""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

Log = Callable[[str], None]
Tick = Callable[[], None]  # called a few times a second while something is waited for; what it raises ends the wait


@dataclass(frozen=True)
class NodeAgent:
    """The agent of one node, as the driver sees it."""

    name: str  # of the node, for people
    node_id: str  # Ray's; "" without Ray
    address: str
    slots: int  # workers that have a place there
    call: Callable[..., "Future[Any]"]  # (method of Agent, its arguments)
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES of its workers; "": those that the node's environment shows


class Nodes(Protocol):
    """The nodes of one command, for attempt after attempt."""

    def warm_up(self) -> None:
        """Begin what workers need and what takes seconds, where that takes nothing from anybody."""

    def reserve(self, run: str, worlds: Sequence[int], log: Log, on_tick: Tick) -> int:
        """Return how many workers can start, one of `worlds`, when their places are reserved; the largest comes first.

        `run` is the name under which others see who holds the places. Raises ClusterError.
        """

    def agents(self, world: int, on_tick: Tick) -> list[NodeAgent]:
        """Return the agents of the nodes on which the places lie, in the order of the ranks; start those that lack."""

    def loss_of(self, agent: NodeAgent, error: BaseException | None) -> str:
        """Say how a node was lost whose agent does not answer, and go on without it; "" where it is there.

        `error` is what the call of the agent raised, None where it has not returned.
        """

    def room(self) -> int:
        """Return for how many workers a larger group would find room, those counted that run. Any thread may ask."""

    def draining(self) -> Set[str]:
        """Return the ids of nodes that were told to go. Any thread may ask."""

    def own_node(self) -> str:
        """Return the id of this process's own node."""

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Have the next attempt placed without these nodes, where the others have the room."""

    def stay_on(self, node_ids: Set[str]) -> None:
        """Have the next attempts placed on these nodes alone, where they have the room."""

    def gpus_present(self) -> tuple[int, str]:
        """Return how many GPUs there are, and whether this "machine" or a "cluster" has them."""


class SparePlace(Nodes, Protocol):
    """A place for one worker beside the worker group, which is never taken from training or from anybody who waits."""

    def is_free(self) -> bool:
        """Tell whether there is a place that nobody wants."""

    def is_wanted(self) -> bool:
        """Tell whether somebody waits for the place that is used."""

    def training_has_ended(self) -> None:
        """Hear that the worker group's own places are free from now on."""

    def take(self) -> bool:
        """Take the place; tell whether that succeeded."""

    def give_back(self) -> None:
        """Give the place back."""

    def close(self) -> None:
        """End the agent."""
