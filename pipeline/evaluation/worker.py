"""The worker of a stage that only evaluates weights (evaluate, fewshot).

1. It joins the process group, runs the same start checks as in training, and loads the complete model: only the data
   sets are divided among the workers.
2. It evaluates with evaluator.py. A stop takes effect between two batches, or within about a second while rank 0
   evaluates a protocol. A stopped attempt produces no results.

In:  {"init": "/runs/x/finetune-1a2b3c4d", "requests": [{"test": "/shards/test", "protocol": {…}, …}], …}
Out: {"results": [{"set": {…}, "values": {"top-1": {…}}, …}]} from rank 0, one per request (document.result_of)
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

COLLECTIVE_TIMEOUT_S = 1800.0  # same as TrainConfig.timeout_s; `stall_s` ends a hang long before


@dataclass(frozen=True)
class WorkerConfig:
    """The worker settings of an evaluation stage, whose kind is `evaluate` or `fewshot`."""

    preprocess: str  # preprocessing ops of evaluation
    max_labels: int  # maximum number of labels per sample
    micro_batch: int  # images per worker and forward pass
    precision: Literal["bf16", "fp32"]  # precision of the forward pass
    stall_s: float  # restart the attempt if no worker enters a new phase for this long
    cache: CacheConfig  # cache for remote shards on every node
    model: dict[str, Any] = field(default_factory=dict)  # model options that a foreign weights file cannot provide


def worker(task: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Collective: evaluate the task's requests; rank 0 returns the results.

    On all workers, raises EvaluationFailed if a worker cannot continue, or Preempted after a SIGTERM.
    """
    # Imported here, because the driver imports this module without deepspeed.
    from pipeline.process_group import check_start, fetch_init, join_group
    from pipeline.worker import handle_sigterm

    cfg = config.build(WorkerConfig, task["config"], "config")
    folder = Path(task["folder"])
    stop = threading.Event()
    handle_sigterm(stop)
    phases = Phases(folder, int(os.environ["RANK"]), cfg.stall_s)
    # Enter a phase before joining the group, which waits for other workers: the watchdog sees only phases.
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
        """Write a line to the stage's log, which the driver shows."""
        append_whole(folder.parents[1] / "log.txt", f"{printable_lines(text)}\n".encode())

    evaluator = Evaluator(
        group=EvaluationGroup(phases, device, stop.is_set),
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
        # If a protocol failed, rather than a data set, its error message already contains a remedy.
        remedy = ""
        if error.path is not None:
            remedy = "\n  repair the set, then run the same command again"
        raise EvaluationFailed(f"{error}{remedy}", error.exit_code, error.path) from error
    except EvaluationStopped:
        raise Preempted("stopped between two batches; run the same command again to start over") from None
    dist.barrier()
    phases.close()
    dist.destroy_process_group()
    return {"results": results}
