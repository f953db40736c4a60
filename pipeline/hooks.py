"""Hooks: how extras attach to the training loop, with their own recipe keys and methods called at certain moments.

1. A task lists its hooks by name, each with the options of its constructor:
       {"config": {…}, "job": {…}, "hooks": {"pipeline.extras.best:KeepBest": {}}}
2. `load_classes` imports them; `compose` creates a config class with the keys of TrainConfig and of the hooks.
3. `pipeline.start` creates the hooks; the loop calls their methods, which do nothing by default.

A hook must not wait for the device: it computes only from plain data on the host.

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

if TYPE_CHECKING:  # both import torch, and recipes are checked without it
    from pipeline.worker import Job, Progress, Setup

HookOptions = Mapping[str, Mapping[str, Any]]  # "module:Class" → arguments of its constructor


class ExportChoice(TypedDict):
    """The step whose weights a stage exports instead of the last, and the metric value that it was chosen by."""

    metric: str
    value: float
    step: int


class StageEvaluator:
    """Evaluates a stage during training and at its end; this base class, for stages without sets, does nothing.

    The evaluator that runs on the training workers is in pipeline/evaluation/in_training.py; a hook may replace it.
    """

    def __init__(self, cfg: TrainConfig, job: "Job", last_step: int) -> None:
        self.cfg = cfg
        self.job = job
        self.last_step = last_step

    def begin(self, step: int) -> None:
        """Start to measure the time spent on evaluations; training begins now, after `step` completed steps."""

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step; the last step is evaluated by `evaluate_at_end` instead."""
        return False

    def request(self, worker: "Setup", step: int) -> bool:
        """Collective: have a step evaluated elsewhere after its commit; return False if that is impossible."""
        return False

    def resume(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: evaluate the step that an attempt starts from, if due; return False if stopped meanwhile."""
        return True

    def evaluate_during_training(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: evaluate between two steps; return False if the run was requested to stop meanwhile."""
        return True

    def evaluate_at_end(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: evaluate the weights that the stage ends with; they are already committed."""


class Hook:
    """Base class of hooks into the training of a stage; each method does nothing by default.

    A subclass may define `Config`, a frozen dataclass that adds keys to TrainConfig, and `evaluator`, a class that
    replaces the evaluator of the training workers.
    """

    Config: ClassVar[type[TrainConfig]] = TrainConfig
    evaluator: ClassVar[type[StageEvaluator] | None] = None

    def __init__(self, cfg: Any, job: "Job", **options: Any) -> None:
        """Store the stage's config, which has the fields of `Config`; subclasses accept the task's options."""
        self.cfg = cfg
        self.job = job

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: prepare for an attempt, after its checkpoint was loaded and before its first step."""

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
        """Return which of these samples have no weight in a step (from 0), as booleans; None if all have weight."""
        return None

    def before_save(self, progress: "Progress") -> None:
        """Collective: change what will be saved in the checkpoint of this step."""

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Add values to a record ("train", "spike") before it is written; return a remark for its log line."""
        return ""

    def is_over(self, progress: "Progress") -> str:
        """Return the reason if the stage ends at this step, which has been evaluated, else ""; rank 0 only."""
        return ""

    def choose(self) -> ExportChoice | None:
        """Return the step whose weights to export; None for the last; called after the last step, on rank 0 only."""
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
                f"unknown hook {name}: {error}\n  expected module:Class, as in pipeline.extras.best:KeepBest"
            ) from None
        config.require(
            isinstance(loaded, type) and issubclass(loaded, Hook), f"{name} is not a hook; expected a subclass of Hook"
        )
        classes.append(loaded)
    return classes


def compose(*parts: type[TrainConfig]) -> type[TrainConfig]:
    """Return a config class with the (flat) keys of all parts, which are subclasses of TrainConfig."""
    return _composed(parts)


@cache
def _composed(parts: tuple[type[TrainConfig], ...]) -> type[TrainConfig]:
    # Cached, so that the same parts give the same class and its instances compare equal.
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
    """Return the keys that a part adds to TrainConfig."""
    core = {field.name for field in fields(TrainConfig)}
    return [field.name for field in fields(part) if field.name not in core]


def is_used(cfg: TrainConfig, part: type[TrainConfig]) -> bool:
    """Return whether a config sets any key that this part adds to a value other than its default."""
    for field in fields(part):
        default = config.default_of(field)
        if field.name in own_keys(part) and getattr(cfg, field.name, default) != default:
            return True
    return False


def plain_values(cfg: TrainConfig, parts: Sequence[type[TrainConfig]] = ()) -> dict[str, Any]:
    """Return the config as nested plain values, with only the keys of TrainConfig and of these parts."""
    known = {field.name for field in fields(compose(*parts))}
    return {name: value for name, value in config.plain(cfg).items() if name in known}


def build_config(values: object, names: Iterable[str] = ()) -> TrainConfig:
    """Build the config of a task with these hooks."""
    parts = dict.fromkeys(hook.Config for hook in load_classes(names) if hook.Config is not TrainConfig)
    return config.build(compose(*parts), values, "config")


def masked_by(hooks: Sequence[Hook], step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
    """Return which samples any of the hooks masks in a step; None if none of them masks any."""
    masked_by_any = None
    for hook in hooks:
        masked = hook.masked(step, shard, sample)
        if masked is None:
            continue
        masked_by_any = masked if masked_by_any is None else masked_by_any | masked
    return masked_by_any
