"""An embedded Ray cluster: `ray start --head` on the loopback interface, stopped when the command ends.

    python -m jobs.cluster.embedded DIRECTORY CPUS [gpus]        (the guard, a child of the driver)

1. `start` creates the cluster's directory and starts the guard in a separate session. The driver does not wait, so that
   Ray starts during the driver's imports.
2. The guard runs `ray start --head` with free ports on 127.0.0.1, and with a token that only this user can read. If
   workers need GPUs, it passes the number of GPUs that torch sees, because Ray detects no GPUs without NVML. Then it
   writes "ready host:port", or "failed" and the reason, to its standard output.
3. The driver reads that line when it joins the cluster (ray.py).
4. The guard waits until its standard input is closed, either by `end` or because the driver exits or is killed.
   Then it kills every process in its session, including all Ray processes, and removes the directory.

Ray's own fate sharing is not enough: after the head is killed, its agents keep running for 40 s or more, and the
directory is never removed. Ray is not imported here, so that the cluster can start before that slow import
(jobs/run/session.py). All statements about Ray were measured with version 2.60.
"""

import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from data.errors import ClusterError
from data.files import home, import_path
from jobs.cluster.worker import LOOPBACK, ignore_signal
from jobs.cluster_config import ClusterConfig
from pipeline.identity import workers_per_gpu

SOCKET_PATH_BYTES = 107  # maximum length of an AF_UNIX address
RAY_SOCKET_BYTES = 75  # maximum length of the path that Ray appends to its temporary directory
DIRECTORY_PREFIX = "pl-ray-"
INNER_DIRECTORY = "r"
GPUS = "gpus"  # the argument that tells the guard to count GPUs
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
DIRECTORY_NAME_BYTES = 18  # "/", the prefix, the suffix of mkdtemp, "/" and the inner directory
OBJECT_STORE_BYTES = 200 * 2**20  # almost nothing is stored there; Ray's default is 30 % of the memory
CLEAR_S = 30.0  # maximum wait for the processes to die, before the directory is removed anyway

# Except on macOS, Ray replaces 127.0.0.1 with an external address, and most of its ports then listen on all interfaces.
# The value 0 makes Ray behave as on macOS. Ray reads this variable and RAY_AUTH_MODE when it is imported.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # do not hide GPUs: workers without GPUs hide them themselves
}
EMBEDDED_ENVIRONMENT = {
    "RAY_agent_register_timeout_ms": "240000",  # default 30 s, after which the raylet aborts on a small busy machine
    "RAY_worker_register_timeout_seconds": "240",
    # Do not start a process for each CPU: actors with their own environment variables cannot use them.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Embedded:
    """A cluster started by this process; it may not be ready to join yet."""

    guard: subprocess.Popen[str]
    directory: Path  # ours (mode 0700); Ray's own directory inside it is open to everybody (0777)
    cpus: int  # number of CPUs given to Ray
    counts_gpus: bool  # whether Ray was given the GPUs that torch sees


_started: list[Embedded] = []  # at most one


# ------------------------------------------------------------------------ in the driver


def is_needed() -> bool:
    """Return whether an embedded cluster is needed: RAY_ADDRESS does not name an existing cluster."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def is_started() -> bool:
    """Return whether this process has started an embedded cluster."""
    return bool(_started)


def is_too_small(cluster: ClusterConfig) -> bool:
    """Return whether the embedded cluster is running but too small for the workers of this config."""
    if not _started:
        return False
    lacks_gpus = cluster.gpus_per_worker > 0 and not _started[0].counts_gpus
    return lacks_gpus or _started[0].cpus < cluster.least * cluster.cpus_per_worker


def start(cluster: ClusterConfig) -> Embedded:
    """Start an embedded cluster with enough CPUs for these workers; stop a smaller one first.

    Returns before the cluster is ready. Raises ClusterError if the token cannot be stored, or OSError if the cluster's
    process or directory cannot be created.
    """
    if _started and not is_too_small(cluster):
        return _started[0]
    end()
    make_token()
    # This process needs the same variables to join the cluster; Ray reads them when it is imported.
    os.environ.update(ENVIRONMENT | EMBEDDED_ENVIRONMENT | dict(os.environ))
    os.environ[LOOPBACK_ONLY] = "0"
    # Workers inherit this environment from the raylet, so that they use this Python and this checkout's packages.
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    environment = {**os.environ, "PYTHONPATH": import_path(), "PATH": path}
    # The number of CPUs is only Ray's accounting: workers with few threads may share cores.
    cpus = max(os.cpu_count() or 1, cluster.least * cluster.cpus_per_worker)
    counts_gpus = cluster.gpus_per_worker > 0
    directory = short_directory()
    # -P excludes the working directory from the import path, because its files could shadow modules.
    command = [sys.executable, "-P", "-m", "jobs.cluster.embedded", str(directory), str(cpus)]
    if counts_gpus:
        workers_per_gpu()  # an invalid setting raises here instead of in the guard
        command.append(GPUS)
    try:
        guard = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not inherited: a program that reads the driver's stderr to its end would wait for the guard.
            stderr=subprocess.DEVNULL,
            text=True,
            # A new session protects the guard from Ctrl-C, and identifies Ray's processes.
            start_new_session=True,
        )
    except OSError:
        directory.rmdir()
        raise
    _started.append(Embedded(guard, directory, cpus, counts_gpus))
    return _started[0]


def end(*, waits: bool = True) -> None:
    """Stop the embedded cluster, if it is running: kill all its processes and remove its temporary directory.

    With `waits=False`, return at once and leave the cleanup to the guard.
    """
    while _started:
        del os.environ[LOOPBACK_ONLY]
        guard = _started.pop().guard
        # Closing the guard's standard input makes it clean up.
        if waits:
            guard.communicate()
            continue
        for pipe in (guard.stdin, guard.stdout):
            assert pipe is not None
            pipe.close()


def short_directory() -> Path:
    """Create a temporary directory with a path short enough for the names of Ray's sockets."""
    longest = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - DIRECTORY_NAME_BYTES
    chosen = "/tmp"
    # Prefer the user's choice, unless Ray would fail: "AF_UNIX path length cannot exceed 107 bytes".
    for parent in (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()):
        if len(parent) <= longest and os.access(parent, os.W_OK):
            chosen = parent
            break
    return Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=chosen))


# ------------------------------------------------------------------------ the token


def token_path() -> Path:
    """Return the path from which Ray reads the token if RAY_AUTH_TOKEN does not contain it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or home() / ".ray" / "auth_token")


def make_token() -> None:
    """Enable Ray's token authentication; if there is no token yet, create a token that only this user can read.

    Call this before Ray is imported, because Ray reads RAY_AUTH_MODE at import. Raises ClusterError if the token cannot
    be stored.
    """
    path = token_path()
    try:
        if os.environ.get("RAY_AUTH_TOKEN"):
            pass
        elif path.exists():
            # Ray creates this file with mode 0644, readable for everybody.
            path.chmod(0o600)
        else:
            # Another command may create a token at the same moment. Each command links its complete file to the final
            # name, and the first one wins. `mkstemp` makes the file unreadable for others from the start.
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, made = tempfile.mkstemp(prefix=path.name, dir=path.parent)
            try:
                os.write(handle, secrets.token_hex(32).encode())
                with suppress(FileExistsError):
                    os.link(made, path)
            finally:
                os.close(handle)
                os.unlink(made)
    except OSError as error:
        raise ClusterError(
            f"cannot store the cluster's token in {path}: {error.strerror}\n"
            f"  without a token, anyone who can reach the cluster could run code on it\n"
            f"  set RAY_AUTH_TOKEN_PATH to a writable file"
        ) from None
    os.environ["RAY_AUTH_MODE"] = "token"


def use_token_if_any() -> None:
    """Enable Ray's token authentication if this user has a token. Call this before Ray is imported."""
    if os.environ.get("RAY_AUTH_TOKEN") or token_path().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


# ------------------------------------------------------------------------ the guard


def main() -> None:
    # Ignore signals sent to the driver and all its children: the guard must outlive the driver.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ignore_signal)
    directory, cpus, *words = sys.argv[1:]
    resources = ["--num-cpus", cpus]
    if GPUS in words:
        resources += gpu_option()

    # Find free ports. If another program takes one before Ray does, `ray start` reports it.
    sockets = []
    ports = []
    for _ in range(3):
        sockets.append(socket.create_server((LOOPBACK, 0)))
        ports.append(str(sockets[-1].getsockname()[1]))
    for server in sockets:
        server.close()
    port, dashboard_port, client_port = ports
    log = Path(directory) / "start.log"
    with log.open("w") as output:
        start = subprocess.Popen(
            [
                *("ray", "start", "--head", "--disable-usage-stats"),
                *("--node-ip-address", LOOPBACK, "--port", port),
                *("--dashboard-host", LOOPBACK, "--dashboard-port", dashboard_port, "--include-dashboard=true"),
                # If two clusters on one machine use the same agent port, the second one's agent silently starts without
                # a server, and that cluster accepts no jobs. 0 selects a free port.
                *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
                # Ray's client server is not used, but `ray start` has no option to disable it.
                *("--ray-client-server-port", client_port),
                *(*resources, "--object-store-memory", str(OBJECT_STORE_BYTES)),
                *("--temp-dir", os.path.join(directory, INNER_DIRECTORY)),
                # Save half a CPU-second each: do not start the autoscaler's monitor, or the process that sends the
                # output of workers to drivers.
                *("--no-monitor", "--include-log-monitor=false"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    # While the cluster starts, check whether the driver has ended.
    has_driver = True
    while has_driver and start.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.05)
        has_driver = not readable  # the driver never writes to this pipe: readable means closed
    if has_driver:
        reply = f"ready {LOOPBACK}:{port}"
        if start.returncode != 0:
            _, _, last_line = log.read_text(errors="replace").strip().rpartition("\n")
            reply = f"failed {last_line.strip() or f'ray start ended with exit code {start.returncode}'}"
        with suppress(BrokenPipeError):
            print(reply, flush=True)
        # The pipe is closed when the driver ends, even by SIGKILL.
        sys.stdin.read()
    clear(directory)


def gpu_option() -> list[str]:
    """Return the `ray start` option for the number of GPUs that torch sees; [] if torch sees no GPUs."""
    # Import torch in a separate process: it takes 0.3 GB, and the guard runs as long as the command.
    done = subprocess.run([sys.executable, "-P", "-c", COUNT_GPUS], capture_output=True, text=True)
    count = done.stdout.strip()
    if not count.isdecimal() or count == "0":
        return []
    return ["--num-gpus", str(int(count) * workers_per_gpu())]


def clear(directory: str) -> None:
    """Kill all other processes in this session, including their children; then remove the directory."""
    session = os.getsid(0)
    deadline = time.monotonic() + CLEAR_S
    while time.monotonic() < deadline:
        # Repeat until no process is left: a killed process may just have started another one.
        members = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError, psutil.Error):
                is_member = process.pid != os.getpid() and os.getsid(process.pid) == session
                if is_member and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        if not members:
            break
        # Include children, because a worker may have left the session.
        for process in list(members):
            with suppress(psutil.Error):
                members += process.children(recursive=True)
        for process in members:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(members, timeout=1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
