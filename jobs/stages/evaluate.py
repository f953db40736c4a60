"""The stages that evaluate weights: by any number of protocols (`Evaluate`), or by few-shot regression (`FewShot`).

`Evaluate` writes a document, evaluation.json:

1. A result that an earlier evaluation of the same weights in this run has is carried over: a changed set or protocol
   costs that set or protocol alone.
2. The workers compute the others (pipeline/evaluation/worker.py): each set passes through the model once.
3. The document is written: values with intervals, and the digests of weights, sets and protocols.

    evaluate:
      init: "@finetune"
      sets: {test: {test: "@shards/test", train: "@shards/train"}}
      protocols: [top-1, per-class, fewshot, knn, logistic]

The value of a protocol depends on its digest, the weights and the sets, and not on the number of workers: batches are
the same at any world size, and sums are counts, or made by rank 0 in a fixed order (docs/evaluation.md).

`evaluation_commands` returns the commands that evaluate a finished training with settings that have changed since.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

import models
from data.checks import at_least, check_name, more_than_0
from data.errors import DataError
from data.files import write_atomically
from data.images.preprocess import corrections
from data.index.document import load_index
from data.optional import load_optional
from data.remote.config import CacheConfig
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.resolved_recipe import (
    Available,
    CheckResult,
    Context,
    Reads,
    SharedClasses,
    SourceModel,
    Stage,
    StageKind,
)
from jobs.stages import training
from models import ModelConfig
from pipeline import artifacts, config
from pipeline.architecture import check_shape
from pipeline.config import Tags, require, tags
from pipeline.evaluation import any_weights, document
from pipeline.evaluation.document import Entry
from pipeline.evaluation.protocols import (
    FEATURES,
    PROTOCOLS,
    FewShotConfig,
    LinearConfig,
    LogisticConfig,
    NeighboursConfig,
    check_names,
    protocols_of,
)
from pipeline.identity import code_version
from pipeline.training_config import check_ops

if TYPE_CHECKING:
    from pipeline.evaluation.evaluator import Request
    from pipeline.evaluation.worker import WorkerConfig

LEAKS_DOCUMENT = "data.extras.leaks.document"
Digests = tuple[str | None, ...]  # what a result depends on: test set, training set, protocol, leaks


@dataclass(frozen=True)
class EvaluatedSet:
    """A set to evaluate on, and the set that protocols of features learn from."""

    test: str = "???"  # the set's index, or its folder; or "@stage/name"
    train: str | None = None  # what fewshot, linear, knn and logistic learn from; the same

    RESUME: ClassVar[Tags] = tags(forbid="test train")


@dataclass(frozen=True)
class EvaluateConfig:
    """Which weights are evaluated on which sets, and how."""

    init: str = "???"  # weights: a folder of ours, timm or Hugging Face, an official .npz, or "@stage"
    model: dict[str, Any] = field(default_factory=dict)  # what the file of others cannot tell, as heads: 3
    sets: dict[str, EvaluatedSet] = field(default_factory=dict)  # by name
    # top-1, top-5, real, per-class, and of features fewshot, linear, knn, logistic (docs/evaluation.md)
    protocols: tuple[str, ...] = ("top-1",)
    fewshot: FewShotConfig = field(default_factory=FewShotConfig)  # of the protocol fewshot
    linear: LinearConfig = field(default_factory=LinearConfig)  # of the protocol linear
    knn: NeighboursConfig = field(default_factory=NeighboursConfig)  # of the protocol knn
    logistic: LogisticConfig = field(default_factory=LogisticConfig)  # of the protocol logistic
    leaks: str | None = None  # a leaks.json of `python -m jobs leaks`: every value with and without leaked samples
    # evaluation ops (SPEC 2.5); None: those recorded with the weights, else resize(image_size), the few-shot squash
    preprocess: str | None = None
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
        for name, evaluated in self.sets.items():
            check_name(name, "a set of sets", "rename it")
            learned = []
            for protocol in self.protocols:
                if protocol in FEATURES:
                    learned.append(protocol)
            require(
                evaluated.train is not None or not learned,
                f"sets.{name}.train is missing: {', '.join(learned)} learn from a training set\n"
                f"  type sets.{name}.train=…, an index or @stage/name, or leave these protocols out",
            )

    def metrics(self) -> Iterator[str]:
        """Iterate the names of the values that come out, as `document.entries_of` calls them."""
        for name in self.sets:
            for protocol in self.protocols:
                values = [protocol]
                names_by_settings = PROTOCOLS[protocol].value_names
                if names_by_settings is not None:
                    values = names_by_settings(getattr(self, protocol))
                for value in values:
                    # Of several sets each value begins with the set's name.
                    yield value if len(self.sets) == 1 else f"{name} {value}"

    def uses_head(self) -> bool:
        """Return whether a protocol looks at the outputs of the head."""
        return any(protocol not in FEATURES for protocol in self.protocols)


# ------------------------------------------------------------------------ the stage


@dataclass(frozen=True)
class NamedRequest:
    """A request with the names that people see, and the digests that its result is known by."""

    name: str  # of the set, in the recipe
    request: "Request"
    digests: Digests


@dataclass(frozen=True)
class LeaksFile:
    """A leaks.json of `python -m jobs leaks`."""

    path: str
    digest: str  # sha256 of the file
    leaks: Any  # a data.extras.leaks.document.Leaks


class Evaluate(StageKind):
    """The kind of stage that evaluates weights on sets by protocols."""

    name = "evaluate"
    config = EvaluateConfig
    inputs: ClassVar = {
        "init": Reads.ANY_WEIGHTS,
        "sets.*.test": Reads.SET,
        "sets.*.train": Reads.SET,
        "leaks": Reads.FILE,
    }

    def run(self, cfg: EvaluateConfig, context: Context) -> dict[str, object]:
        """Compute the results that no earlier evaluation of this run has, and write the document."""
        # Imported here and not above, as in every stage: a recipe is checked without torch, which takes a second.
        from pipeline.evaluation.worker import WorkerConfig

        init = context.campaign.path_of(cfg.init)
        weights_digest = any_weights.digest_of(init, context.log)
        leaks = None
        leaks_path = context.campaign.path_of(cfg.leaks)
        if leaks_path is not None:
            read_leaks = load_optional(f"{LEAKS_DOCUMENT}:read_leaks", f"{context.stage.name}.leaks")
            leaks = LeaksFile(leaks_path, artifacts.digest_of(Path(leaks_path))["sha256"], read_leaks(leaks_path))
        # The pixels that the weights were judged on, where their maker recorded that and the recipe says nothing else.
        preprocess = f"resize({context.model.image_size})"
        reason = "the squash: nothing is recorded with the weights"
        recorded = any_weights.recorded_preprocessing(init)
        if recorded is not None:
            preprocess = recorded.ops
            reason = "as recorded with the weights"
        if cfg.preprocess is not None:
            reason = f"as preprocess says; otherwise {preprocess}, {reason}"
            preprocess = cfg.preprocess
        check_shape(preprocess, context.model, f"{context.stage.name}.preprocess")
        context.log(f"{context.stage.name}: images by {preprocess}, {reason}")
        all_named = requests_of(cfg, context, preprocess, leaks)

        # Results that an earlier evaluation has are carried over; the workers compute the others.
        results = earlier_results(context, weights_digest)
        unanswered: list[NamedRequest] = []
        for named in all_named:
            if named.digests in results:
                source = results[named.digests]["from"]
                context.log(
                    f"{context.stage.name}: {named.name} {named.request.protocol.name} carried over from {source}"
                )
            else:
                unanswered.append(named)
        if unanswered:
            worker_config = WorkerConfig(
                preprocess=preprocess,
                max_labels=cfg.max_labels,
                micro_batch=cfg.micro_batch,
                precision=cfg.precision,
                stall_s=cfg.stall_s,
                cache=cfg.cache,
                model=cfg.model,
            )
            requests = []
            for named in unanswered:
                requests.append(named.request)
            computed = evaluate_on_workers(worker_config, init, requests, context)
            for named, result in zip(unanswered, computed, strict=True):
                results[named.digests] = {**result, "code": code_version()}

        # The document has them in the order of the recipe, under today's names.
        trained_on, unknown = any_weights.training_sets(init)
        in_order = []
        for named in all_named:
            in_order.append(with_names(results[named.digests], named, leaks, trained_on))
        written: Entry = {
            "schema": document.SCHEMA,
            "weights": {
                "path": init,
                "digest": weights_digest,
                "model": models.to_dict(context.model),
                "trained_on": {"sets": trained_on, "unknown": unknown},
            },
            "results": in_order,
        }
        write_atomically(context.directory / document.NAME, json.dumps(written, indent=1))
        log_warnings(cfg, context, written["results"])
        document.log_table(written, context.log)
        metrics = {}
        for name, entry in document.entries_of(written).items():
            metrics[name] = entry["value"]
        return {"metrics": metrics}

    def model(self, cfg: EvaluateConfig, source_model: SourceModel) -> ModelConfig | None:
        """Return the architecture of the weights, which may be of another project; None where they are missing."""
        if any_weights.is_foreign(cfg.init):
            return any_weights.load(cfg.init, cfg.model).config
        return source_model(cfg.init)

    def shared_classes(self, cfg: EvaluateConfig) -> list[SharedClasses]:
        """Return each set with the head that it is of, and with the set that protocols of features learn from."""
        shared = []
        for name, evaluated in cfg.sets.items():
            test = {f"sets.{name}.test": evaluated.test}
            shared.append(SharedClasses(test, with_head=cfg.uses_head()))
            # What it learns from needs no head: these may be other classes than the weights'.
            if evaluated.train is not None:
                shared.append(SharedClasses({**test, f"sets.{name}.train": evaluated.train}))
        return shared

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Refuse sets and protocols that do not fit the weights, and sets that cannot be read.

        Names of classes are compared in jobs/recipe/class_names.py.
        """
        cfg: EvaluateConfig = stage.config
        model = stage.model
        name = stage.name
        if model is not None:
            check_shape(cfg.preprocess, model, f"{name}.preprocess")
        if model is not None and cfg.uses_head():
            require(
                model.classes > 0,
                f"{name}: the weights have no head, which {', '.join(set(cfg.protocols) - set(FEATURES))} need\n"
                f"  expected protocols of features: {', '.join(FEATURES)}",
            )
            for protocol in cfg.protocols:
                most_guesses = PROTOCOLS[protocol].best
                require(
                    most_guesses <= model.classes,
                    f"{name}: {protocol} needs {most_guesses} classes, the weights have {model.classes}\n"
                    f"  leave it out of {name}.protocols",
                )
            for set_name, evaluated in cfg.sets.items():
                index = available.index(evaluated.test)
                if index is not None and index.classes > model.classes:
                    unknown = range(model.classes, index.classes)[:5]
                    more = ", ".join(map(index.class_name, unknown))
                    raise DataError(
                        f"{name}.sets.{set_name}: {evaluated.test} has {index.classes} classes, the weights "
                        f"{model.classes}: they know no {more}\n"
                        "  expected a set of the weights' classes, or protocols of features: " + ", ".join(FEATURES)
                    )
        if available.checks_files:
            require(bool(cfg.sets), "sets is empty: on which sets?\n  expected sets: {NAME: {test: INDEX}}")
            learns = any(protocol in FEATURES for protocol in cfg.protocols)
            sets = {}
            for set_name, evaluated in cfg.sets.items():
                sets[f"{name}.sets.{set_name}"] = (evaluated.test, evaluated.train if learns else None)
            training.check_evaluated(sets, available)
        return ()

    def metrics(self, cfg: EvaluateConfig) -> Iterable[str]:
        """Return the names of the values of all sets and protocols."""
        return cfg.metrics()


def requests_of(cfg: EvaluateConfig, context: Context, preprocess: str, leaks: LeaksFile | None) -> list[NamedRequest]:
    """Return the requests set by set and protocol by protocol, in the order of the recipe.

    Raises DataError where a leaks.json is not about a set, or a test set is the training set.
    """
    from pipeline.evaluation.evaluator import Request

    common: dict[str, Any] = {
        "preprocess": preprocess,
        "precision": cfg.precision,
        "micro_batch": cfg.micro_batch,
        "max_labels": cfg.max_labels,
    }
    # A protocol's digest stands for its values: a result from before a correction does not answer today's request.
    corrected = corrections(preprocess)
    if corrected:
        common["corrected"] = corrected
    protocols = protocols_of(cfg.protocols, cfg, common)
    leaks_digest = None
    if leaks is not None:
        leaks_digest = leaks.digest
    all_named: list[NamedRequest] = []
    for name, evaluated in cfg.sets.items():
        test = context.campaign.path_of(evaluated.test)
        index = load_index(test)
        leaked = None
        if leaks is not None:
            try:
                in_pairs = load_optional(f"{LEAKS_DOCUMENT}:in_pairs", f"{context.stage.name}.leaks")
                leaked = np.flatnonzero(in_pairs(leaks.leaks, index, "test")).tolist()
            except DataError as error:
                raise DataError(f"leaks {leaks.path} knows nothing of the set {name}: {error}") from None
        for protocol in protocols:
            train = None
            train_digest = None
            if not protocol.kind.best:  # the head has learned already
                assert evaluated.train is not None, "EvaluateConfig refuses it for protocols that learn"
                train = context.campaign.path_of(evaluated.train)
                train_digest = load_index(train).digest
            request = Request(test, train, protocol, leaked=leaked)
            digests = (index.digest, train_digest, protocol.digest, leaks_digest)
            all_named.append(NamedRequest(name, request, digests))
    return all_named


def earlier_results(context: Context, weights_digest: str) -> dict[Digests, Entry]:
    """Return the results of earlier evaluations of these weights in this run, each with its folder as "from"."""
    results: dict[Digests, Entry] = {}
    model = json.loads(json.dumps(models.to_dict(context.model)))
    for path in sorted(context.campaign.run.glob(f"*/{document.NAME}")):
        try:
            # Only of a finished stage, whose record has the digest of the document.
            if path.parent == context.directory or not artifacts.check_files(path.parent, context.log):
                continue
            earlier = json.loads(path.read_text())
        except (DataError, OSError, ValueError):
            continue
        weights = earlier["weights"]
        if earlier["schema"] == document.SCHEMA and weights["digest"] == weights_digest and weights["model"] == model:
            for result in earlier["results"]:
                train = result["train"]
                leaks = result["leaks"]
                digests = (
                    result["set"]["digest"],
                    train["digest"] if train else None,
                    result["protocol"]["digest"],
                    leaks["digest"] if leaks != document.NOT_CHECKED else None,
                )
                results[digests] = {**result, "from": path.parent.name}
    return results


def with_names(
    result: Entry, named: NamedRequest, leaks: LeaksFile | None, trained_on: list[dict[str, str | None]]
) -> Entry:
    """Return a result with today's names and paths, on which it does not depend.

    Its leaks name the sets that were compared, and those of what was learned from that were not.
    """
    signed = dict(result)
    signed.pop("from", None)
    # Names and paths come first in the document, also where an earlier one had others.
    signed["set"] = {"name": "", "path": "", **result["set"]} | {"name": named.name, "path": named.request.test}
    learned = list(trained_on)
    if named.request.train is not None:
        signed["train"] = {"path": "", **result["train"]} | {"path": named.request.train}
        origin = load_index(named.request.train).origin
        part_of = None if origin is None else origin.digest
        learned.append({"path": named.request.train, "digest": result["train"]["digest"], "part_of": part_of})
    if leaks is not None:
        compared = {train.digest for train in leaks.leaks.train}
        checked = []
        not_checked = []
        for source in learned:
            # A subset of a set that was compared has been compared with it.
            if compared & {source["digest"], source["part_of"]}:
                checked.append(source)
            else:
                not_checked.append(source)
        signed["leaks"] = {
            "path": leaks.path,
            "digest": leaks.digest,
            "train": list(map(asdict, leaks.leaks.train)),
            "checked": checked,
            "not_checked": not_checked,
            "leaked": result["leaks"]["leaked"],
            "values": result["leaks"]["values"],
        }
    return signed


def log_warnings(cfg: EvaluateConfig, context: Context, results: Iterable[Entry]) -> None:
    """Log which sets have samples that could not be read, and where labels are taken on trust."""
    # A set has a result for every protocol, and is named once.
    sets: dict[str, Entry] = {}
    for result in results:
        sets[result["set"]["name"]] = result["set"]
    for name, evaluated in sets.items():
        unreadable = evaluated["samples"] - evaluated["judged"]
        if unreadable:
            context.log(
                f"{name}: {unreadable} bad samples of {evaluated['path']} count neither way; see `jobs data check`"
            )
        nameless = []
        if not context.class_names:
            nameless.append("the weights")
        if not load_index(evaluated["path"]).names:
            nameless.append(f"the set {name}")
        if nameless and cfg.uses_head():
            context.log(f"no class names in {' and '.join(nameless)}: that labels mean the same is taken on trust")


# ------------------------------------------------------------------------ workers


def evaluate_on_workers(cfg: "WorkerConfig", init: str, requests: Sequence["Request"], context: Context) -> list[Entry]:
    """Run attempts until the requests are answered; return a result for each.

    Raises DataError if the weights at `init` are not what their maker wrote, Preempted, and StageFailed.
    """
    from pipeline.evaluation.worker import worker

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


def make_task(cfg: "WorkerConfig", init: str, requests: Sequence["Request"], context: Context, attempt: int) -> Task:
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
