"""Compute a run's size and cost: the axes of a study's figures (as in the paper's figures 3 to 5 and table 6).

In:  the folder of a finished stage and, if it trained, its metrics.jsonl
Out: {"parameters": 86567656, "gmacs": 17.56, "exaflops": 1.27, "images": 1281167, "samples": 12000000, "steps": 2930,
     "seconds": 3600.0, "images_per_s": 3333.3}

Compute is counted as in `plan`. `seconds` covers only the steps that contribute to the weights, without startup,
evaluations or repeated steps.
"""

from contextlib import suppress
from pathlib import Path

import models
from data.errors import DataError
from jobs.resolved_recipe import Stage, index_if_made
from models import ModelConfig
from pipeline import artifacts
from pipeline.monitoring.telemetry import account, read_metrics
from pipeline.training_config import TrainConfig, flops_of
from pipeline.variables import restored

# Axes of a training stage that can be computed for a step before the stage runs (`axes_at`).
AT_A_STEP = ("parameters", "gmacs", "exaflops", "samples", "steps")


def axes_of(stage: Stage, folder: Path) -> dict[str, float]:
    """Return a finished stage's size and cost or, if the stage does not train, only the size of its model.

    Raises DataError if a record was altered.
    """
    model = stage.model
    if model is None:
        return {}
    axes: dict[str, float] = {"parameters": models.parameters_of(model), "gmacs": models.macs_of(model) / 1e9}
    records = read_metrics(folder, None)
    reports = [record for record in records if record["kind"] == "train"]
    if not stage.kind.trains or not reports:
        return axes
    cfg: TrainConfig = stage.config
    # Add the size of the training sets if they still exist.
    if (folder / artifacts.PROVENANCE).exists():
        for name, source in artifacts.read_record(folder / artifacts.PROVENANCE)["inputs"].items():
            index = None
            with suppress(DataError):  # an environment variable in the path has another value now
                if name.endswith("train") and name.startswith("data."):
                    index = index_if_made(restored(source["path"], folder / artifacts.PROVENANCE))
            if index is not None:
                axes["images"] = axes.get("images", 0) + index.samples
    # Use the last report: the stage may have stopped early, and excluded steps use no samples.
    axes |= axes_at(cfg, model, reports[-1]["step"], reports[-1]["steps"])
    axes["samples"] = reports[-1]["samples_seen"]
    spent = account(records)
    axes["seconds"] = spent.compute + spent.data + spent.checkpoint
    own_samples = axes["samples"] - cfg.first_step * cfg.batch_size
    if axes["seconds"] > 0:
        axes["images_per_s"] = own_samples / axes["seconds"]
    return axes


def axes_at(cfg: TrainConfig, model: ModelConfig, step: int, steps: int) -> dict[str, float]:
    """Return a stage's size and cost after step `step` of `steps`; the stage need not have run.

    The steps of a branch are counted from step 0 of the trunk.
    """
    # The number of patches per step depends on the total number of steps.
    phases = cfg.phases(steps, model)
    return {
        "parameters": models.parameters_of(model),
        "gmacs": models.macs_of(model) / 1e9,
        "exaflops": flops_of(phases, model, range(step), cfg.batch_size) / 1e18,
        "samples": step * cfg.batch_size,
        "steps": step,
    }
