"""Results of a trial (a short measurement of a stage with a given worker count), and the trial's JSON file.

In:  the records of 30 training steps in metrics.jsonl (pipeline/monitoring/telemetry.py)
Out: <run>/trials/d91ff90d-8.json: {"world": 8, "images_per_s": 5120.0, "step_s": 0.8, "until_steady_s": 14.2, …}

The file name contains the worker count and a digest of everything that affects the duration of a step: model, data
sets, batch, engine. Stages that differ only in length, learning rate or seed share a trial, and so do the runs of a
sweep over these keys.
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
WARM_UP = 5  # steps excluded from the measurement, in which torch and malloc allocate memory
LOG_EVERY = 5
SAVE_AT = 16  # in the middle, with steps before and after it


@dataclass(frozen=True)
class Trial:
    """Measurements of a stage with one worker count."""

    stage: str
    key: str  # digest of everything that affects the time of a step
    world: int
    backend: str
    gpus_per_worker: int
    cpus_per_worker: int
    hardware: str  # on rank 0: "NVIDIA H100 80GB HBM3", "AMD EPYC"
    commit: str
    date: str
    steps: int  # number of measured steps
    images_per_s: float  # total of all workers, without saves
    step_s: float  # time of a step without saves: the sum of the next four
    compute_s: float  # forward, backward, gradient reduction, optimizer
    storage_s: float  # time per step waiting for shards
    decode_s: float  # time per step waiting for decoded images
    transfer_s: float  # time per step waiting for the copy to the device
    memory_gib: float  # peak on rank 0
    save_stall_s: float  # time for which a save stalls the loop
    save_s: float  # from the start of a save until it is complete
    # extra time of a restart, from the driver's claim of an attempt until steps take step_s each, minus step_s for each
    # of the first steps: the start of the workers, and slower first steps, for example because of compilation
    until_steady_s: float

    @property
    def per_worker(self) -> float:
        """Return the images per second per worker."""
        return self.images_per_s / self.world


def measured(records: Sequence[Record], stage: str, batch_size: int) -> dict[str, Any]:
    """Compute the measured fields of a Trial from all of an attempt's records.

    The first WARM_UP steps are excluded. Only the first save is used, because the loop waits for the last save at the
    end of the stage. Raises DataError if steps or a save are missing.
    """
    by_kind: dict[str, list[Record]] = {"start": [], "train": [], "checkpoint": []}
    steps = 0  # number of measured steps
    seconds = 0.0  # time of the measured steps, without saves and evaluations
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
            f"{stage}: the trial recorded {steps} steps after the first {WARM_UP} steps, and {len(saves)} saves, "
            "expected "
            "at least one of each\n  run the same command again"
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
        # Every restart repeats the extra time of the warm-up.
        "until_steady_s": warm_ups[-1]["time"] - warm_ups[-1]["step"] * step_s - starts[0]["claimed"],
    }


def read_trials(run: Path, key: str) -> list[Trial]:
    """Return a stage's trials, sorted by worker count. Raises DataError if a file was modified."""
    trials = []
    for path in (run / FOLDER).glob(f"{key[:8]}-*.json"):
        try:
            trial = Trial(**artifacts.read_record(path))
        except TypeError as error:
            raise DataError(
                f"{path} is not a valid trial: {error}\n  delete the file, and run the trial again"
            ) from None
        if trial.key == key:
            trials.append(trial)
    return sorted(trials, key=lambda trial: trial.world)


def write_trial(run: Path, trial: Trial) -> Path:
    """Write a trial's file, which includes a digest, and return its path."""
    path = run / FOLDER / f"{trial.key[:8]}-{trial.world}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(path, asdict(trial))
    return path
