"""Worker functions of the engine check's tests: the check with correct and with deliberately wrong DeepSpeeds."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import models
from data.order import Ledger
from pipeline.extras.engine_check import hook
from pipeline.extras.engine_check.collectives import wrong_collectives
from pipeline.extras.engine_check.steps import ACCUMULATION
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group
from pipeline.worker import Progress


def config_of(case: dict[str, Any]) -> Any:
    """Return the keys of a training config that the check reads."""
    return SimpleNamespace(
        zero=case["zero"],
        precision=case.get("precision", "fp32"),
        exact_parts=case.get("exact_parts", 0),
        checkpoint_blocks=case.get("checkpoint_blocks", 0),
        deepspeed=None,
        optim=OptimConfig(name=case.get("optimizer", "adam")),
    )


def check_all(task: dict[str, Any]) -> list[list[str]]:
    """Return all workers' differences for each case and seed."""
    device = join_group(60.0)
    outcomes = []
    for case in task["cases"]:
        model = models.config_of(case.get("model", "mu/8"), case.get("image_size", 16), 10, **case.get("fields", {}))
        for seed in range(*case.get("seeds", (0, 1))):
            with PLANTED[case.get("planted", "nothing")]():
                wrong = hook.check(config_of(case), model, device, seed)
            of_all: list[list[str]] = [[]] * dist.get_world_size()
            dist.all_gather_object(of_all, wrong)
            outcomes.append([text for texts in of_all for text in texts])
    dist.destroy_process_group()
    return outcomes


def begin_twice(task: dict[str, Any]) -> dict[str, Any]:
    """Start the hook twice in the same run and once with other settings, then with a wrong DeepSpeed."""
    device = join_group(60.0)
    records: list[dict[str, Any]] = []
    telemetry = SimpleNamespace(report=lambda kind, values: records.append(values), log=records.append)
    phases = SimpleNamespace(enter=lambda phase, step: None)
    group = SimpleNamespace(device=device, rank=0, world=1, telemetry=telemetry, phases=phases)
    job: Any = SimpleNamespace(run=task["run"])
    counts = []
    error = ""
    code = None
    for zero, planted in ((2, "nothing"), (2, "nothing"), (1, "nothing"), (0, "divided")):
        cfg = config_of({"zero": zero})
        worker: Any = SimpleNamespace(cfg=cfg, group=group, model_config=models.config_of("mu/8", 16, 10))
        with PLANTED[planted]():
            try:
                hook.EngineCheck(cfg, job).begin(worker, Progress(0, 0, Ledger("")))
            except hook.WrongEngine as wrong:
                error = str(wrong)
                code = int(wrong.exit_code)
        counts.append(len(records))
    dist.destroy_process_group()
    return {"counts": counts, "error": error, "code": code, "passed": [record["passed"] for record in records]}


def bytes_after_checks(task: dict[str, Any]) -> list[int]:
    """Return the bytes of all tensors that are reachable after a check at each ZeRO stage, without a collection."""
    device = join_group(60.0)
    model = models.config_of("mu/8", 16, 10)
    gc.collect()
    gc.disable()
    sizes = []
    for zero in range(4):
        assert hook.check(config_of({"zero": zero}), model, device) == []
        storages: dict[int, int] = {}
        for value in gc.get_objects():
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        sizes.append(sum(storages.values()))
    dist.destroy_process_group()
    return sizes


def check_sums(task: dict[str, Any]) -> list[list[str]]:
    """Return this worker's wrong collectives: with correct ones, and with those of each planted error."""
    device = join_group(60.0)
    dtypes = [torch.uint8, torch.int64, torch.float64, torch.float32, torch.bfloat16]
    outcomes = [wrong_collectives(dtypes, device, is_exact=True)]
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce"):
        original = getattr(dist, name)

        def flipped(tensor: Tensor, *args: Any, original: Callable[..., Any] = original, **options: Any) -> None:
            original(tensor, *args, **options)
            if tensor.dtype == torch.float32:
                tensor[7] += 1

        setattr(dist, name, flipped)
        outcomes.append(wrong_collectives(dtypes, device, is_exact=True))
        setattr(dist, name, original)
    dist.destroy_process_group()
    return outcomes


# ------------------------------------------------------------------------ wrong DeepSpeeds


@contextmanager
def nothing() -> Iterator[None]:
    """Leave DeepSpeed as it is."""
    yield


@contextmanager
def in_backward(change: Callable[[Any, Tensor], Tensor]) -> Iterator[None]:
    """Replace the loss that DeepSpeed's backward pass gets; `change` maps (engine, loss) to the replacement."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.backward

    def backward(engine: Any, loss: Tensor, *args: Any, **options: Any) -> Any:
        return original(engine, change(engine, loss), *args, **options)

    DeepSpeedEngine.backward = backward
    try:
        yield
    finally:
        DeepSpeedEngine.backward = original


def lost_micro_batches() -> Any:
    """Count only the last micro-batch of a step: ZeRO 2 in 0.17.6 to 0.18.2 lost gradients and had smaller norms."""
    return in_backward(lambda engine, loss: loss * float(engine.is_gradient_accumulation_boundary()) + 0 * loss)


def divided() -> Any:
    """Divide by the initial loss scale of fp16, as ZeRO 0 in bf16 did."""
    return in_backward(lambda engine, loss: loss / 65_536)


def not_averaged() -> Any:
    """Sum the gradients of the workers instead of averaging them."""
    return in_backward(lambda engine, loss: loss * dist.get_world_size())


@contextmanager
def with_hooks(make_hook: Callable[[str, Any], Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Change the gradients of parameters before DeepSpeed reduces them; `make_hook` gets a name and the engine."""
    import deepspeed

    original = deepspeed.initialize

    def initialize(*args: Any, **options: Any) -> Any:
        engine, *others = original(*args, **options)
        for name, p in engine.module.named_parameters():
            p.register_hook(make_hook(name, engine))
        return engine, *others

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = original


def used_twice() -> Any:
    """Lose one of the two contributions to the gradient of a module that is used twice, as 0.18.3 to 0.19.3 did."""

    def make_hook(name: str, engine: Any) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient / 2 if name == "twice.weight" else gradient

    return with_hooks(make_hook)


def leaked() -> Any:
    """Add the last micro-batch of a step to the next step."""

    def make_hook(name: str, engine: Any) -> Callable[[Tensor], Tensor]:
        seen: list[Tensor] = []

        def add_last(gradient: Tensor) -> Tensor:
            before = len(seen)
            seen.append(gradient.detach().clone())
            if before and before % ACCUMULATION == 0:
                return gradient + seen[before - 1]
            return gradient

        return add_last

    return with_hooks(make_hook)


@contextmanager
def phantom_step() -> Iterator[None]:
    """Count an optimizer step too many, as an engine does that takes an Adam step while it is constructed."""
    original = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        for state in optimizer.state.values():
            if float(state["step"]) == 0:
                state["step"] += 1
        return original(optimizer, *args, **options)

    torch.optim.AdamW.step = step  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.optim.AdamW.step = original  # type: ignore[method-assign]


@contextmanager
def unclipped() -> Iterator[None]:
    """Do not clip."""
    from pipeline.engine import engine

    original = engine.clipping
    engine.clipping = lambda norm, limit: 1.0
    try:
        yield
    finally:
        engine.clipping = original


PLANTED: dict[str, Callable[[], Any]] = {
    "nothing": nothing,
    "lost_micro_batches": lost_micro_batches,
    "divided": divided,
    "not_averaged": not_averaged,
    "used_twice": used_twice,
    "leaked": leaked,
    "phantom_step": phantom_step,
    "unclipped": unclipped,
}
