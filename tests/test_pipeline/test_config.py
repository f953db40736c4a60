"""Typed configuration: merging, messages, resume tags."""

import dataclasses
import math
from typing import ClassVar, get_args, get_type_hints

import pytest

from data.errors import ConfigError
from data.images.augment import AugmentConfig
from data.remote.config import CacheConfig
from jobs.cluster_config import ClusterConfig
from jobs.stages import fewshot, resize
from pipeline import config
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig, MixedConfig, ProbeConfig, TrainConfig
from tests.support.campaigns import KINDS
from tests.support.configs import FullConfig

pytestmark = pytest.mark.quick

PackConfig = KINDS["pack"].config
SetConfig = get_args(get_type_hints(PackConfig)["sets"])[1]

TAGGED = [
    *(TrainConfig, FullConfig, DataConfig, MixedConfig, OptimConfig, ScheduleConfig, ClusterConfig),
    *(
        resize.ResizeConfig,
        fewshot.FewShotStageConfig,
        PackConfig,
        SetConfig,
    ),
]


@pytest.mark.parametrize("kind", TAGGED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_field_has_a_resume_tag(kind):
    nested = {f.name for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.type) or "Config" in str(f.type)}
    fields = {field.name for field in dataclasses.fields(kind)}
    tagged = set(config.resume_tags(kind))
    assert fields - nested <= tagged, "a new field needs a tag: free, warn or forbid"
    assert tagged <= fields, "a tag names a field that is gone"


def test_tags_apply_to_named_sections_and_classes_without_tags():
    cfg = TrainConfig(steps=1, data=DataConfig(mixture={"a": MixedConfig("x", 1.0)}))
    free, forbid = config.tagged(cfg, "free"), config.tagged(cfg, "forbid")
    assert forbid["data.mixture.a.weight"] == 1.0
    assert "data.augment.min_area" in forbid
    assert "data.cache.limit_bytes" in free
    assert not any("cache" in name for name in forbid)


@dataclasses.dataclass(frozen=True)
class Grown:
    """A config whose fields were all added later, except the first."""

    steps: int = 1
    seed: int | None = None
    partial: bool = False
    rename: dict[str, str] = dataclasses.field(default_factory=dict)

    LATER: ClassVar[tuple[str, ...]] = ("seed", "partial", "rename")


def test_later_field_is_omitted_at_its_default_but_not_if_empty():
    assert config.tagged(Grown(), "forbid") == {"steps": 1}
    assert config.tagged(Grown(seed=0), "forbid") == {"steps": 1, "seed": 0}
    assert config.tagged(Grown(partial=True, rename={"a": "b"}), "forbid").keys() == {"steps", "partial", "rename"}
    # Not for a value of another type that merely equals the default in Python.
    assert config.tagged(Grown(partial=0), "forbid") == {"steps": 1, "partial": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"lrr": 1}}, r"unknown key s\.optim\.lrr; did you mean 'lr'\?"),
        ({"batch_sise": 1}, r"unknown key s\.batch_sise; did you mean 'batch_size'\?"),
        ({"batch_size": "many"}, r"s\.batch_size is many, expected a whole number"),
        ({"optim": {"name": "adma"}}, r"s\.optim\.name is adma; did you mean 'adam'\?\n  expected one of adam, sgd"),
        (
            {"optim": 3},
            r"s\.optim is 3, expected a section with the keys name, lr, .*\n  for example, set s\.optim\.lr=3",
        ),
    ],
)
def test_wrong_value_is_reported_with_key_value_and_expectation(changes, message):
    with pytest.raises(ConfigError, match=message):
        config.build(TrainConfig, {"data": {"train": "x"}, **changes}, "s")


# Fields that a config requires besides the wrong one; other configs require none.
NEEDED = {
    TrainConfig: {"steps": 1, "data": {"train": "x"}},
    FullConfig: {"steps": 1, "data": {"train": "x"}},
    MixedConfig: {"train": "x", "weight": 1.0},
    fewshot.FewShotStageConfig: {"init": "x"},
    resize.ResizeConfig: {"init": "x"},
    PackConfig: {"sets": {"train": {"source": "digits"}}},
    SetConfig: {"source": "digits"},
}


def numeric_fields() -> list[tuple[type, str, bool, bool]]:
    """Return (config class, field, is a float, is a list) for every numeric field of a recipe."""
    fields = []
    for kind in (*TAGGED, AugmentConfig, CacheConfig, ProbeConfig):
        for name, hint in get_type_hints(kind).items():
            types = {hint, *get_args(hint)}
            for option in get_args(hint):
                types.update(get_args(option))
            if float in types or int in types:
                fields.append((kind, name, float in types, "[" in str(hint)))
    return fields


@pytest.mark.parametrize(
    ("kind", "field", "is_float", "is_list"), numeric_fields(), ids=lambda value: getattr(value, "__qualname__", None)
)
def test_negative_infinite_and_undefined_numbers_are_refused_in_every_config(kind, field, is_float, is_list):
    wrong = [-1]
    if field == "seed":
        wrong = [2**63]  # any 64-bit number is a valid seed
    if is_float:
        wrong += [math.nan, math.inf, -math.inf]
    for value in wrong:
        values = {**NEEDED.get(kind, {}), field: [value] if is_list else value}
        if field == "passes":
            del values["steps"]
        with pytest.raises(ConfigError, match=rf"\b{field} (is|are) [\[(]?{value}\b.*, expected"):
            config.build(kind, values, "s")


def test_search_finds_all_numeric_fields():
    """The test above must not pass without checking anything."""
    fields = {f"{kind.__name__}.{field}" for kind, field, _, _ in numeric_fields()}
    expected = "TrainConfig.stall_s DataConfig.lanes ProbeConfig.shots SetConfig.classes ClusterConfig.backoff_s"
    assert set(expected.split()) <= fields
    assert len(fields) > 60


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "a b", "é", "a\n", "x" * 65])
def test_name_unsuitable_as_a_file_name_is_refused(name):
    digits = {"source": "digits"}
    with pytest.raises(ConfigError, match=r"a data set is named .*\n  expected 1 to 64 of the characters"):
        config.build(PackConfig, {"sets": {"train": digits, name: digits}}, "s")
    part = {"train": "x", "weight": 1}
    with pytest.raises(ConfigError, match=r"a set of data\.mixture is named"):
        config.build(TrainConfig, {"steps": 1, "data": {"mixture": {name: part}}}, "s")


def test_values_override_defaults_of_nested_configs():
    defaults = TrainConfig(
        steps=5, data=DataConfig(train="x"), optim=OptimConfig(lr=0.5, schedule=ScheduleConfig(decay="cosine"))
    )
    built = config.build(TrainConfig, {"optim": {"schedule": {"warmup_steps": 3}}, "zero": 3}, "s", defaults)
    assert (built.optim.lr, built.optim.schedule.decay, built.optim.schedule.warmup_steps) == (0.5, "cosine", 3)
    assert built.zero == 3
    assert isinstance(built.data.augment, AugmentConfig)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.zero = 1  # type: ignore[misc]
