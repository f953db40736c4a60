"""The hooks that a stage needs for evaluations and searches on a spare worker."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import CheckpointError
from jobs.extras.async_evaluation.extra import EVALUATION, MASKING, SEARCH, AsyncEvaluationExtra
from pipeline import config
from pipeline.artifacts import EVALUATIONS
from tests.support.configs import FullConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("values", "masked", "expected"),
    [
        ({}, [], set()),
        ({"evaluate_on": "spare"}, [], {EVALUATION}),
        ({"health": {"on_spike": "bisect"}}, [], {SEARCH}),
        ({}, [[0, 1, 2, 3]], {MASKING}),
    ],
)
def test_hooks_follow_the_keys_in_use_and_the_masks_of_a_checkpoint(values, masked, expected, tmp_path) -> None:
    checkpoints = SimpleNamespace(committed=lambda: ["step-1"], manifest=lambda name: SimpleNamespace(masked=masked))
    context: Any = SimpleNamespace(directory=tmp_path, checkpoints=checkpoints)
    cfg: Any = config.build(FullConfig, {"steps": 10, **values}, "pretrain")
    assert set(AsyncEvaluationExtra().hooks(cfg, context)) == expected


def test_pending_requests_of_an_earlier_attempt_need_the_hook_too(tmp_path) -> None:
    (tmp_path / EVALUATIONS).mkdir()
    context: Any = SimpleNamespace(directory=tmp_path, checkpoints=SimpleNamespace(committed=list))
    cfg: Any = FullConfig(steps=10)
    assert set(AsyncEvaluationExtra().hooks(cfg, context)) == {EVALUATION}


def test_an_unreadable_checkpoint_may_mask_samples(tmp_path) -> None:
    def manifest(name: str) -> None:
        raise CheckpointError(f"{name} is damaged")

    context: Any = SimpleNamespace(
        directory=tmp_path, checkpoints=SimpleNamespace(committed=lambda: ["step-1"], manifest=manifest)
    )
    assert set(AsyncEvaluationExtra().hooks(FullConfig(steps=10), context)) == {MASKING}
