"""Probes of frozen features, compared with scikit-learn, NumPy and golden results of the original."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits

from data.draws import few_shot_rows
from data.errors import ConfigError
from pipeline.evaluation import document, probes
from pipeline.evaluation.evaluator import Request, result_of
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.probes import (
    FewShotConfig,
    LinearConfig,
    LogisticConfig,
    NeighboursConfig,
    few_shot,
    fit,
    fit_all,
    fit_logistic,
)
from pipeline.evaluation.protocols import probe_protocol
from pipeline.training_config import ProbeConfig
from tests.support.evaluated_sets import CPU, inputs_of, no_beat, store_of
from tests.support.golden import read_golden

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, waiting threads made small matrices 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureStore, FeatureStore, dict[str, np.ndarray]]:
    """Return pixels of the digits as features: 1,000 training rows and 300 test rows."""
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


# ------------------------------------------------------------------------------------------------ the closed form


@pytest.fixture(scope="module")
def golden():
    return read_golden("fewshot_lsr.npz")


def accuracy_of(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, expected: np.ndarray, *, shots: int, seed: int, l2: float
) -> float:
    rows = few_shot_rows(labels, shots, seed)
    fitted = fit(torch.from_numpy(train[rows]), torch.from_numpy(labels[rows]), l2)
    return float((fitted.scores(torch.from_numpy(test)).argmax(1).numpy() == expected).mean())


def test_few_shot_matches_golden_accuracies_exactly_if_well_conditioned(golden):
    rows = json.loads(str(golden["results_json"]))
    sets = [golden[name] for name in ("feat_train", "labels_train", "feat_test", "labels_test")]
    for row in rows:
        accuracy = accuracy_of(*sets, shots=int(row["shots"]), seed=int(row["seed"]), l2=row["l2"])
        tolerance = 1e-7 if row["agree"] == 1 else 0.01  # float32 eigh is ill-conditioned at tiny l2
        assert accuracy == pytest.approx(row["acc_original"], abs=tolerance), row
    assert len(rows) == 27


def test_picked_rows_match_the_original(golden):
    for name in golden.files:
        if name.startswith("idx_seed"):
            seed, shots = (int(part) for part in name.removeprefix("idx_seed").split("_shots"))
            ours = few_shot_rows(golden["labels_train"], shots, seed)
            assert sorted(ours) == sorted(golden[name])


def test_class_with_fewer_samples_than_shots_uses_all_of_them():
    labels = np.array([0, 0, 0, 1, 2, 2])
    assert sorted(few_shot_rows(labels, shots=2, seed=0))[-3:] == [3, 4, 5]
    assert len(few_shot_rows(labels, shots=2, seed=0)) == 5


@pytest.mark.parametrize(("rows", "width"), [(6, 40), (12, 11), (13, 12)])
def test_fewer_rows_than_features_give_the_minimum_norm_interpolation(rows: int, width: int) -> None:
    """Compare with NumPy's pseudo-inverse, without a penalty; there is one more feature, the constant."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, width))
    labels = np.arange(rows) % 3
    design = np.hstack([(x - x.mean(0)) / (x.std(0) + 1e-5), np.full((rows, 1), 100.0)])
    targets = np.where(np.eye(3)[labels], 1.0, -1.0)
    fitted = fit(torch.from_numpy(x), torch.from_numpy(labels), 0.0)
    # The fit goes through the Gram matrix: its rounding grows with the square of the design's condition number,
    # and how much of that bound is used differs from one BLAS to another.
    rounding = 10 * np.finfo(np.float64).eps * np.linalg.cond(design) ** 2
    weights = np.linalg.pinv(design) @ targets
    np.testing.assert_allclose(fitted.weights.numpy(), weights, rtol=1e-6, atol=rounding * np.abs(weights).max())
    np.testing.assert_allclose(fitted.scores(torch.from_numpy(x)).numpy(), targets, atol=1e-9 + rounding)


def test_few_shot_from_a_store_matches_the_original(golden, tmp_path: Path) -> None:
    train = store_of(golden["feat_train"].astype(np.float32), golden["labels_train"].astype(int), tmp_path)
    test = store_of(golden["feat_test"].astype(np.float32), golden["labels_test"].astype(int), tmp_path)
    rows = [row for row in json.loads(str(golden["results_json"])) if row["l2"] == 1024.0]
    assert rows
    for row in rows:
        cfg = FewShotConfig((int(row["shots"]),), (int(row["seed"]),))
        judged = few_shot(inputs_of(train, test), cfg)
        name = f"{cfg.shots[0]}shot"
        assert judged.right[name][0].mean() == pytest.approx(row["acc_original"], abs=1e-7)
        expected = golden[f"idx_seed{cfg.seeds[0]}_shots{cfg.shots[0]}"]
        assert sorted(judged.shots[name][str(cfg.seeds[0])]) == sorted(expected)


def test_few_shot_uses_first_labels_in_training_and_any_label_in_evaluation(sets, tmp_path: Path) -> None:
    train, _, arrays = sets
    # In every other sample the true label comes second, after a wrong one.
    true = arrays["test_labels"]
    labels = np.stack([true, np.full_like(true, -1)], axis=1)
    labels[::2] = np.stack([(true + 1) % 10, true], axis=1)[::2]
    test = store_of(arrays["test"], labels, tmp_path)
    of_any = few_shot(inputs_of(train, test), FewShotConfig((10,), (0,))).right["10shot"][0]
    request = Request(
        "test", "train", probe_protocol(ProbeConfig(None, None, shots=(10,), seeds=(0,))), first_label=True
    )
    metrics = document.metrics_with_seeds(result_of(request, {"train": train, "test": test}, CPU, no_beat))
    shares = []
    for place in (0, 1):
        picked = few_shot_rows(arrays["train_labels"], 10, 0)
        fitted = fit(torch.from_numpy(arrays["train"][picked]), torch.from_numpy(arrays["train_labels"][picked]))
        predicted = fitted.scores(torch.from_numpy(arrays["test"])).argmax(1).numpy()
        shares.append((predicted == labels[:, place]).mean())
    assert metrics["10shot"] == metrics["10shot-seed-0"] == pytest.approx(shares[0], abs=1e-9)
    assert of_any.mean() == pytest.approx(shares[0] + shares[1], abs=1e-9)
    assert shares[1] > 0.3


@pytest.mark.parametrize("weighted", [True, False])
def test_knn_matches_scikit_learn(weighted: bool, sets, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, arrays = sets
    monkeypatch.setattr(probes, "TEST_BLOCK", 70)  # several blocks of each set
    monkeypatch.setattr(FeatureStore.blocks, "__defaults__", (None, 130))
    outcome = probes.knn(inputs_of(train, test), NeighboursConfig((5, 20), weighted))
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
        # float32 and float64 may order equally near neighbours differently.
        assert (is_right == (expected == arrays["test_labels"])).mean() > 0.99
        assert is_right.mean() > 0.9


def test_logistic_regression_matches_scikit_learn(sets) -> None:
    train, test, arrays = sets
    l2 = 1e-2
    outcome = probes.logistic(inputs_of(train, test), LogisticConfig(l2=(l2,)))
    mean = arrays["train"].astype(np.float64).mean(0)
    std = arrays["train"].astype(np.float64).std(0) + 1e-5
    reference = LogisticRegression(C=1 / (l2 * 1000), tol=1e-10, max_iter=5000)
    reference.fit((arrays["train"] - mean) / std, arrays["train_labels"])
    expected = reference.decision_function((arrays["test"] - mean) / std)
    fitted = fit_logistic(train, train.rows, l2, 1000, CPU, no_beat)
    scores = fitted.scores(test.features(test.rows)).numpy()
    # Softmax is invariant to a constant added to all biases, so subtract it.
    scores -= scores.mean(1, keepdims=True)
    assert np.abs(scores - (expected - expected.mean(1, keepdims=True))).max() < 1e-3
    (is_right,) = outcome.right["logistic"]
    assert (is_right == (expected.argmax(1) == arrays["test_labels"])).all()
    assert outcome.chosen == {"l2": l2}


def test_logistic_regression_uses_the_first_and_the_last_row(sets, tmp_path: Path) -> None:
    """Two classes have a single row: a fit that skips either row never predicts its class."""
    _, test, arrays = sets
    middle = np.flatnonzero((arrays["train_labels"] != 3) & (arrays["train_labels"] != 6))[:200]
    first = np.flatnonzero(arrays["train_labels"] == 3)[:1]
    last = np.flatnonzero(arrays["train_labels"] == 6)[:1]
    rows = np.concatenate([first, middle, last])
    train = store_of(arrays["train"][rows], arrays["train_labels"][rows], tmp_path)
    (is_right,) = probes.logistic(inputs_of(train, test), LogisticConfig(l2=(1e-3,))).right["logistic"]
    reference = LogisticRegression(C=1 / (1e-3 * len(rows)), tol=1e-10, max_iter=5000)
    mean = arrays["train"][rows].astype(np.float64).mean(0)
    std = arrays["train"][rows].astype(np.float64).std(0) + 1e-5
    reference.fit((arrays["train"][rows] - mean) / std, arrays["train_labels"][rows])
    expected = reference.predict((arrays["test"] - mean) / std)
    for label in (3, 6):
        assert (expected == label).any()
        assert is_right[(expected == label) & (arrays["test_labels"] == label)].all()
    assert (is_right == (expected == arrays["test_labels"])).mean() > 0.99


def test_penalty_with_the_best_held_out_accuracy_is_chosen(sets) -> None:
    train, test, arrays = sets
    cfg = LogisticConfig(l2=(1e-4, 1e-2, 100.0), held_out=0.2, iterations=200)
    chosen = probes.logistic(inputs_of(train, test), cfg).chosen
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


@pytest.mark.parametrize("shots", [1, 4])
def test_shots_are_sample_numbers_even_if_samples_are_missing(shots: int, sets, tmp_path: Path) -> None:
    _, test, arrays = sets
    features, labels = arrays["train"][:200], arrays["train_labels"][:200]
    train = store_of(features, labels, tmp_path)
    missing = [0, 3, 77, 150]
    train.is_there[missing] = False
    outcome = few_shot(inputs_of(train, test), FewShotConfig((shots,), (5, 9)))
    kept = np.delete(np.arange(200), missing)
    for place, seed in enumerate((5, 9)):
        rng = np.random.default_rng(seed)
        expected = []
        for label in range(10):
            expected += kept[rng.permutation(np.flatnonzero(labels[kept] == label))[:shots]].tolist()
        assert outcome.shots[f"{shots}shot"][str(seed)] == expected
        mean, std = features[expected].astype(float).mean(0), features[expected].astype(float).std(0) + 1e-5
        design = np.hstack([(features[expected] - mean) / std, np.full((10 * shots, 1), 100.0)])
        ridge = Ridge(alpha=1024.0, fit_intercept=False)
        ridge.fit(design, np.where(np.eye(10)[labels[expected]], 1.0, -1.0))
        scores = np.hstack([(arrays["test"] - mean) / std, np.full((300, 1), 100.0)]) @ ridge.coef_.T
        agreement = outcome.right[f"{shots}shot"][place] == (scores.argmax(1) == arrays["test_labels"])
        assert agreement.mean() > 0.99


@pytest.mark.parametrize(
    ("images_of_class", "notes", "draws"),
    [
        (
            [6] * 10,
            {"2shot": None, "5shot": None, "9shot": "10 of 10 .* fewer than 9 .*fewest: 6"},
            (3, 3, 1),
        ),
        ([3] * 10, {"2shot": None, "5shot": "10 of 10 .*fewest: 3", "9shot": "10 of 10 .*fewest: 3"}, (3, 1, 1)),
        ([20] * 9 + [4], {"2shot": None, "5shot": "1 of 10 .*fewest: 4", "9shot": "1 of 10 .*fewest: 4"}, (3, 3, 3)),
        ([20] * 8 + [0, 9], {"2shot": "1 of 10 .*fewest: 0", "9shot": "1 of 10 .*fewest: 0"}, (3, 3, 3)),
        ([20] * 10, {"2shot": None, "5shot": None, "9shot": None}, (3, 3, 3)),
    ],
)
def test_too_few_images_are_reported_and_equal_draws_are_one_draw(
    images_of_class, notes, draws, sets, tmp_path: Path
) -> None:
    _, test, arrays = sets
    chosen = []
    for label, count in enumerate(images_of_class):
        chosen += np.flatnonzero(arrays["train_labels"] == label)[:count].tolist()
    train = store_of(arrays["train"][chosen], arrays["train_labels"][chosen], tmp_path)
    request = Request("test", "train", probe_protocol(ProbeConfig(shots=(2, 5, 9), seeds=(4, 5, 6))))
    result = result_of(request, {"train": train, "test": test}, CPU, no_beat)
    for name, note in notes.items():
        assert re.search(note, result["values"][name]["note"]) if note else "note" not in result["values"][name], name
    assert len(document.notes_of(result)) == sum("note" in entry for entry in result["values"].values())
    for (name, entry), count in zip(result["values"].items(), draws, strict=True):
        # Counted by hand: draws of the whole training set are equal.
        assert len(entry["seeds"]) == len(document.right_of(entry)) == count
        assert list(result["shots"][name]) == ["4", "5", "6"][:count]
        assert entry["value"] == pytest.approx(np.mean(list(entry["seeds"].values())))
        assert ("sd" in entry) == (count > 1)
        if count == 1:
            assert entry["interval"].startswith("95 %, over test samples; a single draw")
            assert (entry["low"], entry["high"]) == wilson(entry["value"], 300)


@pytest.mark.parametrize("settings", [ProbeConfig, FewShotConfig])
def test_repeated_seeds_are_refused(settings) -> None:
    with pytest.raises(ConfigError, match="expected no duplicates"):
        settings(seeds=(1, 2, 1))


@pytest.mark.parametrize(
    ("seed", "held_out", "l2"), [(3, 0.2, (1e-2, 30.0)), (11, 0.37, (1e-3, 1e-1, 1e3)), (2, 0.001, (1e-1, 1.0))]
)
def test_chosen_penalty_is_fitted_to_all_rows(
    seed: int, held_out: float, l2: tuple[float, ...], sets, tmp_path: Path
) -> None:
    """With two unreadable samples, split, choice and final fit match scikit-learn and NumPy."""
    _, test, arrays = sets
    features, labels = arrays["train"][:150], arrays["train_labels"][:150]
    train = store_of(features, labels, tmp_path)
    train.is_there[[4, 140]] = False
    kept = np.delete(np.arange(150), [4, 140])
    cfg = LogisticConfig(l2=l2, held_out=held_out, seed=seed, iterations=300)
    outcome = probes.logistic(inputs_of(train, test), cfg)

    def fitted(rows: np.ndarray, penalty: float) -> tuple[LogisticRegression, np.ndarray, np.ndarray]:
        mean, std = features[rows].astype(float).mean(0), features[rows].astype(float).std(0) + 1e-5
        reference = LogisticRegression(C=1 / (penalty * len(rows)), max_iter=5000)
        return reference.fit((features[rows] - mean) / std, labels[rows]), mean, std

    count = max(1, round(held_out * 148))
    order = np.random.default_rng(seed).permutation(148)
    aside, used = kept[order[:count]], kept[np.sort(order[count:])]
    accuracies = {}
    for penalty in l2:
        reference, mean, std = fitted(used, penalty)
        accuracies[penalty] = reference.score((features[aside] - mean) / std, labels[aside])
        found = outcome.chosen[f"held-out accuracy at l2 {penalty:g}"]
        assert found == pytest.approx(accuracies[penalty], abs=1e-9)
    # Among equal accuracies the larger penalty.
    best = max(l2, key=lambda penalty: (accuracies[penalty], penalty))
    assert outcome.chosen["l2"] == best
    reference, mean, std = fitted(kept, best)
    expected = reference.predict((arrays["test"] - mean) / std) == arrays["test_labels"]
    assert (outcome.right["logistic"][0] == expected).mean() > 0.99


def test_linear_probe_of_all_rows_matches_ridge_regression(sets) -> None:
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
    with pytest.raises(ConfigError, match=r"knn\.k is 20, but there are only 5 training samples"):
        probes.knn(inputs_of(train, train), NeighboursConfig((2, 20)))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (FewShotConfig, {"shots": ()}, "fewshot.shots"),
        (FewShotConfig, {"shots": (5, 0)}, "fewshot.shots"),
        (FewShotConfig, {"seeds": ()}, "fewshot.seeds"),
        (FewShotConfig, {"seeds": (3, -1)}, "fewshot.seeds"),
        (FewShotConfig, {"l2": -1.0}, "fewshot.l2"),
        (LinearConfig, {"l2": -1e-9}, "linear.l2"),
        (NeighboursConfig, {"k": (10, 0)}, "knn.k"),
        (NeighboursConfig, {"temperature": 0.0}, "knn.temperature"),
        (LogisticConfig, {"l2": ()}, "logistic.l2"),
        (LogisticConfig, {"l2": (1.0, -1.0)}, "logistic.l2"),
        (LogisticConfig, {"held_out": 0.0}, "logistic.held_out"),
        (LogisticConfig, {"held_out": 1.0}, "logistic.held_out"),
        (LogisticConfig, {"held_out": 1.5}, "logistic.held_out"),
        (LogisticConfig, {"seed": -1}, "logistic.seed"),
        (LogisticConfig, {"iterations": 0}, "logistic.iterations"),
    ],
)
def test_invalid_settings_are_refused(settings: type, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**options)


def test_settings_at_their_limits_are_accepted() -> None:
    FewShotConfig((1,), (0,), 0.0)
    LinearConfig(0.0)
    NeighboursConfig((1,), temperature=1e-9)
    LogisticConfig((0.0,), held_out=1e-9, seed=0, iterations=1)
    LogisticConfig(held_out=1 - 1e-9)
