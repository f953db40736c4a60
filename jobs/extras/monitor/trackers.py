"""Send the metrics of a run to Weights & Biases and MLflow, if its recipe configures them.

    trackers: {wandb: {project: vit}, mlflow: {uri: "https://mlflow.example"}}

1. Each tracker has a separate thread in the driver, so that an unresponsive server blocks only this thread.
2. The thread sends the numbers in new records of the stage's metrics.jsonl, each at its step.
3. `tracker-wandb.json` in the stage's folder stores the id of the tracker run and the number of bytes sent. After a
   restart, the thread resumes the same tracker run and sends nothing twice.
4. When a stage ends, the thread sends the rest, for at most CLOSE_S. If the stage is unfinished, the next command sends
   what is missing.

A failure is logged and never stops the run. API keys come from the environment variables of the clients
(WANDB_API_KEY, MLFLOW_TRACKING_TOKEN, …).
"""

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
from data.files import write_atomically
from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.extras.monitor.trackers_config import MlflowConfig, TrackersConfig, WandbConfig
from jobs.extras.recipe_text import config_as_known, flat
from jobs.recipe.records import environment
from jobs.resolved_recipe import Campaign, Context, Stage
from jobs.run.reading import StatusMessage, records_since
from jobs.run.watchers import Watcher
from pipeline import config
from pipeline.identity import code_version, git_commit
from pipeline.monitoring.telemetry import Record

CLOSE_S = 15.0  # maximum time to send the remaining records when a command ends
OPEN_S = 10.0  # timeout for the W&B server; the client's default of 90 s would delay the end of the command
NOT_NUMBERS = ("kind", "time", "attempt", "step")
MAX_TEXT_LENGTH = 500  # maximum number of characters of a parameter in MLflow

Facts = Mapping[str, Any]  # description of a stage, without metrics (`facts_of`)
Log = Callable[[str], None]


class Wandb:
    """Sends metrics to Weights & Biases: one W&B run per stage, grouped by run directory.

    The W&B client sends from a separate process.
    """

    def __init__(self, options: WandbConfig) -> None:
        import wandb

        self.wandb = wandb
        self.options = options
        self.run: Any = None

    def open(self, message: StatusMessage, facts: Facts, run_id: str) -> tuple[str, str]:
        """Create the W&B run for a stage, or resume the W&B run with this id; return its id and address."""
        self.run = self.wandb.init(
            project=self.options.project,
            entity=self.options.entity or None,
            # Choose the id here, so that it is known offline and before the server responds.
            id=run_id or secrets.token_hex(6),
            resume="allow",
            name=f"{message.run}/{message.stage}",
            group=message.run,
            config=dict(facts),
            allow_val_change=True,
            dir=message.directory,
            # Do not record the driver's output, resource usage and code, which do not describe the training.
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
        # An attempt that resumes from a checkpoint reports steps again, which W&B's own step counter would drop.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return self.run.id, f"at {self.run.url or f'offline in {self.run.dir}; later: wandb sync'}"

    def send(self, records: list[Record]) -> None:
        for record in records:
            self.run.log({**numbers_of(record), "step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """Sends metrics to MLflow: one MLflow run per stage, named after the run directory and the stage."""

    def __init__(self, options: MlflowConfig) -> None:
        import mlflow

        self.mlflow = mlflow
        self.options = options
        self.client = mlflow.MlflowClient(tracking_uri=options.uri)
        self.run_id = ""

    def open(self, message: StatusMessage, facts: Facts, run_id: str) -> tuple[str, str]:
        """Create the MLflow run for a stage, or resume the MLflow run with this id; return its id and a description."""
        if not run_id:
            experiment = self.client.get_experiment_by_name(self.options.experiment)
            if experiment is None:
                experiment_id = self.client.create_experiment(self.options.experiment)
            else:
                experiment_id = experiment.experiment_id
            run_id = self.client.create_run(experiment_id, run_name=f"{message.run}/{message.stage}").info.run_id
        self.run_id = run_id
        self.client.update_run(run_id, status="RUNNING")
        # MLflow parameters cannot change, so fields that changed on resume keep their first value. Tags can change, and
        # describe the current start.
        known = self.client.get_run(run_id).data.params
        parameters = []
        for name, value in flat(facts, message.stage).items():
            if name not in known and str(value):
                parameters.append(self.mlflow.entities.Param(name, str(value)[:MAX_TEXT_LENGTH]))
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
    """Sends a stage's new records to one tracker."""

    def __init__(self, name: str, client: Wandb | Mlflow) -> None:
        super().__init__()
        self.name = name
        self.close_s = CLOSE_S
        self.client = client
        self.facts: dict[Path, Facts] = {}  # stage's folder → its description
        self.open_stage: Path | None = None

    def stage(self, context: Context) -> None:
        """Prepare the description of the stage for the tracker."""
        super().stage(context)
        self.facts[context.directory] = facts_of(context.campaign, context.stage)

    def show(self, message: StatusMessage) -> None:
        """Send the stage's new records; close the tracker run if the stage has ended."""
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
                # Save the id immediately, so that a restart does not create another tracker run.
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
    """Sends a run's metrics to all trackers configured in its recipe."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] | None = None  # None before the first stage

    def stage(self, context: Context) -> None:
        """Start the trackers before the first stage, and prepare them for the current stage."""
        if self.trackers is None:
            options = context.campaign.trackers
            assert isinstance(options, TrackersConfig), "jobs/recipe/campaign.py builds it if this extra is installed"
            self.trackers = start_trackers(options, context.log)
        for tracker in self.trackers:
            tracker.stage(context)

    def status(self, message: StatusMessage) -> None:
        """Store the message, which the trackers' threads will send."""
        for tracker in self.trackers or ():
            tracker.status(message)

    def close(self) -> None:
        """Send the remaining records."""
        for tracker in self.trackers or ():
            tracker.close()


def start_trackers(options: TrackersConfig, log: Log) -> list[Tracker]:
    """Start all configured trackers; if a client fails to start, log the error and continue without that tracker."""
    trackers = []
    for name in options.used():
        try:
            client = Wandb(options.wandb) if name == "wandb" else Mlflow(options.mlflow)
        except Exception as error:
            log(f"{name}: {error}; the run continues without this tracker")
            if isinstance(error, ImportError):
                log("  to use it, run pip install 'patchline[trackers]' on the driver's machine")
            continue
        tracker = Tracker(name, client)
        tracker.start(log)
        trackers.append(tracker)
    return trackers


def facts_of(campaign: Campaign, stage: Stage) -> dict[str, Any]:
    """Return a description of a stage for trackers."""
    keys = {}
    for other in campaign.stages:
        keys[other.name] = other.key
    return {
        "run": str(campaign.run),
        "stage": stage.name,
        "kind": stage.kind.name,
        "key": stage.key,
        "recipe": config.digest(keys)[:12],  # equal for campaigns that compute the same stages
        "code": code_version(),
        "commit": git_commit(),
        "inputs": stage.inputs,
        "cluster": config.plain(campaign.cluster),
        "model": models.to_dict(stage.model) if stage.model else None,
        "config": config_as_known(campaign, stage),
        "environment": environment(),
    }


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's numbers, named as in TensorBoard: {"train/loss": 2.841, …}."""
    numbers = {}
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in NOT_NUMBERS:
            numbers[f"{record['kind']}/{name}"] = float(value)
    return numbers
