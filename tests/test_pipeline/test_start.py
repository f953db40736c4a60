"""The start of a worker: its task, deterministic kernels, and checkpoints of another stage."""

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
from benchmarks.gpu.kernels import deterministic_kernels
from data.errors import CheckpointError, DataError
from pipeline import config, start
from pipeline.engine.determinism import CUBLAS_VARIABLE
from pipeline.start import check_stage, read_task
from pipeline.training_config import TrainConfig
from pipeline.worker import Job
from tests.support import savers

pytestmark = pytest.mark.quick


@pytest.fixture
def restored(monkeypatch):
    """Restore torch's settings after the test."""
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    with deterministic_kernels():
        os.environ.pop(CUBLAS_VARIABLE)
        torch.use_deterministic_algorithms(False)
        yield


@pytest.mark.parametrize(("exact_parts", "is_gpu"), [(2, True), (2, False), (0, True)])
def test_exact_mode_enables_deterministic_kernels_on_a_gpu_before_joining(
    exact_parts, is_gpu, restored, monkeypatch, tmp_path
) -> None:
    """Joining the group starts CUDA, and cuBLAS reads its variable at that moment."""
    seen = []

    def join_group(timeout_s: float) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get(CUBLAS_VARIABLE)))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_gpu)
    monkeypatch.setattr(start, "join_group", join_group)
    monkeypatch.setenv("RANK", "0")
    cfg = TrainConfig(steps=1, precision="fp32", exact_parts=exact_parts)
    job: Any = SimpleNamespace(attempt_folder=tmp_path)
    with pytest.raises(InterruptedError):
        start.join(cfg, job)
    is_on = exact_parts > 0 and is_gpu
    assert seen == [(is_on, ":4096:8" if is_on else None)]


# ------------------------------------------------------------------------ tasks and checkpoints

JOB: dict[str, Any] = {
    "run": "/runs/x",
    "directory": "/runs/x/pretrain-1",
    "attempt": 3,
    "key": "k" * 64,
    "code": "c" * 64,
    "model": models.to_dict(models.config_of("mu/8", 16, 10)),
    "train": ["/shards/train"],
}


def test_task_of_plain_values_becomes_a_config_and_a_job() -> None:
    cfg, job, hooks = read_task({"config": {"steps": 3, "optim": {"schedule": {"drops": ()}}}, "job": JOB})
    assert cfg.steps == 3
    assert cfg.optim.schedule.drops == ()
    assert job == Job(**JOB)
    assert hooks == {}


def test_checkpoint_of_another_stage_is_refused_with_the_differences() -> None:
    cfg = TrainConfig(steps=10, batch_size=32)
    job = Job(**{**JOB, "key": "1" * 64})
    before = config.tagged(TrainConfig(steps=10, batch_size=64), "forbid")
    manifest = dataclasses.replace(savers.manifest(5, 1, 2), key="2" * 64, config=before)
    with pytest.raises(CheckpointError) as refusal:
        check_stage(cfg, job, manifest, "/runs/x/checkpoints")
    assert str(refusal.value) == (
        "the newest checkpoint in /runs/x/checkpoints has the stage key 22222222, expected 11111111; "
        "changed: batch_size: 64 → 32\n"
        "  move the checkpoint back to the folder of its stage"
    )
    check_stage(cfg, dataclasses.replace(job, key="2" * 64), manifest, "/runs/x/checkpoints")


def test_checkpoint_with_the_same_config_but_other_inputs_is_refused() -> None:
    cfg = TrainConfig(steps=10)
    manifest = dataclasses.replace(savers.manifest(5, 1, 2), config=config.tagged(cfg, "forbid"))
    with pytest.raises(CheckpointError, match="expected 11111111; changed: its inputs\n"):
        check_stage(cfg, Job(**{**JOB, "key": "1" * 64}), manifest, "/runs/x/checkpoints")


def test_init_with_nan_is_refused_before_training(tmp_path) -> None:
    model = models.build("mu/8", 16, 10)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up.bias")[2] = float("nan")
    models.save(model, tmp_path)
    cfg = TrainConfig(steps=1, precision="fp32")
    telemetry: Any = None
    with pytest.raises(
        DataError, match=r"cannot load .*: 1 of \d+ tensors .*: blocks.0.mlp.up.bias \(1 of 128 values\)"
    ):
        start.build_model(cfg, str(tmp_path), model.config, [], telemetry)
