"""Proof of training: stretches of a run between two of its commits, taken again and compared to the bit.

1. `choose_stretches` draws stretches between neighbouring commits, as many as fit the share, or takes those named.
2. Each is taken again in a run directory of its own (jobs/replays/stretch.py).
3. `compare` sets what came out beside what the run has kept: every loss and gradient norm, the trace of each step in
   exact mode, the ledger, and every bit of weights and moments in the commit.
4. A stretch that differs is taken once more: a machine that gives two results accuses nobody.
5. `judge` tells what a difference is: other data (the ledger), other hardware (from the first step on, in the last
   bits, under other conditions), or silent corruption (the steps before it agree), with the step and, of a run in exact
   mode, the worker.
6. audit.json says what was checked, on what, by which code; `ssh-keygen` signs it where a key is given.
"""

import math
import platform
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from data.errors import ClusterError, DataError, UsageError
from jobs.replays.stretch import RecordedStage, made_by, output_folder, recorded_stage, take_again, without_evaluation
from jobs.stages import training
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import Reader
from pipeline.monitoring.telemetry import Record, account, duration, read_metrics
from pipeline.versions import git_commit

NAMED = 8  # parameters that a difference names, the largest first
LAST_BITS = 1e-4  # of a loss: kernels of other hardware differ by less, for some steps
SIGNED_AS = "patchline"  # the namespace of a signature
CONDITIONS = ("hardware", "threads", "versions", "code")  # of an attempt's start, which bits may depend on


@dataclass(frozen=True)
class State:
    """A parameter's weights or a moment of it, where two commits of one step differ."""

    parameter: str
    kind: str  # "master", or a moment's name
    elements: int  # that differ
    element: int  # with the largest difference
    difference: float
    relative: float  # to the root mean square of the state
    worker: int  # that saved this element


@dataclass
class Finding:
    """What became of one stretch."""

    start: int
    last: int
    seconds: float = 0.0
    steps: int = 0  # whose losses and norms were compared
    traced: int = 0  # of them, those whose traces were
    states: int = 0  # compared, bit by bit
    ledger: str = ""  # of the last step, as taken again
    weights: dict[str, str] = field(default_factory=dict)  # sha256 of the files of the commit that was compared
    world: int = 0  # on which the steps were taken again
    conditions: dict[str, Any] = field(default_factory=dict)  # that the two do not share: [the run's, the audit's]
    verdict: str = "equal"
    step: int | None = None  # that a difference begins at
    worker: int | None = None
    what: str = ""  # differs first: ledger, state, loss, gradient
    size: float = 0.0  # of the first difference of a loss or norm, relative
    differing: list[State] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return what the stretch is called, in lines and folders."""
        return f"steps-{self.start + 1}-{self.last}"


def audit(
    run: str,
    *,
    share: float,
    first: int | None,
    last: int | None,
    seed: int | None,
    output: str | None,
    key: str | None,
    overrides: Sequence[str],
) -> None:
    """Take stretches of a run again, write audit.json, and print what came out; a line each.

    Raises DataError where a stretch differs, UsageError, and what a run raises.
    """
    stage = recorded_stage(run)
    folder = output_folder(stage, "audit", output)
    if key is not None:
        if shutil.which("ssh-keygen") is None:
            raise ClusterError("--key needs ssh-keygen, which is not there\n  install OpenSSH, or leave out --key")
        if not Path(key).is_file():
            raise UsageError(f"--key {key} is no file\n  expected a key that ssh-keygen made, as ~/.ssh/id_ed25519")
    seed = secrets.randbits(32) if seed is None else seed
    stretches = choose_stretches(stage, share, first, last, seed)
    steps = sum(stretch.last - stretch.start for stretch in stretches)
    began = time.monotonic()
    echo(
        f"{stage.folder.name}: {len(stretches)} stretches of {steps:,} steps in all, {steps / stage.steps:.2%} of "
        f"{stage.steps:,}, drawn with the seed {seed}"
    )

    # 1. The stretches, one after the other: each is an attempt of its own.
    for finding in stretches:
        again = taken(stage, finding, folder / finding.name, overrides)
        compare(stage, finding, again)
        if finding.verdict != "equal":
            once_more = Finding(finding.start, finding.last)
            compare_runs(again, taken(stage, once_more, folder / f"{finding.name}-again", overrides), once_more)
            judge(finding)
            if once_more.verdict != "equal":
                finding.verdict = "unclear: this machine has given two results"
        echo(line_of(finding))
        if finding.verdict == "equal":
            shutil.rmtree(folder / finding.name)

    # 2. What it cost, as a share of the run, and the report.
    seconds = time.monotonic() - began
    booked = account(stage.records)
    price = seconds / max(booked.wall, 1e-9)
    echo(f"{duration(seconds)}, {price:.2%} of the run's {duration(booked.wall)}, starts included")
    differing = [finding for finding in stretches if finding.verdict != "equal"]
    report = folder / "audit.json"
    values = {
        **made_by(stage),
        "commit": git_commit(),
        "machine": platform.node(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "steps": steps,
        "share": steps / stage.steps,
        "seconds": round(seconds, 1),
        "seconds_of_run": round(booked.wall, 1),
        "verdict": "differs" if differing else "equal",
        "stretches": list(map(asdict, stretches)),
    }
    artifacts.write_record(report, values)
    echo(f"written: {report}")
    if key is not None:
        sign(report, key)
    if differing:
        raise DataError(
            f"{stage.folder.name} is not what these steps give: {line_of(differing[0])}\n"
            f"  what was taken again is in {folder / differing[0].name}; checkpoints diff compares it with the run"
        )


def choose_stretches(
    stage: RecordedStage, share: float, first: int | None, last: int | None, seed: int
) -> list[Finding]:
    """Return the stretch that is named, or as many as fit the share of all steps, and one at the least.

    Raises UsageError where no commits are there to compare with.
    """
    places = sorted({0, *stage.commits})
    listed = ", ".join(map(str, places[-12:]))
    if first is not None or last is not None:
        if first is None or last is None or first not in places or last not in stage.commits or first >= last:
            raise UsageError(f"--from {first} --to {last}: expected two commits of {stage.folder.name}: {listed}")
        return [Finding(first, last)]
    if not 0 < share <= 1:
        raise UsageError(f"--share is {share}, expected more than 0 and at most 1, as 0.01")
    stretches = [Finding(start, end) for start, end in pairwise(places)]
    if not stretches:
        raise UsageError(f"{stage.folder.name} has no commits: there is nothing to compare with")
    budget = max(share * stage.steps, min(finding.last - finding.start for finding in stretches))
    random.Random(seed).shuffle(stretches)
    chosen = []
    for finding in stretches:
        length = finding.last - finding.start
        if length <= budget:
            chosen.append(finding)
            budget -= length
    return sorted(chosen, key=lambda finding: finding.start)


def taken(stage: RecordedStage, finding: Finding, folder: Path, overrides: Sequence[str]) -> Path:
    """Take a stretch again, and return the folder of the stage that did."""
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of an audit before
    cfg = without_evaluation(stage.config_at(finding.start + 1, finding.last))
    cluster = stage.cluster(finding.last, overrides)
    work = partial(training.run, until=finding.last)
    again = take_again(stage, cfg, folder, finding.start, cluster, work, quiet=True)
    finding.seconds = round(time.monotonic() - began, 2)
    return again


# ------------------------------------------------------------------------ what is compared


def compare(stage: RecordedStage, finding: Finding, again: Path) -> None:
    """Set what a stretch gave beside what the run has kept of it."""
    finding.weights = {name: file["sha256"] for name, file in stage.manifest(finding.last).files.items()}
    compare_runs(stage.folder, again, finding)
    theirs = stage.start_of(finding.last)
    ours = read_start(again)
    for name in CONDITIONS:
        if theirs.get(name) != ours.get(name):
            finding.conditions[name] = [theirs.get(name), ours.get(name)]
    finding.world = ours.get("world", 0)


def compare_runs(folder: Path, again: Path, finding: Finding) -> None:
    """Compare the steps and the last commit of two stages, and note in the finding what differs."""
    before = steps_of(read_metrics(folder))
    after = steps_of(read_metrics(again))
    for step in range(finding.start + 1, finding.last + 1):
        # A disk may have refused the record, and a stretch that was given up has none.
        if step not in before or step not in after:
            continue
        finding.steps += 1
        first, second = before[step], after[step]
        finding.traced += bool(first.trace and second.trace)
        what, worker = first.differs(second)
        if what and finding.step is None:
            finding.step, finding.what, finding.worker = step, what, worker
            finding.size = max(relative(first.loss, second.loss), relative(first.norm, second.norm))

    theirs = commit_of(folder, finding.last)
    ours = commit_of(again, finding.last)
    manifest = read_manifest(theirs)
    finding.ledger = read_manifest(ours).ledger
    if manifest.ledger != finding.ledger:
        finding.what = "ledger"
    first_reader = Reader(theirs, manifest.files)
    second_reader = Reader(ours, read_manifest(ours).files)
    for (name, kind), pieces in sorted(first_reader.pieces.items()):
        finding.states += 1
        for piece in pieces:
            before_state = first_reader(name, kind, piece.start, piece.length)
            after_state = second_reader(name, kind, piece.start, piece.length)
            differs = before_state.view(torch.int32) != after_state.view(torch.int32)
            if not differs.any():
                continue
            gap = (before_state - after_state).abs().nan_to_num(nan=math.inf)
            element = int(torch.where(differs, gap, -1.0).argmax())
            scale = float(after_state.square().mean().sqrt())
            finding.differing.append(
                State(
                    parameter=name,
                    kind=kind,
                    elements=int(differs.sum()),
                    element=piece.start + element,
                    difference=float(gap[element]),
                    relative=float(gap[element]) / max(scale, 1e-30),
                    worker=int(piece.file.removeprefix("rank-").partition(".")[0]),
                )
            )
    finding.differing.sort(key=lambda state: -state.relative)
    if finding.differing and finding.step is None:
        finding.step, finding.what = finding.last, "state"
        if len({state.worker for state in finding.differing}) == 1:
            finding.worker = finding.differing[0].worker
    if finding.what:
        finding.verdict = "differs"


@dataclass(frozen=True)
class StepValues:
    """What metrics.jsonl holds of a step."""

    loss: float
    norm: float
    trace: Sequence[Sequence[float]]  # losses and gradients of parts, states of workers; () without exact mode
    world: int

    def differs(self, other: "StepValues") -> tuple[str, int | None]:
        """Return what differs first in a step, "" for nothing, and the worker, where the trace tells it."""
        if self.trace and other.trace:
            losses, gradients, states = zip(self.trace, other.trace, strict=True)
            pairs = {"state": states, "loss": losses, "gradient": gradients}
            if self.world != other.world:
                del pairs["state"]  # every worker holds another part of it
            for what, (before, after) in pairs.items():
                workers = set()
                for place, numbers in enumerate(zip(before, after, strict=True)):
                    if not same(numbers[:1], numbers[1:]):
                        workers.add(place * self.world // len(before))
                if workers:
                    return what, workers.pop() if len(workers) == 1 else None
        if not same([self.loss], [other.loss]):
            return "loss", None
        if not same([self.norm], [other.norm]):
            return "gradient", None
        return "", None


def steps_of(records: Sequence[Record]) -> dict[int, StepValues]:
    """Return what is on record of every step, of the attempt whose step went on."""
    values = {}
    for record in records:
        first_step = record["step"] - len(record["losses"]) + 1
        for number, loss in enumerate(record["losses"]):
            trace = record["traces"][number] if "traces" in record else ()
            values[first_step + number] = StepValues(loss, record["grad_norms"][number], trace, record["world"])
    return values


def same(before: Sequence[float | None], after: Sequence[float | None]) -> bool:
    """Tell whether numbers are the same; one that is not finite, which a record has as null, is as another."""
    for first, second in zip(before, after, strict=True):
        are_finite = first is not None and second is not None and (math.isfinite(first) or math.isfinite(second))
        if first != second and (are_finite or (first is None) != (second is None)):
            return False
    return True


def relative(before: float, after: float) -> float:
    """Return the difference of two numbers as a share of the first; a very large one where one is not finite."""
    if math.isfinite(before) and math.isfinite(after):
        return abs(before - after) / max(abs(before), 1e-30)
    return 0.0 if same([before], [after]) else sys.float_info.max


def commit_of(folder: Path, step: int) -> Path:
    """Return the newest commit of a step in a stage's folder."""
    return max((folder / "checkpoints").glob(f"step-{step:010d}*"))


def read_start(folder: Path) -> Record:
    """Return the record of the start of a stage's newest attempt."""
    starts = read_metrics(folder, "start")
    return starts[-1] if starts else {}


# ------------------------------------------------------------------------ what a difference is


def judge(finding: Finding) -> None:
    """Tell apart what a difference can be, and put it into the finding's verdict."""
    is_first = finding.step == finding.start + 1
    if finding.what == "ledger":
        finding.verdict = "other data"
    elif is_first and finding.conditions and finding.size < LAST_BITS and finding.what != "state":
        finding.verdict = "other hardware"
    else:
        finding.verdict = "silent corruption"
    finding.differing = finding.differing[:NAMED]


def line_of(finding: Finding) -> str:
    """Return a finding as one line."""
    line = f"{finding.name}: {finding.verdict}"
    if finding.verdict == "equal":
        return (
            f"{line} in {finding.steps} losses and norms, {finding.states} states and the ledger "
            f"{finding.ledger[:12]} (on {finding.world} workers, {finding.seconds:.1f} s)"
        )
    if finding.step is not None:
        line += f" from step {finding.step} on, first in the {finding.what}"
    if finding.worker is not None:
        line += f" of worker {finding.worker}"
    if finding.differing:
        most = finding.differing[0]
        line += (
            f"; the largest in the commit: {most.parameter} {most.kind}[{most.element}] by {most.difference:.3g}, "
            f"saved by worker {most.worker}"
        )
    if finding.conditions:
        line += f"; not alike: {', '.join(finding.conditions)}"
    return line


def sign(report: Path, key: str) -> None:
    """Sign a report with an SSH key; raises ClusterError where ssh-keygen refuses."""
    Path(f"{report}.sig").unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", SIGNED_AS, str(report)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ClusterError(f"ssh-keygen does not sign with {key}: {answer.stderr.strip().splitlines()[-1]}")
    echo(
        f"signed: {report}.sig; to check it: ssh-keygen -Y verify -f ALLOWED_SIGNERS -I NAME -n {SIGNED_AS} "
        f"-s {report}.sig < {report}"
    )
