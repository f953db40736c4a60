"""Carry weights to another image size by resizing their position embeddings (paper, 3.2; vit_jax checkpoint.py).

python -m jobs.resize recipe.yaml [key=value …]
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import models
from data.files import whole_file, write_whole
from jobs.context import Context
from pipeline.config import Tags, tags


@dataclass(frozen=True)
class Config:
    init: str = "???"  # weights: a folder, or "@stage"
    image_size: Any = 384  # pixels, one number or [height, width] (paper, table 4)

    RESUME: ClassVar[Tags] = tags(forbid="init image_size")


DEFAULTS: Config | None = None
INPUTS = ("init",)


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Weights at the new size, and the report of what was kept, resized, new and dropped."""
    state, source = models.load_weights(context.resolve(cfg.init) or "")
    state, report = models.transfer(state, source, context.model)
    models.save_weights(state, context.directory, context.model, writing=whole_file)
    write_whole(context.directory / "report.txt", f"{report}\n")
    for line in str(report).splitlines():
        context.say(line)
    return {
        "kept": len(report.kept),
        "resized": len(report.resized),
        "new": len(report.new),
        "dropped": len(report.dropped),
    }
