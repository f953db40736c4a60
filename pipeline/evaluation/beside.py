"""Evaluations beside training: who asks for one, who answers, and what one costs in the loop.

The driver and rank 0 leave each other files, because neither may wait for the other:

    <attempt>/spare                               the driver: somebody is there who would judge a commit
    <stage>/evaluations/step-0000001200.asked     rank 0, before the commit: this step is to be judged beside training
    <stage>/evaluations/step-0000001200.loop      rank 0: the workers that train judge it themselves, now
    <stage>/evaluations/step-0000001200.json      the driver: what came of it, which rank 0 puts into metrics.jsonl

As long as one of the middle two is there the checkpoint stays, and the evaluation is due: also after a kill.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from data.files import write_whole

SPARE_FILE = "spare"
FOLDER = "evaluations"  # of a stage
ASKED = ".asked"
IN_LOOP = ".loop"
OF_ONE_SEED = re.compile(r"-seed-\d+$")


class Answer(TypedDict):
    """Holds what came of an evaluation: the kind, values and line of its record in metrics.jsonl."""

    kind: str  # "evaluate", "evaluate_failed" or "evaluate_skipped"
    values: dict[str, float | int | str]
    line: str


def file_of(stage: Path, step: int, suffix: str) -> Path:
    """Return where something about the evaluation of a step is said."""
    return stage / FOLDER / f"step-{step:010d}{suffix}"


def put(stage: Path, step: int, suffix: str) -> None:
    """Say that a step is due for evaluation, and by whom. Raises OSError."""
    path = file_of(stage, step, suffix)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def take_away(stage: Path, step: int, suffix: str) -> None:
    """Say that a step is not due any more. Raises OSError."""
    file_of(stage, step, suffix).unlink(missing_ok=True)


def asked(stage: Path, suffix: str = ASKED) -> list[int]:
    """Return the steps that are to be judged beside training, the oldest first."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (stage / FOLDER).glob(f"step-*{suffix}"))


def due(stage: Path) -> set[int]:
    """Return the steps that are still to be judged, by whomever: their checkpoints must stay."""
    return {*asked(stage), *asked(stage, IN_LOOP)}


def ask_what_was_left(stage: Path) -> None:
    """Ask for the evaluations that the workers of an attempt had begun themselves, and did not finish."""
    for step in asked(stage, IN_LOOP):
        file_of(stage, step, IN_LOOP).replace(file_of(stage, step, ASKED))


def answer(stage: Path, step: int, content: Answer) -> None:
    """Say what came of an evaluation; from then on the step is not due any more. Raises OSError."""
    write_whole(file_of(stage, step, ".json"), json.dumps(content))
    take_away(stage, step, ASKED)


def skip(stage: Path, step: int, reason: str) -> None:
    """Answer that a step is not judged. Raises OSError."""
    line = f"evaluate step {step} SKIPPED: {reason}"
    answer(stage, step, {"kind": "evaluate_skipped", "values": {"step": step, "reason": reason}, "line": line})


def answers(stage: Path) -> list[Path]:
    """Return the files of the answers that nobody has reported yet, the oldest step first."""
    return sorted((stage / FOLDER).glob("step-*.json"))


def report_answers(stage: Path, report: Callable[[str, Mapping[str, object], str], bool]) -> None:
    """Report each answer by its kind, values and line; one whose record the disk refuses stays for the next call."""
    for path in answers(stage):
        # A shared folder that stutters: the next look has it.
        with suppress(OSError):
            content: Answer = json.loads(path.read_text())
            if report(content["kind"], content["values"], content["line"]):
                path.unlink()


def metrics_of(values: Mapping[str, object]) -> dict[str, float]:
    """Return the scores among an evaluation's values."""
    return {name: value for name, value in values.items() if isinstance(value, float)}


def is_of_one_seed(name: str) -> bool:
    """Tell whether a value is of a single draw of the shots, "5shot-seed-0"; people see the mean, "5shot"."""
    return OF_ONE_SEED.search(name) is not None


def without_single_seeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values that people see: the mean over the draws of the shots, and not each draw."""
    return {name: value for name, value in metrics.items() if not is_of_one_seed(name)}


def evaluation_line(step: int, metrics: Mapping[str, float], remark: str = "") -> str:
    """Return the log line of an evaluation; metrics.jsonl has every seed of the few-shot probe, the line their mean."""
    shown = [f"{name} {value:.4f}" for name, value in without_single_seeds(metrics).items()]
    return f"evaluate step {step}  {'  '.join(shown)}{remark}"


def unreadable_line(count: int, path: str, who: str = "evaluate") -> str:
    """Say that samples of a set could not be judged: a damaged set must not pass for a worse or better model."""
    return f"{who}: {count} bad samples of {path} count neither way; see `jobs data check`"


@dataclass
class LoopPrice:
    """Measures what evaluations cost in the loop; it is said once an attempt."""

    first_step: int = 0  # whole steps when the attempt began to train
    began: float = field(default_factory=time.monotonic)
    evaluated_s: float = 0.0  # of all evaluations since
    is_said: bool = False

    def begin(self, step: int) -> None:
        """Count from here: building and restoring are not training."""
        self.first_step = step
        self.began = time.monotonic()

    def line(self, step: int, seconds: float, every: int, *, looks_for_spare: bool) -> str:
        """Return the price of an evaluation of `seconds` after every so many steps, as a share of the time."""
        busy_s = time.monotonic() - self.began - self.evaluated_s
        step_s = busy_s / max(step - self.first_step, 1)
        share = seconds / (seconds + every * step_s)
        remark = "evaluate_on=spare judges commits beside training, where the cluster has room"
        if looks_for_spare:
            remark = "evaluate_on=spare, but nothing was spare"
        return f"evaluated in the loop: {seconds:.2f}s every {every} steps, {share:.1%} of the time; {remark}"
