"""How this process gets into a Ray cluster: the one at RAY_ADDRESS, or an embedded one that dies with this process.

`connect`, in order:
1. an embedded cluster that counts too few CPUs for this worker group is ended;
2. without a connection: join the cluster at RAY_ADDRESS, or, where that is not set, start an embedded one,
   with a token that only this user can read;
3. an embedded cluster that will never have room for the workers is refused now, and not when they are needed.

It does not wait for room: jobs/cluster/placement.py does, when a stage needs its workers.

>>> connect(ClusterConfig(workers=2))
ClusterInfo(address="127.0.0.1:6379", dashboard="http://127.0.0.1:8265", nodes=1, cpus=2.0, gpus=0.0, embedded=True)

Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.parameter import RayParams

from data.errors import ClusterError
from jobs.cluster import reaper
from jobs.cluster.ray_refusals import explain, require_reachable
from jobs.cluster.ray_token import ensure_token, use_token_if_any
from jobs.scheduling import placement, room
from jobs.workers.worker_group import LOOPBACK, ClusterConfig

ROOT = Path(__file__).parents[2]
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards"]  # never shipped; nor what .gitignore names
NAMESPACE = "patchline"

OBJECT_STORE_BYTES = 200 * 2**20  # Train stores next to nothing; the default is 30 % of the memory
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

_reapers: list[subprocess.Popen[bytes]] = []  # the embedded cluster's, while there is one


@dataclass(frozen=True)
class ClusterInfo:
    address: str
    dashboard: str  # "" without one
    nodes: int
    cpus: float
    gpus: float
    embedded: bool


# ------------------------------------------------------------------------ in and out


def connect(cluster: ClusterConfig) -> ClusterInfo:
    """Join the cluster at RAY_ADDRESS, or start one inside this process that dies with it.

    Call it from the main thread: an embedded cluster dies with the thread that started it. Raises ClusterError when
    there is no such cluster, it refuses us, or it is embedded and too small.
    """
    # An embedded cluster was told how many CPUs to count, perhaps for a smaller worker group than this one.
    if _reapers and ray.cluster_resources().get("CPU", 0) < cluster.least * cluster.cpus_per_worker:
        disconnect()
    if not ray.is_initialized():
        # Before ray.init, because the processes that it starts inherit them.
        _set_defaults(ENVIRONMENT)
        address = os.environ.get("RAY_ADDRESS", "")
        with _our_sigterm_handler():
            if address in ("", "local"):
                _start_embedded(cluster)
            else:
                _join(address)
    info = _cluster_info()
    room.refuse_what_never_fits(cluster, info.embedded)
    return info


def disconnect() -> None:
    """Leave the cluster; an embedded one ends, with every process and its temporary directory."""
    with _our_sigterm_handler():
        ray.shutdown()
    placement.forget()
    # `communicate` closes the reaper's standard input, which sets it off, and waits until it has cleared up.
    while _reapers:
        _reapers.pop().communicate()


def _start_embedded(cluster: ClusterConfig) -> None:
    _set_defaults(EMBEDDED_ENVIRONMENT)
    # The raylet hands its environment on: workers and jobs import the packages from here, with this Python.
    _put_first("PYTHONPATH", ROOT)
    _put_first("PATH", Path(sys.executable).parent)
    ensure_token()
    directory = _short_directory()
    # Ray opens its directory to everybody (0777), but nobody gets through ours (0700), which is around it.
    ray_directory = Path(directory) / INNER_DIRECTORY
    # Before the cluster, so that nothing of it is left behind wherever this process is killed.
    _reapers.append(reaper.start(directory))
    # Ray prints a paragraph of guesses about a dead worker; WorkerGroupError says it in a line.
    ray._private.worker.print_to_stdstream = _print_nothing
    try:
        with _loopback_only(), _our_parameters():
            ray.init(
                address="local",
                # Workers that compute with few threads share the cores; Ray only counts.
                num_cpus=max(os.cpu_count() or 1, cluster.least * cluster.cpus_per_worker),
                object_store_memory=OBJECT_STORE_BYTES,
                # Without it Train's run is not on the REST API, and Train warns once a second that it cannot ask for
                # it. Leaving it out saved no time that could be measured.
                include_dashboard=True,
                dashboard_host=LOOPBACK,
                log_to_driver=False,
                logging_level="warning",
                namespace=NAMESPACE,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(ray_directory),
            )
    except Exception as error:
        # The reaper runs already: let it clear away what has come up of the cluster.
        disconnect()
        reason = str(error).strip().splitlines()[0]
        raise ClusterError(
            f"an embedded Ray cluster did not start: {reason}\n"
            f"it needs 1 GB of memory, free ports on the loopback and room in {Path(directory).parent}\n"
            f"type cluster.backend=processes to do without, or RAY_ADDRESS=host:port of a running one"
        ) from error


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let the cluster that the block starts, and all its processes, listen on 127.0.0.1 alone.

    Elsewhere than on macOS, Ray replaces 127.0.0.1 by an outside address, and then most of its ports listen on all
    interfaces. This switch has it do as on macOS. It is off again after the block, for a cluster that we join.
    """
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    variable_before = os.environ.get(name)
    constant_before = ray_constants.ENABLE_RAY_CLUSTER
    # The variable is for the processes that Ray starts; this one has read it when it imported Ray.
    os.environ[name] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant_before
        if variable_before is None:
            del os.environ[name]
        else:
            os.environ[name] = variable_before


@contextmanager
def _our_parameters() -> Iterator[None]:
    """Start the cluster in the block with what `ray.init` has no option for.

    Its agent listens on any free port, and not on 52365: of two clusters on one machine that want the same port, the
    later one starts without its agent's server, says nothing, and then takes no jobs. Two processes are left out, which
    take half a CPU-second each: what asks for more nodes, of which there are none, and what sends the workers' output
    to drivers, which do not ask for it.
    """
    original = RayParams.__init__
    RayParams.__init__ = functools.partialmethod(
        original, dashboard_agent_listen_port=0, no_monitor=True, include_log_monitor=False
    )
    try:
        yield
    finally:
        RayParams.__init__ = original


@contextmanager
def _our_sigterm_handler() -> Iterator[None]:
    """Keep the SIGTERM handler of this process, which asks for a commit, while the block joins or leaves a cluster.

    `ray.init` puts in a Python handler at once, which ends the process with code 15, and one in C at its end;
    `ray.shutdown` puts in the system's, which kills. The first is kept out, the others are replaced behind the block.
    """
    theirs = ray._private.utils.set_sigterm_handler
    ours = signal.getsignal(signal.SIGTERM)
    ray._private.utils.set_sigterm_handler = _set_no_handler
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = theirs
        # Only a main thread may set handlers, and None is one that Python did not set.
        if ours is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)


def _set_no_handler(handler: object) -> None:
    """Take the place of what sets Ray's handler."""


def _set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _put_first(name: str, path: Path) -> None:
    """Put a folder before the others of a variable like PATH."""
    others = os.environ.get(name)
    if not others:
        os.environ[name] = str(path)
    elif others != str(path):
        os.environ[name] = f"{path}{os.pathsep}{others}"


def _print_nothing(data: object, ignore_prefix: bool) -> None:
    """Take the place of what prints the workers' output and Ray's guesses."""


def _short_directory() -> str:
    """Make a temporary directory whose path leaves room for the names of Ray's sockets."""
    longest = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - DIRECTORY_NAME_BYTES
    chosen = "/tmp"
    # The user's own choice comes first, unless Ray would refuse it: "AF_UNIX path length cannot exceed 107 bytes".
    for parent in (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()):
        if len(parent) <= longest and os.access(parent, os.W_OK):
            chosen = parent
            break
    return tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=chosen)


def _join(address: str) -> None:
    if address.startswith("http"):
        raise ClusterError(
            f"RAY_ADDRESS={address} is a dashboard\n"
            f"a run joins the cluster itself, at the host:port of `ray start --head`; jobs go to dashboards\n"
            f"type `python -m jobs submit …`, or set RAY_ADDRESS=host:6379"
        )
    # "auto" is the cluster of this machine, whose address Ray finds itself.
    if address != "auto":
        require_reachable(address)
    # Ray's client does not look for the token file unless RAY_AUTH_MODE says so, and is refused with 401.
    use_token_if_any()
    runtime_env = None
    # The workers on other nodes need this checkout; a submitted job has shipped it already.
    is_submitted_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if not is_submitted_job:
        runtime_env = {"working_dir": str(ROOT), "excludes": EXCLUDES}
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="warning",
            namespace=NAMESPACE,
        )
    except Exception as error:
        raise explain(error, address) from None


def _cluster_info() -> ClusterInfo:
    resources = ray.cluster_resources()
    host_and_port = ray._private.worker.get_dashboard_url()
    dashboard = ""
    if host_and_port:
        dashboard = f"http://{host_and_port}"
    # Ray's list of nodes keeps those that are dead.
    return ClusterInfo(
        address=ray.get_runtime_context().gcs_address,
        dashboard=dashboard,
        nodes=sum(node["Alive"] for node in ray.nodes()),
        cpus=resources.get("CPU", 0),
        gpus=resources.get("GPU", 0),
        embedded=bool(_reapers),
    )


def gpus_present() -> tuple[int, str]:
    """Return how many GPUs the connected cluster has, and whether it is this "machine" or another "cluster"."""
    info = _cluster_info()
    return int(info.gpus), "machine" if info.embedded else "cluster"
