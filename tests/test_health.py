"""When a run of non-finite steps ends an attempt, and what of an evaluation's set is said to be unreadable.

In one process, which is a worker group of one (whole runs: test_checkpoint_runs.py).
"""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.errors import Diverged, WentBack
from data.shards.packing import pack
from data.shards.sources import Sample, digits
from pipeline.health import Health
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Phases
from pipeline.reports import measure_accuracy
from pipeline.training_config import DataConfig, TrainConfig

CFG = TrainConfig(steps=40, batch_size=16, micro_batch=4, max_skipped=3, data=DataConfig(train="x"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A worker group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    written = Telemetry(tmp_path, 0, 1)
    yield written
    written.close()


def judge(health: Health, *norms: float, first: int = 1) -> None:
    for step, norm in enumerate(norms, first):
        health.judge(step, 1.0, norm, "9f3c", [[0, 4, 1]])


def test_the_first_steps_of_an_attempt_are_counted_from_one(tmp_path, telemetry):
    health = Health(CFG, tmp_path, tmp_path / "checkpoints", telemetry)
    judge(health, math.nan, math.inf)
    with pytest.raises(WentBack, match=r"3 steps in a row up to 3 .* back to step 0, steps 1 … 3 are left out"):
        judge(health, math.nan, first=3)

    again = Health(CFG, tmp_path, tmp_path / "checkpoints", telemetry)
    assert [again.next_step(step) for step in (0, 2, 3)] == [3, 3, 3]
    assert again.samples_seen(5) == (5 - 3) * 16
    judge(again, math.nan, math.nan, 0.5, math.nan, math.nan, first=4)
    with pytest.raises(Diverged, match=r"3 steps in a row up to 9 .* leaving out steps 1 … 3 had not helped"):
        judge(again, math.nan, first=9)


class FirstClass(nn.Module):
    """Predicts class 0 for every image."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.eye(10)[:1].repeat(len(images), 1)


def test_samples_that_an_evaluation_cannot_read_are_said_and_count_neither_way(tmp_path, telemetry):
    samples = [Sample(one.key, one.image, one.labels) for one in islice(digits(False), 30)]
    right = sum(sample.labels == (0,) for sample in samples[1:])
    index = pack([Sample(samples[0].key, b"junk", samples[0].labels), *samples[1:]], tmp_path / "test", classes=10)
    # What of a worker an evaluation uses.
    worker: Any = SimpleNamespace(
        cfg=CFG,
        rank=0,
        world=1,
        device=torch.device("cpu"),
        sets={"test": index},
        model_config=SimpleNamespace(image_size=(8, 8)),
        engine=SimpleNamespace(model=FirstClass(), dtype=torch.float32),
        phases=Phases(tmp_path / "attempt", 0, 1800.0),
        telemetry=telemetry,
        wants_stop=lambda: False,
    )
    assert measure_accuracy(worker, 8, "test") == {"accuracy": pytest.approx(right / 29), "judged": 29}
    worker.phases.close()
    assert "evaluate: 1 bad samples of test count neither way" in (tmp_path / "log.txt").read_text()
