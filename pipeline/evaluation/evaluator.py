"""Evaluates weights by protocols on sets, in each worker: the only place where sets meet a model in evaluation.

The training loop and an asynchronous evaluation (in_training.py) and the stages `evaluate` and `fewshot` (worker.py)
all call `Evaluator.evaluate`:

1. Each set passes through the model once, for all the protocols that use it. A worker reads its part of the set and
   sends labels, predictions and features to rank 0 (features.py).
2. Rank 0 computes one protocol after the other (protocols.py); the others wait.
3. Each request has a result in the form of evaluation.json (document.py).

In:  [Request("/shards/test", None, Protocol("top-1", {}))]
Out: [{"set": {"judged": 360, …}, "values": {"top-1": {"value": 0.91, "low": …}}, …}] at rank 0, [] elsewhere

`EvaluationGroup` keeps the workers together: no batch goes into the model alone, about once a second every worker hears
of a stop and of a worker that cannot go on, and each of the two is raised on all workers alike. A process without a
group, as that of an asynchronous evaluation, is alone: its own error comes out as it is.
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
from pipeline.evaluation.probes import COMPUTE, Inputs
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.watchdog import Phases
from pipeline.values import duration

Result = TypeVar("Result")

BEAT_S = 1.0  # between two beats in which all workers take part
PROGRESS_S = 20.0  # between two lines that say how far a pass over a set is


# ------------------------------------------------------------------------------------------------ the group


class EvaluationStopped(Preempted):
    """The run was asked to stop, and all workers have left an evaluation between two batches."""


class EvaluationFailed(PatchlineError):
    """An evaluation cannot be finished, which all workers know; carries the exit code of the failure."""

    exit_code: int

    def __init__(self, message: str, exit_code: int, path: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.path = path  # of the set that could not be passed through the model; None: a protocol failed


@dataclass(frozen=True)
class EvaluationGroup:
    """Gives a worker its view of the group that evaluates. All methods are collective."""

    phases: Phases
    device: torch.device
    wants_stop: Callable[[], bool]  # of this worker
    step: int = 0  # of the weights, in phases

    def agree_to_continue(self, failure: Exception | None = None, *, is_working: bool = False) -> bool:
        """Return whether a worker `is_working` alone; the phases' log gets the traceback of `failure`.

        Raises EvaluationFailed where a worker has a failure and EvaluationStopped where one wants to stop, on all
        workers alike.
        """
        if not dist.is_initialized():
            if failure is not None:
                raise failure
            if self.wants_stop():
                raise EvaluationStopped("stopped in an evaluation")
            return is_working
        flags = torch.tensor([failure is not None, self.wants_stop(), is_working], dtype=torch.float64)
        flags = flags.to(self.device)
        dist.all_reduce(flags)
        failures, stops, working = flags.tolist()
        if failures:
            mine = None
            if failure is not None:
                traceback.print_exception(failure, file=self.phases.log)
                self.phases.log.flush()
                mine = (f"worker {dist.get_rank()}: {type(failure).__name__}: {failure}", exit_code(failure))
            all_failures: list[tuple[str, int] | None] = [mine] * dist.get_world_size()
            dist.all_gather_object(all_failures, mine)
            for first_failure in all_failures:
                if first_failure is not None:
                    raise EvaluationFailed(*first_failure) from failure
        if stops:
            raise EvaluationStopped("stopped in an evaluation")
        return working > 0

    def run_on_rank_0(self, work: Callable[[Beat], Result], phase: str) -> Result | None:
        """Return the value of `work(beat)` at rank 0, which calls `beat` between two pieces of work; None elsewhere.

        Raises EvaluationFailed and EvaluationStopped, on all workers alike.
        """
        if not dist.is_initialized():
            return work(lambda: self.phases.enter(phase, self.step))
        is_rank_0 = dist.get_rank() == 0
        last_heard = time.monotonic()

        def beat() -> None:
            nonlocal last_heard
            # The watchdog sees that rank 0 moves, and rank 0 hears of a stop.
            if time.monotonic() - last_heard >= BEAT_S:
                self.phases.enter(phase, self.step)
                self.agree_to_continue(is_working=True)
                last_heard = time.monotonic()

        # Rank 0 stays the worker behind: it has entered one phase fewer than those that wait for it.
        with self.phases.rank_0_phase(phase, self.step, is_rank_0):
            if not is_rank_0:
                while self.agree_to_continue():
                    self.phases.enter("wait", self.step)
                return None
            result = None
            failure = None
            try:
                result = work(beat)
            except (EvaluationFailed, EvaluationStopped):  # raised by a beat: the others have heard it
                raise
            except Exception as error:
                failure = error
            self.agree_to_continue(failure)
        return result


# ------------------------------------------------------------------------------------------------ the evaluator


@dataclass(frozen=True)
class Request:
    """Asks for the values of a protocol on a set."""

    test: str  # absolute path or URL of the set's index
    train: str | None  # of the set that a protocol of features learns from
    protocol: Protocol
    # A prediction is right where it is the sample's first label: the few-shot probe of training and of the stage
    # fewshot, whose curves go on as they began. Otherwise it may be any of the sample's labels.
    first_label: bool = False
    leaked: Sequence[int] | None = None  # samples of the test set that a leak check names; None: no leak check
    # Samples that the result shows with their predictions, beside counts by class; of protocols of the head.
    examples: int = 0


@dataclass(frozen=True)
class Evaluator:
    """A model, and how this process reads sets for it."""

    group: EvaluationGroup
    model: nn.Module
    dtype: torch.dtype
    folder: Path  # where rank 0 keeps features, in files that have no name and go with the process
    preprocess: str  # evaluation ops
    micro_batch: int  # images that go through the model at once; the same images at any number of workers
    max_labels: int = 1  # of a sample
    cache: CacheConfig | None = None
    ranks: Sequence[int] = (0,)  # the parts of each set that this process reads, of `world` parts
    world: int = 1
    indexes: Mapping[str, Index] = field(default_factory=dict)  # by path, those that are loaded already
    log: Callable[[str], None] | None = None  # for lines about the progress of rank 0, which the others share

    def evaluate(self, requests: Sequence[Request]) -> list[document.Entry]:
        """Collective: return each request's result (document.result_of) at rank 0, and nothing elsewhere.

        Raises EvaluationFailed, which names the set or the protocol, and EvaluationStopped, on all workers alike; in a
        process without a group the error itself.
        """
        results: list[document.Entry] = []
        stores: dict[str, FeatureStore] = {}
        try:
            for number, request in enumerate(requests):
                # The features of two sets are kept at a time: others go unless a later request needs them.
                needed_later: set[str | None] = set()
                for later in requests[number:]:
                    needed_later |= {later.train, later.test}
                for kept in stores.keys() - needed_later:
                    stores.pop(kept).close()
                for path in (request.train, request.test):
                    if path is not None and path not in stores:
                        stores[path] = self.collect(path, requests)
                self.report(f"{request.test}: {request.protocol.name}")
                # Rank 0 computes the protocol from what was collected.
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
        """Collective: pass a set through the model; rank 0's store has all that the requests need of it."""
        best = 0
        with_features = False
        for request in requests:
            if request.protocol.kind.best and request.test == path:
                best = max(best, request.protocol.kind.best)
            if not request.protocol.kind.best and path in (request.test, request.train):
                with_features = True
        try:
            # Where a worker cannot read the index of the set, all workers hear of it.
            index = self.indexes.get(path)
            failure = None
            if index is None:
                try:
                    index = load_index(path)
                except Exception as error:
                    failure = error
                self.group.agree_to_continue(failure)
            assert index is not None, "a failure has been raised"
            store = FeatureStore(index, self.folder)
            collect(
                self.model,
                # A full disk at rank 0 is raised where the next batch is asked for, so that all workers hear of it.
                self.together(store.watching(self.batches(index)), index, path),
                store,
                self.dtype,
                self.group.device,
                with_features=with_features,
                best=best,
                # Rank 0 waits here for the others' batches: one that hangs while it computes has entered a phase fewer.
                on_computed=partial(self.group.phases.enter, "gather", self.group.step),
            )
        except EvaluationFailed as error:
            raise EvaluationFailed(f"{path}: {error}", error.exit_code, path) from error
        return store

    def together(self, batches: Iterator[EvaluationBatch], index: Index, path: str) -> Iterator[EvaluationBatch]:
        """Iterate batches, each once every worker has its own, and log now and then how far they are.

        Raises EvaluationFailed or EvaluationStopped, on all workers alike, where a worker cannot read on or is asked to
        stop.
        """
        began = time.monotonic()
        last_report = began
        passed = 0
        while True:
            batch = None
            failure = None
            try:
                batch = next(batches, None)
            except Exception as error:  # reading and decoding may raise any
                failure = error
            self.group.agree_to_continue(failure)
            if batch is None:
                break
            yield batch
            # All workers have passed as many batches, but for the last.
            passed = min(passed + self.micro_batch * self.world // len(self.ranks), index.samples)
            if time.monotonic() - last_report > PROGRESS_S:
                last_report = time.monotonic()
                self.report(f"{path}: {passed:,} of {index.samples:,} images")
        self.report(f"{path}: {index.samples:,} images in {duration(time.monotonic() - began)}")

    def batches(self, index: Index) -> Iterator[EvaluationBatch]:
        """Iterate this process's batches of a set, each entered as a phase that names the shards which are read.

        An error in the opening of the set is raised at the first batch.
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
            # The set reads one batch ahead: while it gives the first it reads two, and with any other the next one.
            being_read = samples.rows[: 2 * size]
            for number in range(len(samples)):
                # "first … last" of the shards; "" where nothing is left to read, or the batch is padding alone.
                shards = ""
                if being_read:
                    first, _ = samples.place(being_read[0])
                    last, _ = samples.place(being_read[-1])
                    shards = index.shards[first].name
                    if last != first:
                        shards += f" … {index.shards[last].name}"
                phases.enter("evaluate", step, shards)
                batch = next(batches)
                # Again: a worker that waits for the others' batches has entered one phase more than one that reads.
                phases.enter("evaluate", step, shards)
                yield batch
                being_read = samples.rows[(number + 2) * size : (number + 3) * size]
            # No shard is read any more: a worker that hangs in the reduction must not be blamed on the last one.
            phases.enter("evaluate", step)

    def report(self, line: str) -> None:
        """Log a line, at rank 0 of a caller that wants lines."""
        if self.log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self.log(line)


def result_of(request: Request, stores: Mapping[str, FeatureStore], device: torch.device, beat: Beat) -> document.Entry:
    """Compute a request's protocol from the stores of its sets, and return the result.

    Raises DataError where no sample of a set could be read, ConfigError where the protocol does not fit the sets.
    """
    test = stores[request.test]
    train = None
    for path in (request.train, request.test):
        if path is not None and len(stores[path].rows) == 0:
            raise DataError(f"{path}: none of {stores[path].index.samples} samples could be read")
    if request.train is not None:
        train = stores[request.train]
    labels = test.labels
    if request.first_label:
        labels = labels[:, :1]
    protocol = request.protocol
    inputs = Inputs(protocol.name, train, test, labels, device, beat)
    outcome = COMPUTE[protocol.name](inputs, protocol.settings)
    result = document.result_of(outcome, protocol, test, train, request.leaked)
    if request.examples:
        result["examples"] = examples_of(test, request.examples)
        result["class_counts"] = class_counts(test)
    return result


def examples_of(test: FeatureStore, most: int) -> list[document.Entry]:
    """Return samples with labels, prediction and confidence: the most confident mistakes first, then right ones.

    At least a quarter of them are right where there are so many, from all parts of the set, the most confident first.
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
    """Return a row for each class with samples: label, samples, right ones, what most others are taken for, how many.

    A sample with several labels counts in each of their classes. Of a class without mistakes the last two are −1 and 0.
    """
    predicted = test.predictions[:, 0].astype(int)
    sample, column = np.nonzero(test.labels >= 0)
    label = test.labels[sample, column]
    is_right = (test.labels == predicted[:, None]).any(axis=1)[sample]
    samples = np.bincount(label)
    right = np.bincount(label[is_right], minlength=len(samples))
    # Each kind of mistake with its number, as one number: label and prediction.
    classes = max(predicted.max(), label.max(initial=0)) + 1
    mistakes, times = np.unique(label[~is_right] * classes + predicted[sample][~is_right], return_counts=True)
    most_often: dict[int, list[int]] = {}
    for place in np.argsort(-times, kind="stable").tolist():
        mistaken, taken_for = divmod(int(mistakes[place]), int(classes))
        most_often.setdefault(mistaken, [taken_for, int(times[place])])
    rows = []
    for row in np.flatnonzero(samples).tolist():
        rows.append([row, int(samples[row]), int(right[row]), *most_often.get(row, [-1, 0])])
    return rows
