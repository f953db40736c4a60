"""What an extra can attach to the training loop: recipe keys of its own, and a few moments of a stage.

1. A task names its hooks as text, each with the options of its constructor:
       {"config": {…}, "job": {…}, "hooks": {"pipeline.extras.best:KeepBest": {}}}
2. `load_classes` imports them, and `compose` makes one config class of TrainConfig and the keys that they bring.
3. `pipeline.start` creates the hooks; the loop calls their methods, all of which do nothing by default.

A hook adds no wait for the device: what it computes depends on plain data of the host.

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

if TYPE_CHECKING:  # both import torch, without which a recipe is checked
    from pipeline.worker import Job, Progress, Setup

HookOptions = Mapping[str, Mapping[str, Any]]  # "module:Class" → what its constructor is given


class ExportChoice(TypedDict):
    """Holds the step whose weights a stage exports instead of the last, and the value that it was chosen by."""

    metric: str
    value: float
    step: int


class StageEvaluator:
    """Evaluates a stage during training and at its end; this one, of a stage without sets, evaluates nothing.

    pipeline/evaluation/in_training.py has the evaluator of the training workers, which a hook may replace.
    """

    def __init__(self, cfg: TrainConfig, job: "Job", last_step: int) -> None:
        self.cfg = cfg
        self.job = job
        self.last_step = last_step

    def begin(self, step: int) -> None:
        """Start to measure the price of evaluations: the steps so far are complete, training begins now."""

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate between this step and the next; the last one is evaluated at the end."""
        return False

    def request(self, worker: "Setup", step: int) -> bool:
        """Collective: have a step evaluated elsewhere, once its save is committed; return False if nobody can."""
        return False

    def resume(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: at the start of an attempt, evaluate its step if that is due; return False if stopped in that."""
        return True

    def evaluate_during_training(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: evaluate between two steps; return False if the run was asked to stop meanwhile."""
        return True

    def evaluate_at_end(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: evaluate the weights that the stage ends with, which are committed."""


class Hook:
    """Takes part in the training of a stage. Each method does nothing by default.

    A subclass may bring `Config`, a frozen dataclass with more keys than TrainConfig has, and `evaluator`, which
    evaluates in place of the training workers.
    """

    Config: ClassVar[type[TrainConfig]] = TrainConfig
    evaluator: ClassVar[type[StageEvaluator] | None] = None

    def __init__(self, cfg: Any, job: "Job", **options: Any) -> None:
        """Take the stage's config, which has the fields of `Config`, and the options that the task names."""
        self.cfg = cfg
        self.job = job

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: prepare for an attempt, whose checkpoint has been loaded and whose first step comes next."""

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
        """Return which of these samples have no weight in a step, counted from 0, as booleans; None: all have one."""
        return None

    def before_save(self, progress: "Progress") -> None:
        """Collective: change what the checkpoint of this step is going to hold."""

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Add to the values of a record ("train", "spike") before it is written; return a remark for its log line."""
        return ""

    def is_over(self, progress: "Progress") -> str:
        """Return why the stage ends at this step, which has been evaluated, or ""; called on rank 0 alone."""
        return ""

    def choose(self) -> ExportChoice | None:
        """Return the step whose weights are exported; None: the last; called on rank 0 alone, after the last step."""
        return None


def load_classes(names: Iterable[str]) -> list[type[Hook]]:
    """Import the hooks that a task names: "pipeline.extras.best:KeepBest". Raises ConfigError for an unknown name."""
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
            isinstance(loaded, type) and issubclass(loaded, Hook), f"{name} is no hook; expected a subclass of Hook"
        )
        classes.append(loaded)
    return classes


def compose(*parts: type[TrainConfig]) -> type[TrainConfig]:
    """Return a config class with the keys of all parts, each a subclass of TrainConfig; its keys are flat."""
    return _composed(parts)


@cache
def _composed(parts: tuple[type[TrainConfig], ...]) -> type[TrainConfig]:
    # Cached: the same parts make the same class, of which configs compare equal.
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
    """Return the keys that a part adds to those of TrainConfig."""
    core = {field.name for field in fields(TrainConfig)}
    return [field.name for field in fields(part) if field.name not in core]


def is_used(cfg: TrainConfig, part: type[TrainConfig]) -> bool:
    """Return whether a config has any key that this part adds at another value than the default."""
    for field in fields(part):
        default = config.default_of(field)
        if field.name in own_keys(part) and getattr(cfg, field.name, default) != default:
            return True
    return False


def plain_values(cfg: TrainConfig, parts: Sequence[type[TrainConfig]] = ()) -> dict[str, Any]:
    """Return the config as nested plain values, with the keys of TrainConfig and of these parts alone."""
    known = {field.name for field in fields(compose(*parts))}
    return {name: value for name, value in config.plain(cfg).items() if name in known}


def build_config(values: object, names: Iterable[str] = ()) -> TrainConfig:
    """Return the config of a task that names these hooks."""
    parts = dict.fromkeys(hook.Config for hook in load_classes(names) if hook.Config is not TrainConfig)
    return config.build(compose(*parts), values, "config")


def masked_by(hooks: Sequence[Hook], step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
    """Return which of these samples have no weight in a step by any of the hooks; None if all have one."""
    together = None
    for hook in hooks:
        masked = hook.masked(step, shard, sample)
        if masked is None:
            continue
        together = masked if together is None else together | masked
    return together
