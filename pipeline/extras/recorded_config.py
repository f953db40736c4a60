"""The config of a trained stage from its task.json or stage.json, which an earlier version may have written."""

from collections.abc import Mapping
from typing import Any

from pipeline.hooks import build_config
from pipeline.training_config import TrainConfig

# The hooks that bring keys; a record that names no hooks holds the keys of all that its version had.
HOOKS_OF_KEYS = {
    "pipeline.extras.branches:Branch": {"begin", "law"},
    "pipeline.extras.token_dropping:TokenDropping": {"thinning"},
    "pipeline.extras.async_evaluator:AsyncEvaluation": {"evaluate_on"},
    "pipeline.extras.best:KeepBest": {"keep_best", "patience"},
    "pipeline.extras.replays.spikes:SpikeSearch": {"health"},
}
GONE = ("activation_gb",)  # keys of earlier versions, null in almost all records


def recorded_config(record: Mapping[str, Any]) -> TrainConfig:
    """Return the config of a record: its "config", with the keys of "hooks" if it names them. Raises ConfigError."""
    values = {}
    for name, value in record["config"].items():
        if value is not None or name not in GONE:
            values[name] = value
    if "hooks" in record:
        return build_config(values, record["hooks"])
    return build_config(values, [hook for hook, keys in HOOKS_OF_KEYS.items() if not keys.isdisjoint(values)])
