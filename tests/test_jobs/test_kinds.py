"""A new kind of stage needs one file and one line in the table of kinds."""

import importlib
import sys
from pathlib import Path

import pytest

import jobs.__main__
import models
from data.errors import ConfigError
from jobs.__main__ import main
from jobs.kinds import load_kinds
from jobs.recipe import campaign
from jobs.recipe.validate import validate
from jobs.resolved_recipe import Available
from tests.support import campaigns
from tests.support.campaigns import CORE, KINDS
from tests.support.recipes import NO_CHECK

# A kind of stage for this test: it rounds weights to a number of binary digits.
ROUNDED = '''
"""Round weights to fewer binary digits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import models
from data.errors import ConfigError
from jobs.resolved_recipe import Available, CheckResult, Reads, Stage, StageKind
from pipeline.config import Tags, tags


@dataclass(frozen=True)
class Config:
    init: str = "???"
    digits: int = 7  # after the first

    RESUME: ClassVar[Tags] = tags(forbid="init digits")


class Rounded(StageKind):
    name = "rounded"
    config = Config
    inputs = {"init": Reads.WEIGHTS}
    makes_weights = True
    needs_workers = False

    def run(self, cfg: Config, context) -> dict[str, Any]:
        weights, config = models.load_weights(context.campaign.path_of(cfg.init))
        for name, tensor in weights.items():
            mantissa, exponent = torch.frexp(tensor)
            weights[name] = torch.ldexp(torch.round(mantissa * 2**cfg.digits) / 2**cfg.digits, exponent)
        models.save_weights(weights, context.directory, config, class_names=context.class_names)
        return {"metrics": {"accuracy": 0.5}}

    def model(self, cfg: Config, source):
        return source

    def checks(self, stage: Stage, there: Available) -> Iterator[CheckResult]:
        if stage.config.digits < 1:
            raise ConfigError(f"{stage.name}.digits is {stage.config.digits}, expected 1 or more")
        yield CheckResult("WARN", "digits", f"{stage.name}: {stage.config.digits} digits lose accuracy")

    def metrics(self, cfg: Config):
        return ["accuracy"]
'''


@pytest.fixture
def with_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, and one line of the table."""
    (tmp_path / "rounded.py").write_text(ROUNDED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rounded", raising=False)
    monkeypatch.setitem(jobs.__main__.KINDS, "rounded", "rounded:Rounded")
    monkeypatch.setitem(KINDS, "rounded", importlib.import_module("rounded").Rounded())


def test_a_new_kind_needs_one_file_and_one_line(with_rounded, recipe, shards, capsys) -> None:
    probe = f"{{train: {shards}/train, test: {shards}/test, shots: [1]}}"
    added = f"rounded: {{init: '@pretrain', digits: 3}}\nagain: {{kind: fewshot, init: '@rounded', probe: {probe}}}\n"
    recipe.write_text(recipe.read_text() + added)
    assert main(["plan", str(recipe)]) == 0
    planned = capsys.readouterr().out
    assert "rounded (rounded, key " in planned
    assert "  reads   init = @pretrain" in planned
    assert "rounded: 3 digits lose accuracy" in planned

    assert main(["run", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "rounded: 3 digits lose accuracy" in out
    assert "rounded: key " in out
    loaded = campaigns.load(recipe, [])
    rounded, before = (models.load_weights(loaded.directory(loaded.stage(name)))[0] for name in ("rounded", "pretrain"))
    # With three binary digits after the first, the relative error is at most 1/8.
    largest = max(float((rounded[name] - before[name]).abs().max() / before[name].abs().max()) for name in before)
    assert 0 < largest <= 1 / 8
    assert (loaded.directory(loaded.stage("again")) / "metrics.json").exists(), "another stage starts from its weights"
    assert main(["run", str(recipe)]) == 0
    assert "rounded: skipped, finished with the same config and inputs" in capsys.readouterr().out


def test_plan_and_run_use_the_checks_of_a_kind(with_rounded, recipe: Path, capsys) -> None:
    recipe.write_text(recipe.read_text() + "rounded: {init: '@pretrain'}\nother: {init: '@rounded', kind: resize}\n")
    for command in ("plan", "run"):
        assert main([command, str(recipe), "rounded.digits=0"]) == 78
        assert "rounded.digits is 0, expected 1 or more" in capsys.readouterr().err
        assert main([command, str(recipe), "rounded.digit=1"]) == 78
        assert "unknown key rounded.digit; did you mean 'digits'" in capsys.readouterr().err
    assert main(["plan", str(recipe), "finetune.data.train=@rounded/train"]) == 78
    assert "a rounded stage writes no data set" in capsys.readouterr().err


def test_check_results_are_in_the_order_of_the_checks(recipe: Path) -> None:
    loaded = campaigns.load(recipe, ["pretrain.data.train=/nowhere", "fewshot.init=/neither"])
    available = Available(loaded)
    results = {stage.name: validate(stage, available) for stage in loaded.stages}
    (failure,) = results["pretrain"]
    assert (failure.level, failure.subject, failure.exit_code) == ("FAIL", "inputs", 65)
    assert failure.text == "pretrain.data.train: /nowhere: this index does not exist"
    assert results["finetune"] == []
    assert [result.text for result in results["fewshot"]] == ["fewshot.init: no weights.safetensors in /neither"]
    assert results["fewshot"][0].remedy == "  pass a folder that contains this file, or @stage"


def test_a_kind_whose_module_is_missing_is_refused_only_if_a_recipe_uses_it(recipe, monkeypatch) -> None:
    recipe.write_text(recipe.read_text().replace(NO_CHECK, ""))  # the key of an extra
    kinds = load_kinds({**CORE, "sweep": "jobs.extras.gone.table:Table", "figure": "jobs.extras.gone.figure:Figure"})
    names = ["pretrain", "resize", "finetune", "fewshot"]
    assert [stage.name for stage in campaign.load(recipe, [], kinds).stages] == names
    assert [stage.name for stage in campaign.load(recipe, ["finetune.sweep=null"], kinds).stages] == names
    with pytest.raises(ConfigError, match=r"finetune\.sweep needs jobs/extras/gone, which"):
        campaign.load(recipe, ["finetune.sweep={seeds: [0, 1]}"], kinds)
    with pytest.raises(ConfigError, match=r"drawn is a figure stage, which needs jobs/extras/gone, but it is not"):
        campaign.load(recipe, ["drawn={kind: figure}"], kinds)
    monkeypatch.setattr(campaign, "READ_BUDGET", "jobs.extras.gone.law:read_budget")
    with pytest.raises(ConfigError, match="budget cannot be checked"):
        campaign.load(recipe, ["budget=1"], load_kinds(CORE))


def test_a_missing_library_is_not_a_missing_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        load_kinds({"needy": "needy:Needy"})


def test_every_kind_has_its_name_in_the_table() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in jobs.__main__.KINDS}
