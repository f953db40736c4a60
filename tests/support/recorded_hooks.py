"""Hooks that workers load by name in test_hooks.py: one records each call, one sets samples' weights to zero."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import tags
from pipeline.hooks import ExportChoice, Hook
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class RecorderConfig(TrainConfig):
    """Adds the recorder's key to the config."""

    notes: str = ""  # file that the calls are noted in

    RESUME = tags(free="notes")


class Recorder(Hook):
    """Records each call with its step; ends the stage at `over` and exports the weights of `best`."""

    Config = RecorderConfig

    def __init__(self, cfg: RecorderConfig, job: Any, over: int = 0, best: int = 0) -> None:
        super().__init__(cfg, job)
        self.over = over
        self.best = best

    def note(self, *call: Any) -> None:
        with open(f"{self.cfg.notes}-{os.environ['RANK']}", "a") as file:
            file.write(json.dumps(call) + "\n")

    def begin(self, worker: Any, progress: Any) -> None:
        self.note("begin", progress.step)
        worker.saver.needed.append(lambda: [self.best])

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> None:
        self.note("masked", step, len(shard))

    def before_save(self, progress: Any) -> None:
        self.note("before_save", progress.step)

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        self.note("before_record", values["step"])
        values["noted"] = kind
        return ""

    def is_over(self, progress: Any) -> str:
        self.note("is_over", progress.step)
        return "enough" if 0 < progress.step == self.over else ""

    def choose(self) -> ExportChoice | None:
        self.note("choose")
        if not self.best:
            return None
        return {"metric": "accuracy", "value": 0.5, "step": self.best}


class NoWeight(Hook):
    """Sets the weight of all samples of one shard to zero."""

    def __init__(self, cfg: TrainConfig, job: Any, shard: int) -> None:
        super().__init__(cfg, job)
        self.shard = shard

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
        return shard == self.shard


def calls_of(path: Path, rank: int) -> list[list[Any]]:
    """Return the recorded calls of a rank."""
    return [json.loads(line) for line in Path(f"{path}-{rank}").read_text().splitlines()]
