"""A worker group on a Ray cluster, with the same contract as that of plain processes.

1. Connect: join or start the cluster (ray_access.py), and reserve a place for every worker (placement.py).
2. Place: Ray Train puts one worker on each place, and tells all of them where rank 0 listens.
3. Run: Train's blocking `fit` has a thread; this thread calls `on_tick` twice a second, which may raise. A third asks
   Ray once a second which nodes are being drained, and leaves a notice where workers are on one.
4. Clear up: leave the cluster where `on_tick` has raised, and wait until no worker of this host is alive.
5. Return rank 0's value, or raise the error of the worker that failed first.

Train places the workers and sees them die. It restarts nothing and knows no checkpoint, so one call is one attempt.
Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypedDict

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import worker_group as train_worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.util.placement_group import PlacementGroup
from torch.distributed import TCPStore

from jobs.cluster import notices, placement
from jobs.cluster.failures import terminate_workers
from jobs.cluster.node_copies import NodeCopies
from jobs.cluster.ray_access import connect, disconnect, gpus_present
from jobs.cluster.ray_failures import failure_of
from jobs.cluster.worker_group import (
    ClusterConfig,
    RankInfo,
    Task,
    WorkerFunction,
    do_nothing,
    meeting_place,
    rank_zero_value,
    serve_store,
    worker_records,
)

__all__ = ["connect", "disconnect", "gpus_present", "leave_node", "reserve_places", "run_worker_group"]

TICK_S = 0.5

_stores: list[TCPStore] = []  # in the process of rank 0: the one that it serves


class WorkerSpec(TypedDict):
    """What Train hands to every worker."""

    function: WorkerFunction
    task: Task
    folder: Path
    cluster: ClusterConfig


def run_worker_group(
    function: WorkerFunction,
    task: Task,
    *,
    cluster: ClusterConfig,
    folder: Path,
    on_tick: Callable[[], None],
    is_shared: bool = True,
) -> object:
    """Run `function(task)` in every worker and return rank 0's value; see worker_group.RunWorkerGroup.

    Raises ClusterError as well, where the cluster is missing, refuses us or is too small.
    """
    # The supervisor has reserved the places already, and waited for them.
    places = reserve_places(cluster, str(folder), on_tick=on_tick)
    trainer = _make_trainer({"function": function, "task": task, "folder": folder, "cluster": cluster}, places)
    errors: list[BaseException] = []
    has_ended = threading.Event()
    copies = NodeCopies(folder)
    if not is_shared:
        copies.begin(places, cluster.start_timeout_s, on_tick)
    # Threads of their own, because `fit` blocks, and so may a question to a head that is away; daemons, because the
    # driver may end while they wait.
    fit = threading.Thread(target=_fit, args=(trainer, errors), name=f"fit-{folder.name}", daemon=True)
    own_node = ray.get_runtime_context().get_node_id()
    watched = (folder, cluster.workers, own_node, placement.draining_nodes, has_ended)
    watch = threading.Thread(target=notices.watch_nodes, args=watched, daemon=True)
    fit.start()
    watch.start()
    try:
        while fit.is_alive():
            fit.join(TICK_S)
            copies.look()
            on_tick()
        copies.last_look()
        copies.end()
    except BaseException:
        # Train's own abort needs the main thread, which is this one: leaving the cluster kills its workers at once.
        has_ended.set()
        disconnect()
        raise
    finally:
        has_ended.set()
        # Train may return before its workers are gone, and the next attempt wants their GPUs.
        terminate_workers(folder, cluster.workers)
    if errors:
        raise failure_of(errors[0], folder, cluster.workers)
    return rank_zero_value(folder)


def reserve_places(
    cluster: ClusterConfig,
    run: str,
    say: Callable[[str], None] = print,
    on_tick: Callable[[], None] = do_nothing,
) -> PlacementGroup:
    """Connect, and return a place for every worker when there is room for all; see placement.reserve."""
    info = connect(cluster)
    return placement.reserve(cluster, run, info.embedded, say, on_tick)


def leave_node(node_id: str) -> None:
    """Have the next attempt placed without a node that has given notice."""
    placement.avoid(node_id)


# ------------------------------------------------------------------------ placing the workers


def _make_trainer(spec: WorkerSpec, places: PlacementGroup) -> TorchTrainer:
    cluster = spec["cluster"]
    folder = spec["folder"]
    # Train resumes a run whose name it knows, from a snapshot of its own; a torn snapshot makes the name unusable
    # (measured). So every attempt has its own name and storage, and Train always starts anew.
    stage_folder = folder.parents[1]
    # Set before a worker imports anything, because some libraries read their variables then. Where there are none, the
    # workers may be processes that Ray has started already.
    runtime_env = None
    if cluster.environment:
        runtime_env = {"env_vars": cluster.environment}
    return TorchTrainer(
        _worker,
        train_loop_config=spec,
        torch_config=_RendezvousConfig(),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers,
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
            worker_runtime_env=runtime_env,
            callbacks=[_UseReserved(places)],
        ),
    )


class _UseReserved(WorkerGroupCallback):
    """Has Train place its workers where we have reserved, and not ask for places of its own.

    Between our giving back and Train's asking another campaign would slip in; and while Train waits it says nothing.
    """

    def __init__(self, places: PlacementGroup) -> None:
        self.places = places

    def before_worker_group_start(self, worker_group_context: object) -> None:
        # In the process of Train's controller, which runs this one worker group. Train has no setting for it.
        train_worker_group.placement_group = self.placement_group
        train_worker_group.DefaultPlacementGroupHandle = _KeptPlaces

    def placement_group(self, **options: object) -> PlacementGroup:
        """Take the place of what would ask Ray for places."""
        return self.places


class _KeptPlaces(DefaultPlacementGroupHandle):
    """Leaves the places reserved when Train's worker group ends: the next attempt wants them."""

    def shutdown(self) -> None:
        """Do nothing, where Train would give the places back."""


class _TrainWorkers(Protocol):
    """What Train's worker group offers a backend, as far as it is used here."""

    def execute(self, function: Callable[[str, int], None], address: str, port: int) -> object:
        """Call the function in every worker."""

    def execute_single(self, rank: int, function: Callable[[], tuple[str, int]]) -> tuple[str, int]:
        """Call the function in one worker."""


class _Rendezvous(Backend):
    """Tells the workers where rank 0 is, and leaves the process group to them."""

    # Every worker of a node sees the GPUs of all of them, so that LOCAL_RANK is the device's number.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: _TrainWorkers, backend_config: object) -> None:
        # Train's own backend would form the process group here, and when that fails its error names no worker. Ours is
        # formed by the workers' function, whose error has a rank.
        address, port = worker_group.execute_single(0, _serve_store)
        worker_group.execute(_prepare_process, address, port)


class _RendezvousConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Rendezvous


def _serve_store() -> tuple[str, int]:
    """Serve the store where the workers meet, at the address of this worker's node; return address and port."""
    address = ray.util.get_node_ip_address()
    store = serve_store(address)
    # It listens as long as the process that holds it lives, which Train ends with the attempt.
    _stores.append(store)
    return address, store.port


def _prepare_process(address: str, port: int) -> None:
    """Tell a worker's process where the workers meet, and to take SIGTERM for a notice."""
    os.environ.update(meeting_place(address, port))
    notices.take_sigterm()


def _worker(spec: WorkerSpec) -> None:
    """Be one worker, in a process that Ray has started; under Ray this is not its main thread."""
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
    threading.Thread(target=notices.pass_on, args=(spec["folder"], info), daemon=True).start()
    # Where the nodes share no storage, Ray may have moved this worker to a node that nobody has prepared.
    spec["folder"].mkdir(parents=True, exist_ok=True)
    with worker_records(spec["folder"], info) as result:
        result.value = spec["function"](spec["task"])


def _fit(trainer: TorchTrainer, errors: list[BaseException]) -> None:
    """Run Train to its end; what it raises is left in `errors`, because it would end with the thread."""
    try:
        trainer.fit()
    except BaseException as error:
        errors.append(error)
