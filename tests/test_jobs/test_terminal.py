"""The activity of a command: shown once, after its first second, and not at all if it ends earlier."""

import threading

import pytest

from jobs import terminal
from jobs.__main__ import main

pytestmark = pytest.mark.quick


def test_slow_command_shows_its_activity_once(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "WAIT_S", 0.05)
    monkeypatch.setattr("jobs.commands.status.status_of", lambda run: threading.Event().wait(0.5) or {})
    monkeypatch.setattr("jobs.commands.status.status_lines", lambda document: [])
    assert main(["status", "runs/x"]) == 0
    assert capsys.readouterr().err == "status: starting …\n"


def test_current_activity_is_shown_and_a_quick_command_shows_nothing(monkeypatch, capsys):
    activity = terminal.Activity()
    activity.now("reading …")
    activity.end()
    monkeypatch.setattr(terminal, "WAIT_S", 0.05)
    activity.now("reading …")
    activity.now("writing\x1b[2J …")
    activity.timer.join(60)
    activity.end()
    assert capsys.readouterr().err == "writing\\x1b[2J …\n"
    assert not activity.show(1, 2, "images"), "stdout is not a terminal"


def test_hint_omits_only_the_overrides_that_it_sets_after_the_recipe(monkeypatch):
    monkeypatch.setattr(terminal, "typed_recipe", ["my recipe.yaml", "pretrain.steps=7", "run=x"])
    text = (
        "set pretrain.steps=9, or\n  python -m jobs run RECIPE pretrain.steps=14\n  python -m jobs run RECIPE --fresh\n"
        "  python -m jobs run RECIPE --only a, then python -m jobs run RECIPE run=y"
    )
    assert terminal.as_typed(text).splitlines()[1:] == [
        "  python -m jobs run 'my recipe.yaml' run=x pretrain.steps=14",
        "  python -m jobs run 'my recipe.yaml' pretrain.steps=7 run=x --fresh",
        "  python -m jobs run 'my recipe.yaml' pretrain.steps=7 run=x --only a, "
        "then python -m jobs run 'my recipe.yaml' pretrain.steps=7 run=y",
    ]


def test_hint_omits_the_override_with_an_unknown_key(monkeypatch):
    monkeypatch.setattr(terminal, "typed_recipe", ["a.yaml", "pretrain.lr-0.01.steps=7", "pretrain.batch_size=8"])
    text = "unknown key pretrain.lr-0\n  all keys: docs/x.md, or python -m jobs plan RECIPE --resolved"
    assert terminal.as_typed(text).endswith("or python -m jobs plan a.yaml pretrain.batch_size=8 --resolved")
