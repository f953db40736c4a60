"""Recorded facts of a stage, and what each can affect."""

from pathlib import Path

import pytest

from jobs.extras.diff.facts import Effect
from jobs.extras.diff.recorded import recorded_differences, recorded_facts
from jobs.extras.history import StageHistory
from pipeline.training_config import DataConfig, TrainConfig

pytestmark = pytest.mark.quick


def history(**changes: object) -> StageHistory:
    """Return a stage with two attempts, described by hand."""
    config = {"seed": 3, "log_every": 50, "optim": {"lr": 0.1, "clip": 1.0}, "mixup": 0.0, "batch_size": 8}
    stage = StageHistory(Path("/nowhere"), "pretrain", "x/pretrain")
    stage.record = {
        "config": config | changes,
        "forbid": {"seed": 3, "optim": {}, "mixup": 0.0, "batch_size": 8, "content of data.train": "aa"},
        "warn": {"micro_batch": 4},
    }
    stage.starts = [{"world": 2, "code": "c0"}, {"world": 2, "code": "c0"}, {"world": 3, "code": "c0"}]
    stage.provenance = {"environment": {"torch": "2.13.0", "machine": "x86_64"}}
    return stage


@pytest.mark.parametrize(
    ("name", "effect", "text"),
    [
        ("seed", Effect.ORDER, "3"),
        ("batch_size", Effect.ORDER, "8"),
        ("mixup", Effect.FIRST, "0.0"),
        ("optim.lr", Effect.UPDATE, "0.1"),
        ("log_every", Effect.NONE, "50"),
        ("content of data.train", Effect.ORDER, "aa"),
        ("torch", Effect.ROUNDING, "2.13.0"),
        ("machine", Effect.ROUNDING, "x86_64"),
    ],
)
def test_a_fact_has_the_effect_of_its_key(name: str, effect: Effect, text: str) -> None:
    fact = recorded_facts(history())[name]
    assert fact.effect is effect
    assert text in str(fact)


def test_every_key_that_fixes_the_training_has_an_effect_on_it() -> None:
    keys = [key for key, tag in TrainConfig.RESUME.items() if tag == "forbid" and key not in ("data", "model")]
    keys += [f"data.{key}" for key, tag in DataConfig.RESUME.items() if tag == "forbid"]
    assert {"passes", "steps", "data.lanes"} <= set(keys)
    for key in keys:
        stage = StageHistory(Path("/nowhere"), "pretrain", "x/pretrain")
        section, _, name = key.rpartition(".")
        stage.record = {"config": {section: {name: 1}} if section else {name: 1}, "forbid": {key: 1}}
        # The averaged weights are only exported: the trained ones do not depend on them.
        assert (recorded_facts(stage)[key].effect is Effect.NONE) == (key == "polyak"), key


def test_equal_consecutive_attempts_count_as_one_value() -> None:
    facts = recorded_facts(history())
    assert "2, then 3" in str(facts["world size"])
    assert "then" not in str(facts["code of an attempt"])


def test_differences_are_sorted_by_effect() -> None:
    other = history(log_every=10, seed=4, mixup=0.2, optim={"lr": 0.2, "clip": 1.0})
    names = [difference.name for difference in recorded_differences(history(), other)]
    assert names == ["seed", "mixup", "optim.lr", "log_every"]
    assert recorded_differences(history(), history()) == []
