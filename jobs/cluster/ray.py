"""Connect this process to a Ray cluster: the one at RAY_ADDRESS, or an embedded one that ends with this process.

Steps of `connect`:
1. Stop an embedded cluster with too few CPUs or no GPUs for these workers.
2. If not connected, join the cluster at RAY_ADDRESS. If RAY_ADDRESS is not set, join an embedded cluster (embedded.py),
   and start it unless it was started early.

`connect` does not wait for free slots; ray_places.py does this when a stage needs workers.

>>> connect(ClusterConfig(workers=2))
ClusterInfo(address="127.0.0.1:6379", dashboard="http://127.0.0.1:8265", nodes=1, cpus=2.0, gpus=0.0, embedded=True)

Functions import Ray only after setting the variables that Ray reads at import.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
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
WAITING = "waiting for the cluster: "  # prefix of the driver's line about missing slots, recognised by `jobs list`
CONNECT_TIMEOUT_S = 5.0
HEAD_WAIT_S = 60.0  # at boot, a systemd unit waits for its head this long, then exits with 69 and is restarted
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


_dashboards: list[str] = []  # dashboard URL of the joined cluster; at most one


# ------------------------------------------------------------------------ join and leave


def connect(cluster: ClusterConfig) -> ClusterInfo:
    """Join the cluster at RAY_ADDRESS, or an embedded cluster that ends with this process.

    Raises ClusterError if the cluster does not exist or refuses the connection, or UsageError if the checkout contains
    a link that must not be shipped.
    """
    if embedded.is_too_small(cluster):
        disconnect()
    if not _is_joined() and embedded.is_needed():
        _join_embedded(cluster)
    elif not _is_joined():
        address = os.environ["RAY_ADDRESS"]
        if address.startswith("http"):
            raise ClusterError(
                f"RAY_ADDRESS={address} is the address of a dashboard, which only the command submit accepts\n"
                f"  expected the HOST:PORT that `ray start --head` printed\n"
                f"  set RAY_ADDRESS=HOST:6379, or submit the recipe to this cluster: python -m jobs submit RECIPE"
            )
        # Ray's client reads the token file only if RAY_AUTH_MODE is set; otherwise the head rejects it (401).
        embedded.use_token_if_any()
        os.environ.update(embedded.ENVIRONMENT | dict(os.environ))
        # "auto" means the cluster on this machine, whose address Ray finds.
        if address != "auto":
            # At boot, this unit and the head start together, and Ray takes some seconds.
            deadline = time.monotonic() + (HEAD_WAIT_S if this_job().startswith(UNIT) else 0.0)
            while True:
                try:
                    require_reachable(address)
                    break
                except ClusterError:
                    if time.monotonic() >= deadline:
                        raise
                    import_module("ray")  # use the wait for this import, which takes a second
                    time.sleep(HEAD_POLL_S)
            if "://" not in address:
                require_ray(address)
        runtime_env = None
        # Ship this checkout to the other nodes, unless `submit` has already shipped it.
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
    return joined_cluster()


def joined_cluster() -> ClusterInfo:
    """Describe the cluster that this process has joined."""
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
    """Leave the cluster; if it is embedded, stop it and remove its temporary directory."""
    if _is_joined():
        import ray

        # `ray.shutdown` would install the default SIGTERM handler, which kills the process.
        _keep_sigterm_handler(ray.shutdown)
    _dashboards.clear()
    embedded.end()


def _is_joined() -> bool:
    # If Ray has not been imported, there is no connection; this check must not import it.
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _join_embedded(cluster: ClusterConfig) -> None:
    """Join the embedded cluster, starting it first unless it was started early; stop it if joining fails."""
    started = embedded.start(cluster)
    try:
        # The guard writes one line when the cluster can be joined.
        assert started.guard.stdout is not None
        word, _, text = started.guard.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(text or "its processes have ended")
        import ray

        # Ray reads LOOPBACK_ONLY at import, which may have happened before it was set.
        if ray.util.get_node_ip_address() != embedded.LOOPBACK:
            raise RuntimeError(
                f"this process imported Ray before it set {embedded.LOOPBACK_ONLY}=0, expected the opposite order"
            )
        _init_ray(address=text)
    except Exception as error:
        # The guard kills and removes everything started so far.
        disconnect()
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ClusterError(
            f"the embedded Ray cluster did not start: {reason}\n"
            f"  expected 1 GB of free memory, free loopback ports, and disk space in {started.directory.parent}\n"
            f"  to run without Ray, set cluster.backend=processes; to use a running cluster, set "
            f"RAY_ADDRESS=HOST:PORT"
        ) from error


def _init_ray(**options: Any) -> None:
    """Call `ray.init` without changing this process's SIGTERM handler."""
    import ray

    work = partial(ray.init, log_to_driver=False, logging_level="error", namespace=NAMESPACE, **options)
    context = _keep_sigterm_handler(work)
    if context.dashboard_url:
        _dashboards.append(f"http://{context.dashboard_url}")


def _keep_sigterm_handler(work: Callable[[], Any]) -> Any:
    """Call a function that joins or leaves a cluster, and restore this process's SIGTERM handler afterwards.

    Our handler requests a commit. In the main thread, `ray.init` would install a Python handler that exits with code
    15, so it is called in another thread. Ray still installs a C handler, which is replaced at the end.
    """
    ours = signal.getsignal(signal.SIGTERM)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
    outcome = thread.submit(work)
    thread.shutdown(wait=False)
    wait([outcome])
    # Only the main thread may set handlers. `ours` is None if the handler was not set by Python.
    if ours is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)
    return outcome.result()


# ------------------------------------------------------------------------ errors while joining


def require_reachable(address: str) -> None:
    """Raise ClusterError if no server listens at HOST:PORT or a URL. Ray itself takes a minute and reports less."""
    try:
        # urlsplit recognises host and port only after a scheme, so add one.
        with_scheme = address
        if "://" not in address:
            with_scheme = f"ray://{address}"
        url = urlsplit(with_scheme)
        if url.port is None:
            raise ValueError("no port")
        socket.create_connection((url.hostname, url.port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no response at RAY_ADDRESS={address} ({error})\n"
            f"  expected the HOST:PORT that `ray start --head` printed, or http://HOST:8265 of its dashboard\n"
            f"  to check, run ray status --address HOST:PORT; to use only this machine, run unset RAY_ADDRESS"
        ) from None


def require_ray(address: str) -> None:
    """Raise ClusterError if the server at HOST:PORT is not a Ray head, because `ray.init` would wait forever.

    A head speaks gRPC, so it replies to the start of an HTTP/2 connection with a SETTINGS frame.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    host, _, port = address.rpartition(":")
    reply = b""
    try:
        # An IPv6 address is in brackets.
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_BEGIN)
            reply = connection.recv(9)  # a frame's header: length, type, flags, stream
    except TimeoutError:
        return  # perhaps a busy head: Ray waits for it
    except ConnectionError:
        pass  # another server has closed the connection
    if len(reply) < 4 or reply[3] != HTTP2_SETTINGS:
        raise ClusterError(
            f"RAY_ADDRESS={address} is not a Ray head: another server responds there, perhaps the dashboard\n"
            "  expected the HOST:PORT that `ray start --head` printed, usually HOST:6379\n"
            "  to check, run ray status --address HOST:PORT; to use only this machine, run unset RAY_ADDRESS"
        )


def explain(error: Exception, address: str) -> ClusterError:
    """Convert an exception raised by Ray to a ClusterError with a reason and a remedy."""
    # Ray wraps exceptions: the relevant words may be in the error, its cause or its context.
    reasons = []
    for link in (error, error.__cause__, error.__context__):
        if link is not None:
            reasons.append(str(link).strip() or type(link).__name__)
    text = "\n".join(reasons)
    first_line = text.splitlines()[0]
    # Match without the first letter, because Ray's capitalization varies.
    if "ersion mismatch" in text or "not compatible with the Ray cluster" in text:
        return ClusterError(
            f"the cluster at {address} uses other versions: {' '.join(text.split())[:400]}\n"
            f"  expected the same versions of Ray and Python here and in the cluster\n"
            f"  install the versions in constraints.txt on the cluster, or the cluster's version of ray here"
        )
    if "uthenticat" in text or "Unauthorized" in text or "Forbidden" in text:
        return ClusterError(
            f"the cluster at {address} refuses the connection: {first_line}\n"
            f"  it requires the token of its head\n"
            f"  set RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN_PATH to a copy of the head's ~/.ray/auth_token"
        )
    return ClusterError(
        f"cannot join the cluster at {address}: {type(error).__name__}: {first_line}\n"
        f"  expected a cluster started with `ray start --head`\n"
        f"  to check, run ray status --address HOST:PORT"
    )
