"""The protocols of an evaluation against scikit-learn, scipy, NumPy and the original's golden results."""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits
from torch import nn

from data.draws import few_shot_rows
from data.errors import ConfigError, DataError
from data.evaluation import EvaluationSet
from data.index.index import Index
from data.index.shard import Shard
from data.shards.packing import pack
from data.sources.samples import Sample, digits
from pipeline.evaluation import document, probes
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.probes import (
    FewShotConfig,
    Inputs,
    LinearConfig,
    LogisticConfig,
    NeighboursConfig,
    Outcome,
    fit,
    fit_all,
    fit_logistic,
)
from pipeline.evaluation.protocols import (
    PROTOCOLS,
    ProbeConfig,
    Protocol,
    ProtocolKind,
    check_names,
    protocols_of,
)
from pipeline.evaluation.worker import EvaluationGroup, Evaluator, Request, result_of
from pipeline.monitoring.watchdog import Phases

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parents[3].parent / "shared" / "golden"
CPU = torch.device("cpu")
NAMES = ("zero", "one", "two")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: threads that wait for each other took 20 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def no_beat() -> None:
    pass


def outcome_of(protocol: Protocol, train: FeatureStore | None, test: FeatureStore) -> Outcome:
    inputs = Inputs(protocol.name, train, test, test.labels, CPU, no_beat)
    return protocol.kind.compute(inputs, protocol.settings)


def store_of(
    features: np.ndarray | None, labels: np.ndarray, folder: Path, predictions: np.ndarray | None = None
) -> FeatureStore:
    """A store of rank 0 that holds these rows, written in pieces of 100."""
    count = len(labels)
    lists = labels.reshape(count, -1)
    index = Index((Shard("a.tar", count, 0, ""),), 10, (), "d" * 64, "", Path(), names=NAMES)
    store = FeatureStore(index, folder)
    for first in range(0, count, 100):
        place = slice(first, first + 100)
        store.keep(
            torch.arange(count)[place],
            torch.from_numpy(lists[place]),
            None if features is None else torch.from_numpy(features[place]),
            None if predictions is None else torch.from_numpy(predictions[place]),
        )
    return store


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureStore, FeatureStore, dict[str, np.ndarray]]:
    """Pixels of the digits as features: 1,000 rows to learn from, 300 to judge."""
    pixels, labels = load_digits(return_X_y=True)
    folder = tmp_path_factory.mktemp("features")
    arrays = {
        "train": pixels[:1000].astype(np.float32),
        "train_labels": labels[:1000],
        "test": pixels[1000:1300].astype(np.float32),
        "test_labels": labels[1000:1300],
    }
    train = store_of(arrays["train"], arrays["train_labels"], folder)
    return train, store_of(arrays["test"], arrays["test_labels"], folder), arrays


# ------------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize(("right", "samples"), [(0, 10), (10, 10), (1, 3), (355, 400), (49_000, 50_000)])
def test_the_interval_of_a_share_is_scipys_wilson_interval(right: int, samples: int) -> None:
    expected = stats.binomtest(right, samples).proportion_ci(0.95, method="wilson")
    assert document.wilson(right, samples) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_share_written_out_by_hand() -> None:
    # 8 of 10: (0.8 + 1.9208/10 ± 1.96 √(0.16/10 + 0.9604/100)) / (1 + 3.8416/10)
    assert document.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert document.wilson(0, 0) == (0.0, 1.0)


def test_few_shot_has_the_mean_of_its_seeds_and_their_standard_deviation(tmp_path: Path) -> None:
    store = store_of(None, np.zeros(10, int), tmp_path)
    of_seeds = [np.arange(10) < count for count in (5, 6, 10)]
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1,), (3, 4, 5))), {})
    entry = document.result_of(Outcome({"1shot": of_seeds}), protocol, store, None, None)["values"]["1shot"]
    values = [0.5, 0.6, 1.0]
    assert entry["value"] == pytest.approx(np.mean(values)) and entry["sd"] == pytest.approx(np.std(values, ddof=1))
    assert entry["low"] == pytest.approx(np.mean(values) - np.std(values, ddof=1))
    assert entry["seeds"] == {"3": 0.5, "4": 0.6, "5": 1.0}


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
        judged = outcome_of(protocol, None, store)
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
    (protocol,) = protocols_of(("real",), None, {})
    (is_right,) = outcome_of(protocol, None, store).right["real"]
    assert (is_right.sum(), len(is_right)) == (golden["n_correct"], golden["n_evaluated"])


# ------------------------------------------------------------------------------------------------ of features


def test_few_shot_from_a_store_is_the_originals(tmp_path: Path) -> None:
    path = GOLDEN / "fewshot_lsr.npz"
    if not path.exists():
        pytest.skip("golden data is absent: ../shared/golden/fewshot_lsr.npz")
    golden = np.load(path)
    train = store_of(golden["feat_train"].astype(np.float32), golden["labels_train"].astype(int), tmp_path)
    test = store_of(golden["feat_test"].astype(np.float32), golden["labels_test"].astype(int), tmp_path)
    rows = [row for row in json.loads(str(golden["results_json"])) if row["l2"] == 1024.0]
    assert rows
    for row in rows:
        cfg = FewShotConfig((int(row["shots"]),), (int(row["seed"]),))
        (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=cfg), {})
        judged = outcome_of(protocol, train, test)
        name = f"{cfg.shots[0]}shot"
        assert judged.right[name][0].mean() == pytest.approx(row["acc_original"], abs=1e-7)
        expected = golden[f"idx_seed{cfg.seeds[0]}_shots{cfg.shots[0]}"]
        assert sorted(judged.shots[name][str(cfg.seeds[0])]) == sorted(expected)


def test_few_shot_in_training_is_of_first_labels_and_that_of_an_evaluation_of_any(sets, tmp_path: Path) -> None:
    train, _, arrays = sets
    # The true label comes second in every other sample, behind one that is wrong.
    true = arrays["test_labels"]
    labels = np.stack([true, np.full_like(true, -1)], axis=1)
    labels[::2] = np.stack([(true + 1) % 10, true], axis=1)[::2]
    test = store_of(arrays["test"], labels, tmp_path)
    options = FewShotConfig((10,), (0,))
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=options), {})
    of_any = outcome_of(protocol, train, test).right["10shot"][0]
    request = Request("test", "train", ProbeConfig(None, None, shots=(10,), seeds=(0,)).protocol(), first_label=True)
    metrics = document.metrics_with_seeds(result_of(request, {"train": train, "test": test}, CPU, no_beat))
    shares = []
    for place in (0, 1):
        picked = few_shot_rows(arrays["train_labels"], 10, 0)
        fitted = fit(torch.from_numpy(arrays["train"][picked]), torch.from_numpy(arrays["train_labels"][picked]))
        predicted = fitted.scores(torch.from_numpy(arrays["test"])).argmax(1).numpy()
        shares.append((predicted == labels[:, place]).mean())
    assert metrics["10shot"] == metrics["10shot-seed-0"] == pytest.approx(shares[0], abs=1e-9)
    assert of_any.mean() == pytest.approx(shares[0] + shares[1], abs=1e-9) and shares[1] > 0.3


@pytest.mark.parametrize("weighted", [True, False])
def test_neighbours_vote_as_scikit_learns_do(weighted: bool, sets, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, arrays = sets
    monkeypatch.setattr(probes, "TEST_BLOCK", 70)  # several blocks of each set
    monkeypatch.setattr(FeatureStore.blocks, "__defaults__", (None, 130))
    (protocol,) = protocols_of(("knn",), SimpleNamespace(knn=NeighboursConfig((5, 20), weighted)), {})
    outcome = outcome_of(protocol, train, test)
    assert list(outcome.right) == ["knn-5", "knn-20"]
    for k in (5, 20):
        (is_right,) = outcome.right[f"knn-{k}"]
        reference = KNeighborsClassifier(
            k,
            metric="cosine",
            weights=(lambda distances: np.exp((1 - distances) / 0.07)) if weighted else "uniform",
            algorithm="brute",
        )
        reference.fit(arrays["train"].astype(np.float64), arrays["train_labels"])
        expected = reference.predict(arrays["test"].astype(np.float64))
        # float32 and float64 may rank neighbours that are equally near otherwise.
        assert (is_right == (expected == arrays["test_labels"])).mean() > 0.99
        assert is_right.mean() > 0.9


def test_logistic_regression_is_scikit_learns(sets) -> None:
    train, test, arrays = sets
    l2 = 1e-2
    (protocol,) = protocols_of(("logistic",), SimpleNamespace(logistic=LogisticConfig(l2=(l2,))), {})
    outcome = outcome_of(protocol, train, test)
    mean = arrays["train"].astype(np.float64).mean(0)
    std = arrays["train"].astype(np.float64).std(0) + 1e-5
    reference = LogisticRegression(C=1 / (l2 * 1000), tol=1e-10, max_iter=5000)
    reference.fit((arrays["train"] - mean) / std, arrays["train_labels"])
    expected = reference.decision_function((arrays["test"] - mean) / std)
    fitted = fit_logistic(train, train.rows, l2, 1000, CPU, no_beat)
    scores = fitted.scores(test.features(test.rows)).numpy()
    # A constant may be added to all classes' biases: what softmax does not see is taken off.
    scores -= scores.mean(1, keepdims=True)
    assert np.abs(scores - (expected - expected.mean(1, keepdims=True))).max() < 1e-3
    (is_right,) = outcome.right["logistic"]
    assert (is_right == (expected.argmax(1) == arrays["test_labels"])).all() and outcome.chosen == {"l2": l2}


def test_the_penalty_with_the_best_held_out_accuracy_is_chosen(sets) -> None:
    train, test, arrays = sets
    cfg = LogisticConfig(l2=(1e-4, 1e-2, 100.0), held_out=0.2, iterations=200)
    (protocol,) = protocols_of(("logistic",), SimpleNamespace(logistic=cfg), {})
    chosen = outcome_of(protocol, train, test).chosen
    order = np.random.default_rng(cfg.seed).permutation(1000)
    held_out, fitted = np.sort(order[:200]), np.sort(order[200:])
    accuracies = {}
    mean = arrays["train"][fitted].astype(np.float64).mean(0)
    std = arrays["train"][fitted].astype(np.float64).std(0) + 1e-5
    for l2 in cfg.l2:
        reference = LogisticRegression(C=1 / (l2 * 800), max_iter=5000)
        reference.fit((arrays["train"][fitted] - mean) / std, arrays["train_labels"][fitted])
        accuracies[l2] = reference.score((arrays["train"][held_out] - mean) / std, arrays["train_labels"][held_out])
        assert chosen[f"held-out accuracy at l2 {l2:g}"] == pytest.approx(accuracies[l2], abs=0.011)
    assert chosen["l2"] == max(accuracies, key=lambda l2: (chosen[f"held-out accuracy at l2 {l2:g}"], l2))


def test_the_linear_probe_of_all_rows_is_ridge_regression(sets) -> None:
    train, _, arrays = sets
    fitted = fit_all(train, 1024.0, no_beat)
    at_once = fit(torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["train_labels"]))
    torch.testing.assert_close(fitted.weights, at_once.weights, rtol=1e-9, atol=1e-12)
    mean = arrays["train"].astype(np.float64).mean(0)
    std = arrays["train"].astype(np.float64).std(0) + 1e-5
    x = np.hstack([(arrays["train"] - mean) / std, np.full((1000, 1), 100.0)])
    reference = Ridge(alpha=1024.0, fit_intercept=False).fit(x, np.where(np.eye(10)[arrays["train_labels"]], 1.0, -1.0))
    np.testing.assert_allclose(fitted.weights.numpy().T, reference.coef_, rtol=1e-6, atol=1e-9)


def test_more_neighbours_than_training_samples_are_refused(sets, tmp_path: Path) -> None:
    train = store_of(np.ones((5, 3), np.float32), np.arange(5), tmp_path)
    (protocol,) = protocols_of(("knn",), SimpleNamespace(knn=NeighboursConfig((2, 20))), {})
    with pytest.raises(ConfigError, match=r"knn\.k is 20, the training set has 5 samples"):
        outcome_of(protocol, train, train)


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


def evaluate(model: nn.Module, index: Index, folder: Path, *requests: Request) -> list[document.Entry]:
    """The results of one process for the set "set"."""
    phases = Phases(folder, 0, 60.0)
    evaluator = Evaluator(
        group=EvaluationGroup(phases, CPU, wants_stop=lambda: False),
        model=model,
        dtype=torch.float32,
        folder=folder,
        preprocess="resize(16)",
        micro_batch=16,
        indexes={"set": index},
    )
    results = evaluator.evaluate(requests)
    phases.close()
    return results


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

    monkeypatch.setitem(PROTOCOLS, "most-common", ProtocolKind(most_common))
    check_names(("most-common",))
    (protocol,) = protocols_of(("most-common",), None, {})
    (result,) = evaluate(Sums(), with_a_bad_one, tmp_path, Request("set", "set", protocol))
    labels = [s.labels[0] for n, s in enumerate(islice(digits(True, image_size=16), 150)) if n != 77]
    (entry,) = result["values"].values()
    assert entry["value"] == max(labels.count(label) for label in range(10)) / 149
    assert (entry["low"], entry["high"]) == document.wilson(round(entry["value"] * 149), 149)
    assert (result["train"]["used"], result["set"]["samples"], result["set"]["judged"]) == (149, 150, 149)


def test_a_protocols_digest_is_of_its_name_and_fields() -> None:
    (one, other) = protocols_of(("top-1", "knn"), SimpleNamespace(knn=NeighboursConfig()), {"precision": "fp32"})
    canonical = '{"fields": {"precision": "fp32"}, "protocol": "top-1"}'
    assert one.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert other.fields["options"] == {"k": [10, 20], "weighted": True, "temperature": 0.07}
