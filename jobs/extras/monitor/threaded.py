"""A watcher that shows a run from a thread of its own, so that nothing in the run waits for it.

    class Gauges(ThreadedWatcher):
        def show(self, message: StatusMessage) -> None: ...

The driver leaves the newest status message; every five seconds the thread calls `show` with it (a Ray gauge must be set
again within 20 s). A failure costs this one call and one line.
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
# Messages of an attempt come twice a second while it runs; a busy machine may be late.
SILENT_S = 5.0
CLOSE_S = 5.0  # for the last call; Ray's head may not answer


class ThreadedWatcher(Watcher):
    """Base class of watchers whose `show` may take long, or never return."""

    name = ""  # begins its lines in the log
    close_s: float | None = None  # how long `close` waits for the last call; None: CLOSE_S

    def __init__(self) -> None:
        self.is_shown = False  # whether the stage that runs is one with workers
        self.newest: StatusMessage | None = None  # of the stage that runs
        self.ends: deque[StatusMessage] = deque()  # last messages of stages that have ended, until they are shown
        self.complaints: set[str] = set()  # logged already
        self.closing = threading.Event()
        self.log: Callable[[str], None] = print
        self.thread: threading.Thread | None = None

    # -------------------------------------------------------------------- for subclasses

    def show(self, message: StatusMessage) -> None:
        """Show a stage; called in the thread."""

    def show_run(self) -> None:
        """Show the command; called in the thread every time, also between stages and once more at the end."""

    def start(self, log: Callable[[str], None]) -> None:
        """Start the thread; until then, messages are kept for it."""
        self.log = log
        self.thread = threading.Thread(target=self.work, name=self.name, daemon=True)
        self.thread.start()

    # -------------------------------------------------------------------- as a watcher

    def stage(self, context: Context) -> None:
        """Show this stage from now on, if it has workers."""
        self.is_shown = context.stage.kind.needs_workers

    def status(self, message: StatusMessage) -> None:
        """Keep the message for the thread."""
        if not self.is_shown:
            return
        if message.state == "ended":
            self.ends.append(message)
            self.newest = None
        else:
            self.newest = message

    def close(self) -> None:
        """Show what remains to be shown, and end the thread; a call that does not return is abandoned."""
        if self.thread is None:
            return
        self.closing.set()
        close_s = CLOSE_S if self.close_s is None else self.close_s
        self.thread.join(close_s)
        if self.thread.is_alive():
            self.log(f"{self.name}: no answer within {close_s:g} s, and the end is not waited for")

    # -------------------------------------------------------------------- the thread

    def work(self) -> None:
        """Show the newest messages every SHOW_EVERY_S, and once more at the end."""
        is_closing = False
        while not is_closing:
            is_closing = self.closing.wait(SHOW_EVERY_S)
            newest = self.newest
            # A stage that has ended is shown before the one that follows it.
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
        """Log an exception in the block, each one once, and continue."""
        try:
            yield
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            complaint = f"{self.name}: {type(error).__name__}: {first_line}"
            if complaint not in self.complaints:
                self.log(f"{complaint}; the run goes on, and is shown again when that has passed")
            self.complaints.add(complaint)
