"""Measure the host's CPU time of a training step, with H/14's 392 parameters and almost no arithmetic.

    OMP_NUM_THREADS=1 python benchmarks/host.py [--zero 1 2 3] [--precision bf16] [--before CHECKOUT] [--rounds 15]

The model is H/14 at width 32 on one image of 28 px, on one worker: the step consists of hooks, buckets, norms,
all-gathers, and optimizer calls. The contenders are separate processes, which take turns in rotated order:
    torch    the same model, AdamW and clipping in plain torch
    stock    DeepSpeed with its defaults and the same optimizer
    ours     the engine of this checkout
    before   the engine of another checkout, given by `--before`

With `--slow-workers`, the contenders are the engine of this checkout with the loop's phases and without or with the
measurement of the search for slow workers (pipeline/extras/slow_worker):
    phases   each step enters the loop's four phases
    search   the same, and each worker measures its seconds by cause
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]
STEPS_A_TURN = 3
# At ZeRO 3, DeepSpeed keeps parameters below a threshold (default 100,000 elements) gathered: the vectors of H/14, but
# none of its matrices. At width 32, this number separates vectors and matrices in the same way.
PERSISTENT = 500

Step = Callable[[], None]


class Contender:
    """A process that runs steps on request."""

    def __init__(self, kind: str, checkout: Path, options: argparse.Namespace, zero: int, port: int) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
        }
        words = [__file__, "--worker", kind, "--zero", str(zero), "--precision", options.precision]
        words += ["--accumulation", str(options.accumulation)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env=self.environment,
            cwd=checkout,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
        )
        self.answer()

    def answer(self) -> float:
        """Read the seconds that the worker reports."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker has exited; add --verbose to see its output")
        return float(line)

    def take_turn(self) -> float:
        """Return the mean CPU seconds of a few steps."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ------------------------------------------------------------------------ worker


def work(kind: str, zero: int, precision: str, accumulation: int) -> None:
    """Build the contender, then run some steps for each input line, and report the cost per step."""
    # Redirect DeepSpeed's output to stderr, because stdout is parsed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    from pipeline.engine.deepspeed import import_deepspeed
    from pipeline.process_group import join_group

    torch.set_num_threads(1)
    join_group(600)
    import_deepspeed()
    step = STEPS[kind](zero, precision, accumulation)
    for _ in range(4):  # warm-up, and the trace of ZeRO 3
        step()
    say(answers, 0.0)
    for _ in sys.stdin:
        began = time.process_time()
        for _ in range(STEPS_A_TURN):
            step()
        say(answers, (time.process_time() - began) / STEPS_A_TURN)


def say(answers: TextIO, seconds: float) -> None:
    print(seconds, file=answers, flush=True)


def parts(precision: str) -> tuple[Any, Any, Any]:
    """Return the model, and the images and labels of a step."""
    import torch

    import models

    generator = torch.Generator().manual_seed(0)
    config = models.config_of("H/14", image_size=28, classes=10, width=32, mlp=128, heads=2)
    model = models.from_config(config, generator).train()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return model, torch.randn(1, 3, 28, 28, generator=generator, dtype=dtype), torch.tensor([3])


def groups(model: Any) -> list[dict[str, Any]]:
    """Return the optimizer's two parameter groups, with and without weight decay."""
    import models

    decayed = models.decayed_parameters(model)
    decays = [p for name, p in model.named_parameters() if name in decayed]
    rest = [p for name, p in model.named_parameters() if name not in decayed]
    return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def torch_step(zero: int, precision: str, accumulation: int) -> Step:
    import torch
    import torch.nn.functional as F

    model, images, labels = parts(precision)
    model.to(images.dtype)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4, foreach=True)

    def step() -> None:
        for _ in range(accumulation):
            F.cross_entropy(model(images).float(), labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(norm)

    return step


def stock_step(zero: int, precision: str, accumulation: int) -> Step:
    import deepspeed
    import torch
    import torch.nn.functional as F

    model, images, labels = parts(precision)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if zero == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step() -> None:
        for _ in range(accumulation):
            loss = F.cross_entropy(engine(images).float(), labels)
            engine.backward(loss)
            engine.step()
        engine.get_global_grad_norm()

    return step


def our_step(zero: int, precision: str, accumulation: int) -> Step:
    import torch.nn.functional as F

    import models
    from pipeline.engine.engine import Engine
    from pipeline.engine.settings import deepspeed_config
    from pipeline.optimization import OptimConfig

    model, images, labels = parts(precision)
    settings = deepspeed_config(
        zero=zero, precision=precision, micro_batch=1, accumulation=accumulation, clip=1.0, user_file=None
    )
    if zero == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT
    engine = Engine(model, models.decayed_parameters(model), OptimConfig(), settings)

    def step() -> None:
        for _ in range(accumulation):
            engine.backward(F.cross_entropy(engine.forward(images).float(), labels))
            engine.end_micro_batch(1e-4)

    return step


def step_in_phases(zero: int, precision: str, accumulation: int, *, is_measured: bool) -> Step:
    """Return a step of the engine that enters the loop's phases once."""
    from pipeline.extras.slow_worker.hook import SlowWorkers
    from pipeline.monitoring.watchdog import Phases

    step = our_step(zero, precision, accumulation)
    phases = Phases(Path(tempfile.mkdtemp()), 0, 600)
    if is_measured:
        hook = SlowWorkers(None, None)  # type: ignore[arg-type]  # it measures without a config and a job
        hook.measure(on_gpu=False)
        phases.on_enter = hook.on_enter
    number = count()

    def stepping() -> None:
        completed = next(number)
        for phase in ("data", "forward", "backward"):
            phases.enter(phase, completed)
        step()
        phases.enter("reduce", completed)

    return stepping


STEPS: dict[str, Callable[[int, str, int], Step]] = {
    "torch": torch_step,
    "stock": stock_step,
    "ours": our_step,
    "before": our_step,
    "phases": partial(step_in_phases, is_measured=False),
    "search": partial(step_in_phases, is_measured=True),
}


# ------------------------------------------------------------------------ the table


def measure(options: argparse.Namespace, zero: int) -> dict[str, list[float]]:
    """Return the CPU seconds per step of each contender in each round."""
    checkouts = dict.fromkeys(("phases", "search") if options.slow_workers else ("torch", "stock", "ours"), ROOT)
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    contenders = {}
    for number, (kind, checkout) in enumerate(checkouts.items()):
        contenders[kind] = Contender(kind, checkout, options, zero, options.port + number)
    taken: dict[str, list[float]] = {kind: [] for kind in contenders}
    order = list(contenders)
    for _ in range(options.rounds):
        for kind in order:
            taken[kind].append(contenders[kind].take_turn())
        order = [*order[1:], order[0]]  # rotate, so that no contender has a better position in the round
    for contender in contenders.values():
        contender.end()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="another checkout whose engine is also measured")
    parser.add_argument("--slow-workers", action="store_true", help="measure the search for slow workers instead")
    parser.add_argument("--port", type=int, default=29_640)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.zero[0], options.precision, options.accumulation)
        return
    usual = "phases" if options.slow_workers else "stock"
    print(f"| ZeRO | contender | ms per step, median (least) | relative to {usual} |\n|---|---|--:|--:|")
    for zero in options.zero:
        taken = measure(options, zero)
        for kind, seconds in taken.items():
            ratio = statistics.median(mine / other for mine, other in zip(seconds, taken[usual], strict=True))
            cells = f"{1000 * statistics.median(seconds):.1f} ({1000 * min(seconds):.1f}) | {ratio:.3f}"
            print(f"| {zero} {options.precision} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
