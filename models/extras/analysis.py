"""Analyse which patches a trained ViT attends to: the paper's figures 6, 7 and 11 (SPEC 2.7).

1. `attention_weights` runs images through the model and recomputes the attention weights of each block.
2. `attention_map` (figure 6) and `attention_distance` (figures 7 and 11) use these weights.
3. `position_similarity` and `embedding_components` (figure 7) use only the model's parameters.

    weights = attention_weights(model, images)                # 12 of (B, 12, 197, 197) for B/16 at 224 pixels
    attention_map(weights, model.config)                      # (B, 14, 14); the largest entry is 1
    attention_distance(weights, model.config)                 # (12, 12) pixels, one row per layer
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import positions
from models.vit import Attention, Block, ViT, ViTConfig, position_table

# B images, H heads, T tokens (prefix first, then the grid row by row), N = rows x columns, D width, C channels


def vit_of(model: nn.Module) -> ViT:
    """Return the model if it is a ViT, or the ViT inside a masked-prediction model; otherwise raise ValueError."""
    vit = getattr(model, "vit", model)
    if not isinstance(vit, ViT):
        raise ValueError(f"expected a Vision Transformer, found a {type(model).__name__}")
    return vit


@torch.no_grad()
def attention_weights(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return each block's softmax weights (B, H, query, key) in float32; the model must be in eval mode.

    The weights are recomputed from the inputs of each attention layer, because fused kernels never materialise them.
    """
    vit = vit_of(model)
    if vit.block is not Block:
        raise ValueError(f"expected a model with attention between all tokens, found family {vit.config.family}")
    weights: list[Tensor] = []

    def record(
        attention: Attention,
        inputs: tuple[Tensor, positions.Relative | None, int | None, positions.Rotation | None],
    ) -> None:
        x, relative, _, rotation = inputs
        q, k, _ = attention.project(x, rotation)
        logits = q.float() * q.shape[-1] ** -0.5 @ k.float().mT
        if relative is not None:
            logits = logits + relative(q).float()
        weights.append(logits.softmax(-1))

    hooks = []
    for block in vit.blocks:
        assert isinstance(block, Block)
        hooks.append(block.attention.register_forward_pre_hook(record))
    # Remove the hooks: otherwise every later forward pass would compute attention twice and keep the results in memory.
    try:
        vit.encode(vit.embed(images))  # computes all tokens, including those that pooling does not read
    finally:
        for hook in hooks:
            hook.remove()
    return weights


def rollout(weights: Sequence[Tensor], identity: bool = True) -> Tensor:
    """Return the contribution of each input token (key) to each output token (query), (B, T, T); rows sum to 1.

    Averages heads and multiplies layers, the last on the left. `identity` accounts for the residual connection: it is
    added before the rows are normalised again (paper D.8; authors, vision_transformer issues 18 and 27).
    """
    tokens = weights[0].shape[-1]
    residual = torch.eye(tokens, dtype=torch.float64, device=weights[0].device)
    mixed = residual
    # Later layers multiply from the left: their keys are the output tokens of earlier layers.
    for layer in weights:
        mean = layer.double().mean(1)
        if identity:
            # The identity represents what the residual connection passes on unchanged.
            mean = mean + residual
        mixed = mean / mean.sum(-1, keepdim=True) @ mixed
    return mixed


def attention_map(weights: Sequence[Tensor], config: ViTConfig) -> Tensor:
    """Return each patch's contribution to the pooled token by rollout (figure 6): (B, rows, columns), maximum 1."""
    mixed = rollout(weights)
    # The head reads the class token, or without one the mean over the patches, in some models with the registers.
    pooled = mixed[:, 0]
    if config.pool != "token":
        first = 0 if config.pool_prefix else config.prefix_tokens
        pooled = mixed[:, first:].mean(1)
    patches = pooled[:, config.prefix_tokens :]
    return (patches / patches.amax(1, keepdim=True)).unflatten(1, config.grid)


def attention_distance(weights: Sequence[Tensor], config: ViTConfig, renormalise: bool = False) -> Tensor:
    """Return the mean distance in pixels between query and key patches (figures 7 and 11), as (layers, H).

    Distances are weighted by attention and averaged over queries and images (128 in the paper). Prefix tokens have no
    position and are excluded; `renormalise` scales the remaining weights to sum to 1, otherwise the excluded weights
    count as distance 0.
    """
    rows, columns = config.grid
    row = torch.arange(rows, dtype=torch.float64)
    column = torch.arange(columns, dtype=torch.float64)
    places = torch.cartesian_prod(row, column) * torch.tensor(config.stride, dtype=torch.float64)  # (N, 2) pixels
    distance = torch.cdist(places, places).to(weights[0].device)  # (N, N)
    layers = []
    for layer in weights:
        patches = layer[:, :, config.prefix_tokens :, config.prefix_tokens :].double()  # (B, H, N, N)
        if renormalise:
            patches = patches / patches.sum(-1, keepdim=True)
        layers.append((patches * distance).sum(-1).mean((0, 2)))
    return torch.stack(layers)


def position_similarity(model: nn.Module) -> Tensor:
    """Return the cosine similarity of all pairs of position embeddings (figure 7, centre).

    The shape is (rows, columns, rows, columns). If every layer has a position table, the first table is used. Raises
    ValueError if no table is added to the patches.
    """
    vit = vit_of(model)
    config = vit.config
    if config.positions not in positions.ADDED:
        raise ValueError(f"expected a position table that is added to the patches, found positions={config.positions}")
    table = position_table(vit.state_dict(), config)[0, config.position_slots :].double()
    unit = F.normalize(table, dim=-1)
    return (unit @ unit.T).reshape(*config.grid, *config.grid)


def embedding_components(model: nn.Module, count: int = 28) -> tuple[Tensor, Tensor]:
    """Return the principal components of the RGB patch filters (figure 7, left), and their shares of the variance.

    There are at most `count` components (count, C, h, w), of unit length and with the sign that makes the largest entry
    positive. The paper shows 28 components of L/32.
    """
    vit = vit_of(model)
    if vit.stem is not None:
        raise ValueError(
            "expected a model whose patch embedding reads RGB pixels; in this model, it reads the output of a ResNet "
            "stem"
        )
    filters = vit.embedding.weight.detach().double()  # (D, C, h, w)
    rows = filters.flatten(1)
    # Principal components belong to centred rows; SVD computes them without a covariance matrix.
    _, values, components = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    # A component and its negative are equivalent: fix the sign to make pictures comparable.
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    components = components * largest.sign()
    variance = values.square()
    explained = variance / variance.sum()
    return components[:count].unflatten(1, filters.shape[1:]), explained[:count]
