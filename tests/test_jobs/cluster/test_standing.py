"""A process that has imported before: what it becomes for an agent, and for which it does not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.cluster import fork_server
from jobs.cluster.fork_server import IMPORTS, ForkServer, Listen, Listening, StandingFork, ask_standing
from tests.families import wait_until
from tests.hosts import ROOT

START = """
import os
import sys
from pathlib import Path
from jobs.cluster import fork_server, standing
fork_server.standing_socket = lambda: Path(sys.argv[1])
fork_server.import_for_workers = lambda: os.environ.setdefault("TORCH_SET_BY_AN_IMPORT", "1")
standing.main()
"""


@pytest.fixture
def standing(tmp_path, monkeypatch) -> Iterator[subprocess.Popen[bytes]]:
    """A standing process at a socket of its own, which imports nothing."""
    path = tmp_path / "private" / "socket"
    monkeypatch.setattr(fork_server, "standing_socket", lambda: path)
    environment = fork_server.import_environment(dict(os.environ))
    process = subprocess.Popen([sys.executable, "-c", START, str(path), "imported"], cwd=ROOT, env=environment)
    wait_until(path.exists)
    assert path.parent.stat().st_mode & 0o077 == 0
    yield process
    process.kill()
    process.wait()


def test_an_agent_has_a_fork_of_it_that_ends_with_the_agent_and_leaves_it_standing(standing, tmp_path) -> None:
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        server = ForkServer(folder, has_gpus=False)
        assert isinstance(server.process, StandingFork)
        assert psutil.Process(server.process.pid).ppid() == standing.pid
        server.connection.send(Listen("127.0.0.1"))
        assert isinstance(server.connection.recv(), Listening)
        server.close()
        assert not folder.exists() and not psutil.pid_exists(server.process.pid)
    assert standing.poll() is None


def test_it_is_not_used_where_the_imports_would_differ(standing, monkeypatch) -> None:
    wanted = fork_server.import_environment(dict(os.environ))
    for changes in ({"KMP_BLOCKTIME": "7"}, {"GLIBC_TUNABLES": ""}):
        assert ask_standing("/nowhere", wanted | changes, ()) is None
    monkeypatch.setattr(fork_server, "code_version", lambda: "another")
    assert ask_standing("/nowhere", wanted, ()) is None
    # Nor for workers with GPUs, each of which imports for itself.
    monkeypatch.setattr(fork_server, "ask_standing", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: words)
    assert IMPORTS not in ForkServer(Path("/nowhere"), has_gpus=True).process
    assert standing.poll() is None
