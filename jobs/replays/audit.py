"""Proof of training: stretches of a run between two of its commits, taken again and compared to the bit.

1. `choose_stretches` draws stretches between neighbouring commits, as many as fit the share, or takes the one named.
2. Each is taken again in a run directory of its own (jobs/replays/stretch.py).
3. `compare` sets what came out beside what the run has kept: every loss and gradient norm, the trace of each step in
   exact mode (pipeline/engine/exact.py), the ledger, and every bit of weights and moments in the commit.
4. A stretch that differs is taken once more: a machine that gives two results accuses nobody.
5. `judge` tells what a difference is: other data (the ledger), other hardware (from the first step on, in the last
   bits, under other conditions), or silent corruption (the steps before it agree).
6. audit.json says what was checked, on what, by which code; `ssh-keygen` signs it where a key is given.
"""

import math
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.errors import ClusterError, DataError, UsageError
from jobs.replays.stretch import (
    RecordedStage,
    StepValues,
    commit_of,
    made_by,
    output_folder,
    recorded_stage,
    take_again,
    values_of,
    without_evaluation,
)
from jobs.stages import training
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import Reader
from pipeline.monitoring.telemetry import account, duration, read_metrics
from pipeline.versions import git_commit

NAMED = 8  # states that a difference names, the largest first
NOISE = 1e-8  # of the largest second moment of a parameter: what is less is of a gradient that is zero in theory
LAST_BITS = 1e-4  # of a loss or norm: other hardware differs by less in the first steps
SIGNED_AS = "patchline"  # the namespace of a signature
CONDITIONS = ("hardware", "threads", "versions", "code")  # of an attempt's start, which bits may depend on


@dataclass(frozen=True)
class State:
    """Says where weights or a moment of a parameter differ between two commits of one step."""

    parameter: str
    kind: str  # "master", or a moment's name
    element: int  # with the largest difference
    difference: float
    relative: float  # to the root mean square of what was compared
    worker: int  # that saved the element


@dataclass
class Finding:
    """Holds what became of one stretch."""

    start: int
    last: int
    seconds: float = 0.0
    steps: int = 0  # whose losses and norms were compared
    traced: int = 0  # of them, those whose traces were
    states: int = 0  # compared, bit by bit
    ledger: str = ""  # of the last step, as taken again
    files: dict[str, str] = field(default_factory=dict)  # sha256 of those of the commit that was compared
    world: int = 0  # on which the steps were taken again
    conditions: dict[str, Any] = field(default_factory=dict)  # not alike: the run's and ours
    verdict: str = "equal"
    step: int | None = None  # that a difference begins at
    worker: int | None = None
    what: str = ""  # differs first: ledger, state, loss, gradient
    size: float = 0.0  # of the first difference of a loss or norm, relative
    differing: list[State] = field(default_factory=list)

    def line(self) -> str:
        """Return the finding in words."""
        line = f"steps {self.start + 1} to {self.last}: {self.verdict}"
        if self.verdict == "equal":
            return (
                f"{line} in {self.steps} losses and norms, {self.states} states and the ledger {self.ledger[:12]} "
                f"(on {self.world} workers, {self.seconds:.1f} s)"
            )
        if self.step is not None:
            line += f" from step {self.step} on, first in the {self.what}"
        if self.worker is not None:
            line += f" of worker {self.worker}"
        if self.differing:
            most = self.differing[0]
            line += (
                f"; most in {most.parameter} {most.kind}[{most.element}], by {most.difference:.3g}, saved by worker "
                f"{most.worker}"
            )
        if self.conditions:
            line += f"; not alike: {', '.join(self.conditions)}"
        return line


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
    if key is not None and shutil.which("ssh-keygen") is None:
        raise ClusterError("--key needs ssh-keygen, which is not there\n  install OpenSSH, or leave out --key")
    if key is not None and not Path(key).is_file():
        raise UsageError(f"--key {key} is no file\n  expected a key that ssh-keygen made, as ~/.ssh/id_ed25519")
    seed = secrets.randbits(32) if seed is None else seed
    findings = choose_stretches(stage, share, first, last, seed)
    steps = sum(finding.last - finding.start for finding in findings)
    began = time.monotonic()
    echo(
        f"{stage.folder.name}: {steps:,} of {stage.steps:,} steps ({steps / stage.steps:.2%}) in {len(findings)} "
        f"stretches, drawn with the seed {seed}"
    )

    # 1. The stretches, one after the other: each is an attempt of its own.
    for finding in findings:
        place = folder / f"steps-{finding.start + 1}-{finding.last}"
        again = take(stage, finding, place, overrides)
        finding.files = {name: file["sha256"] for name, file in stage.manifest(finding.last).files.items()}
        start = read_metrics(again, "start")[-1]
        start_of_run = stage.start_of(finding.last)
        for name in CONDITIONS:
            if start_of_run.get(name) != start[name]:
                finding.conditions[name] = [start_of_run.get(name), start[name]]
        finding.world = start["world"]
        ours = kept_in(again, finding.last)
        compare(Kept(stage.values, stage.commits[finding.last]), ours, finding)
        if finding.what:
            finding.verdict = judge(finding)
            once_more = Finding(finding.start, finding.last)
            third = take(stage, once_more, Path(f"{place}-again"), overrides)
            compare(ours, kept_in(third, finding.last), once_more)
            if once_more.what:
                finding.verdict = "unclear, because this machine has given two results"
        else:
            shutil.rmtree(place)
        echo(finding.line())

    # 2. What it cost, as a share of the run, and the report.
    seconds = time.monotonic() - began
    run_s = account(stage.records).wall
    echo(f"{duration(seconds)}, {seconds / max(run_s, 1e-9):.2%} of the run's {duration(run_s)}, starts included")
    differing = [finding for finding in findings if finding.what]
    values = {
        **made_by(stage),
        "commit": git_commit(),
        "machine": socket.gethostname(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "share": steps / stage.steps,
        "seconds": round(seconds, 1),
        "seconds_of_run": round(run_s, 1),
        "verdict": "differs" if differing else "equal",
        "stretches": list(map(asdict, findings)),
    }
    report = folder / "audit.json"
    artifacts.write_record(report, values)
    echo(f"written: {report}")
    if key is not None:
        Path(f"{report}.sig").unlink(missing_ok=True)
        command = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", SIGNED_AS, str(report)]
        answer = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if answer.returncode != 0:
            raise ClusterError(
                f"ssh-keygen does not sign with {key}: {answer.stderr.strip()}\n  expected a private key"
            )
        check = f"ssh-keygen -Y verify -f ALLOWED_SIGNERS -I NAME -n {SIGNED_AS} -s {report}.sig < {report}"
        echo(f"signed: {report}.sig; to check it: {check}")
    if differing:
        raise DataError(
            f"{stage.folder.name} is not what its steps give: {differing[0].line()}\n"
            f"  what was taken again is in {folder}; checkpoints diff compares it with the run"
        )


def choose_stretches(
    stage: RecordedStage, share: float, first: int | None, last: int | None, seed: int
) -> list[Finding]:
    """Return the stretch that is named, or as many as fit the share of all steps, and one at the least.

    Raises UsageError where no commits are there to compare with.
    """
    if first is not None or last is not None:
        return [Finding(*stage.two_commits(first, last))]
    if not 0 < share <= 1:
        raise UsageError(f"--share is {share}, expected more than 0 and at most 1, as 0.01")
    stretches = [Finding(start, end) for start, end in pairwise([0, *stage.commits])]
    if not stretches:
        raise UsageError(f"{stage.folder.name} has no commits: there is nothing to compare with")
    budget = max(share * stage.steps, min(finding.last - finding.start for finding in stretches))
    random.Random(seed).shuffle(stretches)
    chosen = []
    for finding in stretches:
        if finding.last - finding.start <= budget:
            chosen.append(finding)
            budget -= finding.last - finding.start
    return sorted(chosen, key=lambda finding: finding.start)


def take(stage: RecordedStage, finding: Finding, folder: Path, overrides: Sequence[str]) -> Path:
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


class Kept(NamedTuple):
    """Holds what a stage has kept of a stretch."""

    values: Mapping[int, StepValues]  # of its steps, and of others
    commit: Path  # of its last step


def kept_in(folder: Path, last: int) -> Kept:
    """Return what the folder of a stage has kept that took a stretch again."""
    return Kept(values_of(read_metrics(folder)), commit_of(folder, last))


def compare(before: Kept, after: Kept, finding: Finding) -> None:
    """Compare the steps and the last commit of a stretch, taken twice, and note in the finding what differs."""
    # 1. The steps. A disk may have refused a record, and a stretch that was given up has none.
    has_other_result = False
    for step in range(finding.start + 1, finding.last + 1):
        if step not in before.values or step not in after.values:
            continue
        theirs = before.values[step]
        ours = after.values[step]
        finding.steps += 1
        finding.traced += bool(theirs.trace and ours.trace)
        has_other_result |= not (are_same(theirs.loss, ours.loss) and are_same(theirs.grad_norm, ours.grad_norm))
        what, worker = first_difference(theirs, ours)
        if what and not finding.what:
            finding.step, finding.what, finding.worker = step, what, worker
            finding.size = max(relative(theirs.loss, ours.loss), relative(theirs.grad_norm, ours.grad_norm))

    # 2. The commit, piece by piece as the run's workers have saved it.
    manifests = [read_manifest(kept.commit) for kept in (before, after)]
    readers = [Reader(before.commit, manifests[0].files), Reader(after.commit, manifests[1].files)]
    finding.ledger = manifests[1].ledger
    for (name, kind), pieces in sorted(readers[0].pieces.items()):
        finding.states += 1
        for piece in pieces:
            saved, taken = [reader(name, kind, piece.start, piece.length) for reader in readers]
            differs = saved.view(torch.int32) != taken.view(torch.int32)
            if not differs.any():
                continue
            gap = (saved - taken).abs().nan_to_num(nan=math.inf)
            # Adam makes updates of the rounding noise of gradients that are zero in theory, as those of a key's bias:
            # there the least change anywhere else makes the largest.
            if (name, "exp_avg_sq") in readers[1].pieces:
                squares = readers[1](name, "exp_avg_sq", piece.start, piece.length)
                gap = torch.where(squares > NOISE * squares.max(), gap, 0.0)
            element = int(torch.where(differs, gap, -1.0).argmax())
            share = float(gap[element] / taken.square().mean().sqrt().clamp(min=1e-30))
            worker = int(piece.file.removeprefix("rank-").partition(".")[0])
            state = State(name, kind, piece.start + element, float(gap[element]), share, worker)
            finding.differing.append(state)
    finding.differing = sorted(finding.differing, key=lambda state: -state.relative)[:NAMED]

    # 3. A trace tells where a difference begins, and accuses nobody by itself: other code may make another one. And a
    # commit may differ where no record of its steps does.
    if manifests[0].ledger != manifests[1].ledger:
        finding.what = "ledger"
    elif not finding.differing and not has_other_result:
        finding.step, finding.what, finding.worker = None, "", None
    elif finding.differing and not finding.what:
        finding.step, finding.what = finding.last, "state"
        finding.worker = finding.differing[0].worker


def first_difference(theirs: StepValues, ours: StepValues) -> tuple[str, int | None]:
    """Return what differs first in a step, "" for nothing, and the worker of the run, where the trace tells it."""
    if theirs.trace and ours.trace:
        losses, gradients, states = zip(theirs.trace, ours.trace, strict=True)
        pairs = {"state": states, "loss": losses, "gradient": gradients}
        if theirs.world != ours.world:
            del pairs["state"]  # every worker holds another part of it
        for what, (before, after) in pairs.items():
            workers = set()
            for place, numbers in enumerate(zip(before, after, strict=True)):
                if not are_same(*numbers):
                    workers.add(place * theirs.world // len(before))
            if workers:
                return what, workers.pop() if len(workers) == 1 else None
    if not are_same(theirs.loss, ours.loss):
        return "loss", None
    if not are_same(theirs.grad_norm, ours.grad_norm):
        return "gradient", None
    return "", None


def are_same(before: float | None, after: float | None) -> bool:
    """Tell whether two numbers are the same; one that is not finite, which a record has as null, is as another."""
    is_finite = before is not None and math.isfinite(before)
    if is_finite != (after is not None and math.isfinite(after)):
        return False
    return before == after or not is_finite


def relative(before: float, after: float) -> float:
    """Return the difference of two numbers as a share of the first; a very large one where one is not finite."""
    if math.isfinite(before) and math.isfinite(after):
        return abs(before - after) / max(abs(before), 1e-30)
    return 0.0 if are_same(before, after) else sys.float_info.max


def judge(finding: Finding) -> str:
    """Tell apart what a difference can be."""
    if finding.what == "ledger":
        return "other data"
    is_from_the_first = finding.step == finding.start + 1 and finding.what != "state"
    if is_from_the_first and finding.conditions and finding.size < LAST_BITS:
        return "other hardware"
    return "silent corruption"
