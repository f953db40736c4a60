"""Inference speed of a model, and the largest batch that fits (paper, figures 12 and 13). No data, no weights.

    speed:
      model: {image_size: 224, classes: 1000}
      sweep: {each: {B-16: {model.name: B/16}, R50x1: {model.name: BiT-R50x1}}}   # a table of these axes

1. The largest batch is found by doubling until memory runs out, and by halving the gap down to an eighth of it; at
   `most_batch` the search ends. A GPU has a memory of its own; a CPU's process is given `memory_gb`.
2. Batches of each size in `batches` that fits are timed, `seconds` each after one that warms up; the best rate counts.
   The weights are random: no number depends on them.

In:  {"model": {…}, "batches": [8, 64], …}
Out: {"images_per_s": 812.5, "largest_batch": 512.0, "by_batch": {"8": 700.1, "64": 812.5}}, of rank 0 alone
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.checks import at_least, more_than_0
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.resolved_recipe import Context, SourceModel, StageKind
from models import ModelConfig
from pipeline import config
from pipeline.config import Tags, require, tags
from pipeline.training_config import model_config
from pipeline.versions import code_version

GIB = 2**30


@dataclass(frozen=True)
class Config:
    """Which model is timed, and how."""

    model: dict[str, Any] = field(default_factory=dict)  # name, image_size, classes, as in pretrain
    batches: tuple[int, ...] = (1, 8, 64, 512)  # images at a time; those that do not fit are left out
    most_batch: int = 4096  # at which the search for the largest ends
    seconds: float = 5.0  # of timing, for each batch
    memory_gb: float = 4.0  # of a CPU's process, beside what it has before; a GPU has its own
    precision: Literal["bf16", "fp32"] = "bf16"  # in which the model computes
    stall_s: float = 600.0  # in which no batch is done; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(forbid="model batches most_batch seconds memory_gb precision", free="stall_s")

    def __post_init__(self) -> None:
        at_least(self, 1, "most_batch")
        more_than_0(self, "seconds memory_gb stall_s")
        require(bool(self.batches) and min(self.batches) > 0, f"batches is {list(self.batches)}, expected sizes")


class Speed(StageKind):
    """The kind of stage that measures the inference speed of a model."""

    name = "speed"
    config = Config

    def run(self, cfg: Config, context: Context) -> dict[str, object]:
        """Time the model on a worker; its numbers are axes of a sweep's table."""
        outcome = supervise(
            worker,
            partial(make_task, cfg, context),
            context,
            worlds=context.campaign.cluster.worlds,
            stall_s=cfg.stall_s,
            can_commit=False,
        )
        for batch, rate in outcome["by_batch"].items():
            context.log(f"{context.stage.name}: {rate:.1f} images/s in batches of {batch}")
        largest = f"largest batch {outcome['largest_batch']:.0f}"
        if outcome["largest_batch"] == cfg.most_batch:
            largest += ", with which most_batch ends the search"
        context.log(f"{context.stage.name}: {largest}")
        summary = f"{outcome['images_per_s']:.1f} images/s, {largest}, {outcome['hardware']}"
        axes = {"images_per_s": outcome["images_per_s"], "largest_batch": outcome["largest_batch"]}
        axes["image_size"] = float(context.model.image_size[0])
        return {"summary": summary, "axes": axes, "by_batch": outcome["by_batch"], "hardware": outcome["hardware"]}

    def model(self, cfg: Config, source_model: SourceModel) -> ModelConfig | None:
        """Return the model that is timed."""
        return model_config(cfg.model)


def make_task(cfg: Config, context: Context, attempt: int) -> Task:
    """Return the task of an attempt's workers."""
    return {"config": config.plain(cfg), "folder": str(context.attempt_folder(attempt)), "code": code_version()}


# ------------------------------------------------------------------------------------------------ in a worker


def worker(task: Task) -> dict[str, Any]:
    """Time the model on this worker; rank 0's numbers count, and the others leave it the machine."""
    import torch

    import models
    from pipeline.monitoring.watchdog import Phases
    from pipeline.process_group import processor

    cfg = config.build(Config, task["config"], "config")
    rank = int(os.environ["RANK"])
    if rank > 0:
        return {}
    phases = Phases(Path(task["folder"]), rank, cfg.stall_s)
    phases.enter("build", 0)
    device = torch.device("cpu")
    hardware = f"{processor()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        hardware = torch.cuda.get_device_name(device)
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    architecture = model_config(cfg.model)
    model = models.from_config(architecture).to(device, dtype).eval()

    def forward(batch: int) -> None:
        phases.enter("forward", 0)
        with torch.inference_mode():
            model(torch.zeros(batch, 3, *architecture.image_size, device=device, dtype=dtype))
        if device.type == "cuda":
            torch.cuda.synchronize()

    largest = largest_batch(partial(fits, forward, cfg.memory_gb, device.type), cfg.most_batch)
    require(largest > 0, f"not one image fits: memory_gb is {cfg.memory_gb:g}\n  type a larger memory_gb")
    by_batch: dict[str, float] = {}
    for batch in cfg.batches:
        if batch > largest:
            continue
        forward(batch)
        images = 0
        began = time.perf_counter()
        while time.perf_counter() - began < cfg.seconds:
            forward(batch)
            images += batch
        by_batch[str(batch)] = images / (time.perf_counter() - began)
    require(bool(by_batch), f"none of batches {list(cfg.batches)} fits: the largest is {largest}\n  add a smaller one")
    phases.close()
    rate = max(by_batch.values())
    return {"images_per_s": rate, "largest_batch": float(largest), "by_batch": by_batch, "hardware": hardware}


def fits(forward: Callable[[int], None], memory_gb: float, device: str, batch: int) -> bool:
    """Return whether a batch goes through; a CPU's process gets an error, where the kernel would otherwise end it."""
    import resource

    import torch

    before = resource.getrlimit(resource.RLIMIT_DATA)
    if device == "cpu":
        # VmData is what the limit counts.
        held = 0
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                held = 1024 * int(line.split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, (held + int(memory_gb * GIB), before[1]))
    try:
        forward(batch)
        return True
    except (torch.OutOfMemoryError, MemoryError):
        return False
    except RuntimeError as error:
        # torch's own allocator on a CPU raises nothing more exact.
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if device == "cuda":
            torch.cuda.empty_cache()


def largest_batch(goes_through: Callable[[int], bool], most: int) -> int:
    """Return the largest batch up to `most` that goes through, to an eighth; 0 where not even one image does."""
    low, high = 0, 1
    while low < most and goes_through(high):
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if goes_through(middle):
            low = middle
        else:
            high = middle
    return low
