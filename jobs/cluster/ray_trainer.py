"""Ray Train's trainer as it is used here: on places that are reserved already, with a rendezvous of our own.

1. In the driver, `Trainer.fit` starts Train's controller and waits for it.
2. In the controller, places are not asked for, and no actor is started that this needs none of (`Trainer`).
3. The workers start on our places, without an actor to wait at (`UseReserved`); rank 0 serves the store in which they
   meet, and all are told where (`RendezvousConfig`).

The controller imports this module and what it imports. So that it starts soon, none of it imports torch: the function
of the workers reaches it as bytes that the workers alone unpack.

Facts about Ray that this rests on were measured with 2.60; tests/test_jobs_cluster.py looks which actors there are.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import state as train_worker_group_state
from ray.train.v2._internal.execution.worker_group import worker_group as train_worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup

from jobs.workers import notices
from jobs.workers.worker_group import meeting_place, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# What starts an actor of which this has no use. One hands out Ray's datasets. The other asks the dashboard every second
# whether the controller is alive, and gives its places back if not: a busy dashboard answered that it knew no such
# controller, and a run that trained lost its places (measured). Ray takes them back when our driver ends.
NOT_NEEDED = (DatasetsCallback, PlacementGroupCleanerCallback)

_stores: list["TCPStore"] = []  # in the process of rank 0: the one that it serves


class Trainer(DataParallelTrainer):
    """Runs a function on workers whose places are reserved; of Train's own actors it starts those that this needs.

    Without the others an attempt takes 5 CPU-seconds less (benchmarks/README.md), on two cores as much as the workers'
    own imports.
    """

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        options["scaling_policy"] = _NoRequests(self.scaling_config)
        needed = [callback for callback in options["callbacks"] if not isinstance(callback, NOT_NEEDED)]
        options["callbacks"] = needed
        return super()._initialize_and_run_controller(**options)


class _NoRequests(FixedScalingPolicy):
    """Does not tell Ray's autoscaler what the workers need: it knows that from the places that are reserved.

    Train would wait for an answer, from an actor that has yet to start, before it starts the workers.
    """

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Do nothing, where the first request would be sent."""

    def _maybe_send_resource_request(self) -> None:
        """Do nothing, where a request would be sent again."""


class UseReserved(WorkerGroupCallback):
    """Has Train place its workers where we have reserved, and not ask for places or start an actor of its own.

    Between our giving back and Train's asking another campaign would slip in; and while Train waits it says nothing.
    """

    def __init__(self, places: PlacementGroup) -> None:
        self.places = places

    def before_worker_group_start(self, worker_group_context: object) -> None:
        # In the process of Train's controller, which runs this one worker group. Train has no setting for it.
        train_worker_group.placement_group = self.placement_group
        train_worker_group.DefaultPlacementGroupHandle = _KeptPlaces
        train_worker_group.SynchronizationActor = _NoBarrier
        train_worker_group_state._shutdown_sync_actor = _end_no_barrier

    def placement_group(self, **options: object) -> PlacementGroup:
        """Take the place of what would ask Ray for places."""
        return self.places


class _KeptPlaces(DefaultPlacementGroupHandle):
    """Leaves the places reserved when Train's worker group ends: the next attempt wants them."""

    def shutdown(self) -> None:
        """Do nothing, where Train would give the places back."""


class _NoBarrier:
    """Takes the place of the actor at which workers wait for one another when they report to Train: ours never do.

    The actor would take 1.4 CPU-seconds an attempt, beside the workers' imports.
    """

    @classmethod
    def options(cls, **options: object) -> "type[_NoBarrier]":
        """Return what `remote` is asked of."""
        return cls

    @classmethod
    def remote(cls, **options: object) -> "_NoBarrier":
        """Return what Train hands to the workers instead of the actor."""
        return cls()


def _end_no_barrier(barrier: _NoBarrier) -> None:
    """Do nothing, where Train would kill the actor."""


class _TrainWorkers(Protocol):
    """What Train's worker group offers a backend, as far as it is used here."""

    def execute(self, function: Callable[..., None], *arguments: object) -> object:
        """Call the function in every worker."""

    def execute_single(self, rank: int, function: Callable[[], tuple[str, int]]) -> tuple[str, int]:
        """Call the function in one worker."""


class _Rendezvous(Backend):
    """Tells the workers where rank 0 is, and leaves the process group to them."""

    # Every worker of a node sees the GPUs of all of them, so that LOCAL_RANK is the device's number.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: _TrainWorkers, backend_config: object) -> None:
        # In all workers at the same time: rank 0 needs it for the store, for which the others wait.
        worker_group.execute(_import_torch)
        # Train's own backend would form the process group here, and when that fails its error names no worker. Ours is
        # formed by the workers' function, whose error has a rank.
        address, port = worker_group.execute_single(0, _serve_store)
        worker_group.execute(_prepare_process, address, port)


class RendezvousConfig(BackendConfig):
    """Has Train use our rendezvous.

    It names no framework: of a named one Train fetches the version from a worker, and torch's is an object that can be
    unpacked only where torch is imported, 1.4 CPU-seconds in the controller and as many in the actor of Train's page.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        return _Rendezvous


def _import_torch() -> None:
    """Load torch into a worker's process; where that raises, the worker's function raises it too, with a rank."""
    with suppress(Exception):
        import torch  # noqa: F401


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
