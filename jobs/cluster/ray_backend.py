"""A worker group on a Ray cluster, with the same contract as that of plain processes.

1. Connect: join or start the cluster and wait for the workers' resources (ray_access.py).
2. Place: Ray Train puts one worker on each share of CPUs and GPUs, and tells all of them where rank 0 listens.
3. Run: Train's blocking `fit` has a thread; this thread calls `on_tick` twice a second, which may raise.
4. Clear up: leave the cluster where `on_tick` has raised, and wait until no worker of this host is alive.
5. Return rank 0's value, or raise the error of the worker that failed first.

Train places the workers and sees them die. It restarts nothing and knows no checkpoint, so one call is one attempt.
Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypedDict

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore

from jobs.cluster.failures import group_failure, terminate_workers
from jobs.cluster.ray_access import connect, disconnect, gpus_present
from jobs.cluster.worker_group import (
    ClusterConfig,
    RankInfo,
    Task,
    WorkerFunction,
    WorkerGroupError,
    WorkerRecord,
    meeting_place,
    oom_kills,
    rank_zero_value,
    records,
    serve_store,
    worker_records,
)

__all__ = ["connect", "disconnect", "gpus_present", "run_worker_group"]

TICK_S = 0.5
OOM_ANSWER_S = 20.0  # for a task on another node that reads a counter
EVICTED = "killed by Ray's out-of-memory killer"

_stores: list[TCPStore] = []  # in the process of rank 0: the one that it serves


class WorkerSpec(TypedDict):
    """What Train hands to every worker."""

    function: WorkerFunction
    task: Task
    folder: Path
    cluster: ClusterConfig


def run_worker_group(
    function: WorkerFunction, task: Task, *, cluster: ClusterConfig, folder: Path, on_tick: Callable[[], None]
) -> object:
    """Run `function(task)` in every worker and return rank 0's value; see worker_group.RunWorkerGroup.

    Raises ClusterError as well, where the cluster is missing, refuses us or is too small.
    """
    connect(cluster)
    trainer = _make_trainer({"function": function, "task": task, "folder": folder, "cluster": cluster})
    errors: list[BaseException] = []
    # A thread of its own, because `fit` blocks; a daemon, because the driver may end while Train still waits.
    thread = threading.Thread(target=_fit, args=(trainer, errors), name=f"fit-{folder.name}", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(TICK_S)
            on_tick()
    except BaseException:
        # Train's own abort needs the main thread, which is this one: leaving the cluster kills its workers at once.
        disconnect()
        raise
    finally:
        # Train may return before its workers are gone, and the next attempt wants their GPUs.
        terminate_workers(folder, cluster.workers)
    if errors:
        raise _failure_of(errors[0], folder, cluster.workers)
    return rank_zero_value(folder)


# ------------------------------------------------------------------------ placing the workers


def _make_trainer(spec: WorkerSpec) -> TorchTrainer:
    cluster = spec["cluster"]
    folder = spec["folder"]
    # Train resumes a run whose name it knows, from a snapshot of its own; a torn snapshot makes the name unusable
    # (measured). So every attempt has its own name and storage, and Train always starts anew.
    stage_folder = folder.parents[1]
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
            # Train restarts nothing: it would resume from its own idea of a checkpoint. Without a limit for its
            # controller it waits for nodes for ever.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
        ),
    )


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
        worker_group.execute(_set_meeting_place, address, port)


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


def _set_meeting_place(address: str, port: int) -> None:
    os.environ.update(meeting_place(address, port))


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
    )
    with worker_records(spec["folder"], info) as result:
        result.value = spec["function"](spec["task"])


def _fit(trainer: TorchTrainer, errors: list[BaseException]) -> None:
    """Run Train to its end; what it raises is left in `errors`, because it would end with the thread."""
    try:
        trainer.fit()
    except BaseException as error:
        errors.append(error)


# ------------------------------------------------------------------------ who is to blame


def _failure_of(error: BaseException, folder: Path, world: int) -> WorkerGroupError:
    """Join Train's error and the workers' own records into one that names who failed first."""
    # Train's error about workers has the errors of those that failed, by rank.
    worker_errors: Mapping[int, BaseException] | None = getattr(error, "worker_failures", None)
    if worker_errors is None:
        return _controller_failure(getattr(error, "controller_failure", error))
    written = records(folder, world)
    deaths = {}
    for rank, worker_error in worker_errors.items():
        deaths[rank] = _describe_death(worker_error, written.get(rank))
    return group_failure(folder, world, deaths)


def _controller_failure(error: BaseException) -> WorkerGroupError:
    """Describe the end of Train's controller, for which no single worker is to blame."""
    if isinstance(error, ActorDiedError):
        cause = "Train's controller died (killed, or crashed)"
    elif isinstance(error, OutOfMemoryError):
        # Ray's memory monitor may kill all processes of a worker group, Train's controller included.
        cause = f"{EVICTED}: {str(error).splitlines()[0]}"
    else:
        cause = f"did not start: {type(error).__name__}: {error}"
    return WorkerGroupError(None, "", cause, str(error))


def _describe_death(error: BaseException, record: WorkerRecord | None) -> str:
    """Say how a worker ended that left this record, and of which Train says this."""
    # A lost node takes its worker along: the node is the cause to name.
    if record is not None and record["node"] not in _living_nodes():
        return "its node left the cluster"
    # Ray's own killer, which acts before the kernel's, raises an error that Train wraps.
    ray_error = getattr(error, "health_check_failure", error)
    if isinstance(ray_error, OutOfMemoryError):
        return EVICTED
    # Ray does not tell of which signal a worker died, so the kernel's counter is a hint and no proof.
    if record is not None and _oom_kills_on(record["node"]) > record["oom_kills"]:
        return "its process died, and its node's out-of-memory killer has struck since it started"
    return "its process died (killed, or crashed)"


def _living_nodes() -> dict[str, str]:
    """Return the ids of the cluster's nodes that are alive, by host name."""
    ids = {}
    for node in ray.nodes():
        if node["Alive"]:
            ids[node["NodeManagerHostname"]] = node["NodeID"]
    return ids


def _oom_kills_on(host: str) -> int:
    """Return the counter of out-of-memory kills of a machine; another machine's is read by a task there."""
    if host == socket.gethostname():
        return oom_kills()
    # Not soft: on any other node the task would read the wrong counter.
    on_that_node = NodeAffinitySchedulingStrategy(_living_nodes()[host], soft=False)
    # Without a CPU of its own, because the workers may have taken all CPUs of that node.
    remote_oom_kills: Any = ray.remote(num_cpus=0)(oom_kills)
    try:
        count = remote_oom_kills.options(scheduling_strategy=on_that_node).remote()
        return ray.get(count, timeout=OOM_ANSWER_S)
    except Exception:
        # The node is going as well, or is too busy to answer: then we do not know.
        return 0
