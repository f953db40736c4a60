"""Values that another stage determines: placeholders before it has finished, its values afterwards, the same keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from data.errors import ConfigError, DataError
from jobs.extras.recipe_text import describe_value
from jobs.extras.studies.table import waiting_for
from jobs.recipe import campaign
from jobs.recipe.records import stage_record
from jobs.recipe.references import filled, references_in, value_at, with_field, with_values
from jobs.resolved_recipe import Campaign, StageKind
from pipeline import artifacts
from pipeline.config import Tags, tags
from tests.support.campaigns import KINDS

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class ChooserConfig:
    rates: tuple[float, ...] = (0.5, 0.25)

    RESUME: ClassVar[Tags] = tags(forbid="rates")


class Chooser(StageKind):
    """A kind of stage that determines one value for other stages and has no inputs."""

    name = "chooser"
    config = ChooserConfig
    needs_workers = False

    def placeholders(self, cfg: ChooserConfig) -> Mapping[str, object]:
        return {"rate": cfg.rates[0]}

    def values(self, folder: Path) -> Mapping[str, object]:
        chosen: dict[str, object] = artifacts.read_record(folder / "chosen.json")["chosen"]
        return chosen

    def value_in_words(self, cfg: ChooserConfig, name: str) -> str:
        return f"one of {cfg.rates}"


@dataclass(frozen=True)
class UserConfig:
    rate: float = 1.0
    title: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    RESUME: ClassVar[Tags] = tags(forbid="rate more", free="title")


class User(StageKind):
    name = "user"
    config = UserConfig
    needs_workers = False


ALL = {**KINDS, "chooser": Chooser(), "user": User()}
RECIPE = "user: {rate: '@chooser/rate', title: '@home'}\nchooser: {}\n"


@pytest.fixture
def loaded(tmp_path: Path) -> Campaign:
    (tmp_path / "recipe.yaml").write_text(f"run: {tmp_path}/run\n{RECIPE}")
    return load(tmp_path)


def load(folder: Path, *overrides: str) -> Campaign:
    return campaign.load(folder / "recipe.yaml", list(overrides), ALL)


def finish(loaded: Campaign, **chosen: float) -> None:
    chooser = loaded.stage("chooser")
    folder = loaded.directory(chooser)
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "chosen.json", {"chosen": chosen})
    artifacts.write_record(folder / "done.json", {"key": chooser.key})


def test_the_config_has_a_placeholder_until_the_value_is_known(loaded):
    user = loaded.stage("user")
    assert user.config.rate == 0.5
    assert user.pending == ("rate",)
    assert user.references == {"rate": "@chooser/rate"}
    assert describe_value(loaded, user, "rate") == "one of (0.5, 0.25), known after chooser"


def test_a_stage_comes_after_the_stage_that_determines_its_value(loaded):
    assert [stage.name for stage in loaded.stages] == ["chooser", "user"]
    assert waiting_for(loaded, loaded.stage("chooser")) == [loaded.stage("user")]


def test_the_value_replaces_the_placeholder_and_the_key_does_not_change(loaded):
    finish(loaded, rate=0.25)
    after = with_values(loaded)
    user = after.stage("user")
    assert user.config.rate == 0.25
    assert user.pending == ()
    assert user.key == loaded.stage("user").key
    assert describe_value(after, user, "rate") == "0.25, one of (0.5, 0.25) (chooser)"
    assert stage_record(user)["chosen"] == {"rate": 0.25}
    assert "chosen" not in stage_record(loaded.stage("user"))


def test_a_recipe_loaded_later_has_the_value(loaded, tmp_path):
    finish(loaded, rate=0.25)
    assert load(tmp_path).stage("user").config.rate == 0.25


def test_without_a_value_the_field_stays_pending(loaded):
    finish(loaded)
    assert with_values(loaded).stage("user").pending == ("rate",)


def test_a_stage_that_ran_with_another_value_is_refused(loaded):
    finish(loaded, rate=0.25)
    user = with_values(loaded).stage("user")
    folder = loaded.directory(user)
    folder.mkdir()
    artifacts.write_record(folder / "stage.json", {**stage_record(user), "chosen": {"rate": 0.5}})
    with pytest.raises(DataError, match=r"was run with values that chooser no longer selects: rate: 0\.5 → 0\.25"):
        with_values(loaded)


def test_the_key_depends_on_the_stage_that_determines_the_value(loaded, tmp_path):
    other = load(tmp_path, "chooser.rates=[0.5,0.125]")
    assert other.stage("user").config == loaded.stage("user").config
    assert other.stage("user").key != loaded.stage("user").key


def test_a_reference_to_an_unknown_value_is_refused(loaded, tmp_path):
    with pytest.raises(
        ConfigError, match=r"user\.rate is @chooser/rat, but chooser does not have the value 'rat'; did you mean"
    ):
        load(tmp_path, "user.rate='@chooser/rat'")


def test_other_strings_with_an_at_sign_are_unchanged(loaded, tmp_path):
    assert loaded.stage("user").config.title == "@home"
    user = load(tmp_path, "user.more.handle='@nobody/here'").stage("user")
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


def test_fields_of_a_config_are_read_and_changed_by_path():
    config = Config(sets={"a.b": Optim(2.0)})
    assert value_at(config, ["optim", "lr"]) == 0.1
    assert value_at(config, ["sets", "a", "b", "lr"]) == 2.0, "the name of a set may have dots"
    changed = with_field(config, ["sets", "a", "b", "lr"], 3.0)
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
