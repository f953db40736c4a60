"""What a signal asks of a command: to commit and end, or to end at once."""

import signal
from collections.abc import Callable
from types import FrameType

from data.errors import Preempted


class Stopper:
    """Catches SIGTERM, SIGHUP and SIGINT: the first asks for a commit and code 75, a second SIGINT ends at once."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.asked = False
        self.works_here = False  # the driver itself is at work, and has nothing to commit: a stop ends it at once
        self.log = log
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)
        # A closed terminal or a dropped ssh; under nohup it is ignored, and stays so.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle)
        # The parent process may have held them back: a fork server of workers does.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the request; raise Preempted where the driver itself works.

        Raises KeyboardInterrupt at a second SIGINT.
        """
        # A second SIGTERM asks for the same thing again; a second Ctrl-C is a person who does not want to wait.
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt("interrupted twice: ended without a commit; the last checkpoint stands")
        if self.asked:
            return
        self.asked = True
        name = signal.Signals(number).name
        if self.works_here:
            raise Preempted(f"stopped by {name}; what is finished is kept, run the same command again to go on")
        self.log(f"{name}: finishing the step, committing, then exit 75; Ctrl-C again ends at once")

    def is_asked(self) -> bool:
        """Tell whether this command is to end."""
        return self.asked
