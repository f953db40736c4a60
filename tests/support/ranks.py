"""Worker functions of the engine tests, in a separate module because workers import it by name."""

import hashlib
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models
from data.errors import DataError
from pipeline.checkpoints import manifest, restore
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.engine.settings import deepspeed_config
from pipeline.evaluation.evaluator import EvaluationFailed, EvaluationGroup, EvaluationStopped
from pipeline.monitoring.telemetry import Telemetry, memory_gb
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group
from pipeline.training_config import SavingConfig

LINEAR = F.linear
BATCH, MICRO, FEATURES, CLASSES = 8, 2, 12, 7
POLYAK = 0.9


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 33), nn.GELU(), nn.Linear(33, CLASSES))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def settings_of(
    zero: int, precision: str, micro_batch: int, accumulation: int, clip: float = 1.0, user_file: str | None = None
) -> dict[str, Any]:
    """Return Patchline's DeepSpeed settings, changed so that ZeRO 3 partitions small parameters too."""
    settings = deepspeed_config(
        zero=zero,
        precision=precision,
        micro_batch=micro_batch,
        accumulation=accumulation,
        clip=clip,
        user_file=user_file,
    )
    if zero == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def start(task: dict[str, Any]) -> Engine:
    join_group(60.0)
    micro_batch = task.get("micro_batch", MICRO)
    accumulation = BATCH // micro_batch // dist.get_world_size()
    precision = task.get("precision", "fp32")
    settings = settings_of(task["zero"], precision, micro_batch, accumulation, user_file=task.get("deepspeed"))
    optim = OptimConfig(name=task.get("name", "adam"), lr=1e-2)
    made = partial(ExactEngine, parts=task["parts"]) if task.get("parts") else Engine
    return made(small_model(), {"0.weight", "2.weight"}, optim, settings, POLYAK)


def steps(
    engine: Engine,
    first: int,
    last: int,
    poison: int | None = None,
    micro_batch: int = MICRO,
    factor: float = math.nan,
) -> list[tuple[float, float, int]]:
    """Return (this worker's loss, gradient norm, updates) of every step.

    In the step `poison` only the gradient of the last worker's last micro-batch is multiplied by `factor`.
    All workers must always report the same gradient norm and updates.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    accumulation, found = BATCH // micro_batch // world, []
    for step in range(first, last):
        x, y = batch_of(step)
        total = 0.0
        for micro in range(accumulation):
            at = (rank * accumulation + micro) * micro_batch
            logits = engine.forward(x[at : at + micro_batch].to(engine.dtype))
            loss = F.cross_entropy(logits.float(), y[at : at + micro_batch])
            if step == poison and rank == world - 1 and micro == accumulation - 1:
                loss = loss * factor
            engine.backward(loss)
            sums = engine.end_micro_batch(1e-2, torch.tensor([rank + 1.0, 0.5], dtype=torch.float64))
            total += loss.item() / accumulation
        assert sums == [world * (world + 1) / 2, world / 2], sums
        found.append((total, engine.gradient_norm, engine.updates))
    return found


def whole_state(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    """Assemble every parameter's master and moments from the workers' fragments; check that no fragments overlap."""
    mine = [(f.name, f.start, {k: v.detach().clone() for k, v in f.tensors.items()}) for f in engine.fragments()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("master", *engine.state_names):
        for name, size in engine.sizes.items():
            whole, seen = torch.zeros(size), torch.zeros(size)
            for found, at, tensors in (piece for part in parts for piece in part):
                if found == name:
                    whole[at : at + len(tensors[kind])] = tensors[kind]
                    seen[at : at + len(tensors[kind])] += 1
            assert (seen == 1).all(), f"{name} {kind}: some elements have {seen.min()} or {seen.max()} owners"
            state.setdefault(name, {})[kind] = whole
    return state


def digest(state: dict[str, dict[str, torch.Tensor]]) -> str:
    total = hashlib.sha256()
    for name in sorted(state):
        for kind in sorted(state[name]):
            total.update(state[name][kind].numpy().tobytes())
    return total.hexdigest()


def go_back_and_repeat(task: dict[str, Any]) -> dict[str, Any]:
    """Train, save the state, train on, restore, read the average and train again; then take a poisoned step."""
    engine = start(task)
    started: list[str] = []
    sys.addaudithook(lambda event, args: started.append(str(args)) if event == "subprocess.Popen" else None)
    initial = digest(whole_state(engine))
    before = steps(engine, 0, 3)
    kept, updates = whole_state(engine), engine.updates
    ahead = steps(engine, 3, 6)
    engine.load(lambda name, kind, at, count: kept[name][kind][at : at + count], updates)
    back = digest(whole_state(engine)) == digest(kept)
    with engine.averaged(), torch.no_grad():
        logits = engine.engine(batch_of(0)[0].to(engine.dtype)).float()
    again = steps(engine, 3, 6)
    end = digest(whole_state(engine))
    norms: list[Any] = [None] * dist.get_world_size()
    unharmed = []
    for factor in (math.nan, math.inf):
        ((_, norm, _),) = steps(engine, 6, 7, poison=6, factor=factor)
        dist.all_gather_object(norms, norm)
        unharmed += [digest(whole_state(engine)) == end, norms == [math.inf] * len(norms), engine.updates == 6]
    skipped = engine.engine.skipped_steps
    steps(engine, 7, 8)
    behind = digest(whole_state(engine))
    bucket = engine.engine.optimizer.reduce_bucket_size if engine.zero else 0
    losses = [loss for loss, _, _ in before + again]
    engine.close()
    dist.destroy_process_group()
    return {
        "repeats": ahead == again,
        "back": back,
        "initial": initial,
        "end": end,
        "averaged_logits": logits.tolist(),
        "losses": losses,
        "unharmed": all(unharmed),
        "skipped": skipped,
        "behind": behind,
        "bucket": bucket,
        "updates": updates,
        "linear_untouched": F.linear is LINEAR,
        "started": started,
    }


def raise_alone(task: dict[str, Any]) -> None:
    """Raise on worker 1 while the model computes with averaged weights and worker 0 waits in a collective."""
    engine = start(task)
    steps(engine, 0, 1)
    with engine.averaged():
        if dist.get_rank() == 1:
            raise ValueError("alone")
        dist.all_reduce(torch.zeros(3, dtype=torch.float64))


def gradient_of(number: int, elements: int) -> torch.Tensor:
    """Return one micro-batch's gradient: a common part plus independent noise, rounded to bf16."""
    common = torch.randn(elements, generator=torch.Generator().manual_seed(1000))
    noise = torch.randn(elements, generator=torch.Generator().manual_seed(number))
    return (common + 4 * noise).to(torch.bfloat16)


def error_of_the_mean(task: dict[str, Any]) -> float:
    """Return the relative error of the mean gradient in an engine's optimizer, compared with float64."""
    join_group(60.0)
    world = dist.get_world_size()
    accumulation = task.get("accumulation", 1)
    first = dist.get_rank() * accumulation
    settings = settings_of(task["zero"], "bf16", 1, accumulation, clip=0.0, user_file=task.get("deepspeed"))
    elements = 20_000
    model = nn.Linear(elements, 1, bias=False)
    engine = Engine(model, set(), OptimConfig(beta1=0.9), settings)
    for number in range(first, first + accumulation):
        # The gradient of the sum of w · x in w is x.
        engine.backward(engine.forward(gradient_of(number, elements)).float().sum())
        engine.end_micro_batch(0.0)

    count = world * accumulation
    mean = sum(gradient_of(number, elements).double() for number in range(count)) / count
    squared_error = torch.zeros((), dtype=torch.float64)
    for fragment in engine.fragments(("exp_avg",)):
        handed = fragment.tensors["exp_avg"].double() / (1 - 0.9)
        expected = mean[fragment.start : fragment.start + len(handed)]
        squared_error += (handed - expected).square().sum()
    dist.all_reduce(squared_error)
    engine.close()
    dist.destroy_process_group()
    return float((squared_error / mean.square().sum()).sqrt())


def one_step_of_h14(task: dict[str, Any]) -> dict[str, Any]:
    """Take one bf16 step of ViT-H/14 with recomputed activations and one image per worker; return a kernel's change."""
    join_group(1800.0)
    settings = deepspeed_config(
        zero=task["zero"], precision="bf16", micro_batch=1, accumulation=1, clip=1.0, user_file=None
    )
    model = models.from_config(models.config_of("H/14"), torch.Generator().manual_seed(0))
    model.recomputed_blocks = model.config.depth
    engine = Engine(model, models.decayed_parameters(model), OptimConfig(lr=3e-4), settings)
    before = next(f.tensors["master"].detach().clone() for f in engine.fragments())
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = F.cross_entropy(engine.engine(images.to(engine.dtype)).float(), torch.tensor([dist.get_rank()]))
    engine.backward(loss)
    engine.end_micro_batch(3e-4)
    after = next(f.tensors["master"].detach() for f in engine.fragments())
    outcome = {"loss": loss.item(), "norm": engine.gradient_norm, "updates": engine.updates}
    outcome |= {"moved": float((after - before).abs().max()), "memory_gb": memory_gb()}
    engine.close()
    dist.destroy_process_group()
    return outcome


def save_or_go_on(task: dict[str, Any]) -> dict[str, Any]:
    """Take three steps and save a checkpoint, or load one; then take three more steps."""
    engine = start(task)
    folder, found = Path(task["folder"]), None
    if task["save"]:
        steps(engine, 0, 3)
        quiet = Telemetry(folder.parent, 1, 1)  # of a rank that writes nothing
        phases = Phases(folder.parent, dist.get_rank(), 120.0)
        saver = Saver(checkpoints_in(folder), quiet, phases, SavingConfig(keep=2, keep_every=0, max_failed_saves=1))
        described = {"samples_seen": 3 * BATCH, "ledger": "", "config": {}, "key": "", "code": ""}
        saver.begin(
            engine.fragments(), manifest.Manifest(3, updates=3, attempt=1, world=2, zero=task["zero"], **described)
        )
        saver.finish(3)
    else:
        checkpoints = checkpoints_in(folder)
        found = restore.choose_together(checkpoints, 2, print)
        assert found is not None
        assert restore.load_together(engine.load, checkpoints, found, 2, print) == found
    steps(engine, 3, 6)
    average = {name: kinds["average"].tolist() for name, kinds in whole_state(engine).items()}
    engine.close()
    dist.destroy_process_group()
    return {"average": average, "restored": found is not None}


def train_exactly(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Take six steps for every case, with micro-batches of one sample; one of the steps is poisoned."""
    found = []
    for case in task["cases"]:
        engine = start({**case, "micro_batch": 1})
        losses, norms = [], []
        for step in range(7):
            before = digest(whole_state(engine)) if step == 4 else ""
            ((mine, norm, _),) = steps(engine, step, step + 1, poison=4, micro_batch=1)
            if step == 4:
                skipped = not math.isfinite(norm) and digest(whole_state(engine)) == before
                continue
            losses.append(engine.loss if isinstance(engine, ExactEngine) else mine)
            norms.append(norm)
        same = {"losses": losses, "norms": norms, "state": digest(whole_state(engine)), "updates": engine.updates}
        found.append({"same": same, "skipped": skipped})
        engine.close()
    dist.destroy_process_group()
    return found


def hear_of_rank_0(task: dict[str, Any]) -> list[list[str]]:
    """Return what each rank learns during work of rank 0 only: success, failure, or a stop request on rank 1."""
    device = join_group(60.0)
    phases = Phases(Path(task["folder"]), dist.get_rank(), 600.0)
    began = time.monotonic()

    def work_for_ever(beat: Callable[[], None]) -> str:
        while time.monotonic() - began < 60:
            time.sleep(0.01)
            beat()
        return "nobody stopped it"

    def fail(beat: Callable[[], None]) -> str:
        raise DataError("rank 0 cannot")

    def wants_stop() -> bool:
        return dist.get_rank() == 1 and time.monotonic() - began > 1

    heard: list[str] = []
    for work, stop in ((lambda beat: "done", bool), (fail, bool), (work_for_ever, wants_stop)):
        try:
            value = EvaluationGroup(phases, device, stop).run_on_rank_0(work, "protocol")
            heard.append(str(value))
        except (EvaluationFailed, EvaluationStopped) as error:
            heard.append(f"{type(error).__name__}: {error}")
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, heard)
    phases.close()
    dist.destroy_process_group()
    return of_all


def model_of_blocks(**switches: Any) -> models.Model:
    """Return a small ViT with nonzero head and biases, so that every parameter has a gradient from the first step."""
    fields = {"depth": 3, "width": 16, "mlp": 32, "heads": 2, "pool": "gap", **switches}
    config = models.config_of("mu/8", 16, CLASSES, **fields)
    generator = torch.Generator().manual_seed(0)
    model = models.from_config(config, generator)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    return model


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return images, torch.randint(CLASSES, (BATCH,), generator=generator)


def train_blocks(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Take three steps of a model of blocks for every case and write its state; then restore other weights."""
    join_group(60.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    accumulation, found = BATCH // MICRO // world, []
    for number, case in enumerate(task["cases"]):
        plain = torch.load(case.get("plain", task["plain"]))
        switches = case.get("switches", {})
        settings = settings_of(case["zero"], case["precision"], MICRO, accumulation)
        model = model_of_blocks(**switches)
        model.recomputed_blocks = case["recomputed"]
        if case["compiled"]:
            models.compile_blocks(model, backend=case["compiled"])
        made = partial(ExactEngine, parts=4) if case["exact"] else Engine
        engine = made(model, models.decayed_parameters(model), OptimConfig(lr=1e-2), settings, POLYAK)
        losses = []
        for step in range(3):
            images, labels = images_of(step)
            total = torch.zeros(())
            for micro in range(accumulation):
                at = (rank * accumulation + micro) * MICRO
                logits = engine.forward(images[at : at + MICRO].to(engine.dtype)).float()
                loss = F.cross_entropy(logits, labels[at : at + MICRO])
                engine.backward(loss)
                engine.end_micro_batch(1e-2)
                total += loss.detach() / accumulation / world
            dist.all_reduce(total)
            losses.append(total.item())
        state = whole_state(engine)
        if rank == 0:
            torch.save(state, Path(task["folder"]) / f"{number}.pt")
        with engine.averaged(), torch.no_grad():
            averaged = engine.model(images_of(0)[0].to(engine.dtype)).float()

        def given(
            name: str, kind: str, start: int, count: int, values: dict[str, torch.Tensor] = plain
        ) -> torch.Tensor:
            return values[name].flatten()[start : start + count]

        engine.restore(given, ("master",))
        with torch.no_grad():
            logits = engine.model(images_of(0)[0].to(engine.dtype))
            other = model_of_blocks(**switches).to(engine.dtype)
            other.load_state_dict(plain)
            expected = other(images_of(0)[0].to(engine.dtype))
        restored = {name: kinds["master"] for name, kinds in whole_state(engine).items()}
        is_given_back = all(torch.equal(restored[name], plain[name].flatten()) for name in plain)

        hooks = []
        layers_hold = 0  # elements
        for block in models.blocks(engine.model).values():
            hooks.append([hook.__qualname__ for hook in block._forward_pre_hooks.values()])
            for layer in list(block.modules())[1:]:
                hooks[-1] += [hook.__qualname__ for hook in layer._forward_pre_hooks.values()]
                layers_hold += sum(value.numel() for value in vars(layer).values() if isinstance(value, torch.Tensor))
        found.append(
            {
                "losses": losses,
                "parameters": len(list(engine.model.parameters())),
                "averaged": averaged.tolist(),
                # Compiled kernels round differently from those of `other`.
                "restored": is_given_back
                and torch.allclose(logits, expected, rtol=0, atol=1e-5 * bool(case["compiled"])),
                "hooks": hooks,
                "layers_hold": layers_hold,
            }
        )
        engine.close()
    dist.destroy_process_group()
    return found
