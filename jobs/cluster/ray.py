"""How this process gets into a Ray cluster: the one at RAY_ADDRESS, or an embedded one that dies with this process.

`connect`, in order:
1. an embedded cluster that counts too few CPUs or no GPUs for this worker group is ended;
2. without a connection: join the cluster at RAY_ADDRESS, or, where that is not set, an embedded one (embedded.py): it
   is started here, unless its processes were before the driver's imports.

It does not wait for free places: jobs/cluster/ray_places.py does, when a stage needs its workers.

>>> connect(ClusterConfig(workers=2))
ClusterInfo(address="127.0.0.1:6379", dashboard="http://127.0.0.1:8265", nodes=1, cpus=2.0, gpus=0.0, embedded=True)

Ray is imported by the functions that need it, after they have set the variables that Ray reads at its import.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster_config import ClusterConfig
from jobs.ownership import UNIT, this_job

ROOT = Path(__file__).parents[2]
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards"]  # never shipped; nor what .gitignore names
NAMESPACE = "patchline"
WAITING = "waiting for the cluster: "  # how the driver's line begins that says what it waits for; `list` looks for it
CONNECT_TIMEOUT_S = 5.0
HEAD_WAIT_S = 60.0  # for the head that starts with the driver's unit; then the unit ends with 69, and is started again
HEAD_POLL_S = 0.2
HTTP2_SETTINGS = 4  # the type of the frame that an HTTP/2 server begins with (RFC 9113, 3.4)
HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0])


@dataclass(frozen=True)
class ClusterInfo:
    address: str
    dashboard: str  # "" without one
    nodes: int
    cpus: float
    gpus: float
    embedded: bool


_dashboards: list[str] = []  # that of the cluster which was joined


# ------------------------------------------------------------------------ in and out


def connect(cluster: ClusterConfig) -> ClusterInfo:
    """Join the cluster at RAY_ADDRESS, or one that this process starts and that dies with it.

    Raises ClusterError when there is no such cluster, or it refuses us.
    """
    if embedded.is_too_small(cluster):
        disconnect()
    if not _is_joined() and embedded.is_wanted():
        _join_embedded(cluster)
    elif not _is_joined():
        address = os.environ["RAY_ADDRESS"]
        if address.startswith("http"):
            raise ClusterError(
                f"RAY_ADDRESS={address} is a dashboard\n"
                f"a run joins the cluster itself, at the host:port of `ray start --head`; jobs go to dashboards\n"
                f"type `python -m jobs submit …`, or set RAY_ADDRESS=host:6379"
            )
        # Ray's client does not look for the token file unless RAY_AUTH_MODE says so, and is refused with 401.
        embedded.use_token_if_any()
        os.environ.update(embedded.ENVIRONMENT | dict(os.environ))
        # "auto" is the cluster of this machine, whose address Ray finds itself.
        if address != "auto":
            # A unit starts when its machine does, and so does the head's Ray, which takes some seconds.
            deadline = time.monotonic() + (HEAD_WAIT_S if this_job().startswith(UNIT) else 0.0)
            while True:
                try:
                    require_reachable(address)
                    break
                except ClusterError:
                    if time.monotonic() >= deadline:
                        raise
                    import_module("ray")  # meanwhile: it takes a second
                    time.sleep(HEAD_POLL_S)
            if "://" not in address:
                require_ray(address)
        runtime_env = None
        # The workers on other nodes need this checkout; a submitted job has shipped it already.
        is_submitted_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        if not is_submitted_job:
            runtime_env = {"working_dir": str(ROOT), "excludes": EXCLUDES}
        try:
            _init_ray(address=address, runtime_env=runtime_env)
        except Exception as error:
            raise explain(error, address) from None

    import ray

    resources = ray.cluster_resources()
    # Ray's list of nodes keeps those that are dead.
    return ClusterInfo(
        address=ray.get_runtime_context().gcs_address,
        dashboard=_dashboards[0] if _dashboards else "",
        nodes=sum(node["Alive"] for node in ray.nodes()),
        cpus=resources.get("CPU", 0),
        gpus=resources.get("GPU", 0),
        embedded=embedded.is_started(),
    )


def disconnect() -> None:
    """Leave the cluster; an embedded one ends, with every process and its temporary directory."""
    if _is_joined():
        import ray

        # `ray.shutdown` puts in the system's handler of SIGTERM, which kills.
        _keep_sigterm_handler(ray.shutdown)
    _dashboards.clear()
    embedded.end()


def _is_joined() -> bool:
    # Where nothing has imported Ray there is no connection, and to ask Ray would import it.
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _join_embedded(cluster: ClusterConfig) -> None:
    """Start the embedded cluster, unless it was started early, and join it; ends it where that fails."""
    started = embedded.start(cluster)
    try:
        # The guard's one line, when the cluster can be joined.
        assert started.guard.stdout is not None
        word, _, text = started.guard.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(text or "its processes have ended")
        import ray

        # Ray has read the variable when it was imported, which may have been before the cluster was started.
        if ray.util.get_node_ip_address() != embedded.LOOPBACK:
            raise RuntimeError(f"this process imported Ray before {embedded.LOOPBACK_ONLY} was 0")
        _init_ray(address=text)
    except Exception as error:
        # The guard clears away what has come up of the cluster.
        disconnect()
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ClusterError(
            f"an embedded Ray cluster did not start: {reason}\n"
            f"it needs 1 GB of memory, free ports on the loopback and disk space in {started.directory.parent}\n"
            f"type cluster.backend=processes to do without, or RAY_ADDRESS=host:port of a running one"
        ) from error


def _init_ray(**options: Any) -> None:
    """Call `ray.init`, and keep our handler of SIGTERM meanwhile."""
    import ray

    work = partial(ray.init, log_to_driver=False, logging_level="error", namespace=NAMESPACE, **options)
    context = _keep_sigterm_handler(work)
    if context.dashboard_url:
        _dashboards.append(f"http://{context.dashboard_url}")


def _keep_sigterm_handler(work: Callable[[], Any]) -> Any:
    """Do what joins or leaves a cluster, and keep this process's handler of SIGTERM, which asks for a commit.

    In a main thread `ray.init` would put in a Python handler at once, which ends the process with code 15: so the work
    is done in another one. At its end Ray puts in one in C all the same, which is replaced here.
    """
    ours = signal.getsignal(signal.SIGTERM)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
    outcome = thread.submit(work)
    thread.shutdown(wait=False)
    wait([outcome])
    # Only a main thread may set handlers, and None is one that Python did not set.
    if ours is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)
    return outcome.result()


# ------------------------------------------------------------------------ why a cluster cannot be joined


def require_reachable(address: str) -> None:
    """Raise ClusterError unless something listens at host:port or a URL; Ray takes a minute to say less."""
    try:
        # urlsplit finds host and port only behind a scheme; which scheme does not matter here.
        with_scheme = address
        if "://" not in address:
            with_scheme = f"ray://{address}"
        url = urlsplit(with_scheme)
        if url.port is None:
            raise ValueError("no port")
        socket.create_connection((url.hostname, url.port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"nothing answers at RAY_ADDRESS={address} ({error})\n"
            f"expected the host:port that `ray start --head` printed, or http://host:8265 of its dashboard\n"
            f"type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
        ) from None


def require_ray(address: str) -> None:
    """Raise ClusterError where what listens at host:port is no Ray head: `ray.init` would wait for it for ever.

    A head speaks gRPC, so that its first frame, to whoever begins HTTP/2, is a SETTINGS frame.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    host, _, port = address.rpartition(":")
    answer = b""
    # A head that is too busy to answer in time is not taken for another server: Ray will wait for it.
    with suppress(TimeoutError), socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
        connection.sendall(HTTP2_BEGIN)
        answer = connection.recv(9)  # a frame's header: length, type, flags, stream
        if len(answer) < 4 or answer[3] != HTTP2_SETTINGS:
            raise ClusterError(
                f"RAY_ADDRESS={address} is no Ray head: another server answers there, perhaps the dashboard\n"
                "expected the host:port that `ray start --head` printed, most often HOST:6379\n"
                "type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
            )


def explain(error: Exception, address: str) -> ClusterError:
    """Turn Ray's reason for refusing us into what, why and what to type."""
    # Ray wraps: what tells versions from tokens may stand in the error, its cause or its context.
    reasons = []
    for link in (error, error.__cause__, error.__context__):
        if link is not None:
            reasons.append(str(link).strip() or type(link).__name__)
    text = "\n".join(reasons)
    first_line = text.splitlines()[0]
    # Parts of words, because Ray writes them with a capital letter and without.
    if "ersion mismatch" in text or "not compatible with the Ray cluster" in text:
        return ClusterError(
            f"the cluster at {address} has other versions: {' '.join(text.split())[:400]}\n"
            f"Ray and Python must be the same on both sides\n"
            f"install there what constraints.txt pins, or here the `ray==` that the cluster has"
        )
    if "uthenticat" in text or "Unauthorized" in text or "Forbidden" in text:
        return ClusterError(
            f"the cluster at {address} refuses us: {first_line}\n"
            f"it asks for a token, which must be its head's own\n"
            f"set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a copy of the head's ~/.ray/auth_token"
        )
    return ClusterError(
        f"cannot join the cluster at {address}: {type(error).__name__}: {first_line}\n"
        f"expected a cluster that `ray start --head` began\n"
        f"type `ray status --address host:port` to check"
    )
