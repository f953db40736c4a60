"""Stages with `keep_best`: refused metrics, and the fields in the stage's key."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from jobs.extras.planning.trial import trial_key
from tests.support import campaigns


def test_keep_best_must_name_a_metric_and_the_evaluation_interval_enters_the_key(recipe: Path):
    def key(*overrides: str) -> str:
        return campaigns.load(recipe, list(overrides)).stage("pretrain").key

    plain = key("pretrain.evaluate_every=8")
    assert key("pretrain.evaluate_every=4") == plain, "without keep_best, evaluations do not enter the key"
    kept = ["pretrain.keep_best=accuracy", "pretrain.evaluate_every=8"]
    assert len({plain, key(*kept), key(*kept, "pretrain.evaluate_every=4"), key(*kept, "pretrain.patience=1")}) == 4
    with pytest.raises(ConfigError) as error:
        key(*kept, "pretrain.keep_best=acuracy")
    assert (
        "pretrain.keep_best is acuracy, but the stage does not evaluate this metric; did you mean 'accuracy'?"
        in str(error.value)
    )
    assert "expected a metric that the stage evaluates: accuracy" in str(error.value)


def test_keep_best_does_not_change_the_trial_of_a_stage(recipe: Path):
    """`plan` and `trial` measure training steps without evaluations."""
    keys = set()
    for more in ([], ["pretrain.keep_best=accuracy", "pretrain.evaluate_every=8", "pretrain.patience=1"]):
        loaded = campaigns.load(recipe, more)
        keys.add(trial_key(loaded, loaded.stage("pretrain")))
    assert len(keys) == 1
