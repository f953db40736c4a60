"""The imports and malloc settings of a fork server (with real workers: test_worker_group.py)."""

import os
from pathlib import Path

import pytest
import torch

from jobs.cluster import fork_server


@pytest.mark.quick
def test_malloc_settings_are_appended_to_the_users(tmp_path, monkeypatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(fork_server.ForkServer, "launch", lambda server, words, *rest: environments.append(rest[0]))
    ours = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
    for theirs, expected in (("glibc.malloc.hugetlb=1", f"glibc.malloc.hugetlb=1:{ours}"), ("", ours)):
        monkeypatch.setenv("GLIBC_TUNABLES", theirs)
        server = fork_server.ForkServer(tmp_path, has_gpus=False)
        os.close(server.lifeline)
        assert environments.pop()["GLIBC_TUNABLES"] == expected


@pytest.mark.quick
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells which libraries a process has")
def test_fork_server_for_workers_with_gpus_imports_neither_torch_nor_cuda(tmp_path) -> None:
    """A fork cannot use CUDA if its parent has initialized it."""
    folder = tmp_path / "node"
    folder.mkdir()
    server = fork_server.ForkServer(folder, has_gpus=True)
    try:
        # It answers after all its imports.
        server.connection.send(fork_server.Listen("127.0.0.1"))
        assert isinstance(server.connection.recv(), fork_server.Listening)
        libraries = Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        server.close()
    assert not [name for name in ("libtorch", "libcuda", "libnvidia") if name in libraries]
    # This process, which has imported torch, shows that the name is right.
    assert torch.__version__
    assert "libtorch" in Path("/proc/self/maps").read_text()
