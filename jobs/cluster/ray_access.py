"""How this process gets into a Ray cluster: the one at RAY_ADDRESS, or an embedded one that dies with this process.

`connect`, in order:
1. an embedded cluster that counts too few CPUs for this worker group is ended;
2. without a connection: join the cluster at RAY_ADDRESS, or, where that is not set, an embedded one (embedded.py), with
   a token that only this user can read: it is started here, unless its processes were before the driver's imports;

It does not wait for room: jobs/cluster/ray_nodes.py does, when a stage needs its workers.

>>> connect(ClusterConfig(workers=2))
ClusterInfo(address="127.0.0.1:6379", dashboard="http://127.0.0.1:8265", nodes=1, cpus=2.0, gpus=0.0, embedded=True)

Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private import ray_constants

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.ray_refusals import explain, require_reachable
from jobs.cluster.ray_token import ensure_token, use_token_if_any
from jobs.cluster.worker import LOOPBACK
from jobs.cluster_config import ClusterConfig

ROOT = Path(__file__).parents[2]
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards"]  # never shipped; nor what .gitignore names
NAMESPACE = "patchline"


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
    """Join the cluster at RAY_ADDRESS, or one that this process starts and that dies with it.

    Call it from the main thread, where Ray can put its handler of SIGTERM. Raises ClusterError when there is no such
    cluster, it refuses us, or it is embedded and too small.
    """
    # An embedded cluster was told how many CPUs to count, perhaps for a smaller worker group than this one.
    if embedded.is_started() and embedded.cpus() < cluster.least * cluster.cpus_per_worker:
        disconnect()
    if not ray.is_initialized():
        with _our_sigterm_handler():
            if embedded.is_wanted():
                _start_embedded(cluster)
            else:
                embedded.set_defaults(embedded.ENVIRONMENT)
                _join(os.environ["RAY_ADDRESS"])
    return _cluster_info()


def disconnect() -> None:
    """Leave the cluster; an embedded one ends, with every process and its temporary directory."""
    with _our_sigterm_handler():
        ray.shutdown()
    embedded.end()


def _start_embedded(cluster: ClusterConfig) -> None:
    ensure_token()
    # Mostly it starts since before our imports (jobs/run/early_start.py), and this does nothing.
    embedded.start(cluster)
    # Ray prints a paragraph of guesses about a dead worker; WorkerGroupError says it in a line.
    ray._private.worker.print_to_stdstream = _print_nothing
    try:
        address = embedded.address()
        with _loopback_only():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="warning",
                namespace=NAMESPACE,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(embedded.ray_directory()),
            )
    except ClusterError:
        # Let the reaper clear away what has come up of the cluster.
        disconnect()
        raise
    except Exception as error:
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        failure = embedded.did_not_start(reason)
        disconnect()
        raise failure from error


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


def _print_nothing(data: object, ignore_prefix: bool) -> None:
    """Take the place of what prints the workers' output and Ray's guesses."""


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
        embedded=embedded.is_started(),
    )
