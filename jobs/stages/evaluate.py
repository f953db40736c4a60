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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import models
from data.checks import at_least, check_name, more_than_0
from data.errors import DataError
from data.files import write_whole
from data.shards.cache import CacheConfig
from data.shards.index import Index, load_index
from jobs.cluster.worker_group import Task
from jobs.context import Context
from jobs.stages import any_weights, frozen, training
from jobs.supervisor import supervise
from jobs.worlds import allowed_worlds
from pipeline import config, handover
from pipeline.config import Tags, require, tags
from pipeline.evaluation import document
from pipeline.evaluation.evaluate import check_ops, check_shape
from pipeline.evaluation.feature_store import FeatureStore
from pipeline.evaluation.logistic import LogisticConfig
from pipeline.evaluation.neighbours import NeighboursConfig
from pipeline.evaluation.protocols import (
    FEATURES,
    FewShotConfig,
    LinearConfig,
    Protocol,
    check_names,
    judge,
    protocols_of,
)
from pipeline.versions import code_version


@dataclass(frozen=True)
class JudgedConfig:
    """A set to judge on, and the set that protocols of features learn from."""

    test: str = "???"  # the set's index, or its folder; or "@stage/name"
    train: str | None = None  # what fewshot, linear, knn and logistic learn from; the same

    RESUME: ClassVar[Tags] = tags(forbid="test train")


@dataclass(frozen=True)
class Config:
    """Which weights are judged on which sets, and how."""

    init: str = "???"  # weights: a folder of ours, timm or Hugging Face, an official .npz, or "@stage"
    model: dict[str, Any] = field(default_factory=dict)  # what the file of others cannot tell, as heads: 3
    sets: dict[str, JudgedConfig] = field(default_factory=dict)  # by name
    # top-1, top-5, real, per-class, and of features fewshot, linear, knn, logistic (docs/evaluation.md)
    protocols: tuple[str, ...] = ("top-1",)
    fewshot: FewShotConfig = field(default_factory=FewShotConfig)  # of the protocol fewshot
    linear: LinearConfig = field(default_factory=LinearConfig)  # of the protocol linear
    knn: NeighboursConfig = field(default_factory=NeighboursConfig)  # of the protocol knn
    logistic: LogisticConfig = field(default_factory=LogisticConfig)  # of the protocol logistic
    leaks: str | None = None  # a leaks.json of `python -m jobs leaks`: every value with and without leaked samples
    preprocess: str | None = None  # evaluation ops (SPEC 2.5); None: resize(image_size), the few-shot squash
    max_labels: int = 16  # labels a sample has at most; ReaL has 9
    micro_batch: int = 64  # images a worker takes at a time; part of the protocol: another number may round otherwise
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node
    precision: Literal["bf16", "fp32"] = "fp32"  # in which the model computes
    stall_s: float = 600.0  # in which no worker enters a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(
        forbid="init model sets protocols fewshot linear knn logistic leaks preprocess max_labels micro_batch "
        "precision",
        free="cache stall_s",
    )

    def __post_init__(self) -> None:
        check_names(self.protocols)
        check_ops(self.preprocess)
        at_least(self, 1, "micro_batch max_labels")
        more_than_0(self, "stall_s")
        for name, judged in self.sets.items():
            check_name(name, "a set of sets", "rename it")
            learned = [protocol for protocol in self.protocols if protocol in FEATURES]
            require(
                judged.train is not None or not learned,
                f"sets.{name}.train is missing: {', '.join(learned)} learn from a training set\n"
                f"  type sets.{name}.train=…, an index or @stage/name, or leave these protocols out",
            )

    def paths(self) -> dict[str, str]:
        """Return every set by the field that names it."""
        paths = {}
        for name, judged in self.sets.items():
            paths[f"sets.{name}.test"] = judged.test
            if judged.train is not None:
                paths[f"sets.{name}.train"] = judged.train
        return paths

    def metrics(self) -> list[str]:
        """Return the names of the values that come out, as `document.metrics_of` calls them."""
        values: list[str] = []
        for protocol in self.protocols:
            if protocol == "fewshot":
                values += [f"{shots}shot" for shots in self.fewshot.shots]
            elif protocol == "knn":
                values += [f"knn-{k}" for k in self.knn.k]
            else:
                values.append(protocol)
        if len(self.sets) == 1:
            return values
        return [f"{name} {value}" for name in self.sets for value in values]

    def judges_head(self) -> bool:
        """Tell whether a protocol looks at what the head says."""
        return any(protocol not in FEATURES for protocol in self.protocols)


@dataclass(frozen=True)
class Question:
    """One set, and one protocol to judge it by."""

    name: str  # of the set, in the recipe
    test: str  # absolute path, or URL
    train: str | None  # where the protocol learns from it
    protocol: Protocol
    digests: tuple[str | None, ...]  # as document.question_of: what its answer is known by


Answers = dict[tuple[str | None, ...], dict[str, Any]]  # results by what they are known by: document.question_of

DEFAULTS: Config | None = None
INPUTS = ("init", "sets.*.test", "sets.*.train", "leaks")
FILES: tuple[str, ...] = ()


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Judge what no earlier evaluation of this run has judged, and write the document."""
    check_sets(cfg, context.resolve)
    path = context.resolve(cfg.init) or ""
    digest = any_weights.digest_of(path, context.say)
    leaks = read_leaks(context.resolve(cfg.leaks))
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
    cfg: Config, context: Context, questions: list[Question], leaks: Mapping[str, Any] | None
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
    make_task = partial(make_evaluation_task, cfg, context, questions, leaks)
    worlds = allowed_worlds(cfg, context.cluster)
    ask_to_stop = partial(frozen.stop_at_once, context.name)
    outcome = supervise(worker, make_task, context, worlds=worlds, stall_s=cfg.stall_s, ask_to_stop=ask_to_stop)
    answers = {}
    for question, answer in zip(questions, outcome["results"], strict=True):
        answers[question.digests] = {**answer, "code": code_version()}
    return answers


def say_what_to_know(cfg: Config, context: Context, results: Iterable[Mapping[str, Any]]) -> None:
    """Say which sets have samples that could not be read, and where labels are taken on trust."""
    sets = {result["set"]["name"]: result["set"] for result in results}
    for name, judged in sets.items():
        unreadable = judged["samples"] - judged["judged"]
        if unreadable:
            context.say(
                f"{name}: {unreadable} bad samples of {judged['path']} count neither way; see `jobs data check`"
            )
        nameless = [] if context.class_names else ["the weights"]
        if not load_index(judged["path"]).names:
            nameless.append(f"the set {name}")
        if nameless and cfg.judges_head():
            context.say(f"no class names in {' and '.join(nameless)}: that labels mean the same is taken on trust")


def check_sets(cfg: Config, resolve: training.Resolve, load: training.LoadIndex = load_index) -> None:
    """Raise DataError where a set is empty or lacks a shard; `load` as that of training.check_sets."""
    require(len(cfg.sets) > 0, "sets is empty: on which sets?\n  expected sets: {NAME: {test: INDEX}}")
    paths = [resolve(path) for path in cfg.paths().values()]
    training.check_usable(training.loaded_sets(paths, load))


def check_head(cfg: Config, model: Any, indexes: Mapping[str, Index], stage: str) -> None:
    """Raise ConfigError or DataError where a set or a protocol does not fit the weights; `indexes` are by path.

    Names are compared in jobs/class_names.py.
    """
    check_shape(cfg.preprocess, model, f"{stage}.preprocess")
    if not cfg.judges_head():
        return
    require(
        model.classes > 0,
        f"{stage}: the weights have no head, which {', '.join(set(cfg.protocols) - set(FEATURES))} judge\n"
        f"  expected protocols of features: {', '.join(FEATURES)}",
    )
    require(
        "top-5" not in cfg.protocols or model.classes >= 5,
        f"{stage}: top-5 needs 5 classes, the weights have {model.classes}\n  leave it out of {stage}.protocols",
    )
    for name, judged in cfg.sets.items():
        index = indexes.get(judged.test)
        if index is not None and index.classes > model.classes:
            more = ", ".join(index.class_name(label) for label in range(model.classes, index.classes)[:5])
            raise DataError(
                f"{stage}.sets.{name}: {judged.test} has {index.classes} classes, the weights {model.classes}: "
                f"they know no {more}\n"
                "  expected a set of the weights' classes, or protocols of features: " + ", ".join(FEATURES)
            )


# ------------------------------------------------------------------------------------------------ in the driver


def questions_of(cfg: Config, context: Context, leaks: Mapping[str, Any] | None) -> list[Question]:
    """Return what is asked, set by set and protocol by protocol, in the order of the recipe."""
    common = {
        "preprocess": cfg.preprocess or f"resize({context.model.image_size})",
        "precision": cfg.precision,
        "micro_batch": cfg.micro_batch,
        "max_labels": cfg.max_labels,
    }
    options = {"fewshot": cfg.fewshot, "linear": cfg.linear, "knn": cfg.knn, "logistic": cfg.logistic}
    questions = []
    for name, judged in cfg.sets.items():
        test = context.resolve(judged.test) or ""
        test_digest = load_index(test).digest
        for protocol in protocols_of(cfg.protocols, options, common):
            train = None
            train_digest = None
            if not protocol.best:
                train = context.resolve(judged.train)
                train_digest = load_index(train or "").digest
            leaks_digest = leaks["digest"] if leaks else None
            digests = (test_digest, train_digest, protocol.digest, leaks_digest)
            questions.append(Question(name, test, train, protocol, digests))
    return questions


def read_leaks(path: str | None) -> dict[str, Any] | None:
    """Return a leaks.json with its path and digest; None where none is named. Raises DataError where it is none."""
    if path is None:
        return None
    try:
        leaks = json.loads(Path(path).read_text())
        found = {"test": leaks["test"], "train": leaks["train"], "pairs": leaks["pairs"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"leaks: {path} is no leaks.json: {error!r}\n  expected one of `python -m jobs leaks`"
        ) from None
    return {**found, "path": path, "digest": handover.digest_of(Path(path))["sha256"]}


def answers_known(context: Context, digest: str) -> Answers:
    """Return the results of earlier evaluations of these weights in this run, by their digests, with their folder."""
    answers: Answers = {}
    model = json.loads(json.dumps(models.to_dict(context.model)))
    for path in sorted(context.run.glob(f"*/{document.NAME}")):
        try:
            # Only of a finished stage, whose record says what the document should be.
            if path.parent == context.directory or not handover.check_files(path.parent, context.say):
                continue
            earlier = json.loads(path.read_text())
        except (DataError, OSError, ValueError):
            continue
        weights = earlier["weights"]
        if earlier["schema"] == document.SCHEMA and weights["digest"] == digest and weights["model"] == model:
            for result in earlier["results"]:
                answers[document.question_of(result)] = {**result, "from": path.parent.name}
    return answers


def signed(answer: Mapping[str, Any], question: Question, leaks: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a result with the names and paths of now, which are not part of what it is known by."""
    result = {name: value for name, value in answer.items() if name != "from"}
    result |= {"set": {"name": question.name, "path": question.test, **digest_part(answer["set"])}}
    if question.train is not None:
        result["train"] = {"path": question.train, **digest_part(answer["train"])}
    if leaks is not None:
        entry = {name: answer["leaks"][name] for name in ("leaked", "values")}
        result["leaks"] = {"path": leaks["path"], "digest": leaks["digest"], "train": leaks["train"], **entry}
    return result


def digest_part(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("name", "path")}


def make_evaluation_task(
    cfg: Config, context: Context, questions: Iterable[Question], leaks: Mapping[str, Any] | None, attempt: int
) -> Task:
    """Return what the workers of an attempt are told. Raises DataError where weights or sets have changed."""
    init = context.resolve(cfg.init) or ""
    any_weights.digest_of(init, context.say)
    asked = []
    for question in questions:
        leaked = None
        if leaks is not None:
            leaked = document.leaked_samples(leaks, leaks["path"], load_index(question.test), question.name)
        asked.append(
            {
                "test": question.test,
                "train": question.train,
                "protocol": {"name": question.protocol.name, "fields": question.protocol.fields},
                "leaked": leaked,
            }
        )
    return {**frozen.task_of(context, attempt), "config": config.plain(cfg), "init": init, "questions": asked}


# ------------------------------------------------------------------------------------------------ in a worker


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one worker's share; rank 0's value holds the result of each question.

    Raises EvaluationFailed and Preempted, on all workers alike, where one cannot read on or gets a SIGTERM.
    """
    cfg = config.build(Config, task["config"], "config")
    this = frozen.judge_of(task, cfg, load_of(task["init"], cfg.model))
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
    this.close()
    return {"results": results}


def load_of(path: str, overrides: Mapping[str, Any]) -> Callable[[], models.Model]:
    """Return what loads the weights; of a masked model the ViT inside, whose features are judged."""
    return lambda: any_weights.load(path, overrides)


def is_asked_again(path: str, questions: list[dict[str, Any]], number: int) -> bool:
    """Tell whether one of the questions from a number on needs a set."""
    return any(path in (asked["test"], asked["train"]) for asked in questions[number:])


def collected(this: frozen.Judge, cfg: Config, path: str, questions: list[dict[str, Any]]) -> FeatureStore:
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
