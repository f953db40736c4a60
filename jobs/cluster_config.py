"""The `cluster:` section of a recipe: the number of workers, their resources and environment variables.

    cluster: {workers: {least: 4, most: 16}, gpus_per_worker: 1, environment: {NCCL_SOCKET_IFNAME: eth1}}
    python -m jobs submit RECIPE --env NCCL_DEBUG=INFO

Secrets belong in the environment of the nodes: Ray shows a job's environment to everybody who can list jobs, and
recipes are stored in many places. Patchline itself sets the variables for a worker's rank and for glibc's malloc.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from data.checks import SECRET_NAME, SECRET_VALUE, at_least, more_than_0
from data.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Each worker gets its own values (worker.RankInfo); a common value would break the group.
RESERVED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorkerRange:
    """A range of worker counts: each attempt uses as many workers as the stage allows and the cluster has room for."""

    least: int = 1  # minimum number of workers; with less room the stage waits
    most: int = "???"  # type: ignore[assignment]  # maximum number of workers


@dataclass(frozen=True)
class ClusterConfig:
    # processes that train together, one per rank; a number, or a range from `least` to `most`
    workers: int | WorkerRange = 1
    backend: Literal["ray", "processes"] = "ray"  # Ray (embedded or existing cluster), or processes on this machine
    cpus_per_worker: int = 1  # CPUs that Ray reserves, and threads that a worker uses
    gpus_per_worker: int = 0  # GPUs that Ray reserves; 0: workers use the CPU
    gpu_memory_gb: float | None = None  # GPU memory per worker; configs that need more are refused; None: unknown
    max_restarts: int = 3  # maximum number of failed attempts in a row without a new checkpoint
    backoff_s: float = 10.0  # wait before the first restart; doubles with each restart
    start_timeout_s: float = 300.0  # maximum time for the workers to start
    wait_s: float | None = None  # maximum time to wait for slots in the cluster; None: no limit
    patience_s: float = 60.0  # if `workers` is a range: time to wait for more workers than there is room for
    environment: dict[str, str] = field(default_factory=dict)  # variables for every worker, by name; no secrets
    scratch: str = ""  # local folder on each node for runs at s3://…; empty: in PATCHLINE_CACHE or the user's cache

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(
        [
            "workers",
            "backend",
            "cpus_per_worker",
            "gpus_per_worker",
            "gpu_memory_gb",
            "max_restarts",
            "backoff_s",
            "start_timeout_s",
            "wait_s",
            "patience_s",
            "environment",
            "scratch",
        ],
        "free",
    )

    def __post_init__(self) -> None:
        if isinstance(self.workers, WorkerRange):
            at_least(self.workers, 1, "least", "workers.")
            at_least(self.workers, self.workers.least, "most", "workers.")
        else:
            at_least(self, 1, "workers")
        at_least(self, 1, "cpus_per_worker")
        at_least(self, 0, "gpus_per_worker max_restarts backoff_s patience_s")
        more_than_0(self, "gpu_memory_gb start_timeout_s wait_s")
        check_environment(self.environment, "environment: ")

    @property
    def least(self) -> int:
        """Return the minimum number of workers."""
        return self.workers.least if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def most(self) -> int:
        """Return the maximum number of workers."""
        return self.workers.most if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def worlds(self) -> range:
        """Return the allowed numbers of workers, largest first."""
        return range(self.most, self.least - 1, -1)

    @property
    def world(self) -> int:
        """Return an attempt's number of workers; call this after the supervisor has replaced a range with a number."""
        assert isinstance(self.workers, int), self.workers
        return self.workers


def check_environment(environment: Mapping[str, str], place: str = "") -> None:
    """Raise ConfigError for worker variables that a recipe must not set; in messages, `place` precedes the name."""
    for name, value in environment.items():
        problem = ""
        if not NAME.fullmatch(name):
            problem = f"{name!r} is not a variable name\n  expected letters, digits and _, for example NCCL_DEBUG"
        elif name in RESERVED_VARIABLES:
            problem = f"{name} must not be set here: every worker gets its own value\n  remove it"
        elif name == "GLIBC_TUNABLES":  # read by glibc's malloc (jobs/cluster/fork_server.py)
            problem = (
                f"{name} must not be set here: Patchline sets it for workers on CPUs\n"
                "  remove it; for workers on GPUs, set it in the environment of the nodes"
            )
        elif SECRET_NAME.search(name) or SECRET_VALUE.search(value):
            reason = "its value" if SECRET_VALUE.search(value) else "its name"
            # Do not show the value: this message is printed and stored.
            problem = (
                f"{name} looks like a secret (by {reason}), and everybody who can list jobs would see it\n"
                "  secrets belong on the nodes: in their environment, instance role or mounted files\n"
                "  remove it here; workers inherit the environment of their node"
            )
        if problem:
            raise ConfigError(f"{place}{problem}")


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
