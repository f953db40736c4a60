"""Checks every step for gradient spikes, non-finite gradients and bad samples, and ends a run that cannot recover.

If a step's gradient norm is not finite:
1. All workers skip the optimizer step, so the weights are unchanged; the step is logged and counted.
2. After `max_skipped` consecutive steps of this kind the run rolls back once: the range of steps since the last
   checkpoint is written to `excluded-steps.json`, RolledBack ends the attempt, and the next attempt skips those steps.
3. If this happens again before another checkpoint is committed, Diverged ends the run.

A spike is a non-finite gradient norm, or a norm ten times the usual value; it is reported with the preceding steps.

In:  steps 12 … 16 (counted from 0) are not finite, the last checkpoint holds step 10, max_skipped is 5
Out: excluded-steps.json contains the range [[10, 17]]: the next attempt loads step 10 and continues with step 17
"""

import math
import shlex
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.checks import printable
from data.errors import Diverged, RolledBack
from data.loader import Batch
from pipeline.artifacts import EXCLUDED_STEPS, read_record, write_record
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.hooks import Hook
from pipeline.monitoring.telemetry import Telemetry
from pipeline.training_config import TrainConfig

RECENT = 64  # number of recent steps to remember for the record of a spike
SPIKE = 10.0  # a gradient norm above this multiple of the recent steps' median is a spike
SPIKE_AFTER = 16  # finite norms required for a meaningful median


@dataclass(frozen=True)
class StepRecord:
    """A completed step, as listed in the record of a spike."""

    step: int
    loss: float
    grad_norm: float
    ledger: str  # first 12 digits of the ledger


class Health:
    """Checks a run's steps, identically on every worker; `excluded` holds the step ranges of earlier rollbacks."""

    def __init__(
        self,
        cfg: TrainConfig,
        directory: Path,
        checkpoints: StageCheckpoints,
        telemetry: Telemetry,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.cfg = cfg
        self.hooks = hooks
        self.directory = directory  # folder of the stage
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self.skipped_in_a_row = 0
        self.bad_of_this_worker = 0  # number of bad samples on this worker
        self.excluded = read_excluded(directory)

    def next_step(self, step: int) -> int:
        """Return `step` itself, or the first later step outside the excluded ranges."""
        # Sorted, because a range may begin at the end of another one.
        for stretch in sorted(self.excluded, key=lambda stretch: stretch.start):
            if step in stretch:
                step = stretch.stop
        return step

    def samples_seen(self, step: int) -> int:
        """Return the number of samples trained on up to this step, not counting samples in excluded steps."""
        excluded_steps = 0
        for stretch in self.excluded:
            excluded_steps += len(range(stretch.start, min(stretch.stop, step)))
        return (step - excluded_steps) * self.cfg.batch_size

    def count_step(self, step: int, loss: float, norm: float, ledger: str, ids: list[list[int]]) -> None:
        """Record a completed step: report a gradient spike, and count consecutive steps with a non-finite gradient.

        `ids` are the samples of this worker, each (epoch, shard, sample).
        """
        # The median, because a mean would be raised by recent spikes.
        finite_norms = [record.grad_norm for record in self.recent if math.isfinite(record.grad_norm)]
        # Until enough norms are known, only a non-finite norm is a spike. The limit is then the largest float, not
        # infinity: it is written to metrics.jsonl, and JSON has no infinity.
        limit = sys.float_info.max
        if len(finite_norms) >= SPIKE_AFTER:
            limit = SPIKE * statistics.median(finite_norms)
        # `norm > limit` would be false for NaN.
        is_spike = not norm <= limit
        # Consecutive spikes are one event: only the first step is reported.
        is_first = not self.recent or self.recent[-1].grad_norm <= limit
        self.recent.append(StepRecord(step, loss, norm, ledger[:12]))
        if is_spike and is_first:
            self.report_spike(step, norm, limit, finite_norms, ids)

        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return
        # The engine has already skipped the update. All workers see the same norm, so they all give up at the same step
        # and no worker is left waiting in a collective.
        self.skipped_in_a_row += 1
        self.telemetry.log(
            f"step {step}: non-finite gradient; the step was skipped, and the weights are unchanged; "
            f"first samples of this worker (epoch, shard, sample): {ids[:4]}"
        )

    def report_spike(
        self, step: int, norm: float, limit: float, finite_norms: Sequence[float], ids: list[list[int]]
    ) -> None:
        """Report a spike with the preceding steps; hooks may add to the record and to the log line."""
        # Include the complete records of the preceding steps: a rollback may remove their own records.
        recent = list(map(asdict, self.recent))
        usual = statistics.median(finite_norms) if finite_norms else None
        values: dict[str, Any] = {
            "step": step,
            "grad_norm": norm,
            "limit": limit,
            "usual": usual,
            "recent": recent,
            "ids": ids,
        }
        line = f"step {step}: gradient norm {norm:.3g}"
        if len(finite_norms) >= SPIKE_AFTER:
            line += f", expected at most {limit:.3g}"
        for hook in self.hooks:
            line += hook.before_record("spike", values)
        line += f"; inspect the batch with: python -m jobs replay {shlex.quote(str(self.directory))} step={step}"
        self.telemetry.report("spike", values, line)

    def roll_back_or_fail(self, step: int) -> None:
        """Collective: raise RolledBack to exclude the bad steps, or Diverged if a previous exclusion did not help.

        The caller must have committed the save in flight, so that the run rolls back no further than necessary.
        """
        # Only rank 0 lists the checkpoints: on shared storage the other workers may see a stale listing.
        newest = [0]
        if dist.get_rank() == 0:
            newest = self.checkpoints.committed_steps()[:1] or [0]
        dist.broadcast_object_list(newest, src=0)
        last_committed = newest[0]
        happened = f"{self.skipped_in_a_row} consecutive steps up to step {step} had non-finite gradients"
        # Without a new commit since the last rollback, another one would return to the same step and fail again.
        if self.excluded and last_committed <= self.excluded[-1].stop:
            stretch = self.excluded[-1]
            weights = "no checkpoint was committed before these steps, so only the initial weights are left"
            if last_committed:
                weights = f"the last good checkpoint is that of step {last_committed} in {self.checkpoints.address}"
            raise Diverged(
                f"{happened}; excluding steps {stretch.start + 1} … {stretch.stop} did not help\n"
                f"  {weights}\n"
                f"  lower optim.lr, for example optim.lr={self.cfg.optim.lr / 10:g}, or increase "
                "optim.schedule.warmup_steps"
            )
        # Earlier ranges stay in the file: a run that falls back to a checkpoint before them must exclude them again.
        if dist.get_rank() == 0:
            pairs = [[stretch.start, stretch.stop] for stretch in (*self.excluded, range(last_committed, step))]
            write_record(self.directory / EXCLUDED_STEPS, {"stretches": pairs})
        # The file must exist before any worker's error reaches the driver, which then starts the next attempt.
        dist.barrier()
        raise RolledBack(
            f"{happened}: rolling back to step {last_committed}, excluding steps {last_committed + 1} … {step}"
        )

    def count_bad(self, batch: Batch) -> int:
        """Count the replaced samples in a batch; log this worker's first replaced sample and every thousandth."""
        for bad in batch.bad:
            self.bad_of_this_worker += 1
            number = self.bad_of_this_worker
            if number == 1 or number % 1000 == 0:
                self.telemetry.log(f"bad sample {number} replaced: {printable(f'{bad.shard} {bad.key}')}: {bad.reason}")
        return len(batch.bad)


def read_excluded(directory: Path) -> list[range]:
    """Collective: return the excluded step ranges, which rank 0 reads from a file; [] if the file does not exist."""
    # Only rank 0 reads the file: on shared storage another node may not see it yet and would train different steps.
    path = directory / EXCLUDED_STEPS
    stretches: list[list[list[int]]] = [[]]
    if dist.get_rank() == 0 and path.exists():
        # The file is sealed by a digest: a single flipped bit would exclude other steps and change the weights.
        stretches = [read_record(path)["stretches"]]
    dist.broadcast_object_list(stretches, src=0)
    return [range(first, stop) for first, stop in stretches[0]]
