"""W&B and MLflow beside a run: off by default, fed from metrics.jsonl, in the same run after a restart, and harmless.

The two that talk to a real client are skipped where its package is not installed: pip install 'patchline[trackers]'.
"""

import importlib.util
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigError, Preempted
from jobs.monitor import trackers
from jobs.monitor.trackers import MlflowConfig, TrackersConfig, WandbConfig, start_trackers
from jobs.monitor.tracking import Courier, flat, numbers_of
from jobs.recipe import campaign, key
from jobs.run.session import run_campaign
from pipeline.monitoring.telemetry import Record, read_metrics

ROOT = Path(__file__).parents[1]
FACTS = {"code": "c0de", "commit": "abc", "recipe": "1234", "config": {"optim": {"lr": 0.1}}}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'patchline[trackers]'")


def train_line(step: int, attempt: int = 1) -> str:
    record = {"kind": "train", "time": 1000.0 + step, "attempt": attempt, "step": step, "loss": 1.0 / step}
    return json.dumps({**record, "losses": [1.0], "ledger": "ff", "mfu": None}) + "\n"


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """The folder of a stage that has reported ten steps."""
    directory = tmp_path / "digits" / "pretrain-1a2b3c4d"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(train_line(step) for step in range(1, 11)))
    return directory


def order(*directories: Path) -> dict[str, Any]:
    stages = []
    for directory in directories:
        stages.append({"directory": str(directory), "name": directory.name[:-9], "facts": FACTS})
    return {"run": "digits", "stages": stages}


# ------------------------------------------------------------------------ the recipe


def test_trackers_are_off_unless_a_recipe_says_where_and_change_no_key(recipe) -> None:
    plain = campaign.load(recipe, [])
    assert plain.trackers.used() == []
    tracked = campaign.load(recipe, ["trackers.wandb.project=vit", "trackers.mlflow.uri=/shared/mlruns"])
    assert tracked.trackers.used() == ["wandb", "mlflow"]
    assert [stage.key for stage in tracked.stages] == [stage.key for stage in plain.stages]
    assert key.recipe_digest(tracked) == key.recipe_digest(plain)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trackers.wandb.projekt=vit", "unknown key trackers.wandb.projekt; did you mean 'project'"),
        ("trackers.mlflow.uri=mlruns", "mlflow.uri is mlruns, expected https://…, or an absolute folder"),
        ("trackers.mlflow.uri=https://me:pass@host", "looks like a secret by its value"),
    ],
)
def test_what_cannot_be_used_is_refused_when_the_recipe_is_read(override, message, recipe) -> None:
    with pytest.raises(ConfigError, match=message):
        campaign.load(recipe, [override])


# ------------------------------------------------------------------------ what is sent


class Listener:
    """A tracker that keeps what it is sent, and is away when it is told to be."""

    def __init__(self) -> None:
        self.runs: dict[str, list[int]] = {}
        self.events: list[str] = []
        self.is_away = False
        self.open_run = ""

    def begin(self, stage: dict[str, Any]) -> str:
        return f"id-{len(self.events)}"

    def open(self, stage: dict[str, Any], run_id: str) -> None:
        self.events.append(f"open {stage['name']} {run_id}")
        self.open_run = run_id

    def send(self, records: list[Record]) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.runs.setdefault(self.open_run, []).extend(record["step"] for record in records)

    def close(self) -> None:
        self.events.append(f"close {self.open_run}")


def test_every_record_is_sent_once_into_the_same_run_across_restarts_and_outages(stage) -> None:
    listener = Listener()
    Courier("test", order(stage), listener).look()
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(train_line(11) + '{"kind": "tr')
    # Another process, as after a restart of the driver; the tracker is away at first.
    listener.is_away = True
    courier = Courier("test", order(stage), listener)
    with pytest.raises(ConnectionError):
        courier.look()
    listener.is_away = False
    courier.look()
    courier.look()
    assert listener.runs == {"id-0": list(range(1, 12))}
    assert listener.events == ["open pretrain id-0", "open pretrain id-0"]


def test_stages_have_a_run_each_one_open_at_a_time(stage) -> None:
    second = stage.parent / "finetune-5e6f7a8b"
    second.mkdir()
    listener = Listener()
    courier = Courier("test", order(stage, second), listener)
    courier.look()
    (second / "metrics.jsonl").write_text(train_line(1))
    courier.look()
    courier.close()
    assert listener.events == ["open pretrain id-0", "close id-0", "open finetune id-2", "close id-2"]


def test_a_record_becomes_numbers_under_the_names_of_tensorboard() -> None:
    assert numbers_of(json.loads(train_line(4))) == {"train/loss": 0.25}
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": "None"}


# ------------------------------------------------------------------------ a process that is no help


PROGRAMS = {
    "hangs": "import time; print('hello', flush=True); time.sleep(60)",
    "holds on": "import signal, sys, time; signal.signal(15, signal.SIG_IGN); sys.stdin.read(); time.sleep(60)",
    "crashes": "import sys; print('no route to host', flush=True); sys.exit(3)",
}
SAID = {
    "hangs": ["wandb: hello", "wandb: not everything was sent within 0.5 s; the next command on this run goes on"],
    "holds on": ["wandb: not everything was sent within 0.5 s; the next command on this run goes on"],
    "crashes": [
        "wandb: no route to host",
        "wandb: its process ended with exit code 3; see tracker-wandb.log",
    ],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tracker_that_hangs_or_crashes_costs_a_line(program, stage, monkeypatch) -> None:
    python = stage / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAMS[program]}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
    said: list[str] = []
    began = time.monotonic()
    config = TrackersConfig(wandb=WandbConfig(project="vit"))
    (tracker,) = start_trackers(config, order(stage), stage.parent, said.append)
    assert time.monotonic() - began < 1, "the driver does not wait for its start"
    time.sleep(0.3)
    tracker.close()
    assert time.monotonic() - began < 5 and said == SAID[program]
    assert tracker.process.poll() is not None


def test_a_package_that_is_missing_costs_a_line_that_says_what_to_type(stage, monkeypatch) -> None:
    # Shadows the package, whether it is installed or not.
    (stage / "mlflow.py").write_text("raise ImportError('No module named mlflow')")
    monkeypatch.setenv("PYTHONPATH", str(stage))
    said: list[str] = []
    config = TrackersConfig(mlflow=MlflowConfig(uri="/nowhere"))
    (tracker,) = start_trackers(config, order(stage), stage.parent, said.append)
    tracker.thread.join(30)
    tracker.close()
    assert said[0] == "mlflow: No module named mlflow; the run goes on without it"
    assert "pip install 'patchline[trackers]'" in said[1]


# ------------------------------------------------------------------------ the real clients


def train_twice(recipe: Path, *overrides: str) -> Path:
    """Train, stopped half way by SIGTERM and begun again; return the stage's folder."""
    loaded = campaign.load(recipe, [*overrides, "pretrain.steps=200", "pretrain.log_every=2"])
    directory = loaded.directory(loaded.stage("pretrain"))

    def stop_half_way(attempt_folder: Path, number: int) -> None:
        if any(record["step"] >= 20 for record in read_metrics(directory)):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        run_campaign(loaded, only="pretrain", also=stop_half_way)
    run_campaign(loaded, only="pretrain")
    assert [record["attempt"] for record in read_metrics(directory, "start")] == [1, 2]
    return directory


@needs("mlflow")
def test_a_run_and_its_restart_are_one_run_in_mlflow(recipe, tmp_path, monkeypatch, capsys) -> None:
    import mlflow

    # MLflow would rather have a database than a folder.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    directory = train_twice(recipe, f"trackers.mlflow.uri={uri}")
    said = capsys.readouterr().out
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("patchline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert said.count(f"mlflow: pretrain is run {run.info.run_id} of experiment patchline") == 2, said
    sent = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(sent) == sorted((record["step"], record["loss"]) for record in read_metrics(directory))
    params, tags = run.data.params, run.data.tags
    assert (params["config.optim.lr"], params["key"][:8]) == ("0.002", directory.name[-8:])
    assert len(tags["patchline.code"]) == 64 and tags["mlflow.source.git.commit"] == tags["patchline.commit"]
    assert run.info.status == "FINISHED"


@needs("wandb")
def test_a_run_and_its_restart_are_one_run_in_wandb(recipe, monkeypatch, capsys) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    directory = train_twice(recipe, "trackers.wandb.project=vit")
    assert capsys.readouterr().out.count("wandb: pretrain is at offline in") == 2
    ids = set()
    sent = []
    codes = set()
    # Offline every process leaves a file of its own, which `wandb sync` brings together by the run's id.
    files = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    for file in files:
        for payload in payloads_of(file):
            record = wandb_internal_pb2.Record.FromString(payload)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                codes |= {json.loads(item.value_json) for item in record.run.config.update if item.key == "code"}
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "train/loss" in values:
                sent.append((int(values["step"]), float(values["train/loss"])))
    assert len(ids) == 1 and {len(code) for code in codes} == {64}
    assert sent == [(record["step"], record["loss"]) for record in read_metrics(directory)]


def payloads_of(path: Path) -> list[bytes]:
    """Return the records of W&B's file: LevelDB's log format, in blocks of 32 KiB, behind a header of 7 bytes."""
    data = path.read_bytes()
    payloads = []
    parts = b""
    offset = 7
    while offset + 7 <= len(data):
        left_in_block = 32768 - offset % 32768
        if left_in_block < 7:  # too short for a header
            offset += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            payloads.append(parts)
            parts = b""
    return payloads
