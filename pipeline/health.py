"""What ends a run early or deserves attention: spikes, stretches of non-finite steps, too many bad samples.

A step whose gradient norm is not finite, in order:
1. the engine leaves the weights alone, on every worker alike; the step is named and counted;
2. after `max_skipped` of them in a row the run goes back once: the stretch since the last checkpoint is written into
   `excluded-steps.json`, RolledBack ends the attempt, and the next attempt excludes those steps;
3. where the same happens before another checkpoint was committed, Diverged ends the run.

A spike is a norm that is not finite, or ten times the usual; it is reported with the steps before it.

In:  steps 12 … 16 (counted from 0) are not finite, the last checkpoint is of step 10, max_skipped is 5
Out: excluded-steps.json holds the stretches [[10, 17]]: the next attempt loads step 10 and goes on with step 17
"""

import math
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

RECENT = 64  # steps kept in mind, for the record of a spike
SPIKE = 10.0  # a spike is so many times the median norm of the recent steps
SPIKE_AFTER = 16  # finite norms that the median needs to mean something


@dataclass(frozen=True)
class StepRecord:
    """Holds a finished step, as the record of a spike shows it."""

    step: int
    loss: float
    grad_norm: float
    ledger: str  # the first 12 digits


class Health:
    """Watches every step on every worker alike; `excluded` holds the stretches that earlier attempts gave up."""

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
        self.directory = directory  # of the stage
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self.skipped_in_a_row = 0
        self.bad_of_this_worker = 0  # samples
        self.excluded = read_excluded(directory)

    def next_step(self, step: int) -> int:
        """Return `step`, or the first after it that is not excluded."""
        # In rising order, because a stretch may begin where the one before it ends.
        for stretch in sorted(self.excluded, key=lambda stretch: stretch.start):
            if step in stretch:
                step = stretch.stop
        return step

    def samples_seen(self, step: int) -> int:
        """Return how many samples were trained on up to this step; those of excluded steps were not."""
        excluded_steps = 0
        for stretch in self.excluded:
            excluded_steps += len(range(stretch.start, min(stretch.stop, step)))
        return (step - excluded_steps) * self.cfg.batch_size

    def count_step(self, step: int, loss: float, norm: float, ledger: str, ids: list[list[int]]) -> None:
        """Look at a finished step: report a gradient spike, and count steps in a row that are not finite.

        `ids` are the samples of this worker, each (epoch, shard, sample).
        """
        # A median, because the spikes themselves are among the recent norms and would lift a mean.
        finite_norms = [record.grad_norm for record in self.recent if math.isfinite(record.grad_norm)]
        # Until enough norms are known only a norm that is not finite is a spike. The limit is not infinity then: it is
        # written into metrics.jsonl, and JSON has no infinity.
        limit = sys.float_info.max
        if len(finite_norms) >= SPIKE_AFTER:
            limit = SPIKE * statistics.median(finite_norms)
        # Not `norm > limit`: that is false for NaN, which is a spike too.
        is_spike = not norm <= limit
        # A stretch of spikes is one event: its first step is reported, the others belong to it.
        is_first = not self.recent or self.recent[-1].grad_norm <= limit
        self.recent.append(StepRecord(step, loss, norm, ledger[:12]))
        if is_spike and is_first:
            self.report_spike(step, norm, limit, finite_norms, ids)

        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return
        # The engine has already left the weights alone. All workers see the same norm, so all of them count alike, give
        # up at the same step, and none is left waiting in a collective.
        self.skipped_in_a_row += 1
        self.telemetry.log(
            f"step {step}: gradient not finite, step skipped, weights unchanged; "
            f"first samples (epoch, shard, sample) {ids[:4]}"
        )

    def report_spike(
        self, step: int, norm: float, limit: float, finite_norms: Sequence[float], ids: list[list[int]]
    ) -> None:
        """Report a spike with the steps before it; a hook may add what it does about it."""
        # Whole records of the steps before it: the run may go back to a commit that is older than they are.
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
            line += f", usual is up to {limit:.3g}"
        for hook in self.hooks:
            line += hook.before_record("spike", values)
        line += f"; look at the batch: python -m jobs replay {self.directory} step={step}"
        self.telemetry.report("spike", values, line)

    def roll_back_or_fail(self, step: int) -> None:
        """Collective: raise RolledBack once for a stretch of steps, Diverged when that has not helped; on all alike.

        The caller has committed the save in flight, so that the run goes back no further than it must.
        """
        # Rank 0 looks for all: others may have an older listing of a shared folder.
        newest = [0]
        if dist.get_rank() == 0:
            newest = self.checkpoints.committed_steps()[:1] or [0]
        dist.broadcast_object_list(newest, src=0)
        last_committed = newest[0]
        happened = f"{self.skipped_in_a_row} steps in a row up to {step} had a non-finite gradient"
        # Where nothing was committed since the run went back, it would go back to the same step and fail once more.
        if self.excluded and last_committed <= self.excluded[-1].stop:
            stretch = self.excluded[-1]
            raise Diverged(
                f"{happened}, and excluding steps {stretch.start + 1} … {stretch.stop} had not helped\n"
                f"  the last good weights are in {self.checkpoints.address}\n"
                "  lower optim.lr, or lengthen optim.schedule.warmup_steps"
            )
        # The earlier stretches stay in the file: a run that falls back behind them must exclude them again.
        if dist.get_rank() == 0:
            pairs = [[stretch.start, stretch.stop] for stretch in (*self.excluded, range(last_committed, step))]
            write_record(self.directory / EXCLUDED_STEPS, {"stretches": pairs})
        # The file must be there before any worker's error reaches the driver, which then starts the next attempt.
        dist.barrier()
        raise RolledBack(f"{happened}: back to step {last_committed}, steps {last_committed + 1} … {step} are excluded")

    def count_bad(self, batch: Batch) -> int:
        """Count the replaced samples of the batch; this worker's first and every thousandth are named."""
        for bad in batch.bad:
            self.bad_of_this_worker += 1
            number = self.bad_of_this_worker
            if number == 1 or number % 1000 == 0:
                self.telemetry.log(f"bad sample {number} replaced: {printable(f'{bad.shard} {bad.key}')}: {bad.reason}")
        return len(batch.bad)


def read_excluded(directory: Path) -> list[range]:
    """Collective: return what rank 0 reads of the file; nothing where there is none."""
    # Rank 0 reads for all: on shared storage another node may not see the file yet, and would train other steps.
    path = directory / EXCLUDED_STEPS
    stretches: list[list[list[int]]] = [[]]
    if dist.get_rank() == 0 and path.exists():
        # One changed bit would exclude other steps, and train other weights than the run that wrote it.
        stretches = [read_record(path)["stretches"]]
    dist.broadcast_object_list(stretches, src=0)
    return [range(first, stop) for first, stop in stretches[0]]
