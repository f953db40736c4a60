"""The folder in which a command reads a run of an object store is not the folder of a node that works on the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.bucket import Bucket
from jobs import ownership
from jobs.extras.planning.run_folders import readable_run
from jobs.ownership import Lease
from jobs.run import sync
from tests.support.stores import store


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a run; an owner renews its lease five times a second."""
    monkeypatch.setattr(ownership, "PERIOD_S", 0.2)
    with store("s3", {}):
        yield f"s3://images/runs/{tmp_path.name}"


def files_of(folder: Path) -> dict[str, str]:
    """Return the small files of a run's local folder by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "sync.json"]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_reader_does_not_change_the_folder_of_another_node_of_a_live_run(run: str, tmp_path: Path) -> None:
    driver = tmp_path / "one"
    node = tmp_path / "two"
    driver.mkdir()
    with Lease(Bucket(run, driver), print) as lease, sync.synced(Bucket(run, driver), lease, print) as put:
        (driver / "log.txt").write_text("of the driver\n")
        put()
        # A worker on another node than the driver has its files in the run's folder there.
        (node / "stage" / "checkpoints").mkdir(parents=True)
        (node / "stage" / "metrics.jsonl").write_text("of this node\n")
        before = files_of(node)
        with readable_run(Bucket(run, node)) as folder:
            assert files_of(folder) == {"log.txt": "of the driver\n"}
        assert files_of(node) == before
        assert not folder.exists()
        with readable_run(Bucket(run, driver)) as folder:
            assert folder != node
