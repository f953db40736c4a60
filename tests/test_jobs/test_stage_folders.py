"""The stages of a run directory are found by their folders and ordered by the times in their records."""

from pathlib import Path

import pytest

from jobs.stage_folders import stage_at, stages_in
from pipeline.artifacts import write_record

pytestmark = pytest.mark.quick


def record(folder: Path, name: str, **times: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / name, times)


def test_finished_stages_come_first_and_newer_ones_before_older_ones(tmp_path: Path) -> None:
    for key, finished in (("0000000a", 10.0), ("0000000b", 30.0), ("0000000c", 20.0)):
        record(tmp_path / f"train-{key}", "stage.json", started=5.0, resumed=5.0)
        record(tmp_path / f"train-{key}", "done.json", finished=finished)
    record(tmp_path / "a.b-c-0000000d", "stage.json", started=5.0, resumed=99.0)
    keys = [stage.path.name[-1] for stage in stages_in(tmp_path)]
    assert keys == ["b", "c", "a", "d"]
    unfinished = stage_at(tmp_path / "a.b-c-0000000d")
    assert unfinished is not None
    assert unfinished.name == "a.b-c"
    assert str(unfinished).startswith("a.b-c-0000000d, not finished, started 1970-01-01 ")


def test_other_folders_are_not_stages(tmp_path: Path) -> None:
    record(tmp_path / "train-0000000a", "other.json")
    record(tmp_path / "train", "stage.json")
    assert stages_in(tmp_path) == []
    assert stages_in(tmp_path / "missing") == []
