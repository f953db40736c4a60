"""What a trial has measured of a stage on one number of workers, and the small JSON document that keeps it.

In:  the records that 30 steps of training have left in metrics.jsonl (pipeline/monitoring/telemetry.py)
Out: <run>/trials/d91ff90d-8.json: {"world": 8, "images_per_s": 5120.0, "step_s": 0.8, "start_s": 14.2, …}

The document is found by the stage's key and the number of workers: a stage with another key may take another time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from pipeline import handover
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
    key: str
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
    start_s: float  # from the driver's claim of an attempt to its first step

    @property
    def per_worker(self) -> float:
        """Return the images a second of a worker."""
        return self.images_per_s / self.world


def measured(records: Sequence[Record], stage: str, batch_size: int) -> dict[str, Any]:
    """Return the fields of a Trial that the records of one attempt, of all kinds, come to.

    Steps up to WARM_UP do not count. Of the saves the first counts: the loop waits for the last one at the stage's end.
    Raises DataError where steps or a save are missing.
    """
    starts = [record for record in records if record["kind"] == "start"]
    reports = [record for record in records if record["kind"] == "train"]
    saves = [record for record in records if record["kind"] == "checkpoint"]
    later = [report for report in reports if report["step"] - len(report["losses"]) >= WARM_UP]
    if not starts or not later or not saves:
        raise DataError(
            f"{stage}: the trial left {len(later)} reports of steps behind the first {WARM_UP} and {len(saves)} saves, "
            "expected one of each at least\n  type the same command again"
        )
    steps = sum(len(report["losses"]) for report in later)
    step_s = sum(report["seconds"] - report["stalled_s"] - report["evaluated_s"] for report in later) / steps
    waits = {}
    for name in ("storage", "decode", "transfer"):
        waits[name] = sum(report[f"wait_{name}"] * report["seconds"] for report in later) / steps
    first = reports[0]
    return {
        "world": starts[0]["world"],
        "hardware": starts[0]["hardware"],
        "steps": steps,
        "images_per_s": batch_size / step_s,
        "step_s": step_s,
        "compute_s": step_s - sum(waits.values()),
        "storage_s": waits["storage"],
        "decode_s": waits["decode"],
        "transfer_s": waits["transfer"],
        "memory_gib": max(report["memory_gb"] for report in reports),
        "save_stall_s": saves[0]["stalled_s"],
        "save_s": saves[0]["took_s"],
        # From the claim until the first report began.
        "start_s": first["time"] - first["seconds"] - starts[0]["claimed"],
    }


def name_of(key: str, world: int) -> str:
    """Return the name of a trial's document below the run's place."""
    return f"{FOLDER}/{key[:8]}-{world}.json"


def read_trials(run: Path, key: str) -> list[Trial]:
    """Return the trials of a stage, the smallest world first. Raises DataError where a document was altered."""
    trials = []
    for path in run.glob(f"{FOLDER}/{key[:8]}-*.json"):
        try:
            trial = Trial(**handover.read_record(path).values)
        except TypeError as error:
            raise DataError(f"{path} is no trial: {error}\n  delete it, and type the trial's command again") from None
        if trial.key == key:
            trials.append(trial)
    return sorted(trials, key=lambda trial: trial.world)


def write_trial(run: Path, trial: Trial) -> Path:
    """Write a trial's document, which carries its own digest, and return where it lies."""
    path = run / name_of(trial.key, trial.world)
    path.parent.mkdir(parents=True, exist_ok=True)
    handover.write_record(path, asdict(trial))
    return path
