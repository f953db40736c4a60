"""The forecast that a stage keeps in its folder, and what its steps really took beside it.

In:  forecast.json, written when the stage starts, and the records of metrics.jsonl
Out: "forecast 412 ms a step on 2 workers, measured 431 ms (1.05 ×, median of 23 reports; waiting for data forecast
     0.00 ms, measured 3.10 ms)"

It reads and writes JSON alone: `status` asks it, which has no other use for torch.
"""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from data.errors import DataError
from pipeline import artifacts
from pipeline.monitoring.telemetry import Record, counted, milliseconds, read_metrics

FORECAST = "forecast.json"


class KeptStep(TypedDict):
    """What was forecast of a step on one number of workers, in seconds."""

    training_s: float  # without saves and evaluations
    wait_s: float  # of it: for images
    save_s: float


class Measured(TypedDict):
    """What the reports of a stage came to, medians in seconds a step."""

    reports: int
    training_s: float
    wait_s: float


def write_forecast(folder: Path, calibrated: str, steps: Mapping[int, KeptStep]) -> None:
    """Keep the forecast of a stage by world; `calibrated` says when and on what the calibration was made."""
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(folder / FORECAST, {"calibrated": calibrated, "worlds": dict(steps)})


def read_forecast(folder: Path) -> dict[int, KeptStep]:
    """Return the forecast of a stage by world; {} where it has none that can be read."""
    try:
        values = artifacts.read_record(folder / FORECAST)
        return {int(world): step for world, step in values["worlds"].items()}
    except (OSError, DataError, KeyError, ValueError, AttributeError):
        return {}


def measured_steps(records: Iterable[Record], world: int) -> Measured | None:
    """Return what steps took on so many workers, from records of training; None where there is none to go by.

    The first report of an attempt is left out where there are others: its steps make what the later ones find made.
    """
    later: list[Record] = []
    firsts: list[Record] = []
    seen: set[int] = set()
    for record in records:
        # Runs of an early version did not note what their reports took.
        if record["world"] != world or not record["losses"] or "seconds" not in record:
            continue
        is_first = record["attempt"] not in seen
        seen.add(record["attempt"])
        if is_first:
            firsts.append(record)
        else:
            later.append(record)
    chosen = later or firsts
    if not chosen:
        return None
    training = []
    waits = []
    for record in chosen:
        count = len(record["losses"])
        training.append((record["seconds"] - record["evaluated_s"] - record["stalled_s"]) / count)
        waits.append(record["wait"] * record["seconds"] / count)
    return {"reports": len(chosen), "training_s": statistics.median(training), "wait_s": statistics.median(waits)}


def beside_measured(folder: Path) -> str:
    """Return what was forecast and what was measured in one line; "" where either is not there."""
    steps = read_forecast(folder)
    if not steps:
        return ""
    records: list[Any] = list(read_metrics(folder))
    if not records:
        return ""
    world = records[-1]["world"]
    measured = measured_steps(records, world)
    if world not in steps or measured is None:
        return ""
    step = steps[world]
    forecast_s = step["training_s"]
    measured_s = measured["training_s"]
    return (
        f"forecast {milliseconds(forecast_s)} a step on {counted(world, 'worker')}, "
        f"measured {milliseconds(measured_s)} ({measured_s / forecast_s:.2f} ×, "
        f"median of {measured['reports']} reports; waiting for data "
        f"forecast {milliseconds(step['wait_s'])}, measured {milliseconds(measured['wait_s'])})"
    )


def short_text(folder: Path, last: Record) -> str:
    """Return "forecast 412 ms a step, now 431 ms" for `status`; "" where nothing was forecast for this world."""
    step = read_forecast(folder).get(last["world"])
    if step is None:
        return ""
    measured = measured_steps([last], last["world"])
    if measured is None:
        return ""
    return f"forecast {milliseconds(step['training_s'])} a step, now {milliseconds(measured['training_s'])}"
