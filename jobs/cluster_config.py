"""The section `cluster:` of a recipe: how many workers, with what, and which environment variables they are given.

    cluster: {workers: {least: 4, most: 16}, gpus_per_worker: 1, environment: {NCCL_SOCKET_IFNAME: eth1}}
    python -m jobs submit RECIPE --env NCCL_DEBUG=INFO

Ray shows the environment of a job to everybody who lists the jobs, and a recipe is kept in many places: secrets belong
to the nodes. Patchline alone sets the variables that tell a worker its place in the group, and those that glibc's
malloc reads when a process starts.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from data.checks import at_least, more_than_0
from data.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# KEY and TOKEN as words: TOKENIZERS_PARALLELISM is none.
SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API|ACCESS|AUTH)?(KEY|TOKEN)S?(_|$)", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # an access key of AWS
    r"|\b(ghp|gho|ghs|github_pat|glpat|hf|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}"  # GitHub, GitLab, Hugging Face, …
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ"  # a JSON web token
    r"|://[^/\s:@]*:[^/\s@]+@"  # a password in an address
)
# Set for every worker by its rank (worker_group.RankInfo), so that a value for all of them would break the group.
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
MALLOC_VARIABLE = "GLIBC_TUNABLES"  # what glibc's malloc reads when a process starts (jobs/cluster/fork_server.py)


@dataclass(frozen=True)
class WorkerRange:
    """How many workers would do: every attempt takes the largest number that its stage allows and that has room."""

    least: int = 1  # with fewer the stage waits
    most: int = "???"  # type: ignore[assignment]  # no attempt has more


@dataclass(frozen=True)
class ClusterConfig:
    # processes that train together, each a rank; a number, or from `least` to `most` as there is room
    workers: int | WorkerRange = 1
    backend: Literal["ray", "processes"] = "ray"  # Ray, embedded or joined; or plain processes of this machine
    cpus_per_worker: int = 1  # reserved in Ray, and the threads a worker computes with
    gpus_per_worker: int = 0  # reserved in Ray; 0: workers compute on the CPU
    gpu_memory_gb: float | None = None  # that a worker may fill of its GPU: what needs more is refused; None: unknown
    max_restarts: int = 3  # attempts in a row that may end without a new checkpoint
    backoff_s: float = 10.0  # before the first restart; doubles with each
    start_timeout_s: float = 300.0  # how long the workers may take to start
    wait_s: float | None = None  # how long to wait for the workers' places; None: for ever
    patience_s: float = 60.0  # where `workers` is a range, how long to wait for more than there is room for
    environment: dict[str, str] = field(default_factory=dict)  # of every worker, by name; no secrets
    scratch: str = ""  # local folder of each node for a run at s3://…; empty: in PATCHLINE_CACHE, or the user's cache

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
        """Return how few workers would do."""
        return self.workers.least if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def most(self) -> int:
        """Return how many workers an attempt has at most."""
        return self.workers.most if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def worlds(self) -> range:
        """Return the numbers of workers that an attempt may have, the largest first."""
        return range(self.most, self.least - 1, -1)

    @property
    def world(self) -> int:
        """Return the workers of an attempt, for whose time the supervisor has put their number in a range's place."""
        assert isinstance(self.workers, int), self.workers
        return self.workers


def check_environment(environment: Mapping[str, str], place: str = "") -> None:
    """Raise ConfigError where a variable may not be given to workers; `place` stands before its name in the message."""
    for name, value in environment.items():
        problem = ""
        if not NAME.fullmatch(name):
            problem = f"{name!r} is no name of a variable\n  expected letters, digits and _, for example NCCL_DEBUG"
        elif name in OURS:
            problem = f"{name} is set for every worker by its rank\n  leave it out"
        elif name == MALLOC_VARIABLE:
            problem = f"{name} is set for workers on CPUs by Patchline\n  leave it out; on GPUs that of the node holds"
        elif SECRET_NAME.search(name) or SECRET_VALUE.search(value):
            reason = "its value" if SECRET_VALUE.search(value) else "its name"
            # The value is not repeated: this message is printed and kept.
            problem = (
                f"{name} looks like a secret by {reason}: it would be shown in clear to whoever lists the jobs\n"
                "  secrets belong to the nodes: their environment, instance role or mounted files\n"
                "  leave it out here; workers have the environment of their node"
            )
        if problem:
            raise ConfigError(f"{place}{problem}")


def cores() -> int:
    """Return how many cores of this machine the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
