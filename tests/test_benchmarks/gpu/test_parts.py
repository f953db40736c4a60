"""The parts of `make gpu`: their order, that each can be imported, and that all of them fit the lent minutes."""

import importlib

import pytest

from benchmarks.gpu.__main__ import BUDGET_S
from benchmarks.gpu.parts import SIZES, Context, parts_of
from benchmarks.gpu.steps import CONTENDERS

pytestmark = pytest.mark.quick

SPEED = ("steps", "engine", "stock", "tars")


@pytest.mark.parametrize("device", SIZES)
def test_every_part_names_a_function_that_takes_its_arguments(device):
    for part in parts_of(device):
        module, _, name = part.function.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        assert {*part.arguments, "context"} == set(function.__annotations__) - {"return"}, part.name


def test_correctness_comes_before_speed_and_the_largest_model_first():
    names = [part.name for part in parts_of("cuda")]
    first_of_speed = min(number for number, name in enumerate(names) if name.startswith(SPEED))
    assert not any(name.startswith(SPEED) for name in names[:first_of_speed])
    assert all(name.startswith(SPEED) for name in names[first_of_speed:])
    assert names[first_of_speed] == "steps H/14"
    assert names[:5] == [
        "machine",
        "tests",
        "campaign ray, ZeRO 1",
        "campaign processes, ZeRO 2, exact",
        "campaign processes, ZeRO 3, compiled",
    ]
    for model in ("H/14", "L/16", "B/16"):
        assert f"steps {model}" in names
        assert f"engine {model}" in names
        assert f"stock {model}" in names
    assert {"ours", "ours, compiled", "timm, compiled", "transformers"} <= set(CONTENDERS)


def test_speed_measurements_run_alone_on_the_device():
    for part in parts_of("cuda"):
        assert part.is_alone == (part.name.startswith(SPEED) or part.name == "machine")


def test_our_engine_and_stock_deepspeed_run_in_different_processes():
    functions = {part.function for part in parts_of("cuda") if part.section == "engines"}
    assert functions == {"engines.time_ours", "engines.time_stock"}


def test_parts_take_less_than_a_third_of_the_budget_and_have_unique_names():
    parts = parts_of("cuda")
    assert max(part.limit_s for part in parts) < BUDGET_S / 3
    assert BUDGET_S <= 570
    assert len({part.name for part in parts}) == len(parts)


def test_reported_row_is_a_separate_line(tmp_path):
    context = Context("cpu", tmp_path, tmp_path / "rows")
    context.report(model="B/16", step_s=0.5)
    context.report(note="second")
    assert (tmp_path / "rows").read_text() == '{"model": "B/16", "step_s": 0.5}\n{"note": "second"}\n'
