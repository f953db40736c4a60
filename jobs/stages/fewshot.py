"""Few-shot linear evaluation of frozen features (paper, section 4.1).

1. Every worker computes the features of its part of both sets, and sends them to rank 0 as it goes.
2. Rank 0 draws the shots and fits the closed form; the others wait.
3. The accuracies of every number of shots, means and single draws, go to metrics.json.
"""

import json
from collections.abc import Iterator, Mapping
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
from jobs.resolved_recipe import Available, CheckResult, Reads, Stage, StageKind
from jobs.stages import frozen, training
from jobs.worlds import allowed_worlds
from pipeline import artifacts, config
from pipeline.config import Tags, require, tags
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


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Compute features on the workers and fit the probe on rank 0; write the results to metrics.json."""
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


def checks(stage: Stage, there: Available) -> Iterator[CheckResult]:
    """Refuse a probe without sets, of other images than the model's, or on sets that cannot be read."""
    cfg: Config = stage.config
    # One question is enough: ProbeConfig takes both sets or neither.
    require(cfg.probe.train is not None, f"{stage.name}.probe.train and .test are missing: which sets?")
    if stage.model is not None:
        evaluate.check_shape(cfg.preprocess, stage.model, f"{stage.name}.preprocess")
    if there.looks_at_files:
        training.check_usable(there.made([cfg.probe.train or "", cfg.probe.test or ""]))
    yield from ()


KIND = StageKind(
    name="fewshot",
    config=Config,
    run=run,
    inputs={"init": Reads.WEIGHTS, "probe.train": Reads.SET, "probe.test": Reads.SET},
    model=lambda cfg, source_model: source_model(cfg.init),
    shared_classes=lambda cfg: [training.classes_of_probe(cfg.probe)],
    checks=checks,
    metrics=lambda cfg: training.metrics_of_probe(cfg.probe),
)
