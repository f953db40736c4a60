"""The closed form of the paper's few-shot evaluation against the original's own results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.draws import few_shot_rows
from pipeline.evaluation.probes import fit

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parents[3].parent / "shared" / "golden" / "fewshot_lsr.npz"


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.exists():
        pytest.skip("golden data is absent: ../shared/golden/fewshot_lsr.npz")
    return np.load(GOLDEN)


def accuracy_of(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, expected: np.ndarray, *, shots: int, seed: int, l2: float
) -> float:
    rows = few_shot_rows(labels, shots, seed)
    fitted = fit(torch.from_numpy(train[rows]), torch.from_numpy(labels[rows]), l2)
    return float((fitted.scores(torch.from_numpy(test)).argmax(1).numpy() == expected).mean())


def test_every_golden_accuracy_is_met_exactly_where_the_original_is_well_conditioned(golden):
    rows = json.loads(str(golden["results_json"]))
    sets = [golden[name] for name in ("feat_train", "labels_train", "feat_test", "labels_test")]
    for row in rows:
        accuracy = accuracy_of(*sets, shots=int(row["shots"]), seed=int(row["seed"]), l2=row["l2"])
        tolerance = 1e-7 if row["agree"] == 1 else 0.01  # float32 eigh is ill-conditioned at tiny l2
        assert accuracy == pytest.approx(row["acc_original"], abs=tolerance), row
    assert len(rows) == 27


def test_the_rows_are_those_the_original_picks(golden):
    for name in golden.files:
        if name.startswith("idx_seed"):
            seed, shots = (int(part) for part in name.removeprefix("idx_seed").split("_shots"))
            ours = few_shot_rows(golden["labels_train"], shots, seed)
            assert sorted(ours) == sorted(golden[name])


def test_a_class_smaller_than_the_shots_gives_all_it_has():
    labels = np.array([0, 0, 0, 1, 2, 2])
    assert sorted(few_shot_rows(labels, shots=2, seed=0))[-3:] == [3, 4, 5]
    assert len(few_shot_rows(labels, shots=2, seed=0)) == 5
