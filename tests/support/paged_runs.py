"""Run folders for tests, written by hand: records and metrics without any training."""

import json
import time
from pathlib import Path
from typing import Any

from jobs.recipe.records import stage_record
from jobs.run.log import write_status
from pipeline import artifacts
from pipeline.config import plain
from pipeline.monitoring.telemetry import read_metrics, sealed
from tests.support import campaigns
from tests.support.recipes import TINY

KEY = "1a2b3c4d" * 8
EPOCH = 1_795_400_000.0
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "ray": "2.60.0", "numpy": "2.4.6"}
ENVIRONMENT = {**VERSIONS, "machine": "x86_64"}
SPIKE = {"kind": "spike", "step": 14, "grad_norm": 321.5, "limit": 12.0, "ids": [[0, 0, 1]]}
SPIKE["recent"] = [{"step": 14, "loss": 9.5, "grad_norm": 321.5, "ledger": "0" * 12}]


def make_run(
    run: Path,
    shards: Path,
    *,
    steps: int = 24,
    report_every: int = 4,
    losses: list[float] | None = None,
    ledgers: dict[int, str] | None = None,
    train: str = "train",
) -> Path:
    """Write a run with one stage, trained for `steps` steps in one attempt; return the stage's folder."""
    recipe = run.parent / f"{run.name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(TINY.format(run=run, shards=shards))
    stage = campaigns.load(recipe, []).stage("pretrain")
    folder = run / "pretrain-1a2b3c4d"
    (folder / "attempts" / "attempt-000001").mkdir(parents=True)
    artifacts.write_record(folder / "stage.json", {**stage_record(stage), "key": KEY, "started": EPOCH})
    job = {"train": [str(shards / train)], "evaluate": str(shards / "test"), "code": "c0de" * 16, "init": None}
    artifacts.write_record(folder / "task.json", {"config": plain(stage.config), "job": job})
    artifacts.write_record(folder / "provenance.json", {"environment": ENVIRONMENT, "command": "python -m jobs run"})
    records: list[dict[str, Any]] = [start(1, 0)]
    losses = losses or [2.5 / (1 + 0.1 * step) for step in range(steps)]
    for last in range(report_every, steps + 1, report_every):
        ledger = (ledgers or {}).get(last, f"{last:064x}")
        records.append(report(1, last, steps, losses[last - report_every : last], ledger))
    with open(folder / "metrics.jsonl", "w") as file:
        for record in records:
            file.write(sealed(json.dumps(record)) + "\n")
    write_status(run, 0, "done", "python -m jobs run tiny.yaml")
    return folder


def make_restarted_run(run: Path, shards: Path) -> Path:
    """Write a run killed at step 24 and resumed from step 16; return the stage's folder.

    The run also has a spike, evaluations, an incident, a bad sample and excluded steps.
    """
    folder = make_run(run, shards)
    second = [start(2, 16), report(2, 20, 28, [1.0, 0.75, 0.5, 0.625], "a" * 64)]
    second += [report(2, 28, 28, [0.4] * 8, "b" * 64)]
    add(folder, SPIKE, *second)
    add(folder, {"kind": "evaluate", "step": 8, "accuracy": 0.5, "judged": 100, "seconds": 1.5})
    values = {"accuracy": 0.8125, "judged": 352, "5shot": 0.7, "5shot-seed-0": 0.6, "5shot-seed-1": 0.8}
    add(folder, {"kind": "evaluate", "step": 28, **values})
    (folder / "incidents.txt").write_text(incident(15, "worker 1 on n7, in backward of step 24: killed by SIGKILL"))
    (folder / "log.txt").write_text("[worker 1] bad sample 1 replaced: train-000001.tar k7: not a JPEG\n")
    artifacts.write_record(folder / artifacts.EXCLUDED_STEPS, {"stretches": [[20, 22]]})
    return folder


def start(attempt: int, step: int, **values: Any) -> dict[str, Any]:
    """Return a "start" record."""
    record = {"kind": "start", "time": EPOCH + step, "attempt": attempt, "step": step, "world": 2, "claimed": EPOCH}
    record |= {"text": f"random weights, step {step}", "hardware": "Xeon", "drop": [], "code": "c0de" * 16}
    return {**record, "versions": VERSIONS, "threads": 1, **values}


def report(attempt: int, last: int, steps: int, losses: list[float], ledger: str) -> dict[str, Any]:
    """Return a "train" record; gradient norms are ten times the losses."""
    count = len(losses)
    return {
        "kind": "train",
        "time": EPOCH + last,
        "attempt": attempt,
        "step": last,
        "steps": steps,
        "lr": 1e-3 * last,
        "loss": losses[-1],
        "losses": losses,
        "grad_norm": 10 * losses[-1],
        "grad_norms": [10 * loss for loss in losses],
        "images_per_s": 100.0 + last,
        "wait": 0.1,
        "seconds": float(count),
        "stalled_s": 0.0,
        "evaluated_s": 0.0,
        "eta_s": float(steps - last),
        "world": 2,
        "samples_seen": 16 * last,
        "bad_samples": 3,
        "ledger": ledger,
    }


def add(folder: Path, *records: dict[str, Any]) -> None:
    """Append records to a stage's metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a") as file:
        for record in records:
            file.write(sealed(json.dumps({"time": EPOCH + 100, "attempt": 1, **record})) + "\n")


def change(path: Path, *keys: str, value: Any) -> None:
    """Change an entry of a record and renew its checksum."""
    record = artifacts.read_record(path)
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    artifacts.write_record(path, record)


def change_metrics(folder: Path, kind: str, **values: Any) -> None:
    """Change values in all records of one kind in metrics.jsonl."""
    records = read_metrics(folder, None)
    lines = [sealed(json.dumps({**record, **(values if record["kind"] == kind else {})})) for record in records]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def incident(at_s: float, what: str, traceback: str = "") -> str:
    """Return an entry of incidents.txt."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(EPOCH + at_s))} {what}\n{traceback}\n"
