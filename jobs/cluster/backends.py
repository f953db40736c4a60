"""N workers run one function, under Ray or as plain processes, with the same contract.

connect(cluster)                                     # Ray only: starts or joins it, waits for resources
value = run_worker_group(train, {...}, cluster=cluster, name="pretrain-000001", directory=run_dir, on_tick=show)
disconnect()
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.cluster import processes
from jobs.cluster.worker_group import ClusterConfig, Function, Tick, WorkerGroupError, records

if TYPE_CHECKING:
    from jobs.cluster.ray_backend import ClusterInfo

__all__ = ["ClusterConfig", "WorkerGroupError", "connect", "disconnect", "run_worker_group"]


def run_worker_group(
    function: Function,
    config: dict[str, Any],
    *,
    cluster: ClusterConfig,
    name: str,
    directory: Path,
    on_tick: Tick = lambda: None,
) -> Any:
    """Run `function(config)` in every worker, once, and return rank 0's value (JSON).

    `function` is importable by its module's name. Workers find RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, and initialise torch.distributed themselves;
    under Ray they run outside the main thread. `directory`, which all nodes share, receives a folder `name`,
    new with every call. `on_tick` runs in the caller's thread about every 0.5 s; what it raises ends the worker group
    and comes out here.

    Raises WorkerGroupError, naming the worker that failed first, with the exit code it wanted if it did. However
    this returns, the worker group is dead.
    """
    folder = directory.resolve() / name
    folder.mkdir(parents=True)
    if cluster.backend == "processes":
        processes.run(function, config, cluster=cluster, folder=folder, on_tick=on_tick)
    else:
        from jobs.cluster import ray_backend as ray_cluster  # takes seconds to import

        ray_cluster.connect(cluster)
        ray_cluster.run(function, config, cluster=cluster, name=name, folder=folder, on_tick=on_tick)
    return records(folder, cluster.workers)[0].get("value")


def connect(cluster: ClusterConfig, say: Callable[[str], None] = print) -> "ClusterInfo":
    """Start or join the Ray cluster; see `ray_cluster.connect`."""
    from jobs.cluster import ray_backend as ray_cluster

    return ray_cluster.connect(cluster, say)


def disconnect() -> None:
    """Leave the Ray cluster; an embedded one ends with every process."""
    from jobs.cluster import ray_backend as ray_cluster

    ray_cluster.disconnect()
