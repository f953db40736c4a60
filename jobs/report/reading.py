"""What a run's folder holds, read for its page: the stages, the steps of each, what ended it, what it waits for.

    run = read_run(Path("runs/digits"))
    run.stages[1].steps.loss[-1]            the loss of the last step that was taken, over all attempts

A step may have been taken by several attempts. `Steps.kept` is true for the one whose weights went on; the others are
steps that a later attempt did again. Nothing here imports torch: a page of a million steps takes a second or two.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.checks import one_line
from data.errors import DataError, UsageError
from data.index.document import load_index
from data.index.index import Index
from data.storage import Folder, Storage
from jobs.ownership import judge
from pipeline import artifacts
from pipeline.monitoring.telemetry import Record, duration, read_metrics

INCIDENT = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )", re.MULTILINE)
BAD_SAMPLE = re.compile(r"bad sample \d+ replaced: (?P<sample>.*): (?P<reason>[^:]*)$")
LEASE_PERIODS = 1.2  # for which a lease of another machine is watched: 6 s, for `report` is not to wait for longer
DRAW = "-seed-"  # in the name of a value that is of a single draw of the shots
LOG_TAIL = 1 << 20  # bytes at the end of a log.txt that are looked through


class Steps(NamedTuple):
    """The steps of all attempts in the order written, (n,) each."""

    step: np.ndarray
    samples: np.ndarray  # seen when the step was done; those of left-out stretches are not counted
    loss: np.ndarray
    grad_norm: np.ndarray
    attempt: np.ndarray  # its number in the run
    kept: np.ndarray  # bool


class Incident(NamedTuple):
    """A worker that ended an attempt."""

    time: str
    what: str
    traceback: str
    consequence: str


@dataclass
class Stage:
    """One stage of a run, as its folder shows it; the sets that it reads are loaded when they are asked for."""

    folder: Path
    name: str
    address: str  # as commands name it: the folder, or its URL where that is a copy
    record: dict[str, Any] = field(default_factory=dict)  # stage.json
    done: dict[str, Any] | None = None
    task: dict[str, Any] = field(default_factory=dict)  # task.json, of a trained stage
    provenance: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)  # metrics.jsonl
    problem: str = ""  # why the rest could not be read
    result: str = ""  # what the stage came to, or how far it is

    @property
    def batch_size(self) -> int:
        return int(self.record["config"]["batch_size"])

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return the records of these kinds."""
        return [record for record in self.records if record["kind"] in kinds]

    @cached_property
    def starts(self) -> list[Record]:
        """Return the first record of each attempt that has begun to train."""
        return self.of_kind("start")

    @cached_property
    def reports(self) -> list[Record]:
        """Return every report of steps, over all attempts."""
        return self.of_kind("train")

    @cached_property
    def kept_reports(self) -> list[Record]:
        """Return the reports whose last step went on: no later attempt has begun before it."""
        kept_up_to: dict[int, float] = {}  # by attempt
        furthest = math.inf
        for start in reversed(self.starts):
            kept_up_to.setdefault(start["attempt"], furthest)
            furthest = min(furthest, start["step"])
        kept = []
        for report in self.reports:
            if report["step"] <= kept_up_to.get(report["attempt"], math.inf):
                kept.append(report)
        return kept

    @cached_property
    def steps(self) -> Steps:
        """Return every step that was reported. Raises DataError where a record was altered."""
        parts = [np.zeros((5, 0))]
        for report in self.reports:
            count = len(report["losses"])
            behind = np.arange(count)[::-1]  # steps between each and the end of the report
            samples = report["samples_seen"] - behind * self.batch_size
            attempts = np.full(count, report["attempt"])
            columns = [report["step"] - behind, samples, report["losses"], report["grad_norms"], attempts]
            parts.append(np.array(columns, float))
        step, samples, loss, norm, attempts = np.concatenate(parts, axis=1)
        # Of several attempts that took a step, the last is the one whose weights went on.
        later = np.minimum.accumulate(np.append(math.inf, step[::-1]))[:-1][::-1]  # the least step behind each
        return Steps(step.astype(int), samples, loss, norm, attempts.astype(int), step < later)

    def samples_at(self, step: int) -> float:
        """Return how many samples were seen at a step, the nearest that is known."""
        steps = self.steps
        if not len(steps.step):
            return 0.0
        return float(steps.samples[np.argmin(np.abs(steps.step - step))])

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """Return the stretches of steps, first and last as the log counts them, that were not finite and left out."""
        path = self.folder / artifacts.EXCLUDED_STEPS
        if not path.exists():
            return []
        return [(first + 1, stop) for first, stop in artifacts.read_record(path)["stretches"]]

    @cached_property
    def sets(self) -> dict[str, Index | str]:
        """Return the sets that a trained stage reads, by their place in the config; a text where one cannot be read."""
        job = self.task.get("job", {})
        paths = {}
        for number, path in enumerate(job.get("train", []), 1):
            paths[f"train {number}"] = path
        if len(paths) == 1:
            paths = {"train": paths["train 1"]}
        for name in ("evaluate", "probe_train", "probe_test"):
            if job.get(name):
                paths[name.replace("_", " ")] = job[name]
        sets: dict[str, Index | str] = {}
        for name, path in paths.items():
            try:
                sets[name] = load_index(path)
            except (DataError, OSError) as error:
                sets[name] = f"{path} cannot be read now: {str(error).splitlines()[0]}"
        return sets

    @cached_property
    def incidents(self) -> list[Incident]:
        """Return what incidents.txt tells, each with what became of it."""
        path = self.folder / "incidents.txt"
        incidents: list[Incident] = []
        if not path.exists():
            return incidents
        for entry in INCIDENT.split(path.read_text(errors="replace")):
            first_line, _, traceback = entry.partition("\n")
            if not first_line.strip():
                continue
            clock = first_line[:19]
            # The clock has whole seconds: an attempt that began within the same second is a later one.
            happened = time.mktime(time.strptime(clock, "%Y-%m-%d %H:%M:%S"))
            consequence = "no attempt has trained since"
            for start in self.starts[1:]:
                if start["time"] >= happened:
                    after = duration(start["time"] - happened)
                    consequence = f"attempt {start['attempt']} went on {after} later with {start['world']} workers: "
                    consequence += start["text"]
                    break
            incidents.append(Incident(clock, first_line[20:], traceback.strip(), consequence))
        return incidents

    @cached_property
    def log_lines(self) -> list[str]:
        """Return the last lines of the stage's log."""
        path = self.folder / "log.txt"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            return file.read().decode(errors="replace").splitlines()

    @property
    def named_bad_samples(self) -> dict[str, list[str]]:
        """Return the bad samples that the log names, by reason: of each worker the first and every thousandth."""
        samples: dict[str, list[str]] = {}
        for line in self.log_lines:
            match = BAD_SAMPLE.search(line)
            if match is not None:
                samples.setdefault(match["reason"], []).append(match["sample"])
        return samples


@dataclass(frozen=True)
class Run:
    """A run directory, or one stage of it."""

    path: Path
    name: str
    address: str  # as commands name it
    stages: list[Stage]
    state: str  # "running", "done" or "stopped"
    end: str  # of the last command, in words
    command: str  # that goes on with it

    @property
    def trained(self) -> list[Stage]:
        """Return the stages that have trained or are about to."""
        return [stage for stage in self.stages if stage.task]


def read_run(path: Path, store: Storage | None = None) -> Run:
    """Read a run directory or a stage's folder, or the copy of those of a store. Raises UsageError for neither."""
    records = list(path.glob("*/stage.json"))
    run = path
    name = path.name
    if (path / "stage.json").exists():
        records = [path / "stage.json"]
        run = path.parent
        name = f"{run.name}/{path.name}"
    if not records:
        neighbours = sorted({record.parents[1].name for record in path.parent.glob("*/*/stage.json")})
        raise UsageError(
            f"no run at {path}\n  expected a run directory, or a stage's folder in it\n"
            f"  runs beside it: {', '.join(neighbours) or 'none'}"
        )
    storage = store or Folder(run)
    state = "stopped"
    end = "no command has ended yet"
    command = ""
    try:
        last = json.loads((run / "status.json").read_text())
        command = last["command"]
        end = f"{last['message']} (exit {last['exit_code']}, {last['time']})"
        if last["exit_code"] == 0:
            state = "done"
        elif last["exit_code"] is None:
            # A command that was killed could not write its end: status.json says "running" for ever.
            # A copy of a run has no lease, which says nothing. A lease of another machine is watched for a moment.
            lease_state, lease = judge(storage, lambda text: None, LEASE_PERIODS)
            end = f"killed, or lost with its machine; begun {last['time']}"
            if lease_state == "held" or lease is None:
                state = "running"
                end = f"since {last['time']}"
    except (OSError, ValueError, KeyError, TypeError):  # not there, torn or altered
        pass
    records.sort(key=lambda record: artifacts.started_s(record.parent))
    stages = [read_stage(record.parent, storage.address(record.parent.name)) for record in records]
    address = storage.address("" if path == run else path.name)
    return Run(path, name, address, stages, state, end, command)


def read_stage(folder: Path, address: str) -> Stage:
    """Read a stage's folder; what was altered is said on the page, and the rest of the page is there."""
    stage = Stage(folder, folder.name, address)
    try:
        stage.record = artifacts.read_record(folder / "stage.json")
        stage.name = str(stage.record.get("name") or folder.name)
        stage.done = artifacts.read_done(folder)
        if (folder / artifacts.TASK).exists():
            stage.task = artifacts.read_record(folder / artifacts.TASK)
        if (folder / artifacts.PROVENANCE).exists():
            stage.provenance = artifacts.read_record(folder / artifacts.PROVENANCE)
        stage.records = read_metrics(folder, None)
        _ = stage.steps, stage.incidents  # an altered record is met here, and not amid the page
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        stage.problem = one_line(str(error)) or type(error).__name__
        stage.task = {}
        stage.records = []
        # Reports that were read whole stay: they tell how far the stage is.
        if "steps" not in vars(stage):
            stage.reports = []

    if stage.done is None:
        if stage.reports:
            stage.result = f"step {stage.reports[-1]['step']:,} of {stage.reports[-1]['steps']:,}"
    elif "diverged" in stage.done or "summary" in stage.done:
        stage.result = str(stage.done.get("diverged") or stage.done["summary"])
    elif "sets" in stage.done:
        sets = [f"{name} {packed['samples']:,} samples" for name, packed in stage.done["sets"].items()]
        stage.result = ", ".join(sets)
    else:
        metrics = []
        for name, value in stage.done.get("metrics", {}).items():
            if DRAW not in name:
                metrics.append(f"{name} {value:.2%}")
        stage.result = ", ".join(metrics)
    return stage


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with dotted names: {"optim": {"lr": 1}} → {"optim.lr": 1}; an empty section is a value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened
