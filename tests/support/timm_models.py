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
from torch.overrides import TorchFunctionMode

import models
from models.configs import ViTConfig
from models.extras.weights import timm as weights_timm
from models.weights.files import module

# The files of timm whose models are Vision Transformers of the paper's kind: one sequence of equal blocks.
FILES = ("vision_transformer", "eva", "deit", "beit", "vision_transformer_hybrid", "naflexvit")
TOLERANCE = 1e-5  # of logits and features with a deviation near 1
# With up to 16 units of a ResNet before the blocks, timm's own logits are 3e-5 away from those in float64.
HYBRID_TOLERANCE = 5e-5
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


class WithoutInitialisation(TorchFunctionMode):
    """Skip the operations of initialisations, whose results do not exist on the device `meta` but take a while."""

    NAMES = frozenset({"normal_", "uniform_", "trunc_normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.NAMES:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def on_meta(architecture: str, **arguments: Any) -> Any:
    """Return timm's module without memory, by default at its full depth."""
    import timm

    with torch.device("meta"), WithoutInitialisation():
        return timm.create_model(architecture, **arguments)


def description(theirs: Any) -> dict[str, Any]:
    """Return the parts of the config.json that timm's `save_for_hf` writes for this module."""
    pretrained_cfg = dict(theirs.pretrained_cfg)
    return {
        "architecture": pretrained_cfg["architecture"],
        "num_classes": theirs.num_classes,
        "global_pool": theirs.global_pool,
        "pretrained_cfg": {"input_size": list(pretrained_cfg["input_size"])},
    }


def refusal(architecture: str, **arguments: Any) -> str:
    """Return the reason why the weights of an architecture do not import; empty if they do, and heads are equal."""
    try:
        weights_timm.refuse_unsupported({}, architecture)
        theirs = on_meta(architecture, **arguments)
        _, config = weights_timm.load(theirs.state_dict(), description(theirs), {})
    except ValueError as error:
        return str(error)
    check_config(theirs, config)
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
        repeated = pool if end <= len(pool) else pool.repeat(-(-end // len(pool)))
        values = repeated[start:end].view(parameter.shape)
        start = end % len(pool)
        if parameter.ndim >= 2 and not name.endswith(("_token", "pos_embed", "latent", "freqs")):
            parameter.copy_(values / math.sqrt(parameter[0].numel()))
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.3 * values)
        else:
            parameter.copy_(0.3 * values)


def random_module(architecture: str, seed: int, **arguments: Any) -> Any:
    """Return timm's module with random weights, without the time of its own initialisation."""
    theirs = on_meta(architecture, **arguments)
    theirs.to_empty(device="cpu")
    for part in theirs.modules():
        if hasattr(part, "init_non_persistent_buffers"):
            part.init_non_persistent_buffers()
    randomise(theirs, seed)
    return theirs.eval()


def check_config(theirs: Any, config: models.ModelConfig) -> None:
    """Assert what neither keys nor shapes nor, within rounding, random weights show: heads and epsilons."""
    assert isinstance(config, ViTConfig)
    assert config.heads == theirs.blocks[0].attn.num_heads
    if theirs.attn_pool is not None:
        assert (config.map_heads or config.heads) == theirs.attn_pool.num_heads
    norms = [norm for norm in theirs.modules() if isinstance(norm, torch.nn.LayerNorm | torch.nn.RMSNorm)]
    assert {norm.eps for norm in norms or [theirs.norm]} == {config.norm_eps}


@torch.no_grad()
def compare(architecture: str, seed: int = 0, small: bool = False) -> Outcome:
    """Compare logits and features of timm's random weights with ours after the import, at two image sizes.

    At its own width, the model has up to DEPTH blocks; a small one has two blocks, 96 channels and 4 x 4 patches.
    """
    # A small model takes milliseconds, the full depth up to a second.
    depth = {"depth": DEPTH} if small else {}
    reason = refusal(architecture, **depth)
    if reason:
        return Outcome(reason=reason)
    full = on_meta(architecture, **depth)
    sides = tuple(full.pretrained_cfg["input_size"][1:])
    tokens = math.prod(full.patch_embed.grid_size)
    arguments: dict[str, Any] = {"depth": DEPTH if tokens * full.embed_dim <= MANY_CHANNELS else 1}
    model_args = {}
    if small:
        sides = (sides[0] // full.patch_embed.grid_size[0] * 4, sides[1] // full.patch_embed.grid_size[1] * 4)
        model_args = {"num_heads": 4, "img_size": sides}
        arguments = {"depth": DEPTH, "embed_dim": 96, **model_args}
    theirs = random_module(architecture, seed, **arguments)
    described = {**description(theirs), "model_args": model_args}
    state, config = weights_timm.load(theirs.state_dict(), described, {})
    check_config(theirs, config)
    ours = module(state, config)
    assert isinstance(ours, models.ViT)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(1, 3, *sides, generator=generator)
    # timm ignores the last pixels of 384 if patches have 14: our model takes 378.
    covered = images[:, :, : config.image_size[0], : config.image_size[1]]
    outcome = Outcome()
    features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    outcome.features = (ours.features(covered) - features).abs().max().item()
    outcome.logits = (ours(covered) - theirs.head(features)).abs().max().item()

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


def check(architecture: str, outcome: Outcome) -> None:
    """Assert that the difference is rounding, or that the refusal has a known reason."""
    if outcome.reason:
        known = [reason for _, reason in (*weights_timm.UNSUPPORTED_KEYS, *weights_timm.UNSUPPORTED_NAMES)]
        assert any(reason in outcome.reason for reason in known), f"{architecture}: {outcome.reason}"
        return
    tolerance = HYBRID_TOLERANCE if family_of(architecture) == "vision_transformer_hybrid" else TOLERANCE
    assert max(outcome.logits, outcome.features, outcome.other_size) < tolerance, f"{architecture}: {outcome}"
