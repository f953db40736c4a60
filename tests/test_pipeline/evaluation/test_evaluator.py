"""Evaluation requests: each set passes through the model once, and only what the protocols need is stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from data.errors import DataError
from data.index.index import Index
from data.index.shard import Shard
from pipeline.evaluation import document
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator, Request, result_of
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.probes import COMPUTE, Inputs, Outcome
from pipeline.evaluation.protocols import (
    PROTOCOLS,
    LinearConfig,
    NeighboursConfig,
    ProtocolKind,
    check_names,
    protocols_of,
)
from pipeline.monitoring.watchdog import Phases
from tests.support import evaluated_sets
from tests.support.evaluated_sets import CPU, NAMES, Sums, no_beat
from tests.support.shards import digits

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def with_a_bad_one(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return evaluated_sets.with_a_bad_one(tmp_path_factory.mktemp("set"))


@contextmanager
def evaluator_of(model: nn.Module, index: Index, folder: Path) -> Iterator[Evaluator]:
    """Return an evaluator of one process for the set "set"."""
    phases = Phases(folder, 0, 60.0)
    yield Evaluator(
        group=EvaluationGroup(phases, CPU, wants_stop=lambda: False),
        model=model,
        dtype=torch.float32,
        folder=folder,
        preprocess="resize(16)",
        micro_batch=16,
        indexes={"set": index},
    )
    phases.close()


def evaluate(model: nn.Module, index: Index, folder: Path, *requests: Request) -> list[document.Entry]:
    """Return the results of one process for the set "set"."""
    with evaluator_of(model, index, folder) as evaluator:
        return evaluator.evaluate(requests)


@pytest.mark.parametrize(
    ("asked", "width", "best"),
    [
        ([("set", None, "top-1")], 0, 1),
        ([("set", None, "top-1"), ("set", None, "top-5"), ("set", None, "real")], 0, 5),
        ([("set", "set", "knn")], 64, 0),
        ([("other", "set", "linear"), ("other", None, "top-5"), ("set", None, "top-1")], 64, 1),
        ([("set", "other", "knn")], 64, 0),
        ([("other", "other", "knn"), ("other", None, "top-1"), ("set", None, "top-5")], 0, 5),
    ],
)
def test_only_what_the_protocols_need_is_stored(asked, width, best, with_a_bad_one: Index, tmp_path: Path) -> None:
    """Protocols of features need the features of both sets; protocols of the head need the best classes."""
    settings = SimpleNamespace(knn=NeighboursConfig((3,)), linear=LinearConfig())
    requests = [Request(test, train, protocols_of((name,), settings, {})[0]) for test, train, name in asked]
    with evaluator_of(Sums(), with_a_bad_one, tmp_path) as evaluator:
        store = evaluator.collect("set", requests)
    assert (store.width, store.file is not None) == (width, width > 0)
    assert (0 if store.all_predictions is None else store.all_predictions.shape[1]) == best
    store.close()


def test_set_passes_through_the_model_once_for_all_requests(with_a_bad_one: Index, tmp_path: Path) -> None:
    model = Sums()
    passed = []
    model.mix.register_forward_hook(lambda *args: passed.append(1))
    settings = SimpleNamespace(knn=NeighboursConfig((3,)), linear=LinearConfig())
    top_1, knn, linear = protocols_of(("top-1", "knn", "linear"), settings, {})
    requests = [Request("set", None, top_1), Request("set", "set", knn), Request("set", "set", linear)]
    results = evaluate(model, with_a_bad_one, tmp_path, *requests)
    assert [list(result["values"]) for result in results] == [["top-1"], ["knn-3"], ["linear"]]
    assert len(passed) == 10, "150 samples in batches of 16"


def test_unreadable_set_has_no_value(tmp_path: Path) -> None:
    index = Index((Shard("a.tar", 5, 0, ""),), 10, (), "d" * 64, "", Path(), names=NAMES)
    (protocol,) = protocols_of(("top-1",), None, {})
    with pytest.raises(DataError, match="set: none of the 5 samples could be read"):
        result_of(Request("set", None, protocol), {"set": FeatureStore(index, tmp_path)}, CPU, no_beat)


def test_new_protocol_needs_only_a_function_and_a_row(
    with_a_bad_one: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most_common(inputs: Inputs, settings: None) -> Outcome:
        common = np.bincount(inputs.training_set().labels[:, 0]).argmax()
        return Outcome({"most-common": [inputs.is_right(np.full(len(inputs.labels), common))]})

    monkeypatch.setitem(PROTOCOLS, "most-common", ProtocolKind())
    monkeypatch.setitem(COMPUTE, "most-common", most_common)
    check_names(("most-common",))
    (protocol,) = protocols_of(("most-common",), None, {})
    (result,) = evaluate(Sums(), with_a_bad_one, tmp_path, Request("set", "set", protocol))
    labels = [s.labels[0] for n, s in enumerate(islice(digits(True, image_size=16), 150)) if n != 77]
    (entry,) = result["values"].values()
    assert entry["value"] == max(labels.count(label) for label in range(10)) / 149
    assert document.share_entry(round(entry["value"] * 149), 149).items() <= entry.items()
    assert (result["train"]["used"], result["set"]["samples"], result["set"]["judged"]) == (149, 150, 149)


class SometimesNotFinite(Sums):
    """A model whose outputs have one bad value for a third of the images."""

    def __init__(self, value: float, part: str) -> None:
        super().__init__()
        self.value = value
        self.part = part

    def features(self, images: torch.Tensor) -> torch.Tensor:
        rows = super().features(images)
        if self.part == "features":
            rows[::3, 5] = self.value
        return rows

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        logits = rows[:, :10].clone()
        if self.part == "logits":
            logits[::3, 7] = self.value
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("part", "name", "refused"),
    [("logits", "top-1", True), ("logits", "knn", False), ("features", "knn", True), ("features", "linear", True)],
)
def test_outputs_that_are_not_finite_have_no_value(
    value, part, name, refused, with_a_bad_one: Index, tmp_path: Path
) -> None:
    settings = SimpleNamespace(knn=NeighboursConfig((3,)), linear=LinearConfig())
    (protocol,) = protocols_of((name,), settings, {})
    request = Request("set", "set" if name != "top-1" else None, protocol)
    model = SometimesNotFinite(value, part)
    if not refused:
        assert evaluate(model, with_a_bad_one, tmp_path, request)
        return
    # Nine batches of 16 with 6 bad rows, one of 6 with 2; the unreadable image 77 is row 13 of its batch.
    with pytest.raises(DataError, match=r"set: .* NaN or infinity for 56 of 149 samples"):
        evaluate(model, with_a_bad_one, tmp_path, request)
