"""Probes of frozen features, compared with scikit-learn, NumPy and golden results of the original."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge

from data.draws import few_shot_rows
from data.errors import ConfigError
from pipeline.evaluation import document
from pipeline.evaluation.evaluator import Request, result_of
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.probes import few_shot, fit
from pipeline.evaluation.protocols import (
    FewShotConfig,
    LinearConfig,
    LogisticConfig,
    NeighboursConfig,
    probe_protocol,
)
from pipeline.training_config import ProbeConfig
from tests.support.evaluated_sets import CPU, digit_features, inputs_of, no_beat, single_threaded, store_of
from tests.support.golden import read_golden

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureStore, FeatureStore, dict[str, np.ndarray]]:
    return digit_features(tmp_path_factory.mktemp("features"))


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


@pytest.mark.parametrize("count", [20, 1000])
def test_map_without_a_penalty_is_that_of_least_squares_if_features_are_constant(count: int) -> None:
    """Some pixels of the digits are always 0, and 20 rows are fewer than the 64 pixels."""
    pixels, digits = load_digits(return_X_y=True)
    x, labels = pixels[:count], digits[:count]
    fitted = fit(torch.from_numpy(x), torch.from_numpy(labels), 0.0)
    rows = np.column_stack([(x - x.mean(0)) / (x.std(0) + 1e-5), np.full(count, 100.0)])
    expected = rows @ np.linalg.lstsq(rows, 2.0 * np.eye(10)[labels] - 1, rcond=None)[0]
    np.testing.assert_allclose(fitted.scores(torch.from_numpy(x)).numpy(), expected, atol=1e-6)
