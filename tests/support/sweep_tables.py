"""Finished runs of a sweep without training, and the table made of them."""

from pathlib import Path
from typing import Any

from jobs.recipe import records
from jobs.resolved_recipe import Campaign, Context
from pipeline import artifacts


def finish(loaded: Campaign, name: str, accuracy: float, **outcome: Any) -> Path:
    """Write the records of a finished run; return its folder."""
    stage = loaded.stage(name)
    folder = loaded.directory(stage)
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "stage.json", records.stage_record(stage))
    metrics = {} if outcome else {"accuracy": accuracy}
    artifacts.write_record(folder / "done.json", {"key": stage.key, "seconds": 1.0, "metrics": metrics, **outcome})
    return folder


def make_table(loaded: Campaign, name: str) -> tuple[dict[str, Any], list[str]]:
    """Run the stage of a table; return its record and its log lines."""
    log: list[str] = []
    stage = loaded.stage(name)
    folder = loaded.directory(stage)
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(folder / "stage.json", records.stage_record(stage))
    context = Context(loaded, stage, log.append, poll=lambda attempt, step: None, stop_requested=lambda: False)
    outcome = stage.kind.run(stage.config, context)
    artifacts.write_record(folder / "done.json", {"key": stage.key, "seconds": 0.0, **outcome})
    return artifacts.read_record(folder / "sweep.json"), log
