"""Running one stage: refusals before it starts, and the records in its files."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from data.errors import ConfigError, Diverged, RunOwned
from jobs.cluster.failure import StageFailed
from jobs.cluster_config import ClusterConfig
from jobs.resolved_recipe import Campaign, Context, Reads, Stage, StageKind
from jobs.run.stage_run import run_stage
from pipeline import artifacts
from pipeline.config import Tags, tags

pytestmark = pytest.mark.quick


# Of each part, its own samples and shards.
SETS = {"train": {"samples": 4, "shards": 2, "digest": "ab"}, "held-out": {"samples": 1, "shards": 1, "digest": "cd"}}


@dataclass(frozen=True)
class NumbersConfig:
    """The config of a stage that writes a number."""

    number: int = 1
    init: str | None = None

    RESUME: ClassVar[Tags] = tags(forbid="init", warn="number")


class Numbers(StageKind):
    """A stage that writes a number into evaluation.json."""

    name = "numbers"
    config = NumbersConfig
    inputs: ClassVar[Mapping[str, Reads]] = {"init": Reads.FILE}
    needs_workers = False

    def run(self, cfg: NumbersConfig, context: Context) -> Mapping[str, Any]:
        (context.directory / "evaluation.json").write_text(str(cfg.number))
        return {"metrics": {"accuracy": cfg.number / 10}, "samples_seen": 5, "sets": SETS}


class Outcomes(Numbers):
    """The same kind, but it needs only the outcomes of its inputs."""

    inputs: ClassVar[Mapping[str, Reads]] = {"init": Reads.OUTCOME}


def stage_of(name: str, kind: StageKind | None = None, *, source: str = "", parent: str = "", number: int = 1) -> Stage:
    """Return a stage; `parent` is the name of its input stage."""
    cfg = NumbersConfig(number, f"@{parent}" if parent else None)
    kind = kind or Numbers()
    parents = {"init": f"@{parent}"} if parent else {}
    reads = {"init": kind.inputs["init"]} if parent else {}
    return Stage(name, kind, cfg, source or name, parents=parents, reads=reads, key=f"{name}{'0' * 8}"[:8])


def context_of(run: Path, stage: Stage, *others: Stage, lines: list[str] | None = None) -> Context:
    campaign = Campaign(run, ClusterConfig(), (*others, stage))
    log: Callable[[str], None] = print if lines is None else lines.append
    return Context(campaign, stage, log, poll=lambda attempt, step: None, stop_requested=lambda: False)


def finish(run: Path, stage: Stage, **outcome: Any) -> None:
    """Mark a stage as finished with this outcome."""
    folder = Campaign(run, ClusterConfig(), (stage,)).directory(stage)
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "done.json", {"key": stage.key, "seconds": 1.0, **outcome, "files": {}})


def test_done_json_has_the_outcome_and_the_digests_of_the_files(tmp_path) -> None:
    context = context_of(tmp_path, stage_of("first", number=7))
    done = run_stage(context, fresh=False)
    assert done == artifacts.read_record(context.directory / "done.json")
    assert done["metrics"] == {"accuracy": 0.7}
    record = done["files"]["evaluation.json"]
    assert record == {"bytes": 1, "sha256": hashlib.sha256(b"7").hexdigest()}
    assert set(done["files"]) == {"evaluation.json", "stage.json", "provenance.json"}


def test_provenance_has_config_inputs_and_counts(tmp_path) -> None:
    context = context_of(tmp_path, stage_of("first", number=7))
    run_stage(context, fresh=False)
    provenance = artifacts.read_record(context.directory / "provenance.json")
    assert provenance["config"] == {"number": 7, "init": None}
    assert provenance["inputs"] == {}
    assert provenance["samples_seen"] == 5
    assert provenance["sets"] == SETS
    assert provenance["environment"]["torch"]


def test_second_start_keeps_the_time_of_the_first_and_names_changed_settings(tmp_path) -> None:
    lines: list[str] = []
    context = context_of(tmp_path, stage_of("first", number=7), lines=lines)
    run_stage(context, fresh=False)
    (context.directory / "done.json").unlink()
    first = artifacts.read_record(context.directory / "stage.json")
    changed = replace(context.stage, config=NumbersConfig(8))
    run_stage(context_of(tmp_path, changed, lines=lines), fresh=False)
    second = artifacts.read_record(context.directory / "stage.json")
    assert second["started"] == first["started"]
    assert second["resumed"] > first["resumed"]
    assert "first: resuming with changed settings (number: 7 → 8)" in lines


def test_a_stage_whose_input_has_not_run_is_refused_and_leaves_nothing(tmp_path) -> None:
    stage = stage_of("second", parent="first")
    with pytest.raises(ConfigError, match="which has not run"):
        run_stage(context_of(tmp_path, stage, stage_of("first")), fresh=False)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_whose_input_diverged_is_refused(tmp_path) -> None:
    first = stage_of("first")
    finish(tmp_path, first, diverged="the loss is inf")
    with pytest.raises(Diverged, match="which has diverged\n  the loss is inf"):
        run_stage(context_of(tmp_path, stage_of("second", parent="first"), first), fresh=False)


def test_stage_that_reads_only_outcomes_runs_after_a_diverged_stage(tmp_path) -> None:
    first = stage_of("first")
    finish(tmp_path, first, diverged="the loss is inf")
    stage = stage_of("second", Outcomes(), parent="first")
    assert run_stage(context_of(tmp_path, stage, first), fresh=False)["metrics"] == {"accuracy": 0.1}


class Failing(Numbers):
    """A stage that fails like a stage with workers."""

    def __init__(self, exception: str) -> None:
        self.exception = exception

    def run(self, cfg: NumbersConfig, context: Context) -> Mapping[str, Any]:
        raise StageFailed(f"{context.stage.name}: 5 steps were not finite\n  and more", 70, self.exception)


def test_diverged_run_of_a_sweep_has_an_outcome(tmp_path) -> None:
    lines: list[str] = []
    stage = stage_of("grid.lr-1", Failing("Diverged"), source="grid")
    done = run_stage(context_of(tmp_path, stage, lines=lines), fresh=False)
    assert done["diverged"] == "5 steps were not finite"
    assert lines[-1] == "grid.lr-1: 5 steps were not finite\n  the sweep continues without this run"


@pytest.mark.parametrize(("name", "exception"), [("grid", "Diverged"), ("grid.lr-1", "ValueError")])
def test_any_other_failure_ends_the_command_and_the_stage_is_not_done(name, exception, tmp_path) -> None:
    context = context_of(tmp_path, stage_of(name, Failing(exception), source="grid"))
    with pytest.raises(StageFailed):
        run_stage(context, fresh=False)
    assert (context.directory / "stage.json").exists()
    assert not (context.directory / "done.json").exists()


def test_a_stage_of_a_run_that_was_taken_over_is_not_recorded_as_done(tmp_path) -> None:
    def refuse() -> None:
        raise RunOwned("another command owns it")

    context = replace(context_of(tmp_path, stage_of("first")), check_owned=refuse)
    with pytest.raises(RunOwned):
        run_stage(context, fresh=False)
    assert not (context.directory / "done.json").exists()
    assert not (context.directory / "provenance.json").exists()


def test_the_time_of_earlier_commands_is_in_the_stage_s_seconds(tmp_path) -> None:
    context = context_of(tmp_path, stage_of("first"))
    context.directory.mkdir(parents=True)
    start = {"kind": "start", "time": 1000.0, "attempt": 1, "step": 0, "world": 1, "claimed": 1000.0}
    report = {"kind": "train", "time": 1100.0, "attempt": 1, "step": 1, "losses": [1.0], "seconds": 60.0}
    report |= {"wait": 0.0, "stalled_s": 0.0, "evaluated_s": 0.0}
    lines = [json.dumps(record) for record in (start, report)]
    (context.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    seconds = run_stage(context, fresh=False)["seconds"]
    assert 100.0 <= seconds < 130.0, "100 s of the first command, plus this one"


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_jump_of_the_clock_is_no_part_of_a_stages_time(tmp_path, monkeypatch, jump_s) -> None:
    class Jump(Numbers):
        def run(self, cfg: NumbersConfig, context: Context) -> Mapping[str, Any]:
            now = time.time()
            monkeypatch.setattr(time, "time", lambda: now + jump_s)
            return super().run(cfg, context)

    done = run_stage(context_of(tmp_path, stage_of("first", Jump())), fresh=False)
    assert 0 <= done["seconds"] < 60
