"""The commands that are suggested after a run; test_conversion.py types them."""

from typing import Any

import pytest

from jobs.extras.next_commands import lines
from tests.support import campaigns

pytestmark = pytest.mark.quick


def row(stage: str, accuracy: float | None = None, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "metrics": {} if accuracy is None else {"accuracy": accuracy}, **more}


def test_commands_name_the_weights_of_the_last_stage_and_its_test_set(recipe, monkeypatch):
    campaign = campaigns.load(recipe, [f"finetune.data.evaluate={recipe.parent}/run/parts-1a2b3c4d/held-out"])
    monkeypatch.chdir(recipe.parent)
    assert list(lines(campaign, [row("pretrain", 0.5), row("finetune", 0.25), row("fewshot")])) == [
        "next, for example:",
        "  python -m jobs report run --open",
        "  python -m jobs evaluate run/finetune run/parts/held-out",
        "  python -m jobs export run/finetune exported --format timm",
    ]


def test_commands_name_the_best_run_of_a_sweep_that_has_not_diverged(recipe):
    campaign = campaigns.load(recipe, ["finetune.sweep={seeds: [0, 1, 2]}"])
    rows = [row("finetune.seed-0", 0.25), row("finetune.seed-1", 0.5), row("finetune.seed-2", 0.75, diverged=True)]
    (export,) = (line for line in lines(campaign, rows) if " export " in line)
    assert "/finetune.seed-1 exported" in export


def test_training_from_random_weights_can_be_longer(recipe):
    campaign = campaigns.load(recipe, ["pretrain.steps=40"])
    assert list(lines(campaign, [row("pretrain", 0.5)]))[-1] == "  python -m jobs run RECIPE pretrain.steps=80"


def test_a_run_without_weights_gets_no_commands(recipe):
    assert list(lines(campaigns.load(recipe, []), [row("fewshot")])) == []
