"""Values that another stage determines: placeholders before it has finished, its values afterwards, the same keys."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from data.errors import ConfigError, DataError
from jobs.recipe.records import stage_record
from jobs.recipe.references import filled, references_in, with_field, with_values
from jobs.resolved_recipe import Campaign
from pipeline import artifacts
from tests.support.choosers import finish_chooser, load_chooser

pytestmark = pytest.mark.quick


@pytest.fixture
def loaded(tmp_path: Path) -> Campaign:
    return load_chooser(tmp_path)


def test_the_config_has_a_placeholder_until_the_value_is_known(loaded):
    user = loaded.stage("user")
    assert user.config.rate == 0.5
    assert user.pending == ("rate",)
    assert user.references == {"rate": "@chooser/rate"}


def test_a_stage_comes_after_the_stage_that_determines_its_value(loaded):
    assert [stage.name for stage in loaded.stages] == ["chooser", "user"]


def test_the_value_replaces_the_placeholder_and_the_key_does_not_change(loaded):
    finish_chooser(loaded, rate=0.25)
    after = with_values(loaded)
    user = after.stage("user")
    assert user.config.rate == 0.25
    assert user.pending == ()
    assert user.key == loaded.stage("user").key
    assert stage_record(user)["chosen"] == {"rate": 0.25}
    assert "chosen" not in stage_record(loaded.stage("user"))


def test_a_recipe_loaded_later_has_the_value(loaded, tmp_path):
    finish_chooser(loaded, rate=0.25)
    assert load_chooser(tmp_path).stage("user").config.rate == 0.25


def test_without_a_value_the_field_stays_pending(loaded):
    finish_chooser(loaded)
    assert with_values(loaded).stage("user").pending == ("rate",)


def test_a_stage_that_ran_with_another_value_is_refused(loaded):
    finish_chooser(loaded, rate=0.25)
    user = with_values(loaded).stage("user")
    folder = loaded.directory(user)
    folder.mkdir()
    artifacts.write_record(folder / "stage.json", {**stage_record(user), "chosen": {"rate": 0.5}})
    with pytest.raises(DataError, match=r"was run with values that chooser no longer selects: rate: 0\.5 → 0\.25"):
        with_values(loaded)


def test_the_key_depends_on_the_stage_that_determines_the_value(loaded, tmp_path):
    other = load_chooser(tmp_path, "chooser.rates=[0.5,0.125]")
    assert other.stage("user").config == loaded.stage("user").config
    assert other.stage("user").key != loaded.stage("user").key


def test_a_reference_to_an_unknown_value_is_refused(loaded, tmp_path):
    with pytest.raises(
        ConfigError, match=r"user\.rate is @chooser/rat, but chooser does not have the value 'rat'; did you mean"
    ):
        load_chooser(tmp_path, "user.rate='@chooser/rat'")


def test_other_strings_with_an_at_sign_are_unchanged(loaded, tmp_path):
    assert loaded.stage("user").config.title == "@home"
    user = load_chooser(tmp_path, "user.more.handle='@nobody/here'").stage("user")
    assert user.config.more == {"handle": "@nobody/here"}


# ------------------------------------------------------------------------ fields by dotted name


@dataclass(frozen=True)
class Optim:
    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError("lr is not positive")


@dataclass(frozen=True)
class Config:
    optim: Optim = field(default_factory=Optim)
    sets: dict[str, Optim] = field(default_factory=dict)


def test_fields_of_a_config_are_changed_by_path():
    config = Config(sets={"a.b": Optim(2.0)})
    assert with_field(config, ["optim", "lr"], 0.2) == replace(config, optim=Optim(0.2))
    changed = with_field(config, ["sets", "a", "b", "lr"], 3.0)  # the name of a set may have dots
    assert changed == Config(sets={"a.b": Optim(3.0)})
    assert config.sets["a.b"].lr == 2.0


def test_a_changed_config_is_validated_again():
    with pytest.raises(ConfigError, match="not positive"):
        with_field(Config(), ["optim", "lr"], -1.0)


def test_references_are_found_outside_of_input_fields():
    section = {"optim": {"lr": "@grid/optim.lr"}, "init": "@resize", "data": {"train": "@shards/train"}, "steps": 3}
    inputs = ("data.train", "data.mixture.*.train")
    assert list(references_in(section, inputs)) == [("optim.lr", "@grid/optim.lr")]


def test_values_replace_references_in_a_copy():
    section = {"optim": {"lr": "@grid/optim.lr", "name": "sgd"}, "steps": 3}
    assert filled(section, {"optim.lr": 0.01}) == {"optim": {"lr": 0.01, "name": "sgd"}, "steps": 3}
    assert section["optim"] == {"lr": "@grid/optim.lr", "name": "sgd"}
