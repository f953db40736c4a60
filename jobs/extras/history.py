"""The history of a run, for its page and for `diff`: all steps of its stages, what ended them, what they wait for.

    run = read_run(Path("runs/digits"))
    run.stages[1].steps.loss[-1]            the loss of the last step

It builds on jobs/run/reading.py, which reads how a run stands now. Several attempts may have taken the same step:
`StageHistory.steps` are those whose weights were kept, `StageHistory.lost` those that a later attempt repeated. Nothing
here imports torch: a page of a million steps takes a second or two.
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
from safetensors import SafetensorError, safe_open

from data.checks import one_line
from data.errors import DataError, UsageError
from data.index.document import load_index
from data.index.index import Index
from data.storage import Folder, Storage
from jobs.run.reading import outcome_of, read_command, read_incidents, stage_folders
from pipeline import artifacts
from pipeline.monitoring.telemetry import Account, Record, account, read_metrics
from pipeline.values import counted, duration

BAD_SAMPLE = re.compile(r"bad sample \d+ replaced: (?P<sample>.*): (?P<reason>[^:]*)$")
LEASE_PERIODS = 1.2  # for which a lease of another machine is watched: 6 s, for `report` is not to wait for longer
DRAW = "-seed-"  # in the name of a value that is of a single draw of the shots
CLOCK = "%Y-%m-%d %H:%M"
DATE = len("2026-11-23 ")
LOG_TAIL = 1 << 20  # bytes at the end of a log.txt that are looked through
# A row a step, and a row a report, with the names of metrics.jsonl.
STEP = np.dtype([("step", int), ("samples_seen", float), ("loss", float), ("grad_norm", float), ("attempt", int)])
REPORT = np.dtype([("step", int), ("samples_seen", float), ("lr", float), ("images_per_s", float)])
REPORT_VALUES = itemgetter("step", "samples_seen", "lr", "images_per_s")


class Incident(NamedTuple):
    """A worker that ended an attempt."""

    time: str
    what: str
    traceback: str
    consequence: str


@dataclass
class StageHistory:
    """One stage of a run, as its folder shows it; the sets that it reads are loaded when they are asked for."""

    folder: Path
    name: str
    address: str  # as commands name it: the folder, or its URL where that is a copy
    record: dict[str, Any] = field(default_factory=dict)  # stage.json
    done: dict[str, Any] | None = None
    task: dict[str, Any] = field(default_factory=dict)  # task.json, of a trained stage
    provenance: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)  # metrics.jsonl
    # Of these: the first of each attempt that has begun to train, all reports of steps, and those that went on.
    starts: list[Record] = field(default_factory=list)
    reports: list[Record] = field(default_factory=list)
    kept_reports: list[Record] = field(default_factory=list)
    steps: np.recarray[Any, Any] = field(default_factory=lambda: np.recarray(0, STEP))  # that went on, in their order
    lost: np.recarray[Any, Any] = field(default_factory=lambda: np.recarray(0, STEP))  # that were taken again
    account: Account = field(default_factory=Account)  # where the wall time went
    setup: dict[str, str] = field(default_factory=dict)  # of a trained stage: what is trained, how and where
    incidents: list[Incident] = field(default_factory=list)
    problem: str = ""  # why the rest could not be read
    result: str = ""  # what the stage came to, or how far it is

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return the records of these kinds."""
        return [record for record in self.records if record["kind"] in kinds]

    def read_steps(self) -> None:
        """Read every step that was reported: of several attempts that took it, the last is the one that went on."""
        kept = [np.recarray(0, STEP)]
        lost = [np.recarray(0, STEP)]
        taken_later = math.inf  # the first of the steps behind a report that a later attempt has taken
        for report in reversed(self.reports):
            steps = np.recarray(len(report["losses"]), STEP)
            behind = np.arange(len(steps))[::-1]  # steps between each and the end of the report
            step = report["step"] - behind
            steps.step = step
            steps.samples_seen = report["samples_seen"] - behind * self.record["config"]["batch_size"]
            steps.loss = report["losses"]
            steps.grad_norm = report["grad_norms"]
            steps.attempt = report["attempt"]
            went_on = step < taken_later
            kept.append(steps[went_on])
            lost.append(steps[~went_on])
            if report["step"] < taken_later:
                self.kept_reports.append(report)
            taken_later = min(taken_later, report["step"] - len(steps) + 1)
        self.kept_reports.reverse()
        self.steps = np.concatenate(kept[::-1]).view(np.recarray)
        self.lost = np.concatenate(lost[::-1]).view(np.recarray)

    def samples_at(self, step: int) -> float:
        """Return how many samples were seen at a step, counted on from the next that is known."""
        if not len(self.steps):
            return 0.0
        place = int(np.searchsorted(self.steps.step, step))
        nearest = self.steps[min(place, len(self.steps) - 1)]
        return float(nearest.samples_seen + (step - nearest.step) * self.record["config"]["batch_size"])

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """Return the stretches of steps, first and last as the log counts them, that were not finite and left out."""
        path = self.folder / artifacts.EXCLUDED_STEPS
        if not path.exists():
            return []
        stretches = []
        for first, stop in artifacts.read_record(path)["stretches"]:
            stretches.append((first + 1, stop))
        return stretches

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

    def add_incidents(self) -> None:
        """Read incidents.txt, and find the consequence of each incident."""
        for entry in read_incidents(self.folder):
            # The clock has whole seconds: an attempt that began within the same second is a later one.
            happened = time.mktime(time.strptime(entry.clock, "%Y-%m-%d %H:%M:%S"))
            consequence = "no attempt has trained since"
            for start in self.starts[1:]:
                if start["time"] >= happened:
                    after = duration(start["time"] - happened)
                    consequence = f"attempt {start['attempt']} went on {after} later with {start['world']} workers: "
                    consequence += start["text"]
                    break
            self.incidents.append(Incident(entry.clock, entry.cause, entry.traceback, consequence))

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
class RunHistory:
    """A run directory, or one stage of it."""

    path: Path
    name: str
    address: str  # as commands name it
    stages: list[StageHistory]
    state: str  # "running", "done" or "stopped"
    end: str  # of the last command, in words
    command: str  # that goes on with it

    @property
    def trained(self) -> list[StageHistory]:
        """Return the stages that have trained or are about to."""
        return [stage for stage in self.stages if stage.task]


def read_run(path: Path, store: Storage | None = None) -> RunHistory:
    """Read a run directory or a stage's folder, or the copy of those of a store. Raises UsageError for neither."""
    run, folders = stage_folders(path)
    name = path.name
    if path != run:
        name = f"{run.name}/{path.name}"
    if not folders:
        neighbours = sorted({record.parents[1].name for record in path.parent.glob("*/*/stage.json")})
        raise UsageError(
            f"no run at {path}\n  expected a run directory, or a stage's folder in it\n"
            f"  runs next to it: {', '.join(neighbours) or 'none'}"
        )
    storage = store or Folder(run)
    # The lease of another machine is watched only for a moment.
    last = read_command(run, storage, lambda text: None, LEASE_PERIODS)
    state = "stopped"
    end = "no command has ended yet"
    if last.exit_code is not None:
        state = "done" if last.exit_code == 0 else "stopped"
        end = f"{last.message} (exit {last.exit_code}, {last.time})"
    # A copy of a run has no lease, which means nothing.
    elif last.state == "running" or (last.state == "killed" and not last.has_lease):
        state = "running"
        end = f"since {last.time}"
    elif last.state == "killed":
        end = f"killed, or lost with its machine; begun {last.time}"
    stages = [read_stage(folder, storage.address(folder.name)) for folder in folders]
    address = storage.address("" if path == run else path.name)
    return RunHistory(path, name, address, stages, state, end, last.command)


def read_stage(folder: Path, address: str) -> StageHistory:
    """Read a stage's folder; what was altered is said on the page, and the rest of the page is there."""
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
        # Reports that were read whole stay: they tell how far the stage is.
        if not len(stage.steps):
            stage.reports = []

    if stage.done is None:
        if stage.reports:
            stage.result = f"step {stage.reports[-1]['step']:,} of {stage.reports[-1]['steps']:,}"
    else:
        stage.result = result_of(stage.done)
    return stage


def result_of(done: Mapping[str, Any]) -> str:
    """Return what a finished stage resulted in: why it diverged, a sweep's choice, the sets it made, or its metrics."""
    outcome = outcome_of(done)
    if outcome.diverged or "summary" in done:
        return outcome.diverged or outcome.summary
    if "sets" in done:
        return ", ".join(f"{name} {packed['samples']:,} samples" for name, packed in outcome.sets.items())
    return ", ".join(f"{name} {value:.2%}" for name, value in outcome.metrics.items())


def setup_of(stage: StageHistory) -> dict[str, str]:
    """Return what a stage trains, how, when and where: in words, from its config and from its attempts."""
    config = stage.record["config"]
    model = stage.record["model"]
    optim = config["optim"]
    augment = config["data"]["augment"]
    # 1. The model; its parameters are counted in the weights, without torch.
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
    first_weights = job.get("init") or "random"

    # 2. How long, and at which rate.
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

    # 3. What becomes of an image.
    changes = [f"{augment['crop']} crop"]
    if augment["crop"] == "inception":
        changes[0] += f" of at least {augment['min_area']:.0%}"
    elif augment["crop"] == "none":
        changes = []
    if augment["flip"]:
        changes.append("flip")
    if augment["randaug_layers"]:
        changes.append(f"RandAugment({augment['randaug_layers']}, {augment['randaug_magnitude']:g})")
    for name in ("mixup", "label_smoothing"):
        if config[name]:
            changes.append(f"{name.replace('_', ' ')} {config[name]:g}")

    # 4. When and where; attempts that were alike count once.
    when = time.strftime(CLOCK, time.localtime(artifacts.started_s(stage.folder)))
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
        "first weights": first_weights.removeprefix(f"{job.get('run')}/"),
        "image size": " × ".join(map(str, model["image_size"])) + " pixels",
        "steps": steps,
        "learning rate": rate,
        "optimizer": optimizer,
        "augmentation": ", ".join(changes) or "none",
        "device": ", then ".join(places) or "none yet",
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with dotted names: {"optim": {"lr": 1}} → {"optim.lr": 1}; an empty section is a value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened
