"""Several extras can add their keys to one config."""

import dataclasses
import json
from typing import Any

import pytest

from data.errors import ConfigError
from pipeline import config
from pipeline.extras.best import BestConfig
from pipeline.extras.branches import BranchConfig
from pipeline.extras.token_dropping import TokenDroppingTrainConfig
from pipeline.hooks import build_config, compose, is_used, own_keys, plain_values
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


@pytest.mark.quick
def test_composed_config_has_the_keys_and_checks_of_all_parts() -> None:
    parts = (BranchConfig, TokenDroppingTrainConfig, BestConfig)
    composed = compose(*parts)
    keys = [field.name for field in dataclasses.fields(composed)]
    core = [field.name for field in dataclasses.fields(TrainConfig)]
    assert sorted(keys) == sorted([*core, "begin", "law", "thinning", "keep_best", "patience"])
    assert composed is compose(*parts), "configs of two stages are compared"
    assert compose(TrainConfig, *parts, TrainConfig) is composed  # hooks without keys have TrainConfig

    built = config.build(composed, {"steps": 10, "keep_best": "accuracy", "evaluate_every": 5}, "pretrain")
    assert isinstance(built, BestConfig)
    assert built.saves_evaluated
    assert built.exempt_checkpoints == 1
    for wrong, message in (
        ({"steps": 0}, "steps is 0"),  # of the core
        ({"begin": 5}, "init is not set"),
        ({"patience": 2}, "keep_best does not name a metric"),
        ({"thinning": {"patch_dropout": 2.0}}, "patch_dropout is 2.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.build(composed, {"steps": 10, **wrong}, "pretrain")


@pytest.mark.quick
def test_part_is_used_if_one_of_its_keys_differs_from_the_default() -> None:
    composed = compose(BranchConfig, TokenDroppingTrainConfig, BestConfig)
    plain = composed(steps=10, log_every=1)
    assert not any(is_used(plain, part) for part in (BranchConfig, TokenDroppingTrainConfig, BestConfig))
    kept = composed(steps=10, evaluate_every=5, keep_best="accuracy")
    assert is_used(kept, BestConfig)
    assert not is_used(kept, TokenDroppingTrainConfig)
    assert own_keys(BestConfig) == ["keep_best", "patience"]


@pytest.mark.quick
def test_task_has_only_the_keys_of_its_hooks_and_builds_the_same_config() -> None:
    composed = compose(BranchConfig, TokenDroppingTrainConfig, BestConfig)
    cfg: Any = composed(steps=10, evaluate_every=5, keep_best="accuracy", patience=3)
    values = json.loads(json.dumps(plain_values(cfg, [BestConfig])))
    assert "thinning" not in values
    built: Any = build_config(values, ["pipeline.extras.best:KeepBest"])
    assert (built.keep_best, built.patience) == ("accuracy", 3)
    with pytest.raises(ConfigError, match=r"unknown key config\.keep_best"):
        build_config(values)
