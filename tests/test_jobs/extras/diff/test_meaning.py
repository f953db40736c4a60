"""What two recipes mean, whatever keys say it."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from jobs.__main__ import main
from jobs.commands import campaigns
from jobs.commands.campaigns import RECIPES
from jobs.resolved_recipe import Kinds
from pipeline.recipe import read_recipe
from tests.support.campaigns import KINDS

JFT = "table3/vit_jft300m"
TRANSFER = "transfer/cifar10"
LOAD = campaigns.load_campaign


@cache
def shipped(name: str):
    return LOAD(name, [], KINDS)


@pytest.fixture(autouse=True)
def shipped_recipes_are_read_once(monkeypatch):
    def load_campaign(path: str, words: list[str], kinds: Kinds):
        return shipped(path) if path in campaigns.shipped() and not words else LOAD(path, words, kinds)

    monkeypatch.setattr("jobs.extras.diff.diff.load_campaign", load_campaign)


def written(folder: Path, recipe: str, *overrides: str, name: str = "mine.yaml") -> str:
    """A recipe of somebody's own: one that ships, with other values."""
    file = folder / name
    file.write_text(yaml.safe_dump(dict(read_recipe(RECIPES / f"{recipe}.yaml", overrides).values)))
    return str(file)


def lines_of(capsys, *words: str) -> list[str]:
    assert main(["diff", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def subjects(lines: list[str]) -> list[str]:
    return [line[4:].partition(":")[0] for line in lines if re.match(r" ?\d+\. ", line)]


def test_schedules_are_compared_by_their_rates_and_a_run_of_the_grid_is_no_deviation(tmp_path, capsys):
    linear = written(tmp_path, JFT, "pretrain.optim.schedule.end=0")
    steps = round(7 * 303e6 / 4096)
    cooled = f"pretrain.optim.schedule={{decay: constant, cooldown_steps: {steps - 10_000}}}"
    assert subjects(lines_of(capsys, linear, JFT, cooled)) == []
    for rate, named in (("0.01", []), ("0.02", ["peak learning rate"])):
        alone = Path(written(tmp_path, TRANSFER, f"finetune.optim.lr={rate}"))
        values = yaml.safe_load(alone.read_text())
        del values["finetune"]["sweep"]
        alone.write_text(yaml.safe_dump(values))
        assert subjects(lines_of(capsys, str(alone), TRANSFER)) == [*named, "number of runs"]
