"""The two ways to run N workers, Ray or plain processes, with one contract (worker_group.RunWorkerGroup).

connect(cluster)                                        # Ray only: starts or joins it
wait_for_resources(cluster, "/runs/digits", say, look)  # Ray only: reserves a place for every worker
run_worker_group = worker_group_runner(cluster)
value = run_worker_group(train, task, cluster=cluster, folder=attempt_folder, on_tick=look)
disconnect()

Ray takes seconds to import, so only a function that needs it imports it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cluster import processes
from jobs.cluster.worker_group import (
    ClusterConfig,
    RunWorkerGroup,
    Task,
    WorkerFunction,
    WorkerGroupError,
    do_nothing,
)

if TYPE_CHECKING:
    from jobs.cluster.ray_access import ClusterInfo

__all__ = [
    "ClusterConfig",
    "WorkerGroupError",
    "connect",
    "disconnect",
    "leave_nodes",
    "run_worker_group",
    "wait_for_resources",
    "worker_group_runner",
]


def worker_group_runner(cluster: ClusterConfig) -> RunWorkerGroup:
    """Return the function that runs a worker group on the backend of the config."""
    if cluster.backend == "processes":
        return processes.run_worker_group
    from jobs.cluster import ray_backend

    return ray_backend.run_worker_group


def connect(cluster: ClusterConfig) -> "ClusterInfo":
    """Start or join the Ray cluster; see ray_access.connect."""
    from jobs.cluster import ray_backend

    return ray_backend.connect(cluster)


def wait_for_resources(
    cluster: ClusterConfig, run: str, say: Callable[[str], None], on_tick: Callable[[], None]
) -> None:
    """Return when a worker group can start; what `on_tick`, called more than once a second, raises ends the wait.

    `run` is the name under which others see who holds the resources. Raises ClusterError; see placement.reserve.
    """
    # Processes of this machine start at once, or are refused.
    if cluster.backend == "ray":
        from jobs.cluster import ray_backend

        ray_backend.reserve_places(cluster, run, say, on_tick)


def leave_nodes(cluster: ClusterConfig, node_ids: list[str]) -> None:
    """Have the next attempt placed without these nodes, which are about to leave, where the others have the room."""
    # Plain processes have one node, which gives no notice.
    if cluster.backend == "ray":
        from jobs.cluster import ray_backend

        for node_id in node_ids:
            ray_backend.leave_node(node_id)


def gpus_present(cluster: ClusterConfig) -> tuple[int, str]:
    """Return how many GPUs there are, and whether this "machine" or a "cluster" has them; under Ray connect first."""
    if cluster.backend == "processes":
        return processes.gpus_present(), "machine"
    from jobs.cluster import ray_backend

    return ray_backend.gpus_present()


def disconnect() -> None:
    """Leave the Ray cluster; an embedded one ends with every process."""
    from jobs.cluster import ray_backend

    ray_backend.disconnect()


def run_worker_group(
    function: WorkerFunction,
    task: Task,
    *,
    cluster: ClusterConfig,
    name: str,
    directory: Path,
    on_tick: Callable[[], None] | None = None,
    is_shared: bool = True,
) -> object:
    """Run one worker group in a new folder `name` of `directory`; for tests and benchmarks, which supervise nothing."""
    # The contract wants a folder that is absolute, because workers may have another working directory, and new, because
    # records of an earlier attempt would be taken for those of this one.
    folder = directory.resolve() / name
    folder.mkdir(parents=True)
    runner = worker_group_runner(cluster)
    look = on_tick or do_nothing
    return runner(function, task, cluster=cluster, folder=folder, on_tick=look, is_shared=is_shared)
