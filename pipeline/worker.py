"""What a worker of a trained stage is told (Job), trains with (Setup), and what changes with every step (Progress).

`pipeline.start` builds all of it, in an order that is collective.
"""

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data.index.index import Index
from data.order import Ledger, Mixture, Order
from data.storage import Storage, open_storage
from models import ModelConfig
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.engine.engine import Engine
from pipeline.monitoring.telemetry import Telemetry, Window
from pipeline.monitoring.watchdog import STOP_FILE, Phases, node_folder
from pipeline.phases import Phase
from pipeline.training_config import TrainConfig
from pipeline.training_data import Arithmetic


@dataclass(frozen=True)
class Job:
    """Says where one attempt of a stage reads and writes; paths are absolute, workers live in other folders."""

    run: str  # the run directory, shared by all nodes unless there is a `remote`
    directory: str  # of this stage
    attempt: int
    key: str  # of the stage
    code: str  # version of the code
    model: dict[str, Any]  # the resolved architecture (models.to_dict)
    train: list[str]  # the sets that are trained on, in the order of their names
    evaluate: str | None = None
    init: str | None = None
    probe_train: str | None = None
    probe_test: str | None = None
    class_names: Sequence[str] = ()  # of the model's outputs, which are handed on with the weights; none: unknown
    claimed: float = 0.0  # when the driver began this attempt, seconds since 1970
    began: float = 0.0  # when its command began to work on the stage
    remote: str | None = None  # URL of the run in an object store, where the nodes share no folder
    device_bytes: int | None = None  # that a worker needs of its device; None: its step was never traced
    until: int | None = None  # the step that a replay ends with; None: the last of the stage

    @property
    def storage(self) -> Storage:
        """Return where the run keeps its files."""
        return open_storage(Path(self.run), self.remote)

    @property
    def attempt_folder(self) -> Path:
        """Return the folder of what this attempt's workers leave behind: their places, ends and logs."""
        return attempt_folder(Path(self.directory), self.attempt)

    @property
    def stop_file(self) -> Path:
        """Return the file by which this node's agent passes on that the worker group is to stop."""
        return node_folder(self.attempt_folder) / STOP_FILE


@dataclass(frozen=True)
class StopRequest:
    """Tells a worker that it is to stop: by a signal, or by the file that its node's agent writes."""

    file: Path
    reads_file: bool  # in every step; on rank 0 alone, which stops all others
    signal: threading.Event = field(default_factory=threading.Event)  # set if this process is to end

    def is_requested(self) -> bool:
        """Return whether this worker is asked to stop."""
        return self.signal.is_set() or (self.reads_file and self.file.exists())

    def is_requested_on_node(self) -> bool:
        """Return the same, but read the file on every rank."""
        return self.signal.is_set() or self.file.exists()


def handle_sigterm(asked: threading.Event) -> None:
    """Have SIGTERM set the event; the loop checks it after every step, and an evaluation after every batch."""

    def remember(number: int, frame: object) -> None:
        asked.set()

    # Only a main thread may catch signals. A worker trains in its main thread; in another one, as of a notebook, the
    # stop file alone tells it to stop.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, remember)


@dataclass(frozen=True)
class Group:
    """Holds what a worker has once it is one of the group."""

    phases: Phases  # what this worker does now, as the watchdog reads it
    device: torch.device
    rank: int
    world: int  # size: workers of the group
    telemetry: Telemetry
    checkpoints: StageCheckpoints  # of the stage


@dataclass(frozen=True)
class StageData:
    """Holds what a stage trains on, in which order, and for how many steps."""

    sets: dict[str, Index]  # by path: every set that the stage reads
    index: Index  # of what is trained on, mixtures joined
    order: Order | Mixture
    arithmetic: Arithmetic
    steps: int  # of the whole stage, on which the learning rate depends
    last_step: int  # that this attempt ends with: the stage's, or a replay's
    phases: Sequence[Phase]  # of the stage, in order


@dataclass
class TrainingLog:
    """Holds the steps that are to be reported, and what the last of them was taken with."""

    window: Window = field(default_factory=Window)  # since the last record
    since_line: Window = field(default_factory=Window)  # recorded since the last log line
    rate: float = 0.0  # the learning rate of the last step

    def begin(self) -> None:
        """Count from now: the first report's images per second must not include building and restoring."""
        self.window.clear()
        self.since_line.clear()


@dataclass(frozen=True)
class Setup:
    """Holds what a worker trains with, without what extras may add or replace (`pipeline.start.Worker`)."""

    cfg: TrainConfig
    job: Job
    group: Group
    data: StageData
    model_config: ModelConfig
    engine: Engine
    saver: Saver
    log: TrainingLog
    stop: StopRequest


@dataclass
class Progress:
    """Holds what changes with every step; it is plain data that prints, and is saved in a checkpoint's manifest."""

    step: int  # steps that are complete
    bad_samples: int  # of all workers, since step 0
    ledger: Ledger
    last_metrics: dict[str, float] = field(default_factory=dict)  # of this attempt's last evaluation
    # Samples without weight, as (step from which on, shard, first sample, the one after the last).
    masked: list[tuple[int, ...]] = field(default_factory=list)
