"""Proof of training: stretches of a run between two of its commits, taken again and compared to the bit.

1. `choose_stretches` draws stretches between neighbouring commits, as many as fit the share, or takes the one named.
2. Each is taken again in a run directory of its own (jobs/extras/replays/stretch.py).
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
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from data.errors import ClusterError, DataError, UsageError
from jobs.extras.replays.stretch import Replays
from jobs.terminal import echo
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import Reader
from pipeline.extras.replays.batch import RecordedStep, TrainedStage
from pipeline.monitoring.telemetry import account
from pipeline.values import counted, duration

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

    def __str__(self) -> str:
        line = f"steps {self.start + 1} to {self.last}: {self.verdict}"
        if self.verdict == "equal":
            return (
                f"{line} in {self.steps} losses and norms, {self.states} states and the ledger {self.ledger[:12]} "
                f"(on {counted(self.world, 'worker')}, {self.seconds:.1f} s)"
            )
        if self.step is not None:
            line += f" from step {self.step} on, first in the {self.what}"
        if self.worker is not None:
            line += f" of worker {self.worker}"
        for state in self.differing[:1]:
            place = f"{state.parameter} {state.kind}[{state.element}]"
            line += f"; most in {place}, by {state.difference:.3g}, saved by worker {state.worker}"
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
    replays = Replays("audit", run, output, overrides)
    stage = replays.stage
    if key is not None and shutil.which("ssh-keygen") is None:
        raise ClusterError("--key needs ssh-keygen, which is not there\n  install OpenSSH, or leave out --key")
    if key is not None and not Path(key).is_file():
        raise UsageError(f"--key {key} is no file\n  expected a key that ssh-keygen made, as ~/.ssh/id_ed25519")
    if seed is None:
        seed = secrets.randbits(32)
    if first is None and last is None:
        findings = choose_stretches(stage, share, seed)
        chosen = f"drawn with the seed {seed}"
    else:
        findings = [Finding(*replays.between(first, last))]
        chosen = "as named"
    steps = sum(finding.last - finding.start for finding in findings)
    began = time.monotonic()
    echo(
        f"{replays.name}: {steps:,} of {stage.steps:,} steps ({steps / stage.steps:.2%}) in "
        f"{counted(len(findings), 'stretch')}, {chosen}"
    )

    # 1. The stretches, one after the other: each is an attempt of its own.
    for finding in findings:
        began_here = time.monotonic()
        folder = replays.folder / f"steps-{finding.start + 1}-{finding.last}"
        again = replays.take_again(finding.start, finding.last, folder)
        finding.seconds = round(time.monotonic() - began_here, 2)
        compare(stage, again, finding)
        if finding.what:
            finding.verdict = judge(finding)
            third = replays.take_again(finding.start, finding.last, Path(f"{folder}-again"))
            once_more = Finding(finding.start, finding.last)
            compare(again, third, once_more)
            if once_more.what:
                finding.verdict = "unclear, because this machine has given two results"
        else:
            shutil.rmtree(folder)
        replays.say(str(finding))

    # 2. What it cost, as a share of the run, and the report.
    seconds = time.monotonic() - began
    run_s = account(stage.records).wall
    echo(f"{duration(seconds)}, {seconds / max(run_s, 1e-9):.2%} of the run's {duration(run_s)}, starts included")
    differing = [finding for finding in findings if finding.what]
    report = replays.folder / "audit.json"
    values = {
        "seed": seed,
        "share": steps / stage.steps,
        "seconds": round(seconds, 1),
        "seconds_of_run": round(run_s, 1),
        "verdict": "differs" if differing else "equal",
        "stretches": [asdict(finding) for finding in findings],
    }
    replays.report(report, values)
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
            f"{replays.name} is not what its steps give: {differing[0]}\n"
            f"  what was taken again is in {replays.folder}; checkpoints diff compares it with the run"
        )


def choose_stretches(stage: TrainedStage, share: float, seed: int) -> list[Finding]:
    """Return stretches between neighbouring commits: as many as fit the share of all steps, and one at the least.

    Raises UsageError where no commits are there to compare with.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share is {share}, expected more than 0 and at most 1, as 0.01")
    stretches = [Finding(start, last) for start, last in pairwise([0, *stage.commits])]
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


# ------------------------------------------------------------------------ what is compared


def compare(before: TrainedStage, after: TrainedStage, finding: Finding) -> None:
    """Compare the steps and the last commit of a stretch, taken twice, and note in the finding what differs."""
    start = after.start_of(finding.last)
    start_before = before.start_of(finding.last)
    finding.world = start["world"]
    for name in CONDITIONS:
        if start_before.get(name) != start[name]:
            finding.conditions[name] = [start_before.get(name), start[name]]

    # 1. The steps. A disk may have refused a record, and a stretch that was given up has none.
    has_other_result = False
    for step in range(finding.start + 1, finding.last + 1):
        if step not in before.step_records or step not in after.step_records:
            continue
        theirs = before.step_records[step]
        ours = after.step_records[step]
        finding.steps += 1
        finding.traced += bool(theirs.trace and ours.trace)
        gap = max(relative(theirs.loss, ours.loss), relative(theirs.grad_norm, ours.grad_norm))
        has_other_result |= gap > 0
        what, worker = first_difference(theirs, ours)
        if what and not finding.what:
            finding.step = step
            finding.what = what
            finding.worker = worker
            finding.size = gap

    # 2. The commit, piece by piece as the run's workers have saved it.
    saved = read_manifest(before.commits[finding.last])
    taken = read_manifest(after.commits[finding.last])
    read_saved = Reader(before.commits[finding.last], saved.files)
    read_taken = Reader(after.commits[finding.last], taken.files)
    finding.ledger = taken.ledger
    for name, file in saved.files.items():
        finding.files[name] = file["sha256"]
    for (name, kind), pieces in sorted(read_saved.pieces.items()):
        finding.states += 1
        for piece in pieces:
            theirs_here = read_saved(name, kind, piece.start, piece.length)
            ours_here = read_taken(name, kind, piece.start, piece.length)
            differs = theirs_here.view(torch.int32) != ours_here.view(torch.int32)
            if not differs.any():
                continue
            gaps = (theirs_here - ours_here).abs().nan_to_num(nan=math.inf)
            # Adam makes updates of the rounding noise of gradients that are zero in theory, as those of a key's bias:
            # there the least change anywhere else makes the largest.
            if (name, "exp_avg_sq") in read_taken.pieces:
                squares = read_taken(name, "exp_avg_sq", piece.start, piece.length)
                gaps = torch.where(squares > NOISE * squares.max(), gaps, 0.0)
            element = int(torch.where(differs, gaps, -1.0).argmax())
            difference = float(gaps[element])
            scale = float(ours_here.square().mean().sqrt().clamp(min=1e-30))
            worker = int(piece.file.removeprefix("rank-").partition(".")[0])
            finding.differing.append(State(name, kind, piece.start + element, difference, difference / scale, worker))
    finding.differing = sorted(finding.differing, key=lambda state: -state.relative)[:NAMED]

    # 3. A trace tells where a difference begins. Alone it accuses nobody where code or hardware were others, which may
    # make another one. And a commit may differ where no record of its steps does.
    if saved.ledger != taken.ledger:
        finding.what = "ledger"
    elif finding.conditions and not finding.differing and not has_other_result:
        finding.step = None
        finding.what = ""
        finding.worker = None
    elif finding.differing and not finding.what:
        finding.step = finding.last
        finding.what = "state"
        finding.worker = finding.differing[0].worker


def first_difference(theirs: RecordedStep, ours: RecordedStep) -> tuple[str, int | None]:
    """Return what differs first in a step, "" for nothing, and the worker of the run, where it can be told."""
    pairs: list[tuple[str, Sequence[float], Sequence[float]]]
    pairs = [("loss", [theirs.loss], [ours.loss]), ("gradient", [theirs.grad_norm], [ours.grad_norm])]
    if theirs.trace and ours.trace:
        losses, gradients, states = zip(theirs.trace, ours.trace, strict=True)
        pairs = [("loss", *losses), ("gradient", *gradients), *pairs]
        if theirs.world == ours.world:  # else every worker holds another part of it
            pairs.insert(0, ("state", *states))
    for what, before, after in pairs:
        workers = set()
        for place, numbers in enumerate(zip(before, after, strict=True)):
            if relative(*numbers) > 0:
                workers.add(place * theirs.world // len(before))
        if len(workers) == 1 and len(before) >= theirs.world:
            return what, workers.pop()
        if workers:
            return what, None
    return "", None


def relative(before: float | None, after: float | None) -> float:
    """Return the difference of two numbers as a share of the first, 0 only where they are the same.

    All numbers that are not finite, which a record may have as null, are the same, and far from those that are.
    """
    finite = [number for number in (before, after) if number is not None and math.isfinite(number)]
    if not finite:
        return 0.0
    if len(finite) == 1:
        return sys.float_info.max
    return abs(finite[0] - finite[1]) / max(abs(finite[0]), 1e-30)


def judge(finding: Finding) -> str:
    """Tell apart what a difference can be."""
    if finding.what == "ledger":
        return "other data"
    is_from_the_first = finding.step == finding.start + 1 and finding.what != "state"
    if is_from_the_first and finding.conditions and finding.size < LAST_BITS:
        return "other hardware"
    return "silent corruption"
