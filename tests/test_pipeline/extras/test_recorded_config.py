"""Configs of this and earlier versions are read with the hooks that their keys need."""

import json

import pytest

from data.errors import ConfigError
from pipeline import config
from pipeline.extras.recorded_config import recorded_config
from tests.support.configs import FullConfig

pytestmark = pytest.mark.quick


def test_record_without_hooks_has_the_keys_of_all_extras_of_its_version() -> None:
    cfg = FullConfig(steps=10, evaluate_every=5, keep_best="accuracy")
    values = json.loads(json.dumps(config.plain(cfg)))
    read = recorded_config({"config": {**values, "activation_gb": None}})
    assert config.plain(read) == config.plain(cfg)


def test_removed_key_with_a_value_is_rejected() -> None:
    values = json.loads(json.dumps(config.plain(FullConfig(steps=10))))
    with pytest.raises(ConfigError, match="activation_gb"):
        recorded_config({"config": {**values, "activation_gb": 4.0}})


def test_record_with_hooks_has_only_their_keys() -> None:
    read = recorded_config(
        {"config": {"steps": 10, "begin": 4, "init": "x"}, "hooks": {"pipeline.extras.branches:Branch": {}}}
    )
    assert read.first_step == 4
    assert not hasattr(read, "keep_best")
