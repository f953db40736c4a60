"""An embedded Ray cluster counts the GPUs that torch sees (joining and ending: test_worker_group.py)."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.cluster import embedded
from jobs.cluster.ray import connect, disconnect
from jobs.cluster_config import ClusterConfig
from pipeline.identity import WORKERS_PER_GPU

ON_GPUS = ClusterConfig(gpus_per_worker=1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("script", "per_gpu", "expected"),
    [
        ("print(2)", "1", ["--num-gpus", "2"]),
        ("print(1)", "2", ["--num-gpus", "2"]),
        ("print(0)", "1", []),
        ("raise SystemExit('no torch')", "1", []),
    ],
)
def test_ray_gets_the_number_of_gpus_that_torch_sees(script, per_gpu, expected, monkeypatch) -> None:
    monkeypatch.setattr(embedded, "COUNT_GPUS", script)
    monkeypatch.setenv(WORKERS_PER_GPU, per_gpu)
    assert embedded.gpu_option() == expected


@pytest.mark.quick
def test_gpus_are_counted_only_for_workers_with_gpus(monkeypatch, tmp_path) -> None:
    """Counting GPUs imports torch, which takes seconds."""
    commands: list[list[str]] = []

    def start_guard(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(communicate=lambda: None)

    monkeypatch.setattr(embedded.subprocess, "Popen", start_guard)
    monkeypatch.setattr(embedded, "short_directory", lambda: tmp_path)
    monkeypatch.setattr(embedded, "make_token", lambda: None)
    # `start` changes the environment for Ray.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        embedded.start(ClusterConfig())
        assert embedded.is_too_small(ON_GPUS)
        assert not embedded.is_too_small(ClusterConfig())
        # The cluster without GPUs is replaced by one with GPUs.
        embedded.start(ON_GPUS)
        assert not embedded.is_too_small(ON_GPUS)
        assert not embedded.is_too_small(ClusterConfig())
    finally:
        embedded.end()
    assert [embedded.GPUS in command for command in commands] == [False, True]


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Provide a fake torch module with two GPUs to new processes."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\ncuda = SimpleNamespace(device_count=lambda: 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    disconnect()
    yield
    disconnect()


def test_embedded_cluster_has_gpus_that_ray_does_not_detect(fake_torch) -> None:
    assert connect(ON_GPUS).gpus == 2
