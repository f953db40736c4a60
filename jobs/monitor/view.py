"""What the driver can show of a stage at one moment, read from the stage's folder and nowhere else.

    look = Looker(Path("/runs/digits/pretrain-1a2b3c4d"))
    look("working")  →  View(run="digits", stage="pretrain", attempts=1, report={"step": 120, …}, …)

Of metrics.jsonl a look reads what was added since the last one, and the first look its end, so that it costs the same
however long the run is.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.monitoring.telemetry import TAIL_BYTES, Record, with_nan

# How an incident begins in incidents.txt (restarts.write_incident); the traceback behind it has no such line.
INCIDENT = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


# "waiting": no attempt is running, the stage waits for places or for its next attempt.
State: TypeAlias = Literal["waiting", "working", "ended"]


@dataclass(frozen=True)
class View:
    """A stage as its folder shows it; the newest records are None where there are none yet."""

    run: str  # the name of the run's folder
    stage: str
    key: str  # its first eight characters
    state: State
    attempts: int
    incidents: int
    report: Record | None  # the newest one of kind "train"
    commit: Record | None  # the newest one of kind "checkpoint"
    time: float  # seconds since 1970


class Looker:
    """Reads a stage's folder again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metrics = directory / "metrics.jsonl"
        self.offset = max(0, size_of(metrics) - TAIL_BYTES)
        self.report: Record | None = None
        self.commit: Record | None = None
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
        # The folder is <stage>-<key>, and a stage's own name may hold dashes.
        stage, _, key = self.directory.name.rpartition("-")
        return View(
            run=self.directory.parent.name,
            stage=stage,
            key=key,
            state=state,
            attempts=len(list(self.directory.glob("attempts/attempt-*"))),
            incidents=self.count_incidents(),
            report=self.report,
            commit=self.commit,
            time=time.time(),
        )

    def count_incidents(self) -> int:
        """Return how many incidents are in the log of them."""
        path = self.directory / "incidents.txt"
        size = size_of(path)
        if size != self.incident_bytes:
            self.incident_bytes = size
            self.incidents = len(INCIDENT.findall(path.read_bytes()))
        return self.incidents


def records_since(path: Path, offset: int, most_bytes: int = TAIL_BYTES) -> tuple[list[Record], int]:
    """Return the records that begin behind `offset`, of `most_bytes` at most, and where the next call goes on.

    A line that is half written is left to the next call. Lines that are no records, as where the offset cuts one, are
    left out.
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
    records: list[Record] = []
    for line in whole.splitlines():
        try:
            record = json.loads(line, object_hook=with_nan)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, offset + len(whole)


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 where it is not there yet."""
    return path.stat().st_size if path.exists() else 0
