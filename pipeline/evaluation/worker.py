"""A worker of a stage that evaluates weights and trains nothing (evaluate, fewshot).

1. It joins the group, is checked as in training, and loads the whole model: workers share nothing but the sets.
2. It evaluates as everywhere (evaluator.py). A stop takes effect between two batches, or within about
   a second while rank 0 computes. Nothing of an attempt that was stopped is kept.

In:  {"init": "/runs/x/finetune-1a2b3c4d", "requests": [{"test": "/shards/test", "protocol": {…}, …}], …}
Out: {"results": [{"set": {…}, "values": {"top-1": {…}}, …}]}, of rank 0, one a request (document.result_of)
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from data.checks import printable_lines
from data.errors import Preempted
from data.remote.config import CacheConfig
from data.storage import open_storage
from pipeline import config
from pipeline.evaluation import any_weights
from pipeline.evaluation.document import Entry
from pipeline.evaluation.evaluator import EvaluationFailed, EvaluationGroup, EvaluationStopped, Evaluator, Request
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.telemetry import append_whole
from pipeline.monitoring.watchdog import Phases

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


def worker(task: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Do one worker's share; rank 0's value holds the results.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    # The driver imports this module, and does not need deepspeed.
    from pipeline.process_group import check_start, fetch_init, join_group
    from pipeline.worker import handle_sigterm

    cfg = config.build(WorkerConfig, task["config"], "config")
    folder = Path(task["folder"])
    asked_to_stop = threading.Event()
    handle_sigterm(asked_to_stop)
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
