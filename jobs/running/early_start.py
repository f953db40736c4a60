"""Starts the fork server of plain processes before the driver's own imports, by what the recipe's text tells.

The driver and the fork server (jobs/cluster/processes.py) both import torch, which takes seconds: so they do it side
by side. Nothing that is imported here imports torch. In order (`start_early`):
1. the recipe is read, but for its stages, which cannot be typed without torch;
2. nothing is started where the workers are Ray's or have GPUs, where no stage has workers, or where the run is done;
3. the fork server is started, with torch's compiler where the text of a stage asks for what needs it.

A guess costs time and never a result: the session starts what is missing once it knows (jobs/running/session.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import ConfigError, ExitCode
from jobs.cluster import backends
from jobs.cluster.backends import ClusterConfig
from pipeline import config

# Kinds whose work is done by the driver itself; all others run on workers.
WORKERLESS_KINDS = ("pack", "resize", "sweep")


def start_early(recipe: Path, overrides: list[str], kind: str | None = None) -> None:
    """Start the fork server where the recipe, or its one stage of a `kind`, will want it."""
    try:
        values = config.with_home(config.plain_yaml(config.read_yaml(recipe, overrides)))
        cluster = config.build(ClusterConfig, values.get("cluster", {}), "cluster")
    except ConfigError:
        # It is raised again where the whole recipe is validated, in the order in which a reader expects the errors.
        return
    sections = {}
    for name, section in values.items():
        if isinstance(section, Mapping) and name not in ("cluster", "trackers"):
            sections[name] = section
    kinds = [section.get("kind", name) for name, section in sections.items()]
    if kind is not None:
        kinds = [kind]
    has_work_for_workers = any(kind not in WORKERLESS_KINDS for kind in kinds)
    if has_work_for_workers and not is_done(values.get("run", f"runs/{recipe.stem}")):
        has_compiler = any(asks_for_compiler(section) for section in sections.values())
        backends.start_early(cluster, has_compiler=has_compiler)


def is_done(run: object) -> bool:
    """Tell whether the last command on a run has finished all its stages, so that nothing may be left to be done."""
    try:
        status = json.loads(Path(str(run), "status.json").read_text())
        return bool(status["exit_code"] == ExitCode.DONE)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def asks_for_compiler(section: Mapping[str, Any]) -> bool:
    """Tell whether a stage's text asks for what `TrainConfig.needs_compiler` names; what a sweep varies is not seen."""
    recomputes = bool(section.get("checkpoint_blocks")) or section.get("activation_gb") is not None
    return section.get("zero") == 3 or recomputes or bool(section.get("compile"))
