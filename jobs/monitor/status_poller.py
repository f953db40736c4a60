"""Shows how a stage stands, again and again, from a thread of the driver: nothing in the run waits for it.

    board = Board(say)
    board.start([gauges.show, metadata.show])
    board.show_stage(Path("/runs/digits/pretrain-1a2b3c4d"))
    board.tick(attempt_folder, 1)     # while an attempt runs, about twice a second
    board.leave_stage()
    board.close()

A look every five seconds: a gauge of Ray must be set again within 20 s. What fails costs the look, and one line.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.monitor.view import Looker, State, View

LOOK_EVERY_S = 5.0
# Ticks come twice a second while an attempt runs; a busy machine may be late.
SILENT_S = 5.0
CLOSE_S = 5.0  # for the last look; Ray's head may not answer

Show = Callable[[View], None]


class Board:
    """Looks at the stage that runs, and gives what it sees to everybody who shows it; before `start` to nobody."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.shows: Sequence[Show] = ()
        self.running: Looker | None = None  # at the stage that runs
        self.ended: Looker | None = None  # at the one that has ended, until that is shown
        self.ticked: float | None = None  # when an attempt was last seen
        self.complaints: set[str] = set()  # said already
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.work, name="board", daemon=True)

    def start(self, shows: Sequence[Show]) -> None:
        """Show what there is to all of these from now on."""
        self.shows = shows
        self.thread.start()

    def show_stage(self, directory: Path) -> None:
        """Show this stage from now on."""
        self.ticked = None
        self.running = Looker(directory)

    def leave_stage(self) -> None:
        """Show the stage once more, as one that has ended."""
        self.ended = self.running
        self.running = None

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Remember that an attempt is running."""
        self.ticked = time.monotonic()

    def close(self) -> None:
        """Show what is still to be shown, and end; whoever does not answer is not waited for."""
        if self.running is not None:
            self.leave_stage()
        self.closing.set()
        if self.thread.is_alive():
            self.thread.join(CLOSE_S)

    def work(self) -> None:
        """Look until the end, and once more then."""
        while not self.closing.wait(LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        """Look once at what there is to look at, and have it shown."""
        ended = self.ended
        self.ended = None
        if ended is not None:
            self.show(ended, "ended")
        if self.running is not None:
            has_attempt = self.ticked is not None and time.monotonic() - self.ticked < SILENT_S
            self.show(self.running, "working" if has_attempt else "waiting")

    def show(self, looker: Looker, state: State) -> None:
        """Have a stage shown; say what fails, each complaint once."""
        try:
            view = looker(state)
            for show in self.shows:
                show(view)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            complaint = f"monitoring: {type(error).__name__}: {first_line}"
            if complaint not in self.complaints:
                self.say(f"{complaint}; the run goes on, its gauges and its job's metadata may be old")
            self.complaints.add(complaint)
