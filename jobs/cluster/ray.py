"""Connects this process to a Ray cluster: the one at RAY_ADDRESS, or an embedded one that ends with this process.

`connect`, in order:
1. ends an embedded cluster that has too few CPUs or no GPUs for this worker group;
2. if not connected, joins the cluster at RAY_ADDRESS or, if that is not set, an embedded cluster (embedded.py), which
   it starts unless it was started early.

It does not wait for free places: jobs/cluster/ray_places.py does, when a stage needs its workers.

>>> connect(ClusterConfig(workers=2))
ClusterInfo(address="127.0.0.1:6379", dashboard="http://127.0.0.1:8265", nodes=1, cpus=2.0, gpus=0.0, embedded=True)

Functions import Ray only after they have set the variables that Ray reads at its import.
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
from jobs.terminal import echo

ROOT = Path(__file__).parents[2]
NAMESPACE = "patchline"
WAITING = "waiting for the cluster: "  # prefix of the driver's line about missing places; `jobs list` recognizes it
CONNECT_TIMEOUT_S = 5.0
HEAD_WAIT_S = 60.0  # for a head that starts with the driver's unit; then the unit ends with 69 and restarts
HEAD_POLL_S = 0.2
HTTP2_SETTINGS = 4  # type of the first frame that an HTTP/2 server sends (RFC 9113, 3.4)
HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0])


@dataclass(frozen=True)
class ClusterInfo:
    address: str
    dashboard: str  # "" if there is no dashboard
    nodes: int
    cpus: float
    gpus: float
    embedded: bool


_dashboards: list[str] = []  # of the joined cluster; at most one


# ------------------------------------------------------------------------ join and leave


def connect(cluster: ClusterConfig) -> ClusterInfo:
    """Join the cluster at RAY_ADDRESS, or an embedded one that ends with this process.

    Raises ClusterError if the cluster does not exist or refuses the connection, UsageError if the checkout contains a
    link that must not be shipped.
    """
    if embedded.is_too_small(cluster):
        disconnect()
    if not _is_joined() and embedded.is_wanted():
        _join_embedded(cluster)
    elif not _is_joined():
        address = os.environ["RAY_ADDRESS"]
        if address.startswith("http"):
            raise ClusterError(
                f"RAY_ADDRESS={address} is the address of a dashboard\n"
                f"`run` needs the host:port that `ray start --head` printed; `submit` accepts dashboards\n"
                f"type `python -m jobs submit …`, or set RAY_ADDRESS=host:6379"
            )
        # Ray's client reads the token file only if RAY_AUTH_MODE is set; otherwise it is refused with 401.
        embedded.use_token_if_any()
        os.environ.update(embedded.ENVIRONMENT | dict(os.environ))
        # "auto" is the cluster of this machine; Ray finds its address.
        if address != "auto":
            # At boot, this unit and the head's Ray start together, and Ray takes some seconds.
            deadline = time.monotonic() + (HEAD_WAIT_S if this_job().startswith(UNIT) else 0.0)
            while True:
                try:
                    require_reachable(address)
                    break
                except ClusterError:
                    if time.monotonic() >= deadline:
                        raise
                    import_module("ray")  # use the time: this takes a second
                    time.sleep(HEAD_POLL_S)
            if "://" not in address:
                require_ray(address)
        runtime_env = None
        # Workers on other nodes need this checkout. A submitted job has shipped it already.
        is_submitted_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        if not is_submitted_job:
            from jobs.cluster.shipping import EXCLUDES, inspect_checkout, secrets_line

            line = secrets_line(inspect_checkout(ROOT))
            if line:
                echo(line)
            runtime_env = {"working_dir": str(ROOT), "excludes": EXCLUDES}
        try:
            _init_ray(address=address, runtime_env=runtime_env)
        except Exception as error:
            raise explain(error, address) from None

    import ray

    resources = ray.cluster_resources()
    # Ray's list of nodes includes dead ones.
    return ClusterInfo(
        address=ray.get_runtime_context().gcs_address,
        dashboard=_dashboards[0] if _dashboards else "",
        nodes=sum(node["Alive"] for node in ray.nodes()),
        cpus=resources.get("CPU", 0),
        gpus=resources.get("GPU", 0),
        embedded=embedded.is_started(),
    )


def disconnect() -> None:
    """Leave the cluster; an embedded one ends with all its processes and its temporary directory."""
    if _is_joined():
        import ray

        # `ray.shutdown` installs the default handler of SIGTERM, which kills the process.
        _keep_sigterm_handler(ray.shutdown)
    _dashboards.clear()
    embedded.end()


def _is_joined() -> bool:
    # If Ray is not imported there is no connection, and this check must not import it.
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _join_embedded(cluster: ClusterConfig) -> None:
    """Start the embedded cluster, unless it was started early, and join it; end it if that fails."""
    started = embedded.start(cluster)
    try:
        # The guard writes one line when the cluster can be joined.
        assert started.guard.stdout is not None
        word, _, text = started.guard.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(text or "its processes have ended")
        import ray

        # Ray reads the variable at import, which may have happened before the cluster was started.
        if ray.util.get_node_ip_address() != embedded.LOOPBACK:
            raise RuntimeError(f"this process imported Ray before {embedded.LOOPBACK_ONLY} was 0")
        _init_ray(address=text)
    except Exception as error:
        # The guard removes what has been started of the cluster.
        disconnect()
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ClusterError(
            f"an embedded Ray cluster did not start: {reason}\n"
            f"it needs 1 GB of memory, free loopback ports and disk space in {started.directory.parent}\n"
            f"type cluster.backend=processes to run without Ray, or set RAY_ADDRESS=host:port of a running cluster"
        ) from error


def _init_ray(**options: Any) -> None:
    """Call `ray.init` without changing this process's handler of SIGTERM."""
    import ray

    work = partial(ray.init, log_to_driver=False, logging_level="error", namespace=NAMESPACE, **options)
    context = _keep_sigterm_handler(work)
    if context.dashboard_url:
        _dashboards.append(f"http://{context.dashboard_url}")


def _keep_sigterm_handler(work: Callable[[], Any]) -> Any:
    """Call a function that joins or leaves a cluster, and restore this process's SIGTERM handler afterwards.

    That handler requests a commit. In the main thread, `ray.init` would install a Python handler that exits with code
    15, so it is called in another thread. Ray then still installs a handler in C, which is replaced at the end.
    """
    ours = signal.getsignal(signal.SIGTERM)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
    outcome = thread.submit(work)
    thread.shutdown(wait=False)
    wait([outcome])
    # Only the main thread may set handlers. None stands for a handler set outside Python.
    if ours is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)
    return outcome.result()


# ------------------------------------------------------------------------ errors while joining


def require_reachable(address: str) -> None:
    """Raise ClusterError unless a server listens at host:port or a URL; Ray would take a minute to report less."""
    try:
        # urlsplit finds host and port only after a scheme; any scheme will do.
        with_scheme = address
        if "://" not in address:
            with_scheme = f"ray://{address}"
        url = urlsplit(with_scheme)
        if url.port is None:
            raise ValueError("no port")
        socket.create_connection((url.hostname, url.port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no answer at RAY_ADDRESS={address} ({error})\n"
            f"expected the host:port that `ray start --head` printed, or http://host:8265 of its dashboard\n"
            f"type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
        ) from None


def require_ray(address: str) -> None:
    """Raise ClusterError if the server at host:port is not a Ray head; `ray.init` would wait for it for ever.

    A head speaks gRPC, so it answers the start of an HTTP/2 connection with a SETTINGS frame.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    host, _, port = address.rpartition(":")
    answer = b""
    # A busy head that does not answer in time passes the check: Ray waits for it.
    with suppress(TimeoutError), socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
        connection.sendall(HTTP2_BEGIN)
        answer = connection.recv(9)  # a frame's header: length, type, flags, stream
        if len(answer) < 4 or answer[3] != HTTP2_SETTINGS:
            raise ClusterError(
                f"RAY_ADDRESS={address} is not a Ray head: another server answers there, perhaps the dashboard\n"
                "expected the host:port that `ray start --head` printed, most often HOST:6379\n"
                "type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
            )


def explain(error: Exception, address: str) -> ClusterError:
    """Turn an exception of Ray into an error that says what happened, why, and what to type."""
    # Ray wraps exceptions: the decisive words may be in the error, its cause or its context.
    reasons = []
    for link in (error, error.__cause__, error.__context__):
        if link is not None:
            reasons.append(str(link).strip() or type(link).__name__)
    text = "\n".join(reasons)
    first_line = text.splitlines()[0]
    # Without the first letter, because Ray's capitalization varies.
    if "ersion mismatch" in text or "not compatible with the Ray cluster" in text:
        return ClusterError(
            f"the cluster at {address} runs other versions: {' '.join(text.split())[:400]}\n"
            f"the versions of Ray and Python must be the same here and in the cluster\n"
            f"install the versions of constraints.txt in the cluster, or the cluster's version of `ray` here"
        )
    if "uthenticat" in text or "Unauthorized" in text or "Forbidden" in text:
        return ClusterError(
            f"the cluster at {address} refuses the connection: {first_line}\n"
            f"it requires the token of its head\n"
            f"set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a copy of the head's ~/.ray/auth_token"
        )
    return ClusterError(
        f"cannot join the cluster at {address}: {type(error).__name__}: {first_line}\n"
        f"expected a cluster started by `ray start --head`\n"
        f"type `ray status --address host:port` to check"
    )
