"""The parts of a run on a GPU, in order of worth: what each runs, its time limit, and its section on the page.

A part is a function of one of this package's modules. It gets a `Context`, by which it reports rows, and its arguments:

    Part("steps H/14", "steps", "steps.time_models", {"model": "H/14"}, limit_s=110)
    →  benchmarks.gpu.steps.time_models(context, model="H/14")

Parts that measure speed have the device to themselves. The others run side by side, as the machine has cores for them.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # what a part measured, by the name of its column; JSON


@dataclass(frozen=True)
class Size:
    """How much work a device gets: what people train on GPUs; next to nothing in a rehearsal."""

    models: dict[str, int]  # images a step by model, the largest model first
    rounds: int  # timed steps of each contender
    test_marker: str  # of pytest
    campaign: tuple[str, ...]  # overrides of the recipe of digits
    jpegs: int  # images in the tars
    tars: dict[str, tuple[int, int]]  # batch and steps of training from tars, by model
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
    """What a part needs to know of its run."""

    device: str  # cuda or cpu
    work: Path  # folder of the run's temporary files, shared by all parts
    rows: Path  # the file to which this part appends its rows

    @property
    def size(self) -> Size:
        """Return how much work this device gets."""
        return SIZES[self.device]

    @property
    def gpus(self) -> int:
        """Return the GPUs of a worker."""
        return int(self.device == "cuda")

    def report(self, **row: Any) -> None:
        """Append a row."""
        append_row(self.rows, row)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a part's file, and print it; workers of a part use this too."""
    line = json.dumps(row)
    with path.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


@dataclass(frozen=True)
class Part:
    """One process of a run."""

    name: str
    section: str  # of the page
    function: str  # module and function of this package
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0
    is_alone: bool = True  # nothing else may run on the machine

    def run(self, context: Context) -> None:
        """Run the part in this process."""
        module, _, name = self.function.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        function(context, **self.arguments)


def parts_of(device: str) -> list[Part]:
    """Return the parts of a run on a device, in the order in which they start."""
    size = SIZES[device]
    largest, *smaller = size.models

    # The ceilings that all other numbers are compared with.
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

    # How fast is it? The largest model comes first: what is left out when time runs out is worth least.
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
