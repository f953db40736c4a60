"""What a worker of an `evaluate` stage does: one pass over each set, and rank 0 answers question by question.

In:  {"questions": [{"test": "/shards/test", "train": null, "protocol": {"name": "top-1", …}, "leaked": null}, …], …}
Out: {"results": [{"set": {…}, "values": {"top-1": {…}}, …}, …]}, of rank 0, one a question (document.result_of)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jobs.stages import any_weights, frozen
from jobs.stages.evaluation_config import EvaluationConfig
from pipeline import config
from pipeline.config import require
from pipeline.evaluation import document
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.protocols import Protocol, judge


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one worker's share; rank 0's value holds the result of each question.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    cfg = config.build(EvaluationConfig, task["config"], "config")
    this = frozen.judge_of(task, cfg, lambda: any_weights.load(task["init"], cfg.model))
    results: list[Any] = []
    # One pass over a set serves all of its protocols; the features of two sets are kept at a time.
    stores: dict[str, FeatureStore] = {}
    for asked in task["questions"]:
        needed = [path for path in (asked["train"], asked["test"]) if path is not None]
        for path in list(stores):
            if path not in needed and not is_asked_again(path, task["questions"], len(results)):
                stores.pop(path).close()
        for path in needed:
            if path not in stores:
                stores[path] = collected(this, cfg, path, task["questions"])
        this.say(f"{asked['test']}: judging by {asked['protocol']['name']}")
        results.append(this.alone("judge", partial(answer_of, this, asked, stores)))
    for store in stores.values():
        store.close()
    this.close()
    return {"results": results}


def is_asked_again(path: str, questions: list[dict[str, Any]], number: int) -> bool:
    """Tell whether one of the questions from a number on needs a set."""
    return any(path in (asked["test"], asked["train"]) for asked in questions[number:])


def collected(this: frozen.Judge, cfg: EvaluationConfig, path: str, questions: list[dict[str, Any]]) -> FeatureStore:
    """Collective: pass a set through the model, and keep what the questions need of it."""
    best = 0
    needs_features = False
    for asked in questions:
        protocol = Protocol(**asked["protocol"])
        if protocol.best and asked["test"] == path:
            best = max(best, protocol.best)
        if not protocol.best and path in (asked["test"], asked["train"]):
            needs_features = True
    ops: str = questions[0]["protocol"]["fields"]["preprocess"]
    return this.collected(path, ops, cfg.max_labels, with_features=needs_features, best=best)


def answer_of(
    this: frozen.Judge, asked: Mapping[str, Any], stores: Mapping[str, FeatureStore], beat: Callable[[], None]
) -> dict[str, Any]:
    """Return the result of one question, at rank 0."""
    protocol = Protocol(**asked["protocol"])
    test = stores[asked["test"]]
    train = stores[asked["train"]] if asked["train"] is not None else None
    require(len(test.rows) > 0, f"{asked['test']}: none of {test.index.samples} samples could be read")
    judged = judge(protocol, train, test, this.device, beat)
    return document.result_of(judged, protocol, test, train, asked["leaked"])
