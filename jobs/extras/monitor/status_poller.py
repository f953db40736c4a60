"""Shows how a stage stands, again and again, from a thread of the driver: nothing in the run waits for it.

    poller = StatusPoller("monitoring", [gauges.show, metadata.show], log)
    poller.show_stage(Path("/runs/digits/pretrain-1a2b3c4d"))
    poller.poll(attempt_folder, 1)     # while an attempt runs, about twice a second
    poller.leave_stage()
    poller.close()

Every five seconds it reads the stage's folder, and nothing else, into a View, and gives that to every `show` (a gauge
of Ray must be set again within 20 s). A failure costs that look, and one line.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.monitoring.telemetry import TAIL_BYTES, Record, records_in

POLL_EVERY_S = 5.0
# Polls of an attempt come twice a second while it runs; a busy machine may be late.
SILENT_S = 5.0
CLOSE_S = 5.0  # for the last look; Ray's head may not answer
# How an incident begins in incidents.txt (supervisor.write_incident); the traceback behind it has no such line.
INCIDENT = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)

# "waiting": no attempt is running, the stage waits for places or for its next attempt.
State: TypeAlias = Literal["waiting", "working", "ended"]


@dataclass(frozen=True)
class View:
    """A stage as its folder shows it; the newest records are None where there are none yet."""

    directory: Path  # the stage's folder
    run: str  # the name of the run's folder
    stage: str
    key: str  # its first eight characters
    state: State
    attempts: int
    incidents: int
    report: Record | None  # the newest one of kind "train"
    commit: Record | None  # the newest one of kind "checkpoint"
    evaluation: Record | None  # the newest one of kind "evaluate"
    time: float  # seconds since 1970


Show = Callable[[View], None]


class StatusPoller:
    """Reads how the running stage stands, from a thread of its own, and gives the view to every `show`."""

    def __init__(
        self,
        name: str,
        shows: Sequence[Show],
        log: Callable[[str], None],
        close_s: float | None = None,
        show_run: Callable[[], None] | None = None,
    ) -> None:
        self.name = name  # in its lines
        self.shows = shows
        self.show_run = show_run  # called with every look, also between stages and once more at the end
        self.log = log
        self.close_s = CLOSE_S if close_s is None else close_s
        self.running: StageStatus | None = None  # of the stage that runs
        self.ended: StageStatus | None = None  # of the stage that has ended, until that is shown
        self.polled: float | None = None  # when an attempt was last seen
        self.complaints: set[str] = set()  # logged already
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.work, name=name, daemon=True)
        self.thread.start()

    def show_stage(self, directory: Path) -> None:
        """Show this stage from now on."""
        self.polled = None
        self.running = StageStatus(directory)

    def leave_stage(self) -> None:
        """Show the stage once more, as a stage that has ended."""
        self.ended = self.running
        self.running = None

    def poll(self, attempt_folder: Path, number: int) -> None:
        """Remember that an attempt is running."""
        self.polled = time.monotonic()

    def close(self) -> None:
        """Show what is still to be shown, and end; a show that does not answer is not waited for."""
        if self.running is not None:
            self.leave_stage()
        self.closing.set()
        self.thread.join(self.close_s)
        if self.thread.is_alive():
            self.log(f"{self.name}: no answer within {self.close_s:g} s, and the end is not waited for")

    def work(self) -> None:
        """Do the thread's part: look every POLL_EVERY_S until the end, and once more then."""
        is_closing = False
        while not is_closing:
            is_closing = self.closing.wait(POLL_EVERY_S)
            # A stage that has ended is shown once more, and before the stage that follows it.
            ended = self.ended
            self.ended = None
            if ended is not None:
                self.show(ended, "ended")
            running = self.running
            if running is not None:
                has_attempt = self.polled is not None and time.monotonic() - self.polled < SILENT_S
                self.show(running, "working" if has_attempt else "waiting")
            if self.show_run is not None:
                with self.failures_logged():
                    self.show_run()

    def show(self, status: "StageStatus", state: State) -> None:
        """Have a stage shown."""
        with self.failures_logged():
            view = status(state)
            for show in self.shows:
                show(view)

    @contextmanager
    def failures_logged(self) -> Iterator[None]:
        """Log what fails in the block, each complaint once, and go on."""
        try:
            yield
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            complaint = f"{self.name}: {type(error).__name__}: {first_line}"
            if complaint not in self.complaints:
                self.log(f"{complaint}; the run goes on, and is shown again when that has passed")
            self.complaints.add(complaint)


class StageStatus:
    """Reads a stage's folder again and again; each call costs the same however long the run is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metrics = directory / "metrics.jsonl"
        self.offset = max(0, size_of(metrics) - TAIL_BYTES)
        self.report: Record | None = None
        self.commit: Record | None = None
        self.evaluation: Record | None = None
        self.incidents = 0
        self.incident_bytes = 0  # size of incidents.txt when it was last counted

    def __call__(self, state: State) -> View:
        """Return how the stage stands now. Raises OSError where the run directory does not answer."""
        records, self.offset = records_since(self.directory / "metrics.jsonl", self.offset)
        for record in records:
            if record.get("kind") == "train":
                self.report = record
            if record.get("kind") == "checkpoint":
                self.commit = record
            if record.get("kind") == "evaluate":
                self.evaluation = record
        incidents = self.directory / "incidents.txt"
        size = size_of(incidents)
        if size != self.incident_bytes:
            self.incident_bytes = size
            self.incidents = len(INCIDENT.findall(incidents.read_bytes()))
        # The folder is <stage>-<key>, and a stage's own name may hold dashes.
        stage, _, key = self.directory.name.rpartition("-")
        return View(
            directory=self.directory,
            run=self.directory.parent.name,
            stage=stage,
            key=key,
            state=state,
            attempts=len(list(self.directory.glob("attempts/attempt-*"))),
            incidents=self.incidents,
            report=self.report,
            commit=self.commit,
            evaluation=self.evaluation,
            time=time.time(),
        )


def records_since(path: Path, offset: int, most_bytes: int = TAIL_BYTES) -> tuple[list[Record], int]:
    """Return the records that begin behind `offset`, of `most_bytes` at most, and where the next call goes on.

    A line that is half written is left to the next call. Lines that are no records, as where the offset cuts one, are
    excluded.
    """
    size = size_of(path)
    if size < offset:  # another file: the stage was started over
        offset = 0
    if size == offset:
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        added = file.read(most_bytes)
    whole = added[: added.rfind(b"\n") + 1]
    return list(records_in(whole.splitlines(), path)), offset + len(whole)


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 where it is not there yet."""
    return path.stat().st_size if path.exists() else 0
