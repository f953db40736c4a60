"""The meaning of recipes, independent of their keys."""

from pathlib import Path

import pytest
import yaml

from jobs.extras.diff import meaning
from jobs.extras.diff.diff import is_slightly_different
from pipeline import artifacts
from tests.support.campaigns import KINDS
from tests.support.paged_runs import make_run
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


SCHEDULE = "learning-rate schedule and its end"
CONSTANT = "pretrain.optim.schedule={{decay: constant, {}}}"
STEPS = "pretrain={steps: 520000, passes: null}"


@pytest.mark.parametrize(
    ("mine", "other", "named"),
    [
        ("cooldown_steps: 25000", "cooldown_steps: 100000", [SCHEDULE]),  # the same at a half and three quarters
        ("cooldown_steps: 100000", "cooldown_steps: 101000", []),  # 1 % longer
        ("drops: [100000, 420000]", "drops: [100000, 500000]", [SCHEDULE]),  # the same at all three quarters
        ("drops: [100000, 420000]", "drops: [100000, 420001]", []),
        ("drops: [100000, 200000, 518000]", "drops: [100000, 200000]", [SCHEDULE]),  # the last 0.4 % of the steps
    ],
)
def test_schedules_are_compared_over_all_steps(mine, other, named, tmp_path, capsys):
    path = write_variant(tmp_path, JFT, STEPS, CONSTANT.format(mine))
    assert subjects(lines_of(capsys, path, JFT, STEPS, CONSTANT.format(other))) == named


def test_a_choice_on_the_samples_of_the_results_is_reported(tmp_path, capsys):
    path = Path(write_variant(tmp_path, TRANSFER))
    values = yaml.safe_load(path.read_text())
    del values["finetune"]["sweep"]["held_out"]
    path.write_text(yaml.safe_dump(values))
    lines = lines_of(capsys, str(path), TRANSFER)
    assert "choice of values" in subjects(lines)
    assert any("on the samples of the results; other: on held-out samples" in line for line in lines)


def test_the_order_of_candidates_shots_and_protocols_is_no_difference(tmp_path, capsys):
    mine = write_variant(tmp_path, TRANSFER, "finetune.sweep.grid.optim.lr=[0.03,0.003,0.01,0.001]")
    assert subjects(lines_of(capsys, mine, TRANSFER)) == []
    train = "real.sets.real.train=shards/other"
    for overrides, named in (
        (
            [
                train,
                "real.protocols=[knn,top-1]",
                "real.knn.k=[20,10]",
                "fewshot.probe={shots: [10, 5], seeds: [2, 0, 1]}",
            ],
            [],
        ),
        ([train, "real.protocols=[knn,top-1]", "real.knn.k=[20,11]"], ["evaluation protocol"]),
    ):
        path = write_variant(tmp_path, "vit_b16_i1k", *overrides)
        other = [train, "real.protocols=[top-1,knn]", "real.knn.k=[10,20]"]
        assert subjects(lines_of(capsys, path, "vit_b16_i1k", *other)) == named


@pytest.mark.parametrize(
    ("value", "other", "is_slight"),
    [
        (0.999, 0.95, False),  # means over 1,000 and over 20 steps
        (0.9999, 0.99, False),
        (0.9, 0.903, True),
        (1.0, 0.999, False),
        (0.3, 0.31, True),
        (0.3, 0.32, False),
        (300, 299, True),
        (300.0, 284.0, False),
        ("0.999", 0.999, False),
    ],
)
def test_values_near_1_are_compared_by_their_distance_from_1(value, other, is_slight):
    assert is_slightly_different(value, other) is is_slight
    assert is_slightly_different(other, value) is is_slight


def test_momentum_is_a_fact_of_sgd_only(tmp_path, capsys):
    def subjects_of(recipe, overrides):
        return subjects(lines_of(capsys, write_variant(tmp_path, recipe, *overrides), recipe))

    assert subjects_of(TRANSFER, ["finetune.optim.momentum=0.5"]) == ["optimizer betas, eps and momentum"]
    assert subjects_of(TRANSFER, ["finetune.optim.beta1=0.5"]) == []
    assert subjects_of("table3/vit_i1k", ["pretrain.optim.momentum=0.5"]) == []
    assert subjects_of("table3/vit_i1k", ["pretrain.optim.beta1=0.5"]) == ["optimizer betas, eps and momentum"]


def test_keys_of_a_sweeps_run_are_those_of_its_section(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    record = artifacts.read_record(folder / "stage.json")
    for section, expected in (({"section": "pretrain"}, "pretrain"), ({}, "pretrain.lr-0.01")):
        record.pop("section", None)
        artifacts.write_record(folder / "stage.json", {**record, "name": "pretrain.lr-0.01", **section})
        (stage,) = meaning.of_run(tmp_path / "run", KINDS)
        assert (stage.row, stage.name) == ("pretrain.lr-0.01", expected)
        assert stage.size_key == f"{expected}.model.image_size"
