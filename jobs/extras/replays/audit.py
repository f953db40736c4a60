"""Verify a training run: repeat parts of it between two commits and compare the results bit for bit.

1. `choose_stretches` draws random stretches between consecutive commits, up to the requested fraction of all steps,
   unless the user has selected a stretch.
2. Repeat each stretch in a separate run directory (jobs/extras/replays/stretch.py).
3. `compare` compares the result with the records of the run: every loss and gradient norm, the trace of each step in
   exact mode (pipeline/engine/exact.py), the ledger, and every bit of weights and optimizer moments in the commit.
4. If a stretch differs, repeat it once more: if this machine gives two different results, the cause is unclear.
5. `classify` determines the cause: other data (the ledger differs), other hardware or libraries (tiny differences under
   different conditions, which an audit cannot distinguish from a flipped low bit), or silent corruption.
6. Write audit.json with the checked steps, the machine and the code version; sign it with `ssh-keygen` if a key is
   given.
"""

import math
import random
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from data.errors import ClusterError, DataError, PatchlineError, UsageError
from jobs.extras.replays.stretch import Replays
from jobs.terminal import echo
from pipeline.checkpoints.manifest import read_manifest
from pipeline.checkpoints.reader import Reader
from pipeline.extras.replays.batch import RecordedStep, TrainedStage
from pipeline.extras.replays.comparison import Label, Mismatch, first_difference, majority
from pipeline.monitoring.telemetry import account
from pipeline.values import counted, duration

MAX_LISTED = 8  # maximum number of differing states that a finding lists, largest first
NOISE = 1e-8  # second moments below this fraction of a parameter's largest belong to theoretically zero gradients
LAST_BITS = 1e-4  # relative difference of a loss or norm that other hardware can cause in the first steps
SIGNED_AS = "patchline"  # namespace of the signature
# Fields of an attempt's start on which bits may depend.
CONDITIONS = ("hardware", "threads", "versions", "arithmetic", "code")
OTHER_HARDWARE = "other hardware or libraries: cannot judge"


@dataclass(frozen=True)
class StateDifference:
    """The largest difference in a parameter's weights, or in one of its moments, between two commits at one step."""

    parameter: str
    kind: str  # "master", or a moment's name
    element: int  # index of the largest difference
    difference: float
    relative: float  # difference relative to the root mean square of the compared piece
    worker: int  # rank that saved the element


@dataclass
class Finding:
    """The result of repeating one stretch of steps."""

    start: int
    last: int
    seconds: float = 0.0
    steps: int = 0  # number of steps whose losses and norms were compared
    traced: int = 0  # number of steps whose traces were compared
    states: int = 0  # number of parameter states compared bit by bit
    ledger: str = ""  # ledger after the last repeated step
    files: dict[str, str] = field(default_factory=dict)  # file name in the compared commit → sha256
    world: int = 0  # number of workers that repeated the steps
    conditions: dict[str, Any] = field(default_factory=dict)  # differing condition → [in the run, in the repetition]
    verdict: str = "equal"
    step: int | None = None  # first differing step
    worker: int | None = None
    what: str = ""  # first differing quantity: ledger, state, loss, gradient
    size: float = 0.0  # relative size of the first difference in loss or norm
    differing: list[StateDifference] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"steps {self.start + 1} to {self.last}: {self.verdict}"
        if self.verdict == "equal":
            return (
                f"{line} in {self.steps} losses and gradient norms, {self.states} states and the ledger "
                f"{self.ledger[:12]} (on {counted(self.world, 'worker')}, {self.seconds:.1f} s)"
            )
        if self.step is not None:
            line += f" from step {self.step} on, first in the {self.what}"
        if self.worker is not None:
            line += f" of worker {self.worker}"
        for state in self.differing[:1]:
            place = f"{state.parameter} {state.kind}[{state.element}]"
            line += f"; largest difference {state.difference:.3g} in {place}, saved by worker {state.worker}"
        if self.conditions:
            line += f"; different conditions: {', '.join(self.conditions)}"
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
) -> dict[str, Any]:
    """Repeat stretches of a run's steps, print a line for each, and write audit.json; return its content.

    Raises DataError if a stretch differs, ClusterError if different conditions on this machine may be the reason,
    UsageError if the arguments are invalid, or any error raised by a run.
    """
    replays = Replays("audit", run, output, overrides)
    stage = replays.stage
    if key is not None and shutil.which("ssh-keygen") is None:
        raise ClusterError("--key needs ssh-keygen, which is not installed\n  install OpenSSH, or omit --key")
    if key is not None and not Path(key).is_file():
        raise UsageError(f"--key {key} is not a file\n  expected a private SSH key, for example ~/.ssh/id_ed25519")
    if seed is None:
        seed = secrets.randbits(32)
    if first is None and last is None:
        findings = choose_stretches(stage, share, seed)
        chosen = f"drawn with seed {seed}"
    else:
        findings = [Finding(*replays.between(first, last))]
        chosen = "as given"
    steps = sum(finding.last - finding.start for finding in findings)
    began = time.monotonic()
    echo(
        f"{replays.name}: {steps:,} of {stage.steps:,} steps ({steps / stage.steps:.2%}) in "
        f"{counted(len(findings), 'stretch')}, {chosen}"
    )

    # 1. Repeat the stretches one after the other, each as a separate attempt.
    for finding in findings:
        stretch_began = time.monotonic()
        folder = replays.folder / f"steps-{finding.start + 1}-{finding.last}"
        repeated = replays.repeat(finding.start, finding.last, folder)
        finding.seconds = round(time.monotonic() - stretch_began, 2)
        compare(stage, repeated, finding)
        if finding.what:
            finding.verdict = classify(finding)
            third = replays.repeat(finding.start, finding.last, Path(f"{folder}-again"))
            if majority([repeated, third, stage], partial(agree, finding)) != 0:
                finding.verdict = "unclear, because this machine gave two different results"
        else:
            shutil.rmtree(folder)
        replays.log(str(finding))

    # 2. Print the cost relative to the run, and write the report.
    seconds = time.monotonic() - began
    run_s = account(stage.records).wall
    share_of_run = f"{seconds / max(run_s, 1e-9):.2%} of the run's {duration(run_s)}"
    echo(f"took {duration(seconds)} including startup, {share_of_run}")
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
    document = replays.report(report, values)
    if key is not None:
        Path(f"{report}.sig").unlink(missing_ok=True)
        command = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", SIGNED_AS, str(report)]
        signing = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if signing.returncode != 0:
            raise ClusterError(
                f"ssh-keygen cannot sign with {key}: {signing.stderr.strip()}\n  expected a private SSH key"
            )
        verify = f"ssh-keygen -Y verify -f ALLOWED_SIGNERS -I NAME -n {SIGNED_AS} -s {report}.sig < {report}"
        echo(f"signed: {report}.sig; to verify it, run: {verify}")
    if differing and all(finding.verdict == OTHER_HARDWARE for finding in differing):
        conditions = sorted({name for finding in differing for name in finding.conditions})
        error: PatchlineError = ClusterError(
            f"cannot audit {replays.name} here: the conditions of the run were different: {', '.join(conditions)}, "
            f"so the last bits differ; both values are in {report}\n"
            "  repeat the audit under the conditions of the run: the same processor, libraries, threads and variables\n"
            "  if they changed within the steps (`world` is the number of workers), choose others with --from and --to"
        )
    elif differing:
        worst = differing[0]
        repeated_run = replays.folder / f"steps-{worst.start + 1}-{worst.last}"
        error = DataError(
            f"{replays.name} differs from a repetition of its steps: {worst}\n"
            f"  the repeated steps are in {replays.folder}; to compare the tensors of both, run "
            f"python -m jobs diff {shlex.quote(f'{stage.folder}/step-{worst.last}')} "
            f"{shlex.quote(f'{repeated_run}/step-{worst.last}')}"
        )
    else:
        return document
    error.details = document
    raise error


def choose_stretches(stage: TrainedStage, share: float, seed: int) -> list[Finding]:
    """Draw random stretches between consecutive commits, which cover at most the fraction `share` of all steps.

    At least one stretch is drawn. Raises UsageError if there are no commits to compare with.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share is {share}, expected a number greater than 0 and at most 1, for example 0.01")
    stretches = [Finding(start, last) for start, last in pairwise(stage.bounds)]
    if not stretches:
        raise UsageError(f"{stage.folder.name} has no commits with which repeated steps could be compared")
    budget = max(share * stage.steps, min(finding.last - finding.start for finding in stretches))
    random.Random(seed).shuffle(stretches)
    chosen = []
    for finding in stretches:
        if finding.last - finding.start <= budget:
            chosen.append(finding)
            budget -= finding.last - finding.start
    return sorted(chosen, key=lambda finding: finding.start)


# ------------------------------------------------------------------------ comparison


def compare(before: TrainedStage, after: TrainedStage, finding: Finding) -> None:
    """Compare a stretch's steps and last commit with their repetition; store the differences in `finding`."""
    start = after.start_of(finding.last)
    finding.world = start["world"]
    # Several attempts may have trained the stretch, because old commits between them are deleted.
    repeated_steps = range(finding.start + 1, finding.last + 1)
    attempts = {before.step_records[step].attempt for step in repeated_steps if step in before.step_records}
    starts_before = [record for record in before.starts if record["attempt"] in attempts]
    # In exact mode, bits do not depend on the number of workers.
    names = CONDITIONS if before.cfg.exact_parts else (*CONDITIONS, "world")
    for name, start_before in product(names, starts_before or [before.start_of(finding.last)]):
        # Earlier versions did not record the arithmetic.
        if name == "arithmetic" and name not in start_before:
            continue
        if start_before.get(name) != start[name]:
            finding.conditions[name] = [start_before.get(name), start[name]]

    # 1. Compare the steps. Records can be missing, for example after disk errors or if the run skipped steps.
    has_other_result = False
    for step in repeated_steps:
        if step not in before.step_records or step not in after.step_records:
            continue
        original = before.step_records[step]
        repetition = after.step_records[step]
        finding.steps += 1
        finding.traced += bool(original.trace and repetition.trace)
        gap = max(relative(original.loss, repetition.loss), relative(original.grad_norm, repetition.grad_norm))
        has_other_result |= gap > 0
        mismatch = difference_of(original, repetition)
        if mismatch is not None and not finding.what:
            finding.step = step
            finding.what = mismatch.what
            finding.worker = mismatch.worker
            finding.size = gap

    # 2. Compare the commits, piece by piece as saved by the run's workers.
    saved = read_manifest(before.commits[finding.last])
    repeated = read_manifest(after.commits[finding.last])
    read_saved = Reader(before.commits[finding.last], saved.files)
    read_repeated = Reader(after.commits[finding.last], repeated.files)
    finding.ledger = repeated.ledger
    for name, file in saved.files.items():
        finding.files[name] = file["sha256"]
    for (name, kind), pieces in sorted(read_saved.pieces.items()):
        finding.states += 1
        for piece in pieces:
            theirs_here = read_saved(name, kind, piece.start, piece.length)
            ours_here = read_repeated(name, kind, piece.start, piece.length)
            differs = theirs_here.view(torch.int32) != ours_here.view(torch.int32)
            if not differs.any():
                continue
            gaps = (theirs_here - ours_here).abs().nan_to_num(nan=math.inf)
            # Ignore theoretically zero gradients, for example those of the key's bias: Adam turns their rounding
            # noise into updates, which would hide other differences.
            if (name, "exp_avg_sq") in read_repeated.pieces:
                squares = read_repeated(name, "exp_avg_sq", piece.start, piece.length)
                gaps = torch.where(squares > NOISE * squares.max(), gaps, 0.0)
            element = int(torch.where(differs, gaps, -1.0).argmax())
            difference = float(gaps[element])
            scale = float(ours_here.square().mean().sqrt().clamp(min=1e-30))
            worker = int(piece.file.removeprefix("rank-").partition(".")[0])
            finding.differing.append(
                StateDifference(name, kind, piece.start + element, difference, difference / scale, worker)
            )
    finding.differing = sorted(finding.differing, key=lambda state: -state.relative)[:MAX_LISTED]

    # 3. Combine the evidence. Other data explains every difference. Under other conditions, ignore differing traces if
    # nothing else differs. A commit can differ even if the records of its steps agree.
    if saved.ledger != repeated.ledger:
        finding.what = "ledger"
    elif finding.conditions and not finding.differing and not has_other_result:
        finding.step = None
        finding.what = ""
        finding.worker = None
    elif finding.differing and not finding.what:
        finding.step = finding.last
        finding.what = "state"
        finding.worker = finding.differing[0].worker


def agree(finding: Finding, before: TrainedStage, after: TrainedStage) -> bool:
    """Return whether two repetitions of a finding's stretch have the same results."""
    between = Finding(finding.start, finding.last)
    compare(before, after, between)
    return not between.what


def difference_of(original: RecordedStep, repeated: RecordedStep) -> Mismatch | None:
    """Return the first quantity that differs in a step, and the differing worker, if known; None if all agree."""
    pairs: list[tuple[str, Sequence[float], Sequence[float]]]
    pairs = [("loss", [original.loss], [repeated.loss]), ("gradient", [original.grad_norm], [repeated.grad_norm])]
    if original.trace and repeated.trace:
        losses, gradients, states = zip(original.trace, repeated.trace, strict=True)
        pairs = [("loss", *losses), ("gradient", *gradients), *pairs]
        if original.world == repeated.world:  # with other world sizes, the workers hold different parts of the state
            pairs.insert(0, ("state", *states))
    labels: list[Label] = []
    differs = []
    for what, before, after in pairs:
        for place, numbers in enumerate(zip(before, after, strict=True)):
            is_of_one = len(before) >= original.world
            labels.append((what, place * original.world // len(before) if is_of_one else None))
            differs.append(relative(*numbers) > 0)
    return first_difference(labels, differs)


def relative(before: float | None, after: float | None) -> float:
    """Return the difference between two numbers relative to the first; 0 only if the numbers are equal.

    All non-finite numbers, including null in a record, count as equal to each other and as different from finite ones.
    """
    finite = [number for number in (before, after) if number is not None and math.isfinite(number)]
    if not finite:
        return 0.0
    if len(finite) == 1:
        return sys.float_info.max
    return abs(finite[0] - finite[1]) / max(abs(finite[0]), 1e-30)


def classify(finding: Finding) -> str:
    """Return the probable cause of the difference in a finding."""
    if finding.what == "ledger":
        return "other data"
    # Other instructions, threads or libraries round differently, in the first step or a later one. They cannot change a
    # loss or a gradient by more than its last bits at once.
    if finding.conditions and finding.size < LAST_BITS:
        return OTHER_HARDWARE
    return "silent corruption"
