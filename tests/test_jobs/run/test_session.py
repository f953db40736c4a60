"""A command on a run: its checks, run and skipped stages, calls of watchers, and status.json."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import ClusterError, DataError, Preempted, RunOwned
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign
from jobs.run.reading import StatusMessage
from jobs.run.session import Stopper, run_campaign, stages_of
from jobs.run.watchers import Watcher
from tests.support import campaigns
from tests.support.shards import digits

pytestmark = pytest.mark.quick

DIGITS = "shards: {kind: pack, sets: {train: {source: digits, split: train, keep: [0, 1], image_size: 8}}}\n"
TRAINING = (
    'pretrain: {data: {train: "@shards/train"}, model: {name: Ti/4, width: 16, depth: 1, heads: 1, mlp: 16, '
    "image_size: 8, classes: 2}, optim: {schedule: {warmup_steps: 0}}, loss: softmax, steps: 2, batch_size: 8, "
    "micro_batch: 4}\n"
)


@pytest.fixture
def packing(tmp_path: Path) -> Campaign:
    """A campaign with one stage, which the driver runs without workers."""
    recipe = tmp_path / "packing.yaml"
    recipe.write_text(f"run: {tmp_path / 'run'}\ncluster: {{backend: processes, workers: 1}}\n{DIGITS}")
    return campaigns.load(recipe, [])


class States(Watcher):
    """Records its calls for stages and for the end."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.events: list[str] = []

    def status(self, message: StatusMessage) -> None:
        self.events.append(f"{message.stage} {message.state}")

    def ended(self) -> None:
        self.events.append(f"exit code {json.loads((self.run / 'status.json').read_text())['exit_code']}")


def test_stage_runs_once_and_is_skipped_by_the_next_command(packing, capsys) -> None:
    (row,) = run_campaign(packing, quiet=True)
    assert not row["skipped"]
    zeros_and_ones = [sample for sample in digits(train=True, image_size=8) if sample.labels[0] in (0, 1)]
    assert row["samples_seen"] == len(zeros_and_ones)
    first = States(packing.run)
    (again,) = run_campaign(packing, watchers=[first])
    assert again["skipped"]
    assert first.events == ["exit code 0"], "a skipped stage sends no status"
    stage = packing.stages[0]
    line = f"shards: skipped, finished with the same config (key {stage.key[:8]})"
    assert line in capsys.readouterr().out


def test_start_deletes_temporary_files_of_killed_processes_but_not_those_of_other_commands(packing) -> None:
    run_campaign(packing, quiet=True)
    stage = packing.directory(packing.stages[0])
    attempt = stage / "attempts" / "attempt-000001"
    (stage / "evaluations").mkdir()
    attempt.mkdir(parents=True)
    leftovers = []
    for folder, name in (
        (attempt, "rank-00003.json"),
        (stage, "weights.safetensors"),
        (stage, "stage.json"),
        (stage / "evaluations", "step-0000000004.json"),
        (packing.run, "status.json"),
    ):
        leftovers.append(folder / f".tmp-4711-4712abcd-{name}")
    of_others = [
        packing.run / ".tmp-4711-4712abcd-report.html",
        packing.run / "leases" / ".tmp-4711-4712abcd-000009.json",
        packing.run / "notes" / ".tmp-4711-4712abcd-mine",
    ]
    (packing.run / "notes").mkdir()
    for path in (*leftovers, *of_others):
        path.write_text("half")

    with Lease(packing.storage, print), pytest.raises(RunOwned):
        run_campaign(packing, quiet=True)
    assert all(path.exists() for path in (*leftovers, *of_others))
    run_campaign(packing, quiet=True)
    assert [path.name for path in leftovers if path.exists()] == []
    assert all(path.exists() for path in of_others)


def test_watchers_see_the_stage_and_the_end_that_status_json_has(packing) -> None:
    states = States(packing.run)
    run_campaign(packing, watchers=[states], quiet=True)
    assert states.events == ["shards waiting", "shards ended", "exit code 0"]


def test_missing_inputs_are_refused_before_anything_starts(tmp_path) -> None:
    recipe = tmp_path / "missing.yaml"
    text = "shards: {kind: pack, sets: {train: {source: folder, path: " + str(tmp_path / "nothing") + "}}}\n"
    recipe.write_text(f"run: {tmp_path / 'run'}\ncluster: {{backend: processes, workers: 1}}\n{text}")
    loaded = campaigns.load(recipe, [])
    states = States(loaded.run)
    with pytest.raises(DataError, match="nothing"):
        run_campaign(loaded, watchers=[states], quiet=True)
    assert states.events == ["exit code 65"]
    assert not list(loaded.run.glob("shards-*"))


def test_missing_gpus_are_refused_before_images_are_packed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {tmp_path / 'run'}\ncluster: {{backend: processes, workers: 2, gpus_per_worker: 1}}\n{DIGITS}{TRAINING}"
    )
    with pytest.raises(ClusterError, match="at least 2 GPUs for 2 workers"):
        run_campaign(campaigns.load(recipe, []), quiet=True)
    assert not list(tmp_path.glob("run/shards-*"))


def test_run_owned_by_another_command_is_refused_and_its_status_stays(packing) -> None:
    states = States(packing.run)
    with Lease(packing.storage, print):
        (packing.run / "status.json").write_text("of the other command")
        with pytest.raises(RunOwned):
            run_campaign(packing, watchers=[states], quiet=True)
    assert (packing.run / "status.json").read_text() == "of the other command"
    assert states.events == []


def test_only_names_a_stage_or_a_section(packing) -> None:
    stage = packing.stages[0]
    runs = tuple(replace(stage, name=f"grid.{number}", source="grid") for number in range(2))
    several = replace(packing, stages=(stage, *runs))
    assert [stage.name for stage in stages_of(several, None)] == ["shards", "grid.0", "grid.1"]
    assert [stage.name for stage in stages_of(several, "grid")] == ["grid.0", "grid.1"]
    assert [stage.name for stage in stages_of(several, "grid.1")] == ["grid.1"]


# ------------------------------------------------------------------------ signals


@pytest.fixture
def stopper(packing):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    lines: list[str] = []
    made: Any = Stopper(lines.append, Lease(packing.storage, print))
    made.lines = lines
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_first_signal_requests_a_commit_and_a_second_interrupt_ends_at_once(stopper) -> None:
    assert not stopper.is_stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.is_stop_requested()
    assert stopper.lines == [
        "SIGTERM: finishing the step and committing, then exiting with code 75; press Ctrl-C again to exit at once"
    ]
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(stopper.lines) == 1, "a second SIGTERM is only a repetition"
    with pytest.raises(KeyboardInterrupt, match="interrupted twice"):
        os.kill(os.getpid(), signal.SIGINT)


def test_signal_ends_the_drivers_own_work_at_once(stopper) -> None:
    stopper.works_here = True
    with pytest.raises(Preempted, match="stopped by SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_first_signal_after_the_last_stage_announces_no_commit(stopper) -> None:
    stopper.is_run_done = True
    os.kill(os.getpid(), signal.SIGINT)
    assert stopper.lines == []
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_stop_before_a_stage_leaves_it_unstarted(packing, monkeypatch) -> None:
    monkeypatch.setattr(Stopper, "is_stop_requested", lambda self: True)
    with pytest.raises(Preempted, match="stopped before shards; run the same command again to resume"):
        run_campaign(packing, quiet=True)
    assert json.loads((packing.run / "status.json").read_text())["exit_code"] == 75
    assert not list(packing.run.glob("shards-*"))
