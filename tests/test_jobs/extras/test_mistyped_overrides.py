"""A mistyped override is answered with the right one, or with the stages of the recipe."""

import pytest

from jobs.__main__ import main
from jobs.extras.mistyped_overrides import key_meant


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "evaluate.protocols=[top-1]",
            "the recipe has no stage evaluate, so evaluate.protocols=[top-1] would add one\n"
            "  stages of the recipe: pretrain, resize, finetune, fewshot\n"
            "  to add a stage, set all its required keys: ",
        ),
        ("evaluate.step=3", "to add a stage, set all its required keys: unknown key evaluate.step"),
        (
            "pretrian.steps=3",
            "unknown stage or key pretrian; did you mean 'pretrain'?\n"
            "  to add a stage with this name, set pretrian.kind=… with one of pack, pretrain, resize, finetune, "
            "fewshot, evaluate, sweep, figure\n"
            "  stages of the recipe: pretrain, resize, finetune, fewshot",
        ),
    ],
)
def test_an_override_of_a_missing_stage_lists_the_stages_of_the_recipe(recipe, capsys, override, message):
    assert main(["plan", str(recipe), override]) == 78
    assert message in capsys.readouterr().err


def test_overrides_may_add_a_complete_stage(recipe, shards, capsys):
    assert main(["plan", str(recipe), "evaluate.init=@pretrain", f"evaluate.sets.test.test={shards}/test"]) == 0
    assert "evaluate (evaluate, key" in capsys.readouterr().out


def test_an_option_is_answered_with_the_key_that_it_means():
    assert key_meant("--batch-size", ["run", "x.yaml", "--batch-size", "128"]) == "pretrain.batch_size=128"
    assert key_meant("--lr", ["run", "x.yaml", "--lr=0.1"]) == "pretrain.optim.lr=0.1"
    assert key_meant("--steps", ["run", "x.yaml", "--steps"]) == "pretrain.steps=…"
    assert key_meant("--gpus", ["run", "x.yaml", "--gpus", "1"]) == "pretrain.optim.lr=1e-3", "no key: any example"
