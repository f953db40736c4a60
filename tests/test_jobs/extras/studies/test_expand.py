"""A sweep expands to the sections and names that a user would write by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigError
from jobs.extras.studies.expand import SweepConfig, expand
from jobs.extras.studies.table import TableConfig
from jobs.extras.submit.portable import portable
from jobs.resolved_recipe import Sections, StageSection
from pipeline.config import resume_tags
from pipeline.recipe import read_recipe
from tests.support import campaigns
from tests.support.campaigns import KINDS

pytestmark = pytest.mark.quick


def expanded(sections: dict[str, Any]) -> Sections:
    typed = {name: StageSection(values, name) for name, values in sections.items()}
    return expand(typed, KINDS, lambda name, section: None)


def test_a_grid_with_held_out_expands_to_the_stages_written_by_hand():
    section = {
        "init": "w",
        "data": {"train": "all", "evaluate": "test"},
        "optim": {"schedule": {"warmup_steps": 2}},
        "sweep": {
            "grid": {"optim": {"lr": [0.01, 3.0e-5]}},
            "held_out": {"data.train": "most", "data": {"evaluate": "rest"}},
            "seeds": [0, 7],
        },
    }
    stages = expanded({"shards": {"kind": "pack"}, "finetune": section})
    schedule = {"schedule": {"warmup_steps": 2}}
    base = {"kind": "finetune", "init": "w"}
    on_held_out = {**base, "data": {"train": "most", "evaluate": "rest"}}
    optim = {**schedule, "lr": "@finetune.grid/optim.lr"}
    final = {**base, "data": {"train": "all", "evaluate": "test"}, "optim": optim}
    assert list(stages) == [
        *("shards", "finetune.lr-0.01", "finetune.lr-3e-05", "finetune.grid", "finetune.seed-0", "finetune.seed-7"),
        "finetune",
    ]
    assert stages["shards"] == StageSection({"kind": "pack"}, "shards")
    assert stages["finetune.lr-0.01"].values == {**on_held_out, "optim": {**schedule, "lr": 0.01}}
    assert stages["finetune.lr-3e-05"].values == {**on_held_out, "optim": {**schedule, "lr": 3e-5}}
    assert stages["finetune.seed-0"] == StageSection({**final, "seed": 0}, "finetune")
    assert stages["finetune.seed-7"] == StageSection({**final, "seed": 7}, "finetune")
    assert stages["finetune.grid"].values == {
        "kind": "sweep",
        "best": "accuracy",
        "chooses": True,
        "groups": {},
        "runs": {
            "finetune.lr-0.01": {
                "stage": "@finetune.lr-0.01",
                "row": "optim.lr=0.01",
                "seed": None,
                "values": {"optim.lr": 0.01},
            },
            "finetune.lr-3e-05": {
                "stage": "@finetune.lr-3e-05",
                "row": "optim.lr=3e-05",
                "seed": None,
                "values": {"optim.lr": 3e-5},
            },
        },
    }
    runs = stages["finetune"].values["runs"]
    assert [(name, run["row"], run["seed"]) for name, run in runs.items()] == [
        ("finetune.seed-0", "finetune", 0),
        ("finetune.seed-7", "finetune", 7),
    ]
    assert not stages["finetune"].values["chooses"]
    assert section["optim"] == {"schedule": {"warmup_steps": 2}}, "the recipe must not be modified"


@pytest.mark.parametrize(
    ("varies", "names"),
    [
        ({"seeds": [3, 4]}, "p.seed-3 p.seed-4 p"),
        ({"grid": {"steps": [1, 2]}}, "p.steps-1 p.steps-2 p"),
        ({"grid": {"steps": [1]}, "seeds": [0, 1]}, "p.steps-1.seed-0 p.steps-1.seed-1 p"),
        ({"grid": {"a.lr": [1, 2], "b": {"lr": ["x/y"]}}}, "p.a.lr-1.b.lr-x_y p.a.lr-2.b.lr-x_y p"),
        ({"each": {"cars": {"steps": 1}, "dogs": None}}, "p.cars p.dogs p"),
        ({"each": {"cars": None}, "seeds": [0, 1]}, "p.cars.seed-0 p.cars.seed-1 p"),
        ({"grid": {"steps": [1]}, "held_out": {"init": "x"}}, "p.steps-1 p.grid p.final p"),
        (
            {"each": {"cars": {"held_out": {"init": "x"}}}, "grid": {"steps": [1]}},
            "p.cars.steps-1 p.cars.grid p.cars p",
        ),
    ],
)
def test_runs_are_named_by_the_values_that_vary(varies, names):
    assert " ".join(expanded({"p": {"kind": "pretrain", "sweep": varies}})) == names


def test_another_model_in_each_does_not_inherit_the_fields_of_the_first():
    model = {"name": "mu/8", "image_size": 16, "classes": 10, "depth": 3}
    each = {"vit": {"steps": 9}, "deep": {"model": {"depth": 5}}, "same": {"model.name": "mu/8"}}
    each["bit"] = {"model": {"name": "BiT-R50x1", "classes": 5}}
    stages = expanded({"p": {"kind": "pretrain", "model": model, "sweep": {"each": each}}})
    models = {name: stage.values.get("model") for name, stage in stages.items()}
    assert models["p.vit"] == models["p.same"] == model
    assert models["p.deep"] == {**model, "depth": 5}
    assert models["p.bit"] == {"name": "BiT-R50x1", "image_size": 16, "classes": 5}


def test_a_chain_of_sweeps_expands_to_the_stages_written_by_hand():
    recipe = {
        "pretrain": {"sweep": {"each": {"small": {"lr": 1}, "large": {"lr": 2}}, "seeds": [0, 1]}},
        "resize": {"init": "@pretrain.*", "image_size": 48},
        "finetune": {
            "init": "@resize.*",
            "sweep": {"each": {"cats": {"data": {"train": "c"}}, "dogs": {"seed": 9}}},
        },
        "evaluate": {"init": "@finetune.*", "sweep": {"best": "top-1"}},
    }
    stages = expanded(recipe)
    runs = [f"{size}.seed-{seed}" for size in ("small", "large") for seed in (0, 1)]
    tasks = [f"{run}.{task}" for run in runs for task in ("cats", "dogs")]
    names = [*(f"pretrain.{run}" for run in runs), "pretrain", *(f"resize.{run}" for run in runs), "resize"]
    names += [*(f"finetune.{task}" for task in tasks), "finetune", *(f"evaluate.{task}" for task in tasks), "evaluate"]
    assert list(stages) == names
    # Each run continues the run of the same name, with the chain's seed unless it sets its own.
    assert stages["resize.large.seed-1"].values == {
        "kind": "resize",
        "init": "@pretrain.large.seed-1",
        "image_size": 48,
    }
    init = {"kind": "finetune", "init": "@resize.large.seed-1"}
    assert stages["finetune.large.seed-1.cats"].values == {**init, "seed": 1, "data": {"train": "c"}}
    assert stages["finetune.large.seed-1.dogs"].values == {**init, "seed": 9}
    assert stages["evaluate.small.seed-0.cats"].values == {"kind": "evaluate", "init": "@finetune.small.seed-0.cats"}
    rows = [(run["row"], run["seed"]) for run in stages["evaluate"].values["runs"].values()]
    assert rows[:4] == [("small, cats", 0), ("small, dogs", 0), ("small, cats", 1), ("small, dogs", 1)]
    assert stages["evaluate"].values["best"] == "top-1"
    assert not stages["evaluate"].values["chooses"]
    assert recipe["resize"]["init"] == "@pretrain.*", "the recipe must not be modified"


def test_each_run_of_a_chain_chooses_separately_and_the_table_has_the_values_of_the_chain():
    stages = expanded(
        {
            "pretrain": {"sweep": {"grid": {"model": {"depth": [1, 2]}}}},
            "finetune": {
                "init": "@pretrain.*",
                "sweep": {"grid": {"lr": [3, 4]}, "held_out": {"data.train": "most"}},
            },
            "again": {"kind": "finetune", "init": "@pretrain.*", "sweep": {"grid": {"lr": [5]}}},
        }
    )
    names = " ".join(name for name in stages if name.startswith("finetune"))
    first, second = (
        f"finetune.{depth}.lr-3 finetune.{depth}.lr-4 finetune.{depth}.grid finetune.{depth}"
        for depth in ("depth-1", "depth-2")
    )
    assert names == f"{first} {second} finetune"
    assert stages["finetune.depth-2"].values["lr"] == "@finetune.depth-2.grid/lr"
    assert stages["finetune"].values["runs"]["finetune.depth-2"] == {
        "stage": "@finetune.depth-2",
        "row": "model.depth=2",
        "seed": None,
        "values": {"model.depth": 2},
    }
    # A grid over several initial weights only compares: the best value for one of them is not a choice for all.
    assert not stages["again"].values["chooses"]
    assert stages["again"].values["runs"]["again.depth-1.lr-5"]["values"] == {"model.depth": 1, "lr": 5}
    assert stages["again"].values["runs"]["again.depth-1.lr-5"]["row"] == "model.depth=1, lr=5"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"f": {"init": "@p.*"}, "p": {"sweep": {"seeds": [0]}}},
            "f reads @p.*, the runs of a sweep, but no section p",
        ),
        ({"p": {}, "f": {"init": "@p.*"}}, "no section p above f has a sweep\n  use @p, or move f below"),
        (
            {"p": {"sweep": {"seeds": [0]}}, "f": {"init": "@p.*", "sweep": {"seeds": [1]}}},
            "f.sweep.seeds is set, but the runs that f reads already have seeds",
        ),
        (
            {"p": {"sweep": {"seeds": [0]}}, "q": {"sweep": {"seeds": [1]}}, "f": {"init": "@p.*", "data": "@q.*/x"}},
            "f reads the runs of several sweeps, p, q, whose runs have different names: seed-0; seed-1",
        ),
    ],
)
def test_an_impossible_chain_is_refused(sections, message):
    with pytest.raises(ConfigError) as error:
        expanded(sections)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("varies", "message"),
    [
        ({}, "p.sweep has neither each, nor grid, nor seeds"),
        ({"gird": {"lr": [1]}}, "unknown key p.sweep.gird; did you mean 'grid'?"),
        ({"grid": {"lr": 1}}, "p.sweep.grid.lr is 1, expected a list of values"),
        ({"grid": {"lr": []}}, "p.sweep.grid.lr is [], expected a list of values"),
        ({"grid": {"lr": [1, 1]}}, "p.sweep.grid.lr contains 1 twice"),
        ({"grid": {"lr": ["a/b", "a b"]}}, "p.sweep.grid: two runs would have the same name lr-a_b"),
        ({"grid": {"a.lr": [1], "a": {"lr": [2]}}}, "p.sweep.grid sets a.lr twice, as a dotted key and in a section"),
        ({"grid": {"kind.lr": [1]}}, "p.sweep sets kind.lr, but kind is 'pretrain', expected a section"),
        ({"seeds": [1, 1]}, "p.sweep: seeds contains 1 twice"),
        (
            {"held_out": {"init": "x"}, "seeds": [1]},
            "held_out needs a grid, but grid is not set; add grid, or remove held_out",
        ),
        (
            {"each": {"a": None}, "grid": {"lr": [1]}},
            "p.sweep has both each and grid, but not held_out\n  add held_out",
        ),
        ({"each": {"a": 3}}, "each.a is 3, expected a section of fields"),
        (
            {"each": {"cars": None}, "groups": {"g": ["cras"]}},
            "groups.g contains 'cras', which is not in each; did you mean 'cars'?",
        ),
        ({"each": {"cars": None}, "groups": {"mean": ["cars"]}}, "groups.mean has the name of the mean of all runs"),
    ],
)
def test_an_impossible_sweep_is_refused(varies, message):
    with pytest.raises(ConfigError) as error:
        expanded({"p": {"kind": "pretrain", "sweep": varies}})
    assert message in str(error.value)


def test_null_disables_a_sweep():
    assert expanded({"p": {"kind": "pretrain", "sweep": None}}) == {"p": StageSection({"kind": "pretrain"}, "p")}
    chain = {"p": {"kind": "pretrain", "sweep": {"seeds": [0, 1]}}, "r": {"init": "@p.*", "sweep": None}}
    assert list(expanded(chain)) == ["p.seed-0", "p.seed-1", "p", "r.seed-0", "r.seed-1", "r"]


def test_in_a_chain_every_row_has_its_own_means_and_a_name_can_have_its_own_grid():
    each = {"cars": {}, "dots": {"grid": {"steps": [4]}, "held_out": {"data": "small"}}}
    sweep = {"each": each, "grid": {"steps": [1, 2]}, "held_out": {"data": "most"}, "groups": {"natural": ["cars"]}}
    recipe = {"p": {"kind": "pretrain", "sweep": {"each": {"S": {}, "B": {}}, "seeds": [0, 1]}}}
    stages = expanded({**recipe, "finetune": {"init": "@p.*", "sweep": sweep}})
    grids = [name for name in stages if "steps-" in name and ".S.seed-0." in name]
    assert grids == [f"finetune.S.seed-0.{name}" for name in ("cars.steps-1", "cars.steps-2", "dots.steps-4")]
    table = stages["finetune"].values
    assert table["groups"] == {
        "S, natural": ["S, cars"],
        "S, mean": ["S, cars", "S, dots"],
        "B, natural": ["B, cars"],
        "B, mean": ["B, cars", "B, dots"],
    }
    assert {run["row"] for run in table["runs"].values()} == {"S, cars", "S, dots", "B, cars", "B, dots"}


def test_paths_in_a_sweep_become_absolute_in_a_submitted_job(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "finetune:\n"
        "  init: weights\n"
        "  sweep:\n"
        "    each: {cars: {data.train: shards/cars, held_out: {data: {train: shards/some}}}}\n"
        "    grid: {optim: {lr: [1]}, init: [weights/a, '@pretrain', /b]}\n"
        "    held_out: {data: {evaluate: shards/rest}}\n"
    )
    text, changed = portable(read_recipe(recipe), "/runs/x", Path("/home/me"), KINDS)
    assert changed == [
        "finetune.init",
        "finetune.sweep.each.cars.data.train",
        "finetune.sweep.each.cars.held_out.data.train",
        "finetune.sweep.grid.init",
        "finetune.sweep.held_out.data.evaluate",
    ]
    for path in ("/home/me/shards/cars", "/home/me/shards/some", "/home/me/weights/a", "/home/me/shards/rest"):
        assert path in text
    assert "'@pretrain'" in text
    assert "- /b\n" in text


@pytest.mark.parametrize("kind", [SweepConfig, TableConfig])
def test_every_field_has_a_resume_tag(kind):
    assert set(resume_tags(kind)) == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("pretrain.sweep.groups.g=3", "pretrain.sweep.groups.g is 3, expected a list of strings"),
        ("pretrain.sweep.groups.g=[{a: 1}]", "pretrain.sweep.groups.g is {a: 1}, expected a string"),
        ("pretrain.sweep.each.a.grid=", "pretrain.sweep: each.a.grid is None, expected a section of fields"),
        ("pretrain.sweep.each.a.held_out=x", "pretrain.sweep: each.a.held_out is 'x', expected a section of fields"),
        ("graph={kind: figure, tables: {t: []}}", "graph.tables.t is [], expected a string"),
        ("cluster.environment.A={b: 1}", "cluster.environment.A is {b: 1}, expected a string"),
        ("budget=[1]", "budget is [1], expected a number of exaFLOPs greater than 0"),
    ],
)
def test_values_of_a_wrong_type_are_errors_of_the_recipe(recipe, override, problem):
    with pytest.raises(ConfigError) as error:
        campaigns.load(recipe, [override])
    assert str(error.value).startswith(problem)
