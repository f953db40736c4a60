"""What a worker of a trained stage is told (Job), trains with (Worker), and how far it has come (Progress)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data.index.index import Index
from data.mixture import Mixture
from data.order import Ledger, Order
from data.storage import Storage, open_storage
from models import ModelConfig
from pipeline.arithmetic import Arithmetic
from pipeline.checkpoints import manifest
from pipeline.checkpoints.saver import Saver
from pipeline.engine.engine import Engine
from pipeline.evaluation import async_evaluation
from pipeline.health import Health
from pipeline.monitoring.telemetry import Telemetry, Window
from pipeline.monitoring.watchdog import STOP_FILE, Phases, node_folder
from pipeline.training_config import TrainConfig


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
    remote: str | None = None  # URL of the run in an object store, where the nodes share no folder
    device_bytes: int | None = None  # that a worker needs of its device; None: its step was never traced

    @property
    def storage(self) -> Storage:
        """Return where the run keeps its files."""
        return open_storage(Path(self.run), self.remote)

    @property
    def attempt_folder(self) -> Path:
        """Return the folder of what this attempt's workers leave behind: their places, ends and logs."""
        return manifest.attempt_folder(Path(self.directory), self.attempt)

    @property
    def stop_file(self) -> Path:
        """Return the file by which this node's agent passes on that the worker group is to stop."""
        return node_folder(self.attempt_folder) / STOP_FILE

    def set_paths(self) -> set[str]:
        """Return the paths of every set that the stage reads."""
        optional = (self.evaluate, self.probe_train, self.probe_test)
        return {*self.train, *(path for path in optional if path is not None)}


@dataclass(frozen=True)
class Worker:
    """Holds what one worker trains with; nothing here is replaced while the stage trains."""

    cfg: TrainConfig
    job: Job
    rank: int
    world: int  # size: workers of the group
    device: torch.device
    phases: Phases
    telemetry: Telemetry
    window: Window  # the steps since the last record
    since_line: Window  # the steps that are recorded since the last log line
    sets: dict[str, Index]  # by path: every set that the stage reads
    index: Index  # of what is trained on, mixtures joined
    order: Order | Mixture
    steps: int  # of the whole stage
    arithmetic: Arithmetic
    model_config: ModelConfig
    engine: Engine
    saver: Saver
    health: Health
    loop_price: async_evaluation.LoopPrice = field(default_factory=async_evaluation.LoopPrice)  # of evaluations
    sigterm: threading.Event = field(default_factory=threading.Event)  # set when this process is asked to end

    def wants_stop(self) -> bool:
        """Tell whether this worker is asked to stop: by a signal or, rank 0 only, by the driver's file."""
        return self.sigterm.is_set() or (self.rank == 0 and self.job.stop_file.exists())


@dataclass
class Progress:
    """Holds what changes with every step; it is plain data that prints, and goes into a checkpoint's manifest."""

    step: int  # steps that are whole
    bad_samples: int  # of all workers, since step 0
    ledger: Ledger
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation; rank 0 only
