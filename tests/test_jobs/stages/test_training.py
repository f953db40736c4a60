"""Extras of the stages that train: which are there, what they add, and what workers are told of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.cluster_config import ClusterConfig
from jobs.kinds import load_extras
from jobs.stages.training import Finetune, Pretrain, TrainingExtra, accompany
from pipeline.extras.best import BestConfig
from pipeline.extras.token_dropping import ThinnedConfig
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


class Best(TrainingExtra):
    config = BestConfig
    hook = "pipeline.extras.best:KeepBest"


class Thinned(TrainingExtra):
    config = ThinnedConfig
    hook = "pipeline.extras.token_dropping:TokenDropping"


def test_an_extra_whose_module_is_gone_is_left_out_and_a_broken_one_is_not() -> None:
    loaded = load_extras("jobs.extras.gone:Extra", "jobs.extras.gone.too:Extra", "jobs.extras.best:Best")
    assert [type(extra).__name__ for extra in loaded] == ["Best"]
    with pytest.raises(AttributeError):
        load_extras("jobs.extras.best:Nothing")


def test_kinds_have_the_keys_of_their_extras_and_defaults_of_their_own() -> None:
    plain = Finetune()
    assert plain.config is TrainConfig
    kind = Finetune([Best(), Thinned()])
    defaults: Any = kind.defaults
    assert (defaults.keep_best, defaults.batch_size, defaults.optim.name) == (None, 512, "sgd")
    assert not defaults.thinning.is_on
    assert Pretrain([Best()]).defaults.passes == 7  # type: ignore[union-attr]


def test_workers_load_the_hooks_of_the_keys_in_use() -> None:
    kind = Pretrain([Best(), Thinned()])
    unused = kind.config(steps=10)
    used: Any = kind.config(steps=10, evaluate_every=5, keep_best="accuracy")  # type: ignore[call-arg]
    context: Any = SimpleNamespace()
    for cfg, expected in ((unused, {}), (used, {"pipeline.extras.best:KeepBest": {}})):
        hooks: dict[str, Any] = {}
        for extra in kind.extras:
            hooks |= extra.hooks(cfg, context)
        assert hooks == expected


def test_companions_work_during_an_attempt_and_end_with_it() -> None:
    events: list[str] = []

    class Companion:
        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def beside(self, task: Any, folder: Path, cluster: ClusterConfig) -> Iterator[None]:
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
