"""Worker function of the live audit's tests: a run with one flipped bit in a gradient."""

from typing import Any

import torch
import torch.distributed as dist

from pipeline import train
from pipeline.engine.exact import ExactEngine


def train_with_flip(task: dict[str, Any]) -> Any:
    """Train, and flip one bit of worker `rank`'s gradient in one step."""
    steps: list[int] = []
    take_step = train.take_step
    close_part = ExactEngine.end_micro_batch

    def taking(worker: Any, step: int, batches: Any) -> Any:
        steps.append(step)
        return take_step(worker, step, batches)

    def closing(self: ExactEngine, rate: float, numbers: Any = None) -> list[float]:
        flip = task["flip"]
        if steps.count(flip["step"]) == 1 and dist.get_rank() == flip["rank"] and self.part is not None:
            steps.append(flip["step"])  # only once
            self.part.view(torch.int32)[3] ^= 1 << 20
        return close_part(self, rate, numbers)

    train.take_step = taking  # type: ignore[assignment]
    ExactEngine.end_micro_batch = closing  # type: ignore[method-assign]
    return train.train(task)
