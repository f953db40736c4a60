"""A base class for watchers that run in a separate thread, so that they never delay the run.

    class Gauges(ThreadedWatcher):
        def show(self, message: StatusMessage) -> None: ...

The driver stores the newest status message. Every five seconds, the thread passes it to `show`; Ray gauges must be set
at least every 20 s. If a call fails, the failure is logged, and the next call tries again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from jobs.resolved_recipe import Context
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Watcher

SHOW_EVERY_S = 5.0
SILENT_S = 5.0  # after this long without a message (usually two per second), show the stage as waiting
CLOSE_S = 5.0  # maximum wait for the last call, because Ray's head may not respond


class ThreadedWatcher(Watcher):
    """Base class for watchers whose `show` may take a long time or never return."""

    name = ""  # prefix of its lines in the log
    close_s: float | None = None  # how long `close` waits for the last call; None: CLOSE_S

    def __init__(self) -> None:
        self.is_shown = False  # whether the current stage has workers
        self.newest: StatusMessage | None = None  # newest message of the current stage
        self.ends: deque[StatusMessage] = deque()  # last messages of ended stages, not shown yet
        self.logged_failures: set[str] = set()  # failures already logged
        self.closing = threading.Event()
        self.log: Callable[[str], None] = print
        self.thread: threading.Thread | None = None

    # -------------------------------------------------------------------- for subclasses

    def show(self, message: StatusMessage) -> None:
        """Show the state of a stage; runs in the thread."""

    def show_run(self) -> None:
        """Show the state of the command; runs in the thread at regular intervals and once at the end."""

    def start(self, log: Callable[[str], None]) -> None:
        """Start the thread, which also shows the messages stored before it started."""
        self.log = log
        self.thread = threading.Thread(target=self.work, name=self.name, daemon=True)
        self.thread.start()

    # -------------------------------------------------------------------- as a watcher

    def stage(self, context: Context) -> None:
        """Switch to this stage; if it has workers, show its messages."""
        self.is_shown = context.stage.kind.needs_workers

    def status(self, message: StatusMessage) -> None:
        """Store the message, which the thread will show."""
        if not self.is_shown:
            return
        if message.state == "ended":
            self.ends.append(message)
            self.newest = None
        else:
            self.newest = message

    def close(self) -> None:
        """Show the remaining messages and stop the thread; give up if a call of `show` does not return in time."""
        if self.thread is None:
            return
        self.closing.set()
        close_s = CLOSE_S if self.close_s is None else self.close_s
        self.thread.join(close_s)
        if self.thread.is_alive():
            self.log(f"{self.name}: the tracker did not respond within {close_s:g} s; the last values may be missing")

    # -------------------------------------------------------------------- the thread

    def work(self) -> None:
        """Show the newest message every SHOW_EVERY_S seconds, and once more at the end."""
        is_closing = False
        while not is_closing:
            is_closing = self.closing.wait(SHOW_EVERY_S)
            newest = self.newest
            # Show ended stages before the current one.
            while self.ends:
                with self.failures_logged():
                    self.show(self.ends.popleft())
            if newest is not None:
                now = time.time()
                state = newest.state
                if now - newest.time > SILENT_S:
                    state = "waiting"
                with self.failures_logged():
                    self.show(replace(newest, state=state, time=now))
            with self.failures_logged():
                self.show_run()

    @contextmanager
    def failures_logged(self) -> Iterator[None]:
        """Log each distinct exception raised in the block once, and continue."""
        try:
            yield
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            failure = f"{self.name}: {type(error).__name__}: {first_line}"
            if failure not in self.logged_failures:
                self.log(f"{failure}; the run continues, and monitoring resumes when the problem is solved")
            self.logged_failures.add(failure)
