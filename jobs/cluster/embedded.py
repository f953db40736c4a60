"""An embedded Ray cluster: `ray start --head` on the loopback, started beside the driver's imports, ended with it.

    python -m jobs.cluster.embedded DIRECTORY CPUS [gpus]        (the guard, a child of the driver)

1. `start` makes the cluster's directory and starts the guard, in a session of its own. The driver does not wait.
2. The guard runs `ray start --head` with free ports, all of them on 127.0.0.1, and with a token that only this user can
   read. If workers want GPUs it counts those that torch sees, because Ray finds none where NVML is missing. Then it
   writes "ready host:port" to its standard output, or "failed" and the reason.
3. The driver waits for that line when it joins (ray.py).
4. The guard waits for the end of its standard input, which the driver holds open as long as it lives. So `end`, the
   driver's own end and a SIGKILL of it all come to the same: the guard kills every process of its session, in which
   all of Ray's are, and removes the directory.

Ray's own fate sharing is not enough: when the head is killed, its agents stay for 40 s and more, and the directory for
ever. Ray is not imported here, so that the driver can start the cluster before that (jobs/run/session.py).
Facts about Ray that this rests on were measured with 2.60.
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
from data.files import import_path
from jobs.cluster.worker import LOOPBACK, outlive
from jobs.cluster_config import ClusterConfig
from pipeline.identity import workers_per_gpu

SOCKET_PATH_BYTES = 107  # of an AF_UNIX address
RAY_SOCKET_BYTES = 75  # Ray appends up to so many to its temporary directory
DIRECTORY_PREFIX = "pl-ray-"
INNER_DIRECTORY = "r"
GPUS = "gpus"  # the word by which the guard is told that workers want GPUs
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
DIRECTORY_NAME_BYTES = 18  # "/", the prefix, what mkdtemp appends, "/" and the inner directory
OBJECT_STORE_BYTES = 200 * 2**20  # next to nothing is stored there; Ray's default is 30 % of the memory
CLEAR_S = 30.0  # for the processes to die; then the directory is removed all the same

# Elsewhere than on macOS, Ray replaces 127.0.0.1 by an outside address, and then most of its ports listen on all
# interfaces. With this variable at 0 it does as on macOS. Ray reads it, and RAY_AUTH_MODE, when it is imported.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without GPUs hides them itself
}
EMBEDDED_ENVIRONMENT = {
    "RAY_agent_register_timeout_ms": "240000",  # on a busy small machine the raylet aborts after 30 s
    "RAY_worker_register_timeout_seconds": "240",
    # Ray would start a process for each CPU at once, and actors that have variables of their own use none of them.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Embedded:
    """A cluster that was started here, whether or not it can be joined yet."""

    guard: subprocess.Popen[str]
    directory: Path  # ours (0700), around Ray's own, which Ray opens to everybody (0777)
    cpus: int  # that it counts
    counts_gpus: bool  # those that torch sees


_started: list[Embedded] = []  # none or one


# ------------------------------------------------------------------------ in the driver


def is_wanted() -> bool:
    """Tell whether the environment names no cluster to join."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def is_started() -> bool:
    """Tell whether there is an embedded cluster of this process."""
    return bool(_started)


def is_too_small(cluster: ClusterConfig) -> bool:
    """Tell whether there is an embedded cluster, perhaps started for other workers, that could never place these."""
    if not _started:
        return False
    lacks_gpus = cluster.gpus_per_worker > 0 and not _started[0].counts_gpus
    return lacks_gpus or _started[0].cpus < cluster.least * cluster.cpus_per_worker


def start(cluster: ClusterConfig) -> Embedded:
    """Start a cluster that counts enough CPUs for these workers; one that counts too few is ended.

    The driver does not wait for it. Raises ClusterError where no token can be kept, and OSError.
    """
    if _started and not is_too_small(cluster):
        return _started[0]
    end()
    make_token()
    # This process joins with the same variables, which Ray reads when it is imported.
    os.environ.update(ENVIRONMENT | EMBEDDED_ENVIRONMENT | dict(os.environ))
    os.environ[LOOPBACK_ONLY] = "0"
    # The raylet hands its environment on: workers import the packages from here, with this Python.
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    environment = {**os.environ, "PYTHONPATH": import_path(), "PATH": path}
    # Workers that compute with few threads share the cores; Ray only counts.
    cpus = max(os.cpu_count() or 1, cluster.least * cluster.cpus_per_worker)
    counts_gpus = cluster.gpus_per_worker > 0
    directory = short_directory()
    # -P leaves the driver's working directory out, whose files may have names of modules.
    command = [sys.executable, "-P", "-m", "jobs.cluster.embedded", str(directory), str(cpus)]
    if counts_gpus:
        workers_per_gpu()  # refused here, and not in the guard
        command.append(GPUS)
    try:
        guard = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A reader of the driver's errors, who reads to their end, must not have to wait for the guard's.
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C goes to the driver's whole process group. And this session is how the guard finds Ray's processes.
            start_new_session=True,
        )
    except OSError:
        directory.rmdir()
        raise
    _started.append(Embedded(guard, directory, cpus, counts_gpus))
    return _started[0]


def end(*, waits: bool = True) -> None:
    """End the cluster, if there is one, with every process and its temporary directory.

    A command that has no use for it need not wait for that.
    """
    while _started:
        del os.environ[LOOPBACK_ONLY]
        guard = _started.pop().guard
        # The guard clears up when its standard input is closed.
        if waits:
            guard.communicate()
            continue
        for pipe in (guard.stdin, guard.stdout):
            assert pipe is not None
            pipe.close()


def short_directory() -> Path:
    """Make a temporary directory whose path leaves enough bytes for the names of Ray's sockets."""
    longest = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - DIRECTORY_NAME_BYTES
    chosen = "/tmp"
    # The user's own choice comes first, unless Ray would refuse it: "AF_UNIX path length cannot exceed 107 bytes".
    for parent in (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()):
        if len(parent) <= longest and os.access(parent, os.W_OK):
            chosen = parent
            break
    return Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=chosen))


# ------------------------------------------------------------------------ the token: who talks to a cluster runs code


def token_path() -> Path:
    """Return where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def make_token() -> None:
    """Have Ray ask for a token, and make one that only this user can read where there is none.

    Call it before Ray is imported, which reads RAY_AUTH_MODE then. Raises ClusterError.
    """
    path = token_path()
    try:
        if os.environ.get("RAY_AUTH_TOKEN"):
            pass
        elif path.exists():
            # Ray writes the file so that everybody can read it (0644).
            path.chmod(0o600)
        else:
            # The file is whole before it has its name, because another command may make one at the same moment: the
            # first of them stays. And `mkstemp` makes it unreadable for others from the start.
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
            f"cannot keep the cluster's token in {path}: {error.strerror}\n"
            f"without a token a cluster runs anyone's code\n"
            f"set RAY_AUTH_TOKEN_PATH to a file that you can write"
        ) from None
    os.environ["RAY_AUTH_MODE"] = "token"


def use_token_if_any() -> None:
    """Send our token, if we have one, to a cluster of which we do not know whether it asks; before Ray is imported."""
    if os.environ.get("RAY_AUTH_TOKEN") or token_path().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


# ------------------------------------------------------------------------ the guard


def main() -> None:
    # A signal may go to the driver and all its children, and this process must outlive the driver.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, outlive)
    directory, cpus, *words = sys.argv[1:]
    resources = ["--num-cpus", cpus]
    if GPUS in words:
        resources += gpu_option()

    # The ports are free at this moment. `ray start` says of a port that has been taken since that it is.
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
                # Of two clusters on one machine that want the same port for their agents, the later one starts without
                # its agent's server, says nothing, and then takes no jobs. 0 is any free port.
                *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
                # Nobody uses Ray's client server, but `ray start` has no option to leave it out.
                *("--ray-client-server-port", client_port),
                *(*resources, "--object-store-memory", str(OBJECT_STORE_BYTES)),
                *("--temp-dir", os.path.join(directory, INNER_DIRECTORY)),
                # Two processes of half a CPU-second each are left out: one that asks for more nodes, of which there are
                # none, and one that sends the workers' output to drivers, which do not ask for it.
                *("--no-monitor", "--include-log-monitor=false"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    # Until the cluster is there, look for the end of the driver too.
    has_driver = True
    while has_driver and start.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.05)
        has_driver = not readable  # nothing is ever written to it
    if has_driver:
        answer = f"ready {LOOPBACK}:{port}"
        if start.returncode != 0:
            _, _, last_line = log.read_text(errors="replace").strip().rpartition("\n")
            answer = f"failed {last_line.strip() or f'ray start has ended with code {start.returncode}'}"
        with suppress(BrokenPipeError):
            print(answer, flush=True)
        # The pipe closes with the driver, however it ends. Nothing has to be sent, so SIGKILL works as well.
        sys.stdin.read()
    clear(directory)


def gpu_option() -> list[str]:
    """Return the option of `ray start` with the GPUs that torch sees; no option if it sees none."""
    # In a process of its own: the guard lives as long as the run, and torch takes 0.3 GB.
    done = subprocess.run([sys.executable, "-P", "-c", COUNT_GPUS], capture_output=True, text=True)
    count = done.stdout.strip()
    if not count.isdecimal() or count == "0":
        return []
    return ["--num-gpus", str(int(count) * workers_per_gpu())]


def clear(directory: str) -> None:
    """Kill every process of this one's session, with its children, until none is left; remove the directory."""
    session = os.getsid(0)
    deadline = time.monotonic() + CLEAR_S
    while time.monotonic() < deadline:
        # Once more after each round: a process may just have been starting another.
        members = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError, psutil.Error):
                is_member = process.pid != os.getpid() and os.getsid(process.pid) == session
                if is_member and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        if not members:
            break
        # A worker may have left the session; its parent has not.
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
