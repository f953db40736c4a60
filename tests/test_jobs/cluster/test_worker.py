"""A worker's environment and folder (workers in a group: test_worker_group.py)."""

import pytest

from data.errors import ClusterError
from jobs.cluster import worker

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (0, "", {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}),
        (1, "", {}),  # the GPUs in the node's environment
        (1, "2,5", {"CUDA_VISIBLE_DEVICES": "2,5"}),
    ],
)
def test_worker_has_the_variables_of_its_rank_and_sees_only_its_gpus(gpus, visible, expected) -> None:
    info = worker.RankInfo(3, 8, 1, 2, 1, "10.0.0.2", 4, gpus, visible_gpus=visible)
    assert info.environment() == expected | {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "OMP_NUM_THREADS": "4",
    }


def test_missing_attempt_folder_is_reported_with_exit_code_69(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("data.files.SEEN_WITHIN_S", 0.1)
    info = worker.RankInfo(0, 1, 0, 1, 0, "127.0.0.1", 1, 0)
    spec = worker.WorkerSpec(info, b"", tmp_path / "elsewhere", tmp_path, {}, "", 0, is_shared=True)
    with pytest.raises(ClusterError, match="created by the driver, did not appear on") as caught:
        worker._prepare(spec)
    assert caught.value.exit_code == 69 and "type run=/shared/NAME" in str(caught.value)
