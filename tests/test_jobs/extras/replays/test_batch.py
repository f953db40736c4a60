"""`replay` rejects wrong arguments before it rebuilds the batch; test_replays.py rebuilds batches."""

import pytest

from data.errors import UsageError
from jobs.extras.replays.batch import replay
from pipeline.artifacts import write_record

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path):
    """A run with one trained stage, without data."""
    folder = tmp_path / "x" / "pretrain-00000001"
    folder.mkdir(parents=True)
    write_record(folder / "stage.json", {"resumed": 1.0})
    (folder / "task.json").write_text("{}")
    return tmp_path / "x"


@pytest.mark.parametrize("step", ["step=0", "0", "step=-1", "step=1.5", "step=", "last"])
def test_step_is_a_positive_integer(run, step) -> None:
    with pytest.raises(UsageError, match=r"is not a step\n  expected step=N, with a number of at least 1"):
        replay(str(run), step, None)


@pytest.mark.parametrize(
    ("target", "message"),
    [("batch.txt", "does not end in .npz"), ("folder.npz", "is a folder"), ("gone/batch.npz", "gone does not exist")],
)
def test_a_target_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path, target, message) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(UsageError, match=message):
        replay(str(tmp_path / "no-run"), "step=1", str(tmp_path / target))
