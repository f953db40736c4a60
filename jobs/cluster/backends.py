"""The two ways to run N workers, Ray or plain processes, with one contract (worker_group.RunWorkerGroup).

connect(cluster)  # Ray only: starts or joins it
world = wait_for_resources(cluster, "/runs/digits", say, look, worlds)  # Ray: reserves a place for every worker
run_worker_group = worker_group_runner(cluster)
value = run_worker_group(train, task, cluster=cluster, seen=SeenRecords(attempt_folder), on_tick=look)
disconnect()

Ray takes seconds to import, so only a function that needs it imports it.
"""

import dataclasses
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cluster import embedded
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.workers import processes
from jobs.workers.worker_files import SeenRecords
from jobs.workers.worker_group import RunWorkerGroup, Task, WorkerFunction, WorkerGroupError, do_nothing

if TYPE_CHECKING:
    from jobs.cluster.ray import ClusterInfo

__all__ = [
    "WorkerGroupError",
    "connect",
    "disconnect",
    "leave_nodes",
    "must_make_way",
    "room_now",
    "run_worker_group",
    "start_early",
    "stay_on_nodes",
    "wait_for_resources",
    "worker_group_runner",
]


def worker_group_runner(cluster: ClusterConfig) -> RunWorkerGroup:
    """Return the function that runs a worker group on the backend of the config."""
    if cluster.backend == "processes":
        return processes.run_worker_group
    from jobs.cluster import ray_backend

    return ray_backend.run_worker_group


def start_early(cluster: ClusterConfig, *, has_compiler: bool = False) -> None:
    """Begin what workers need and what takes seconds; see processes.start_early and embedded.start_early."""
    if cluster.backend == "processes":
        processes.start_early(cluster, has_compiler=has_compiler)
    else:
        embedded.start_early(cluster)


def connect(cluster: ClusterConfig) -> "ClusterInfo":
    """Start or join the Ray cluster; see ray.connect."""
    from jobs.cluster import ray

    return ray.connect(cluster)


def wait_for_resources(
    cluster: ClusterConfig,
    run: str,
    say: Callable[[str], None],
    on_tick: Callable[[], None],
    worlds: Sequence[int] = (),
) -> int:
    """Return how many workers can start, when they can; what `on_tick`, called more than once a second, raises ends it.

    It is one of `worlds`, the largest first, or `cluster.world` without them. `run` is the name under which others see
    who holds the resources. Raises ClusterError; see queue.reserve.
    """
    if len(worlds) > 1:
        # A stage may need more workers than the campaign would do with: nobody has to know the difference.
        cluster = dataclasses.replace(cluster, workers=WorkerRange(least=worlds[-1], most=worlds[0]))
    elif worlds:
        cluster = dataclasses.replace(cluster, workers=worlds[0])
    # Processes of this machine start at once, or are refused.
    if cluster.backend == "processes":
        return processes.largest_world(cluster, worlds or (cluster.world,))
    from jobs.cluster import ray_backend
    from jobs.scheduling import placement

    ray_backend.reserve_places(cluster, run, say, on_tick, worlds)
    return placement.workers_held()


def room_now(cluster: ClusterConfig) -> int:
    """Return for how many workers a larger worker group would find room, those counted that run; any thread may ask.

    Of plain processes there are as many from the start as there will ever be: 0.
    """
    if cluster.backend == "processes":
        return 0
    from jobs.cluster import ray_backend

    return ray_backend.room_now(cluster)


def leave_nodes(cluster: ClusterConfig, node_ids: list[str]) -> None:
    """Have the next attempt placed without these nodes, which are about to leave, where the others have the room."""
    # Plain processes have one node, which gives no notice.
    if cluster.backend == "ray":
        from jobs.cluster import ray_backend

        for node_id in node_ids:
            ray_backend.leave_node(node_id)


def must_make_way(cluster: ClusterConfig) -> bool:
    """Tell whether another campaign of the cluster is to have the places of this one."""
    if cluster.backend == "processes":
        return False
    from jobs.cluster import ray_backend

    return ray_backend.must_make_way()


def stay_on_nodes(cluster: ClusterConfig, node_ids: Set[str]) -> None:
    """Have the next attempts placed on these nodes alone, where they have the room."""
    if cluster.backend == "ray":
        from jobs.cluster import ray_backend

        ray_backend.stay_on_nodes(cluster, node_ids)


def gpus_present(cluster: ClusterConfig) -> tuple[int, str]:
    """Return how many GPUs there are, and whether this "machine" or a "cluster" has them; under Ray connect first."""
    if cluster.backend == "processes":
        return processes.gpus_present(), "machine"
    from jobs.cluster import ray

    return ray.gpus_present()


def disconnect() -> None:
    """Leave the Ray cluster; an embedded one ends with every process."""
    from jobs.cluster import ray

    ray.disconnect()


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
    return runner(function, task, cluster=cluster, seen=SeenRecords(folder), on_tick=look, is_shared=is_shared)
