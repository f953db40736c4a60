"""Hook that compares DeepSpeed's training step with plain torch's, before the first step of an attempt.

1. If this run has passed the same check before, nothing is computed: the versions, the workers' nodes and devices, the
   engine's settings and the model's architecture are part of the record's name in `engine-check.json`.
2. Collectives: sums and copies whose results every worker knows (collectives.py).
3. Two steps of a small model, compared with plain torch in float64 (steps.py).
4. Releases of torch and DeepSpeed that were not tested together are logged (versions.py), and so is a CPU that is slow
   in bf16 (precision.py).
5. A difference on any worker ends the run on all workers, before a step is trained, with exit code 70.

In:  a recipe without `check_engine: false`, two workers
Out: <run>/engine-check.json {"passed": {"3f9c…": {"versions": {…}, "world": 2, "seconds": 0.2}}}
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from data.errors import DataError, ExitCode, PatchlineError
from models import ModelConfig, to_dict
from pipeline import config
from pipeline.artifacts import read_record, write_record
from pipeline.config import Tags, tags
from pipeline.extras.engine_check.precision import slow_precision
from pipeline.extras.engine_check.versions import untested_pair
from pipeline.hooks import Hook
from pipeline.identity import package_versions
from pipeline.training_config import TrainConfig

if TYPE_CHECKING:
    from pipeline.worker import Progress, Setup

RECORD = "engine-check.json"
VERSION = 1  # of the check; increase it to check again in runs that have passed
MAX_NAMED = 5  # differences in the error
MAX_ON_CPU = 2_000_000  # parameters of a full-width block; on CPUs, a larger block takes more than a second


class WrongEngine(PatchlineError):
    """DeepSpeed, torch or a device computes a wrong gradient, update or sum."""

    exit_code = ExitCode.INTERNAL


@dataclass(frozen=True)
class EngineCheckConfig(TrainConfig):
    """Adds the config field `check_engine` to trained stages."""

    # before the first step, compare a small model's gradient, norm, clipping and update with plain torch's
    # (docs/design/engine-check.md)
    check_engine: bool = True

    RESUME: ClassVar[Tags] = tags(free="check_engine")


class EngineCheck(Hook):
    """Hook that checks the engine before an attempt's first step."""

    Config = EngineCheckConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: check the engine, unless this run has passed the same check.

        Raises WrongEngine on all workers if any result is wrong.
        """
        import torch.distributed as dist  # imported here because checking a recipe does not need torch

        group = worker.group
        path = Path(self.job.run) / RECORD
        conditions = conditions_of(worker)
        key = config.digest(conditions)
        passed: list[dict[str, Any]] = [{}]
        if group.rank == 0:
            passed = [read_passed(path)]
            for remark in (untested_pair(package_versions()), slow_precision(self.cfg.precision, group.device)):
                if remark:
                    group.telemetry.log(remark)
        dist.broadcast_object_list(passed, src=0)
        if key in passed[0]:
            return
        group.phases.enter("check", progress.step)
        began = time.monotonic()
        wrong = check(self.cfg, worker.model_config, group.device)
        of_all: list[list[str]] = [[]] * group.world
        dist.all_gather_object(of_all, wrong)
        seconds = time.monotonic() - began
        is_wrong = any(of_all)
        group.telemetry.report("engine", {"step": progress.step, "seconds": seconds, "passed": not is_wrong})
        if is_wrong:
            raise WrongEngine(message_of(of_all, conditions))
        if group.rank == 0:
            record = {**passed[0], key: {**conditions, "seconds": round(seconds, 3)}}
            try:
                write_record(path, {"passed": record})
            except OSError as error:
                group.telemetry.log(f"the next attempt will check the engine again: cannot write {path}: {error}")


def conditions_of(worker: "Setup") -> dict[str, Any]:
    """Collective: return all conditions that can affect the result of the check, as JSON values."""
    import torch
    import torch.distributed as dist

    from pipeline.process_group import device_name, processor

    cfg = worker.cfg
    device = worker.group.device
    place = f"{socket.gethostname()}: {device_name(device) if device.type == 'cuda' else processor()}"
    places = [place] * worker.group.world
    dist.all_gather_object(places, place)
    tuning = None
    if cfg.deepspeed is not None:
        tuning = Path(cfg.deepspeed).read_text()
    return {
        "check": VERSION,
        "versions": {**package_versions(), "cuda": torch.version.cuda or "none"},
        "devices": sorted(set(places)),
        "backend": dist.get_backend(),
        "world": worker.group.world,
        "zero": cfg.zero,
        "precision": cfg.precision,
        "exact": bool(cfg.exact_parts),
        "recomputed": bool(cfg.checkpoint_blocks),
        "optimizer": config.plain(cfg.optim),
        "tuning": tuning,
        "model": to_dict(worker.model_config),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }


def read_passed(path: Path) -> dict[str, Any]:
    """Return the checks that this run has passed, by digest of their conditions; {} if no record can be read."""
    try:
        return dict(read_record(path).get("passed", {}))
    except (DataError, OSError):
        return {}


def check(cfg: TrainConfig, model: ModelConfig, device: Any, seed: int = 0) -> list[str]:
    """Collective: check the collectives, then the engine; return a description of each wrong result on this worker."""
    import torch
    import torch.distributed as dist

    from models import parameters_of
    from pipeline.extras.engine_check.collectives import wrong_collectives
    from pipeline.extras.engine_check.models import checked_config
    from pipeline.extras.engine_check.steps import any_worker, wrong_steps

    # uint8 carries objects, int64 sample counts, float64 the norm and the loss, fp32 and bf16 gradients and weights.
    dtypes = [torch.uint8, torch.int64, torch.float64, torch.float32]
    if cfg.precision == "bf16":
        dtypes.append(torch.bfloat16)
    wrong = []
    if dist.get_world_size() > 1:
        wrong = wrong_collectives(dtypes, device, is_exact=bool(cfg.exact_parts))
        # The comparison below sums over the workers.
        if any_worker(bool(wrong), device):
            return wrong
    configs = [checked_config(model, is_full_width=False)]
    full_width = checked_config(model, is_full_width=True)
    if device.type == "cuda" or parameters_of(full_width) <= MAX_ON_CPU:
        configs.append(full_width)
    return wrong_steps(cfg, configs, device, seed)


def message_of(wrong: list[list[str]], conditions: dict[str, Any]) -> str:
    """Return the error message for the wrong results on all workers, with expected values and a remedy."""
    workers_of: dict[str, list[int]] = {}  # text → ranks
    for rank, texts in enumerate(wrong):
        for text in texts[:MAX_NAMED]:
            workers_of.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in list(workers_of.items())[:MAX_NAMED]:
        which = f"worker {ranks[0]}"
        if len(ranks) > 1:
            which += f" and {len(ranks) - 1} more"
        lines.append(f"  {which}: {text}")
    versions = conditions["versions"]
    differing = sum(1 for texts in wrong if texts)
    return (
        f"the training engine computes wrong results on {differing} of {len(wrong)} workers (DeepSpeed "
        f"{versions['deepspeed']}, torch {versions['torch']}, ZeRO {conditions['zero']}, {conditions['precision']}, "
        f"{conditions['backend']}); no step was trained\n"
        + "\n".join(lines)
        + "\n  expected: the results of plain torch, within rounding errors (docs/design/engine-check.md)\n"
        "  install the versions in constraints.txt; if they are installed, exclude the named workers' nodes, or run\n"
        "  python -m jobs preflight to test them; to train in spite of this, set check_engine=false"
    )
