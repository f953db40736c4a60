"""Read a run's history for `report` and `diff`: all steps of its stages, restarts, incidents and the current state.

    run = read_run(Path("runs/digits"))
    run.stages[1].steps.loss[-1]            the loss of the last step

The current state of a run is read by jobs/run/reading.py. Several attempts can train the same step:
`StageHistory.steps` has the final version of each step, and `StageHistory.lost` the versions that a later attempt
repeated. This module does not import torch, so reading a run of a million steps takes only one to two seconds.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from data.checks import one_line
from data.errors import DataError, UsageError
from data.index.document import load_index
from data.index.index import Index
from data.storage import Folder, Storage
from jobs.named_stages import resume_command
from jobs.run.reading import outcome_of, read_command, read_incidents, stage_folders
from jobs.stage_folders import started_s
from pipeline import artifacts
from pipeline.monitoring.telemetry import Account, Record, account, read_metrics
from pipeline.values import counted, duration
from pipeline.variables import restored

BAD_SAMPLE = re.compile(r"bad sample \d+ replaced: (?P<sample>.*): (?P<reason>[^:]*)$")
LEASE_PERIODS = 1.2  # watch another machine's lease for 6 s only, because `report` must not wait longer
DRAW = "-seed-"  # part of a metric's name if the metric is for a single draw of few-shot samples
CLOCK = "%Y-%m-%d %H:%M"
DATE = len("2026-11-23 ")
LOG_TAIL = 1 << 20  # number of bytes at the end of log.txt to search
# Columns of the table of steps and of the table of reports, named as in metrics.jsonl.
STEP = np.dtype([("step", int), ("samples_seen", float), ("loss", float), ("grad_norm", float), ("attempt", int)])
REPORT = np.dtype([("step", int), ("samples_seen", float), ("lr", float), ("images_per_s", float)])
REPORT_VALUES = itemgetter("step", "samples_seen", "lr", "images_per_s")
LARGEST = float(np.finfo(np.float32).max)


def measured(values: npt.ArrayLike) -> np.ndarray:
    """Return recorded values as float64, with NaN for finite values beyond float32, which no run has measured.

    Sums and products of the remaining values cannot overflow.
    """
    values = np.asarray(values, float)
    return np.where(np.isfinite(values) & (np.abs(values) > LARGEST), np.nan, values)


class Incident(NamedTuple):
    """A worker failure that ended an attempt, and its consequence."""

    time: str
    what: str
    traceback: str
    consequence: str


@dataclass
class StageHistory:
    """The history of a stage, read from the stage's folder; data sets are loaded on first access."""

    folder: Path
    name: str
    address: str  # how to type the stage in commands: its folder, or the URL if the folder is a copy
    record: dict[str, Any] = field(default_factory=dict)  # stage.json
    done: dict[str, Any] | None = None
    task: dict[str, Any] = field(default_factory=dict)  # task.json of a trained stage
    provenance: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)  # metrics.jsonl
    # Subsets of `records`: the start of each attempt, all step reports, and the reports not repeated by a later
    # attempt.
    starts: list[Record] = field(default_factory=list)
    reports: list[Record] = field(default_factory=list)
    kept_reports: list[Record] = field(default_factory=list)
    steps: np.recarray[Any, Any] = field(default_factory=lambda: np.recarray(0, STEP))  # final steps, in order
    lost: np.recarray[Any, Any] = field(default_factory=lambda: np.recarray(0, STEP))  # repeated steps
    account: Account = field(default_factory=Account)  # breakdown of the wall time
    setup: dict[str, str] = field(default_factory=dict)  # table for the report: model, schedule, devices, …
    incidents: list[Incident] = field(default_factory=list)
    problem: str = ""  # why the folder could not be read completely
    result: str = ""  # the outcome in one line, or the progress so far

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return the records whose kind is one of `kinds`."""
        return [record for record in self.records if record["kind"] in kinds]

    def read_steps(self) -> None:
        """Fill `steps`, `lost` and `kept_reports`; if several attempts trained a step, the last one counts."""
        kept = [np.recarray(0, STEP)]
        lost = [np.recarray(0, STEP)]
        repeated_from = math.inf  # first step repeated by an attempt after this report
        for report in reversed(self.reports):
            steps = np.recarray(len(report["losses"]), STEP)
            steps_to_end = np.arange(len(steps))[::-1]  # number of steps from each step to the last one of the report
            step = report["step"] - steps_to_end
            steps.step = step
            steps.samples_seen = report["samples_seen"] - steps_to_end * self.record["config"]["batch_size"]
            steps.loss = measured(report["losses"])
            steps.grad_norm = measured(report["grad_norms"])
            steps.attempt = report["attempt"]
            is_final = step < repeated_from
            kept.append(steps[is_final])
            lost.append(steps[~is_final])
            if report["step"] < repeated_from:
                self.kept_reports.append(report)
            repeated_from = min(repeated_from, report["step"] - len(steps) + 1)
        self.kept_reports.reverse()
        self.steps = np.concatenate(kept[::-1]).view(np.recarray)
        self.lost = np.concatenate(lost[::-1]).view(np.recarray)

    def samples_at(self, step: int) -> float:
        """Return the number of samples seen by the end of a step, extrapolated from the nearest recorded step."""
        if not len(self.steps):
            return 0.0
        place = int(np.searchsorted(self.steps.step, step))
        nearest = self.steps[min(place, len(self.steps) - 1)]
        return float(nearest.samples_seen + (step - nearest.step) * self.record["config"]["batch_size"])

    @property
    def excluded_steps(self) -> list[tuple[int, int]]:
        """Return the ranges (first, last) of steps excluded as non-finite, numbered as in the log."""
        path = self.folder / artifacts.EXCLUDED_STEPS
        if not path.exists():
            return []
        ranges = []
        for first, stop in artifacts.read_record(path)["stretches"]:
            ranges.append((first + 1, stop))
        return ranges

    @cached_property
    def sets(self) -> dict[str, Index | str]:
        """Return a trained stage's data sets by role; an unreadable data set is replaced with its error."""
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
                sets[name] = load_index(restored(path, self.folder / artifacts.TASK))
            except (DataError, OSError) as error:
                sets[name] = f"{path} cannot be read now: {str(error).splitlines()[0]}"
        return sets

    def add_incidents(self) -> None:
        """Read incidents.txt and find the attempt that followed each incident."""
        for entry in read_incidents(self.folder):
            # The time has whole seconds, so an attempt that began in the same second counts as the next one.
            happened = time.mktime(time.strptime(entry.clock, "%Y-%m-%d %H:%M:%S"))
            consequence = "no attempt has trained since then"
            for start in self.starts[1:]:
                if start["time"] >= happened:
                    after = duration(start["time"] - happened)
                    consequence = f"attempt {start['attempt']} resumed {after} later with {start['world']} workers: "
                    consequence += start["text"]
                    break
            self.incidents.append(Incident(entry.clock, entry.cause, entry.traceback, consequence))

    @cached_property
    def log_lines(self) -> list[str]:
        """Return the lines in the last megabyte of the stage's log."""
        path = self.folder / "log.txt"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            return file.read().decode(errors="replace").splitlines()

    @property
    def named_bad_samples(self) -> dict[str, list[str]]:
        """Return the logged bad samples by reason; each worker logs its first bad sample, then every 1,000th."""
        samples: dict[str, list[str]] = {}
        for line in self.log_lines:
            match = BAD_SAMPLE.search(line)
            if match is not None:
                samples.setdefault(match["reason"], []).append(match["sample"])
        return samples


@dataclass(frozen=True)
class RunHistory:
    """The history of a run directory, or of one stage in it."""

    path: Path
    name: str
    address: str  # how to type the run in commands
    stages: list[StageHistory]
    state: str  # "running", "done" or "stopped"
    end: str  # describes how the last command ended
    command: str  # command that resumes the run

    @property
    def trained(self) -> list[StageHistory]:
        """Return the training stages that have started."""
        return [stage for stage in self.stages if stage.task]


def read_run(path: Path, store: Storage | None = None) -> RunHistory:
    """Read a run directory or one stage's folder. Raises UsageError if `path` is neither.

    `store` is the object store of the run if `path` is a local copy.
    """
    run, folders = stage_folders(path)
    name = path.name
    if path != run:
        name = f"{run.name}/{path.name}"
    if not folders:
        neighbours = sorted({record.parents[1].name for record in path.parent.glob("*/*/stage.json")})
        raise UsageError(
            f"no run at {path}\n  expected a run directory, or a stage's folder in it\n"
            f"  runs in {path.parent}: {', '.join(neighbours) or 'none'}"
        )
    storage = store or Folder(run)
    # Watch the lease of another machine only briefly.
    last = read_command(run, storage, lambda text: None, LEASE_PERIODS)
    state = "stopped"
    end = "no command has ended yet"
    if last.exit_code is not None:
        state = "done" if last.exit_code == 0 else "stopped"
        end = f"{last.message} (exit {last.exit_code}, {last.time})"
    # A local copy of a run has no lease, so a missing lease does not mean that the run was killed.
    elif last.state == "running" or (last.state == "killed" and not last.has_lease):
        state = "running"
        end = f"since {last.time}"
    elif last.state == "killed":
        end = f"killed, or its machine was lost; started {last.time}"
    stages = [read_stage(folder, storage.address(folder.name)) for folder in folders]
    address = storage.address("" if path == run else path.name)
    command = resume_command(run) if last.command else ""
    return RunHistory(path, name, address, stages, state, end, command)


def read_stage(folder: Path, address: str) -> StageHistory:
    """Read a stage's folder; store any error in `problem`, so that the rest of the report can be shown."""
    stage = StageHistory(folder, folder.name, address)
    try:
        stage.record = artifacts.read_record(folder / "stage.json")
        stage.name = str(stage.record.get("name") or folder.name)
        stage.done = artifacts.read_done(folder)
        if (folder / artifacts.TASK).exists():
            stage.task = artifacts.read_record(folder / artifacts.TASK)
        if (folder / artifacts.PROVENANCE).exists():
            stage.provenance = artifacts.read_record(folder / artifacts.PROVENANCE)
        stage.records = read_metrics(folder, None)
        stage.starts = stage.of_kind("start")
        stage.reports = stage.of_kind("train")
        stage.read_steps()
        stage.add_incidents()
        stage.account = account(stage.records)
        if stage.task:
            stage.setup = setup_of(stage)
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        stage.problem = one_line(str(error)) or type(error).__name__
        stage.task = {}
        stage.records = []
        # If all reports were read, keep them, because they show the progress of the stage.
        if not len(stage.steps):
            stage.reports = []

    if stage.done is None:
        if stage.reports:
            stage.result = f"step {stage.reports[-1]['step']:,} of {stage.reports[-1]['steps']:,}"
    else:
        stage.result = result_of(stage.done)
    return stage


def result_of(done: Mapping[str, Any]) -> str:
    """Return a finished stage's result as text: the divergence, the values a sweep chose, new data sets, or metrics."""
    outcome = outcome_of(done)
    if outcome.diverged or "summary" in done:
        return outcome.diverged or outcome.summary
    if "sets" in done:
        return ", ".join(f"{name} {packed['samples']:,} samples" for name, packed in outcome.sets.items())
    return ", ".join(f"{name} {value:.2%}" for name, value in outcome.metrics.items())


def setup_of(stage: StageHistory) -> dict[str, str]:
    """Describe a stage's training in a table: model, schedule, augmentation, duration and devices."""
    config = stage.record["config"]
    model = stage.record["model"]
    optim = config["optim"]
    augment = config["data"]["augment"]
    # 1. The model. Parameters are counted in the weights file, which does not need torch.
    architecture = [str(config["model"].get("name", model["family"]))]
    for name in ("patch", "width", "depth", "heads", "units"):
        if name in model:
            size = str(model[name])
            if name == "patch":
                size = " × ".join(map(str, model[name]))
            architecture.append(f"{name} {size}")
    parameters = 0
    with suppress(OSError, SafetensorError), safe_open(stage.folder / artifacts.WEIGHTS, "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping)
            parameters += math.prod(weights.get_slice(name).get_shape())
    if parameters:
        architecture.append(f"{parameters:,} parameters")

    job = stage.task["job"]
    initial_weights = job.get("init") or "random"

    # 2. Length and learning rate.
    batch = counted(config["batch_size"], "image")
    steps = f"batches of {batch}, none yet"
    if stage.reports:
        last = stage.reports[-1]
        steps = f"{last['step']:,} of {last['steps']:,}, in batches of {batch}: {last['samples_seen']:,} images seen"
    schedule = optim["schedule"]
    rate = f"{optim['lr']:g} at the peak, {schedule['decay']}"
    if schedule["warmup_steps"]:
        rate += f" after {counted(schedule['warmup_steps'], 'step')} of warm-up"
    optimizer = f"{optim['name']}, weight decay {optim['weight_decay']:g}"
    if optim["clip"]:
        optimizer += f", gradients clipped at {optim['clip']:g}"

    # 3. Augmentation.
    changes = [f"{augment['crop']} crop"]
    if augment["crop"] == "inception":
        changes[0] += f" of at least {augment['min_area']:.0%}"
    elif augment["crop"] == "none":
        changes = []
    if augment["flip"]:
        changes.append("flip")
    if augment["randaug_layers"]:
        changes.append(f"RandAugment({augment['randaug_layers']}, {augment['randaug_magnitude']:g})")
        # Records of earlier versions lack this key.
        if augment.get("randaug_relative"):
            changes[-1] += " in proportion to the image"
    for name in ("mixup", "label_smoothing"):
        if config[name]:
            changes.append(f"{name.replace('_', ' ')} {config[name]:g}")

    # 4. Time and devices; consecutive attempts on equal devices are listed once.
    when = time.strftime(CLOCK, time.localtime(started_s(stage.folder)))
    if stage.records:
        ended = time.strftime(CLOCK, time.localtime(stage.records[-1]["time"]))
        when += f" to {ended.removeprefix(when[:DATE])}"
    places: list[str] = []
    for start in stage.starts:
        place = f"{counted(start['world'], 'worker')} on {start.get('hardware') or 'unknown hardware'}"
        if place not in places[-1:]:
            places.append(place)
    return {
        "date and time": when,
        "model": ", ".join(architecture),
        "initial weights": initial_weights.removeprefix(f"{job.get('run')}/"),
        "image size": " × ".join(map(str, model["image_size"])) + " pixels",
        "steps": steps,
        "learning rate": rate,
        "optimizer": optimizer,
        "augmentation": ", ".join(changes) or "none",
        "device": ", then ".join(places) or "none yet",
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted names: {"optim": {"lr": 1}} → {"optim.lr": 1}; an empty section is a value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened
