"""Masked samples, and the search for the samples that cause a spike (`health.on_spike: bisect`), in the workers.

A spike is a gradient norm that is not finite, or ten times the usual (pipeline/health.py). With `bisect`:
1. rank 0 requests a search of its step, if a place is spare, and training continues;
2. the driver has it searched there (jobs/extras/async_evaluation/spare_worker.py, pipeline/extras/replays/search.py)
   and leaves the outcome;
3. from the next save on the samples that the search has named have no weight. The manifest holds them, each with this
   step: a resume continues without them, and a replay repeats each step as it was taken.

    <stage>/searches/step-0000000033.requested    rank 0: the step, and the usual norm
    <stage>/searches/step-0000000033.json         the driver: the outcome, for later attempts too
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from data.errors import DataError
from pipeline.artifacts import SEARCHES, read_record, write_record
from pipeline.config import Tags, tags
from pipeline.extras.async_evaluation import SPARE_FILE
from pipeline.extras.replays.masking import Mask
from pipeline.hooks import Hook
from pipeline.training_config import TrainConfig
from pipeline.values import counted

if TYPE_CHECKING:
    from pipeline.worker import Job, Progress, Setup

MOST_NAMED = 4  # samples that the line about a mask names


@dataclass(frozen=True)
class HealthConfig:
    """Says what follows on a gradient norm that is not finite, or ten times the usual."""

    # bisect: the step is searched beside training, and the samples behind it weigh nothing from the next checkpoint on
    # (docs/replay.md); record: it is said, and kept in metrics.jsonl
    on_spike: Literal["record", "bisect"] = "record"


@dataclass(frozen=True)
class SpikeConfig(TrainConfig):
    """Adds the section `health` to a trained stage."""

    health: HealthConfig = field(default_factory=HealthConfig)  # what follows on a spike

    RESUME: ClassVar[Tags] = tags(free="health")


class Masking(Hook):
    """Has samples without weight: those of the option `masked`, and those that the checkpoint holds."""

    def __init__(self, cfg: TrainConfig, job: "Job", masked: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(cfg, job)
        self.mask = Mask(masked)

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Add the samples of the checkpoint."""
        self.mask.add(progress.masked)
        progress.masked = self.mask.ranges

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
        """Return which of these samples have no weight in a step; None before the first has none."""
        if not self.mask:
            return None
        return self.mask.of(step, shard, sample)


class SpikeSearch(Masking):
    """Requests the search of each spike, and masks the samples that were found."""

    Config = SpikeConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Add the samples of the checkpoint."""
        super().begin(worker, progress)
        self.group = worker.group
        self.stage = Path(self.job.directory)

    def before_save(self, progress: "Progress") -> None:
        """Collective: mask, from this step on, the samples that searches have named since the previous save."""
        import torch.distributed as dist  # not above: a recipe is checked without torch

        if self.cfg.health.on_spike != "bisect":
            return
        named: list[list[dict[str, Any]]] = [[]]
        if self.group.rank == 0:
            # If a shared folder fails for a moment, or a record was altered, the next save reads it.
            with suppress(OSError, DataError):
                named = [culprit_samples(self.stage)]
        dist.broadcast_object_list(named, src=0)
        step = progress.step
        samples = []
        for sample in named[0]:
            shard, first, _ = sample["range"]
            if not self.mask.of(step, np.array([shard]), np.array([first])).any():
                samples.append(sample)
                self.mask.add([(step, *sample["range"])])
        progress.masked = self.mask.ranges
        if samples:
            number = counted(len(samples), "sample")
            total = len(self.mask.ranges)
            line = f"step {step}: {number} masked from here on, {total} in all: {names_of(samples)}"
            self.group.telemetry.report("masked", {"step": step, "samples": samples, "masked": total}, line)

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Request a search during training, if the record is that of a spike; return what became of it."""
        if kind != "spike" or self.cfg.health.on_spike != "bisect" or self.group.rank != 0:
            return ""
        values["search"] = self.request(values["step"], values["usual"])
        return f"; {values['search']}"

    def request(self, step: int, usual: float | None) -> str:
        """Request the search of a step; return in words whether it is searched."""
        request = self.stage / SEARCHES / f"step-{step:010d}.requested"
        if usual is None:
            return "not searched, because no usual norm is known yet"
        if not (self.job.attempt_folder / SPARE_FILE).exists():
            return "not searched, because no place beside training is free"
        if request.with_suffix(".json").exists():
            return "searched before"
        try:
            request.parent.mkdir(exist_ok=True)
            write_record(request, {"step": step, "metric": "grad_norm", "usual": usual})
        except OSError as error:
            return f"not searched, because the disk refuses the request: {error}"
        return "it is searched beside training"


def culprit_samples(directory: Path) -> list[dict[str, Any]]:
    """Return the samples that searches have named in a stage. Raises DataError, OSError."""
    samples = []
    for path in sorted((directory / SEARCHES).glob("step-*.json")):
        outcome = read_record(path)
        if outcome.get("is_found"):
            samples += outcome["samples"]
    return samples


def names_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return where the first few of the samples that a search has named lie."""
    return ", ".join(f"{sample['shard']} {sample['key']}" for sample in samples[:MOST_NAMED])
