"""The search for slow workers is on by default, and a recipe can turn it off."""

from types import SimpleNamespace
from typing import Any

from jobs.extras.slow_worker import SlowWorkerExtra
from pipeline.config import tagged
from pipeline.hooks import build_config, load_classes

CONTEXT: Any = None  # not used


def test_search_is_on_by_default_and_can_be_turned_off():
    extra = SlowWorkerExtra()
    hooks = extra.hooks(extra.config(steps=1), CONTEXT)
    (hook,) = load_classes(hooks)
    assert hook.Config is extra.config
    assert extra.hooks(extra.config(steps=1, name_slow_workers=False), CONTEXT) == {}
    # A replay trains with a config that does not have the key.
    without_key: Any = SimpleNamespace()
    assert extra.hooks(without_key, CONTEXT) == {}


def test_key_may_change_on_resume():
    config = build_config({"steps": 1, "name_slow_workers": False}, [SlowWorkerExtra.hook])
    assert "name_slow_workers" in tagged(config, "free")
