"""The trained stage that a path names."""

from pathlib import Path

import pytest

from data.errors import UsageError
from jobs.extras.replays.trained import find_trained
from pipeline.artifacts import write_record

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a stage that trains and one that does not."""
    for name in ("pretrain-00000001", "shards-00000002"):
        (tmp_path / "x" / name).mkdir(parents=True)
        write_record(tmp_path / "x" / name / "stage.json", {"resumed": 1.0})
    (tmp_path / "x" / "pretrain-00000001" / "task.json").write_text("{}")
    return tmp_path / "x"


@pytest.mark.parametrize("path", ["", "pretrain", "pretrain-00000001"])
def test_a_run_with_one_trained_stage_names_that_stage(run: Path, path: str) -> None:
    assert find_trained(str(run / path)) == run / "pretrain-00000001"


def test_a_folder_without_a_trained_stage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UsageError, match=r"pictures has no trained stage\n  expected a run directory"):
        find_trained(str(tmp_path / "pictures"))


def test_a_run_in_a_store_is_refused_with_the_command_that_copies_it() -> None:
    with pytest.raises(UsageError, match="for example: aws s3 sync s3://bucket/x runs/NAME"):
        find_trained("s3://bucket/x")
