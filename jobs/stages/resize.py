"""Carry weights to another image size by resizing their position embeddings (paper, 3.2; vit_jax checkpoint.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import models
from data.files import atomic_file, write_atomically
from jobs.resolved_recipe import Context, Reads, SourceModel, StageKind
from pipeline import artifacts
from pipeline.architecture import model_config
from pipeline.config import Tags, tags


@dataclass(frozen=True)
class ResizeConfig:
    """Which weights, and the image size they are made ready for."""

    init: str = "???"  # weights: a folder, or "@stage"
    image_size: Any = 384  # pixels, one number or [height, width] (paper, table 4)

    RESUME: ClassVar[Tags] = tags(forbid="init image_size")


class Resize(StageKind):
    """The kind of stage that carries weights to another image size."""

    name = "resize"
    config = ResizeConfig
    inputs: ClassVar = {"init": Reads.WEIGHTS}
    makes_weights = True
    needs_workers = False

    def run(self, cfg: ResizeConfig, context: Context) -> dict[str, object]:
        """Write the weights at the new size, and a report of what was kept, resized, new and dropped."""
        folder = context.campaign.path_of(cfg.init)
        artifacts.check_weights(Path(folder), context.log)
        weights, source = models.load_weights(folder)
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

    def model(self, cfg: ResizeConfig, source_model: SourceModel) -> models.ModelConfig | None:
        """Return the architecture at the new size; None where the weights are missing."""
        source = source_model(cfg.init)
        if source is None:
            return None
        return model_config({"image_size": cfg.image_size}, source)
