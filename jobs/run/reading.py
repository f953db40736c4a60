"""Read a run directory: how its last command ended, and the outcome, attempts and newest records of each stage.

    <run>/status.json                    read_command      running, done, stopped, killed or unknown
    <run>/<stage>-<key>/stage.json       stage_folders     in the order in which the stages were first started
                        done.json        read_outcome      None for an unfinished stage
                        incidents.txt    read_incidents
                        metrics.jsonl    StageReader       the newest record of each kind, while the stage runs

`patchline status`, the log of a running command, the gauges and the HTML report all read a run through this module.
Nothing here imports torch.
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from data.storage import Storage
from jobs.ownership import LOST_PERIODS, LeaseRecord, holder_state
from jobs.stage_folders import STAGE_FOLDER, started_s
from pipeline import artifacts
from pipeline.monitoring.telemetry import TAIL_BYTES, Record, records_in, without_single_seeds

# Beginning of an incident in incidents.txt (supervisor.write_incident); no line of a traceback begins like this.
INCIDENT = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )", re.MULTILINE)
CLOCK_LENGTH = len("2026-11-22 08:00:00")

# "waiting": no attempt is running; the stage is waiting for slots in the cluster or for its next attempt.
StageState: TypeAlias = Literal["waiting", "working", "ended"]

# ------------------------------------------------------------------------ the run


# "unknown": no command has ended yet, or status.json is damaged. "killed": the command could not record how it ended.
CommandState: TypeAlias = Literal["running", "done", "stopped", "killed", "unknown"]


@dataclass(frozen=True)
class LastCommand:
    """The last command on a run: read from status.json or, if that records no end, from the command's lease."""

    state: CommandState
    command: str = ""
    message: str = ""
    exit_code: int | None = None
    time: str = ""  # when the command ended; its start if it has recorded no end
    has_lease: bool = False  # only for commands without a recorded end; a copy of a run has no lease
    lease: LeaseRecord | None = None  # None if the lease cannot be read
    problem: Literal["", "missing", "altered"] = ""  # what is wrong with status.json

    @property
    def has_ended(self) -> bool:
        """Return whether the command has ended; False if this is unknown."""
        return self.state in ("done", "stopped", "killed")


def read_command(run: Path, storage: Storage, log: Callable[[str], None], periods: float = LOST_PERIODS) -> LastCommand:
    """Read whether the last command on a run is still running, or how it ended.

    A killed command has not recorded its end, so its lease is checked. A lease held on another machine is watched for
    at most `periods` renewals; `log` reports this wait. Raises StorageError or OSError if the storage fails.
    """
    try:
        last = json.loads((run / "status.json").read_text())
        command = LastCommand("stopped", last.get("command", ""), last["message"], last["exit_code"], last["time"])
    except OSError:
        return LastCommand("unknown", problem="missing")
    except (AttributeError, ValueError, KeyError):  # empty, truncated or altered
        return LastCommand("unknown", problem="altered")
    if command.exit_code == 0:
        return replace(command, state="done")
    if command.exit_code is not None:
        return command
    state, seen = holder_state(storage, log, periods)
    return replace(
        command,
        state="running" if state == "held" else "killed",
        has_lease=seen is not None,
        lease=seen.record if seen is not None else None,
    )


def stage_folders(path: Path) -> tuple[Path, list[Path]]:
    """Return the run directory, and its stage folders ordered by the stages' first start.

    If `path` is a stage's folder, the list has only that folder. The list is empty if there is no run. Folders that
    this user may not read come last. Raises PermissionError if `path` itself may not be read.
    """
    if (path / "stage.json").exists():
        return path.parent, [path]
    # `glob` yields nothing for a folder that may not be listed, and skips folders that may not be searched.
    if os.path.isdir(path) and not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    folders = [record.parent for record in path.glob("*/stage.json")]
    closed = [folder for folder in path.glob("*-????????/") if not os.access(folder, os.X_OK)]
    return path, sorted(folders, key=started_s) + sorted(set(closed) - set(folders))


# ------------------------------------------------------------------------ a stage


@dataclass(frozen=True)
class StageOutcome:
    """The outcome of a finished stage, from its done.json."""

    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # few-shot accuracies are means over all draws
    summary: str = ""  # the result of a sweep's table in words
    sets: dict[str, Any] = field(default_factory=dict)  # data sets made by the stage, by name
    diverged: str = ""  # for a diverged run of a sweep, the reason


def read_outcome(folder: Path) -> StageOutcome | None:
    """Read the outcome of a stage; None if the stage has not finished. Raises DataError if done.json was altered."""
    done = artifacts.read_done(folder)
    return None if done is None else outcome_of(done)


def outcome_of(done: Mapping[str, Any]) -> StageOutcome:
    """Convert the content of a done.json to a StageOutcome."""
    return StageOutcome(
        seconds=done["seconds"],
        metrics=without_single_seeds(done.get("metrics", {})),
        summary=str(done.get("summary", "")),
        sets=done.get("sets", {}),
        diverged=str(done.get(artifacts.DIVERGED, "")),
    )


class IncidentEntry(NamedTuple):
    """An entry in incidents.txt: a worker failure that ended an attempt."""

    clock: str  # "2026-11-22 08:00:00"
    cause: str
    traceback: str


def read_incidents(folder: Path) -> list[IncidentEntry]:
    """Return the entries of a stage's incidents.txt; the list is empty if there were no incidents."""
    path = folder / "incidents.txt"
    if not path.exists():
        return []
    incidents = []
    for entry in INCIDENT.split(path.read_text(errors="replace")):
        first_line, _, traceback = entry.partition("\n")
        if first_line.strip():
            clock = first_line[:CLOCK_LENGTH]
            incidents.append(IncidentEntry(clock, first_line[CLOCK_LENGTH + 1 :], traceback.strip()))
    return incidents


def attempt_count(folder: Path) -> int:
    """Return how many attempts of a stage have started."""
    return len(list(folder.glob("attempts/attempt-*")))


# ------------------------------------------------------------------------ a running stage


@dataclass(frozen=True)
class StatusMessage:
    """The status of a running stage, read from its folder and its workers' reports."""

    directory: Path  # the stage's folder
    stage: str
    key: str  # first eight characters of the stage's key
    state: StageState
    attempt: int  # number of the running attempt; 0 if no attempt is running
    step: int  # the last step that every worker of this attempt has reported; may be newer than `report`
    attempts: int  # started so far
    incidents: int
    report: Record | None  # the newest record of kind "train"
    commit: Record | None  # the newest record of kind "checkpoint"
    evaluation: Record | None  # the newest record of kind "evaluate"
    time: float  # seconds since 1970

    @property
    def run(self) -> str:
        """Return the name of the run's folder."""
        return self.directory.parent.name


class StageReader:
    """Reads the status of a running stage from its folder; each call reads only new content."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metrics = directory / "metrics.jsonl"
        self.offset = max(0, size_of(self.metrics) - TAIL_BYTES)
        self.newest: dict[str, Record] = {}  # by kind
        self.incidents = 0
        self.incident_bytes = 0  # size of incidents.txt when it was last counted
        # The folder is named <stage>-<key>, and the name of a stage may contain dashes.
        self.stage = directory.name
        self.key = ""
        parts = STAGE_FOLDER.fullmatch(directory.name)
        if parts is not None:
            self.stage = parts["name"]
            self.key = directory.name.removeprefix(f"{self.stage}-")

    def read(self, state: StageState, attempt: int = 0, step: int = 0) -> StatusMessage:
        """Return the stage's current status. Raises OSError if the run directory cannot be read."""
        records, self.offset = records_since(self.metrics, self.offset)
        for record in records:
            self.newest[record.get("kind", "")] = record
        incidents_bytes = size_of(self.directory / "incidents.txt")
        if incidents_bytes != self.incident_bytes:
            self.incident_bytes = incidents_bytes
            self.incidents = len(read_incidents(self.directory))
        return StatusMessage(
            directory=self.directory,
            stage=self.stage,
            key=self.key,
            state=state,
            attempt=attempt,
            step=step,
            attempts=attempt_count(self.directory),
            incidents=self.incidents,
            report=self.newest.get("train"),
            commit=self.newest.get("checkpoint"),
            evaluation=self.newest.get("evaluate"),
            time=time.time(),
        )


def records_since(path: Path, offset: int, most_bytes: int = TAIL_BYTES) -> tuple[list[Record], int]:
    """Return the records in the `most_bytes` bytes after `offset`, and the offset for the next call.

    An incomplete last line is left for the next call. Lines without a valid record, for example a line cut by the
    offset, are skipped.
    """
    size = size_of(path)
    if size < offset:  # a new file: the stage was restarted from step 0
        offset = 0
    if size == offset:
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        added = file.read(most_bytes)
    whole = added[: added.rfind(b"\n") + 1]
    return list(records_in(whole.splitlines(), path)), offset + len(whole)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file does not exist yet."""
    return path.stat().st_size if path.exists() else 0
