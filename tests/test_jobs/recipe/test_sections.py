"""Fields of nested sections by dotted name, and references to values of other stages among them."""

from dataclasses import dataclass, field

import pytest

from data.errors import ConfigError
from jobs.recipe.sections import filled, flat, references_in, value_at, with_field, with_fields

pytestmark = pytest.mark.quick


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


def test_flat_names_every_value_by_its_path():
    fields = {"optim": {"lr": 1, "schedule": {"warmup_steps": 2}}, "data.train": "x", "model": {}}
    assert flat(fields, "p") == {"optim.lr": 1, "optim.schedule.warmup_steps": 2, "data.train": "x", "model": {}}


def test_flat_refuses_a_field_that_is_given_both_ways():
    with pytest.raises(ConfigError, match=r"p has optim\.lr twice"):
        flat({"optim": {"lr": 1}, "optim.lr": 2}, "p")


def test_with_fields_changes_a_copy_and_makes_missing_sections():
    section = {"optim": {"lr": 1}, "probe": None}
    changed = with_fields(section, {"optim.lr": 2, "data.train": "x", "probe.shots": [1]}, "p")
    assert changed == {"optim": {"lr": 2}, "data": {"train": "x"}, "probe": {"shots": [1]}}
    assert section == {"optim": {"lr": 1}, "probe": None}


def test_with_fields_refuses_a_path_through_a_value():
    with pytest.raises(ConfigError, match=r"p sets optim\.lr, and optim is 3, no section"):
        with_fields({"optim": 3}, {"optim.lr": 2}, "p")


def test_a_field_of_a_config_is_read_and_changed_by_its_path():
    config = Config(sets={"a.b": Optim(2.0)})
    assert value_at(config, ["optim", "lr"]) == 0.1
    assert value_at(config, ["sets", "a", "b", "lr"]) == 2.0, "the name of a set may have dots"
    changed = with_field(config, ["sets", "a", "b", "lr"], 3.0)
    assert changed == Config(sets={"a.b": Optim(3.0)})
    assert config.sets["a.b"].lr == 2.0


def test_a_changed_config_is_checked_again():
    with pytest.raises(ConfigError, match="not positive"):
        with_field(Config(), ["optim", "lr"], -1.0)


def test_references_are_texts_that_name_a_part_of_a_stage_outside_of_inputs():
    section = {"optim": {"lr": "@grid/optim.lr"}, "init": "@resize", "data": {"train": "@shards/train"}, "steps": 3}
    inputs = ("data.train", "data.mixture.*.train")
    assert list(references_in(section, inputs)) == [("optim.lr", "@grid/optim.lr")]


def test_values_take_the_place_of_references_in_a_copy():
    section = {"optim": {"lr": "@grid/optim.lr", "name": "sgd"}, "steps": 3}
    assert filled(section, {"optim.lr": 0.01}) == {"optim": {"lr": 0.01, "name": "sgd"}, "steps": 3}
    assert section["optim"] == {"lr": "@grid/optim.lr", "name": "sgd"}
