"""The closed form of the paper's few-shot evaluation against the original's own results."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.shards.subset import few_shot_rows
from pipeline.evaluation.probe import linear_probe

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parents[1].parent / "shared" / "golden" / "fewshot_lsr.npz"


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.exists():
        pytest.skip("golden data is absent: ../shared/golden/fewshot_lsr.npz")
    return np.load(GOLDEN)


def test_every_golden_accuracy_is_met_exactly_where_the_original_is_well_conditioned(golden):
    rows = json.loads(str(golden["results_json"]))
    sets = [golden[name] for name in ("feat_train", "labels_train", "feat_test", "labels_test")]
    for row in rows:
        accuracy = linear_probe(*sets, shots=int(row["shots"]), seed=int(row["seed"]), l2=row["l2"])
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


@pytest.mark.parametrize(("rows", "labels", "shots"), [(6, 5, 1), (0, 0, 1), (6, 6, 0)])
def test_what_cannot_be_fitted_is_refused(rows, labels, shots):
    with pytest.raises(ValueError, match=f"found {rows} rows and {labels} labels to train, .* {shots} shots"):
        linear_probe(np.ones((rows, 3)), np.zeros(labels), np.ones((2, 3)), np.zeros(2), shots=shots, seed=0)
