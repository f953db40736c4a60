"""The parts of a GPU run, most valuable first, each with its function, time limit and page section.

A part is a function in a module of this package. It receives its arguments and a `Context`, which reports rows:

    Part("steps H/14", "steps", "steps.time_models", {"model": "H/14"}, limit_s=110)
    →  benchmarks.gpu.steps.time_models(context, model="H/14")

Parts that measure speed run one at a time. The others run in parallel, as far as the machine has enough cores.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # column name → measured value (JSON)


@dataclass(frozen=True)
class Size:
    """The amount of work for a device: realistic models on a GPU, tiny ones in a rehearsal on a CPU."""

    models: dict[str, int]  # model → images per step, the largest model first
    rounds: int  # number of timed steps of each contender
    test_marker: str  # pytest marker expression
    campaign: tuple[str, ...]  # overrides of the digits recipe
    jpegs: int  # number of images in the tars
    tars: dict[str, tuple[int, int]]  # model → batch size and steps of training from tars
    patience: float = 1.0  # factor of the parts' time limits


SIZES = {
    "cuda": Size(
        models={"H/14": 64, "L/16": 128, "B/16": 256},
        rounds=7,
        test_marker="gpu",
        campaign=("pretrain.passes=null", "pretrain.steps=600", "pretrain.save_every=100", "pretrain.log_every=10"),
        jpegs=6000,
        tars={"B/16": (256, 60), "H/14": (64, 40)},
    ),
    "cpu": Size(
        models={"mu/16": 2},
        rounds=2,
        test_marker="not gpu and not slow",  # make soak runs the slow ones
        campaign=(
            "pretrain.passes=null",
            "pretrain.steps=24",
            "pretrain.save_every=8",
            "pretrain.log_every=1",
            "pretrain.batch_size=8",
            "pretrain.micro_batch=4",
            "pretrain.optim.schedule.warmup_steps=5",
            "finetune.steps=20",
            "finetune.save_every=20",
            "finetune.log_every=10",
            "finetune.optim.schedule.warmup_steps=5",
        ),
        jpegs=200,
        tars={"mu/16": (4, 6)},
        patience=3.0,  # the machine may be busy with other work
    ),
}


@dataclass(frozen=True)
class Context:
    """The properties of a run that a part needs."""

    device: str  # cuda or cpu
    work: Path  # folder of the run's temporary files, shared by all parts
    rows: Path  # the file to which this part appends its rows

    @property
    def size(self) -> Size:
        """Return the amount of work for this device."""
        return SIZES[self.device]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs for each worker."""
        return int(self.device == "cuda")

    def report(self, **row: Any) -> None:
        """Append a row to this part's file."""
        append_row(self.rows, row)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a part's file, and print it; also used by a part's workers."""
    line = json.dumps(row)
    with path.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


@dataclass(frozen=True)
class Part:
    """A part of a run, which is executed in a separate process."""

    name: str
    section: str  # section of the page
    function: str  # module and function in this package
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0
    is_alone: bool = True  # whether no other part may run at the same time

    def run(self, context: Context) -> None:
        """Run the part in this process."""
        module, _, name = self.function.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        function(context, **self.arguments)


def parts_of(device: str) -> list[Part]:
    """Return the parts of a run on a device, in the order in which they start."""
    size = SIZES[device]
    largest, *smaller = size.models

    # The limits of the hardware, with which all other numbers are compared.
    parts = [Part("machine", "machine", "machine.measure", limit_s=60)]

    # Is it correct?
    parts += [
        Part("tests", "tests", "suite.run_tests", limit_s=170, is_alone=False),
        campaign("ray", zero=1, is_whole=True),
        campaign("processes", zero=2, exact_parts=2),
        campaign("processes", zero=3, is_compiled=True),
        Part("embedded Ray", "ray", "machine.inspect_ray", limit_s=90, is_alone=False),
        Part("shards", "shards", "tars.pack_images", limit_s=100, is_alone=False),
    ]
    for model in size.models:
        parts.append(Part(f"plan {model}", "plan", "tars.plan_memory", {"model": model}, 120, is_alone=False))

    # How fast is it? The largest models come first, because they matter most if time runs out.
    parts += [
        Part(f"steps {largest}", "steps", "steps.time_models", {"model": largest}, limit_s=110),
        Part(f"engine {largest}", "engines", "engines.time_ours", {"model": largest}, limit_s=100),
    ]
    for model in size.tars:
        parts.append(Part(f"tars {model}", "tars", "tars.train", {"model": model}, limit_s=100))
    parts.append(Part(f"stock {largest}", "engines", "engines.time_stock", {"model": largest}, limit_s=70))
    for model in smaller:
        parts.append(Part(f"steps {model}", "steps", "steps.time_models", {"model": model}, limit_s=70))
    for model in smaller:
        parts.append(Part(f"engine {model}", "engines", "engines.time_ours", {"model": model}, limit_s=70))
    for model in smaller:
        parts.append(Part(f"stock {model}", "engines", "engines.time_stock", {"model": model}, limit_s=60))
    return [replace(part, limit_s=size.patience * part.limit_s) for part in parts]


def campaign(
    backend: str, *, zero: int, is_whole: bool = False, is_compiled: bool = False, exact_parts: int = 0
) -> Part:
    """Return the part that runs a campaign, kills a worker, and compares it with an undisturbed twin."""
    words = [f"campaign {backend}", f"ZeRO {zero}"]
    if is_compiled:
        words.append("compiled")
    if exact_parts:
        words.append("exact")
    arguments = {
        "backend": backend,
        "zero": zero,
        "is_whole": is_whole,
        "is_compiled": is_compiled,
        "exact_parts": exact_parts,
    }
    return Part(", ".join(words), "campaigns", "campaigns.kill_and_compare", arguments, limit_s=170, is_alone=False)
