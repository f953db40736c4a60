"""Linear, nearest-neighbour and logistic probes of frozen features, compared with scikit-learn and NumPy."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier

from data.errors import ConfigError
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.probes import fit
from pipeline.evaluation.protocols import LogisticConfig, NeighboursConfig
from pipeline.extras import probes
from pipeline.extras.probes import fit_all, fit_logistic
from tests.support.evaluated_sets import CPU, digit_features, inputs_of, no_beat, single_threaded, store_of

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureStore, FeatureStore, dict[str, np.ndarray]]:
    return digit_features(tmp_path_factory.mktemp("features"))


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


def test_votes_of_a_low_temperature_do_not_overflow(sets) -> None:
    """exp(similarity / 0.001) is infinite in float64; the nearest neighbour decides almost alone."""
    train, test, arrays = sets
    outcome = probes.knn(inputs_of(train, test), NeighboursConfig((20,), temperature=0.001))
    rows = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (arrays["train"], arrays["test"])]
    similarities = rows[1].astype(np.float64) @ rows[0].T.astype(np.float64)
    expected = []
    for of_row in similarities:
        votes = np.zeros(10)
        for neighbour in np.argsort(-of_row, kind="stable")[:20]:
            votes[arrays["train_labels"][neighbour]] += np.exp((of_row[neighbour] - of_row.max()) / 0.001)
        expected.append(votes.argmax())
    (is_right,) = outcome.right["knn-20"]
    assert (is_right == (expected == arrays["test_labels"])).mean() > 0.99


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
