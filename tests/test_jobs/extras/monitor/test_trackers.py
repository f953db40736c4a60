"""W&B and MLflow during a run: off by default, fed from metrics.jsonl, resumed after a restart, and harmless.

Tests with a real client are skipped if its package is not installed: pip install 'patchline[trackers]'.
"""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigError, Preempted
from jobs.extras.monitor import threaded, trackers
from jobs.extras.monitor.trackers import Mlflow, Tracker, facts_of, numbers_of, start_trackers
from jobs.extras.monitor.trackers_config import MlflowConfig, TrackersConfig, WandbConfig
from jobs.run.reading import StageReader, StatusMessage
from jobs.run.session import run_campaign
from pipeline.monitoring.telemetry import Record, read_metrics
from tests.support import campaigns
from tests.support.watching import EachPoll

ROOT = Path(__file__).parents[4]
TRACKERS = "jobs.extras.monitor.trackers:Trackers"
FACTS = {"code": "c0de", "commit": "abc", "recipe": "1234", "config": {"optim": {"lr": 0.1}}}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'patchline[trackers]'")


def train_line(step: int, attempt: int = 1) -> str:
    record = {"kind": "train", "time": 1000.0 + step, "attempt": attempt, "step": step, "loss": 1.0 / step}
    return json.dumps({**record, "losses": [1.0], "ledger": "ff", "mfu": None}) + "\n"


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Return the folder of a stage with ten reported steps."""
    directory = tmp_path / "digits" / "pretrain-1a2b3c4d"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(train_line(step) for step in range(1, 11)))
    return directory


# ------------------------------------------------------------------------ the recipe


def test_trackers_are_off_by_default_and_do_not_change_keys(recipe) -> None:
    plain = campaigns.load(recipe, [])
    assert plain.trackers.used() == []
    tracked = campaigns.load(recipe, ["trackers.wandb.project=vit", "trackers.mlflow.uri=/shared/mlruns"])
    assert tracked.trackers.used() == ["wandb", "mlflow"]
    assert [stage.key for stage in tracked.stages] == [stage.key for stage in plain.stages]
    recipes = [facts_of(loaded, loaded.stages[0])["recipe"] for loaded in (plain, tracked)]
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trackers.wandb.projekt=vit", "unknown key trackers.wandb.projekt; did you mean 'project'"),
        ("trackers.mlflow.uri=mlruns", "mlflow.uri is mlruns, expected https://… or an absolute path"),
        ("trackers.mlflow.uri=https://me:pass@host", r"looks like a secret \(by its value\)"),
    ],
)
def test_wrong_settings_are_refused_when_the_recipe_is_read(override, message, recipe) -> None:
    with pytest.raises(ConfigError, match=message):
        campaigns.load(recipe, [override])


# ------------------------------------------------------------------------ what is sent


class Listener:
    """A tracker's client that records what it is sent, and can be made unavailable."""

    def __init__(self) -> None:
        self.runs: dict[str, list[int]] = {}
        self.events: list[str] = []
        self.is_away = False
        self.open_run = ""

    def open(self, message: StatusMessage, facts: Mapping[str, Any], run_id: str) -> tuple[str, str]:
        self.open_run = run_id or f"id-{len(self.events)}"
        self.events.append(f"open {message.stage} {self.open_run} of code {facts['code']}")
        return self.open_run, "here"

    def send(self, records: list[Record]) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.runs.setdefault(self.open_run, []).extend(record["step"] for record in records)

    def close(self) -> None:
        self.events.append(f"close {self.open_run}")


def tracker_of(listener: Any, *directories: Path) -> Tracker:
    tracker = Tracker("test", listener)
    tracker.facts = dict.fromkeys(directories, FACTS)
    return tracker


def test_every_record_is_sent_once_to_the_same_run_across_restarts_and_outages(stage) -> None:
    listener = Listener()
    look = StageReader(stage).read
    tracker_of(listener, stage).show(look("working"))
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(train_line(11) + '{"kind": "tr')
    # A new process, as after a restart of the driver; the tracker is unavailable at first.
    listener.is_away = True
    tracker = tracker_of(listener, stage)
    with pytest.raises(ConnectionError):
        tracker.show(look("working"))
    listener.is_away = False
    tracker.show(look("working"))
    tracker.show(look("working"))
    assert listener.runs == {"id-0": list(range(1, 12))}
    assert listener.events == ["open pretrain id-0 of code c0de"] * 2


def test_the_run_of_a_finished_stage_is_closed_after_all_records_are_sent(stage) -> None:
    second = stage.parent / "finetune-5e6f7a8b"
    second.mkdir()
    listener = Listener()
    tracker = tracker_of(listener, stage, second)
    tracker.show(StageReader(stage).read("ended"))
    (second / "metrics.jsonl").write_text(train_line(1))
    tracker.show(StageReader(second).read("working"))
    tracker.show(StageReader(second).read("ended"))
    opened = ["open pretrain id-0 of code c0de", "close id-0", "open finetune id-2 of code c0de", "close id-2"]
    assert listener.events == opened
    assert listener.runs == {"id-0": list(range(1, 11)), "id-2": [1]}


def test_records_are_sent_under_the_names_of_tensorboard() -> None:
    assert numbers_of(json.loads(train_line(4))) == {"train/loss": 0.25}


# ------------------------------------------------------------------------ clients that fail or hang


CLIENTS = {
    "fails": "raise RuntimeError('no route to host')",
    "hangs": "import time; time.sleep(60)",
}
LOGGED = {
    "fails": [
        "wandb: RuntimeError: no route to host; the run continues, and monitoring resumes when the problem is solved"
    ],
    "hangs": ["wandb: the tracker did not respond within 0.5 s; the last values may be missing"],
}


@pytest.mark.parametrize("client", CLIENTS)
def test_hanging_or_failing_tracker_causes_only_one_log_line(client, stage, monkeypatch) -> None:
    # A stand-in package with this name hides an installed client.
    (stage / "wandb.py").write_text(
        f"class Settings:\n    def __init__(self, **options): pass\ndef init(**options):\n    {CLIENTS[client]}\n"
    )
    monkeypatch.syspath_prepend(str(stage))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(threaded, "SHOW_EVERY_S", 0.01)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
    log: list[str] = []
    began = time.monotonic()
    config = TrackersConfig(wandb=WandbConfig(project="vit"))
    (tracker,) = start_trackers(config, log.append)
    tracker.facts = {stage: FACTS}
    tracker.is_shown = True
    tracker.status(StageReader(stage).read("waiting"))
    time.sleep(0.3)
    tracker.close()
    assert time.monotonic() - began < 60, "the client never returns"
    assert log == LOGGED[client]
    sys.modules.pop("wandb", None)


MLFLOW = """
from types import SimpleNamespace

class MlflowClient:
    def __init__(self, tracking_uri):
        self.metrics = []

    def log_batch(self, run_id, metrics):
        self.metrics += metrics

entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, timestamp, step))
"""


def test_mlflow_is_sent_every_number_with_its_time_and_step(tmp_path, monkeypatch) -> None:
    # A stand-in package, because MLflow is installed on few machines.
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    client = Mlflow(MlflowConfig(uri="/nowhere"))
    client.send([json.loads(train_line(step)) for step in (2, 4)])
    assert client.client.metrics == [("train/loss", 0.5, 1_002_000, 2), ("train/loss", 0.25, 1_004_000, 4)]
    sys.modules.pop("mlflow", None)


def test_a_missing_package_is_logged_with_the_command_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as if it were not installed
    log: list[str] = []
    assert start_trackers(TrackersConfig(mlflow=MlflowConfig(uri="/nowhere")), log.append) == []
    assert log[0].startswith("mlflow: ")
    assert log[0].endswith("; the run continues without this tracker")
    assert "pip install 'patchline[trackers]'" in log[1]


# ------------------------------------------------------------------------ the real clients


UNREACHABLE = """
import sys
from pathlib import Path
from jobs.extras.monitor import threaded
from jobs.extras.monitor.trackers import start_trackers
from jobs.run.reading import StageReader
from jobs.extras.monitor.trackers_config import TrackersConfig, WandbConfig

threaded.SHOW_EVERY_S = 0.01
stage = Path(sys.argv[1])
(tracker,) = start_trackers(TrackersConfig(wandb=WandbConfig(project="vit")), print)
tracker.facts = {stage: {}}
tracker.is_shown = True
tracker.status(StageReader(stage).read("waiting"))
tracker.close()
"""


@needs("wandb")
@pytest.mark.slow  # 12 s
def test_an_unreachable_wandb_server_does_not_delay_the_end(stage) -> None:
    environment = os.environ | {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    began = time.monotonic()
    words = [sys.executable, "-c", UNREACHABLE, str(stage)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 45, "the client's own limit is 90 s"
    assert "wandb: " in done.stdout


def train_twice(recipe: Path, *overrides: str) -> Path:
    """Train until SIGTERM stops the run half way, then resume; return the stage's folder."""
    loaded = campaigns.load(recipe, [*overrides, "pretrain.steps=200", "pretrain.log_every=2"])
    directory = loaded.directory(loaded.stage("pretrain"))

    def stop_half_way(message: StatusMessage) -> None:
        if any(record["step"] >= 20 for record in read_metrics(directory)):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        run_campaign(loaded, only="pretrain", watchers=[TRACKERS, EachPoll(stop_half_way)])
    run_campaign(loaded, only="pretrain", watchers=[TRACKERS])
    assert [record["attempt"] for record in read_metrics(directory, "start")] == [1, 2]
    return directory


@needs("mlflow")
def test_a_run_and_its_restart_are_one_mlflow_run(recipe, tmp_path, monkeypatch, capsys) -> None:
    import mlflow

    # MLflow prefers a database to a folder.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    directory = train_twice(recipe, f"trackers.mlflow.uri={uri}")
    out = capsys.readouterr().out
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("patchline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert out.count(f"mlflow: pretrain is run {run.info.run_id} of experiment patchline") == 2, out
    sent = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(sent) == sorted((record["step"], record["loss"]) for record in read_metrics(directory))
    params, tags = run.data.params, run.data.tags
    assert (params["config.optim.lr"], params["key"][:8]) == ("0.002", directory.name[-8:])
    assert len(tags["patchline.code"]) == 64
    assert tags["mlflow.source.git.commit"] == tags["patchline.commit"]
    assert run.info.status == "FINISHED"


@needs("wandb")
def test_a_run_and_its_restart_are_one_wandb_run(recipe, monkeypatch, capsys) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    directory = train_twice(recipe, "trackers.wandb.project=vit")
    assert capsys.readouterr().out.count("wandb: pretrain is at offline in") == 2
    ids = set()
    sent = []
    codes = set()
    # Offline, each process writes a separate file; `wandb sync` joins them by the run's id.
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
    assert len(ids) == 1
    assert {len(code) for code in codes} == {64}
    assert sent == [(record["step"], record["loss"]) for record in read_metrics(directory)]


def payloads_of(path: Path) -> list[bytes]:
    """Return the records of W&B's file: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
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
