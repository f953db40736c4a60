"""What a run of a sweep has cost: the axes of a study's figures (paper, figures 3 to 5 and table 6).

In:  the folder of a finished stage and, where it has trained, its metrics.jsonl
Out: {"parameters": 86567656, "gmacs": 17.56, "exaflops": 1.27, "images": 1281167, "samples": 12000000, "steps": 2930,
     "seconds": 3600.0, "images_per_s": 3333.3}

Compute is counted as `plan` counts it. Seconds are those of the steps that the run has kept: start-up, evaluations,
and what a failure has cost are not in them.
"""

from pathlib import Path

import models
from jobs.resolved_recipe import Stage, index_if_made
from models import ModelConfig
from pipeline import artifacts
from pipeline.monitoring.telemetry import account, read_metrics
from pipeline.phases import flops_of
from pipeline.training_config import TrainConfig

# The axes of a trained stage that are known of each step before it is taken: those of `axes_at`.
AT_A_STEP = ("parameters", "gmacs", "exaflops", "samples", "steps")


def axes_of(stage: Stage, folder: Path) -> dict[str, float]:
    """Return what is known of a finished stage: of one that does not train, its model alone. Raises DataError."""
    model = stage.model
    if model is None:
        return {}
    axes: dict[str, float] = {"parameters": models.parameters_of(model), "gmacs": models.macs_of(model) / 1e9}
    records = read_metrics(folder, None)
    reports = [record for record in records if record["kind"] == "train"]
    if not stage.kind.trains or not reports:
        return axes
    cfg: TrainConfig = stage.config
    # The size of the training sets, as long as they are there.
    if (folder / artifacts.PROVENANCE).exists():
        for name, source in artifacts.read_record(folder / artifacts.PROVENANCE)["inputs"].items():
            index = index_if_made(source["path"]) if name.endswith("train") and name.startswith("data.") else None
            if index is not None:
                axes["images"] = axes.get("images", 0) + index.samples
    # The stage may have ended early, and a step that was given up has seen no samples.
    axes |= axes_at(cfg, model, reports[-1]["step"], reports[-1]["steps"])
    axes["samples"] = reports[-1]["samples_seen"]
    spent = account(records)
    axes["seconds"] = spent.compute + spent.data + spent.checkpoint
    own_samples = axes["samples"] - cfg.first_step * cfg.batch_size
    if axes["seconds"] > 0:
        axes["images_per_s"] = own_samples / axes["seconds"]
    return axes


def axes_at(cfg: TrainConfig, model: ModelConfig, step: int, steps: int) -> dict[str, float]:
    """Return the axes of a stage of `steps` steps after one of them, which need not have been taken.

    Those of a branch are of all steps from 0 on, as of a run of its own.
    """
    # Which step sees how many patches depends on the steps that were planned.
    phases = cfg.phases(steps, model)
    return {
        "parameters": models.parameters_of(model),
        "gmacs": models.macs_of(model) / 1e9,
        "exaflops": flops_of(phases, model, range(step), cfg.batch_size) / 1e18,
        "samples": step * cfg.batch_size,
        "steps": step,
    }
