"""Suggest commands for the weights of a finished run: its report, an evaluation, an export, and longer training.

next, for example:
  python -m jobs report runs/photos --open
  python -m jobs evaluate runs/photos/pretrain runs/photos/parts/held-out
  python -m jobs export runs/photos/pretrain exported --format timm
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign, Stage
from jobs.run.watchers import Log, Watcher
from jobs.stage_folders import STAGE_FOLDER
from jobs.terminal import COMMAND
from pipeline.artifacts import DIVERGED


class NextCommands(Watcher):
    """Logs the commands once all stages have finished; nothing if no stage makes weights."""

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        self.log = log

    def finished(self, campaign: Campaign, rows: Sequence[Mapping[str, Any]]) -> None:
        for line in lines(campaign, rows):
            self.log(line)


def lines(campaign: Campaign, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield example commands that use the weights of the last section, or the best ones if it is a sweep."""
    address = campaign.storage.address()
    stage: Stage | None = None
    best = 0.0
    for row in rows:
        made = campaign.stage(row["stage"])
        accuracy = row.get("metrics", {}).get("accuracy", 0.0)
        is_first = stage is None or made.source != stage.source
        if made.kind.makes_weights and DIVERGED not in row and (is_first or accuracy > best):
            stage = made
            best = accuracy
    if stage is None:
        return
    is_vit = stage.model is not None and stage.model.family == "vit"
    evaluated = campaign.path_of(stage.config.data.evaluate) if stage.kind.trains else None
    # Relative to the current directory, if possible.
    run = os.path.relpath(address) if Path(address).is_relative_to(Path.cwd()) else address
    weights = f"{run}/{stage.name}"
    commands = [["report", run, "--open"]]
    if evaluated is not None:
        if Path(evaluated).is_relative_to(Path.cwd()):
            evaluated = os.path.relpath(evaluated)
        # A data set packed by this run is addressed by its stage, like the weights.
        made_by = STAGE_FOLDER.fullmatch(Path(evaluated).parent.name)
        if made_by is not None and Path(evaluated).parents[1] == Path(run):
            evaluated = f"{run}/{made_by['name']}/{Path(evaluated).name}"
        commands.append(["evaluate", weights, evaluated])
    commands.append(["export", weights, "exported", "--format", "timm" if is_vit else "safetensors"])
    yield "next, for example:"
    for command in commands:
        yield f"  {COMMAND} {shlex.join(command)}"
    if best and stage.kind.trains and stage.config.init is None:
        length = f"steps={2 * stage.config.steps}" if stage.config.steps else f"passes={2 * stage.config.passes:g}"
        yield "for better accuracy: use more images or pretrained weights (`new` with --init), or train longer:"
        yield f"  {COMMAND} run RECIPE {stage.source}.{length}"
