"""Open a run, stage or checkpoint by path."""

from pathlib import Path

import pytest

from data.errors import UsageError
from data.files import MANIFEST
from data.storage import Folder
from jobs.extras.stored_runs import opened, stages_of

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for stage in ("pretrain-11111111", "finetune-22222222"):
        folder = tmp_path / "run" / stage / "checkpoints" / "step-0000000004"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
        (tmp_path / "run" / stage / "stage.json").write_text("{}")
    (tmp_path / "run" / "shards-33333333").mkdir()
    (tmp_path / "run" / "shards-33333333" / "stage.json").write_text("{}")
    return tmp_path / "run"


def test_stages_with_checkpoints_are_sorted_by_name(run: Path) -> None:
    assert [checkpoints.stage for checkpoints in stages_of(Folder(run))] == ["finetune-22222222", "pretrain-11111111"]


def test_a_folder_without_checkpoints_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoints in .*\n  expected a run directory"):
        stages_of(Folder(run / "shards-33333333"))


@pytest.mark.parametrize(
    ("path", "stages", "only"),
    [
        ("", ["finetune-22222222", "pretrain-11111111"], ""),
        ("pretrain-11111111", ["pretrain-11111111"], ""),
        ("pretrain-11111111/checkpoints/step-0000000004", ["pretrain-11111111"], "step-0000000004"),
        ("pretrain-11111111/step-4", ["pretrain-11111111"], "step-4"),
        ("pretrain/step-0000000004/", ["pretrain-11111111"], "step-0000000004"),
        ("step-7", ["finetune-22222222", "pretrain-11111111"], "step-7"),
    ],
)
def test_a_run_a_stage_or_a_checkpoint_is_opened_by_path(run: Path, path: str, stages: list[str], only: str) -> None:
    with opened(str(run / path)) as named:
        assert [checkpoints.stage for checkpoints in named.stages] == stages
        assert named.only == only
        assert named.storage.local == run
