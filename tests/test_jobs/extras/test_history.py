"""The history of a run, read from handwritten records."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.errors import UsageError
from jobs.extras.history import StageHistory, flat, read_run, result_of
from jobs.run.log import write_status
from pipeline import artifacts
from tests.support.paged_runs import make_run

pytestmark = pytest.mark.quick


def report(attempt: int, step: int, losses: list[float]) -> dict[str, object]:
    return {
        "kind": "train",
        "attempt": attempt,
        "step": step,
        "samples_seen": 10 * step,
        "losses": losses,
        "grad_norms": [1.0] * len(losses),
    }


def test_the_last_attempt_of_a_step_is_final_and_earlier_ones_are_lost() -> None:
    stage = StageHistory(Path("/nowhere"), "pretrain", "x/pretrain", record={"config": {"batch_size": 10}})
    # The first attempt was killed after step 4; the second resumed from step 2.
    stage.reports = [report(1, 2, [9.0, 8.0]), report(1, 4, [7.0, 6.0]), report(2, 4, [7.5, 6.5])]
    stage.read_steps()
    assert stage.steps.step.tolist() == [1, 2, 3, 4]
    assert stage.steps.loss.tolist() == [9.0, 8.0, 7.5, 6.5]
    assert stage.steps.attempt.tolist() == [1, 1, 2, 2]
    assert stage.steps.samples_seen.tolist() == [10, 20, 30, 40]
    assert stage.lost.loss.tolist() == [7.0, 6.0]
    assert [record["step"] for record in stage.kept_reports] == [2, 4]
    assert stage.samples_at(6) == 60


def test_excluded_steps_are_counted_as_in_the_log(tmp_path: Path) -> None:
    artifacts.write_record(tmp_path / artifacts.EXCLUDED_STEPS, {"stretches": [[3, 5], [10, 11]]})
    assert StageHistory(tmp_path, "pretrain", "x").excluded_steps == [(4, 5), (11, 11)]


def test_nested_values_have_dotted_names_and_an_empty_section_is_a_value() -> None:
    nested = {"optim": {"lr": 1, "schedule": {"decay": "cosine"}}, "mixture": {}, "seed": 0}
    assert flat(nested) == {"optim.lr": 1, "optim.schedule.decay": "cosine", "mixture": {}, "seed": 0}


@pytest.mark.parametrize(
    ("done", "result"),
    [
        ({"metrics": {"top-1": 0.5, "top-5": 0.75}}, "top-1 50.00%, top-5 75.00%"),
        ({"sets": {"train": {"samples": 1200, "digest": "a"}}}, "train 1,200 samples"),
        ({"diverged": "the loss was not finite"}, "the loss was not finite"),
    ],
)
def test_the_result_of_a_stage_is_one_line(done: dict[str, object], result: str) -> None:
    assert result_of({"key": "0", "seconds": 1, "files": {}, **done}) == result


def test_a_run_is_read_with_its_steps_and_state(shards: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "x", shards, steps=8, losses=[float(8 - step) for step in range(8)])
    run = read_run(tmp_path / "runs" / "x")
    (stage,) = run.stages
    assert run.state == "done"
    assert stage.steps.loss.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert np.all(stage.steps.attempt == 1)
    assert stage.result == "step 8 of 8"
    assert stage.problem == ""

    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "stage.json").write_text(json.dumps({"name": "pretrain"}))
    (damaged,) = read_run(tmp_path / "runs" / "x").stages
    assert damaged.problem, f"{len(metrics)} records, but stage.json has lost its seal"


def test_a_path_without_a_run_is_refused_with_the_runs_next_to_it(shards: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "x", shards, steps=4)
    with pytest.raises(UsageError, match=r"no run at .*y\n[\s\S]*\n  runs in .*/runs: x$"):
        read_run(tmp_path / "runs" / "y")


def test_the_recipe_of_a_submitted_job_is_not_suggested_for_resuming(tmp_path: Path) -> None:
    (tmp_path / "pretrain-1a2b3c4d").mkdir()
    artifacts.write_record(tmp_path / "pretrain-1a2b3c4d" / "stage.json", {"name": "pretrain"})
    write_status(tmp_path, 75, "stopped", f"python -m jobs run env:PATCHLINE_RECIPE run={tmp_path}")
    assert read_run(tmp_path).command == "python -m jobs run ITS_RECIPE"
