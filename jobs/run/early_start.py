"""Starts what workers need before the driver's own imports, by what the recipe's text tells.

The driver imports torch, which takes seconds. Meanwhile the fork server of plain processes
(jobs/cluster/fork_server.py) imports it too, or the processes of an embedded Ray cluster start
(jobs/cluster/embedded.py). Nothing that is imported here imports torch or Ray. In order (`start_early`):
1. the recipe's cluster is typed, not its stages, which cannot be without torch;
2. nothing is started where no stage has workers, where the run is done, for plain processes with GPUs, and where a Ray
   cluster is to be joined, which sees nothing of this run before it is accepted;
3. the fork server is started, or the cluster.

A guess costs time and never a result: the session starts what is missing once it knows (jobs/run/session.py), and
a cluster that nobody has joined ends with the command (`started_early`).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from data.errors import ConfigError, ExitCode
from jobs.cluster import embedded, placement
from jobs.cluster_config import ClusterConfig
from pipeline import config

# Kinds whose work is done by the driver itself; all others run on workers.
WORKERLESS_KINDS = ("pack", "resize", "sweep")


@contextmanager
def started_early(recipe: config.Recipe, kind: str | None = None) -> Iterator[None]:
    """Start what the block will need, and end what it has not come to use: it may refuse the recipe."""
    had_cluster = embedded.is_started()  # as where a process runs one campaign after another
    start_early(recipe, kind)
    try:
        yield
    finally:
        if not had_cluster:
            embedded.end(waits=False)


def start_early(recipe: config.Recipe, kind: str | None = None) -> None:
    """Start the fork server, or the embedded cluster, where the recipe, or its one stage of a `kind`, will want it."""
    try:
        cluster = config.build(ClusterConfig, recipe.values.get("cluster", {}), "cluster")
    except ConfigError:
        # It is raised again where the whole recipe is validated, in the order in which a reader expects the errors.
        return
    kinds = []
    for name, section in recipe.values.items():
        if isinstance(section, Mapping) and name not in ("cluster", "trackers"):
            kinds.append(section.get("kind", name))
    if kind is not None:
        kinds = [kind]
    # Where the last command has finished all stages, nothing may be left to be done.
    run = recipe.values.get("run", recipe.default_run)
    try:
        is_done = json.loads(Path(str(run), "status.json").read_text())["exit_code"] == ExitCode.DONE
    except (OSError, ValueError, KeyError, TypeError):
        is_done = False
    if not is_done and any(kind not in WORKERLESS_KINDS for kind in kinds):
        placement.start_early(cluster)
