"""The worker group of a stage that evaluates weights and trains nothing (evaluate, fewshot), from the driver's side.

The driver checks the weights and starts the workers with requests; what they do is in pipeline/evaluation_task.py.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.resolved_recipe import Context
from pipeline import any_weights, config
from pipeline.evaluation.document import Entry
from pipeline.evaluation.worker import Request
from pipeline.evaluation_task import WorkerConfig, evaluate
from pipeline.versions import code_version


def evaluate_on_workers(cfg: WorkerConfig, init: str, requests: Sequence[Request], context: Context) -> list[Entry]:
    """Run attempts until the requests are answered; return a result for each.

    Raises DataError if the weights at `init` are not what their maker wrote, Preempted, and StageFailed.
    """
    outcome = supervise(
        evaluate,
        partial(make_task, cfg, init, requests, context),
        context,
        worlds=context.campaign.cluster.worlds,
        stall_s=cfg.stall_s,
        can_commit=False,
    )
    results: list[Entry] = outcome["results"]
    return results


def make_task(cfg: WorkerConfig, init: str, requests: Sequence[Request], context: Context, attempt: int) -> Task:
    """Return the task of an attempt's workers. Raises DataError if the weights have changed."""
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
