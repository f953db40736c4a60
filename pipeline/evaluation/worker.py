"""One worker that evaluates weights by protocols on sets: the only place where sets meet a model in evaluation.

The training loop and an asynchronous evaluation (pipeline/evaluate.py) and the stages `evaluate` and `fewshot`
(jobs/stages/evaluation_worker.py) all call `Evaluator.evaluate`:

1. Each set passes through the model once, for all the protocols that use it. A worker reads its part of the set and
   sends labels, predictions and features to rank 0 (features.py).
2. Rank 0 computes one protocol after the other (protocols.py); the others wait, and hear of a stop (group.py).
3. Each request has a result in the form of evaluation.json (document.py).

In:  [Request("/shards/test", None, Protocol("top-1", {}))]
Out: [{"set": {"judged": 360, …}, "values": {"top-1": {"value": 0.91, "low": …}}, …}] at rank 0, [] elsewhere
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from data.errors import DataError
from data.evaluation import EvaluationBatch, EvaluationSet
from data.index.document import load_index
from data.index.index import Index
from data.remote.cache import CacheConfig
from pipeline.evaluation import document
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.group import Beat, EvaluationFailed, EvaluationGroup
from pipeline.evaluation.protocols import Inputs, Protocol
from pipeline.monitoring.telemetry import duration
from pipeline.monitoring.watchdog import Phases

PROGRESS_S = 20.0  # between two lines that say how far a pass over a set is


@dataclass(frozen=True)
class Request:
    """One protocol on one set."""

    test: str  # absolute path or URL of the set's index
    train: str | None  # of the set that a protocol of features learns from
    protocol: Protocol
    # A prediction is right where it is the sample's first label: the few-shot probe of training and of the stage
    # fewshot, whose curves go on as they began. Otherwise it may be any of the sample's labels.
    first_label: bool = False
    leaked: Sequence[int] | None = None  # samples of the test set that a leak check names; None: no leak check


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
                result = self.compute(request, stores)
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
            if request.protocol.best and request.test == path:
                best = max(best, request.protocol.best)
            if not request.protocol.best and path in (request.test, request.train):
                with_features = True
        device = self.group.device
        try:
            index = self.open(path)
            store = FeatureStore(index, self.folder)
            # A full disk at rank 0 is raised where the next batch is asked for, so that all workers hear of it.
            batches = self.group.agreed(store.watching(self.batches(index)))
            batches = self.with_progress(batches, index, path)
            collect(
                self.model,
                batches,
                store,
                self.dtype,
                device,
                with_features=with_features,
                best=best,
                # Rank 0 waits here for the others' batches: one that hangs while it computes has entered a phase fewer.
                on_computed=partial(self.group.phases.enter, "gather", self.group.step),
            )
        except EvaluationFailed as error:
            raise EvaluationFailed(f"{path}: {error}", error.exit_code, path) from error
        return store

    def open(self, path: str) -> Index:
        """Collective: return the index of a set; where a worker cannot read it, all hear of it."""
        index = self.indexes.get(path)
        failure = None
        if index is None:
            try:
                index = load_index(path)
            except Exception as error:
                failure = error
            self.group.go_on_together(failure)
        assert index is not None, "a failure has been raised"
        return index

    def batches(self, index: Index) -> Iterator[EvaluationBatch]:
        """Iterate this process's batches of a set; what the opening of the set raises is raised at the first."""
        for rank in self.ranks:
            samples = EvaluationSet(
                index,
                self.preprocess,
                batch_size=self.micro_batch,
                rank=rank,
                world=self.world,
                max_labels=self.max_labels,
                cache=self.cache,
            )
            yield from watched(samples, self.group.phases, self.group.step)

    def with_progress(self, batches: Iterator[EvaluationBatch], index: Index, path: str) -> Iterator[EvaluationBatch]:
        """Iterate batches, and log now and then how far this worker is; the others are as far."""
        began = time.monotonic()
        last_report = began
        passed = 0
        for batch in batches:
            yield batch
            # All workers have passed as many batches, but for the last.
            passed = min(passed + self.micro_batch * self.world // len(self.ranks), index.samples)
            if time.monotonic() - last_report > PROGRESS_S:
                last_report = time.monotonic()
                self.report(f"{path}: {passed:,} of {index.samples:,} images")
        self.report(f"{path}: {index.samples:,} images in {duration(time.monotonic() - began)}")

    def report(self, line: str) -> None:
        """Log a line, at rank 0 of a caller that wants lines."""
        if self.log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self.log(line)

    def compute(self, request: Request, stores: Mapping[str, FeatureStore]) -> document.Entry | None:
        """Collective: return the result of a request at rank 0, from what was collected; None elsewhere."""
        try:
            return self.group.at_rank_0_alone(partial(result_of, request, stores, self.group.device), "protocol")
        except EvaluationFailed as error:
            raise EvaluationFailed(f"{request.protocol.name} on {request.test}: {error}", error.exit_code) from error


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
    labels = test.labels[:, :1] if request.first_label else test.labels
    outcome = request.protocol.compute(Inputs(request.protocol.name, train, test, labels, device, beat))
    return document.result_of(outcome, request.protocol, test, train, request.leaked)


def watched(samples: EvaluationSet, phases: Phases, step: int = 0) -> Iterator[EvaluationBatch]:
    """Iterate the set's batches, each entered as a phase that names the shards which are read meanwhile."""
    batches = iter(samples)
    size = samples.batch_size
    # The set reads one batch ahead: while it gives the first it reads two, and with any other the next one.
    being_read = samples.rows[: 2 * size]
    for number in range(len(samples)):
        # "first … last" of the shards; "" where nothing is left to read, or the batch is padding alone.
        shards = ""
        if being_read:
            first, _ = samples.place(being_read[0])
            last, _ = samples.place(being_read[-1])
            shards = samples.index.shards[first].name
            if last != first:
                shards += f" … {samples.index.shards[last].name}"
        phases.enter("evaluate", step, shards)
        batch = next(batches)
        # Once more: a worker that waits for the others' batches has entered one phase more than one that still reads.
        phases.enter("evaluate", step, shards)
        yield batch
        being_read = samples.rows[(number + 2) * size : (number + 3) * size]
    # No shard is read any more: a worker that hangs in the reduction must not be blamed on the last one.
    phases.enter("evaluate", step)
