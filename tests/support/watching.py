"""A watcher for tests that act while a campaign runs."""

from collections.abc import Callable

from jobs.run.reading import StatusMessage
from jobs.run.watchers import Watcher


class EachPoll(Watcher):
    """Calls a function with every status message of a running attempt."""

    def __init__(self, act: Callable[[StatusMessage], None]) -> None:
        self.act = act

    def status(self, message: StatusMessage) -> None:
        if message.state == "working":
            self.act(message)


class Silent(Watcher):
    """Does nothing."""
