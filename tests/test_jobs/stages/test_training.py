"""Extras of training stages: loading, recipe keys, hooks and companions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.cluster_config import ClusterConfig
from jobs.kinds import load_extras
from jobs.stages.training import Finetune, Pretrain, TrainingExtra, accompany
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class KeptConfig(TrainConfig):
    kept: str | None = None


@dataclass(frozen=True)
class ThinConfig(TrainConfig):
    thin: float = 0.0


class Kept(TrainingExtra):
    config = KeptConfig
    hook = "pipeline.kept:Kept"


class Thin(TrainingExtra):
    config = ThinConfig
    hook = "pipeline.thin:Thin"


def test_a_deleted_extra_is_skipped_but_a_broken_one_is_an_error() -> None:
    loaded = load_extras("jobs.extras.gone:Extra", "jobs.extras.gone.too:Extra", "jobs.extras.best:Best")
    assert [type(extra).__name__ for extra in loaded] == ["Best"]
    with pytest.raises(AttributeError):
        load_extras("jobs.extras.best:Nothing")


def test_kinds_have_the_keys_of_their_extras_and_their_own_defaults() -> None:
    plain = Finetune()
    assert plain.config is TrainConfig
    kind = Finetune([Kept(), Thin()])
    defaults: Any = kind.defaults
    assert (defaults.kept, defaults.batch_size, defaults.optim.name) == (None, 512, "sgd")
    assert defaults.thin == 0.0
    assert Pretrain([Kept()]).defaults.passes == 7  # type: ignore[union-attr]


def test_workers_load_the_hooks_of_used_keys() -> None:
    kind = Pretrain([Kept(), Thin()])
    unused = kind.config(steps=10)
    used: Any = kind.config(steps=10, evaluate_every=5, kept="accuracy")  # type: ignore[call-arg]
    context: Any = SimpleNamespace()
    for cfg, expected in ((unused, {}), (used, {"pipeline.kept:Kept": {}})):
        hooks: dict[str, Any] = {}
        for extra in kind.extras:
            hooks |= extra.hooks(cfg, context)
        assert hooks == expected


def test_companions_run_during_an_attempt_and_end_with_it() -> None:
    events: list[str] = []

    class Companion:
        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def during_attempt(self, task: Any, folder: Path, cluster: ClusterConfig) -> Iterator[None]:
            events.append(f"{self.name} begins in {folder}")
            try:
                yield
            finally:
                events.append(f"{self.name} ends")

        def finish(self) -> None:
            events.append(f"{self.name} finishes")

    with (
        pytest.raises(RuntimeError),
        accompany([Companion("a"), Companion("b")], {}, Path("attempt"), ClusterConfig(backend="processes")),
    ):
        events.append("training")
        raise RuntimeError
    assert events == ["a begins in attempt", "b begins in attempt", "training", "b ends", "a ends"]
