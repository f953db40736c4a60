"""A place beside training on a Ray cluster: free resources of the size of a worker, borrowed for one evaluation.

1. Free means: on a node that stays, with nobody in the queue, and no placement group of anybody's that waits.
2. The place is borrowed as a placement group of its own, and what works there is one actor, in a process of its own.
3. While it works, somebody may come to want the place; also this run, for a larger worker group. Then the actor is
   killed and the place given back.

When training has ended its places are kept for the next stage; until then an evaluation may have one of them. Where a
campaign that comes first wants them, all are given back, and the evaluation goes on with a borrowed one.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jobs.beside.places import NoPlace
from jobs.cluster.ray_backend import must_make_way
from jobs.cluster_config import ClusterConfig
from jobs.scheduling import placement, queue, room
from jobs.workers.failures import group_failure
from jobs.workers.worker_group import RankInfo, Task, WorkerFunction, WorkerGroupError, require_folder, worker_records

TICK_S = 0.5
LOOK_S = 1.0  # between two questions whether somebody wants the place
DIED = "its process died (killed, or crashed), or its node was lost"


class RayPlaces:
    """Free places of the cluster in which the worker group trains."""

    def __init__(self, cluster: ClusterConfig, run: str) -> None:
        self.cluster = cluster
        self.run_name = run
        self.share = room.share_of_worker(cluster)
        self.has_training_ended = False
        self.is_borrowed = False  # the place that is used
        self.next_look = 0.0

    def are_free(self) -> bool:
        """Tell whether there is a place that nobody wants."""
        if self.has_training_ended and placement.held(self.cluster) is not None:
            if not must_make_way():
                return True
            # Nobody who comes first waits for an evaluation: the rest is judged where others leave room.
            queue.leave()
        return not queue.is_anybody_waiting() and placement.is_room_to_borrow(self.share)

    def are_wanted(self) -> bool:
        """Tell whether somebody waits for the place that is used; asked of Ray once a second."""
        if time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + LOOK_S
        # What training has left is kept for the next stage anyway, unless this campaign is to make way.
        if not self.is_borrowed:
            return must_make_way()
        return queue.is_anybody_waiting() or placement.is_anything_asked_for()

    def training_has_ended(self) -> None:
        """Hear that the worker group's own places are free from now on."""
        self.has_training_ended = True

    def run(self, function: WorkerFunction, task: Task, folder: Path, on_tick: Callable[[], None]) -> object:
        """Run the function in an actor on a borrowed place, or on one that training has left."""
        group = None
        if self.has_training_ended:
            group = placement.held(self.cluster)
        self.is_borrowed = group is None
        if group is None:
            group = placement.borrow(self.share, self.run_name)
        if group is None:
            raise NoPlace("what seemed to be free was not")
        try:
            return self.run_in(group, function, task, folder, on_tick)
        finally:
            placement.give_back()

    def run_in(
        self,
        group: PlacementGroup,
        function: WorkerFunction,
        task: Task,
        folder: Path,
        on_tick: Callable[[], None],
    ) -> object:
        """Run the function in an actor on a bundle of a placement group."""
        runtime_env = {"env_vars": self.cluster.environment} if self.cluster.environment else None
        there = PlacementGroupSchedulingStrategy(group)
        # A class that is made remote here: its process is told nothing about this one.
        actor: Any = ray.remote(Evaluator).options(
            num_cpus=self.cluster.cpus_per_worker,
            num_gpus=self.cluster.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy=there,
            runtime_env=runtime_env,
        )
        evaluator = actor.remote()
        answer = evaluator.work.remote(function, task, folder, self.cluster)
        try:
            # What is ready is taken, whoever wants the place.
            while not ray.wait([answer], timeout=TICK_S)[0]:
                on_tick()
            return ray.get(answer)
        except RayError as error:
            raise failure_of(error, folder) from None
        finally:
            # Where this process has left the cluster meanwhile, the actor is gone.
            with suppress(Exception):
                ray.kill(evaluator)


class Evaluator:
    """Runs one function in a process of its own; an actor, because a task's process would be used again by others."""

    def work(self, function: WorkerFunction, task: Task, folder: Path, cluster: ClusterConfig) -> object:
        """Return what the function returns, and leave a worker's record and log in the folder."""
        require_folder(folder)
        info = RankInfo(
            rank=0,
            world=1,
            local_rank=0,
            local_world=1,
            node_rank=0,
            address=ray.util.get_node_ip_address(),
            threads=cluster.cpus_per_worker,
            gpus=cluster.gpus_per_worker,
            node_id=ray.get_runtime_context().get_node_id(),
        )
        with worker_records(folder, info) as result:
            result.value = function(task)
        return result.value


def failure_of(error: RayError, folder: Path) -> WorkerGroupError:
    """Return why the actor has failed, by its own record where it left one."""
    failure = group_failure(folder, 1, {0: DIED})
    if failure.rank is None or not failure.cause:
        failure.cause = str(error).strip().splitlines()[0]
    return failure
