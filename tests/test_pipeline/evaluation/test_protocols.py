"""The protocols of an evaluation and its document against scipy, NumPy and the original's golden results."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from data.errors import ConfigError, DataError
from data.evaluation import EvaluationSet
from data.index.index import Index
from data.index.shard import Shard
from data.shards.packing import pack
from data.sources.samples import Sample, digits
from models import Preprocessing
from pipeline.architecture import check_shape, preprocessing_of
from pipeline.evaluation import document, features
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator, Request, result_of
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.intervals import over_draws
from pipeline.evaluation.probes import COMPUTE, FewShotConfig, Inputs, LinearConfig, NeighboursConfig, Outcome
from pipeline.evaluation.protocols import PROTOCOLS, ProtocolKind, check_names, protocols_of
from pipeline.monitoring.watchdog import Phases
from tests.support.golden import GOLDEN
from tests.test_pipeline.evaluation.test_probes import CPU, NAMES, inputs_of, no_beat, store_of

pytestmark = pytest.mark.quick


# ------------------------------------------------------------------------------------------------ intervals


def test_the_interval_of_a_share_written_out_by_hand() -> None:
    # 8 of 10: (0.8 + 1.9208/10 ± 1.96 √(0.16/10 + 0.9604/100)) / (1 + 3.8416/10)
    entry = document.share_entry(8, 10)
    assert (entry["low"], entry["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert document.share_entry(0, 0) == {"value": 0.0, "low": 0.0, "high": 1.0, "samples": 0}


def unreadable(features: np.ndarray | None, labels: np.ndarray, folder: Path, missing: list[int]) -> FeatureStore:
    """A store in which some samples of the set could not be read."""
    store = store_of(features, labels, folder)
    store.is_there[missing] = False
    return store


def test_few_shot_has_the_mean_of_its_seeds_their_deviation_and_an_interval(tmp_path: Path) -> None:
    """Seeds are not 0, 1, 2; a test sample cannot be read and three are leaked, of which one cannot be read."""
    store = unreadable(None, np.zeros(120, int), tmp_path, [7])
    right = np.random.default_rng(4).random((3, 119)) < [[0.5], [0.6], [0.9]]
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1,), (3, 4, 5))), {})
    result = document.result_of(Outcome({"1shot": list(right)}), protocol, store, None, [2, 7, 100])
    clean = np.delete(right, [2, 99], axis=1)
    entries = (result["values"]["1shot"], right), (result["leaks"]["values"]["1shot"], clean)
    assert result["leaks"]["leaked"] == 2
    for entry, expected in entries:
        shares = expected.mean(1)
        assert (entry["value"], entry["sd"]) == pytest.approx((shares.mean(), shares.std(ddof=1)))
        assert (entry["low"], entry["high"]) == over_draws(expected)
        assert entry["seeds"] == pytest.approx(dict(zip("345", shares, strict=True)))
        assert entry["samples"] == expected.shape[1] and entry["interval"] == "95 %, over 3 draws and test samples"
    assert np.array_equal(document.right_of(entries[0][0]), right)


def test_a_single_draw_says_what_it_cannot_tell(tmp_path: Path) -> None:
    store = store_of(None, np.zeros(10, int), tmp_path)
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1,), (7,))), {})
    entry = document.result_of(Outcome({"1shot": [np.arange(10) < 8]}), protocol, store, None, None)["values"]["1shot"]
    assert (entry["low"], entry["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4) and "sd" not in entry
    assert "a single draw tells nothing of the variance over draws" in entry["interval"] and entry["seeds"] == {
        "7": 0.8
    }


def test_shots_are_named_by_shard_and_place_in_it(tmp_path: Path) -> None:
    """In shards of 4, 1 and 7 samples; two seeds and two values."""
    shards = tuple(Shard(f"{name}.tar", count, 0, "") for name, count in (("a", 4), ("b", 1), ("c", 7)))
    train = FeatureStore(Index(shards, 10, (), "d" * 64, "", Path(), names=NAMES), tmp_path)
    test = store_of(None, np.zeros(5, int), tmp_path)
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1, 2), (3, 4))), {})
    right = [np.ones(5, bool)] * 2
    shots = {"1shot": {"3": [0, 3, 4], "4": [5, 11]}, "2shot": {"3": [11, 6], "4": [1]}}
    result = document.result_of(Outcome({"1shot": right, "2shot": right}, shots), protocol, test, train, None)
    assert result["shots"] == {
        "1shot": {"3": [[0, 0], [0, 3], [1, 0]], "4": [[2, 0], [2, 6]]},
        "2shot": {"3": [[2, 6], [2, 1]], "4": [[0, 1]]},
    }


# ------------------------------------------------------------------------------------------------ the whole document


def results_of_two_sets() -> dict:
    """A document as evaluation.json holds it: of two sets, one of which was compared with a training set."""
    share = {"value": 0.8, "low": 0.4902, "high": 0.9433, "samples": 10}
    draws = {"value": 0.5, "low": 0.25, "high": 0.75, "samples": 1200, "sd": 0.0123, "seeds": {"3": 0.4, "5": 0.6}}
    leaks = {
        "leaked": 2,
        "train": [{"digest": "e" * 64}],
        "checked": [{"path": "/train", "digest": "e" * 64}],
        "not_checked": [{"path": "/more", "digest": "f" * 64}],
        "values": {"top-1": {"value": 0.75}},
    }
    return {
        "weights": {"trained_on": {"sets": [{"digest": "b" * 64}], "unknown": ""}},
        "results": [
            {"set": {"name": "pets", "digest": "a" * 64, "samples": 10}, "values": {"top-1": share}, "leaks": leaks},
            {
                "set": {"name": "flowers", "digest": "b" * 64, "samples": 1300},
                "values": {"5shot": draws, "1shot": {**draws, "seeds": {"3": 0.5}}},
                "leaks": "not checked",
            },
        ],
    }


def test_the_table_of_a_document_word_for_word() -> None:
    whole = results_of_two_sets()
    del whole["results"][1]["values"]["1shot"]["sd"]
    verdict = "75.00% without 2 shared with eeeeeeee; /more (ffffffff) not checked"
    learned = "the weights were trained on this set; not checked"
    lines: list[str] = []
    document.log_table(whole, lines.append)
    assert lines == [
        "set      protocol  value   95 % interval     sd        samples  leaks",
        f"pets     top-1     80.00%  49.02% to 94.33%  -         10       {verdict}",
        f"flowers  5shot     50.00%  25.00% to 75.00%  ± 1.23%   1,200    {learned}",
        f"flowers  1shot     50.00%  25.00% to 75.00%  one draw  1,200    {learned}",
    ]


def test_values_of_several_sets_carry_the_sets_name_and_say_whether_the_set_is_whole() -> None:
    whole = results_of_two_sets()
    entries = document.entries_of(whole)
    assert {name: entry["whole"] for name, entry in entries.items()} == {
        "pets top-1": "a" * 64,
        "flowers 5shot": "",
        "flowers 1shot": "",
    }
    assert list(document.entries_of({**whole, "results": whole["results"][1:]})) == ["5shot", "1shot"]
    assert document.metrics_with_seeds(whole["results"][1]) == {
        "5shot-seed-3": 0.4,
        "5shot-seed-5": 0.6,
        "5shot": 0.5,
        "1shot-seed-3": 0.5,
        "1shot": 0.5,
    }


# ------------------------------------------------------------------------------------------------ of the head


def test_top_1_top_5_and_per_class_are_numpys(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(500, 10))
    labels = rng.integers(3, size=500)
    scores[np.arange(500), labels] += 1.0
    ranked = np.argsort(-scores, axis=1)[:, :5]
    store = store_of(None, labels, tmp_path, ranked)
    results = {}
    for protocol in protocols_of(("top-1", "top-5", "per-class"), None, {}):
        judged = COMPUTE[protocol.name](inputs_of(None, store, protocol.name), None)
        results[protocol.name] = document.result_of(judged, protocol, store, None, None)

    is_right = scores.argmax(1) == labels
    rank = (scores > scores[np.arange(500), labels][:, None]).sum(1)
    assert results["top-1"]["values"]["top-1"]["value"] == is_right.mean()
    assert results["top-5"]["values"]["top-5"]["value"] == (rank < 5).mean() > is_right.mean()
    by_class = [is_right[labels == label].mean() for label in range(3)]
    entries = results["per-class"]["classes"]
    assert [(entry["name"], entry["samples"]) for entry in entries] == [
        (name, (labels == label).sum()) for label, name in enumerate(NAMES)
    ]
    assert [entry["value"] for entry in entries] == pytest.approx(by_class)
    assert results["per-class"]["values"]["per-class"]["value"] == pytest.approx(np.mean(by_class))


def test_per_class_counts_images_and_a_label_list_in_each_of_its_classes(tmp_path: Path) -> None:
    """Three labels at most, classes of unequal sizes, one that no image has, an image without a label, a bad one."""
    rng = np.random.default_rng(8)
    labels = np.full((90, 3), -1)
    for row in range(89):
        chosen = rng.choice([0, 1, 2, 2, 5], size=rng.integers(1, 4))
        labels[row, : len(set(chosen))] = sorted(set(chosen))
    predictions = rng.choice([0, 1, 2, 5], size=(90, 1))
    store = store_of(None, labels, tmp_path, predictions)
    store.is_there[13] = False
    (protocol,) = protocols_of(("per-class",), None, {})
    judged = COMPUTE[protocol.name](inputs_of(None, store, "per-class"), None)
    result = document.result_of(judged, protocol, store, None, None)
    shares = {}
    for label in (0, 1, 2, 5):
        of_class = [row for row in range(89) if row != 13 and label in labels[row]]
        shares[label] = (len(of_class), np.mean([predictions[row, 0] in labels[row] for row in of_class]))
    assert [entry["id"] for entry in result["classes"]] == list(shares)
    for entry in result["classes"]:
        assert (entry["samples"], entry["value"]) == pytest.approx(shares[entry["id"]])
    assert len({count for count, _ in shares.values()}) > 1
    entry = result["values"]["per-class"]
    assert entry["value"] == pytest.approx(np.mean([share for _, share in shares.values()]))
    assert entry["samples"] == 88 < sum(count for count, _ in shares.values()), "images, not labels"
    assert [entry["name"] for entry in result["classes"]] == [*NAMES, None]


def test_real_accuracy_is_the_originals(tmp_path: Path) -> None:
    """Any of several labels; images with an empty list are left out, as the source that packs them does."""
    path = GOLDEN / "real_eval.json"
    if not path.exists():
        pytest.skip("golden data is absent: ../shared/golden/real_eval.json")
    golden = json.loads(path.read_text())
    judged_images = [(p, ls) for p, ls in zip(golden["predictions"], golden["real_labels"], strict=True) if ls]
    labels = np.full((len(judged_images), 16), -1)
    for row, (_, lists) in enumerate(judged_images):
        labels[row, : len(lists)] = lists
    predictions = np.array([[predicted] for predicted, _ in judged_images])
    store = store_of(None, labels, tmp_path, predictions)
    (is_right,) = COMPUTE["real"](inputs_of(None, store, "real"), None).right["real"]
    assert (is_right.sum(), len(is_right)) == (golden["n_correct"], golden["n_evaluated"])


# ------------------------------------------------------------------------------------------------ the store


class Sums(nn.Module):
    """Features are sums of pixels over rows and columns, whose bits depend on how a batch is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.mix = nn.Linear(3 * 16 * 16, 64)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.mix(images.flatten(1)) + images.mean()  # the mean over the batch: it shows who was in it


@pytest.fixture(scope="module")
def with_a_bad_one(tmp_path_factory: pytest.TempPathFactory) -> Index:
    good = list(islice(digits(True, image_size=16), 150))
    samples = [Sample(s.key, s.image if n != 77 else b"junk", s.labels) for n, s in enumerate(good)]
    return pack(samples, tmp_path_factory.mktemp("set"), shard_samples=40)


def collected(index: Index, world: int, folder: Path) -> FeatureStore:
    """What rank 0 has received when every rank of a world has given its part, one after the other."""
    torch.manual_seed(0)
    model = Sums()
    store = FeatureStore(index, folder)
    for rank in range(world):
        samples = EvaluationSet(index, "resize(16)", batch_size=16, rank=rank, world=world)
        collect(model, store.watching(samples), store, torch.float32, CPU, best=5)
    return store


def test_what_rank_0_has_is_the_same_to_the_bit_at_any_world(with_a_bad_one: Index, tmp_path: Path) -> None:
    alone = collected(with_a_bad_one, 1, tmp_path)
    assert alone.rows.tolist() == [row for row in range(150) if row != 77], "every good sample once, in order"
    for world in (2, 3, 4, 16):
        store = collected(with_a_bad_one, world, tmp_path)
        assert np.array_equal(store.rows, alone.rows) and np.array_equal(store.labels, alone.labels)
        assert torch.equal(store.features(store.rows), alone.features(alone.rows))
        assert np.array_equal(store.predictions, alone.predictions)
    assert not list(tmp_path.iterdir()), "the file has no name: nothing is left behind"


def test_rank_0_receives_what_each_of_the_others_sends(
    with_a_bad_one: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten batches for three ranks: the last rank has two of padding. Those that send keep nothing."""
    alone = collected(with_a_bad_one, 1, tmp_path)
    torch.manual_seed(0)
    model = Sums()
    sent: dict[int, deque[torch.Tensor]] = {1: deque(), 2: deque()}
    for rank in (1, 2, 0):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank, get_world_size=lambda: 3)
        group.send = lambda tensor, to, rank=rank: sent[rank].append(tensor.clone())
        group.recv = lambda tensor, source: tensor.copy_(sent[source].popleft())
        monkeypatch.setattr(features, "dist", group)
        store = FeatureStore(with_a_bad_one, tmp_path)
        samples = EvaluationSet(with_a_bad_one, "resize(16)", batch_size=16, rank=rank, world=3)
        collect(model, store.watching(samples), store, torch.float32, CPU, best=5)
        assert (len(store.rows) > 0) == (rank == 0)
    assert not sent[1] and not sent[2] and np.array_equal(store.rows, alone.rows)
    assert torch.equal(store.features(store.rows), alone.features(alone.rows))
    assert np.array_equal(store.labels, alone.labels) and np.array_equal(store.predictions, alone.predictions)


@pytest.mark.parametrize(("count", "size"), [(12, 4), (13, 4), (11, 4), (3, 4), (4, 4), (5, 1), (0, 4)])
def test_blocks_hold_every_row_once_and_in_order(count: int, size: int, tmp_path: Path) -> None:
    features = np.random.default_rng(6).normal(size=(20, 3)).astype(np.float32)
    store = unreadable(features, np.zeros(20, int), tmp_path, [2, 9])
    assert [place for place, _ in store.blocks(size=18)] == [slice(0, 18)]
    for rows in (store.rows[:count], np.random.default_rng(count).permutation(store.rows)[:count]):
        places = []
        blocks = [np.empty((0, 3), np.float32)]
        for place, block in store.blocks(rows, size):
            places.append((place.start, place.stop))
            blocks.append(block.numpy())
        assert places == [(first, min(first + size, count)) for first in range(0, count, size)]
        assert np.array_equal(np.concatenate(blocks), features[rows])


def test_a_disk_without_room_is_refused_at_the_first_batch(
    with_a_bad_one: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    store = FeatureStore(with_a_bad_one, tmp_path)
    samples = EvaluationSet(with_a_bad_one, "resize(16)", batch_size=16)
    passed = 0
    with pytest.raises(OSError, match="cannot keep features: No space left on device") as refusal:
        for batch in store.watching(samples):
            passed += 1
            store.keep(torch.arange(16), batch.labels, torch.ones(16, 4))
    assert passed == 1 and refusal.value.filename == str(tmp_path)


# ------------------------------------------------------------------------------------------------ leaks


def test_values_are_given_with_and_without_leaked_samples(with_a_bad_one: Index, tmp_path: Path) -> None:
    numbers = [3, 45, 46, 149]
    store = collected(with_a_bad_one, 1, tmp_path)
    is_right = np.zeros(149, bool)
    is_right[[3, 45, 46, 148]] = True  # row 148 of those that could be read is sample 149
    (protocol,) = protocols_of(("top-1",), None, {})
    result = document.result_of(Outcome({"top-1": [is_right]}), protocol, store, None, numbers)
    assert result["values"]["top-1"]["value"] == 4 / 149
    without = result["leaks"]["values"]["top-1"]
    assert (result["leaks"]["leaked"], without["value"], without["samples"]) == (4, 0.0, 145)


@contextmanager
def evaluator_of(model: nn.Module, index: Index, folder: Path) -> Iterator[Evaluator]:
    """One process, for the set "set"."""
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
    """The results of one process for the set "set"."""
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
def test_of_a_set_what_its_protocols_need_is_kept(asked, width, best, with_a_bad_one: Index, tmp_path: Path) -> None:
    """Of the set "set": a protocol of features wants them of both its sets, one of the head its best classes."""
    settings = SimpleNamespace(knn=NeighboursConfig((3,)), linear=LinearConfig())
    requests = [Request(test, train, protocols_of((name,), settings, {})[0]) for test, train, name in asked]
    with evaluator_of(Sums(), with_a_bad_one, tmp_path) as evaluator:
        store = evaluator.collect("set", requests)
    assert (store.width, store.file is not None) == (width, width > 0)
    assert (0 if store.all_predictions is None else store.all_predictions.shape[1]) == best
    store.close()


def test_a_set_passes_through_the_model_once_for_all_its_requests(with_a_bad_one: Index, tmp_path: Path) -> None:
    model = Sums()
    passed = []
    model.mix.register_forward_hook(lambda *args: passed.append(1))
    settings = SimpleNamespace(knn=NeighboursConfig((3,)), linear=LinearConfig())
    top_1, knn, linear = protocols_of(("top-1", "knn", "linear"), settings, {})
    requests = [Request("set", None, top_1), Request("set", "set", knn), Request("set", "set", linear)]
    results = evaluate(model, with_a_bad_one, tmp_path, *requests)
    assert [list(result["values"]) for result in results] == [["top-1"], ["knn-3"], ["linear"]]
    assert len(passed) == 10, "150 samples in batches of 16"


def test_a_set_of_which_nothing_can_be_read_has_no_value(tmp_path: Path) -> None:
    index = Index((Shard("a.tar", 5, 0, ""),), 10, (), "d" * 64, "", Path(), names=NAMES)
    (protocol,) = protocols_of(("top-1",), None, {})
    with pytest.raises(DataError, match="set: none of 5 samples could be read"):
        result_of(Request("set", None, protocol), {"set": FeatureStore(index, tmp_path)}, CPU, no_beat)


def test_a_new_protocol_is_a_function_and_a_row(
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


def test_every_protocol_has_a_function() -> None:
    assert COMPUTE.keys() == PROTOCOLS.keys()


def test_a_protocols_digest_is_of_its_name_and_fields() -> None:
    (one, other) = protocols_of(("top-1", "knn"), SimpleNamespace(knn=NeighboursConfig()), {"precision": "fp32"})
    canonical = '{"fields": {"precision": "fp32"}, "protocol": "top-1"}'
    assert one.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert other.fields["options"] == {"k": [10, 20], "weighted": True, "temperature": 0.07}


# ------------------------------------------------------------------------------------------------ preprocessing

WIDE: Any = SimpleNamespace(image_size=(32, 48), family="vit")
RESNET: Any = SimpleNamespace(image_size=(32, 48), family="bit")


@pytest.mark.parametrize(
    ("ops", "model", "size"),
    [
        (None, WIDE, None),
        ("", WIDE, None),
        ("resize((32, 48))", WIDE, None),
        ("resize(64)|central_crop((32, 48))", WIDE, None),
        ("resize(48)", WIDE, "48×48"),
        ("resize((48, 32))", WIDE, "48×32"),
        (None, RESNET, None),
        ("resize(48)", RESNET, None),
    ],
)
def test_ops_make_images_of_the_models_size(ops, model, size) -> None:
    if size is None:
        check_shape(ops, model, "data.preprocess")
        return
    with pytest.raises(ConfigError, match=f"^data.preprocess: .* makes images of {size}, expected the model's 32×48\n"):
        check_shape(ops, model, "data.preprocess")


@pytest.mark.parametrize(
    ("ops", "size", "resize", "interpolation"),
    [
        (None, (32, 48), (32, 48), "bilinear"),
        ("resize(48)", (48, 48), (48, 48), "bilinear"),
        ("resize(48, antialias=True)", (48, 48), (48, 48), "bilinear antialiased"),
        ("resize(48, antialias=False)", (48, 48), (48, 48), "bilinear"),
        ("decode|resize_tf1(48)", (48, 48), (48, 48), "bilinear of TensorFlow 1"),
        ("resize_small(64)|central_crop((32, 48))", (32, 48), 64, "area"),
        # What other libraries cannot be told is kept as ops alone.
        ("central_crop(48)", (48, 48), None, "bilinear"),
        ("resize(64)|central_crop(48)|resize(32)", (32, 32), None, "bilinear"),
    ],
)
def test_the_preprocessing_that_exports_tell_of(ops, size, resize, interpolation) -> None:
    expected = Preprocessing(ops or "resize((32, 48))", size, resize, interpolation)
    assert preprocessing_of(ops, WIDE) == expected
