"""A place beside training on this machine: a core, and a GPU, that plain processes leave free."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from jobs.cluster_config import ClusterConfig
from jobs.workers import processes
from jobs.workers.worker_files import SeenRecords
from jobs.workers.worker_group import Task, WorkerFunction
from pipeline.preflight.machine import cores


class SpareCore:
    """A core, and where the workers have GPUs also a GPU, that plain processes of this machine leave free."""

    def __init__(self, cluster: ClusterConfig, busy_cores: int) -> None:
        self.cluster = cluster
        self.busy_cores = busy_cores
        self.gpus_in_use = cluster.world * cluster.gpus_per_worker

    def are_free(self) -> bool:
        """Tell whether this process may use more cores and GPUs than the workers do."""
        if cores() <= self.busy_cores:
            return False
        gpus = self.cluster.gpus_per_worker
        return not gpus or processes.gpus_present() >= self.gpus_in_use + gpus

    def are_wanted(self) -> bool:
        """Tell that nobody waits: other commands of this machine do not know of one another."""
        return False

    def training_has_ended(self) -> None:
        """Take all cores and GPUs for free."""
        self.busy_cores = 0
        self.gpus_in_use = 0

    def run(self, function: WorkerFunction, task: Task, folder: Path, on_tick: Callable[[], None]) -> object:
        """Run the function in a process of a worker group of one."""
        environment = dict(self.cluster.environment)
        if self.cluster.gpus_per_worker:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[self.gpus_in_use :])
        cluster = dataclasses.replace(self.cluster, workers=1, environment=environment)
        return processes.run_worker_group(function, task, cluster=cluster, seen=SeenRecords(folder), on_tick=on_tick)


def visible_gpus() -> list[str]:
    """Return what CUDA calls the GPUs that this process sees, in their order."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return names.split(",")
    return [str(number) for number in range(processes.gpus_present())]
