"""Reading values as people write them; every number on the right was calculated by hand."""

from typing import Any, Literal

import pytest

from data.errors import ConfigError
from pipeline.values import amount, counted, duration, read_value, shown, significant

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("written", "hint", "key", "value"),
    [
        ("30min", float, "timeout_s", 1800.0),
        ("2h", float, "timeout_s", 7200.0),
        ("1.5 h", float | None, "wait_s", 5400.0),
        ("250ms", float, "backoff_s", 0.25),
        (90, float, "timeout_s", 90),
        ("80GB", int, "limit_bytes", 80_000_000_000),
        ("80GiB", int, "limit_bytes", 85_899_345_920),
        ("1.1GiB", int, "limit_bytes", 1_181_116_006),  # 1,181,116,006.4
        ("4.1GB", int, "limit_bytes", 4_100_000_000),  # 4,099,999,999.9999995 in binary
        ("2.01k", int, "steps", 2010),
        ("0.5TB", int, "limit_bytes", 500_000_000_000),
        ("80GiB", float | None, "gpu_memory_gb", 80.0),
        ("80GB", float | None, "gpu_memory_gb", 74.50580596923828),
        ("512MiB", float | None, "gpu_memory_gb", 0.5),
        ("10k", int | None, "steps", 10_000),
        ("1.5M", int, "steps", 1_500_000),
        (1e4, int, "steps", 10_000),
        ("64", int, "steps", 64),
        ("1e-3", float, "lr", 0.001),
        ("yes", bool, "compile", True),
        ("off", bool, "compile", False),
        (1, bool, "compile", True),
        (None, int | None, "steps", None),
        ([1, "5"], tuple[int, ...], "shots", [1, 5]),
        ("adam", Literal["adam", "sgd"], "name", "adam"),
        ({"a": 1}, Any, "values", {"a": 1}),
        (7, str, "entity", 7),  # digits that OmegaConf reads as a number
    ],
)
def test_value_is_read_as_people_write_it(written: object, hint: Any, key: str, value: object) -> None:
    read = read_value(written, hint, key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("written", "hint", "key", "message"),
    [
        ("80", int, "x", None),
        ("80G", int, "limit_bytes", "limit_bytes is 80G, expected a number of bytes, or one with a unit"),
        ("30min", int, "steps", "steps is 30min, expected a whole number"),
        ("10k", float, "lr", "lr is 10k, expected a number"),
        ("1.5", int, "steps", "steps is 1.5, expected a whole number"),
        ("3,5", float, "lr", "lr is 3,5, expected a number\n  set lr=3.5"),
        (True, int, "steps", "steps is true, expected a whole number"),
        (True, float, "lr", "lr is true, expected a number"),
        ("maybe", bool, "flip", "flip is maybe, expected true or false"),
        (None, int, "steps", "steps is null, expected a whole number"),
        ([1], float, "lr", r"lr is \[1\], expected a number"),
        (["x"], list[int], "shots", "shots is x, expected a whole number"),
        ("x", dict[str, str], "environment", "environment is x, expected a section\n  set environment.NAME=…"),
    ],
)
def test_unreadable_value_is_reported_with_the_expectation(
    written: object, hint: Any, key: str, message: str | None
) -> None:
    if message is None:
        assert read_value(written, hint, key) == 80
        return
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_value(written, hint, key)


def test_value_is_formatted_as_in_a_recipe() -> None:
    assert shown({"a": None, "b": [True, "", 1.5]}) == '{a: null, b: [true, "", 1.5]}'
    assert shown("x" * 200) == "x" * 80 + "…"


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (65, "1m05s"), (7500, "2h05m"), (273_600, "3d04h")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.34, "12.3"), (384, "384"), (384.25, "384"), (41_234, "41.2k"), (4.2e9, "4.2G")],
)
def test_amounts_are_short(value, text):
    assert amount(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "node", "1 node"),
        (3, "node", "3 nodes"),
        (2, "stretch", "2 stretches"),
        (5, "class", "5 classes"),
        (0, "GPU", "0 GPUs"),
    ],
)
def test_count_has_the_plural_of_its_noun(number, noun, text):
    assert counted(number, noun) == text


@pytest.mark.parametrize(("value", "text"), [(0.423, "0.4230"), (2.8412, "2.841"), (12_345.6, "12.3k")])
def test_significant_digits_are_kept_at_any_magnitude(value, text):
    assert significant(value, 4) == text
