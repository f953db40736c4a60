"""Time a training step of our, timm's and transformers' models, relative to the machine's matrix product speed.

    python -m benchmarks.train_step                          S/16 and B/16 on the CPU, fp32 and bf16
    python -m benchmarks.train_step --models L/16 H/14 --dtypes bf16 --batch 64       on a GPU

A step is forward, softmax cross-entropy, backward and fused AdamW on random images; parameters and arithmetic use the
given dtype (no autocast). Each round times all contenders and a matrix product, in rotated order. Compare the ratios,
which are medians of the per-round ratios. On a CPU, one thread runs and its CPU time is measured, so that other load on
the machine does not count.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import models
from models.vit import Attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    model: str
    dtype: torch.dtype
    batch: int
    device: str


def plain(name: str) -> torch.nn.Module:
    return models.build(name)


def compiled(name: str) -> torch.nn.Module:
    model = models.build(name)
    models.compile_blocks(model)
    return model


class FusedAttention(Attention):
    """Our attention with PyTorch's fused kernel everywhere, to evaluate the choice in `models.vit.attend`."""

    def forward(
        self, x: torch.Tensor, relative: None = None, queries: int | None = None, rotation: None = None
    ) -> torch.Tensor:
        q, k, v = self.project(x)
        mixed = F.scaled_dot_product_attention(q[:, :, :queries], k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def fused_attention(name: str) -> torch.nn.Module:
    model = models.build(name)
    for block in model.blocks:
        block.attention.__class__ = FusedAttention
    return model


def timm_model(name: str, act_layer: str = "gelu") -> torch.nn.Module:
    """Build timm's VisionTransformer, by default with its own erf GELU."""
    from timm.models.vision_transformer import VisionTransformer

    c = models.config_of(name)
    shape = {"embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": c.mlp / c.width}
    return VisionTransformer(patch_size=c.patch[0], act_layer=act_layer, **shape)


def timm_compiled(name: str) -> torch.nn.Module:
    model = timm_model(name)
    for block in model.blocks:
        block.compile()
    return model


def transformers_model(name: str) -> torch.nn.Module:
    """Build transformers' ViT with fused attention."""
    from transformers import ViTConfig, ViTForImageClassification

    c = models.config_of(name)
    shape = {"hidden_size": c.width, "num_hidden_layers": c.depth, "num_attention_heads": c.heads}
    config = ViTConfig(**shape, intermediate_size=c.mlp, patch_size=c.patch[0], num_labels=c.classes)
    config._attn_implementation = "sdpa"
    return ViTForImageClassification(config)


CONTENDERS: dict[str, Callable[[str], torch.nn.Module]] = {
    "ours": plain,
    "ours, compiled": compiled,
    "ours, fused attention": fused_attention,
    "timm": timm_model,
    "timm, our GELU": functools.partial(timm_model, act_layer="gelu_tanh"),  # the same function as ours
    "timm, compiled": timm_compiled,
    "transformers": transformers_model,
}


def training_step(build: Callable[[str], torch.nn.Module], setting: Setting) -> Step:
    """Return a function that runs one training step."""
    torch.manual_seed(0)
    model = build(setting.model).to(setting.device, setting.dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(setting.batch, 3, 224, 224, device=setting.device, dtype=setting.dtype)
    labels = torch.arange(setting.batch, device=setting.device)

    def step() -> None:
        output = model(images)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def product_step(setting: Setting) -> tuple[Step, float]:
    """Return a function that repeats the first matrix product of the MLP at this batch size, and its FLOPs."""
    config = models.config_of(setting.model)
    repeats = 4
    rows = setting.batch * (math.prod(config.grid) + config.prefix_tokens)
    a = torch.randn(rows, config.width, device=setting.device, dtype=setting.dtype)
    b = torch.randn(config.width, config.mlp, device=setting.device, dtype=setting.dtype)

    def step() -> None:
        for _ in range(repeats):
            a @ b

    return step, 2.0 * repeats * rows * config.width * config.mlp


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(setting: Setting, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round, including the matrix product as "product"."""
    steps = {name: training_step(CONTENDERS[name], setting) for name in names}
    steps["product"], _ = product_step(setting)
    for _ in range(2):  # warm-up, and compilation
        for step in steps.values():
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        for name in order:
            taken[name].append(seconds(steps[name], setting.device))
        order = [*order[1:], order[0]]  # rotate, so that no contender has a better position in the round
    return taken


def rows_of(setting: Setting, taken: dict[str, list[float]]) -> list[str]:
    """Return the table rows: time relative to ours, and share of the matrix product's speed."""
    _, product_flops = product_step(setting)
    step_flops = models.training_flops(models.config_of(setting.model), setting.batch)
    rows = []
    for name in (name for name in taken if name != "product"):
        ratio = statistics.median(t / ours for t, ours in zip(taken[name], taken["ours"], strict=True))
        share = [step_flops / t / (product_flops / p) for t, p in zip(taken[name], taken["product"], strict=True)]
        kind = str(setting.dtype).removeprefix("torch.")
        rows.append(
            f"| {setting.model} | {kind} | {name} | {statistics.median(taken[name]):.3f} | {ratio:.2f} "
            f"| {statistics.median(share):.0%} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["ours", "timm", "timm, our GELU", "transformers"],
        choices=CONTENDERS,
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"torch {torch.__version__}, {where}, batch {arguments.batch}, {arguments.rounds} rounds\n")
    print("| model | type | code | step, s | time / ours | of the product's speed |\n|---|---|---|---|---|---|")
    for model in arguments.models:
        for dtype in arguments.dtypes:
            setting = Setting(model, DTYPES[dtype], arguments.batch, device)
            print(
                "\n".join(rows_of(setting, measure(setting, arguments.contenders, arguments.rounds))),
                flush=True,
            )


if __name__ == "__main__":
    main()
