"""Step records of a stage belong to the right attempt and shards; the records are handwritten."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.errors import UsageError
from pipeline.extras.branches import BranchConfig
from pipeline.extras.replays.batch import TrainedStage
from pipeline.training_config import DataConfig, TrainConfig

pytestmark = pytest.mark.quick

A, B = ["train-000001.tar"], ["train-000002.tar"]


def stage_of(*attempts: tuple[int, Sequence[str], int | None]) -> TrainedStage:
    """Return a stage without shards from the first and last reported step of its attempts (None: no report)."""
    records: list[dict[str, Any]] = []
    for number, (start, drop, end) in enumerate(attempts, 1):
        head = {"attempt": number, "world": number, "time": 0.0}
        records.append({"kind": "start", "step": start, "drop": drop, **head})
        if end is not None:
            values = [float(number)] * (end - start)
            records.append({"kind": "train", "step": end, "losses": values, "grad_norms": values, **head})
    stage = TrainedStage(Path("pretrain-00000000"))
    stage.__dict__["records"] = records
    stage.__dict__["cfg"] = TrainConfig(steps=30, data=DataConfig(train="set", drop=tuple(attempts[-1][1])))
    return stage


def test_change_of_dropped_shards_within_a_range_is_rejected() -> None:
    stage = stage_of((0, A, 10), (10, B, 14), (14, A, 30))
    for first, last in ((5, 20), (10, 15), (14, 15), (1, 30), (10, 11)):
        with pytest.raises(UsageError, match="changed between steps"):
            stage.config_at(first, last)
    assert stage.config_at(1, 10).data.drop == tuple(A)
    assert stage.config_at(11, 14).data.drop == tuple(B)
    assert stage.config_at(15, 30).data.drop == tuple(A)


def test_last_attempt_counts_for_repeated_steps() -> None:
    # The second attempt falls back to step 4. Its steps 5 to 8 count; those of the first attempt are lost.
    stage = stage_of((0, A, 10), (4, B, 8), (8, A, 12))
    assert [stage.step_records[step].attempt for step in range(1, 13)] == [1] * 4 + [2] * 4 + [3] * 4
    assert stage.config_at(5, 8).data.drop == tuple(B)
    with pytest.raises(UsageError):
        stage.config_at(1, 12)


def test_step_without_a_record_belongs_to_the_last_possible_attempt() -> None:
    stage = stage_of((0, A, 5), (5, B, None), (9, A, 12))
    assert stage.start_of(7)["attempt"] == 2
    assert stage.config_at(6, 9).data.drop == tuple(B)
    with pytest.raises(UsageError):
        stage.config_at(6, 10)
    assert stage_of((0, A, 5)).start_of(4)["world"] == 1
    assert not stage.start_of(0)


@pytest.mark.parametrize("commits", [(10, 15, 20), (15, 20)])
def test_steps_of_the_trunk_are_not_repeated_for_a_branch(commits: Sequence[int]) -> None:
    """The commit at which a branch begins was trained by its trunk, and may have been deleted."""
    stage = TrainedStage(Path("cool-00000000"))
    stage.__dict__["commits"] = dict.fromkeys(commits, Path("commit"))
    stage.__dict__["cfg"] = BranchConfig(init="trunk", begin=10, steps=20)
    assert list(stage.bounds) == [10, 15, 20]
    stage.__dict__["cfg"] = TrainConfig(steps=20)
    assert list(stage.bounds) == [0, *commits]
