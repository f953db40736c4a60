"""The Vision Transformer of Dosovitskiy et al. 2021, equal to the original code (SPEC 1.1 to 1.7), and the Axial ViT.

    model = models.build("B/16", image_size=224, classes=1000)
    logits = model(images)             # images (B, 3, height, width) in [-1, 1]

1. `PatchEmbedding`, `Prefix`, `Attention`, `Mlp`, …    layers
2. `Block`, `MapHead`, `ViT`                            the model: embed, encode, features, head
3. `AxialViT`                                           a ViT whose blocks attend along rows and columns

The switches of later ViTs (SWITCHES in configs.py) act when the model is built: a disabled layer is None.

Every parameter belongs to a submodule that is called, never to the model itself: ZeRO-3 gathers parameters when their
module runs, so `features` and `encode` work under ZeRO-3 too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import positions
from models.configs import ACTIVATIONS, AxialConfig, ViTConfig

# B batch, N patches, T tokens (prefix + N), D width, H heads, C channels, P patch

# ------------------------------------------------------------------------------------------------ layers


def norm_of(config: ViTConfig, width: int) -> nn.Module:
    """Return a norm of the config's kind for vectors of this width."""
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps)


class PatchEmbedding(nn.Module):
    """The strided patch convolution as one matrix product: (B, C, height, width) to (B, N, D), patches row by row."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int], bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        patch_height, patch_width = self.patch
        rows = height // patch_height
        columns = width // patch_width
        patches = images.to(self.weight.dtype).view(batch, channels, rows, patch_height, columns, patch_width)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        # Flatten in two steps: for an empty batch, a single reshape could not infer the sizes.
        patches = patches.flatten(3).flatten(1, 2)  # (B, N, C P P)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Prefix(nn.Module):
    """Prepends the class token, then the registers, to the patches: (B, N, D) to (B, T, D)."""

    def __init__(self, width: int, class_token: bool, registers: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def forward(self, patches: Tensor) -> Tensor:
        tokens = []
        # The class token comes first: pooling reads token 0, and the last block may compute only that token.
        for token in (self.cls, self.registers):
            if token is not None:
                tokens.append(token.expand(patches.shape[0], -1, -1))
        if not tokens:
            return patches
        return torch.cat([*tokens, patches], dim=1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split the channels between heads: (B, T, D) to (B, H, T, D/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute softmax attention of (B, H, T, d) with logits scaled by d**-0.5, plus an optional bias on the logits."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # Two plain products: on a CPU in bfloat16, the fused kernel makes a step of S/16 take 1.22 times as long; in
        # float32 0.99 times (benchmarks/README.md).
        logits = torch.bmm(q.flatten(0, 1) * q.shape[-1] ** -0.5, k.flatten(0, 1).mT)  # (B H, T, T)
        if bias is not None:
            logits = logits + bias.flatten(0, 1)
        mixed = torch.bmm(logits.softmax(-1), v.flatten(0, 1))
        return mixed.unflatten(0, q.shape[:2])
    # Scales by d**-0.5 and adds the mask to the logits, so a bias can be passed as the mask.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class QVBiasLinear(nn.Linear):
    """One packed projection for q, k and v, without a bias for k: `bias` (2 D) contains those of q and v."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, bias=False)
        self.bias = nn.Parameter(torch.empty(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.bias.chunk(2)
        return F.linear(x, self.weight, torch.cat([q, torch.zeros_like(q), v]))


class Attention(nn.Module):
    """Self-attention with one packed projection for q, k and v, initialised separately (models/initial.py)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.rope = config.rope
        if config.qkv_bias == "qv":
            self.qkv: nn.Linear = QVBiasLinear(width)
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias == "all")
        self.q_norm = norm_of(config, width // config.heads) if config.qk_norm else None
        self.k_norm = norm_of(config, width // config.heads) if config.qk_norm else None
        self.norm = norm_of(config, width) if config.attention_norm else None
        self.out = nn.Linear(width, width, bias=config.block_bias)

    def project(self, x: Tensor, rotation: positions.Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, H, T, D/H)."""
        # `chunk` instead of a permuted view: the backward pass then copies once, not twice (benchmarks/README.md).
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if rotation is not None:
            q = positions.rotate(q, rotation, self.rope)
            k = positions.rotate(k, rotation, self.rope)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        relative: positions.Relative | None = None,
        queries: int | None = None,
        rotation: positions.Rotation | None = None,
    ) -> Tensor:
        """Return the attention output of all tokens (B, T, D), or only of the first `queries` tokens."""
        q, k, v = self.project(x, rotation)
        # Fewer queries still attend to all tokens: cut only q, never k and v. `[:None]` keeps everything.
        bias = None
        if relative is not None:
            bias = relative(q)[:, :, :queries]
        mixed = attend(q[:, :, :queries], k, v, bias).transpose(1, 2).flatten(2)  # (B, H, T, D/H) to (B, T, D)
        if self.norm is not None:
            mixed = self.norm(mixed)
        return self.out(mixed)


class QuickGELU(nn.Module):
    """The approximation x * sigmoid(1.702 x) of GELU, as in OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Two linear layers with GELU in between, applied to each token separately."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        dropout: float,
        bias: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.norm = norm
        self.down = nn.Linear(hidden, width, bias=bias)
        self.act: nn.Module = QuickGELU()
        if activation in ACTIVATIONS:
            self.act = nn.GELU(approximate=ACTIVATIONS[activation])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.act(self.up(x)))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(self.down(hidden))


class SwiGLU(nn.Module):
    """An MLP whose hidden vector is silu(gate) * up, with one packed projection for both (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool, norm: nn.Module | None) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.norm = norm
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        hidden = self.dropout(F.silu(gate) * up)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(self.down(hidden))


class LayerScale(nn.Module):
    """Multiplies each channel of a residual branch by a learned factor (Touvron et al. 2021, CaiT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, zeroes a sample's residual branch with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        # One draw per sample, whatever the other axes: an Axial block passes (B, rows, columns, D).
        one_per_sample = (x.shape[0], *[1] * (x.ndim - 1))
        keep = x.new_empty(one_per_sample).bernoulli_(1 - self.rate)
        # Divide by the keep probability, so that the mean equals that of evaluation, where nothing is dropped.
        return x * keep / (1 - self.rate)


# ------------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); returns only the first `queries` tokens if set."""

    is_repeated = True  # for models.blocks

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = norm_of(config, config.width)
        self.attention = Attention(config)
        self.scale1 = None
        self.norm2 = norm_of(config, config.width)
        hidden_norm = norm_of(config, config.mlp) if config.mlp_norm else None
        self.mlp: nn.Module
        if config.activation == "swiglu":
            self.mlp = SwiGLU(config.width, config.mlp, config.dropout, config.block_bias, hidden_norm)
        else:
            self.mlp = Mlp(config.width, config.mlp, config.activation, config.dropout, config.block_bias, hidden_norm)
        self.scale2 = None
        if config.layer_scale is not None:
            self.scale1 = LayerScale(config.width)
            self.scale2 = LayerScale(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        relative: positions.Relative | None = None,
        queries: int | None = None,
        rotation: positions.Rotation | None = None,
    ) -> Tensor:
        mixed = self.dropout(self.attention(self.norm1(x), relative, queries, rotation))
        if self.scale1 is not None:
            mixed = self.scale1(mixed)
        # Cut the residual to the queries too; `[:None]` keeps all tokens.
        x = x[:, :queries] + self.drop_path(mixed)
        mixed = self.mlp(self.norm2(x))
        if self.scale2 is not None:
            mixed = self.scale2(mixed)
        return x + self.drop_path(mixed)


class MapHead(nn.Module):
    """big_vision's attention pooling (SPEC 1.4): a probe attends to the tokens, followed by y + mlp(norm(y))."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.map_heads or config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = norm_of(config, config.width)
        self.mlp = Mlp(config.width, config.map_mlp or config.mlp, config.activation, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool tokens (B, T, D) to one vector per image (B, D)."""
        probe = self.probe.expand(tokens.shape[0], -1, -1)
        q = split_heads(self.q(probe), self.heads)  # (B, H, 1, D/H)
        k, v = (split_heads(part, self.heads) for part in self.kv(tokens).chunk(2, dim=-1))  # each (B, H, T, D/H)
        # Without a residual around the attention and a norm before it, as in big_vision: the ViT's last norm has run.
        mixed = attend(q, k, v)  # (B, H, 1, D/H)
        y = self.out(mixed.transpose(1, 2).flatten(2))  # (B, 1, D)
        return (y + self.mlp(self.norm(y)))[:, 0]


class ViT(nn.Module):
    """Maps images to logits, in the steps `embed`, `encode`, `features` and head."""

    block: type[nn.Module] = Block  # constructed from (config, rate of stochastic depth)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.recomputed_blocks = 0  # number of first blocks that recompute their activations in training
        self.smaller_sizes: tuple[tuple[int, int], ...] = ()  # additional image sizes accepted early in training
        self.skip_unread = True  # if only the class token is pooled, the last block computes only that token
        # From images to patch embeddings.
        self.stem = None
        channels = 3  # RGB
        if config.stem is not None:
            from models.resnet import Stem  # few ViTs have one

            self.stem = Stem(config.stem, config.stem_width, config.stem_epsilons)
            channels = self.stem.channels
        self.embedding = PatchEmbedding(channels, config.width, config.patch, config.patch_bias)
        self.patch_norm = norm_of(config, config.width) if config.patch_norm else None
        # From patch embeddings to tokens. The rate of stochastic depth rises linearly with the layer.
        self.prefix = Prefix(config.width, config.pool == "token", config.registers)
        # A separate table for each layer, or one table for all.
        self.positions = nn.ModuleList()
        tables = 1
        if config.positions_at == "every":
            tables = config.depth
        if config.positions != "none":
            kind = positions.KINDS[config.positions]
            for _ in range(tables):
                self.positions.append(kind(config.grid, config.width, config.position_slots))
        # Rotary positions: tables for all layers, or frequencies that each layer learns.
        self.rotary = nn.ModuleList()
        if config.rope != "none":
            for _ in range(config.depth if config.rope == "mixed" else 1):
                self.rotary.append(positions.Rotary(config))
        self.dropout = nn.Dropout(config.dropout)
        self.pre_norm = norm_of(config, config.width) if config.pre_norm else None
        self.blocks = nn.ModuleList()
        for layer in range(config.depth):
            # `max` avoids 0 / 0 in a ViT with one block, such as mu.
            rate = config.drop_path * layer / max(config.depth - 1, 1)
            self.blocks.append(self.block(config, rate))
        self.norm = norm_of(config, config.width) if config.last_norm == "tokens" else nn.Identity()
        # From tokens to logits.
        self.map_head = MapHead(config) if config.pool == "map" else None
        self.pool_norm = norm_of(config, config.width) if config.last_norm == "pooled" else None
        self.pre_logits = nn.Linear(config.width, config.representation) if config.representation else None
        feature_width = config.representation or config.width
        self.head = nn.Linear(feature_width, config.classes) if config.classes else nn.Identity()

    def embed(self, images: Tensor) -> Tensor:
        """Map images to patch embeddings (B, N, D), before positions and prefix tokens."""
        # Check sizes here: without positions, another size would compute silently; with them, torch's error is obscure.
        channels, *size = images.shape[1:]
        if channels != 3 or tuple(size) not in (self.config.image_size, *self.smaller_sizes):
            expected = ", ".join(map(str, self.config.image_size))
            raise ValueError(
                f"images have the shape {tuple(images.shape)}, expected (batch, 3, {expected}); resize them, or "
                "transfer the weights to another image size with models.transfer"
            )
        if self.stem is not None:
            images = self.stem(images)
        patches = self.embedding(images)
        if self.patch_norm is not None:
            patches = self.patch_norm(patches)
        return patches

    def encode(
        self,
        patches: Tensor,
        queries: int | None = None,
        grid: positions.Grid | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Map patch embeddings to tokens (B, T, D) after the last norm, prefix tokens first.

        With `queries`, return only the first `queries` tokens; the last block does not compute the others. `grid` is
        the patch grid if the images are smaller than the config's. `kept` (B, K) are the patches to keep after
        positions are added; None keeps all.
        """
        # Recomputing only helps a backward pass.
        recompute = self.training and torch.is_grad_enabled()
        config = self.config
        last = config.depth - 1
        x = self.prefix(patches)
        rotations = [rotary(x, grid, kept) for rotary in self.rotary]
        for layer, block in enumerate(self.blocks):
            # The layer's table biases its attention or is added to its input. Even a single table ("stem", "shared") is
            # in a list, so the first table is always called positions.0.
            relative = None
            has_table = config.positions != "none" and (config.positions_at != "stem" or layer == 0)
            if has_table:
                table = self.positions[0]
                if config.positions_at == "every":
                    table = self.positions[layer]
                if config.positions == "relative":
                    relative = table
                else:
                    x = table(x, grid)
            if layer == 0 and kept is not None:
                # Keep the prefix, and of each image the patches in its row of `kept`.
                prefix = config.prefix_tokens
                places = kept[:, :, None].expand(-1, -1, x.shape[-1])  # (B, K, D)
                x = torch.cat([x[:, :prefix], x[:, prefix:].gather(1, places)], dim=1)
            # Only once, after the first addition, even if every layer adds positions (docs/models.md).
            if layer == 0:
                x = self.dropout(x)
                if self.pre_norm is not None:
                    x = self.pre_norm(x)
            rotation = None
            if rotations:
                rotation = rotations[layer if config.rope == "mixed" else 0]
            # Earlier blocks must compute all tokens, which are the keys and values of the next block.
            block_queries = queries if layer == last else None
            if recompute and layer < self.recomputed_blocks:
                x = checkpoint(block, x, relative, block_queries, rotation, use_reentrant=False)
            else:
                x = block(x, relative, block_queries, rotation)
        # Over all tokens and before pooling, as in the original; normalising the pooled vector gives other results.
        return self.norm(x)

    def features(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the vectors (B, D) that enter the head: pooled tokens, after the tanh layer if the config has one.

        `kept` (B, K) are the patches to keep, as in `encode`.
        """
        config = self.config
        queries = None
        # Pooling does not read the other tokens of the last block, so logits and gradients do not change
        # (test_models/test_vit.py).
        if config.pool == "token" and self.skip_unread:
            queries = 1  # the class token is the first
        grid = (images.shape[2] // config.stride[0], images.shape[3] // config.stride[1])
        tokens = self.encode(self.embed(images), queries, grid, kept)  # (B, T, D); T is 1 with one query
        # By default, pooling excludes registers, which then only take part in attention.
        first = 0 if config.pool_prefix else config.prefix_tokens
        if config.pool == "token":
            pooled = tokens[:, 0]
        elif self.map_head is not None:
            pooled = self.map_head(tokens[:, first:])
        else:
            pooled = tokens[:, first:].mean(dim=1)
        if self.pool_norm is not None:
            pooled = self.pool_norm(pooled)
        if self.pre_logits is not None:
            pooled = self.pre_logits(pooled).tanh()
        return pooled

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        return self.head(self.features(images, kept))


def position_table(state: dict[str, Tensor], config: ViTConfig) -> Tensor:
    """Return the first added position table in a state dict as one tensor (1, S, D), for any kind of positions."""
    # Built from the config, so that weights of a file can be inspected without building a model.
    module = positions.ADDED[config.positions](config.grid, config.width, config.position_slots)
    parameters = {}
    for name, tensor in state.items():
        # "in", because names of the ViT inside a masked model begin with "vit.".
        if "positions.0." in name:
            parameters[name.rpartition(".")[2]] = tensor
    module.load_state_dict(parameters)
    return module.entries(config.grid, torch.empty(0)).detach()


# ------------------------------------------------------------------------------------------------ axial


class AxisAttention(Attention):
    """Self-attention within each row of (B, rows, columns, D)."""

    def forward(
        self,
        x: Tensor,
        relative: positions.Relative | None = None,
        queries: int | None = None,
        rotation: positions.Rotation | None = None,
    ) -> Tensor:
        batch, rows = x.shape[:2]
        # The config rejects relative and rotary positions and the class token: these arguments are always None here.
        mixed = super().forward(x.flatten(0, 1))  # each row is a separate sequence: (B rows, columns, D)
        return mixed.unflatten(0, (batch, rows))


class AxialBlock(nn.Module):
    """Two ordinary blocks, one along rows and one along columns; tokens (B, N, D) in and out."""

    def __init__(self, config: AxialConfig, drop_path: float) -> None:
        super().__init__()
        self.grid = config.grid
        self.row = Block(config, drop_path)
        self.column = Block(config, drop_path)
        # Block creates an ordinary Attention. AxisAttention has the same parameters and names, but attends within rows.
        for block in (self.row, self.column):
            block.attention = AxisAttention(config)

    def forward(self, x: Tensor, relative: None = None, queries: None = None, rotation: None = None) -> Tensor:
        # Norms and MLP work on each token separately, so they accept a grid like a sequence.
        by_row = self.row(x.unflatten(1, self.grid))  # (B, rows, columns, D)
        by_column = self.column(by_row.transpose(1, 2))  # (B, columns, rows, D)
        return by_column.transpose(1, 2).flatten(1, 2)


class AxialViT(ViT):
    block = AxialBlock
