"""Few-shot linear evaluation of frozen features (paper, section 4.1).

python -m jobs.fewshot recipe.yaml [key=value …]
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import models
from data.errors import Preempted
from data.evaluation import EvaluationSet
from data.files import write_whole
from data.shards.cache import CacheConfig
from data.shards.index import load_index
from jobs.context import Context
from jobs.ownership import claim_attempt
from jobs.supervisor import run_watched, until_done
from pipeline import config, evaluate
from pipeline.config import Tags, require, tags
from pipeline.evaluate import ProbeConfig
from pipeline.watchdog import Phases


@dataclass(frozen=True)
class Config:
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
        require(self.micro_batch >= 1, f"micro_batch is {self.micro_batch}, expected 1 or more")


DEFAULTS: Config | None = None
INPUTS = ("init", "probe.train", "probe.test")


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Features on the worker group, the closed form on its lead; results in metrics.json."""
    require(cfg.probe.train is not None, f"{context.name}.probe.train and .test are missing: which sets?")
    results = until_done(context, lambda: attempt(cfg, context))
    write_whole(context.directory / "metrics.json", json.dumps(results, indent=1))
    means = {k: v for k, v in results["metrics"].items() if "seed" not in k}
    context.say("  ".join(f"{shots} {accuracy:.4f}" for shots, accuracy in means.items()))
    return results


def attempt(cfg: Config, context: Context) -> dict[str, Any]:
    """One worker group; nothing of it is worth a commit, so who wants it to stop ends it at once."""
    number = claim_attempt(context.run)
    task = {
        "config": config.plain(cfg),
        "folder": str(context.directory / "attempts" / f"attempt-{number:06d}"),
        "init": context.resolve(cfg.init),
        "train": context.resolve(cfg.probe.train),
        "test": context.resolve(cfg.probe.test),
    }

    def stop() -> None:
        raise Preempted(f"stopped in {context.name}; run the same command again to do it from its start")

    return run_watched(worker, task, context, number, cfg.stall_s, stop)


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """One worker's share of the features; the lead's return value is the result."""
    import torch
    import torch.distributed as dist

    from pipeline.engine import join_group

    cfg = config.build(Config, task["config"], "config")
    phases = Phases(Path(task["folder"]), int(os.environ["RANK"]), cfg.stall_s)
    phases.enter("join", 0)
    device = join_group(1800.0)
    phases.enter("build", 0)
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    state, model_config = models.load_weights(task["init"])
    model = models.from_config(model_config).eval()
    model.load_state_dict(state, strict=False)
    model.to(device, dtype)
    ops = cfg.preprocess or f"resize({model_config.image_size})"
    sets = []
    for path in (task["train"], task["test"]):
        samples = EvaluationSet(
            load_index(path),
            ops,
            batch_size=cfg.micro_batch,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            cache=cfg.cache,
        )
        sets.append(evaluate.features(model, evaluate.watched(samples, phases), dtype, device))
    with phases.led("probe", 0, dist.get_rank() == 0):
        metrics = evaluate.probe(sets[0], sets[1], cfg.probe) if dist.get_rank() == 0 else {}
    dist.barrier()
    phases.close()
    dist.destroy_process_group()
    return {
        "metrics": metrics,
        "train_samples": len(sets[0][1]),
        "test_samples": len(sets[1][1]),
        "probe": asdict(cfg.probe),
    }
