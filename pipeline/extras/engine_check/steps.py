"""Takes two steps of a small model with the run's engine, and compares them with plain torch in float64.

1. Every worker computes the same micro-batches twice in plain torch (`torch.autograd`): in float64, and in the run's
   precision. The distance between the two gradients is the error that the precision explains.
2. The engine takes the same steps: the first without clipping, the second with clipping to half of the norm.
3. The gradient that reaches the optimizer, the norm, the clipped gradient, and the optimizer's update of every element
   must be equal to those in float64, within a few times that error.

In:  ZeRO 2, two workers; DeepSpeed forgets to divide by the number of workers
Out: ["the gradient of parts.0.blocks.0.mlp.up.weight in step 1: …"] on both
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import models
from models import ModelConfig
from pipeline.engine.engine import Engine, Fragment
from pipeline.engine.settings import deepspeed_config
from pipeline.extras.engine_check.models import CLASSES, CheckedModel
from pipeline.optimization import OptimConfig
from pipeline.training_config import TrainConfig

STEPS = 2  # the second starts from the state that the first has left
ACCUMULATION = 2  # micro-batches of a worker in a step
MICRO_BATCH = 2
RATE = 1e-2  # learning rate

# A wrong engine is wrong by at least several percent; see docs/design/engine-check.md for the measured errors.
OF_PRECISION = 4.0  # the engine's error may be this multiple of plain torch's in the run's precision …
OF_PARAMETER = 1e-5  # … plus these fractions of the norms of the parameter's gradient and of the whole gradient
OF_GRADIENT = 1e-6
OF_BF16_SUM = 2**-6  # … plus this fraction if the workers add their gradients in bf16
OF_NORM = 5e-3  # relative
OF_UPDATE = 1e-3  # of the update and of the learning rate
OF_WEIGHT = 1e-6  # of the weight: a few roundings to fp32
DEVICE_LIMIT = {torch.float32: 0.02, torch.bfloat16: 0.3}  # relative error of plain torch's gradient


@dataclass
class Observed:
    """The part of a parameter that this worker holds: its state before a step, and the gradient of the step."""

    name: str
    start: int
    before: dict[str, Tensor]  # "master" and the optimizer's state, float64
    gradient: Tensor  # as handed to the optimizer, float64


def wrong_steps(cfg: TrainConfig, configs: list[ModelConfig], device: torch.device, seed: int = 0) -> list[str]:
    """Collective: return a description of each engine result on this worker that differs from plain torch's."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    # Torch's layers draw from the global generator while they are constructed.
    with torch.random.fork_rng(devices=[]):
        plain = CheckedModel(configs, generator).to(device)
    decayed = models.decayed_parameters(plain)
    exact = deepcopy(plain).double()
    trained = deepcopy(plain)
    for part in trained.parts:
        part.recomputed_blocks = min(cfg.checkpoint_blocks, 1)  # type: ignore[assignment]
    engine = build_engine(cfg, trained, decayed, world)
    plain.to(engine.dtype)
    wrong = []
    try:
        for step in range(STEPS):
            batches = list(micro_batches(plain, dist.get_rank(), step, seed, device))
            wrong += wrong_step(engine, plain, exact, batches, cfg, decayed, step)
            if any_worker(bool(wrong), device):
                break  # later results would follow from the first difference
    finally:
        release(engine)
    return wrong


def release(engine: Engine) -> None:
    """Close an engine and free its memory, which DeepSpeed's hooks at ZeRO 3 would keep until the process ends."""
    values: list[object] = [
        *engine.model.parameters(),
        *engine.state.flats,
        *engine.state.optimizer.state.values(),
        *vars(engine.engine.optimizer).values(),
    ]
    # At ZeRO 3, DeepSpeed keeps each parameter's part as an attribute of the parameter.
    for p in engine.model.parameters():
        values += vars(p).values()
    engine.close()
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            value.grad = None
            value.data = value.new_empty(0)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value


def build_engine(cfg: TrainConfig, model: nn.Module, decayed: set[str], world: int) -> Engine:
    """Wrap the model in the kind of engine that the run uses, with the run's precision, ZeRO stage and tuning."""
    settings = deepspeed_config(
        zero=cfg.zero,
        precision=cfg.precision,
        micro_batch=MICRO_BATCH,
        accumulation=ACCUMULATION,
        clip=0.0,
        user_file=cfg.deepspeed,
    )
    engine_class: Any = Engine
    if cfg.exact_parts:
        from pipeline.engine.exact import ExactEngine  # needed only in exact mode

        engine_class = partial(ExactEngine, parts=world)
    # The small model has no part that is called head.
    return engine_class(model, decayed, replace(cfg.optim, head_weight_decay=None), settings)


def micro_batches(
    model: CheckedModel, rank: int, step: int, seed: int, device: torch.device
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Draw a worker's micro-batches of a step: the images of every part of the model, and the classes (b,)."""
    for number in range(ACCUMULATION):
        generator = torch.Generator().manual_seed(hash((seed, step, rank, number)))
        images = [part.to(device) for part in model.images(MICRO_BATCH, generator)]
        # Micro-batches of different scale: a repeated or a lost one changes the gradient's norm too.
        images = [part * (1 + number) for part in images]
        yield images, torch.randint(CLASSES, (MICRO_BATCH,), generator=generator).to(device)


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch, in fp32 or float64."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), classes)


def wrong_step(
    engine: Engine,
    plain: CheckedModel,
    exact: CheckedModel,
    batches: list[tuple[list[Tensor], Tensor]],
    cfg: TrainConfig,
    decayed: set[str],
    step: int,
) -> list[str]:
    """Collective: take a step with the engine; return a description of each result that differs from plain torch's."""
    device = batches[0][1].device
    # 1. The reference, from the engine's own weights: those of the first step are known, and their first update has
    #    been compared element by element.
    copy_masters(engine, plain, exact)
    expected, errors = reference(plain, exact, batches)
    norms = torch.stack([gradient.norm() for gradient in expected.values()])
    whole = float(norms.norm())
    # A device that cannot compute a gradient makes the comparison meaningless.
    if float(errors.norm()) > DEVICE_LIMIT[engine.dtype] * whole:
        return [
            f"plain torch in {engine.dtype}, without DeepSpeed: its gradient differs from the one in float64 by "
            f"{float(errors.norm()) / whole:.2g} of the norm, expected at most {DEVICE_LIMIT[engine.dtype]:g}"
        ]

    # 2. The engine's step.
    limit = 0.0 if step == 0 else 0.5 * whole
    engine.clip = limit
    observed = take_step(engine, batches)

    # 3. The gradient, the norm before clipping, and the norm of the clipped gradient.
    which = f"in step {step + 1}"
    factor = 1.0
    kind = "gradient"
    if limit:
        factor = limit / (whole + 1e-6)
        kind = "clipped gradient"
    wrong: list[tuple[float, str]] = []  # (size of the difference, text)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    norm_of = dict(zip(expected, norms.tolist(), strict=True))
    of_precision = dict(zip(expected, errors.tolist(), strict=True))
    for part in observed:
        piece = expected[part.name].flatten()[part.start : part.start + len(part.gradient)] * factor
        error = float((part.gradient - piece).norm())
        bound = OF_PRECISION * of_precision[part.name] + OF_PARAMETER * norm_of[part.name] + OF_GRADIENT * whole
        if engine.sums_in == "bf16":
            bound += OF_BF16_SUM * norm_of[part.name]
        if not error <= bound:  # also if it is not a number
            ratio = float(part.gradient @ piece / piece.square().sum().clamp(min=1e-300))
            text = (
                f"the {kind} of {part.name} {which}: it differs from plain torch's by {error:.3g}, expected at most "
                f"{bound:.3g} (norm of the expected gradient {float(piece.norm()):.3g}"
            )
            wrong.append((error, f"{text}; the engine's is {ratio:.5g} times as large)"))
        squares += part.gradient.square().sum()
    dist.all_reduce(squares)
    if not engine.state.is_shared:  # every worker holds the whole gradient
        squares /= dist.get_world_size()
    if not math.isclose(engine.gradient_norm, whole, rel_tol=OF_NORM + OF_PRECISION * float(errors.norm()) / whole):
        wrong.append((math.inf, f"the gradient norm {which} is {engine.gradient_norm:.6g}, expected {whole:.6g}"))
    clipped_norm = math.sqrt(float(squares))
    if limit and not math.isclose(clipped_norm, limit, rel_tol=OF_NORM):
        wrong.append((math.inf, f"the norm after clipping {which} is {clipped_norm:.6g}, expected {limit:.6g}"))

    # 4. The update, from the engine's own gradient and state: Adam's first update is nearly the sign of the gradient,
    #    which rounding can change for elements near zero.
    wrong += wrong_updates(engine, observed, cfg.optim, decayed, step + 1)
    wrong.sort(key=lambda pair: -pair[0])
    return [text for _, text in wrong]


def copy_masters(engine: Engine, plain: CheckedModel, exact: CheckedModel) -> None:
    """Collective: copy the engine's master weights, rounded to its precision, to both plain models."""
    device = next(exact.parameters()).device
    flat = torch.zeros(sum(engine.sizes.values()), device=device)
    views = dict(zip(engine.sizes, flat.split(list(engine.sizes.values())), strict=True))
    for fragment in engine.fragments(("master",)):
        master = fragment.tensors["master"]
        views[fragment.name][fragment.start : fragment.start + len(master)] = master.detach()
    # Every element has one owner, so the sum over the workers is a copy.
    dist.all_reduce(flat)
    with torch.no_grad():
        for (name, rounded), precise in zip(plain.named_parameters(), exact.parameters(), strict=True):
            rounded.copy_(views[name].view_as(rounded))
            precise.copy_(rounded)


def reference(
    plain: CheckedModel, exact: CheckedModel, batches: list[tuple[list[Tensor], Tensor]]
) -> tuple[dict[str, Tensor], Tensor]:
    """Collective: return the mean gradient over all workers in float64, and a bound on the rounding error.

    The bound has an element for each parameter: the norm of the difference between the gradients in float64 and in the
    run's precision, averaged over the workers.
    """
    sums = {}
    for model in (plain, exact):
        dtype = next(model.parameters()).dtype
        gradients: list[Tensor] = [torch.zeros((), dtype=torch.float64)] * len(list(model.parameters()))
        for images, classes in batches:
            # In the same precision for both, because the engine's images are rounded too.
            inputs = [part.to(next(plain.parameters()).dtype).to(dtype) for part in images]
            parts = torch.autograd.grad(loss_of(model(*inputs), classes), list(model.parameters()))
            gradients = [
                total.to(part.device) + part.double() / ACCUMULATION
                for total, part in zip(gradients, parts, strict=True)
            ]
        sums[dtype] = gradients
    rounded = sums[next(plain.parameters()).dtype]
    precise = sums[torch.float64]
    errors = torch.stack([(a - b).norm() for a, b in zip(rounded, precise, strict=True)])
    flat = torch.cat([*(gradient.flatten() for gradient in precise), errors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in precise]
    *views, errors = flat.split([*sizes, len(errors)])
    names = [name for name, _ in exact.named_parameters()]
    return dict(zip(names, views, strict=True)), errors


def take_step(engine: Engine, batches: list[tuple[list[Tensor], Tensor]]) -> list[Observed]:
    """Collective: take a step; return the state before it and the gradient that reached the optimizer."""
    gradient_of: dict[int, Tensor] = {}  # storage of a flat tensor → its gradient

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    gradient_of[flat.untyped_storage()._cdata] = flat.grad.detach().double().flatten()

    before: list[tuple[Fragment, dict[str, Tensor]]] = []
    for fragment in engine.fragments(held=True):
        before.append((fragment, {kind: view.detach().double() for kind, view in fragment.tensors.items()}))
    flats = {flat.untyped_storage()._cdata: flat for flat in engine.state.flats}
    handle = engine.state.optimizer.register_step_pre_hook(note)
    try:
        for images, classes in batches:
            logits = engine.forward(*(part.to(engine.dtype) for part in images))
            engine.backward(loss_of(logits, classes))
            engine.end_micro_batch(RATE)
    finally:
        handle.remove()
    observed = []
    for fragment, state in before:
        view = fragment.tensors["master"]
        storage = view.untyped_storage()._cdata
        first = view.storage_offset() - flats[storage].storage_offset()
        gradient = torch.full_like(state["master"], math.nan)  # stays if the optimizer got no gradient
        if storage in gradient_of:
            gradient = gradient_of[storage][first : first + view.numel()]
        observed.append(Observed(fragment.name, fragment.start, state, gradient))
    return observed


def wrong_updates(
    engine: Engine, observed: list[Observed], optim: OptimConfig, decayed: set[str], number: int
) -> list[tuple[float, str]]:
    """Return (error, description) for each parameter whose update differs from the optimizer's formula in float64."""
    wrong = []
    for part, fragment in zip(observed, engine.fragments(held=True), strict=True):
        gradient = part.gradient
        weight = part.before["master"]
        decay = optim.weight_decay if part.name in decayed else 0.0
        if optim.name == "adam":
            mean = optim.beta1 * part.before["exp_avg"] + (1 - optim.beta1) * gradient
            square = optim.beta2 * part.before["exp_avg_sq"] + (1 - optim.beta2) * gradient.square()
            corrected = (square / (1 - optim.beta2**number)).sqrt() + optim.eps
            change = -RATE * (decay * weight + mean / (1 - optim.beta1**number) / corrected)
        else:
            change = -RATE * (optim.momentum * part.before["momentum_buffer"] + gradient + decay * weight)
        error = (fragment.tensors["master"].detach().double() - weight - change).abs()
        bound = OF_UPDATE * (change.abs() + RATE) + OF_WEIGHT * weight.abs()
        if not (error <= bound).all():
            element = int((error / bound).nan_to_num(nan=math.inf).argmax())
            after = float(fragment.tensors["master"][element])
            text = (
                f"update {number} of {part.name}[{part.start + element}]: the weight is {after:.9g}, expected "
                f"{float(weight[element] + change[element]):.9g}"
            )
            wrong.append((float(error[element]), text))
    return wrong


def any_worker(is_true: bool, device: torch.device) -> bool:
    """Collective: return whether `is_true` is True on any worker."""
    flag = torch.tensor(float(is_true), dtype=torch.float64, device=device)
    dist.all_reduce(flag)
    return float(flag) > 0
