"""The meaning of recipes, independent of their keys."""

from pathlib import Path

import pytest
import yaml

from tests.support.recipe_diffs import lines_of, read_shipped_recipes_once, subjects, write_variant

JFT = "table3/vit_jft300m"
TRANSFER = "transfer/cifar10"


@pytest.fixture(autouse=True)
def shipped_recipes_are_read_once(monkeypatch):
    read_shipped_recipes_once(monkeypatch)


def test_schedules_are_compared_by_their_rates_and_a_value_of_the_grid_is_not_a_difference(tmp_path, capsys):
    linear = write_variant(tmp_path, JFT, "pretrain.optim.schedule.end=0")
    steps = round(7 * 303e6 / 4096)
    cooled = f"pretrain.optim.schedule={{decay: constant, cooldown_steps: {steps - 10_000}}}"
    assert subjects(lines_of(capsys, linear, JFT, cooled)) == []
    for rate, named in (("0.01", []), ("0.02", ["peak learning rate"])):
        single = Path(write_variant(tmp_path, TRANSFER, f"finetune.optim.lr={rate}"))
        values = yaml.safe_load(single.read_text())
        del values["finetune"]["sweep"]
        single.write_text(yaml.safe_dump(values))
        assert subjects(lines_of(capsys, str(single), TRANSFER)) == [*named, "number of runs"]
