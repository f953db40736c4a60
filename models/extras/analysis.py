"""Analyse which patches a trained ViT attends to: the paper's figures 6, 7 and 11 (SPEC 2.7).

1. `attention_weights` runs images through the model and computes the attention weights of each block.
2. `attention_map` (figure 6) and `attention_distances` (figures 7 and 11) use these weights.
3. `position_similarity` and `embedding_components` (figure 7) use only the model's parameters.

    weights = attention_weights(model, images)                # 12 of (B, 12, 197, 197) for B/16 at 224 pixels
    attention_map(weights, model.config)                      # (B, 14, 14); the largest entry is 1
    attention_distances(weights, model.config)                # two of (12, 12) pixels, one row per layer
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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

    They are computed from the queries and keys of the forward pass, because fused kernels never materialise them.
    """
    vit = vit_of(model)
    if vit.block is not Block:
        raise ValueError(f"expected a model with attention between all tokens, found family {vit.config.family}")
    weights: list[Tensor] = []
    attentions = [block.attention for block in vit.blocks if isinstance(block, Block)]
    hooks = [record(attention, weights) for attention in attentions]
    # Remove what was attached: otherwise every later forward pass would keep its weights in memory.
    try:
        # All tokens attend to all tokens, but only one token of the last block is computed further.
        vit.encode(vit.embed(images), queries=1)
    finally:
        for attention, hook in zip(attentions, hooks, strict=True):
            hook.remove()
            del attention.project
    return weights


def record(attention: Attention, weights: list[Tensor]) -> RemovableHandle:
    """Append the softmax weights of each later call to `weights`; the attention projects its input only once."""
    project = attention.project
    tables: list[positions.Relative | None] = []

    def keep_table(_: Attention, inputs: tuple[Tensor, positions.Relative | None, object, object]) -> None:
        tables[:] = [inputs[1]]

    def project_and_record(x: Tensor, rotation: positions.Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(x, rotation)
        logits = q.float() * q.shape[-1] ** -0.5 @ k.float().mT
        if tables[0] is not None:
            logits = logits + tables[0](q).float()
        weights.append(logits.softmax(-1))
        return q, k, v

    attention.project = project_and_record  # type: ignore[method-assign]
    return attention.register_forward_pre_hook(keep_table)


def rollout(weights: Sequence[Tensor], identity: bool = True, outputs: Tensor | None = None) -> Tensor:
    """Return the contribution of each input token (key) to each output token (query), (B, T, T); rows sum to 1.

    Averages heads and multiplies layers, the last on the left. `identity` accounts for the residual connection: it is
    added before the rows are normalised again (paper D.8; authors, vision_transformer issues 18 and 27). `outputs`
    (R, T) are means over the output tokens: only these are followed, and the result is (B, R, T).
    """
    tokens = weights[0].shape[-1]
    residual = torch.eye(tokens, dtype=torch.float64, device=weights[0].device)
    mixed = residual if outputs is None else outputs
    # Begin with the last layer, so that a few outputs need products of a few rows: its keys are the queries of the
    # layer before it.
    for layer in reversed(weights):
        mean = layer.double().mean(1)
        if identity:
            # The identity represents what the residual connection passes on unchanged.
            mean = mean + residual
        mixed = mixed @ (mean / mean.sum(-1, keepdim=True))
    return mixed


def attention_map(weights: Sequence[Tensor], config: ViTConfig) -> Tensor:
    """Return each patch's contribution to the pooled token by rollout (figure 6): (B, rows, columns), maximum 1."""
    # The head reads the class token, or without one the mean over the patches, in some models with the registers.
    outputs = torch.zeros(1, weights[0].shape[-1], dtype=torch.float64, device=weights[0].device)
    if config.pool == "token":
        outputs[:, 0] = 1
    else:
        first = 0 if config.pool_prefix else config.prefix_tokens
        outputs[:, first:] = 1 / (outputs.shape[1] - first)
    patches = rollout(weights, outputs=outputs)[:, 0, config.prefix_tokens :]
    return (patches / patches.amax(1, keepdim=True)).unflatten(1, config.grid)


def attention_distances(weights: Sequence[Tensor], config: ViTConfig) -> tuple[Tensor, Tensor]:
    """Return the mean distance in pixels between query and key patches (figures 7 and 11), twice as (layers, H).

    Distances are weighted by attention and averaged over queries and images (128 in the paper). Prefix tokens have no
    position and are excluded: in the first result, their weights count as distance 0; in the second, the remaining
    weights are renormalised to sum to 1.
    """
    rows, columns = config.grid
    row = torch.arange(rows, dtype=torch.float64)
    column = torch.arange(columns, dtype=torch.float64)
    places = torch.cartesian_prod(row, column) * torch.tensor(config.stride, dtype=torch.float64)  # (N, 2) pixels
    distance = torch.cdist(places, places)  # (N, N)
    # Sum the weights of a query and their distances in one product: (N, N, 2).
    terms = torch.stack([torch.ones_like(distance), distance], -1).to(weights[0].device)
    raw = []
    renormalised = []
    for layer in weights:
        patches = layer[:, :, config.prefix_tokens :, config.prefix_tokens :].double()  # (B, H, N, N)
        total, weighted = torch.einsum("bhqk,qkt->tbhq", patches, terms)  # each (B, H, N)
        raw.append(weighted.mean((0, 2)))
        renormalised.append((weighted / total).mean((0, 2)))
    return torch.stack(raw), torch.stack(renormalised)


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
