"""What a trial has measured of a stage on one number of workers, and the small JSON document that keeps it.

In:  the records that 30 steps of training have left in metrics.jsonl (pipeline/monitoring/telemetry.py)
Out: <run>/trials/d91ff90d-8.json: {"world": 8, "images_per_s": 5120.0, "step_s": 0.8, "until_steady_s": 14.2, …}

The document is found by the number of workers and the digest of all that a step's time depends on: model, sets, batch,
engine. A stage of another length, rate or seed goes by the same trial, and so do the runs of a sweep over them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from pipeline import artifacts
from pipeline.monitoring.telemetry import Record

FOLDER = "trials"  # in the run directory
STEPS = 30
WARM_UP = 5  # steps that do not count: in the first ones torch and malloc set things apart
LOG_EVERY = 5
SAVE_AT = 16  # with steps before and behind it


@dataclass(frozen=True)
class Trial:
    """Holds what was measured of a stage; seconds unless a name says otherwise."""

    stage: str
    key: str  # digest of all that a step's time depends on
    world: int
    backend: str
    gpus_per_worker: int
    cpus_per_worker: int
    hardware: str  # of rank 0: "NVIDIA H100 80GB HBM3", "AMD EPYC"
    commit: str
    date: str
    steps: int  # that were measured
    images_per_s: float  # of all workers together, without saves
    step_s: float  # without saves: the sum of the next four
    compute_s: float  # forward, backward, sums of gradients, optimizer
    storage_s: float  # a step's wait for data: for shards,
    decode_s: float  # for decoded images,
    transfer_s: float  # for their copy
    memory_gib: float  # at most, of rank 0
    save_stall_s: float  # that a save holds the loop up
    save_s: float  # from a save's beginning until it is kept
    # from the driver's claim of an attempt until steps take step_s each, less step_s for each one before: the start of
    # the workers, and what the first steps take longer, as where they compile
    until_steady_s: float

    @property
    def per_worker(self) -> float:
        """Return the images a second of a worker."""
        return self.images_per_s / self.world


def measured(records: Sequence[Record], stage: str, batch_size: int) -> dict[str, Any]:
    """Return the fields of a Trial that the records of one attempt, of all kinds, come to.

    Steps up to WARM_UP do not count. Of the saves the first counts: the loop waits for the last one at the stage's end.
    Raises DataError where steps or a save are missing.
    """
    by_kind: dict[str, list[Record]] = {"start": [], "train": [], "checkpoint": []}
    steps = 0  # that count
    seconds = 0.0  # of them, without saves and evaluations
    waits = {"storage": 0.0, "decode": 0.0, "transfer": 0.0}
    most_gib = 0.0
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
        if record["kind"] != "train":
            continue
        most_gib = max(most_gib, record["memory_gb"])
        if record["step"] - len(record["losses"]) >= WARM_UP:
            steps += len(record["losses"])
            seconds += record["seconds"] - record["stalled_s"] - record["evaluated_s"]
            for name in waits:
                waits[name] += record[f"wait_{name}"] * record["seconds"]
    starts = by_kind["start"]
    warm_ups = [record for record in by_kind["train"] if record["step"] <= WARM_UP]
    saves = by_kind["checkpoint"]
    if not starts or not warm_ups or not steps or not saves:
        raise DataError(
            f"{stage}: the trial left {steps} steps behind the first {WARM_UP} and {len(saves)} saves, expected "
            "some of each\n  type the same command again"
        )
    step_s = seconds / steps
    return {
        "world": starts[0]["world"],
        "hardware": starts[0]["hardware"],
        "steps": steps,
        "images_per_s": batch_size / step_s,
        "step_s": step_s,
        "compute_s": step_s - sum(waits.values()) / steps,
        "storage_s": waits["storage"] / steps,
        "decode_s": waits["decode"] / steps,
        "transfer_s": waits["transfer"] / steps,
        "memory_gib": most_gib,
        "save_stall_s": saves[0]["stalled_s"],
        "save_s": saves[0]["took_s"],
        # What the warm-up takes longer than its steps would later, each restart takes again.
        "until_steady_s": warm_ups[-1]["time"] - warm_ups[-1]["step"] * step_s - starts[0]["claimed"],
    }


def read_trials(run: Path, key: str) -> list[Trial]:
    """Return the trials of a stage, the smallest world first. Raises DataError where a document was altered."""
    trials = []
    for path in (run / FOLDER).glob(f"{key[:8]}-*.json"):
        try:
            trial = Trial(**artifacts.read_record(path))
        except TypeError as error:
            raise DataError(f"{path} is no trial: {error}\n  delete it, and type the trial's command again") from None
        if trial.key == key:
            trials.append(trial)
    return sorted(trials, key=lambda trial: trial.world)


def write_trial(run: Path, trial: Trial) -> Path:
    """Write a trial's document, which carries its own digest, and return where it lies."""
    path = run / FOLDER / f"{trial.key[:8]}-{trial.world}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(path, asdict(trial))
    return path
