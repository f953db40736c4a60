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
    added = ExactEngine.added

    def taking(worker: Any, step: int, batches: Any) -> Any:
        steps.append(step)
        return take_step(worker, step, batches)

    def adding(self: ExactEngine, loss: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
        result = added(self, loss, part)
        flip = task["flip"]
        if steps.count(flip["step"]) == 1 and dist.get_rank() == flip["rank"]:
            steps.append(flip["step"])  # only once, and not in a repetition
            result.view(torch.int32)[3] ^= 1 << 20
        return result

    train.take_step = taking  # type: ignore[assignment]
    ExactEngine.added = adding  # type: ignore[method-assign]
    return train.train(task)
