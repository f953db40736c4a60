"""The resize stage: convert weights to another image size by resizing position embeddings (paper, section 3.2)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import models
from data.files import atomic_file, write_atomically
from jobs.resolved_recipe import Context, Reads, StageKind
from pipeline import artifacts
from pipeline.architecture import model_config
from pipeline.config import Tags, tags


@dataclass(frozen=True)
class ResizeConfig:
    """The weights to convert, and the new image size."""

    init: str = "???"  # weights: a folder, or "@stage"
    image_size: Any = 384  # pixels, one number or [height, width] (paper, table 4)

    RESUME: ClassVar[Tags] = tags(forbid="init image_size")


class Resize(StageKind):
    """The stage kind that converts weights to another image size, like vit_jax/checkpoint.py."""

    name = "resize"
    config = ResizeConfig
    inputs: ClassVar = {"init": Reads.WEIGHTS}
    makes_weights = True
    needs_workers = False

    def run(self, cfg: ResizeConfig, context: Context) -> dict[str, object]:
        """Write the weights for the new size; list unchanged, resized, new and dropped tensors in report.txt."""
        folder = context.campaign.path_of(cfg.init)
        artifacts.check_weights(Path(folder), context.log)
        weights, source = artifacts.load_weights(Path(folder))
        weights, report = models.transfer(weights, source, context.model)
        names = context.class_names
        models.save_weights(weights, context.directory, context.model, writing=atomic_file, class_names=names)
        write_atomically(context.directory / "report.txt", f"{report}\n")
        for line in str(report).splitlines():
            context.log(line)
        return {
            "kept": len(report.kept),
            "resized": len(report.resized),
            "new": len(report.new),
            "dropped": len(report.dropped),
        }

    def model(self, cfg: ResizeConfig, source: models.ModelConfig | None) -> models.ModelConfig | None:
        """Return the architecture with the new image size; None if the weights are missing."""
        if source is None:
            return None
        return model_config({"image_size": cfg.image_size}, source)
