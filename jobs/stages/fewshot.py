"""Few-shot linear evaluation of frozen features (paper, section 4.1).

1. Every worker computes the features of its part of both sets, and sends them to rank 0 as it goes.
2. Rank 0 draws the shots and fits the closed form; the others wait.
3. The accuracies of every number of shots, means and single draws, go to metrics.json.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import models
from data.checks import at_least, more_than_0
from data.files import write_whole
from data.index.document import load_index
from data.remote.cache import CacheConfig
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.context import Context
from jobs.stages import frozen, training
from jobs.worlds import allowed_worlds
from pipeline import artifacts, config
from pipeline.config import Tags, tags
from pipeline.evaluation import evaluate
from pipeline.evaluation.async_evaluation import without_single_seeds
from pipeline.evaluation.evaluate import ProbeConfig
from pipeline.evaluation.protocols import few_shot_metrics


@dataclass(frozen=True)
class Config:
    """Which weights are probed on which sets."""

    init: str = "???"  # weights: a folder, or "@stage"
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # both sets are needed here
    preprocess: str | None = None  # None: resize(image_size), the squash of big_vision's evaluator
    micro_batch: int = 64  # images a worker at a time
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node
    precision: Literal["bf16", "fp32"] = "fp32"  # in which features are computed
    stall_s: float = 600.0  # in which no worker enters a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(forbid="init probe preprocess precision", free="micro_batch cache stall_s")

    def __post_init__(self) -> None:
        evaluate.check_ops(self.preprocess)
        at_least(self, 1, "micro_batch")
        more_than_0(self, "stall_s")


DEFAULTS: Config | None = None
INPUTS = ("init", "probe.train", "probe.test")
FILES: tuple[str, ...] = ()


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Compute features on the workers and fit the probe on rank 0; write the results to metrics.json."""
    check_sets(cfg, context.resolve)
    for probed_set in (cfg.probe.train, cfg.probe.test):
        index = load_index(context.resolve(probed_set) or "")
        if not index.sees_rot:
            context.say(index.lack)
    make_task = partial(make_fewshot_task, cfg, context)
    worlds = allowed_worlds(cfg, context.cluster)
    results = supervise(worker, make_task, context, worlds=worlds, stall_s=cfg.stall_s, can_commit=False)
    write_whole(context.directory / "metrics.json", json.dumps(results, indent=1))

    # The single draws of the shots ("…seed…") are in metrics.json; a person sees their means.
    means = [f"{name} {value:.4f}" for name, value in without_single_seeds(results["metrics"]).items()]
    context.say("  ".join(means))
    return results


def check_sets(cfg: Config, resolve: training.Resolve, load: training.LoadIndex = load_index) -> None:
    """Raise DataError where a set is empty or lacks a shard; `load` as that of training.check_sets."""
    paths = [resolve(cfg.probe.train), resolve(cfg.probe.test)]
    training.check_usable(training.loaded_sets(paths, load))


def make_fewshot_task(cfg: Config, context: Context, attempt: int) -> Task:
    """Return what the workers of an attempt are told. Raises DataError where the weights have changed."""
    init = context.resolve(cfg.init)
    assert init is not None, "init has no default that is None"
    artifacts.check_weights(Path(init), context.say)
    return {
        **frozen.task_of(context, attempt),
        "config": config.plain(cfg),
        "init": init,
        "train": context.resolve(cfg.probe.train),
        "test": context.resolve(cfg.probe.test),
    }


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one worker's share: features of its part of the sets; rank 0 fits the probe, and its value is the result.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    cfg = config.build(Config, task["config"], "config")
    judge = frozen.judge_of(task, cfg, lambda: models.load(task["init"]))
    preprocess = cfg.preprocess or f"resize({judge.model.config.image_size})"
    stores = []
    for path in (task["train"], task["test"]):
        stores.append(judge.collected(path, preprocess))
    train, test = stores

    metrics = judge.alone("probe", lambda beat: few_shot_metrics(train, test, cfg.probe, beat)) or {}
    train.close()
    test.close()
    judge.close()
    return {
        "metrics": metrics,
        "train_samples": len(train.rows),
        "test_samples": len(test.rows),
        "probe": asdict(cfg.probe),
    }
