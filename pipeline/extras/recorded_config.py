"""Read a trained stage's config from task.json or stage.json, including files written by earlier versions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline import config
from pipeline.config import Config
from pipeline.hooks import build_config
from pipeline.training_config import TrainConfig

# Hooks that add config keys. An old record that does not list its hooks contains the keys of all hooks of its version.
HOOKS_OF_KEYS = {
    "pipeline.extras.branches:Branch": {"begin", "law"},
    "pipeline.extras.token_dropping:TokenDropping": {"thinning"},
    "pipeline.extras.async_evaluator:AsyncEvaluation": {"evaluate_on"},
    "pipeline.extras.best:KeepBest": {"keep_best", "patience"},
    "pipeline.extras.replays.spikes:SpikeSearch": {"health"},
    "pipeline.extras.engine_check.hook:EngineCheck": {"check_engine"},
    "pipeline.extras.slow_worker.hook:SlowWorkers": {"name_slow_workers"},
}
REMOVED_KEYS = ("activation_gb",)  # removed keys, null in almost all old records


def recorded_config(record: Mapping[str, Any]) -> TrainConfig:
    """Build the config from a record's "config" and, if present, the hooks in its "hooks".

    Raises ConfigError if a value is invalid or a hook is unknown.
    """
    values = {}
    for name, value in record["config"].items():
        if value is not None or name not in REMOVED_KEYS:
            values[name] = value
    if "hooks" in record:
        return build_config(values, record["hooks"])
    return build_config(values, [hook for hook, keys in HOOKS_OF_KEYS.items() if not keys.isdisjoint(values)])


def build_recorded(kind: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Build a config from plain values in a record, which an earlier version of Patchline may have written.

    Keys that no longer exist are ignored if their value is null. Raises ConfigError like `build`.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    usable = {name: value for name, value in values.items() if name in known or value is not None}
    return config.build(kind, usable, where)


def with_defaults(cfg: Config, names: str) -> Config:
    """Return the config with the named fields reset to their defaults; unknown field names are ignored."""
    defaults = {}
    for field in dataclasses.fields(cfg):
        if field.name in names.split():
            defaults[field.name] = config.default_of(field)
    return dataclasses.replace(cfg, **defaults)  # type: ignore[type-var]
