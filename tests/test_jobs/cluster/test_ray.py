"""Errors while joining a cluster: no answer, another server, a refusal by Ray, or a failed embedded cluster.

For joining and leaving a cluster see test_worker_group.py and test_ray_nodes.py.
"""

import socket
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.ray import connect, disconnect, explain, require_ray
from jobs.cluster_config import ClusterConfig

pytestmark = pytest.mark.quick


def test_address_without_a_server_is_reported_at_once(monkeypatch) -> None:
    disconnect()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"  # bound, so that no other process uses it, but not listening
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match=f"no response at RAY_ADDRESS={address}"):
            connect(ClusterConfig())


def test_server_that_is_not_a_ray_head_is_reported_at_once(monkeypatch) -> None:
    """Ray itself would wait for ever. Other tests join a real head."""
    disconnect()
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.server_port}")
        with pytest.raises(ClusterError, match="is not a Ray head: another server responds there"):
            connect(ClusterConfig())
        server.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("reply", [b"\0\0\0\4\0\0\0\0\0", None])
def test_head_at_an_ipv6_address_is_accepted_and_a_reset_connection_refused(host, reply) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with socket.create_server((host, 0), family=family) as server:
        address = f"[{host}]" if ":" in host else host
        address += f":{server.getsockname()[1]}"

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                if reply is not None:
                    connection.recv(100)
                    connection.sendall(reply)
                else:
                    # With unread bytes or this option, closing resets the connection.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=respond)
        thread.start()
        if reply is None:
            with pytest.raises(ClusterError, match="is not a Ray head"):
                require_ray(address)
        else:
            require_ray(address)
        thread.join()


def test_dashboard_address_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(
        ClusterError, match=r"is the address of a dashboard, which only the command submit accepts\n[\s\S]*jobs submit"
    ):
        connect(ClusterConfig())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.8",
            "uses other versions",
        ),
        ("Unauthenticated: InvalidAuthToken: Authentication token is missing or incorrect", "refuses the connection"),
        ("Failed to connect to GCS", "cannot join the cluster"),
    ],
)
def test_errors_of_ray_are_explained_with_advice(text, reason) -> None:
    lines = str(explain(RuntimeError(text), "h:6379")).splitlines()
    assert reason in lines[0]
    assert "h:6379" in lines[0]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("echo failed no room in /dev/shm", "no room in /dev/shm"),
        ("true", "its processes have ended"),
    ],
)
def test_failed_start_of_an_embedded_cluster_is_explained_with_advice(answer, reason, monkeypatch, tmp_path) -> None:
    disconnect()
    # The guard's last line, or none; then it waits for the driver.
    command = ["sh", "-c", f"{answer}; exec >/dev/null; cat"]
    processes_started: list[subprocess.Popen[str]] = []

    popen = subprocess.Popen

    def start_guard(words: list[str], **options: Any) -> subprocess.Popen[str]:
        process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes_started.append(process)
        return process

    monkeypatch.setattr(embedded.subprocess, "Popen", start_guard)
    monkeypatch.setattr(embedded, "short_directory", lambda: tmp_path)
    with pytest.raises(
        ClusterError, match=rf"^the embedded Ray cluster did not start: {reason}\n  expected .*\n  to run without Ray"
    ):
        connect(ClusterConfig())
    assert processes_started[0].returncode == 0
    assert not embedded.is_started()
