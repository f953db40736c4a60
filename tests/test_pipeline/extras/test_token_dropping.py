"""Token dropping and small initial images agree with loops over tokens, FLOPs by hand, and a plain loop."""

import json
import math
import shutil
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models
from data.errors import Preempted
from data.index.document import load_index
from data.loader import TrainLoader
from jobs.extras.replays.batch import replay
from jobs.run.session import run_campaign
from models import positions
from pipeline import batches, config
from pipeline.checkpoints.manifest import committed
from pipeline.extras.token_dropping import TokenDroppingConfig, TokenDroppingTrainConfig, kept_patches, phases
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig, flops_of, phase_at
from pipeline.training_data import training_order
from pipeline.worker import StopRequest
from tests.support import campaigns

# ------------------------------------------------------------------------------------------------ small images


def tent_weights(old: int, new: int) -> Tensor:
    """Return weights (old, new) of a longer axis's entries for a shorter one, with aligned corners, by loops."""
    weights = torch.zeros(new, old, dtype=torch.float64)
    for entry in range(old):
        place = entry * (new - 1) / (old - 1)  # on the shorter axis
        for other in range(new):
            weights[other, entry] = max(0.0, 1 - abs(place - other))
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("grid", "smaller"), [((8, 8), (4, 4)), ((14, 14), (8, 8)), ((6, 4), (3, 1)), ((5, 7), (5, 3))]
)
def test_position_table_shrinks_with_the_weights_of_the_reverse_enlargement(grid, smaller):
    rows = tent_weights(grid[0], smaller[0])
    columns = tent_weights(grid[1], smaller[1])
    table = torch.randn(1, 2 + math.prod(grid), 5, generator=torch.Generator().manual_seed(0))
    on_grid = table[0, 2:].double().view(*grid, 5)
    expected = torch.einsum("yr,xc,rcd->yxd", rows, columns, on_grid).flatten(0, 1)
    shrunk = positions.shrink(table, grid, smaller, slots=2)
    assert torch.equal(shrunk[:, :2], table[:, :2]), "prefix tokens keep their entries"
    torch.testing.assert_close(shrunk[0, 2:].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["learned", "learned2d"])
def test_every_position_gets_gradients_from_small_images(kind):
    """Plain interpolation from 8 rows to 4 would read only the rows 0, 2, 3, 4, 5 and 7."""
    model = models.build("mu/4", 32, 0, positions=kind)  # use features: a new head is zero and propagates no gradient
    model.smaller_sizes = ((16, 16),)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    for parameter in model.positions.parameters():
        assert (parameter.grad.abs().sum(-1) > 0).all()


def test_sine_positions_are_computed_for_the_smaller_grid():
    model = models.build("mu/4", 32, 0, positions="sincos2d", pool="gap")
    small = models.build("mu/4", 16, 0, positions="sincos2d", pool="gap")
    small.load_state_dict(model.state_dict())
    model.smaller_sizes = ((16, 16),)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), small(images))


def test_other_image_sizes_are_rejected_outside_of_training_phases():
    model = models.build("mu/4", 32, 5)
    images = torch.randn(1, 3, 16, 16)
    with pytest.raises(ValueError, match="images have the shape"):
        model(images)
    model.smaller_sizes = ((16, 16),)
    model(images)
    with pytest.raises(ValueError, match="images have the shape"):
        model(torch.randn(1, 3, 24, 24))


# ------------------------------------------------------------------------------------------------ patch dropout


def logits_by_hand(model: models.ViT, images: Tensor, kept: list[list[int]], smaller: int | None = None) -> Tensor:
    """Compute logits image by image and token by token: add positions first, then select patches."""
    table = model.positions[0].table[0]
    slots = 1
    if smaller is not None:
        weights = tent_weights(model.config.grid[0], smaller)
        on_grid = table[slots:].double().unflatten(0, model.config.grid)
        shrunk = torch.einsum("yr,xc,rcd->yxd", weights, weights, on_grid).flatten(0, 1)
        table = torch.cat([table[:slots], shrunk.to(table.dtype)])
    logits = []
    for image, places in zip(images, kept, strict=True):
        patches = model.embedding(image[None])[0]
        tokens = [model.prefix.cls[0, 0] + table[0]]
        for place in places:
            tokens.append(patches[place] + table[slots + place])
        x = torch.stack(tokens)[None]
        for block in model.blocks:
            x = block(x)
        logits.append(model.head(model.norm(x)[:, 0]))
    return torch.cat(logits)


def test_dropped_patches_have_no_effect_and_the_class_token_is_kept():
    torch.manual_seed(0)
    model = models.build("mu/8", 32, 0, depth=2)
    images = torch.randn(3, 3, 32, 32, requires_grad=True)
    kept = [[0, 3, 7, 15], [1, 2, 3, 4], [5, 6, 10, 14]]
    logits = model(images, torch.tensor(kept))
    torch.testing.assert_close(logits, logits_by_hand(model, images, kept), rtol=1e-4, atol=1e-5)

    logits.square().sum().backward()
    assert images.grad is not None
    for image, places in enumerate(kept):
        for place in range(16):
            y, x = 8 * (place // 4), 8 * (place % 4)
            reaches = bool(images.grad[image, :, y : y + 8, x : x + 8].any())
            assert reaches == (place in places), (image, place)
    seen = {0, *(1 + place for places in kept for place in places)}
    for entry, gradient in enumerate(model.positions[0].table.grad[0]):
        assert bool(gradient.any()) == (entry in seen), entry


def test_keeping_all_patches_equals_the_plain_model_and_gap_averages_kept_patches():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    model = models.build("mu/8", 32, 0, registers=2)
    torch.testing.assert_close(model(images, torch.arange(16).expand(2, -1)), model(images))
    pooled = models.build("mu/8", 32, 0, pool="gap")
    tokens = pooled.encode(pooled.embed(images), kept=torch.tensor([[1, 5], [0, 9]]))
    torch.testing.assert_close(pooled(images, torch.tensor([[1, 5], [0, 9]])), tokens.mean(1))


def test_kept_patches_depend_only_on_sample_and_step():
    ids = torch.tensor([[epoch, shard, sample] for epoch in (0, 1) for shard in (0, 3) for sample in range(50)])
    kept = kept_patches(7, 100, ids, patches=16, kept=6)
    assert kept.shape == (200, 6)
    assert (kept.diff(dim=1) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < 16
    # Independent of the sample's micro-batch.
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept_patches(7, 100, ids[order][:31], 16, 6), kept[order][:31])
    for other in (kept_patches(8, 100, ids, 16, 6), kept_patches(7, 101, ids, 16, 6)):
        assert (other == kept).all(1).float().mean() < 0.05
    assert len({tuple(row) for row in kept.tolist()}) > 190, "of 8,008 that there are"


def test_every_patch_and_every_pair_is_kept_equally_often():
    ids = torch.stack([torch.zeros(4000), torch.zeros(4000), torch.arange(4000)], 1).long()
    kept = kept_patches(0, 3, ids, patches=9, kept=4)
    alone = Counter(kept.flatten().tolist())
    pairs = Counter((first, second) for row in kept.tolist() for first in row for second in row if first < second)
    # Probabilities of keeping a patch, 4/9, and a pair, 4·3/(9·8); five standard deviations.
    assert len(alone) == 9
    assert all(abs(count - 4000 * 4 / 9) < 5 * 31.5 for count in alone.values())
    assert len(pairs) == 36
    assert all(abs(count - 4000 / 6) < 5 * 23.6 for count in pairs.values())


# ------------------------------------------------------------------------------------------------ phases and FLOPs

BOTH = TokenDroppingConfig(
    patch_dropout=0.5, patch_dropout_until=0.9, image_sizes=(128, 160), image_sizes_until=(0.4, 0.7)
)


def test_phases_of_a_stage_are_contiguous():
    model = models.config_of("B/16")
    found = [(p.steps.start, p.steps.stop, p.image_size, p.kept) for p in phases(BOTH, 1000, model)]
    assert found == [(0, 400, 128, 32), (400, 700, 160, 50), (700, 900, 224, 98), (900, 1000, 224, None)]
    assert [(p.steps, p.image_size, p.kept) for p in phases(TokenDroppingConfig(), 1000, model)] == [
        (range(1000), 224, None)
    ]
    # Too few steps for all phases.
    assert [(p.steps.stop, p.image_size) for p in phases(BOTH, 2, model)] == [(1, 128), (2, 224)]
    assert phase_at(399, phases(BOTH, 1000, model)).image_size == 128
    assert phase_at(400, phases(BOTH, 1000, model)).image_size == 160
    assert phases(TokenDroppingConfig(), 5, models.config_of("BiT-R50x1"))[0].kept is None


def macs_by_hand(model: models.ViTConfig, patches: int, kept: int) -> int:
    tokens = kept + 1
    block = tokens * (4 * model.width**2 + 2 * model.width * model.mlp) + 2 * tokens**2 * model.width
    return patches * 3 * 16 * 16 * model.width + model.depth * block + model.width * model.classes


def test_stage_flops_equal_a_count_by_hand():
    model = models.config_of("B/16")
    by_hand = 0
    for steps, patches, kept in [(400, 64, 32), (300, 100, 50), (200, 196, 98), (100, 196, 196)]:
        by_hand += steps * 256 * 6 * macs_by_hand(model, patches, kept)
    in_order = phases(BOTH, 1000, model)
    assert flops_of(in_order, model, range(1000), 256) == by_hand
    first = flops_of(in_order, model, range(390, 410), 256)
    assert first == 10 * 256 * 6 * (macs_by_hand(model, 64, 32) + macs_by_hand(model, 100, 50))
    wide = models.config_of("B/16", image_size=(224, 448))
    whole = phases(TokenDroppingConfig(), 10, wide)
    assert flops_of(whole, wide, range(10), 256) == 10 * 256 * 6 * macs_by_hand(wide, 392, 392)


# ------------------------------------------------------------------------------------------------ whole runs

# Steps 0 … 9 at 16 px with half of their patches, 10 … 17 at 24 px with half, 18 … 23 at 24 px with all.
THINNED = (
    "pretrain.model.image_size=24",
    "pretrain.model.dropout=0.0",
    "pretrain.thinning.patch_dropout=0.5",
    "pretrain.thinning.patch_dropout_until=0.75",
    "pretrain.thinning.image_sizes=[16]",
    "pretrain.thinning.image_sizes_until=[0.42]",
)


def run_with_token_dropping(recipe: Path, *overrides: str) -> Path:
    """Pretrain with token dropping; return the stage's folder."""
    loaded = campaigns.load(recipe, [*THINNED, *overrides])
    run_campaign(loaded, only="pretrain", quiet=True)
    return loaded.directory(loaded.stage("pretrain"))


def losses_of(folder: Path) -> list[float]:
    return [loss for record in read_metrics(folder) for loss in record["losses"]]


def losses_of_a_plain_loop(shards: Path, cfg: TrainConfig) -> list[float]:
    """Repeat the training with tokens selected by hand; only loader, draws and network are Patchline's."""
    index, order = training_order(cfg, [load_index(shards / "train")])
    model = models.from_config(models.config_of("mu/8", 24, 10), torch.Generator().manual_seed(cfg.seed))
    decayed = models.decayed_parameters(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    losses = []
    for step in range(24):
        size = 16 if step < 10 else 24
        patches = (size // 8) ** 2
        kept = {4: 2, 9: 4}[patches] if step < 18 else patches
        loader = TrainLoader(
            index,
            order,
            image_size=size,
            slots=range(16),
            micro_batch=16,
            start_step=step,
            seed=cfg.seed,
            augment=cfg.data.augment,
        )
        (batch,) = islice(loader, 1)
        places = kept_patches(cfg.seed, step, batch.ids, patches, kept).tolist()
        images = batch.images.float() / 127.5 - 1
        logits = logits_by_hand(model, images, places, 2 if size == 16 else None)
        loss = F.cross_entropy(logits, batch.labels[:, 0])
        # SPEC 2.2: linear decay to 1e-5 after five steps of warm-up.
        rate = (1e-5 + (2e-3 - 1e-5) * (1 - max(0, step - 5) / 19)) * min(1, step / 5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_run_equals_a_plain_loop_and_batches_are_shown_at_their_sizes(recipe, shards, capsys):
    folder = run_with_token_dropping(recipe, "cluster.workers=1")
    cfg = campaigns.load(recipe, list(THINNED)).stage("pretrain").config
    assert losses_of(folder) == pytest.approx(losses_of_a_plain_loop(shards, cfg), abs=2e-5)
    # The log counts steps from 1.
    assert "16 samples of 16×16" in "\n".join(replay(str(folder), "step=10", None)["report"])
    assert "16 samples of 24×24" in "\n".join(replay(str(folder), "step=11", None)["report"])


@pytest.mark.slow
def test_resume_across_image_sizes_is_bitwise_equal_to_an_uninterrupted_run(recipe):
    folder = run_with_token_dropping(recipe)
    losses = losses_of(folder)
    weights = (folder / "weights.safetensors").read_bytes()
    done = json.loads((folder / "done.json").read_text())
    # Back to step 8, which is before both changes.
    (folder / "done.json").unlink()
    for checkpoint in committed(folder / "checkpoints")[:-1]:
        shutil.rmtree(checkpoint)
    assert [path.name for path in committed(folder / "checkpoints")] == ["step-0000000008"]
    run_with_token_dropping(recipe)
    assert "resumed from step 8" in (folder / "log.txt").read_text()
    assert (folder / "weights.safetensors").read_bytes() == weights
    assert losses_of(folder)[-16:] == losses[8:]
    repeated = json.loads((folder / "done.json").read_text())
    assert repeated["ledger"] == done["ledger"]
    assert repeated["samples_seen"] == done["samples_seen"] == 24 * 16


@pytest.mark.slow
def test_exact_mode_is_bitwise_equal_for_different_worlds(recipe, tmp_path):
    weights = set()
    for world in (1, 2, 4):
        place = (f"cluster.workers={world}", f"run={tmp_path / str(world)}")
        overrides = ("pretrain.exact_parts=4", "finetune.micro_batch=4", *place)
        weights.add((run_with_token_dropping(recipe, *overrides) / "weights.safetensors").read_bytes())
    assert len(weights) == 1


def test_stage_key_changes_only_if_token_dropping_is_used():
    plain = TokenDroppingTrainConfig(steps=10)
    assert not any("thinning" in name for name in config.tagged(plain, "forbid"))
    thinned = TokenDroppingTrainConfig(steps=10, thinning=TokenDroppingConfig(patch_dropout=0.5))
    assert config.tagged(thinned, "forbid")["thinning.patch_dropout"] == 0.5


def test_stop_at_a_phase_boundary_is_handled_by_the_committing_step(monkeypatch, tmp_path):
    """Steps before the boundary may be uncommitted; at the loop's start all are committed, so the wait ends at once."""
    late = threading.Event()  # a first batch that never arrives

    class Loader:
        def __init__(self, *args: Any, image_size: int, start_step: int, **more: Any) -> None:
            self.image_size = image_size
            self.step = start_step

        def __iter__(self) -> Any:
            if self.step == 3:
                late.wait()
            for step in range(self.step, 99):
                yield step, self.image_size

        def stop(self) -> None:
            late.set()

    monkeypatch.setattr(batches, "training_loader", Loader)
    monkeypatch.setattr(batches, "prefetched_to_device", lambda iterated, device: iterated)
    thinned = TokenDroppingConfig(image_sizes=(16,), image_sizes_until=(0.5,))
    cfg = TokenDroppingTrainConfig(steps=4, thinning=thinned)
    data = SimpleNamespace(
        phases=cfg.phases(4, models.config_of("mu/8", 24, 10)),
        index=None,
        order=None,
        arithmetic=SimpleNamespace(accumulation=1, slots=lambda rank: range(1)),
    )
    stop = StopRequest(tmp_path / "stop", reads_file=True)
    group = SimpleNamespace(rank=0, device=torch.device("cpu"))
    worker: Any = SimpleNamespace(cfg=cfg, data=data, group=group, stop=stop)
    in_order: Any = batches.micro_batches(worker, 0)
    assert [next(in_order), next(in_order)] == [(0, 16), (1, 16)]
    stop.signal.set()
    monkeypatch.setattr(batches, "wait_for_first_batch", None)
    assert next(in_order) == (2, 24)
    monkeypatch.undo()

    monkeypatch.setattr(batches, "training_loader", Loader)
    with pytest.raises(Preempted):
        next(batches.micro_batches(worker, 3))
