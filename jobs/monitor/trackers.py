"""Weights & Biases and MLflow beside a run, where its recipe asks for them: a process each, which nobody waits for.

    trackers: {wandb: {project: vit}, mlflow: {uri: "https://mlflow.example"}}

1. The driver starts `python -m jobs.monitor.tracking wandb ORDER`; the file says which stages there are.
2. That process reads what is added to their metrics.jsonl, and sends it through the tracker's own client.
3. Its lines come back and are said; what else its client prints is in `<run>/tracker-wandb.log`.
4. When the command ends, its standard input closes: it sends the rest, within CLOSE_S, or is killed.

A client in the driver's process could hang at its end, or take its signals. Here it costs a line and never the run;
what was not sent the next command on the run sends, into the same run of the tracker. API keys come from the
environment, as each client reads it (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN, …).
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from data.errors import ConfigError
from data.files import write_whole
from jobs.cluster_config import complaint

ROOT = Path(__file__).parents[2]
CLOSE_S = 30.0  # for what is still to be sent when a command ends


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, through `pip install wandb`; WANDB_MODE=offline keeps everything in the stage's folder."""

    project: str = ""  # where its runs go; "": W&B is not used
    entity: str = ""  # the user or team that owns the project; "": that of the API key

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["project", "entity"], "free")


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow, through `pip install mlflow-skinny` or `mlflow`."""

    uri: str = ""  # of a tracking server, a database, or an absolute folder; "": MLflow is not used
    experiment: str = "patchline"  # where its runs go

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["uri", "experiment"], "free")

    def __post_init__(self) -> None:
        text = complaint({"uri": self.uri})
        if text:
            raise ConfigError(f"mlflow.{text}")
        is_relative = self.uri and "://" not in self.uri and not self.uri.startswith("/")
        if is_relative:
            raise ConfigError(
                f"mlflow.uri is {self.uri}, expected https://…, or an absolute folder\n  type the path: /…"
            )


@dataclass(frozen=True)
class TrackersConfig:
    """What gets a copy of every stage's metrics; none of it changes what is computed."""

    wandb: WandbConfig = field(default_factory=WandbConfig)  # Weights & Biases: used where it has a project
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)  # MLflow: used where it has a uri

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["wandb", "mlflow"], "free")

    def used(self) -> list[str]:
        """Return the names of the trackers that are asked for."""
        names = []
        if self.wandb.project:
            names.append("wandb")
        if self.mlflow.uri:
            names.append("mlflow")
        return names


class Tracker:
    """One tracker's process, seen from the driver."""

    def __init__(self, name: str, order: Path, log: Path, say: Callable[[str], None]) -> None:
        """Start it; `order` holds what `tracking.main` is told, `log` takes what the client prints."""
        self.name = name
        self.say = say
        with log.open("ab") as errors:
            # A session of its own: Ctrl-C is for the driver, which then has this process send the rest.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs.monitor.tracking", name, str(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                start_new_session=True,
            )
        self.thread = threading.Thread(target=self.say_lines, name=name, daemon=True)
        self.thread.start()

    def say_lines(self) -> None:
        """Say the process's lines until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.say(f"{self.name}: {line.decode(errors='replace').rstrip()}")

    def close(self) -> None:
        """Let the process send the rest and end; kill it where that takes too long."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.say(f"{self.name}: not everything was sent within {CLOSE_S:g} s; the next command on this run goes on")
        # Its last lines.
        self.thread.join(1.0)
        if self.process.returncode > 0:
            self.say(
                f"{self.name}: its process ended with exit code {self.process.returncode}; see tracker-{self.name}.log"
            )


def start_trackers(
    config: TrackersConfig, order: Mapping[str, Any], run: Path, say: Callable[[str], None]
) -> list[Tracker]:
    """Start the process of every tracker that is asked for; one that cannot be started costs a line."""
    trackers = []
    for name in config.used():
        settings = asdict(getattr(config, name))
        path = run / f"tracker-{name}.order.json"
        try:
            write_whole(path, json.dumps({**order, "config": settings}, indent=1))
            trackers.append(Tracker(name, path, run / f"tracker-{name}.log", say))
        except OSError as error:
            say(f"{name}: {error}; the run goes on without it")
    return trackers
