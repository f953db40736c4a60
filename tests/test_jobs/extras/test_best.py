"""Stages that keep their best evaluation: what is refused, and what is in the key."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from jobs.extras.planning.trial import trial_key
from tests.support import campaigns


def test_the_metric_must_be_one_and_what_it_is_of_is_in_the_key(recipe: Path):
    def key(*overrides: str) -> str:
        return campaigns.load(recipe, list(overrides)).stage("pretrain").key

    plain = key("pretrain.evaluate_every=8")
    assert key("pretrain.evaluate_every=4") == plain, "evaluations change nothing else"
    kept = ["pretrain.keep_best=accuracy", "pretrain.evaluate_every=8"]
    assert len({plain, key(*kept), key(*kept, "pretrain.evaluate_every=4"), key(*kept, "pretrain.patience=1")}) == 4
    with pytest.raises(ConfigError) as error:
        key(*kept, "pretrain.keep_best=acuracy")
    assert (
        "pretrain.keep_best is acuracy, which the stage's evaluations do not report; did you mean 'accuracy'?"
        in str(error.value)
    )
    assert "expected one of accuracy" in str(error.value)


def test_a_stage_with_keep_best_has_the_trials_of_one_without(recipe: Path):
    """`plan` and `trial` take its steps without its evaluations."""
    keys = set()
    for more in ([], ["pretrain.keep_best=accuracy", "pretrain.evaluate_every=8", "pretrain.patience=1"]):
        loaded = campaigns.load(recipe, more)
        keys.add(trial_key(loaded, loaded.stage("pretrain")))
    assert len(keys) == 1
