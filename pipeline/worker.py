"""The parts of a training worker: its task (Job), the objects that it trains with (Setup), and its Progress.

`pipeline.start` builds all of them, collectively.
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
from pipeline.training_config import Phase, TrainConfig
from pipeline.training_data import Arithmetic


@dataclass(frozen=True)
class Job:
    """The inputs and folders of one attempt of a stage; paths are absolute, because workers run in other folders."""

    run: str  # the run directory, shared by all nodes unless there is a `remote`
    directory: str  # folder of this stage
    attempt: int
    key: str  # the stage's key
    code: str  # version of the code
    model: dict[str, Any]  # the resolved model config (models.to_dict)
    train: list[str]  # paths of the training sets, sorted by their names
    evaluate: str | None = None
    init: str | None = None
    probe_train: str | None = None
    probe_test: str | None = None
    class_names: Sequence[str] = ()  # names of the model's outputs, exported with the weights; empty: unknown
    claimed: float = 0.0  # start of this attempt by the driver, in seconds since 1970
    began: float = 0.0  # time at which the command began to work on the stage
    remote: str | None = None  # URL of the run in an object store, if the nodes share no folder
    device_bytes: int | None = None  # device memory that a worker needs; None: never traced
    until: int | None = None  # last step of a replay; None: the last step of the stage

    @property
    def storage(self) -> Storage:
        """Return the storage that holds the run's files."""
        return open_storage(Path(self.run), self.remote)

    @property
    def attempt_folder(self) -> Path:
        """Return the folder for the phases, results and logs of this attempt's workers."""
        return attempt_folder(Path(self.directory), self.attempt)

    @property
    def stop_file(self) -> Path:
        """Return the file that this node's agent creates to stop the worker group."""
        return node_folder(self.attempt_folder) / STOP_FILE


@dataclass(frozen=True)
class StopRequest:
    """A request to stop this worker, made by a signal or by a file that the node's agent creates."""

    file: Path
    reads_file: bool  # whether to check the file at every step; only rank 0 does, and stops all workers
    signal: threading.Event = field(default_factory=threading.Event)  # set when this process receives SIGTERM

    def is_requested(self) -> bool:
        """Return whether this worker has received a stop request."""
        return self.signal.is_set() or (self.reads_file and self.file.exists())

    def is_requested_on_node(self) -> bool:
        """Return whether the workers on this node have received a stop request; reads the file on every rank."""
        return self.signal.is_set() or self.file.exists()


def handle_sigterm(stop: threading.Event) -> None:
    """Make SIGTERM set the event, which the loop checks after every step, and an evaluation after every batch."""

    def on_sigterm(number: int, frame: object) -> None:
        stop.set()

    # Only the main thread may install signal handlers. Workers train in the main thread; in another thread, such as
    # that of a notebook, only the stop file can stop it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)


@dataclass(frozen=True)
class Group:
    """One worker's view of the process group: its rank and device, and its connections to the driver and the disk."""

    phases: Phases  # the current phase of this worker, for the watchdog
    device: torch.device
    rank: int
    world: int  # number of workers in the group
    telemetry: Telemetry
    checkpoints: StageCheckpoints  # checkpoints of the stage


@dataclass(frozen=True)
class StageData:
    """The data of a stage: data sets, sample order, batch arithmetic and number of steps."""

    sets: dict[str, Index]  # every set that the stage reads, by path
    index: Index  # index of the training data, with mixtures joined
    order: Order | Mixture
    arithmetic: Arithmetic
    steps: int  # length of the whole stage; the learning rate depends on it
    last_step: int  # last step of this attempt: that of the stage or of a replay
    phases: Sequence[Phase]  # phases of the stage, in order


@dataclass
class TrainingLog:
    """The steps that have not been reported yet, and the learning rate of the last step."""

    window: Window = field(default_factory=Window)  # steps since the last record
    since_line: Window = field(default_factory=Window)  # recorded steps since the last log line
    rate: float = 0.0  # learning rate of the last step

    def begin(self) -> None:
        """Start the clock now, so that building and restoring do not lower the first report's images per second."""
        self.window.clear()
        self.since_line.clear()


@dataclass(frozen=True)
class Setup:
    """The objects that a worker trains with; `pipeline.start.Worker` adds the objects that extras can replace."""

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
    """All state that changes with each step, as plain data; a checkpoint's manifest stores it."""

    step: int  # number of completed steps
    bad_samples: int  # number of bad samples on all workers since step 0
    ledger: Ledger
    last_metrics: dict[str, float] = field(default_factory=dict)  # metrics of this attempt's last evaluation
    # Ranges of masked samples, which have no weight in training: (first masked step, shard, first sample, end).
    masked: list[tuple[int, ...]] = field(default_factory=list)
