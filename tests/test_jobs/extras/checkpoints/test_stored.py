"""`python -m jobs checkpoints list|prune` on a stage's checkpoints, as a person types it."""

import shutil
from pathlib import Path

import pytest

from data.storage import Folder
from jobs.__main__ import main
from pipeline.checkpoints import saver
from pipeline.checkpoints.manifest import committed
from tests.support.savers import WorkerGroup

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with checkpoints of steps 4, 8 and 12; the checkpoint of step 8 has a flipped bit."""
    monkeypatch.setattr(saver, "dist", saver.dist)  # restored after the test, because WorkerGroup replaces it
    group = WorkerGroup(tmp_path / "run")
    for step in (4, 8, 12):
        group.save(step)
    victim = group.folder / "step-0000000008" / "rank-00001.safetensors"
    blob = bytearray(victim.read_bytes())
    blob[len(blob) // 2] ^= 1
    victim.write_bytes(blob)
    return tmp_path / "run"


def test_list_shows_every_folder_newest_first(run, capsys) -> None:
    (run / "stage" / "checkpoints" / "bad-0000000003-000001").mkdir()
    (run / "stage" / "checkpoints" / ".tmp-0000000016-000001").mkdir()
    (run / "stage" / "checkpoints" / ".tmp-old-step-0000000002").mkdir()
    assert main(["checkpoints", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("step-0000000012", "step-0000000008", "step-0000000004", "bad-0000000003-000001", ".tmp-0000000016-000001")
    assert lines.pop().split(maxsplit=1) == [
        ".tmp-old-step-0000000002",
        "old checkpoint, partially deleted; the next start deletes the rest",
    ]
    assert lines[0] == "stage:"
    assert [line.split()[0] for line in lines[1:]] == list(names)
    assert "0.0 MB in 2 files  world 2  ZeRO 2  attempt 1  ledger " in lines[1]


def test_copied_folders_among_the_attempts_are_ignored(run, capsys) -> None:
    (run / "stage" / "attempts" / "attempt-x").mkdir(parents=True)
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "attempt 1  ledger" in capsys.readouterr().out


def test_copied_checkpoints_with_other_names_are_ignored(tmp_path) -> None:
    names = ["step-0000000010", "step-0000000010-000002", "step-0000000012.bak", "step-12", "step-0000000011.keep"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in committed(tmp_path)] == names[1::-1]


def test_prune_deletes_nothing_if_one_of_the_newest_is_bad(run, capsys) -> None:
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 74
    assert len(committed(run / "stage" / "checkpoints")) == 3
    shutil.rmtree(run / "stage" / "checkpoints" / "step-0000000008")
    shutil.copytree(
        run / "stage" / "checkpoints" / "step-0000000012", run / "stage" / "checkpoints" / "step-0000000012-000002"
    )
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 0
    assert "step-0000000004 deleted" in capsys.readouterr().out
    assert main(["checkpoints", "prune", str(run), "--keep", "1"]) == 64


def test_prune_refuses_a_single_checkpoint_because_it_would_delete_others(run, capsys) -> None:
    shutil.rmtree(run / "stage" / "checkpoints" / "step-0000000008")
    for step in (16, 20):
        shutil.copytree(
            run / "stage" / "checkpoints" / "step-0000000012", run / "stage" / "checkpoints" / f"step-00000000{step}"
        )
    for name in ("step-20", "step-0000000020"):
        assert main(["checkpoints", "prune", f"{run}/stage/{name}"]) == 64
        assert "is one checkpoint" in capsys.readouterr().err
    assert main(["checkpoints", "prune", f"{run}/stage/checkpoints/step-0000000020"]) == 64
    assert len(committed(run / "stage" / "checkpoints")) == 4


def test_prune_deletes_nothing_if_another_stage_has_a_bad_checkpoint(run, tmp_path, capsys) -> None:
    group = WorkerGroup(tmp_path / "good")
    for step in (4, 8, 12):
        group.save(step)
    good = (tmp_path / "good" / "stage").rename(run / "a-12345678")
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 74
    assert len(committed(good / "checkpoints")) == 3, "its name comes first"


def test_deletions_in_one_stage_are_reported_even_if_the_next_stage_fails(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(saver, "dist", saver.dist)  # restored after the test, because WorkerGroup replaces it
    run = tmp_path / "run"
    run.mkdir()
    for stage in ("a-12345678", "b-12345678"):
        group = WorkerGroup(tmp_path / stage)
        for step in (4, 8, 12):
            group.save(step)
        (tmp_path / stage / "stage").rename(run / stage)
    delete_set = Folder.delete_set

    def failing(storage: Folder, folder: str, name: str) -> Path | None:
        if folder.startswith("b-"):
            raise OSError("the disk fails")
        return delete_set(storage, folder, name)

    monkeypatch.setattr(Folder, "delete_set", failing)
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 74
    printed = capsys.readouterr()
    assert "a-12345678: step-0000000004 deleted" in printed.out
    assert "the disk fails" in printed.err
    assert len(committed(run / "a-12345678" / "checkpoints")) == 2


def test_a_folder_without_checkpoints_is_refused(run) -> None:
    assert main(["checkpoints", "list", str(run / "attempts")]) == 64
