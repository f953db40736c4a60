"""Worker functions of test_twin.py: Patchline's training on the batches of the original's run.

This is a separate module because workers import it by name. Only the loader is replaced: it yields the rows in the
trace's index table. Engine, model, loss, schedule, clipping, reduction and the loop are Patchline's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.loader import Batch, Wait
from pipeline import batches, train
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.worker import Job

PARAMETERS_AFTER = (2, 10, 100)  # steps after which the trace holds the parameters


class TraceLoader:
    """Replaces Patchline's loader: iterates over the micro-batches of this worker's slots in the trace."""

    def __init__(
        self, rows_of_steps: np.ndarray, images: np.ndarray, labels: np.ndarray, last_step: int, stop_file: Path
    ) -> None:
        self.rows_of_steps = rows_of_steps  # (steps, batch): rows of the pool
        self.images = images  # (rows, S, S, 3) uint8
        self.labels = labels  # (rows,)
        self.last_step = last_step  # during which Patchline finds the file with which its driver requests a stop
        self.stop_file = stop_file
        self.whole_steps: int | None = None  # steps yielded so far, after the last micro-batch of each

    def __call__(self, *_: object, slots: range, micro_batch: int, start_step: int, **__: object) -> Iterator[Batch]:
        return self.micro_batches(slots, micro_batch, start_step)

    def micro_batches(self, slots: range, micro_batch: int, start_step: int) -> Iterator[Batch]:
        """Yield batches as `data.loader.TrainLoader` does, from `start_step` on."""
        for step in range(start_step, len(self.rows_of_steps)):
            if step == self.last_step:
                self.stop_file.touch()
            rows = self.rows_of_steps[step, slots.start : slots.stop]
            for first in range(0, len(rows), micro_batch):
                part = rows[first : first + micro_batch].astype(np.int64)
                images = torch.from_numpy(self.images[part]).permute(0, 3, 1, 2)
                labels = torch.from_numpy(self.labels[part].astype(np.int64))[:, None]
                ids = torch.from_numpy(np.stack([np.zeros_like(part), np.zeros_like(part), part], axis=1))
                is_last = first + micro_batch >= len(rows)
                self.whole_steps = step + 1 if is_last else None
                yield Batch(step, images, labels, ids, (), Wait())


def train_on_trace(task: dict[str, Any]) -> dict[str, Any]:
    """Run `pipeline.train.train` on the trace of `task["twin"]`; save this worker's fragments of the parameters."""
    twin = task["twin"]
    arrays = np.load(twin["arrays"])
    stop_file = Job(**task["job"]).stop_file
    loader = TraceLoader(arrays["rows"], arrays["images"], arrays["labels"], twin["steps"] - 1, stop_file)
    batches.training_loader = loader  # type: ignore[assignment]
    keep_parameters(loader, Path(twin["parameters"]))
    return train.train({"config": task["config"], "job": task["job"]})


def keep_parameters(loader: TraceLoader, folder: Path) -> None:
    """Make the engine write its part of the masters after each update whose parameters are in the trace."""
    for engine_class in (Engine, ExactEngine):
        original = vars(engine_class)["end_micro_batch"]

        def end_micro_batch(self: Engine, rate: float, numbers: Any = None, original: Any = original) -> list[float]:
            sums = original(self, rate, numbers)
            if loader.whole_steps in PARAMETERS_AFTER:
                for fragment in self.fragments(("master",)):
                    values = fragment.tensors["master"].detach().clone().numpy()
                    np.save(folder / f"{loader.whole_steps}!{fragment.name}!{fragment.start}.npy", values)
            return sums

        engine_class.end_micro_batch = end_micro_batch  # type: ignore[method-assign]
