"""Few-shot linear evaluation of frozen features (paper, section 4.1).

1. Every worker computes the features of its part of both sets, and gathers those of the others.
2. Rank 0 draws the shots and fits the closed form; the others wait.
3. The accuracies of every number of shots, means and single draws, go to metrics.json.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import models
from data.checks import at_least, more_than_0
from data.errors import Preempted
from data.evaluation import EvaluationBatch, EvaluationSet
from data.files import write_whole
from data.shards.cache import CacheConfig
from data.shards.index import load_index
from jobs.cluster.worker_group import Task
from jobs.context import Context
from jobs.stages import training
from jobs.supervisor import attempt_folder, supervise
from jobs.worlds import allowed_worlds
from pipeline import config, handover
from pipeline.config import Tags, tags
from pipeline.evaluation import evaluate
from pipeline.evaluation.evaluate import ProbeConfig
from pipeline.monitoring.watchdog import Phases
from pipeline.versions import code_version


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


COLLECTIVE_TIMEOUT_S = 1800.0  # as TrainConfig.timeout_s; `stall_s` ends a hang long before

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
    ask_to_stop = partial(stop_at_once, context.name)
    worlds = allowed_worlds(cfg, context.cluster)
    results = supervise(worker, make_task, context, worlds=worlds, stall_s=cfg.stall_s, ask_to_stop=ask_to_stop)
    write_whole(context.directory / "metrics.json", json.dumps(results, indent=1))

    # The single draws of the shots ("…seed…") are in metrics.json; a person sees their means.
    means = [f"{name} {value:.4f}" for name, value in results["metrics"].items() if "seed" not in name]
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
    handover.check_weights(Path(init), context.say)
    return {
        "config": config.plain(cfg),
        "run": str(context.run),
        "attempt": attempt,
        "claimed": time.time(),
        "code": code_version(),
        "folder": str(attempt_folder(context.directory, attempt)),
        "init": init,
        "train": context.resolve(cfg.probe.train),
        "test": context.resolve(cfg.probe.test),
        "remote": context.remote,
    }


def stop_at_once(stage: str, attempt_folder: Path) -> None:
    """End the attempt, because nothing of it is worth a commit. Always raises Preempted."""
    raise Preempted(f"stopped in {stage}; run the same command again to do it from its start")


def batches_of(path: str, preprocess: str, cfg: Config, phases: Phases) -> Iterator[EvaluationBatch]:
    """Iterate this worker's batches of a set; what the opening of the set raises is raised at the first."""
    import torch.distributed as dist

    samples = EvaluationSet(
        load_index(path),
        preprocess,
        batch_size=cfg.micro_batch,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        cache=cfg.cache,
    )
    yield from evaluate.watched(samples, phases)


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one worker's share: features of its part of the sets; rank 0 fits the probe, and its value is the result.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    import torch
    import torch.distributed as dist

    from pipeline.preflight.start import check_start
    from pipeline.process_group import join_group
    from pipeline.start import fetch_init
    from pipeline.train import notice_sigterm

    asked_to_stop = threading.Event()
    notice_sigterm(asked_to_stop)
    cfg = config.build(Config, task["config"], "config")
    phases = Phases(Path(task["folder"]), int(os.environ["RANK"]), cfg.stall_s)
    # Entered before the group is joined, where a worker waits for a lost peer: the watchdog sees nothing but phases.
    phases.enter("join", 0)
    device = join_group(COLLECTIVE_TIMEOUT_S)
    rank = dist.get_rank()
    check_start(
        run=Path(task["run"]),
        attempt=task["attempt"],
        attempt_folder=Path(task["folder"]),
        code=task["code"],
        claimed=task["claimed"],
        device=device,
        is_shared=task.get("remote") is None,
        say=partial(print, file=phases.log, flush=True),
    )

    phases.enter("build", 0)
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    if task.get("remote") is not None:
        fetch_init(task["remote"], task["run"], task["init"])
    state, model_config = models.load_weights(task["init"])
    model = models.from_config(model_config).eval()
    # load_weights has compared every name and shape with the config already.
    model.load_state_dict(state, strict=False)
    model.to(device, dtype)

    preprocess = cfg.preprocess or f"resize({model_config.image_size})"
    # Each worker computes the features of its part of a set; `features` gathers those of all workers.
    sets = []
    for path in (task["train"], task["test"]):
        batches = batches_of(path, preprocess, cfg, phases)
        # All workers hear of a stop, and of one that cannot read on, between two batches.
        agreed = evaluate.agreed(batches, asked_to_stop.is_set, device, phases.log)
        try:
            sets.append(evaluate.features(model, agreed, dtype, device))
        except evaluate.EvaluationFailed as error:
            message = f"{path}: {error}\n  repair the set, then run the same command again"
            raise evaluate.EvaluationFailed(message, error.exit_code) from error
        except evaluate.EvaluationStopped:
            raise Preempted("stopped between two batches; run the same command again to begin anew") from None
    train_set, test_set = sets

    metrics = {}
    # The others enter "wait", so that the watchdog takes rank 0 for the one behind (docs/faults.md).
    with phases.led("probe", 0, rank == 0):
        if rank == 0:
            metrics = evaluate.probe(train_set, test_set, cfg.probe)
    dist.barrier()
    phases.close()
    dist.destroy_process_group()
    _, train_labels = train_set
    _, test_labels = test_set
    return {
        "metrics": metrics,
        "train_samples": len(train_labels),
        "test_samples": len(test_labels),
        "probe": asdict(cfg.probe),
    }
