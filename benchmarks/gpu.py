"""Everything that only a GPU can show, in one dated table: `make gpu`.

    python -m benchmarks.gpu                   on a machine with GPUs: writes benchmarks/gpu-<date>.md
    python -m benchmarks.gpu --device cpu      rehearsed with tiny models: writes runs/gpu-rehearsal-<date>.md

1. The tests marked `gpu` (test_on_gpu.py, images/test_gpu.py); in a rehearsal, their twins on the CPU.
2. A training step of ours, timm and transformers, compiled and not, in turn, against the ceiling of a run: the speed of
   a matrix product of the model's own shape (benchmarks/train_step.py).
3. A training step of our engine and of stock DeepSpeed at ZeRO 1, 2 and 3 on all GPUs, in turn; which share of the
   GPUs' peak its products are, of which `plan` expects 20 to 40 %; its memory, beside what `plan` says.

Every part runs in a process of its own: one that runs out of memory costs its rows, and they say so. Exit code 1 where
a test or a part failed. A rehearsal shows that the command runs; its numbers say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

import models
from benchmarks import train_step
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.extras.plan.memory import memory_need
from pipeline.monitoring.telemetry import memory_gb, peak_flops
from pipeline.optimization import OptimConfig, build_optimizer
from pipeline.process_group import join_group
from pipeline.training_config import TrainConfig

ROOT = Path(__file__).parents[1]
MARKER = "RESULT "  # before the line of JSON that a part ends with
CONTENDERS = ["ours", "ours, compiled", "timm", "timm, compiled", "transformers"]
STAGES = (1, 2, 3)
MEMORY = {
    "cuda": "GiB a worker: the most that torch had allocated on the GPU of rank 0; the planned are `plan`'s.",
    "cpu": "GiB a worker: all of rank 0's process, with Python and torch; the planned are of tensors alone.",
}


@dataclass(frozen=True)
class Plan:
    """What is run: on GPUs what people train, in a rehearsal the same with next to no work."""

    device: str
    models: dict[str, int]  # name: images a step, of one GPU
    rounds: int
    test_marker: str

    @property
    def world(self) -> int:
        """Every GPU of this machine; two processes on a CPU."""
        return torch.cuda.device_count() if self.device == "cuda" else 2


PLANS = {
    "cuda": Plan("cuda", {"B/16": 256, "L/16": 128, "H/14": 64}, rounds=9, test_marker="gpu"),
    "cpu": Plan("cpu", {"mu/16": 2}, rounds=2, test_marker="not gpu"),
}


# ------------------------------------------------------------------------------------------------ the parts


def step_part(plan: Plan, model: str) -> list[dict[str, Any]]:
    """Time one training step of every contender on one device, in bfloat16."""
    torch.set_num_threads(1)
    setting = train_step.Setting(model, torch.bfloat16, plan.models[model], plan.device)
    taken = train_step.measure(setting, CONTENDERS, plan.rounds)
    _, product_flops = train_step.product_step(setting)
    step_flops = models.training_flops(models.config_of(model), setting.batch)
    # What the step would take if all of it ran as fast as the product: no run can be faster on this machine.
    ceilings = [step_flops / product_flops * product_s for product_s in taken["product"]]
    rows = [
        {
            "model": model,
            "images": setting.batch,
            "code": "ceiling: all of it at the product's speed",
            "step_s": statistics.median(ceilings),
        }
    ]
    for name in CONTENDERS:
        seconds = taken[name]
        to_ours = [s / ours for s, ours in zip(seconds, taken["ours"], strict=True)]
        share = [ceiling / s for s, ceiling in zip(seconds, ceilings, strict=True)]
        rows.append(
            {
                "model": model,
                "images": setting.batch,
                "code": name,
                "step_s": statistics.median(seconds),
                "to_ours": statistics.median(to_ours),
                "of_ceiling": statistics.median(share),
            }
        )
    return rows


def zero_part(plan: Plan, model: str, zero: int) -> list[dict[str, Any]]:
    """Time a step of our engine and of stock DeepSpeed on all devices, and measure the memory of either alone."""
    task = {"model": model, "images": plan.models[model], "zero": zero}
    seconds = run_group(plan, {**task, "kinds": ["ours", "stock DeepSpeed"], "rounds": plan.rounds})["seconds"]
    rows = []
    for kind in ("ours", "stock DeepSpeed"):
        alone = run_group(plan, {**task, "kinds": [kind], "rounds": 2})
        ratios = [s / ours for s, ours in zip(seconds[kind], seconds["ours"], strict=True)]
        row = {
            "model": model,
            "images": plan.models[model] * plan.world,
            "workers": plan.world,
            "zero": zero,
            "code": kind,
            "step_s": statistics.median(seconds[kind]),
            "to_ours": statistics.median(ratios),
            "memory_gib": alone["memory_gib"],
            "of_peak": of_peak(model, plan.models[model], statistics.median(seconds[kind])),
        }
        if kind == "ours":
            cfg = config_of(plan, model, zero)
            need = memory_need(cfg, models.config_of(model), plan.world, is_gpu=torch.cuda.is_available())
            row["planned_gib"] = need.device_bytes / 2**30
        rows.append(row)
    return rows


def config_of(plan: Plan, model: str, zero: int) -> TrainConfig:
    """Return the stage whose step is timed, for the plan of its memory."""
    images = plan.models[model]
    return TrainConfig(
        model={"name": model},
        loss="softmax",
        steps=1,
        batch_size=images * plan.world,
        micro_batch=images,
        precision="bf16",
        zero=zero,
    )


def of_peak(model: str, images: int, step_s: float) -> float | None:
    """Return the share of a GPU's peak that its products of a step are; None without a GPU whose peak is known."""
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if peak is None:
        return None
    return models.training_flops(models.config_of(model), images) / step_s / peak


def run_group(plan: Plan, task: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        cluster = cluster_of(plan)
        return run_worker_group(time_engines, task, cluster=cluster, name="benchmark", directory=Path(folder))


def cluster_of(plan: Plan) -> ClusterConfig:
    return ClusterConfig(
        workers=plan.world, backend="processes", gpus_per_worker=int(plan.device == "cuda"), start_timeout_s=900
    )


def time_engines(task: dict[str, Any]) -> dict[str, Any]:
    """Run on every worker: seconds of every step by kind of engine, in rotated order, and the most memory held."""
    device = join_group(1800.0)
    config = models.config_of(task["model"])
    makers: dict[str, Callable[..., Callable[..., None]]] = {"ours": our_step, "stock DeepSpeed": stock_step}
    steps = {}
    for kind in task["kinds"]:
        model = models.from_config(config, torch.Generator().manual_seed(0)).to(device)
        steps[kind] = makers[kind](model, task)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    images = torch.randn(task["images"], 3, *config.image_size, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(config.classes, (task["images"],), generator=generator).to(device)

    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    order = list(steps)
    for number in range(task["rounds"] + 2):
        for kind in order:
            torch.distributed.barrier()
            wait_for(device)
            began = time.perf_counter()
            steps[kind](images, labels)
            wait_for(device)
            torch.distributed.barrier()
            if number >= 2:  # the first two warm caches and allocators
                seconds[kind].append(time.perf_counter() - began)
        order = [*order[1:], order[0]]
    memory = memory_gb()
    torch.distributed.destroy_process_group()
    return {"seconds": seconds, "memory_gib": memory}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def our_step(model: torch.nn.Module, task: dict[str, Any]) -> Callable[..., None]:
    settings = deepspeed_config(
        zero=task["zero"],
        precision="bf16",
        micro_batch=task["images"],
        accumulation=1,
        clip=1.0,
        user_file=None,
    )
    engine = Engine(model, models.decayed(model), OptimConfig(), settings)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(F.cross_entropy(engine.forward(images).float(), labels))
        engine.end_micro_batch(1e-4)

    return step


def stock_step(model: torch.nn.Module, task: dict[str, Any]) -> Callable[..., None]:
    """DeepSpeed as its documentation sets it up, with the same optimizer, clip and precision."""
    settings = {
        "train_micro_batch_size_per_gpu": task["images"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": task["zero"]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    optimizer = build_optimizer(model, models.decayed(model), OptimConfig())
    engine, *_ = import_deepspeed().initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(F.cross_entropy(engine(images).float(), labels))
        engine.step()

    return step


# ------------------------------------------------------------------------------------------------ the run


@dataclass(frozen=True)
class Outcome:
    """What became of a part: its rows, or why there are none."""

    part: str
    rows: list[dict[str, Any]]
    failure: str = ""


def parts_of(plan: Plan) -> list[str]:
    """Return the names of all parts, as `run_part` takes them: "step B/16", "zero B/16 2"."""
    parts = [f"step {model}" for model in plan.models]
    for model in plan.models:
        parts += [f"zero {model} {zero}" for zero in STAGES]
    return parts


def run_part(plan: Plan, part: str) -> list[dict[str, Any]]:
    kind, model, *rest = part.split()
    if kind == "step":
        return step_part(plan, model)
    return zero_part(plan, model, int(rest[0]))


def in_a_process(plan: Plan, part: str) -> Outcome:
    """Run a part in a process of its own, whose memory is free when it has ended, however it ends."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", plan.device, "--part", part]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = ended.stdout.splitlines()
    results = [line for line in lines if line.startswith(MARKER)]
    if ended.returncode == 0 and results:
        return Outcome(part, json.loads(results[-1].removeprefix(MARKER)))
    print(ended.stdout, file=sys.stderr)
    spoken = [line.strip() for line in lines if line.strip()]
    last = spoken[-1] if spoken else "it said nothing"
    return Outcome(part, [], f"exit code {ended.returncode}: {last}")


def run_tests(plan: Plan) -> list[dict[str, Any]]:
    """Run the tests; returns name, outcome, seconds and reason of each."""
    files = ["tests/test_pipeline/test_on_gpu.py", "tests/test_data/extras/test_gpu_decoding.py"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", plan.test_marker, "--timeout=1800", f"--junitxml={report}"]
        subprocess.run([*command, *files], cwd=ROOT)
        if not report.exists():
            return [{"test": " ".join(files), "outcome": "failed", "seconds": 0.0, "reason": "pytest wrote no report"}]
        return tests_of(report.read_text())


def tests_of(report: str) -> list[dict[str, Any]]:
    """Return the tests of pytest's JUnit XML."""
    tests = []
    for case in ET.fromstring(report).iter("testcase"):
        outcome = "passed"
        reason = ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").split("\n")[0]
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        tests.append({"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), "reason": reason})
    return tests


# ------------------------------------------------------------------------------------------------ the table


def page(plan: Plan, heading: list[str], tests: list[dict[str, Any]], outcomes: list[Outcome]) -> str:
    """Return the Markdown page of a run."""
    lines = [*heading, ""]
    if plan.device == "cpu":
        lines += ["No GPU: rehearsed on the CPU. The numbers say nothing about a GPU.", ""]

    passed = sum(test["outcome"] == "passed" for test in tests)
    lines += [f"## Tests: {passed} of {len(tests)} passed", "", "| test | outcome | s |", "|---|---|--:|"]
    for test in tests:
        reason = f": {test['reason']}" if test["reason"] else ""
        lines.append(f"| {cell(test['test'])} | {test['outcome']}{cell(reason)} | {test['seconds']:.1f} |")

    lines += ["", "## One training step on one device, bf16: `benchmarks/train_step.py`", ""]
    lines += ["| model | images | code | step, s | images/s | time / ours | of the ceiling |"]
    lines += ["|---|--:|---|--:|--:|--:|--:|"]
    for outcome in outcomes:
        if outcome.part.startswith("step"):
            lines += [step_row(row) for row in outcome.rows] or [failed_row(outcome, 7)]

    lines += ["", "## One step of the engine on all devices, bf16, memory as planned and as measured", ""]
    lines += [
        "| model | images | workers | ZeRO | code | step, s | images/s | time / ours "
        "| of the peak | GiB a worker | planned, GiB | measured / planned |"
    ]
    lines += ["|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    for outcome in outcomes:
        if outcome.part.startswith("zero"):
            lines += [zero_row(row) for row in outcome.rows] or [failed_row(outcome, 12)]
    lines += ["", MEMORY[plan.device]]
    return "\n".join(lines) + "\n"


def step_row(row: dict[str, Any]) -> str:
    to_ours = f"{row['to_ours']:.2f}" if "to_ours" in row else ""
    of_ceiling = f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else ""
    rate = row["images"] / row["step_s"]
    return (
        f"| {row['model']} | {row['images']} | {row['code']} | {row['step_s']:.4f} | {rate:,.0f} "
        f"| {to_ours} | {of_ceiling} |"
    )


def zero_row(row: dict[str, Any]) -> str:
    rate = row["images"] / row["step_s"]
    share = "" if row["of_peak"] is None else f" {row['of_peak']:.0%}"
    # Nothing is planned for other code.
    planned = " | |"
    if row["code"] == "ours":
        planned = f" {row['planned_gib']:.4g} | {row['memory_gib'] / row['planned_gib']:.2f} |"
    return (
        f"| {row['model']} | {row['images']} | {row['workers']} | {row['zero']} | {row['code']} | {row['step_s']:.4f} "
        f"| {rate:,.0f} | {row['to_ours']:.2f} |{share} | {row['memory_gib']:.2f} |{planned}"
    )


def failed_row(outcome: Outcome, columns: int) -> str:
    """Return a row that says why there is none."""
    return f"| {outcome.part} | FAILED: {cell(outcome.failure)} |" + " |" * (columns - 2)


def cell(text: str) -> str:
    """Return a text that breaks no table."""
    return text.replace("|", "\\|")


def heading_of(plan: Plan, date: str) -> list[str]:
    """Say what was run, where, and on which versions."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    hardware = f"{platform.processor() or platform.machine()}, one thread a worker"
    if plan.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gib = properties.total_memory / 2**30
        hardware = f"{torch.cuda.device_count()} × {properties.name}, {gib:.0f} GiB"
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": cudnn_version()}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    title = "On a GPU" if plan.device == "cuda" else "Rehearsal of `make gpu`"
    return [
        f"# {title}, {date}",
        "",
        f"- command: `make gpu DEVICE={plan.device}`; commit: {commit or 'unknown'}",
        f"- hardware: {hardware}",
        f"- {text}",
    ]


def cudnn_version() -> str | None:
    version = torch.backends.cudnn.version()
    return str(version) if version else None


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, or the one that is named; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=PLANS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", help="only this one, in this process; its rows as a line of JSON")
    parser.add_argument("--no-tests", action="store_true", help="the benchmarks alone")
    parser.add_argument("--out", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    plan = PLANS[options.device]
    if plan.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False\n  type make gpu DEVICE=cpu to rehearse it", file=sys.stderr)
        return 69
    if options.part:
        print(MARKER + json.dumps(run_part(plan, options.part)), flush=True)
        return 0

    if plan.device == "cpu":
        print("no GPU: rehearsed on the CPU, with tiny models", flush=True)
    tests = [] if options.no_tests else run_tests(plan)
    outcomes = []
    for part in parts_of(plan):
        print(f"{part} …", flush=True)
        outcomes.append(in_a_process(plan, part))
    date = datetime.date.today().isoformat()
    name = f"benchmarks/gpu-{date}.md" if plan.device == "cuda" else f"runs/gpu-rehearsal-{date}.md"
    target = options.out or ROOT / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(plan, heading_of(plan, date), tests, outcomes))
    print(f"written: {target}")
    has_failed = any(test["outcome"] == "failed" for test in tests) or any(outcome.failure for outcome in outcomes)
    return int(has_failed)


if __name__ == "__main__":
    # Under its own name: workers know the functions that they are sent by it, and not as those of `__main__`.
    from benchmarks import gpu

    sys.exit(gpu.main())
