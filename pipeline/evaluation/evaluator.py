"""Evaluates weights with protocols on data sets; the only module that runs a model on evaluation sets.

The training loop and asynchronous evaluation (in_training.py) and the stages `evaluate` and `fewshot` (worker.py) all
call `Evaluator.evaluate`:

1. The model processes each data set once, for all protocols that use it. Each worker reads its part of the set and
   sends labels, predictions and features to rank 0 (features.py).
2. Rank 0 evaluates one protocol after another (protocols.py); the other workers wait.
3. Each request has a result in the format of evaluation.json (document.py).

In:  [Request("/shards/test", None, Protocol("top-1", {}))]
Out: [{"set": {"judged": 360, …}, "values": {"top-1": {"value": 0.91, "low": …}}, …}] on rank 0, [] elsewhere

`EvaluationGroup` synchronises the workers: they pass a batch through the model only when every worker has a batch, and
about once a second they exchange stop requests and failures, which are then raised on all workers. A process without a
process group, such as a spare worker's for asynchronous evaluation, raises its own errors directly.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from data.errors import DataError, PatchlineError, Preempted, exit_code
from data.evaluation import EvaluationBatch, EvaluationSet
from data.index.document import load_index
from data.index.index import Index
from data.remote.config import CacheConfig
from pipeline.evaluation import document
from pipeline.evaluation.features import Beat, FeatureStore, collect
from pipeline.evaluation.probes import Inputs, compute
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import Loss
from pipeline.values import duration

Result = TypeVar("Result")

BEAT_S = 1.0  # interval of the exchanges between all workers
MAX_CONFUSIONS = 10_000  # pairs of classes to store, which is all of them for up to 100 classes
PROGRESS_S = 20.0  # interval of log lines about the progress of a pass over a set


# ------------------------------------------------------------------------------------------------ the group


class EvaluationStopped(Preempted):
    """A stop was requested, and all workers have stopped evaluating after their current batch."""


class EvaluationFailed(PatchlineError):
    """An evaluation failed; raised on all workers, with the exit code of the failure."""

    exit_code: int

    def __init__(self, message: str, exit_code: int, path: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.path = path  # path of the unreadable set; None if a protocol failed


@dataclass(frozen=True)
class EvaluationGroup:
    """One worker's view of the group of workers that evaluate together. All methods are collective."""

    phases: Phases
    device: torch.device
    wants_stop: Callable[[], bool]  # whether this worker was requested to stop
    step: int = 0  # training step of the weights, used in reported phases

    def agree_to_continue(self, failure: Exception | None = None, *, is_working: bool = False) -> bool:
        """Exchange failures and stop requests; return whether any worker is still working (`is_working`).

        On all workers, raises EvaluationFailed if any worker has failed, or EvaluationStopped if any has been asked to
        stop. The traceback of `failure` is written to the phase log.
        """
        if not dist.is_initialized():
            if failure is not None:
                raise failure
            if self.wants_stop():
                raise EvaluationStopped("stopped during an evaluation")
            return is_working
        flags = torch.tensor([failure is not None, self.wants_stop(), is_working], dtype=torch.float64)
        flags = flags.to(self.device)
        dist.all_reduce(flags)
        failures, stops, working = flags.tolist()
        if failures:
            own_failure = None
            if failure is not None:
                traceback.print_exception(failure, file=self.phases.log)
                self.phases.log.flush()
                own_failure = (f"worker {dist.get_rank()}: {type(failure).__name__}: {failure}", exit_code(failure))
            all_failures: list[tuple[str, int] | None] = [own_failure] * dist.get_world_size()
            dist.all_gather_object(all_failures, own_failure)
            for first_failure in all_failures:
                if first_failure is not None:
                    raise EvaluationFailed(*first_failure) from failure
        if stops:
            raise EvaluationStopped("stopped during an evaluation")
        return working > 0

    def run_on_rank_0(self, work: Callable[[Beat], Result], phase: str) -> Result | None:
        """Run `work(beat)` on rank 0 and return its value there, and None on other ranks.

        `work` must call `beat` regularly. On all workers, raises EvaluationFailed if `work` raises, or
        EvaluationStopped if a stop was requested.
        """
        if not dist.is_initialized():
            return work(lambda: self.phases.enter(phase, self.step))
        is_rank_0 = dist.get_rank() == 0
        last_heard = time.monotonic()

        def beat() -> None:
            nonlocal last_heard
            # Report to the watchdog that rank 0 is working, and check for stop requests.
            if time.monotonic() - last_heard >= BEAT_S:
                self.phases.enter(phase, self.step)
                self.agree_to_continue(is_working=True)
                last_heard = time.monotonic()

        # Rank 0 has entered one phase fewer than the waiting workers, so the watchdog blames it if it hangs.
        with self.phases.rank_0_phase(phase, self.step, is_rank_0):
            if not is_rank_0:
                while self.agree_to_continue():
                    self.phases.enter("wait", self.step)
                return None
            result = None
            failure = None
            try:
                result = work(beat)
            except (EvaluationFailed, EvaluationStopped):  # raised by a beat, on all workers
                raise
            except Exception as error:
                failure = error
            self.agree_to_continue(failure)
        return result


# ------------------------------------------------------------------------------------------------ the evaluator


@dataclass(frozen=True)
class Request:
    """A request to evaluate a protocol on a data set."""

    test: str  # absolute path or URL of the set's index
    train: str | None  # index of the set that a protocol of features learns from
    protocol: Protocol
    # Whether a prediction must be the sample's first label, rather than any of its labels. The few-shot probe, in
    # training and in the stage fewshot, has always used the first, so its curves stay comparable.
    first_label: bool = False
    leaked: Sequence[int] | None = None  # leaked samples of the test set; None: no leak check
    # Number of samples to include in the result with their predictions, next to counts by class; protocols of the head.
    examples: int = 0


@dataclass(frozen=True)
class Evaluator:
    """A model, and the settings for evaluating it in this process."""

    group: EvaluationGroup
    model: nn.Module
    dtype: torch.dtype
    folder: Path  # folder for rank 0's unnamed feature files, which vanish with the process
    preprocess: str  # preprocessing ops of evaluation
    micro_batch: int  # images per forward pass; the batches are the same at any number of workers
    max_labels: int = 1  # maximum number of labels per sample
    loss: Loss | None = None  # loss to compute for requests with examples
    cache: CacheConfig | None = None
    ranks: Sequence[int] = (0,)  # the parts of each set that this process reads, out of `world` parts
    world: int = 1
    indexes: Mapping[str, Index] = field(default_factory=dict)  # already loaded indexes, by path
    log: Callable[[str], None] | None = None  # receives rank 0's lines about the progress

    def evaluate(self, requests: Sequence[Request]) -> list[document.Entry]:
        """Collective: return each request's result (document.result_of) on rank 0, and an empty list elsewhere.

        On all workers, raises EvaluationFailed, which names the data set or the protocol, if an evaluation fails, or
        EvaluationStopped if a stop was requested. A process without a process group raises the original error.
        """
        results: list[document.Entry] = []
        stores: dict[str, FeatureStore] = {}
        try:
            for number, request in enumerate(requests):
                # Keep the features of only two sets at a time, unless a later request needs others.
                needed_later: set[str | None] = set()
                for later in requests[number:]:
                    needed_later |= {later.train, later.test}
                for unneeded in stores.keys() - needed_later:
                    stores.pop(unneeded).close()
                for path in (request.train, request.test):
                    if path is not None and path not in stores:
                        stores[path] = self.collect(path, requests)
                self.report(f"{request.test}: {request.protocol.name}")
                # Rank 0 computes the protocol from the collected features or predictions.
                work = partial(result_of, request, stores, self.group.device)
                try:
                    result = self.group.run_on_rank_0(work, "protocol")
                except EvaluationFailed as error:
                    raise EvaluationFailed(
                        f"{request.protocol.name} on {request.test}: {error}", error.exit_code
                    ) from error
                if result is not None:
                    results.append(result)
        finally:
            for store in stores.values():
                store.close()
        return results

    def collect(self, path: str, requests: Sequence[Request]) -> FeatureStore:
        """Collective: run the model on a data set; rank 0's store receives everything that the requests need."""
        best = 0
        with_features = False
        for request in requests:
            if request.protocol.kind.best and request.test == path:
                best = max(best, request.protocol.kind.best)
            if not request.protocol.kind.best and path in (request.test, request.train):
                with_features = True
        try:
            # If one worker cannot read the index, all workers must stop.
            index = self.indexes.get(path)
            failure = None
            if index is None:
                try:
                    index = load_index(path)
                except Exception as error:
                    failure = error
                self.group.agree_to_continue(failure)
            assert index is not None, "otherwise a failure was raised"
            store = FeatureStore(index, self.folder)
            collect(
                self.model,
                # If rank 0's disk is full, the error is raised at the next batch, so that all workers learn of it.
                self.in_lockstep(store.watching(self.batches(index)), index, path),
                store,
                self.dtype,
                self.group.device,
                with_features=with_features,
                best=best,
                loss=self.loss,
                # Rank 0 waits here for the others' batches; a hanging worker has entered one phase fewer.
                on_computed=partial(self.group.phases.enter, "gather", self.group.step),
            )
        except EvaluationFailed as error:
            raise EvaluationFailed(f"{path}: {error}", error.exit_code, path) from error
        return store

    def in_lockstep(self, batches: Iterator[EvaluationBatch], index: Index, path: str) -> Iterator[EvaluationBatch]:
        """Iterate over batches in lockstep with all other workers, and log the progress from time to time.

        On all workers, raises EvaluationFailed if a worker cannot continue, or EvaluationStopped if a worker was asked
        to stop.
        """
        began = time.monotonic()
        last_report = began
        passed = 0
        while True:
            batch = None
            failure = None
            try:
                batch = next(batches, None)
            except Exception as error:  # reading and decoding may raise anything
                failure = error
            self.group.agree_to_continue(failure)
            if batch is None:
                break
            yield batch
            # All workers have processed the same number of batches, except at the end.
            passed = min(passed + self.micro_batch * self.world // len(self.ranks), index.samples)
            if time.monotonic() - last_report > PROGRESS_S:
                last_report = time.monotonic()
                self.report(f"{path}: {passed:,} of {index.samples:,} images")
        self.report(f"{path}: {index.samples:,} images in {duration(time.monotonic() - began)}")

    def batches(self, index: Index) -> Iterator[EvaluationBatch]:
        """Iterate over this process's batches of a data set; before each, enter a phase that names its shards.

        An error while opening the data set is raised when the first batch is requested.
        """
        phases = self.group.phases
        step = self.group.step
        size = self.micro_batch
        for rank in self.ranks:
            samples = EvaluationSet(
                index,
                self.preprocess,
                batch_size=size,
                rank=rank,
                world=self.world,
                max_labels=self.max_labels,
                cache=self.cache,
            )
            batches = iter(samples)
            # The set reads one batch ahead: it reads two batches before it returns the first, then one each time.
            being_read = samples.rows[: 2 * size]
            for number in range(len(samples)):
                # "first … last" of the shards; "" if nothing is left to read or the batch contains only padding.
                shards = ""
                if being_read:
                    first, _ = samples.place(being_read[0])
                    last, _ = samples.place(being_read[-1])
                    shards = index.shards[first].name
                    if last != first:
                        shards += f" … {index.shards[last].name}"
                phases.enter("evaluate", step, shards)
                batch = next(batches)
                # Enter the phase again: a waiting worker then has one phase more than one still reading.
                phases.enter("evaluate", step, shards)
                yield batch
                being_read = samples.rows[(number + 2) * size : (number + 3) * size]
            # All shards have been read: if a worker hangs in the reduction, its phase must not name a shard.
            phases.enter("evaluate", step)

    def report(self, line: str) -> None:
        """Log a line on rank 0 if a `log` function was passed."""
        if self.log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self.log(line)


def result_of(request: Request, stores: Mapping[str, FeatureStore], device: torch.device, beat: Beat) -> document.Entry:
    """Evaluate a request's protocol from the feature stores of its data sets, and return the result.

    Raises DataError if no sample of a data set could be read or an output of the model is not finite, or ConfigError if
    the protocol cannot be evaluated on these data sets.
    """
    test = stores[request.test]
    train = None
    for path in (request.train, request.test):
        if path is None:
            continue
        readable = len(stores[path].rows)
        if readable == 0:
            raise DataError(f"{path}: none of the {stores[path].index.samples} samples could be read")
        if stores[path].not_finite:
            raise DataError(
                f"{path}: the model's outputs contain NaN or infinity for {stores[path].not_finite:,} of {readable:,} "
                "samples, so no value was computed\n"
                "  expected finite outputs: evaluate the weights of an earlier step, or set precision=fp32"
            )
    if request.train is not None:
        train = stores[request.train]
    labels = test.labels
    if request.first_label:
        labels = labels[:, :1]
    protocol = request.protocol
    outcome = compute(Inputs(protocol.name, train, test, labels, device, beat), protocol.settings)
    result = document.result_of(outcome, protocol, test, train, request.leaked)
    if request.examples or protocol.kind.interval == "classes":
        result["confusions"] = confusions(test)
    if request.examples:
        result["examples"] = examples_of(test, request.examples)
        result["class_counts"] = class_counts(test)
        result["loss"] = float(test.all_losses[test.is_there].mean(dtype=np.float64))
    return result


def examples_of(test: FeatureStore, most: int) -> list[document.Entry]:
    """Return examples with labels, prediction and confidence: the most confident errors, then correct predictions.

    At least a quarter of the examples are classified correctly, if there are enough of them; these are spread over the
    data set, the most confident first.
    """
    predicted = test.predictions[:, 0]
    confidences = test.all_confidences[test.is_there]
    is_right = (test.labels == predicted[:, None]).any(axis=1)
    mistakes = np.flatnonzero(~is_right)
    mistakes = mistakes[np.argsort(-confidences[mistakes], kind="stable")][: most - most // 4]
    right = np.flatnonzero(is_right)
    right = right[:: max(1, len(right) // max(most - len(mistakes), 1))][: most - len(mistakes)]
    right = right[np.argsort(-confidences[right], kind="stable")]
    examples: list[document.Entry] = []
    for row in [*mistakes.tolist(), *right.tolist()]:
        number = int(test.rows[row])
        shard = int(np.searchsorted(test.starts, number, side="right")) - 1
        labels = test.labels[row]
        example = {"shard": shard, "sample": number - int(test.starts[shard]), "labels": labels[labels >= 0].tolist()}
        example |= {"predicted": int(predicted[row]), "confidence": float(confidences[row])}
        examples.append(example)
    return examples


def class_counts(test: FeatureStore) -> list[list[int]]:
    """Return one row of counts per non-empty class.

    A row holds the label, the number of samples, the number of correctly classified samples, the most frequent wrong
    prediction and its count. For a class without errors, the last two are −1 and 0. A sample with several labels counts
    in each of these classes.
    """
    sample, column = np.nonzero(test.labels >= 0)
    label = test.labels[sample, column]
    is_right = (test.labels == test.predictions[:, :1]).any(axis=1)[sample]
    samples = np.bincount(label)
    right = np.bincount(label[is_right], minlength=len(samples))
    most_often: dict[int, list[int]] = {}
    for mistaken, taken_for, times in confusions(test, len(label)):
        most_often.setdefault(mistaken, [taken_for, times])
    rows = []
    for row in np.flatnonzero(samples).tolist():
        rows.append([row, int(samples[row]), int(right[row]), *most_often.get(row, [-1, 0])])
    return rows


def confusions(test: FeatureStore, most: int = MAX_CONFUSIONS) -> list[list[int]]:
    """Return rows (label, predicted class, number of such mistakes), the most frequent `most` mistakes first."""
    predicted = test.predictions[:, 0].astype(int)
    is_wrong = ~(test.labels == predicted[:, None]).any(axis=1)
    sample, column = np.nonzero((test.labels >= 0) & is_wrong[:, None])
    pairs = np.stack([test.labels[sample, column], predicted[sample]], axis=1)
    pairs, times = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-times, kind="stable")[:most]
    return np.column_stack([pairs, times])[order].tolist()
