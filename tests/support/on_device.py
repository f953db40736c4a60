"""Worker functions of test_on_gpu.py, for GPUs or, as a rehearsal, CPUs; workers import this module by name."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import models
from pipeline.checkpoints import manifest, restore
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group
from pipeline.training_config import SavingConfig
from tests.support.ranks import settings_of

BATCH = 8  # images a step, of all workers together
CLASSES = 5
SIDE = 32  # pixels


def small_vit() -> models.ViT:
    config = models.config_of("mu/8", image_size=SIDE, classes=CLASSES, depth=2)
    return models.from_config(config, torch.Generator().manual_seed(0))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return images, labels


def start(zero: int, micro_batch: int, device: torch.device, parts: int = 0) -> Engine:
    settings = settings_of(zero, "bf16", micro_batch, BATCH // micro_batch // dist.get_world_size())
    model = small_vit()
    decayed = models.decayed_parameters(model)
    optim = OptimConfig(lr=1e-3)
    if parts:
        return ExactEngine(model.to(device), decayed, optim, settings, parts=parts)
    return Engine(model.to(device), decayed, optim, settings)


def steps(engine: Engine, first: int, last: int, micro_batch: int, device: torch.device) -> list[float]:
    """Train on this worker's share of every batch; returns its losses, each the sum over its micro-batches."""
    share = BATCH // dist.get_world_size()
    losses = []
    for step in range(first, last):
        images, labels = batch_of(step)
        loss_of_step = 0.0
        for start_of_part in range(dist.get_rank() * share, (dist.get_rank() + 1) * share, micro_batch):
            part = slice(start_of_part, start_of_part + micro_batch)
            logits = engine.forward(images[part].to(device, engine.dtype))
            loss = F.cross_entropy(logits.float(), labels[part].to(device))
            engine.backward(loss)
            engine.end_micro_batch(1e-3)
            loss_of_step += loss.item()
        losses.append(loss_of_step)
    return losses


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return copies of this worker's masters and moments, on the CPU."""
    state = {}
    for fragment in engine.fragments():
        for kind, view in fragment.tensors.items():
            state[f"{fragment.name}|{kind}|{fragment.start}"] = view.detach().cpu().clone()
    return state


def train_save_and_restore(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Train, save and restore at every ZeRO stage; return each worker's observations by rank."""
    device = join_group(120.0)
    rank = dist.get_rank()
    world = dist.get_world_size()
    micro_batch = BATCH // world
    total = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(total)
    seen: dict[str, Any] = {
        "device": str(device),
        "backend": dist.get_backend(),
        "sum": total.tolist(),
        "stages": {},
    }
    for zero in (1, 2, 3):
        engine = start(zero, micro_batch, device)
        losses = steps(engine, 0, 4, micro_batch, device)
        folder = Path(task["folder"]) / f"zero-{zero}"
        checkpoints = checkpoints_in(folder / "checkpoints")
        telemetry = Telemetry(folder, rank, 1)
        phases = Phases(folder, rank, 120.0)
        saver = Saver(checkpoints, telemetry, phases, SavingConfig(keep=2, keep_every=0, max_failed_saves=1))
        described = {"samples_seen": 4 * BATCH, "ledger": "", "config": {}, "key": "", "code": ""}
        saver.begin(engine.fragments(), manifest.Manifest(4, updates=4, attempt=1, world=world, zero=zero, **described))
        saver.finish(4)
        saved = state_of(engine)
        steps(engine, 4, 6, micro_batch, device)
        chosen = restore.choose_together(checkpoints, 2, print)
        assert chosen is not None
        assert restore.load_together(engine.load, checkpoints, chosen, 2, print) == chosen, "every byte is as committed"
        restored = state_of(engine)
        is_same = saved.keys() == restored.keys()
        for key in saved:
            is_same = is_same and torch.equal(saved[key], restored[key])
        seen["stages"][zero] = {
            "losses": losses,
            "is_fused": bool(engine.state.optimizer.defaults.get("fused")),
            "is_pinned": saver.snapshot.is_pinned(),
            "is_restored": is_same,
        }
        engine.close()
    of_all: list[Any] = [None] * world
    dist.all_gather_object(of_all, seen)
    dist.destroy_process_group()
    return of_all


def train_exactly(task: dict[str, Any]) -> dict[str, Any]:
    """Train twice with `exact_parts` and deterministic kernels; return both digests of the weights."""
    device = join_group(120.0)
    torch.use_deterministic_algorithms(True)
    digests = []
    for _ in range(2):
        engine = start(task["zero"], 1, device, parts=BATCH)
        steps(engine, 0, 4, 1, device)
        digest = hashlib.sha256()
        for parameter in engine.model.parameters():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
        digests.append(digest.hexdigest())
        engine.close()
    dist.destroy_process_group()
    return {"device": device.type, "digests": digests}


def run_out_of_memory(task: dict[str, Any]) -> None:
    """Allocate more memory than any device has."""
    device = join_group(120.0)
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
