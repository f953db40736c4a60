"""The evaluate stage: evaluate weights on data sets with one or more protocols, and write evaluation.json.

1. Reuse the results of earlier evaluations of the same weights in this run: if a data set or protocol changes, only the
   results that depend on it are computed again.
2. Compute the missing results on the workers (pipeline/evaluation/worker.py), in one pass over each data set.
3. Write evaluation.json: values with confidence intervals, and the digests of weights, data sets and protocols.

    evaluate:
      init: "@finetune"
      sets: {test: {test: "@shards/test", train: "@shards/train"}}
      protocols: [top-1, per-class, fewshot, knn, logistic]

A result depends only on the protocol's digest, the weights and the data sets, and not on the number of workers: batches
are the same for any world size, and sums are integer counts or computed by rank 0 in a fixed order
(docs/evaluation.md).
"""

import json
import shlex
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
Digests = tuple[str | None, ...]  # digests that identify a result: test set, training set, protocol, leaks


@dataclass(frozen=True)
class EvaluatedSet:
    """A test set, and the training set for the protocols that learn from features."""

    test: str = "???"  # index of the test set, its folder, or "@stage/name"
    train: str | None = None  # training set of fewshot, linear, knn and logistic, in the same form

    RESUME: ClassVar[Tags] = tags(forbid="test train")


@dataclass(frozen=True)
class EvaluateConfig:
    """The weights, data sets and protocols of an evaluation."""

    init: str = "???"  # weights: a folder from Patchline, timm or Hugging Face, an official .npz, or "@stage"
    model: dict[str, Any] = field(
        default_factory=dict
    )  # settings missing from other projects' weights, such as heads: 3
    sets: dict[str, EvaluatedSet] = field(default_factory=dict)  # by name
    # for the head: top-1, top-5, real, per-class; for features: fewshot, linear, knn, logistic (docs/evaluation.md)
    protocols: tuple[str, ...] = ("top-1",)
    fewshot: FewShotConfig = field(default_factory=FewShotConfig)  # settings of the protocol fewshot
    linear: LinearConfig = field(default_factory=LinearConfig)  # settings of the protocol linear
    knn: NeighboursConfig = field(default_factory=NeighboursConfig)  # settings of the protocol knn
    logistic: LogisticConfig = field(default_factory=LogisticConfig)  # settings of the protocol logistic
    leaks: str | None = None  # leaks.json from `python -m jobs leaks`: report values with and without leaked samples
    # preprocessing ops (SPEC 2.5); None: those recorded with the weights, else resize(image_size)
    preprocess: str | None = None
    max_labels: int = 16  # maximum number of labels per sample; ReaL has up to 9
    micro_batch: int = 64  # images per worker and forward pass; part of the protocol, because it can affect rounding
    cache: CacheConfig = field(default_factory=CacheConfig)  # for remote shards, on each node
    precision: Literal["bf16", "fp32"] = "fp32"  # precision of the forward pass
    stall_s: float = 600.0  # if no worker enters a new phase for this long, the attempt ends and the next one starts

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
            check_name(name, "a data set", "rename it")
            learning = []
            for protocol in self.protocols:
                if protocol in FEATURES:
                    learning.append(protocol)
            require(
                evaluated.train is not None or not learning,
                f"sets.{name}.train is missing, but a training set is needed for {', '.join(learning)}\n"
                f"  set sets.{name}.train=INDEX (or @STAGE/SET), or remove these protocols",
            )

    def metrics(self) -> Iterator[str]:
        """Yield the names of the values in evaluation.json, as `document.entries_of` names them."""
        for name in self.sets:
            for protocol in self.protocols:
                values = [protocol]
                names_by_settings = PROTOCOLS[protocol].value_names
                if names_by_settings is not None:
                    values = names_by_settings(getattr(self, protocol))
                for value in values:
                    # If there are several data sets, put the data set's name first.
                    yield value if len(self.sets) == 1 else f"{name} {value}"

    def uses_head(self) -> bool:
        """Return whether any protocol evaluates the outputs of the head."""
        return any(protocol not in FEATURES for protocol in self.protocols)


# ------------------------------------------------------------------------ the stage


@dataclass(frozen=True)
class NamedRequest:
    """An evaluation request, with the data set's name in the recipe and the digests that identify the result."""

    name: str  # name of the data set in the recipe
    request: "Request"
    digests: Digests


@dataclass(frozen=True)
class LeaksFile:
    """The content of a leaks.json from `python -m jobs leaks`, with its path and digest."""

    path: str
    digest: str  # sha256 of the file
    leaks: Any  # a data.extras.leaks.document.Leaks


class Evaluate(StageKind):
    """The stage kind that evaluates weights on data sets."""

    name = "evaluate"
    config = EvaluateConfig
    inputs: ClassVar = {
        "init": Reads.ANY_WEIGHTS,
        "sets.*.test": Reads.SET,
        "sets.*.train": Reads.SET,
        "leaks": Reads.FILE,
    }

    def run(self, cfg: EvaluateConfig, context: Context) -> dict[str, object]:
        """Compute the results missing from earlier evaluations in this run; write evaluation.json."""
        # Imported here, as in every stage, because checking a recipe does not need torch (1 s to import).
        from pipeline.evaluation.worker import WorkerConfig

        init = context.campaign.path_of(cfg.init)
        weights_digest = any_weights.digest_of(init, context.log)
        leaks = None
        leaks_path = context.campaign.path_of(cfg.leaks)
        if leaks_path is not None:
            read_leaks = load_optional(f"{LEAKS_DOCUMENT}:read_leaks", f"{context.stage.name}.leaks")
            leaks = LeaksFile(leaks_path, artifacts.digest_of(Path(leaks_path))["sha256"], read_leaks(leaks_path))
        # The preprocessing; the last match wins: 1. the default. 2. recorded with the weights. 3. from the recipe.
        preprocess = f"resize({context.model.image_size})"
        reason = "the default, because none is recorded with the weights"
        recorded = any_weights.recorded_preprocessing(init, context.model.image_size)
        if recorded is not None:
            preprocess = recorded.ops
            reason = "recorded with the weights"
        if cfg.preprocess is not None:
            reason = f"from the recipe, overriding {preprocess}, {reason}"
            preprocess = cfg.preprocess
        check_shape(preprocess, context.model, f"{context.stage.name}.preprocess")
        context.log(f"{context.stage.name}: preprocessing {preprocess} ({reason})")
        all_named = requests_of(cfg, context, preprocess, leaks)

        # Reuse the results of earlier evaluations; the workers compute the others.
        results = earlier_results(context, weights_digest)
        missing: list[NamedRequest] = []
        for named in all_named:
            if named.digests in results:
                source = results[named.digests]["from"]
                context.log(f"{context.stage.name}: {named.request.protocol.name} on {named.name} reused from {source}")
            else:
                missing.append(named)
        if missing:
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
            for named in missing:
                requests.append(named.request)
            computed = evaluate_on_workers(worker_config, init, requests, context)
            for named, result in zip(missing, computed, strict=True):
                results[named.digests] = {**result, "code": code_version()}

        # Write the results with the names and in the order of the recipe.
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

    def model(self, cfg: EvaluateConfig, source: ModelConfig | None) -> ModelConfig | None:
        """Return the architecture of the weights, possibly from another project; None if the weights are missing."""
        if any_weights.is_foreign(cfg.init):
            return any_weights.load(cfg.init, cfg.model).config
        return source

    def shared_classes(self, cfg: EvaluateConfig) -> list[SharedClasses]:
        """Return groups that must agree on class ids: a test set and the head (if used), a test and a training set."""
        shared = []
        for name, evaluated in cfg.sets.items():
            test = {f"sets.{name}.test": evaluated.test}
            shared.append(SharedClasses(test, with_head=cfg.uses_head()))
            # Protocols that learn from features ignore the head, so these classes may differ from those of the weights.
            if evaluated.train is not None:
                shared.append(SharedClasses({**test, f"sets.{name}.train": evaluated.train}))
        return shared

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Check that the data sets are readable, and that data sets and protocols are compatible with the weights.

        Class names are compared by jobs/recipe/class_names.py.
        """
        cfg: EvaluateConfig = stage.config
        model = stage.model
        name = stage.name
        if model is not None:
            check_shape(cfg.preprocess, model, f"{name}.preprocess")
        if model is not None and cfg.uses_head():
            require(
                model.classes > 0,
                f"{name}: {', '.join(sorted(set(cfg.protocols) - set(FEATURES)))} need the outputs of a head, "
                f"but the weights have no head\n  expected protocols that evaluate features: {', '.join(FEATURES)}",
            )
            for protocol in cfg.protocols:
                most_guesses = PROTOCOLS[protocol].best
                require(
                    most_guesses <= model.classes,
                    f"{name}: the protocol {protocol} needs at least {most_guesses} classes, but the weights have "
                    f"{model.classes}\n"
                    f"  remove the protocol from {name}.protocols",
                )
            for set_name, evaluated in cfg.sets.items():
                index = available.index(evaluated.test)
                if index is not None and index.classes > model.classes:
                    unknown = range(model.classes, index.classes)[:5]
                    names = ", ".join(map(index.class_name, unknown))
                    raise DataError(
                        f"{name}.sets.{set_name}: {evaluated.test} has {index.classes} classes, but the weights have "
                        f"only {model.classes}, without {names}\n"
                        "  expected a data set with the classes of the weights, or protocols that evaluate features: "
                        + ", ".join(FEATURES)
                    )
        if available.checks_files:
            require(
                bool(cfg.sets),
                f"{name}.sets is empty: there is no data set to evaluate on\n"
                "  expected sets: {NAME: {test: INDEX}}",
            )
            learns = any(protocol in FEATURES for protocol in cfg.protocols)
            sets = {}
            for set_name, evaluated in cfg.sets.items():
                sets[f"{name}.sets.{set_name}"] = (evaluated.test, evaluated.train if learns else None)
            training.check_evaluated(sets, available)
        return ()

    def metrics(self, cfg: EvaluateConfig) -> Iterable[str]:
        """Return the names of the values of all data sets and protocols."""
        return cfg.metrics()


def requests_of(cfg: EvaluateConfig, context: Context, preprocess: str, leaks: LeaksFile | None) -> list[NamedRequest]:
    """Return a request for each pair of data set and protocol, in the order of the recipe.

    Raises DataError if leaks.json does not cover a data set, or if a test set is also the training set.
    """
    from pipeline.evaluation.evaluator import Request

    common: dict[str, Any] = {
        "preprocess": preprocess,
        "precision": cfg.precision,
        "micro_batch": cfg.micro_batch,
        "max_labels": cfg.max_labels,
    }
    # Bug fixes in the preprocessing change the protocol's digest, so that older results are not reused.
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
                raise DataError(f"leaks: {leaks.path} does not cover the data set {name}: {error}") from None
        for protocol in protocols:
            train = None
            train_digest = None
            if not protocol.kind.best:  # the protocol learns from features
                assert evaluated.train is not None, "EvaluateConfig requires it for protocols that learn"
                train = context.campaign.path_of(evaluated.train)
                train_digest = load_index(train).digest
            request = Request(test, train, protocol, leaked=leaked)
            digests = (index.digest, train_digest, protocol.digest, leaks_digest)
            all_named.append(NamedRequest(name, request, digests))
    return all_named


def earlier_results(context: Context, weights_digest: str) -> dict[Digests, Entry]:
    """Return the results of this run's earlier evaluations of these weights; each result's "from" names its folder."""
    results: dict[Digests, Entry] = {}
    model = json.loads(json.dumps(models.to_dict(context.model)))
    for path in sorted(context.campaign.run.glob(f"*/{document.NAME}")):
        try:
            # Use only finished stages: their done.json has the digest of evaluation.json.
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
    """Return a result with the recipe's current names and paths, which do not affect the values.

    If leaks are given, the result also lists which training sets were searched for leaked samples and which were not.
    """
    renamed = dict(result)
    renamed.pop("from", None)
    # Keep "name" and "path" first in the JSON.
    renamed["set"] = {"name": "", "path": "", **result["set"]} | {"name": named.name, "path": named.request.test}
    training_sets = list(trained_on)
    if named.request.train is not None:
        renamed["train"] = {"path": "", **result["train"]} | {"path": named.request.train}
        origin = load_index(named.request.train).origin
        part_of = None if origin is None else origin.digest
        training_sets.append({"path": named.request.train, "digest": result["train"]["digest"], "part_of": part_of})
    if leaks is not None:
        compared = {train.digest for train in leaks.leaks.train}
        checked = []
        not_checked = []
        for source in training_sets:
            # Searching a data set includes its subsets.
            if compared & {source["digest"], source["part_of"]}:
                checked.append(source)
            else:
                not_checked.append(source)
        renamed["leaks"] = {
            "path": leaks.path,
            "digest": leaks.digest,
            "train": list(map(asdict, leaks.leaks.train)),
            "checked": checked,
            "not_checked": not_checked,
            "leaked": result["leaks"]["leaked"],
            "values": result["leaks"]["values"],
        }
    return renamed


def log_warnings(cfg: EvaluateConfig, context: Context, results: Iterable[Entry]) -> None:
    """Log the number of unreadable samples in each data set, and the data sets without class names."""
    # A data set has one result per protocol, but is logged only once.
    sets: dict[str, Entry] = {}
    for result in results:
        sets[result["set"]["name"]] = result["set"]
    for name, evaluated in sets.items():
        unreadable = evaluated["samples"] - evaluated["judged"]
        if unreadable:
            context.log(
                f"{name}: excluded {unreadable} unreadable samples in {evaluated['path']}; to list them, run "
                f"python -m jobs data check {shlex.quote(evaluated['path'])}"
            )
        nameless = []
        if not context.class_names:
            nameless.append("the weights")
        if not load_index(evaluated["path"]).names:
            nameless.append(f"the data set {name}")
        if nameless and cfg.uses_head():
            context.log(f"no class names in {' and '.join(nameless)}: cannot check whether the class ids agree")


# ------------------------------------------------------------------------ workers


def evaluate_on_workers(cfg: "WorkerConfig", init: str, requests: Sequence["Request"], context: Context) -> list[Entry]:
    """Run attempts until all requests are evaluated; return a result for each request.

    Raises DataError if the weights at `init` differ from their recorded digest, Preempted if the stage was stopped, or
    StageFailed if it cannot continue.
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
    """Return the task for an attempt's workers. Raises DataError if the weights have changed."""
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
