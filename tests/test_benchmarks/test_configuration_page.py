"""docs/configuration.md matches the current dataclasses and explains every field."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from benchmarks.configuration_page import all_keys, configuration_page
from jobs.cluster_config import ClusterConfig
from jobs.extras.monitor.trackers_config import TrackersConfig
from jobs.extras.studies.expand import SweepConfig
from models.configs import CONFIGS
from tests.support.campaigns import KINDS

pytestmark = pytest.mark.quick

COMMITTED = Path(__file__).parents[2] / "docs" / "configuration.md"
CONFIGS = {
    "cluster": ClusterConfig,
    "trackers": TrackersConfig,
    "sweep": SweepConfig,
    **{name: kind.config for name, kind in KINDS.items()},
    **{f"model family {name}": config for name, config in CONFIGS.items()},
}


@dataclass(frozen=True)
class Inner:
    """What a part is made of."""

    size: int = 3  # of it


@dataclass(frozen=True)
class Example:
    """A config that shows every way of writing a field.

    This paragraph is for readers of the source.
    """

    # which way
    # to go
    way: Literal["left", "right"] = "left"
    kind: Literal[
        "a",  # the first
        "b",  # the second
    ] = "a"
    wait_s: float | None = None  # type: ignore[assignment]  # between two looks; None: never
    sizes: tuple[int, ...] = (1, 2)  # of a | b
    inner: Inner = field(default_factory=Inner)  # the part
    parts: dict[str, Inner] = field(default_factory=dict)  # more of them
    silent: bool = False

    RESUME: ClassVar[dict[str, str]] = {"way": "warn", "inner": "free"}


def test_committed_page_is_up_to_date() -> None:
    written = COMMITTED.read_text() if COMMITTED.exists() else ""
    assert written == configuration_page(), (
        "docs/configuration.md is out of date\n"
        "  write it again: python -m benchmarks.configuration_page > docs/configuration.md"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_has_a_meaning(name: str) -> None:
    without = [key.name for key in all_keys(CONFIGS[name]) if not key.meaning]
    assert not without, f"write a comment beside these fields: {', '.join(without)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_a_row_of_the_page(name: str) -> None:
    page = COMMITTED.read_text()
    for config_field in fields(CONFIGS[name]):
        assert f"| `{config_field.name}` |" in page


def test_keys_of_finished_recipes_are_on_the_page() -> None:
    """Keys from all depths, looked up by hand in the source: default, values, resume tag."""
    page = COMMITTED.read_text()
    for row in (
        "| `workers` | `1` | whole number | free |",
        "| `data.mixture.<name>.weight` | required | number | forbid |",
        "| `data.cache.limit_bytes` | `200GiB` | whole number, bytes | free |",
        "| `optim.schedule.decay` | `linear` | `linear`, `cosine`, `rsqrt` or `constant` | forbid |",
        "| `optim.schedule.decay` | `cosine` |",  # finetune's
        "| `stall_s` | `600.0` | number, seconds | free |",
        "| `probe.shots` | `[1, 5, 10, 25]` | list of whole numbers | warn |",  # while training
        "| `probe.shots` | `[1, 5, 10, 25]` | list of whole numbers | forbid |",  # the few-shot stage
        "| `pool` | `gap` | `token`, `gap` or `map` | forbid |",  # Axial
        "| `model.classes` | required | whole number |",  # in the table of the keys that people change
        "| `image_size` | required | list of 2 whole numbers | forbid |",  # of a family
        "| `H` | 1280 | 32 | 5120 | 16 |",
    ):
        assert row in page


def test_row_has_default_values_tag_and_comment_of_the_field() -> None:
    rows = {key.name: (key.default, key.values, key.resume, key.meaning) for key in all_keys(Example)}
    assert rows == {
        "way": ("`left`", "`left` or `right`", "warn", "which way to go"),
        "kind": ("`a`", "`a` or `b`", "forbid", "`a`: the first; `b`: the second"),
        "wait_s": ("`null`", "number, or `null`, seconds", "forbid", "between two looks; `null`: never"),
        "sizes": ("`[1, 2]`", "list of whole numbers", "forbid", "of a | b"),
        "inner": ("see below", "section", "free", "the part"),
        "inner.size": ("`3`", "whole number", "free", "of it"),
        "parts": ("`{}`", "sections by name", "forbid", "more of them"),
        "parts.<name>.size": ("`3`", "whole number", "forbid", "of it"),
        "silent": ("`false`", "`true` or `false`", "forbid", ""),
    }
