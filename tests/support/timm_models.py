"""timm's Vision Transformers with random weights, and their comparison with ours. Nothing is downloaded.

for architecture, pretrained in architectures().items(): ...      "vit_base_patch14_dinov2": 1 pretrained weight
outcome = compare("vit_base_patch14_dinov2")                      largest differences, or the reason of a refusal
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import models
from models.extras.weights import timm as weights_timm
from models.weights.files import module

# The files of timm whose models are Vision Transformers of the paper's kind: one sequence of equal blocks.
FILES = ("vision_transformer", "eva", "deit", "beit", "vision_transformer_hybrid", "naflexvit")
DEPTH = 2  # of a comparison; names and shapes are compared at the full depth
MANY_CHANNELS = 300_000  # of all tokens; with more, one block is compared


@dataclass
class Outcome:
    """How ours differs from timm's, or why we refuse its weights."""

    reason: str = ""  # of a refusal; empty if the weights are imported
    logits: float = math.nan  # largest absolute difference at the architecture's size
    features: float = math.nan
    other_size: float = math.nan  # of the logits, at another size


def architectures() -> dict[str, int]:
    """Return the number of pretrained weights of each architecture, by timm's own list."""
    import timm

    counts: dict[str, int] = {}
    for file in FILES:
        for name in timm.list_models(module=file, pretrained=True, include_tags=True):
            architecture = name.partition(".")[0]
            counts[architecture] = counts.get(architecture, 0) + 1
    return counts


def family_of(architecture: str) -> str:
    """Return the name of timm's file that defines the architecture."""
    import timm

    return timm.models._registry._model_to_module[architecture]


def on_meta(architecture: str) -> Any:
    """Return timm's module at its full depth without memory."""
    import timm

    with torch.device("meta"):
        return timm.create_model(architecture)


def description(theirs: Any) -> dict[str, Any]:
    """Return the parts of the config.json that timm's `save_for_hf` writes for this module."""
    pretrained_cfg = dict(theirs.pretrained_cfg)
    return {
        "architecture": pretrained_cfg["architecture"],
        "num_classes": theirs.num_classes,
        "global_pool": theirs.global_pool,
        "pretrained_cfg": {"input_size": list(pretrained_cfg["input_size"])},
    }


def refusal(theirs: Any) -> str:
    """Return the reason why the weights of a module do not import; empty if they do."""
    try:
        weights_timm.load(theirs.state_dict(), description(theirs), {})
    except ValueError as error:
        return str(error)
    return ""


@functools.cache
def noise(seed: int) -> torch.Tensor:
    """Return a fixed pool of normal values; its prime length keeps the rows of a matrix different."""
    return torch.randn(4_194_301, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomise(theirs: torch.nn.Module, seed: int) -> None:
    """Fill every parameter with random values that keep activations near 1, so that a missing one shows."""
    pool = noise(seed)
    start = 0
    for name, parameter in theirs.named_parameters():
        # The pool is much cheaper than fresh values for matrices with millions of entries.
        end = start + parameter.numel()
        values = pool.repeat(-(-end // len(pool)))[start:end].view(parameter.shape)
        start = end % len(pool)
        if parameter.ndim >= 2 and not name.endswith(("_token", "pos_embed", "latent", "freqs")):
            parameter.copy_(values / math.sqrt(parameter[0].numel()))
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.3 * values)
        else:
            parameter.copy_(0.3 * values)


def random_module(architecture: str, depth: int, seed: int) -> Any:
    """Return timm's module with random weights, without the time of its own initialisation."""
    import timm

    with torch.device("meta"):
        theirs = timm.create_model(architecture, depth=depth)
    theirs.to_empty(device="cpu")
    for part in theirs.modules():
        if hasattr(part, "init_non_persistent_buffers"):
            part.init_non_persistent_buffers()
    randomise(theirs, seed)
    return theirs.eval()


@torch.no_grad()
def compare(architecture: str, seed: int = 0) -> Outcome:
    """Compare logits and features of timm's random weights with ours after the import, at two image sizes."""
    full = on_meta(architecture)
    reason = refusal(full)
    if reason:
        return Outcome(reason=reason)
    side = full.pretrained_cfg["input_size"][-1]
    tokens = math.prod(full.patch_embed.grid_size)
    depth = DEPTH if tokens * full.embed_dim <= MANY_CHANNELS else 1
    theirs = random_module(architecture, depth, seed)
    state, config = weights_timm.load(theirs.state_dict(), description(theirs), {})
    # A wrong epsilon of 1e-6 changes these logits by less than the tolerance.
    epsilons = {norm.eps for norm in theirs.modules() if isinstance(norm, torch.nn.LayerNorm)} or {theirs.norm.eps}
    assert epsilons == {config.norm_eps}, f"{architecture} has norms with epsilons {epsilons}"
    ours = module(state, config)
    assert isinstance(ours, models.ViT)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(1, 3, side, side, generator=generator)
    outcome = Outcome()
    features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    outcome.features = (ours.features(images) - features).abs().max().item()
    outcome.logits = (ours(images) - theirs.head(features)).abs().max().item()

    # At another size, both compute rotary positions anew. timm resizes a table by another rule, so it gets ours.
    size = (6 * config.stride[0], 9 * config.stride[1])
    resized, _ = models.transfer(state, config, replace(config, image_size=size))
    ours = module(resized, replace(config, image_size=size))
    theirs.set_input_size(img_size=size)
    if "positions.0.table" in resized:
        theirs.pos_embed.copy_(resized["positions.0.table"])
    images = torch.randn(2, 3, *size, generator=generator)
    outcome.other_size = (ours(images) - theirs(images)).abs().max().item()
    return outcome
