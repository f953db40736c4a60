"""What ends a run early or deserves a look: spikes, stretches of non-finite steps, too many bad samples.

A step whose gradient norm is not finite, in order:
1. the engine leaves the weights alone, on every worker alike; the step is named and counted;
2. after `max_skipped` of them in a row the run goes back once: the stretch since the last checkpoint is written into
   `excluded-steps.json`, WentBack ends the attempt, and the next attempt excludes those steps;
3. where the same happens before another checkpoint was committed, Diverged ends the run.

A spike is a norm that is not finite, or ten times the usual. With `health.on_spike: bisect`:
1. rank 0 requests a search of its step, where a place beside training is free, and training goes on;
2. the driver has it searched there (jobs/extras/async_evaluation/spare_worker.py, pipeline/extras/replays/search.py)
   and leaves what came out;
3. with the next save the samples that were named begin to weigh nothing. Its manifest holds them, each with this step:
   a resume goes on without them, and a replay takes every step as it was taken.

    <stage>/searches/step-0000000033.requested    rank 0: the step, and what is usual
    <stage>/searches/step-0000000033.json         the driver: what came out, for later attempts too

In:  steps 12 … 16 (counted from 0) are not finite, the last checkpoint is of step 10, max_skipped is 5
Out: excluded-steps.json holds the stretches [[10, 17]]: the next attempt loads step 10 and goes on with step 17
"""

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from data.checks import printable
from data.errors import DataError, Diverged, WentBack
from data.loader import Batch
from pipeline.artifacts import EXCLUDED_STEPS, SEARCHES, read_record, write_record
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.extras.async_evaluation import SPARE_FILE
from pipeline.extras.replays.masking import Mask
from pipeline.monitoring.telemetry import Telemetry
from pipeline.training_config import TrainConfig
from pipeline.values import counted

RECENT = 64  # steps kept in mind, for the record of a spike
SPIKE = 10.0  # a spike is so many times the median norm of the recent steps
SPIKE_AFTER = 16  # finite norms that the median needs to mean something
MOST_NAMED = 4  # samples that the line about a mask names


@dataclass(frozen=True)
class StepRecord:
    """Holds a finished step, as the record of a spike shows it."""

    step: int
    loss: float
    grad_norm: float
    ledger: str  # the first 12 digits


class Health:
    """Watches every step on every worker alike; `excluded` holds the stretches that earlier attempts gave up."""

    def __init__(self, cfg: TrainConfig, directory: Path, checkpoints: StageCheckpoints, telemetry: Telemetry) -> None:
        self.cfg = cfg
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
        """Report a spike with the steps before it; where the recipe says so, request a search beside training."""
        # Whole records of the steps before it: the run may go back to a commit that is older than they are.
        recent = list(map(asdict, self.recent))
        values = {"step": step, "grad_norm": norm, "limit": limit, "recent": recent, "ids": ids}
        line = f"step {step}: gradient norm {norm:.3g}"
        if len(finite_norms) >= SPIKE_AFTER:
            line += f", usual is up to {limit:.3g}"
        if self.cfg.health.on_spike == "bisect" and dist.get_rank() == 0:
            search = "it is searched beside training"
            request = self.directory / SEARCHES / f"step-{step:010d}.requested"
            if not finite_norms:
                search = "not searched, because no usual norm is known yet"
            elif not (attempt_folder(self.directory, self.telemetry.attempt) / SPARE_FILE).exists():
                search = "not searched, because no place beside training is free"
            elif request.with_suffix(".json").exists():
                search = "searched before"
            else:
                try:
                    request.parent.mkdir(exist_ok=True)
                    usual = statistics.median(finite_norms)
                    write_record(request, {"step": step, "metric": "grad_norm", "usual": usual})
                except OSError as error:
                    search = f"not searched, because the disk refuses the request: {error}"
            values["search"] = search
            line += f"; {search}"
        line += f"; look at the batch: python -m jobs replay {self.directory} step={step}"
        self.telemetry.report("spike", values, line)

    def mask_found(self, mask: Mask, step: int) -> None:
        """Collective: with a save of `step`, mask what searches have named since the last, from this step on."""
        named: list[list[dict[str, Any]]] = [[]]
        if dist.get_rank() == 0:
            # Where a shared folder fails for a moment, or a record was altered, the next save reads it.
            with suppress(OSError, DataError):
                named = [found_samples(self.directory)]
        dist.broadcast_object_list(named, src=0)
        samples = []
        for sample in named[0]:
            shard, first, _ = sample["range"]
            if not mask.of(step, np.array([shard]), np.array([first])).any():
                samples.append(sample)
                mask.add([(step, *sample["range"])])
        if samples:
            number = counted(len(samples), "sample")
            line = f"step {step}: {number} masked from here on, {len(mask.ranges)} in all: {names_of(samples)}"
            self.telemetry.report("masked", {"step": step, "samples": samples, "masked": len(mask.ranges)}, line)

    def go_back_or_end(self, step: int) -> None:
        """Collective: raise WentBack once for a stretch of steps, Diverged when that has not helped; on all alike.

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
        raise WentBack(f"{happened}: back to step {last_committed}, steps {last_committed + 1} … {step} are excluded")

    def count_bad(self, batch: Batch) -> int:
        """Count the replaced samples of the batch; this worker's first and every thousandth are named."""
        for bad in batch.bad:
            self.bad_of_this_worker += 1
            number = self.bad_of_this_worker
            if number == 1 or number % 1000 == 0:
                self.telemetry.log(f"bad sample {number} replaced: {printable(f'{bad.shard} {bad.key}')}: {bad.reason}")
        return len(batch.bad)


def found_samples(directory: Path) -> list[dict[str, Any]]:
    """Return the samples that searches beside training have named in a stage. Raises DataError, OSError."""
    samples = []
    for path in sorted((directory / SEARCHES).glob("step-*.json")):
        outcome = read_record(path)
        if outcome.get("is_found"):
            samples += outcome["samples"]
    return samples


def names_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return where the first few of the samples that a search has named lie."""
    return ", ".join(f"{sample['shard']} {sample['key']}" for sample in samples[:MOST_NAMED])


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
