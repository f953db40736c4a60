"""A worker group on a Ray cluster, with the same contract as that of plain processes.

1. Connect: join or start the cluster (ray.py), and reserve a place for every worker
   (jobs/scheduling/placement.py).
2. Place: Ray Train puts one worker on each place, and tells all of them where rank 0 listens.
3. Run: Train's blocking `fit` has a thread; this thread calls `on_tick` twice a second, which may raise, and ends the
   attempt where a node was lost. A third asks Ray once a second which nodes are being drained, and leaves a notice
   where workers are on one; a fourth, whether another campaign wants the places.
4. Clear up: leave the cluster where `fit` has not ended by itself, and wait until no worker of this host is alive.
5. Return rank 0's value, or raise the error of the worker that failed first.

Train places the workers and sees them die. It restarts nothing and knows no checkpoint, so one call is one attempt.
Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypedDict

import ray
from ray._private.state import state as ray_state
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.util.placement_group import PlacementGroup

from jobs.cluster.ray import connect, disconnect, gpus_present
from jobs.cluster.ray_failures import failure_of, lost_node
from jobs.cluster.ray_trainer import RendezvousConfig, Trainer, UseReserved
from jobs.cluster_config import ClusterConfig
from jobs.monitor import worker_gauge
from jobs.scheduling import placement, queue, room
from jobs.workers import notices
from jobs.workers.environment import MALLOC, forget_malloc
from jobs.workers.failures import terminate_workers
from jobs.workers.node_copies import NodeCopies
from jobs.workers.worker_files import SeenRecords, rank_zero_value
from jobs.workers.worker_group import (
    RankInfo,
    Task,
    WorkerFunction,
    WorkerGroupError,
    do_nothing,
    require_folder,
    worker_records,
)

__all__ = [
    "connect",
    "disconnect",
    "gpus_present",
    "leave_node",
    "must_make_way",
    "reserve_places",
    "room_now",
    "run_worker_group",
    "stay_on_nodes",
]

TICK_S = 0.5
CONTROLLER = "TrainController"  # the class of Train's own actor that starts and watches the workers
CONTROLLER_S = 5.0  # for it to end when it is killed


class WorkerSpec(TypedDict):
    """What Train hands to every worker."""

    function: WorkerFunction
    task: Task
    folder: Path
    cluster: ClusterConfig
    is_shared: bool


def run_worker_group(
    function: WorkerFunction,
    task: Task,
    *,
    cluster: ClusterConfig,
    seen: SeenRecords,
    on_tick: Callable[[], None],
    is_shared: bool = True,
) -> object:
    """Run `function(task)` in every worker and return rank 0's value; see worker_group.RunWorkerGroup.

    Raises ClusterError as well, where the cluster is missing, refuses us or is too small.
    """
    folder = seen.folder
    # The supervisor has waited for the places already, and has them.
    is_embedded = connect(cluster).embedded
    places = placement.held(cluster) or placement.reserve(cluster, str(folder), is_embedded, on_tick=on_tick)
    spec: WorkerSpec = {
        "function": function,
        "task": task,
        "folder": folder,
        "cluster": cluster,
        "is_shared": is_shared,
    }
    trainer = _make_trainer(spec, places)
    errors: list[BaseException] = []
    has_ended = threading.Event()
    copies = NodeCopies(folder)
    if not is_shared:
        copies.begin(places, cluster.start_timeout_s, on_tick)
    # Threads of their own, because `fit` blocks, and so may a question to a head that is away; daemons, because the
    # driver may end while they wait.
    fit = threading.Thread(target=_fit, args=(trainer, errors), name=f"fit-{folder.name}", daemon=True)
    own_node = ray.get_runtime_context().get_node_id()
    watched = (folder, cluster.world, own_node, room.draining_nodes, has_ended)
    watch = threading.Thread(target=notices.watch_nodes, args=watched, daemon=True)
    watch_queue = threading.Thread(target=queue.watch, args=(folder, queue.own_job(), has_ended), daemon=True)
    fit.start()
    watch.start()
    watch_queue.start()
    lost: WorkerGroupError | None = None
    try:
        while fit.is_alive() and lost is None:
            fit.join(TICK_S)
            copies.look()
            seen.look()
            on_tick()
            # Train would say so too, but only when Ray has missed the node.
            lost = lost_node(folder, cluster.world, seen.by_rank)
        copies.last_look()
        copies.end()
        if lost is not None:
            # They are asked for anew, without the node that was lost.
            queue.wait_again()
            placement.release()
            _end_controller(fit)
    except BaseException:
        # Train's own abort needs the main thread, which is this one: leaving the cluster kills its workers at once.
        has_ended.set()
        _end_controller(fit)
        disconnect()
        raise
    finally:
        has_ended.set()
        # Train may return before its workers are gone, and the next attempt wants their GPUs.
        terminate_workers(folder, cluster.world)
    if lost is not None:
        raise lost
    if errors:
        raise failure_of(errors[0], folder, cluster.world)
    return rank_zero_value(folder)


def reserve_places(
    cluster: ClusterConfig,
    run: str,
    say: Callable[[str], None] = print,
    on_tick: Callable[[], None] = do_nothing,
    worlds: Sequence[int] = (),
) -> PlacementGroup:
    """Connect, and return a place for every worker when it is this run's turn and there is room; see queue.reserve."""
    info = connect(cluster)
    # Nobody else is in a cluster of this process's own.
    if info.embedded:
        return placement.reserve(cluster, run, info.embedded, say, on_tick, worlds)
    return queue.reserve(cluster, run, say, on_tick, worlds)


def must_make_way() -> bool:
    """Tell whether another campaign is to have the places of this one."""
    if not ray.is_initialized():
        return False
    try:
        return queue.reason_to_make_way(queue.own_job()) != ""
    except Exception:
        # The head does not answer: then nobody is told anything.
        return False


def room_now(cluster: ClusterConfig) -> int:
    """Return for how many workers a larger worker group would find room; who waits comes before who wants more."""
    if queue.is_anybody_waiting():
        return placement.workers_held()
    return placement.room_now(room.share_of_worker(cluster))


def leave_node(node_id: str) -> None:
    """Have the next attempt placed without a node that has given notice."""
    placement.avoid(node_id)


def stay_on_nodes(cluster: ClusterConfig, node_ids: Set[str]) -> None:
    """Have the next attempts placed without any other node."""
    # An attempt that was ended in its midst has left the cluster.
    connect(cluster)
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in node_ids:
            placement.avoid(node["NodeID"])


# ------------------------------------------------------------------------ placing the workers


def _make_trainer(spec: WorkerSpec, places: PlacementGroup) -> Trainer:
    cluster = spec["cluster"]
    folder = spec["folder"]
    # Train resumes a run whose name it knows, from a snapshot of its own; a torn snapshot makes the name unusable
    # (measured). So every attempt has its own name and storage, and Train always starts anew.
    stage_folder = folder.parents[1]
    # Set before a worker imports anything, because some libraries read their variables then.
    environment = cluster.environment
    if not cluster.gpus_per_worker:
        environment = {**MALLOC, **environment}
    return Trainer(
        # Not as Train's config of the function, which the controller would unpack, and import all that it names.
        partial(_worker, spec),
        backend_config=RendezvousConfig(),
        scaling_config=ScalingConfig(
            num_workers=cluster.world,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker={"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker},
        ),
        run_config=RunConfig(
            name=f"{stage_folder.name}-{folder.name}",
            storage_path=str(folder / "ray"),
            # Train restarts nothing: it would resume from its own idea of a checkpoint, under the same attempt. The
            # last two are without limit unless told otherwise: after the loss of a node that was drained, and after a
            # start that failed.
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
            worker_runtime_env={"env_vars": environment},
            callbacks=[UseReserved(places)],
        ),
    )


def _worker(spec: WorkerSpec) -> None:
    """Be one worker, in a process that Ray has started; under Ray this is not its main thread."""
    forget_malloc()
    context = get_context()
    info = RankInfo(
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world=context.get_local_world_size(),
        node_rank=context.get_node_rank(),
        address=ray.util.get_node_ip_address(),
        threads=spec["cluster"].cpus_per_worker,
        gpus=spec["cluster"].gpus_per_worker,
        node_id=ray.get_runtime_context().get_node_id(),
    )
    if spec["is_shared"]:
        require_folder(spec["folder"])
    else:
        # Ray may have moved this worker to a node that nobody has prepared.
        spec["folder"].mkdir(parents=True, exist_ok=True)
    threading.Thread(target=notices.pass_on, args=(spec["folder"], info), daemon=True).start()
    threading.Thread(target=worker_gauge.keep_set, args=(spec["folder"], info), daemon=True).start()
    with worker_records(spec["folder"], info) as result:
        result.value = spec["function"](spec["task"])


def _end_controller(fit: threading.Thread) -> None:
    """Kill Train's controller, which takes its workers along, and return when the thread that waits for it has ended.

    Where it is inside Ray while this process leaves the cluster, the process ends with SIGSEGV, then or later. After
    CONTROLLER_S it is left alone.
    """
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    deadline = time.monotonic() + CONTROLLER_S
    while fit.is_alive() and time.monotonic() < deadline:
        # Again, because there may not have been one yet. The head may be away.
        with suppress(Exception):
            for actor_id, actor in ray_state.actor_table(None, job).items():
                if actor["ActorClassName"] == CONTROLLER and actor["State"] != "DEAD":
                    ray._private.worker.global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor_id), True)
        fit.join(TICK_S)


def _fit(trainer: Trainer, errors: list[BaseException]) -> None:
    """Run Train to its end; what it raises is left in `errors`, because it would end with the thread."""
    try:
        trainer.fit()
    except BaseException as error:
        errors.append(error)
