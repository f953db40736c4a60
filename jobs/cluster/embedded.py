"""An embedded Ray cluster's processes, as the driver sees them: they start beside its imports, and end with it.

1. `start` makes the cluster's directory and starts the reaper (reaper.py), which starts the head (ray_head.py), which
   starts Ray's processes: this takes seconds, and the caller does not wait.
2. `address` waits until the cluster can be joined.
3. `end` has the reaper end all of it, and waits; `let_go` does not. The reaper ends it too where this process dies.

Ray is not imported here, so that the driver can start its processes before anything else (jobs/run/early_start.py).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.errors import ClusterError
from jobs.cluster import reaper
from jobs.cluster_config import ClusterConfig

ROOT = Path(__file__).parents[2]
SOCKET_PATH_BYTES = 107  # of an AF_UNIX address
RAY_SOCKET_BYTES = 75  # Ray appends up to so many to its temporary directory
DIRECTORY_PREFIX = "pl-ray-"
INNER_DIRECTORY = "r"
DIRECTORY_NAME_BYTES = 18  # "/", the prefix, what mkdtemp appends, "/" and the inner directory

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # else relative paths change their meaning in a worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without GPUs hides them itself
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # prints everything twice
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # its notices reach the stop file by the driver
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # /api/train/v2/runs/v1
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a death is seen at this poll; 2 s by default
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
}
EMBEDDED_ENVIRONMENT = {
    "RAY_agent_register_timeout_ms": "240000",  # on a busy small machine the raylet aborts after 30 s
    "RAY_worker_register_timeout_seconds": "240",
    # Ray would start a process for each CPU at once, and Train's actors, which have variables of their own, use none.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Embedded:
    """A cluster that was started here, whether or not it can be joined yet."""

    reaper: subprocess.Popen[str]
    directory: Path  # ours
    cpus: int  # that it counts

    @property
    def ray_directory(self) -> Path:
        """Return Ray's own, which it opens to everybody (0777); nobody gets through ours (0700), which is around it."""
        return self.directory / INNER_DIRECTORY


_started: list[Embedded] = []  # one, while there is one


def start_early(cluster: ClusterConfig) -> None:
    """Start a cluster where workers will want an embedded one; one that is joined is not touched before it is time."""
    if is_wanted() and not is_started():
        # What fails now fails again when the cluster is needed, and is said then.
        with suppress(OSError):
            start(cluster)


def is_wanted() -> bool:
    """Tell whether the environment names no cluster to join."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def is_started() -> bool:
    """Tell whether there is an embedded cluster of this process."""
    return bool(_started)


def start(cluster: ClusterConfig) -> None:
    """Start a cluster that counts enough CPUs for these workers, instead of one that counts too few."""
    needed = cluster.least * cluster.cpus_per_worker
    if _started and _started[0].cpus >= needed:
        return
    end()
    # Ray's processes inherit the variables.
    set_defaults(ENVIRONMENT)
    set_defaults(EMBEDDED_ENVIRONMENT)
    # The raylet hands its environment on: workers and jobs import the packages from here, with this Python.
    _put_first("PYTHONPATH", ROOT)
    _put_first("PATH", Path(sys.executable).parent)
    directory = Path(short_directory())
    # Workers that compute with few threads share the cores; Ray only counts.
    cpus = max(os.cpu_count() or 1, needed)
    # Before the cluster, so that nothing of it is left behind wherever this process is killed from here on.
    try:
        reaping = reaper.start(directory, INNER_DIRECTORY, cpus)
    except OSError:
        directory.rmdir()
        raise
    _started.append(Embedded(reaping, directory, cpus))


def address() -> str:
    """Wait until the cluster that was started can be joined; return its host:port. Raises ClusterError."""
    embedded = _started[0]
    assert embedded.reaper.stdout is not None
    word, _, text = embedded.reaper.stdout.readline().strip().partition(" ")
    if word != "ready":
        raise did_not_start(text or "its processes have ended")
    return text


def did_not_start(reason: str) -> ClusterError:
    """Return the error of a cluster that cannot be used, with what to type; what has come up of it is to be ended."""
    return ClusterError(
        f"an embedded Ray cluster did not start: {reason}\n"
        f"it needs 1 GB of memory, free ports on the loopback and room in {_started[0].directory.parent}\n"
        f"type cluster.backend=processes to do without, or RAY_ADDRESS=host:port of a running one"
    )


def ray_directory() -> Path:
    """Return the temporary directory of the cluster that was started."""
    return _started[0].ray_directory


def cpus() -> int:
    """Return how many CPUs the cluster counts that was started."""
    return _started[0].cpus


def end() -> None:
    """End the cluster, if there is one, with every process and its temporary directory."""
    # `communicate` closes the reaper's standard input, which sets it off, and waits until it has cleared up.
    while _started:
        _started.pop().reaper.communicate()


def let_go() -> None:
    """End the cluster, if there is one, but do not wait: for a command that has no use for it."""
    while _started:
        given_up = _started.pop().reaper
        for pipe in (given_up.stdin, given_up.stdout):
            assert pipe is not None
            pipe.close()


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _put_first(name: str, path: Path) -> None:
    """Put a folder before the others of a variable like PATH."""
    others = os.environ.get(name)
    if not others:
        os.environ[name] = str(path)
    elif str(path) != others.split(os.pathsep)[0]:
        os.environ[name] = f"{path}{os.pathsep}{others}"


def short_directory() -> str:
    """Make a temporary directory whose path leaves room for the names of Ray's sockets."""
    longest = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - DIRECTORY_NAME_BYTES
    chosen = "/tmp"
    # The user's own choice comes first, unless Ray would refuse it: "AF_UNIX path length cannot exceed 107 bytes".
    for parent in (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()):
        if len(parent) <= longest and os.access(parent, os.W_OK):
            chosen = parent
            break
    return tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=chosen)
