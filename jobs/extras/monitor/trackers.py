"""Weights & Biases and MLflow during a run, if its recipe names them.

    trackers: {wandb: {project: vit}, mlflow: {uri: "https://mlflow.example"}}

1. Each tracker has a thread of its own in the driver: a server that does not answer holds up this thread alone.
2. The thread sends what was added to the stage's metrics.jsonl since the last time: a record's numbers, at its step.
3. `tracker-wandb.json` in the stage's folder keeps the id of the stage's run there, and how many bytes were sent: after
   a restart the same run goes on, and nothing is sent twice.
4. When a stage ends, the rest is sent, for CLOSE_S at most; the next command on an unfinished stage sends what was not.

A failure costs a line and never the run. API keys come from the environment, as each client reads it (WANDB_API_KEY,
MLFLOW_TRACKING_TOKEN, …).
"""

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
from data.files import write_atomically
from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.extras.recipe_text import config_as_known, flat
from jobs.recipe.records import environment
from jobs.resolved_recipe import Campaign, Context, Stage
from jobs.run.reading import StatusMessage, records_since
from jobs.run.watchers import Watcher
from jobs.trackers_config import MlflowConfig, TrackersConfig, WandbConfig
from pipeline import config
from pipeline.identity import code_version, git_commit
from pipeline.monitoring.telemetry import Record

CLOSE_S = 15.0  # for what is still to be sent when a command ends
OPEN_S = 10.0  # for W&B's server to answer; its client's own limit of 90 s would hold up the end of the command
NOT_NUMBERS = ("kind", "time", "attempt", "step")
LONGEST_TEXT = 500  # characters of a parameter in MLflow

Facts = Mapping[str, Any]  # what is known of a stage besides its numbers (`facts_of`)
Log = Callable[[str], None]


class Wandb:
    """One run of W&B a stage, grouped by the campaign's run; the client has a process of its own that sends."""

    def __init__(self, options: WandbConfig) -> None:
        import wandb

        self.wandb = wandb
        self.options = options
        self.run: Any = None

    def open(self, message: StatusMessage, facts: Facts, run_id: str) -> tuple[str, str]:
        """Begin a stage's run, or go on with that of this id; return the id, and where the run is."""
        self.run = self.wandb.init(
            project=self.options.project,
            entity=self.options.entity or None,
            # Chosen here, so that it is known before the server has answered, and offline.
            id=run_id or secrets.token_hex(6),
            resume="allow",
            name=f"{message.run}/{message.stage}",
            group=message.run,
            config=dict(facts),
            allow_val_change=True,
            dir=message.directory,
            # What the driver prints and uses is not the run's.
            settings=self.wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_code=True,
                git_commit=facts.get("commit") or None,
                init_timeout=OPEN_S,
                finish_timeout=CLOSE_S,
            ),
        )
        # An attempt that went back to a checkpoint reports steps again: W&B's own counter would drop them.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return self.run.id, f"at {self.run.url or f'offline in {self.run.dir}; later: wandb sync'}"

    def send(self, records: list[Record]) -> None:
        for record in records:
            self.run.log({**numbers_of(record), "step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """One run of MLflow a stage, named by the campaign's run."""

    def __init__(self, options: MlflowConfig) -> None:
        import mlflow

        self.mlflow = mlflow
        self.options = options
        self.client = mlflow.MlflowClient(tracking_uri=options.uri)
        self.run_id = ""

    def open(self, message: StatusMessage, facts: Facts, run_id: str) -> tuple[str, str]:
        """Begin a stage's run, or go on with that of this id; return the id, and where the run is."""
        if not run_id:
            experiment = self.client.get_experiment_by_name(self.options.experiment)
            if experiment is None:
                experiment_id = self.client.create_experiment(self.options.experiment)
            else:
                experiment_id = experiment.experiment_id
            run_id = self.client.create_run(experiment_id, run_name=f"{message.run}/{message.stage}").info.run_id
        self.run_id = run_id
        self.client.update_run(run_id, status="RUNNING")
        # MLflow refuses a parameter that changes; a field that may change on resume stays what it was at first. Tags,
        # which may change, tell of this start.
        known = self.client.get_run(run_id).data.params
        parameters = []
        for name, value in flat(facts, message.stage).items():
            if name not in known and str(value):
                parameters.append(self.mlflow.entities.Param(name, str(value)[:LONGEST_TEXT]))
        self.client.log_batch(run_id, params=parameters)
        self.client.set_tag(run_id, "patchline.code", facts["code"])
        self.client.set_tag(run_id, "patchline.commit", facts["commit"])
        self.client.set_tag(run_id, "mlflow.source.git.commit", facts["commit"])
        return run_id, f"run {run_id} of experiment {self.options.experiment}"

    def send(self, records: list[Record]) -> None:
        metrics = []
        for record in records:
            milliseconds = int(record["time"] * 1000)
            for name, number in numbers_of(record).items():
                metrics.append(self.mlflow.entities.Metric(name, number, milliseconds, record["step"]))
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Tracker(ThreadedWatcher):
    """Sends a stage's new records through the client of one tracker."""

    def __init__(self, name: str, client: Wandb | Mlflow) -> None:
        super().__init__()
        self.name = name
        self.close_s = CLOSE_S
        self.client = client
        self.facts: dict[Path, Facts] = {}  # by the stage's folder
        self.open_stage: Path | None = None

    def stage(self, context: Context) -> None:
        """Prepare what the tracker is told about this stage."""
        super().stage(context)
        self.facts[context.directory] = facts_of(context.campaign, context.stage)

    def show(self, message: StatusMessage) -> None:
        """Send what the stage has reported since the last call; close its run if it has ended."""
        path = message.directory / f"tracker-{self.name}.json"
        memory: dict[str, Any] = {"id": "", "bytes": 0}
        if path.exists():
            memory = json.loads(path.read_text())
        while True:
            records, end = records_since(message.directory / "metrics.jsonl", memory["bytes"])
            if end == memory["bytes"]:
                break
            if self.open_stage != message.directory:
                memory["id"], place = self.client.open(message, self.facts[message.directory], memory["id"])
                # At once: a run whose id is lost would be begun again.
                write_atomically(path, json.dumps(memory))
                self.open_stage = message.directory
                self.log(f"{self.name}: {message.stage} is {place}")
            self.client.send([record for record in records if "step" in record])
            memory["bytes"] = end
            write_atomically(path, json.dumps(memory))
        if message.state == "ended" and self.open_stage is not None:
            self.open_stage = None
            self.client.close()


class Trackers(Watcher):
    """Watches a run through every tracker that its recipe names."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] | None = None  # None before the first stage

    def stage(self, context: Context) -> None:
        """Start the trackers before the first stage, and prepare them for this one."""
        if self.trackers is None:
            self.trackers = start_trackers(context.campaign.trackers, context.log)
        for tracker in self.trackers:
            tracker.stage(context)

    def status(self, message: StatusMessage) -> None:
        """Keep the message for the trackers' threads."""
        for tracker in self.trackers or ():
            tracker.status(message)

    def close(self) -> None:
        """Send what remains to be sent."""
        for tracker in self.trackers or ():
            tracker.close()


def start_trackers(options: TrackersConfig, log: Log) -> list[Tracker]:
    """Start every tracker that the recipe names; a client that cannot be imported costs a line."""
    trackers = []
    for name in options.used():
        try:
            client = Wandb(options.wandb) if name == "wandb" else Mlflow(options.mlflow)
        except Exception as error:
            log(f"{name}: {error}; the run goes on without it")
            if isinstance(error, ImportError):
                log("  type pip install 'patchline[trackers]', on the driver's machine")
            continue
        tracker = Tracker(name, client)
        tracker.start(log)
        trackers.append(tracker)
    return trackers


def facts_of(campaign: Campaign, stage: Stage) -> dict[str, Any]:
    """Return what a tracker is told of a stage besides its numbers."""
    keys = {}
    for other in campaign.stages:
        keys[other.name] = other.key
    return {
        "run": str(campaign.run),
        "stage": stage.name,
        "kind": stage.kind.name,
        "key": stage.key,
        "recipe": config.digest(keys)[:12],  # campaigns that have the same one compute the same
        "code": code_version(),
        "commit": git_commit(),
        "inputs": stage.inputs,
        "cluster": config.plain(campaign.cluster),
        "model": models.to_dict(stage.model) if stage.model else None,
        "config": config_as_known(campaign, stage),
        "environment": environment(),
    }


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's numbers under the names that TensorBoard has them: {"train/loss": 2.841, …}."""
    numbers = {}
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in NOT_NUMBERS:
            numbers[f"{record['kind']}/{name}"] = float(value)
    return numbers
