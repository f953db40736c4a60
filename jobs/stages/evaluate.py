"""Judge weights on sets by any number of protocols; the result is a document, evaluation.json.

1. What an earlier evaluation of the same weights in this run has already answered is carried over: a changed set or
   protocol costs that set or protocol alone.
2. Every worker passes its part of each set through the model once, and sends what is wanted of it to rank 0.
3. Rank 0 judges each set by each protocol (pipeline/evaluation/protocols.py); the others wait, and hear of a stop.
4. The document is written: values with intervals, and the digests of weights, sets and protocols.

    evaluate:
      init: "@finetune"
      sets: {test: {test: "@shards/test", train: "@shards/train"}}
      protocols: [top-1, per-class, fewshot, knn, logistic]

The value of a protocol depends on its digest, the weights and the sets, and not on the number of workers: batches are
the same at any world size, and what is summed is counted, or summed by rank 0 in a fixed order (docs/evaluation.md).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import models
from data.errors import DataError
from data.files import write_whole
from data.images.preprocess import corrections
from data.index.document import load_index
from data.shards.leaks import Leaks, leaked_test_samples, read_leaks
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.context import Context
from jobs.resolved_recipe import Available, CheckResult, Reads, SharedClasses, SourceModel, Stage, StageKind
from jobs.stages import any_weights, frozen, training
from jobs.stages.evaluation_config import EvaluationConfig, check_head
from jobs.stages.evaluation_worker import worker
from jobs.worlds import allowed_worlds
from pipeline import artifacts, config
from pipeline.config import require
from pipeline.evaluation import async_evaluation, document
from pipeline.evaluation.protocols import Protocol, protocols_of
from pipeline.versions import code_version


@dataclass(frozen=True)
class Question:
    """One set, and one protocol to judge it by."""

    name: str  # of the set, in the recipe
    test: str  # absolute path, or URL
    train: str | None  # where the protocol learns from it
    protocol: Protocol
    digests: tuple[str | None, ...]  # as document.question_of: what its answer is known by


@dataclass(frozen=True)
class LeaksFile:
    """A leaks.json of `python -m jobs leaks`."""

    path: str
    digest: str  # sha256 of the file
    leaks: Leaks


Answers = dict[tuple[str | None, ...], dict[str, Any]]  # results by what they are known by: document.question_of


def run(cfg: EvaluationConfig, context: Context) -> dict[str, Any]:
    """Judge what no earlier evaluation of this run has judged, and write the document."""
    path = context.resolve(cfg.init) or ""
    digest = any_weights.digest_of(path, context.say)
    leaks = leaks_at(context.resolve(cfg.leaks))
    questions = questions_of(cfg, context, leaks)
    answers = answers_known(context, digest)
    open_questions = []
    for question in questions:
        if question.digests in answers:
            place = answers[question.digests]["from"]
            context.say(f"{context.name}: {question.name} {question.protocol.name} carried over from {place}")
        else:
            open_questions.append(question)
    if open_questions:
        answers |= answers_of_workers(cfg, context, open_questions, leaks)

    results = [signed(answers[question.digests], question, leaks) for question in questions]
    written = {
        "schema": document.SCHEMA,
        "weights": {"path": path, "digest": digest, "model": models.to_dict(context.model)},
        "results": results,
    }
    write_whole(context.directory / document.NAME, json.dumps(written, indent=1))
    say_what_to_know(cfg, context, results)
    for line in document.table(written):
        context.say(line)
    return {"metrics": document.metrics_of(written)}


def answers_of_workers(
    cfg: EvaluationConfig, context: Context, questions: list[Question], leaks: LeaksFile | None
) -> Answers:
    """Return the results of the questions, by their digests, as a worker group computes them."""
    places = set()
    for question in questions:
        places.add(question.test)
        if question.train is not None:
            places.add(question.train)
    for place in sorted(places):
        index = load_index(place)
        if not index.sees_rot:
            context.say(index.lack)
    leaked: dict[str, list[int] | None] = {}  # by the set that is judged on
    for question in questions:
        if question.test not in leaked:
            leaked[question.test] = None if leaks is None else leaked_of(leaks, question)
    asked = [as_asked(question, leaked[question.test]) for question in questions]
    make_task = partial(make_evaluation_task, cfg, context, asked)
    worlds = allowed_worlds(cfg, context.cluster)
    outcome = supervise(worker, make_task, context, worlds=worlds, stall_s=cfg.stall_s, can_commit=False)
    answers = {}
    for question, answer in zip(questions, outcome["results"], strict=True):
        answers[question.digests] = {**answer, "code": code_version()}
    return answers


def say_what_to_know(cfg: EvaluationConfig, context: Context, results: Iterable[Mapping[str, Any]]) -> None:
    """Say which sets have samples that could not be read, and where labels are taken on trust."""
    sets = {result["set"]["name"]: result["set"] for result in results}
    for name, judged in sets.items():
        unreadable = judged["samples"] - judged["judged"]
        if unreadable:
            context.say(async_evaluation.unreadable_line(unreadable, judged["path"], name))
        nameless = [] if context.class_names else ["the weights"]
        if not load_index(judged["path"]).names:
            nameless.append(f"the set {name}")
        if nameless and cfg.judges_head():
            context.say(f"no class names in {' and '.join(nameless)}: that labels mean the same is taken on trust")


# ------------------------------------------------------------------------------------------------ in the driver


def questions_of(cfg: EvaluationConfig, context: Context, leaks: LeaksFile | None) -> list[Question]:
    """Return what is asked, set by set and protocol by protocol, in the order of the recipe."""
    preprocess = cfg.preprocess or f"resize({context.model.image_size})"
    common: dict[str, Any] = {
        "preprocess": preprocess,
        "precision": cfg.precision,
        "micro_batch": cfg.micro_batch,
        "max_labels": cfg.max_labels,
    }
    # A protocol's digest stands for its values: an answer from before a correction is none to the question of now.
    corrected = corrections(preprocess)
    if corrected:
        common["corrected"] = corrected
    options = {"fewshot": cfg.fewshot, "linear": cfg.linear, "knn": cfg.knn, "logistic": cfg.logistic}
    protocols = protocols_of(cfg.protocols, options, common)
    learns = any(not protocol.best for protocol in protocols)
    leaks_digest = leaks.digest if leaks else None
    questions = []
    for name, judged in cfg.sets.items():
        test = context.resolve(judged.test) or ""
        test_digest = load_index(test).digest
        train = context.resolve(judged.train) if learns else None
        train_digest = load_index(train or "").digest if learns else None
        for protocol in protocols:
            if protocol.best:  # of the head, which has learned already
                question = Question(name, test, None, protocol, (test_digest, None, protocol.digest, leaks_digest))
            else:
                digests = (test_digest, train_digest, protocol.digest, leaks_digest)
                question = Question(name, test, train, protocol, digests)
            questions.append(question)
    return questions


def leaks_at(path: str | None) -> LeaksFile | None:
    """Return a leaks.json with its path and digest; None where none is named. Raises DataError where it is none."""
    if path is None:
        return None
    return LeaksFile(path, artifacts.digest_of(Path(path))["sha256"], read_leaks(path))


def answers_known(context: Context, digest: str) -> Answers:
    """Return the results of earlier evaluations of these weights in this run, by their digests, with their folder."""
    answers: Answers = {}
    model = json.loads(json.dumps(models.to_dict(context.model)))
    for path in sorted(context.run.glob(f"*/{document.NAME}")):
        try:
            # Only of a finished stage, whose record says what the document should be.
            if path.parent == context.directory or not artifacts.check_files(path.parent, context.say):
                continue
            earlier = json.loads(path.read_text())
        except (DataError, OSError, ValueError):
            continue
        weights = earlier["weights"]
        if earlier["schema"] == document.SCHEMA and weights["digest"] == digest and weights["model"] == model:
            for result in earlier["results"]:
                answers[document.question_of(result)] = {**result, "from": path.parent.name}
    return answers


def signed(answer: Mapping[str, Any], question: Question, leaks: LeaksFile | None) -> dict[str, Any]:
    """Return a result with the names and paths of now, which are not part of what it is known by."""
    result = {name: value for name, value in answer.items() if name != "from"}
    result |= {"set": {"name": question.name, "path": question.test, **digest_part(answer["set"])}}
    if question.train is not None:
        result["train"] = {"path": question.train, **digest_part(answer["train"])}
    if leaks is not None:
        entry = {name: answer["leaks"][name] for name in ("leaked", "values")}
        looked_at = [asdict(compared) for compared in leaks.leaks.train]
        result["leaks"] = {"path": leaks.path, "digest": leaks.digest, "train": looked_at, **entry}
    return result


def digest_part(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("name", "path")}


def as_asked(question: Question, leaked: list[int] | None) -> dict[str, Any]:
    """Return a question as the workers are told it; `leaked` are numbers of its set's samples, None: nobody looked."""
    return {
        "test": question.test,
        "train": question.train,
        "protocol": {"name": question.protocol.name, "fields": question.protocol.fields},
        "leaked": leaked,
    }


def make_evaluation_task(
    cfg: EvaluationConfig, context: Context, asked: Sequence[Mapping[str, Any]], attempt: int
) -> Task:
    """Return what the workers of an attempt are told. Raises DataError where the weights have changed."""
    init = context.resolve(cfg.init) or ""
    any_weights.digest_of(init, context.say)
    return {**frozen.task_of(context, attempt), "config": config.plain(cfg), "init": init, "questions": asked}


def leaked_of(leaks: LeaksFile, question: Question) -> list[int]:
    """Return the numbers of a set's leaked samples. Raises DataError where the document is not about this very set."""
    try:
        return np.flatnonzero(leaked_test_samples(leaks.leaks, load_index(question.test))).tolist()
    except DataError as error:
        raise DataError(f"leaks {leaks.path} knows nothing of the set {question.name}: {error}") from None


# ------------------------------------------------------------------------ what is known before it runs


def model_of(cfg: EvaluationConfig, source_model: SourceModel) -> Any:
    """Return the architecture of the weights, which may be of another project; None where they are missing."""
    if any_weights.is_foreign(cfg.init):
        return any_weights.load(cfg.init, cfg.model).config
    return source_model(cfg.init)


def shared_classes(cfg: EvaluationConfig) -> list[SharedClasses]:
    """Return each set with the head that it judges, and with the set that protocols of features learn from."""
    shared = []
    for name, judged in cfg.sets.items():
        test = {f"sets.{name}.test": judged.test}
        shared.append(SharedClasses(test, with_head=cfg.judges_head()))
        # What it learns from needs no head: these may be other classes than the weights'.
        if judged.train is not None:
            shared.append(SharedClasses({**test, f"sets.{name}.train": judged.train}))
    return shared


def checks(stage: Stage, there: Available) -> Iterator[CheckResult]:
    """Refuse sets and protocols that do not fit the weights, and sets that cannot be read."""
    cfg: EvaluationConfig = stage.config
    paths = list(cfg.paths().values())
    if stage.model is not None:
        indexes = {path: index for path in paths for index in there.made([path])}
        check_head(cfg, stage.model, indexes, stage.name)
    if there.looks_at_files:
        require(bool(cfg.sets), "sets is empty: on which sets?\n  expected sets: {NAME: {test: INDEX}}")
        training.check_usable(there.made(paths))
    yield from ()


KIND = StageKind(
    name="evaluate",
    config=EvaluationConfig,
    run=run,
    inputs={"init": Reads.ANY_WEIGHTS, "sets.*.test": Reads.SET, "sets.*.train": Reads.SET, "leaks": Reads.FILE},
    model=model_of,
    shared_classes=shared_classes,
    checks=checks,
    metrics=EvaluationConfig.metrics,
)
