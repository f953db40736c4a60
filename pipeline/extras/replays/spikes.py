"""Hooks that mask samples, and that search for the samples that cause a spike (`health.on_spike: bisect`).

A spike is a gradient norm that is not finite, or ten times the usual value (pipeline/health.py). With `bisect`:
1. rank 0 requests a search for the spike's cause if a spare worker is available, and training continues;
2. the driver runs the search on the spare worker (jobs/extras/async_evaluation/spare_worker.py,
   pipeline/extras/replays/search.py), and writes the result;
3. from the next save on, the culprits have no weight. The manifest stores them together with the step of that save, so
   that a resumed run continues to mask them, and a replay repeats each step with the same mask.

    <stage>/searches/step-0000000033.requested    from rank 0: the step, and the usual norm
    <stage>/searches/step-0000000033.json         from the driver: the result, which later attempts read too
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from data.errors import DataError
from pipeline.artifacts import SEARCHES, read_record, write_record
from pipeline.config import Tags, require, tags
from pipeline.extras.async_evaluation import SPARE_FILE
from pipeline.extras.replays.masking import Mask
from pipeline.hooks import Hook
from pipeline.training_config import TrainConfig
from pipeline.values import counted

if TYPE_CHECKING:
    from pipeline.worker import Job, Progress, Setup

MAX_NAMED = 4  # samples named in the log line about a mask


@dataclass(frozen=True)
class HealthConfig:
    """Reaction to a spike (a gradient norm that is not finite, or ten times the usual value), and the live audit."""

    # record: log the spike, also in metrics.jsonl; bisect: in addition, search for its samples on a spare worker during
    # training, and give them no weight from the next checkpoint (docs/replay.md)
    on_spike: Literal["record", "bisect"] = "record"
    # share of the steps that another worker repeats during training, for example 0.01; a different result ends the
    # attempt before it is committed (docs/replay.md); 0: off
    audit: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.audit <= 1, f"health.audit is {self.audit}, expected a fraction of the steps, 0 to 1")


@dataclass(frozen=True)
class SpikeConfig(TrainConfig):
    """Adds the config section `health` to trained stages."""

    health: HealthConfig = field(default_factory=HealthConfig)  # reaction to spikes, and the live audit

    RESUME: ClassVar[Tags] = tags(free="health")


class Masking(Hook):
    """Hook that masks the samples listed in its option `masked` and in the checkpoint's manifest."""

    def __init__(self, cfg: TrainConfig, job: "Job", masked: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(cfg, job)
        self.mask = Mask(masked)

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Mask the samples in the manifest of the checkpoint."""
        self.mask.add(progress.masked)
        progress.masked = self.mask.ranges

    def masked(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray | None:
        """Return a boolean array that marks the samples masked in a step, or None if the mask is empty."""
        if not self.mask:
            return None
        return self.mask.of(step, shard, sample)


class SpikeSearch(Masking):
    """Hook that requests a search for each spike, and masks the culprits."""

    Config = SpikeConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Mask the samples in the manifest of the checkpoint."""
        super().begin(worker, progress)
        self.group = worker.group
        self.stage = Path(self.job.directory)

    def before_save(self, progress: "Progress") -> None:
        """Collective: from this step on, mask the culprits found by searches that finished since the previous save."""
        import torch.distributed as dist  # imported here because checking a recipe does not need torch

        if self.cfg.health.on_spike != "bisect":
            return
        named: list[list[dict[str, Any]]] = [[]]
        if self.group.rank == 0:
            # After a temporary failure of the shared folder, or a damaged record, the next save tries again.
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
            line = f"step {step}: {number} masked from this step, {total} in total: {names_of(samples)}"
            self.group.telemetry.report("masked", {"step": step, "samples": samples, "masked": total}, line)

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Request a search if the record is a spike, and return a phrase about the request for the log line."""
        if kind != "spike" or self.cfg.health.on_spike != "bisect" or self.group.rank != 0:
            return ""
        values["search"] = self.request(values["step"], values["usual"])
        return f"; {values['search']}"

    def request(self, step: int, usual: float | None) -> str:
        """Request a search for the cause of a step's spike; return a phrase for the log on whether it will run."""
        request = self.stage / SEARCHES / f"step-{step:010d}.requested"
        if usual is None:
            return "no search, because the usual norm is not known yet"
        if not (self.job.attempt_folder / SPARE_FILE).exists():
            return "no search, because no spare worker is available"
        if request.with_suffix(".json").exists():
            return "already searched"
        try:
            request.parent.mkdir(exist_ok=True)
            write_record(request, {"step": step, "metric": "grad_norm", "usual": usual})
        except OSError as error:
            return f"no search, because the request could not be written: {error}"
        return "search requested on a spare worker"


def culprit_samples(directory: Path) -> list[dict[str, Any]]:
    """Return the culprits found by all searches in a stage.

    Raises DataError if a search result was altered, or OSError if it cannot be read.
    """
    samples = []
    for path in sorted((directory / SEARCHES).glob("step-*.json")):
        outcome = read_record(path)
        if outcome.get("is_found"):
            samples += outcome["samples"]
    return samples


def names_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the shards and keys of the first few culprits, for a log line."""
    return ", ".join(f"{sample['shard']} {sample['key']}" for sample in samples[:MAX_NAMED])
