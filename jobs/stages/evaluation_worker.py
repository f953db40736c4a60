"""The worker group of a stage that evaluates weights and trains nothing (evaluate, fewshot).

1. The driver checks the weights and starts the workers with requests (`evaluate_on_workers`).
2. A worker joins the group, is checked as in training, and loads the whole model: workers share nothing but the sets.
3. It evaluates as everywhere (pipeline/evaluation/worker.py); a stop is heard between two batches, and about once a
   second while rank 0 computes. Nothing of an attempt that was stopped is kept.

In:  {"init": "/runs/x/finetune-1a2b3c4d", "requests": [{"test": "/shards/test", "protocol": {…}, …}], …}
Out: {"results": [{"set": {…}, "values": {"top-1": {…}}, …}]}, of rank 0, one a request (document.result_of)
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from data.checks import printable_lines
from data.errors import Preempted
from data.remote.cache import CacheConfig
from data.storage import open_storage
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.resolved_recipe import Context
from jobs.stages import any_weights
from pipeline import config
from pipeline.evaluation.document import Entry
from pipeline.evaluation.protocols import Protocol
from pipeline.evaluation.worker import EvaluationFailed, EvaluationGroup, EvaluationStopped, Evaluator, Request
from pipeline.monitoring.telemetry import append_whole
from pipeline.monitoring.watchdog import Phases
from pipeline.versions import code_version

COLLECTIVE_TIMEOUT_S = 1800.0  # as TrainConfig.timeout_s; `stall_s` ends a hang long before


@dataclass(frozen=True)
class WorkerConfig:
    """How the workers of such a stage evaluate; the fields are those of both stages' configs."""

    preprocess: str  # evaluation ops
    max_labels: int  # of a sample
    micro_batch: int  # images a worker at a time
    precision: Literal["bf16", "fp32"]  # in which the model computes
    stall_s: float  # in which no worker enters a new phase; then the attempt ends and the next begins
    cache: CacheConfig  # of remote shards, on every node
    model: dict[str, Any] = field(default_factory=dict)  # what a weights file of others cannot tell


# ------------------------------------------------------------------------------------------------ in the driver


def evaluate_on_workers(cfg: WorkerConfig, init: str, requests: Sequence[Request], context: Context) -> list[Entry]:
    """Run attempts until the requests are answered; return a result for each.

    Raises DataError where the weights at `init` are not what their maker wrote, Preempted, and StageFailed.
    """
    outcome = supervise(
        worker,
        partial(make_task, cfg, init, requests, context),
        context,
        worlds=context.campaign.cluster.worlds,
        stall_s=cfg.stall_s,
        can_commit=False,
    )
    results: list[Entry] = outcome["results"]
    return results


def make_task(cfg: WorkerConfig, init: str, requests: Sequence[Request], context: Context, attempt: int) -> Task:
    """Return the task of an attempt's workers. Raises DataError where the weights have changed."""
    any_weights.digest_of(init, context.log)
    return {
        "run": str(context.campaign.run),
        "attempt": attempt,
        "claimed": time.time(),
        "code": code_version(),
        "folder": str(context.attempt_folder(attempt)),
        "remote": context.campaign.remote,
        "config": config.plain(cfg),
        "init": init,
        "requests": list(map(asdict, requests)),
    }


# ------------------------------------------------------------------------------------------------ in a worker


def worker(task: Task) -> dict[str, list[Entry]]:
    """Do one worker's share; rank 0's value holds the results.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    # The driver imports this module, and has no use for what brings deepspeed.
    from pipeline.process_group import check_start, join_group
    from pipeline.start import fetch_init
    from pipeline.train import notice_sigterm

    cfg = config.build(WorkerConfig, task["config"], "config")
    folder = Path(task["folder"])
    asked_to_stop = threading.Event()
    notice_sigterm(asked_to_stop)
    phases = Phases(folder, int(os.environ["RANK"]), cfg.stall_s)
    # Entered before the group is joined, where a worker waits for a lost peer: the watchdog sees nothing but phases.
    phases.enter("join", 0)
    device = join_group(COLLECTIVE_TIMEOUT_S)
    storage = open_storage(Path(task["run"]), task["remote"])
    check_start(
        run=Path(task["run"]),
        attempt=task["attempt"],
        attempt_folder=folder,
        code=task["code"],
        claimed=task["claimed"],
        device=device,
        is_shared=storage.is_shared,
        log=partial(print, file=phases.log, flush=True),
    )
    phases.enter("build", 0)
    fetch_init(storage, task["init"])
    dtype = torch.float32
    if cfg.precision == "bf16":
        dtype = torch.bfloat16

    def log(text: str) -> None:
        """Write a line into the stage's log, which the driver shows."""
        append_whole(folder.parents[1] / "log.txt", f"{printable_lines(text)}\n".encode())

    evaluator = Evaluator(
        group=EvaluationGroup(phases, device, asked_to_stop.is_set),
        model=any_weights.load(task["init"], cfg.model).to(device, dtype),
        dtype=dtype,
        folder=folder,
        preprocess=cfg.preprocess,
        micro_batch=cfg.micro_batch,
        max_labels=cfg.max_labels,
        cache=cfg.cache,
        ranks=(dist.get_rank(),),
        world=dist.get_world_size(),
        log=log,
    )
    requests = []
    for values in task["requests"]:
        protocol = Protocol(**values["protocol"])
        requests.append(Request(**{**values, "protocol": protocol}))
    try:
        results = evaluator.evaluate(requests)
    except EvaluationFailed as error:
        # Where a protocol failed, and no set, its message has the remedy.
        remedy = ""
        if error.path is not None:
            remedy = "\n  repair the set, then run the same command again"
        raise EvaluationFailed(f"{error}{remedy}", error.exit_code, error.path) from error
    except EvaluationStopped:
        raise Preempted("stopped between two batches; run the same command again to begin anew") from None
    dist.barrier()
    phases.close()
    dist.destroy_process_group()
    return {"results": results}
