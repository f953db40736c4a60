"""Ray: an embedded cluster of this machine, or the one at RAY_ADDRESS, and a worker group of workers on it.

Ray Train places the workers and sees them die; it restarts nothing and knows no checkpoint, so that one call
is one attempt. Facts about Ray that a number or a variable here rests on were measured with 2.60.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from data.errors import ClusterError
from jobs.cluster import reaper
from jobs.cluster.ray_access import EXCLUDES, ROOT, ensure_token, explain, require_reachable, use_token_if_any
from jobs.cluster.worker_group import (
    ClusterConfig,
    Function,
    Seat,
    Tick,
    WorkerGroupError,
    oom_kills,
    records,
    terminate_workers,
    verdict,
    work,
)

TICK_S = 0.5
QUIET_S = 3.0
EVICTED = "killed by Ray's out-of-memory killer"
NODE_ADDRESS = "127.0.0.2" if sys.platform == "linux" else None  # Ray replaces 127.0.0.1 by an outside address
OBJECT_STORE_BYTES = 200 * 2**20  # Train stores next to nothing; the default is 30 % of the memory
SOCKET_PATH_BYTES = 107  # of an AF_UNIX address; Ray appends up to 75 to its temporary directory

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
}

_reapers: list[subprocess.Popen[bytes]] = []  # one for the embedded cluster, while there is one


@dataclass(frozen=True)
class ClusterInfo:
    address: str
    dashboard: str  # "" without one
    nodes: int
    cpus: float
    gpus: float
    embedded: bool


# ------------------------------------------------------------------------ the connection


def connect(cluster: ClusterConfig, say: Callable[[str], None] = print) -> ClusterInfo:
    """Join the cluster at RAY_ADDRESS, or start one inside this process that dies with it.

    Call it from the main thread: an embedded cluster dies with the thread that started it. Returns once the
    workers' resources are free; raises ClusterError when there is no such cluster, it refuses us, or it stays
    too small for `start_timeout_s`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    wanted = {
        "CPU": cluster.workers * cluster.cpus_per_worker,
        "GPU": cluster.workers * cluster.gpus_per_worker,
    }
    if _reapers and ray.cluster_resources().get("CPU", 0) < wanted["CPU"]:
        disconnect()  # an embedded cluster was told how many CPUs to count, for a smaller worker group
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})
        if address in ("", "local"):
            _start_embedded(cluster)
        else:
            _join(address)
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own in
    info = _info()
    _wait_for_resources(wanted, cluster, info.embedded, say)
    return info


def disconnect() -> None:
    """Leave the cluster; an embedded one ends, with every process and its temporary directory."""
    ray.shutdown()
    while _reapers:
        _reapers.pop().communicate()


def _start_embedded(cluster: ClusterConfig) -> None:
    os.environ.update({k: os.environ.get(k, v) for k, v in EMBEDDED_ENVIRONMENT.items()})
    # The raylet hands its environment on: workers and jobs import the packages from here, with this Python.
    for name, path in {"PYTHONPATH": ROOT, "PATH": Path(sys.executable).parent}.items():
        paths = [str(path), *filter(None, [os.environ.get(name)])]
        os.environ[name] = os.pathsep.join(dict.fromkeys(paths))
    ensure_token()
    directory = _short_directory()
    _reapers.append(reaper.start(directory))
    # A dead worker is a paragraph of guesses on stdout; WorkerGroupError says it in a line.
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    try:
        ray.init(
            address="local",
            # Workers that compute with few threads share the cores; Ray only counts.
            num_cpus=max(os.cpu_count() or 1, cluster.workers * cluster.cpus_per_worker),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level="warning",
            namespace="patchline",
            _node_ip_address=NODE_ADDRESS,
            _temp_dir=directory,
        )
    except Exception as error:
        disconnect()
        raise ClusterError(
            f"an embedded Ray cluster did not start: {str(error).strip().splitlines()[0]}\n"
            f"it needs 1 GB of memory, free ports on the loopback and room in {Path(directory).parent}\n"
            f"type cluster.backend=processes to do without, or RAY_ADDRESS=host:port of a running one"
        ) from error


def _short_directory() -> str:
    bases = [os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), "/tmp"]
    fits = (base for base in bases if len(base) + 16 + 75 <= SOCKET_PATH_BYTES and os.access(base, os.W_OK))
    base = next(fits, "/tmp")
    return tempfile.mkdtemp(prefix="pl-ray-", dir=base)


def _join(address: str) -> None:
    if address.startswith("http"):
        raise ClusterError(
            f"RAY_ADDRESS={address} is a dashboard\n"
            f"a run joins the cluster itself, at the host:port of `ray start --head`; jobs go to dashboards\n"
            f"type `python -m jobs submit …`, or set RAY_ADDRESS=host:6379"
        )
    if address != "auto":
        require_reachable(address)
    use_token_if_any()
    ships = "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ  # a submitted job has shipped the checkout already
    runtime_env = {"working_dir": str(ROOT), "excludes": EXCLUDES} if ships else None
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="warning",
            namespace="patchline",
        )
    except Exception as error:
        raise explain(error, address) from None


def _info() -> ClusterInfo:
    context, total = ray.get_runtime_context(), ray.cluster_resources()
    url = ray._private.worker.get_dashboard_url()
    return ClusterInfo(
        address=context.gcs_address,
        dashboard=f"http://{url}" if url else "",
        nodes=sum(node["Alive"] for node in ray.nodes()),
        cpus=total.get("CPU", 0),
        gpus=total.get("GPU", 0),
        embedded=bool(_reapers),
    )


def _wait_for_resources(
    wanted: dict[str, int], cluster: ClusterConfig, embedded: bool, say: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + cluster.start_timeout_s
    next_word = time.monotonic() + QUIET_S  # the last worker group's places take a moment to come free
    while missing := _missing(wanted, ray.available_resources()):
        can_grow = not (embedded and _missing(wanted, ray.cluster_resources()))
        if not can_grow or time.monotonic() > deadline:
            raise ClusterError(
                f"{missing} free for {cluster.workers} workers of {cluster.cpus_per_worker} CPUs and "
                f"{cluster.gpus_per_worker} GPUs\n"
                + ("this machine has no more\n" if not can_grow else f"waited {cluster.start_timeout_s:.0f} s\n")
                + "type fewer cluster.workers, or RAY_ADDRESS=host:port of more machines"
            )
        if time.monotonic() > next_word:
            say(f"waiting for the cluster: {missing} free")
            next_word = time.monotonic() + 10
        time.sleep(TICK_S)


def _missing(wanted: dict[str, int], found: dict[str, float]) -> str:
    """ "2 of 4 GPUs, 0 of 8 CPUs", "" where nothing is missing."""
    short = [f"{found.get(k, 0):g} of {want} {k}s" for k, want in wanted.items() if found.get(k, 0) < want]
    return ", ".join(short)


# ------------------------------------------------------------------------ the worker group


class _Rendezvous(Backend):
    """Tells the workers where rank 0 is, and leaves the process group to them."""

    share_cuda_visible_devices = True  # so that LOCAL_RANK is the device's number

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_master, address, port)


class _RendezvousConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Rendezvous


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    with socket.socket() as server:
        server.bind((address, 0))
        return address, server.getsockname()[1]


def _set_master(address: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def run(
    function: Function,
    config: dict[str, Any],
    *,
    cluster: ClusterConfig,
    name: str,
    folder: Path,
    on_tick: Tick,
) -> None:
    """Run the worker group to its end and leave no worker alive; raises WorkerGroupError when one fails."""
    trainer = _trainer(function, config, cluster, name, folder)
    failure: list[BaseException] = []
    thread = threading.Thread(target=_fit, args=(trainer, failure), name=f"fit-{name}", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(TICK_S)
            on_tick()
    except BaseException:
        disconnect()  # Train has no other handle that kills a worker group at once
        raise
    finally:
        terminate_workers(folder, cluster.workers)
    if failure:
        raise _verdict(failure[0], folder, cluster.workers)


def _trainer(
    function: Function, config: dict[str, Any], cluster: ClusterConfig, name: str, folder: Path
) -> TorchTrainer:
    resources = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
    spec = {"function": function, "config": config, "folder": folder, "cluster": cluster}
    return TorchTrainer(
        _worker,
        train_loop_config=spec,
        torch_config=_RendezvousConfig(),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers, use_gpu=cluster.gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=f"{folder.parents[1].name}-{name}",
            storage_path=str(folder / "ray"),
            # Without a limit Train waits for nodes for ever.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
        ),
    )


def _worker(spec: dict[str, Any]) -> None:
    context = get_context()
    seat = Seat(
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world=context.get_local_world_size(),
        node_rank=context.get_node_rank(),
        address=ray.util.get_node_ip_address(),
        threads=spec["cluster"].cpus_per_worker,
        gpus=spec["cluster"].gpus_per_worker,
    )
    work(spec["function"], spec["config"], spec["folder"], seat)


def _fit(trainer: TorchTrainer, failure: list[BaseException]) -> None:
    try:
        trainer.fit()
    except BaseException as error:
        failure.append(error)


def _verdict(error: BaseException, folder: Path, world: int) -> WorkerGroupError:
    """Train's error and the workers' own records as one culprit."""
    failures = getattr(error, "worker_failures", None)
    if failures is None:
        inner = getattr(error, "controller_failure", error)
        if isinstance(inner, ActorDiedError):
            return WorkerGroupError(None, "", "Train's controller died (killed, or crashed)", str(error))
        if isinstance(inner, OutOfMemoryError):  # it kills whole families, the controller with them
            return WorkerGroupError(None, "", f"{EVICTED}: {str(inner).splitlines()[0]}", str(error))
        return WorkerGroupError(None, "", f"did not start: {type(inner).__name__}: {inner}", str(error))
    return verdict(folder, world, {rank: _death(failures[rank], records(folder, world).get(rank)) for rank in failures})


def _death(error: BaseException, record: dict[str, Any] | None) -> str:
    """How a worker ended that left this record, and of which Train has this to say."""
    nodes = {n["NodeManagerHostname"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    if record is not None and record["node"] not in nodes:
        return "its node left the cluster"
    if isinstance(getattr(error, "health_check_failure", error), OutOfMemoryError):
        return EVICTED
    if record is not None and _oom_kills(record["node"], nodes[record["node"]]) > record["oom_kills"]:
        return "its process died, and its node's out-of-memory killer has struck since it started"
    return "its process died (killed, or crashed)"


def _oom_kills(host: str, node: str) -> int:
    """The counter of a machine, another one's read by a task there."""
    if host == socket.gethostname():
        return oom_kills()
    there = ray.remote(num_cpus=0)(oom_kills).options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, False))
    try:
        return ray.get(there.remote(), timeout=20)
    except Exception:  # the node goes as well, or is too busy: then we do not know
        return 0
