"""Inputs of stages, paths of references, and failed checks as errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from data.errors import ClusterError, ConfigError, DataError, ExitCode, PatchlineError
from jobs.cluster_config import ClusterConfig
from jobs.resolved_recipe import Campaign, CheckResult, Reads, Stage, StageKind, reference

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Part:
    train: str | None = None


@dataclass(frozen=True)
class ReaderConfig:
    init: str | None = None
    data: Part = field(default_factory=Part)
    mixture: Mapping[str, Part] = field(default_factory=dict)


class Reader(StageKind):
    name = "reader"
    config = ReaderConfig
    inputs: ClassVar = {"init": Reads.WEIGHTS, "data.train": Reads.SET, "mixture.*.train": Reads.SET}


STAGE = Stage("two", Reader(), ReaderConfig(), source="two", key="0123456789abcdef")
CAMPAIGN = Campaign(Path("/runs/x"), ClusterConfig(), (STAGE,))


def test_inputs_are_the_set_fields_and_a_star_matches_every_name() -> None:
    cfg = ReaderConfig(init="weights", mixture={"a.b": Part("@shards/a"), "c": Part()})
    assert Reader().inputs_of(cfg) == {
        "init": ("weights", Reads.WEIGHTS),
        "mixture.a.b.train": ("@shards/a", Reads.SET),
    }
    assert Reader().inputs_of(ReaderConfig()) == {}


@pytest.mark.parametrize(
    ("value", "link"),
    [("@shards/train", ("shards", "train")), ("@pretrain", ("pretrain", "")), ("shards/train", None)],
)
def test_a_reference_is_split_into_stage_and_part(value: str, link: tuple[str, str] | None) -> None:
    assert reference(value) == link


def test_a_reference_resolves_to_a_path_in_the_folder_of_its_stage() -> None:
    assert CAMPAIGN.path_of("@two/train") == "/runs/x/two-01234567/train"
    assert CAMPAIGN.path_of("s3://bucket/train") == "s3://bucket/train"
    assert CAMPAIGN.path_of("train") == str(Path.cwd() / "train")
    assert CAMPAIGN.path_of(None) is None


def test_an_unknown_stage_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="the recipe has no stage 'too'; did you mean 'two'"):
        CAMPAIGN.stage("too")


@pytest.mark.parametrize("kind", [ConfigError, DataError, ClusterError])
def test_a_failed_check_can_be_raised_as_the_original_error(kind: type[PatchlineError]) -> None:
    result = CheckResult.of(kind("lr is 0\n  expected more\n  set lr=0.1"), "pretrain")
    assert (result.level, result.text, result.remedy) == ("FAIL", "lr is 0", "  expected more\n  set lr=0.1")
    error = result.error()
    assert type(error) is kind
    assert str(error) == "lr is 0\n  expected more\n  set lr=0.1"
    assert error.exit_code == result.exit_code != ExitCode.DONE
