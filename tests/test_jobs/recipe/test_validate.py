"""Checks of stages: their order, the stop at the first error, and errors of missing inputs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.errors import ConfigError, DataError, ExitCode
from jobs.recipe.validate import refuse, validate, validate_all
from jobs.resolved_recipe import Available, CheckResult, MissingInput, Reads, Stage
from tests.support import campaigns


def test_checks_stop_at_the_first_error_and_keep_earlier_results(recipe):
    loaded = campaigns.load(recipe, [])

    def checks(stage: Stage, available: Available) -> Iterator[CheckResult]:
        yield CheckResult("WARN", "a subject", "first")
        raise ConfigError("second\n  type something")

    stage = loaded.stage("pretrain")
    changed = Stage(stage.name, campaigns.with_methods(stage.kind, checks=checks), stage.config, stage.source)
    results = validate(changed, Available(loaded, checks_files=False))
    assert [(result.level, result.text) for result in results] == [("WARN", "first"), ("FAIL", "second")]
    assert results[1].remedy == "  type something"
    assert results[1].exit_code == ExitCode.CONFIG


def test_remedies_for_a_run_of_a_sweep_name_keys_of_the_recipe(recipe):
    sweep = ["pretrain.sweep.grid.optim.lr=[0.01,0.02]", "resize.init=@pretrain.lr-0.01"]
    with pytest.raises(ConfigError) as error:
        campaigns.load(recipe, [*sweep, "pretrain.optim.schedule.warmup_steps=999"])
    assert str(error.value).startswith("pretrain.lr-0.01: 999 warm-up steps exceed the length")
    assert "\n  set pretrain.optim.schedule.warmup_steps=2" in str(error.value)

    loaded = campaigns.load(recipe, sweep)
    stage = loaded.stage("pretrain.lr-0.01")

    def checks(stage: Stage, available: Available) -> Iterator[CheckResult]:
        yield CheckResult("WARN", "x", f"{stage.name}.a is odd\n  set {stage.name}.a=1")

    changed = Stage(stage.name, campaigns.with_methods(stage.kind, checks=checks), stage.config, stage.source)
    (result,) = validate(changed, Available(loaded, checks_files=False))
    assert result.text == "pretrain.lr-0.01.a is odd\n  set pretrain.a=1"


def test_a_stage_is_checked_by_the_stages_that_read_it(recipe):
    loaded = campaigns.load(recipe, [])
    calls = []

    def check_parent(stage: Stage, parent: Stage, available: Available) -> None:
        calls.append((stage.name, parent.name))

    for name in ("resize", "finetune", "fewshot"):
        stage = loaded.stage(name)
        kind = campaigns.with_methods(stage.kind, check_parent=check_parent)
        object.__setattr__(stage, "kind", kind)
    available = Available(loaded)
    for stage in loaded.stages:
        validate(stage, available)
    assert calls == [("resize", "pretrain"), ("finetune", "resize"), ("fewshot", "resize")]


@pytest.mark.quick
def test_missing_inputs_are_reported_first_in_one_error():
    results = [
        CheckResult("WARN", "x", "a warning"),
        CheckResult.of(ConfigError("a wrong config"), "x"),
        MissingInput.at("a", "x", Reads.SET, "/a", "/a: missing"),
        MissingInput.at("b", "y", Reads.SET, "/b", "/b: missing\n  expected b"),
    ]
    with pytest.raises(DataError) as error:
        refuse(results)
    assert str(error.value) == "2 inputs are missing: a.x: /a: missing\n  b.y: /b: missing\n  expected b"
    with pytest.raises(ConfigError, match="a wrong config"):
        refuse(results[:2])
    refuse(results[:1])


def test_all_missing_inputs_of_a_recipe_are_reported(recipe: Path):
    loaded = campaigns.load(recipe, ["pretrain.data.train=/nowhere", "fewshot.init=/neither"])
    failures = [result for result in validate_all(loaded, loaded.stages) if result.level == "FAIL"]
    assert [failure.text.partition(":")[0] for failure in failures] == ["pretrain.data.train", "fewshot.init"]
