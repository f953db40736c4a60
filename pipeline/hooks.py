"""Hooks attach extras to the training loop: each hook adds its own recipe keys and callbacks.

1. A task lists its hooks by name, each with options for its constructor:
       {"config": {…}, "job": {…}, "hooks": {"pipeline.extras.best:KeepBest": {}}}
2. `load_classes` imports the hooks; `compose` creates a config class with the keys of TrainConfig and of all hooks.
3. `pipeline.start` instantiates the hooks; the loop calls their methods, which do nothing by default.

A hook must not synchronise with the device: it only uses plain data on the host.

In:  {"pipeline.extras.best:KeepBest": {}}
Out: a config class with the fields of TrainConfig, `keep_best` and `patience`, and a KeepBest in `Worker.hooks`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import numpy as np

from pipeline import config
from pipeline.training_config import TrainConfig

if TYPE_CHECKING:  # these modules import torch, which recipe checks must not
    from pipeline.worker import Job, Progress, Setup

HookOptions = Mapping[str, Mapping[str, Any]]  # "module:Class" → arguments of its constructor


class ExportChoice(TypedDict):
    """The step whose weights a stage exports instead of the last step's, and the metric value that determined it."""

    metric: str
    value: float
    step: int


class StageEvaluator:
    """Evaluates a stage during training and at its end.

    This base class, for stages without evaluation sets, does nothing. The evaluator that runs on the training
    workers is in pipeline/evaluation/in_training.py; a hook may replace it.
    """

    def __init__(self, cfg: TrainConfig, job: "Job", last_step: int) -> None:
        self.cfg = cfg
        self.job = job
        self.last_step = last_step

    def begin(self, step: int) -> None:
        """Start measuring the time spent on evaluations; called as training starts, after `step` completed steps."""

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step; False for the last step, which `evaluate_at_end` evaluates."""
        return False

    def request(self, worker: "Setup", step: int) -> bool:
        """Collective: request evaluation of a committed step on other workers; return False if that is impossible."""
        return False

    def resume(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: evaluate the step that an attempt resumes from, if due; return False if a stop was requested."""
        return True

    def evaluate_during_training(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: evaluate between two steps; return False if a stop was requested in the meantime."""
        return True

    def evaluate_at_end(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: evaluate the stage's final weights, which are already committed."""


class Hook:
    """Base class for hooks into a stage's training; by default each method does nothing.

    A subclass may define `Config`, a frozen dataclass that adds keys to TrainConfig, and `evaluator`, a class that
    replaces the evaluator of the training workers.
    """

    Config: ClassVar[type[TrainConfig]] = TrainConfig
    evaluator: ClassVar[type[StageEvaluator] | None] = None

    def __init__(self, cfg: Any, job: "Job", **options: Any) -> None:
        """Store the stage's config, which includes the fields of `Config`; `options` come from the stage's task."""
        self.cfg = cfg
        self.job = job

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: prepare for an attempt; called after its checkpoint is loaded and before its first step."""

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
        """Return a boolean array of the samples to mask in a step (counted from 0), or None to mask nothing."""
        return None

    def before_save(self, progress: "Progress") -> None:
        """Collective: update state that is about to be saved in this step's checkpoint."""

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Add values to a record ("train", "spike") before it is written; return text to append to its log line."""
        return ""

    def is_over(self, progress: "Progress") -> str:
        """Return the reason to end the stage after this (evaluated) step, or "" to continue; called on rank 0 only."""
        return ""

    def choose(self) -> ExportChoice | None:
        """Return the step whose weights are exported, or None for the last; called on rank 0 after the last step."""
        return None


def load_classes(names: Iterable[str]) -> list[type[Hook]]:
    """Import hook classes by name, such as "pipeline.extras.best:KeepBest". Raises ConfigError for an unknown name."""
    classes = []
    for name in names:
        module, _, class_name = name.partition(":")
        try:
            loaded = getattr(import_module(module), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise config.ConfigError(
                f"unknown hook {name}: {error}\n  expected module:Class, for example pipeline.extras.best:KeepBest"
            ) from None
        config.require(
            isinstance(loaded, type) and issubclass(loaded, Hook),
            f"{name} is not a hook; expected a subclass of pipeline.hooks.Hook",
        )
        classes.append(loaded)
    return classes


def compose(*parts: type[TrainConfig]) -> type[TrainConfig]:
    """Return a config class that combines the flat keys of `parts`: TrainConfig and its subclasses, in any number."""
    return _composed(tuple(part for part in dict.fromkeys(parts) if part is not TrainConfig))


@cache
def _composed(parts: tuple[type[TrainConfig], ...]) -> type[TrainConfig]:
    # Cached: the same parts must return the same class, so that its instances compare equal.
    if not parts:
        return TrainConfig
    if len(parts) == 1:
        return parts[0]
    owner_of_key: dict[str, type] = {}
    for part in parts:
        for key in own_keys(part):
            assert key not in owner_of_key, f"{part.__name__} and {owner_of_key[key].__name__} both have the key {key}"
            owner_of_key[key] = part
    return dataclass(frozen=True)(type("StageConfig", parts, {"__doc__": TrainConfig.__doc__}))


def own_keys(part: type[TrainConfig]) -> list[str]:
    """Return the keys that a subclass adds to TrainConfig."""
    core = {field.name for field in fields(TrainConfig)}
    return [field.name for field in fields(part) if field.name not in core]


def is_used(cfg: TrainConfig, part: type[TrainConfig]) -> bool:
    """Return whether any key that `part` adds to TrainConfig differs from its default in this config."""
    for field in fields(part):
        default = config.default_of(field)
        if field.name in own_keys(part) and getattr(cfg, field.name, default) != default:
            return True
    return False


def plain_values(cfg: TrainConfig, parts: Sequence[type[TrainConfig]] = ()) -> dict[str, Any]:
    """Convert a config to nested plain values, keeping only the keys of TrainConfig and of `parts`."""
    known = {field.name for field in fields(compose(*parts))}
    return {name: value for name, value in config.plain(cfg).items() if name in known}


def build_config(values: object, names: Iterable[str] = ()) -> TrainConfig:
    """Build a task's config from plain values, including the keys that the named hooks add."""
    return config.build(compose(*(hook.Config for hook in load_classes(names))), values, "config")


def masked_by(hooks: Sequence[Hook], step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
    """Return a boolean array of the samples that any hook masks in a step, or None if no hook masks any."""
    masked_by_any = None
    for hook in hooks:
        masked = hook.masked(step, shard, sample)
        if masked is None:
            continue
        masked_by_any = masked if masked_by_any is None else masked_by_any | masked
    return masked_by_any
