"""Configs of all models: turns names into checked configs, and configs into plain values and back.

How a name becomes a config:
1. NAME splits the name:     "R50+B/16" -> stem R50, size B, patch 16
2. the family's tables give the fields: B -> width 768, depth 12; (R50, 16) -> stem (3, 4, 9), patch 1
3. the caller's fields override these, and the config checks all of them together

    config_of("mu/8", image_size=16, classes=5)   ViTConfig(image_size=(16, 16), patch=(8, 8), classes=5, width=32, ...)
    to_dict(config)                               {"family": "vit", "image_size": (16, 16), "patch": (8, 8), ...}

The modules are in vit.py, resnet.py and extras/masked.py. This file does not import torch, because that takes a second,
and a recipe with a wrong key should fail sooner.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from models import checks
from models.checks import did_you_mean

SIZES = {  # width, depth, mlp, heads
    "mu": (32, 1, 128, 2),  # big_vision models/vit.py:297, for tests
    "Ti": (192, 12, 768, 3),  # vit_jax configs/models.py
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),  # Dosovitskiy et al. 2021, table 1
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "So400m": (1152, 27, 4304, 16),  # big_vision models/vit.py:297-300
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}
ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # the paper's code uses tanh; timm and Hugging Face use erf
POSITIONS = ("learned", "learned2d", "sincos2d", "relative")  # implemented in models/positions.py
ROPES: dict[str, tuple[str, float, str, float, str]] = {  # coordinates, base, order of the axes, offset, pairs
    # Coordinates are patches counted from 0 ("index"), or pixels scaled so that the image spans -1 to 1 ("centred").
    # A head's channel pairs turn by coordinate * base**-e, with exponents e from 0 to 1, half of them for each axis.
    # A pair is two neighbouring channels, or the same channel in the two halves of the head.
    "eva02": ("index", 10_000.0, "yx", 0.0, "neighbours"),  # Fang et al. 2023
    "pe": ("index", 10_000.0, "xy", 1.0, "neighbours"),  # Perception Encoder: Bolya et al. 2025
    "axial": ("index", 100.0, "xy", 0.0, "neighbours"),  # RoPE-ViT: Heo et al. 2024
    "mixed": ("learned", 10.0, "xy", 0.0, "neighbours"),  # RoPE-ViT with learned frequencies for each head and layer
    "dinov3": ("centred", 100.0, "yx", 0.5, "halves"),  # Simeoni et al. 2025
}
CHOICES = {
    "pool": ("token", "gap", "map"),
    "positions": ("none", *POSITIONS),
    "positions_at": ("stem", "every", "shared"),
    "activation": (*ACTIVATIONS, "quick_gelu", "swiglu"),
    "norm": ("layer", "rms"),
    "last_norm": ("tokens", "pooled", "none"),
    "qkv_bias": ("all", "qv", "none"),
    "rope": ("none", *ROPES),
    "stem_epsilons": ("original", "timm"),
}
UNITS = {  # bottleneck units of the four stages: He et al. 2016; big_vision models/bit.py, get_block_desc
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
STEMS = {  # (name, total stride): (units of the stages, patch on the map); vit_jax configs/models.py:252-328
    ("R50", 16): ((3, 4, 9), 1),
    ("R50", 32): ((3, 4, 6, 3), 1),
    ("R26", 32): ((2, 2, 2, 2), 1),
    # The original calls this stem /16. Its code halves the map twice more, which makes it /32: 49 tokens at 224 pixels
    # (SPEC 1.6).
    ("R", 16): ((), 8),
}
GROUPS = 32  # of GroupNorm: Wu and He 2018, and BiT
CELLS = {"mean_color": 1, "downsized": 4}  # the target of a patch is a grid of cells x cells mean colours

# Departures of later ViTs from the paper's; each is off by default.
SWITCHES = (
    *("patch_bias", "patch_norm", "pre_norm", "last_norm", "norm", "layer_scale", "qk_norm", "attention_norm"),
    *("mlp_norm", "qkv_bias", "block_bias", "rope", "rope_grid", "pool_prefix", "map_heads", "map_mlp"),
    "stem_epsilons",
)
# Fields that may differ between source and target; any other difference would silently change the computation.
FREE = (
    *("image_size", "patch", "classes", "representation", "pool"),
    *("dropout", "drop_path", "head_bias", "position_std"),  # used only for training and initialisation
)

HALF = (0.5, 0.5, 0.5)
ImageSize = int | tuple[int, int]  # pixels; (height, width) if not square
ConfigFields = dict[str, Any]  # unchecked field values by name, as given by a user or a file

# ------------------------------------------------------------------------------------------------ the families


def stem_stride(units: tuple[int, ...] | None) -> int:
    """Return the number of image pixels per pixel of the stem's output, along each axis; 1 if there is no stem."""
    # The root halves the map twice, and each stage after the first halves it once.
    if units is None:
        return 1
    return 4 * 2 ** max(len(units) - 1, 0)


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a ViT; the defaults are the paper's B/16."""

    image_size: tuple[int, int] = (224, 224)  # height, width in pixels; a single number means a square
    patch: tuple[int, int] = (16, 16)  # height, width of a patch; in pixels, or after a stem in pixels of its map
    classes: int = 1000  # 0: no head, so the logits equal the features
    width: int = 768  # channels of a token
    depth: int = 12  # transformer blocks
    mlp: int = 3072  # hidden width of a block's MLP
    heads: int = 12  # attention heads of a block
    pool: str = "token"  # token: a class token; gap: mean of the patches; map: attention from a probe
    representation: int | None = None  # width of the tanh layer before the head, used in pretraining
    positions: str = "learned"  # kind of position embedding (paper, D.4)
    positions_at: str | None = None  # None: the stem, but every layer for relative, which acts inside attention
    class_slot: bool = True  # whether prefix tokens have position entries (vit_jax: yes, big_vision: no)
    position_std: float | None = None  # None: 0.02, or width**-0.5 in big_vision's layouts (slotless, MAP)
    registers: int = 0  # extra learned tokens that pooling ignores
    dropout: float = 0.0  # SPEC 1.3: after positions, attention, GELU and the second MLP layer
    drop_path: float = 0.0  # stochastic depth of the last block, rising linearly from 0
    head_bias: float = 0.0  # initial; -10 for sigmoid losses on ImageNet-21k and JFT (SPEC 1.5)
    activation: str = "gelu_tanh"  # gelu_tanh: the paper's code; gelu: with erf, as in timm; quick_gelu: CLIP; swiglu
    norm_eps: float = 1e-6  # added to the variance in LayerNorm
    stem: tuple[int, ...] | None = None  # units per stage of a ResNet before the patches; None: plain ViT
    stem_width: int = 64  # channels of the stem's root
    pixel_mean: tuple[float, float, float] = HALF  # of R, G and B from 0 to 1: pixels become (pixel - mean) / std
    pixel_std: tuple[float, float, float] = HALF  # of R, G and B; with the default mean and std, pixels are -1 to 1
    # SWITCHES: departures of later ViTs. With the defaults, none of them adds a parameter or takes time.
    patch_bias: bool = True  # whether the patch embedding has a bias (CLIP: no)
    patch_norm: bool = False  # norm of the patch embeddings, before positions and prefix tokens (AIMv2)
    pre_norm: bool = False  # norm of all tokens before the first block (CLIP, Perception Encoder)
    last_norm: str = "tokens"  # norm of all tokens before pooling; pooled: of the pooled vector (MAE, EVA-02); none
    norm: str = "layer"  # kind of every norm: LayerNorm, or RMSNorm, which has no mean and no bias (AIMv2)
    layer_scale: float | None = None  # initial factor of both residual branches, learned for each channel (DINOv2)
    qk_norm: bool = False  # norm of each head's queries and keys (ViT-22B)
    attention_norm: bool = False  # norm before the attention's output projection (BEiT-3, EVA-02-CLIP)
    mlp_norm: bool = False  # norm of the MLP's hidden vector (BEiT-3, EVA-02)
    qkv_bias: str = "all"  # which of queries, keys and values have a bias; qv: no keys (BEiT, EVA-02, DINOv3); none
    block_bias: bool = True  # whether the other linear layers of the blocks have biases (AIMv2: no)
    rope: str = "none"  # rotary positions in every attention, a row of ROPES; may be combined with a table
    rope_grid: tuple[int, int] | None = None  # patch grid to which coordinates are scaled (EVA-02: that of pretraining)
    pool_prefix: bool = False  # whether pooling by mean or MAP reads the registers too (Perception Encoder)
    map_heads: int | None = None  # attention heads of the MAP head; None: those of a block
    map_mlp: int | None = None  # hidden width of the MAP head's MLP; None: that of a block
    stem_epsilons: str = "original"  # added to variances in the stem: the original's, or those of timm

    family = "vit"
    label = "ViT"  # in messages
    head_fields = ("classes", "pool", "representation")  # if one of these differs, the head is not transferred
    absent: ClassVar[Mapping[str, object]] = {}  # fields that this family lacks, with the value that a recipe may give

    def __post_init__(self) -> None:
        # Complete abbreviated values first, because the checks below compute with pairs. A frozen dataclass can only be
        # set this way.
        object.__setattr__(self, "image_size", checks.pair("image_size", self.image_size))
        object.__setattr__(self, "patch", checks.pair("patch", self.patch))
        if self.positions_at is None and self.positions == "relative":
            object.__setattr__(self, "positions_at", "every")
        elif self.positions_at is None:
            object.__setattr__(self, "positions_at", "stem")

        if self.rope_grid is not None:
            object.__setattr__(self, "rope_grid", checks.pair("rope_grid", self.rope_grid))

        checks.choices(self, CHOICES)
        checks.at_least(self, 1, ("width", "depth", "mlp", "heads", "stem_width"))
        checks.at_least(self, 0, ("classes", "registers"))
        if self.stem is not None and not all(map(checks.is_integer, self.stem)):
            raise ValueError(f"stem must have at least one unit in each stage, found {self.stem}")
        checks.multiple("stem_width", self.stem_width, GROUPS, f"{GROUPS} groups")
        # A rate of 1 would drop everything, so 1 is excluded.
        for name in ("dropout", "drop_path"):
            rate = getattr(self, name)
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{name} must be in [0, 1), found {rate!r}")
        for name in ("norm_eps", "position_std", "layer_scale"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_default = name != "norm_eps" and value is None
            if not is_default and not (is_number and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value!r}")
        for name in ("pixel_mean", "pixel_std"):
            values = getattr(self, name)
            is_valid = len(values) == 3 and all(isinstance(value, int | float) for value in values)
            if not is_valid or not all(map(math.isfinite, values)) or (name == "pixel_std" and min(values) <= 0):
                raise ValueError(f"{name} must be three numbers for R, G and B, found {values!r}")
        for name in ("representation", "map_heads", "map_mlp"):
            if getattr(self, name) is not None:
                checks.at_least(self, 1, (name,))
        if self.pool != "map" and (self.map_heads, self.map_mlp) != (None, None):
            raise ValueError(f"map_heads and map_mlp require pool=map, found pool={self.pool}")
        if self.map_heads is not None:
            checks.multiple("width", self.width, self.map_heads, f"{self.map_heads} heads of the MAP head")
        checks.multiple("width", self.width, self.heads, f"{self.heads} heads")
        # Two axes, and two channels of each pair.
        if self.rope != "none":
            checks.multiple("channels of a head", self.width // self.heads, 4, "4 parts of a rotation")
        if self.rope_grid is not None and (self.rope == "none" or ROPES[self.rope][0] != "index"):
            raise ValueError(f"rope_grid requires a rope whose coordinates are patch indices, found rope={self.rope}")
        if self.pool_prefix and self.pool == "token":
            raise ValueError("pool_prefix requires pool=gap or map, found pool=token")
        if self.activation == "swiglu" and self.pool == "map":
            raise ValueError(
                "the MAP head does not support activation=swiglu; set pool=token or gap, or choose another activation"
            )
        # sincos2d has four parts: sin and cos of x and of y. learned2d has two: tables of x and of y.
        if self.positions == "sincos2d":
            checks.multiple("width", self.width, 4, "4 position parts")
        elif self.positions == "learned2d":
            checks.multiple("width", self.width, 2, "2 position parts")
        # Patches must cover the image exactly.
        for side, pixels, step in zip(("height", "width"), self.image_size, self.stride, strict=True):
            checks.multiple(f"image {side}", pixels, step, f"the patch stride {step}", "nearest image_size")

    def with_new_head(self) -> ViTConfig:
        """Return the config with a new head, without the tanh layer of pretraining (paper, 3.1)."""
        return replace(self, representation=None)

    @property
    def stride(self) -> tuple[int, int]:
        """Return the image pixels between neighbouring patches, (rows, columns)."""
        stem = stem_stride(self.stem)
        return self.patch[0] * stem, self.patch[1] * stem

    @property
    def grid(self) -> tuple[int, int]:
        """Return the rows and columns of the patch grid."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def prefix_tokens(self) -> int:
        """Return the number of tokens before the patches: the class token, if it is pooled, and the registers."""
        class_tokens = 1 if self.pool == "token" else 0
        return class_tokens + self.registers

    @property
    def position_slots(self) -> int:
        """Return the number of prefix tokens with a position embedding; 0 for a sincos table."""
        if self.class_slot and self.positions != "sincos2d":
            return self.prefix_tokens
        return 0


@dataclass(frozen=True)
class AxialConfig(ViTConfig):
    """The architecture of an Axial ViT (paper D.6), whose tokens form a 2-D grid.

    A class token or a register would have no place on the grid, so pooling is by mean or MAP.
    """

    pool: str = "gap"

    family = "axial"
    label = "axial ViT"  # in messages

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_tokens:
            raise ValueError(
                f"an Axial ViT has no prefix tokens; expected pool=gap or map and registers=0, found pool={self.pool} "
                f"and registers={self.registers}"
            )
        if self.positions == "relative" or self.rope != "none":
            raise ValueError(
                "an Axial ViT supports only absolute positions, which are added to the patches; expected rope=none and "
                f"no relative positions, found rope={self.rope} and positions={self.positions}"
            )


@dataclass(frozen=True)
class MaskedConfig(ViTConfig):
    classes: int = 0  # always 0: the prediction is the only head, whatever classes the data has
    target: str = "mean_color"  # mean_color: as reported; downsized: 4 x 4 colours; pixels: the whole patch
    corrupted: float = 0.5  # fraction of the patches
    masked: float = 0.8  # fraction of the corrupted patches replaced by the mask embedding
    swapped: float = 0.1  # fraction of them replaced by another patch of the image; the rest stays unchanged

    family = "masked"
    label = "masked ViT"  # in messages

    def __post_init__(self) -> None:
        # `config_of` passes a number of classes to every model; ignore it here instead of rejecting it.
        object.__setattr__(self, "classes", 0)
        super().__post_init__()
        # The loss reads tokens before pooling, so a MAP head or a tanh layer would never get a gradient.
        checks.choices(self, {"target": (*CELLS, "pixels"), "pool": ("token", "gap")})
        if self.representation:
            raise ValueError(
                f"a masked model has no classifier, so it cannot have representation={self.representation}; remove "
                "this field"
            )
        if self.last_norm == "pooled":
            raise ValueError(
                "a masked model does not pool its tokens; expected last_norm=tokens or none, found last_norm=pooled"
            )
        if not 0 < self.corrupted <= 1 or not 0 <= self.masked + self.swapped <= 1:
            raise ValueError(
                "corrupted must be in (0, 1], and masked + swapped must be in [0, 1]; found "
                f"corrupted={self.corrupted}, masked={self.masked} and swapped={self.swapped}"
            )
        # A single patch has no other patch to swap with.
        if math.prod(self.grid) < 2:
            raise ValueError(f"masked prediction needs at least 2 patches, found a grid of {self.grid}")

    @property
    def vit(self) -> ViTConfig:
        """Return the config of the ordinary ViT inside the masked model."""
        shared = {field.name: getattr(self, field.name) for field in fields(ViTConfig)}
        return ViTConfig(**shared)

    @classmethod
    def around(cls, source: ModelConfig) -> MaskedConfig:
        """Return the config of a masked model built around a plain ViT, whose head and pooling are not used.

        Raises ValueError with the reason if masked prediction cannot start from this model.
        """
        if isinstance(source, MaskedConfig):
            return source
        reason = ""
        if not isinstance(source, ViTConfig) or source.family != "vit":
            reason = f"models of family {source.family} do not process a sequence of patches"
        elif source.stem is not None:
            reason = "its ResNet stem shows the pixels of a patch to the patches around it"
        elif source.last_norm == "pooled":
            reason = "its last norm is that of the pooled vector (last_norm: pooled), and nothing is pooled"
        if reason or not isinstance(source, ViTConfig):
            raise ValueError(f"masked prediction cannot start from these weights: {reason}; expected a plain ViT")
        shared = {field.name: getattr(source, field.name) for field in fields(ViTConfig)}
        shared |= {"classes": 0, "representation": None, "map_heads": None, "map_mlp": None}
        if source.pool == "map":
            shared["pool"] = "gap"
        return cls(**shared)


@dataclass(frozen=True)
class BiTConfig:
    """The architecture of a BiT ResNet; the defaults are BiT-R50x1."""

    image_size: tuple[int, int] = (224, 224)  # height, width in pixels; a single number means a square
    classes: int = 1000  # 0: no head
    units: tuple[int, ...] = UNITS[50]  # bottleneck units of each stage
    width: int = 64  # channels of the root: 64 times the width factor
    pool_padding: str = "zero"  # of the root's max-pool: zero (bit_pytorch, bit_jax) or -inf (big_vision)
    head_bias: float = 0.0  # initial

    family = "bit"
    label = "BiT ResNet"  # in messages
    head_fields = ("classes",)  # if one of these differs, the head is not transferred
    # Fields that a ResNet lacks. A recipe for weights of any family may set them to these values.
    absent: ClassVar[Mapping[str, object]] = {"representation": None, "dropout": 0.0, "drop_path": 0.0}

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", checks.pair("image_size", self.image_size))
        checks.choices(self, {"pool_padding": ("zero", "-inf")})
        checks.at_least(self, 0, ("classes",))
        checks.at_least(self, 1, ("width",))
        checks.multiple("width", self.width, GROUPS, f"{GROUPS} groups")
        if not self.units or not all(map(checks.is_integer, self.units)):
            raise ValueError(f"units must have at least one unit in each stage, found {self.units}")

    def with_new_head(self) -> BiTConfig:
        """Return the config with a new head; the head of a ResNet is a single layer, so nothing changes."""
        return self


ModelConfig = ViTConfig | BiTConfig  # AxialConfig and MaskedConfig are ViTConfigs
Config = TypeVar("Config", bound=ModelConfig)
# model.json contains the family's name: renaming a family makes saved weights unreadable.
CONFIGS: dict[str, type[ModelConfig]] = {
    "vit": ViTConfig,
    "bit": BiTConfig,
    "axial": AxialConfig,
    "masked": MaskedConfig,
}

# ------------------------------------------------------------------------------------------------ names, plain values


# The paper writes "ViT-B/16", so a size may begin with "ViT-". In the name of a hybrid, the number after the slash is
# the total stride, not a patch size (SPEC 1.6).
NAME = re.compile(
    r"BiT-R(?P<resnet>\d+)x(?P<factor>\d+)"
    r"|(?:(?P<kind>Axial|Masked)-|(?P<stem>R\d*)\+)?(?:ViT-)?(?P<size>[A-Za-z0-9-]+)/(?P<patch>\d+)"
)
NEARLY_A_SIZE = re.compile(
    r"(?:^|[-_ ])(tiny|small|base|large|huge|Ti|[SMBLHG])(?:_?patch|[-_ /])?(\d+)?(?:[-_ ]|$)", re.IGNORECASE
)
SPELT_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
VIT_KINDS: dict[str | None, type[ViTConfig]] = {  # by the prefix of the size in a name
    "Axial": AxialConfig,
    "Masked": MaskedConfig,
    None: ViTConfig,
}


def config_of(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: object) -> ModelConfig:
    """Return the config for a model name, with fields overridden by `config`.

    Raises ValueError if the name is unknown or a value is invalid.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        # Handles names such as S16, ViT-S, and timm's vit_small_patch16_224.
        close = NEARLY_A_SIZE.search(name)
        nearest = ""
        if close is not None:
            word = close[1].lower()
            nearest = f"; did you mean {SPELT_SIZES.get(word, word.title())}/{close[2] or 16}?"
        raise ValueError(
            f"{name} is not a model name{nearest}\n"
            "  expected a size and a patch size, such as B/16, R50+B/16, Axial-B/32 or Masked-B/16; or a ResNet, such "
            "as BiT-R50x1"
        )
    # The caller's fields come last in each merge, so that they override those of the name.
    caller_fields = {"image_size": image_size, "classes": classes, **config}
    if parts["resnet"]:
        # "BiT-R50x2" is a ResNet of 50 layers with doubled channels.
        layers = int(parts["resnet"])
        if layers not in UNITS:
            known = ", ".join(f"BiT-R{depth}" for depth in UNITS)
            raise ValueError(f"{parts[0]!r}: there is no ResNet with {parts['resnet']} layers; expected one of {known}")
        named: ConfigFields = {"units": UNITS[layers], "width": 64 * int(parts["factor"])}
        return checked(BiTConfig, {**named, **caller_fields})

    # "B/16", "Axial-B/32" or "R50+B/16", in which 16 is the total stride.
    size = parts["size"]
    if size not in SIZES:
        raise ValueError(f"{parts[0]!r}: unknown size {size!r}{did_you_mean(size, SIZES)}")
    width, depth, mlp, heads = SIZES[size]
    named = {"width": width, "depth": depth, "mlp": mlp, "heads": heads, "patch": int(parts["patch"])}
    if parts["stem"]:
        # STEMS gives the patch size on the stem's map for this total stride; usually it is 1.
        stem = (parts["stem"], int(parts["patch"]))
        if stem not in STEMS:
            known = ", ".join(f"{prefix}+{size}/{stride}" for prefix, stride in STEMS)
            raise ValueError(f"{parts[0]!r}: unknown stem or stride; expected one of {known}")
        named["stem"], named["patch"] = STEMS[stem]
    return checked(VIT_KINDS[parts["kind"]], {**named, **caller_fields})


def checked(kind: type[Config], values: Mapping[str, object]) -> Config:
    """Build a config from plain values; for an unknown field, raise ValueError suggesting the nearest name."""
    types = {field.name: field.type for field in fields(kind)}
    known = list(types)
    hashable: ConfigFields = {}
    for name, value in values.items():
        if name not in known and name in kind.absent and value == kind.absent[name]:
            continue
        if name not in known:
            raise ValueError(f"a model of kind {kind.label} has no field {name!r}{did_you_mean(name, known)}")
        if types[name] == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} must be a number, found {value}")
        if types[name] == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, found {value!r}")
        # JSON has no tuples. Configs are cache keys and must be hashable, so lists become tuples.
        hashable[name] = tuple(value) if isinstance(value, list) else value
    return kind(**hashable)


def to_dict(config: ModelConfig) -> ConfigFields:
    """Return the plain values of a config with its family's name, as stored in model.json.

    Disabled switches are omitted, so that a new switch does not change the files and stage keys of other models.
    """
    values = asdict(config)
    for name in (*SWITCHES, "pixel_mean", "pixel_std"):
        if name in values and values[name] == getattr(ViTConfig, name):
            del values[name]
    return {"family": config.family, **values}


def from_dict(values: Mapping[str, object]) -> ModelConfig:
    """Build the config from values returned by `to_dict`, even after a round trip through JSON."""
    config_fields = dict(values)
    family = config_fields.pop("family", None)
    if not isinstance(family, str) or family not in CONFIGS:
        raise ValueError(f"unknown model family {family!r}; expected one of {', '.join(CONFIGS)}")
    return checked(CONFIGS[family], config_fields)


def check_architecture(source: ModelConfig, target: ModelConfig) -> None:
    """Raise ValueError if weights of `source` cannot be transferred to `target`."""
    if isinstance(source, MaskedConfig) and not isinstance(target, MaskedConfig):
        source = source.vit
    elif isinstance(target, MaskedConfig) and not isinstance(source, MaskedConfig):
        # The masked model's own fields, such as its target, are free.
        source = MaskedConfig.around(source).vit
        target = target.vit
    # A difference without an effect on shapes, such as heads or epsilons, would load without an error and change the
    # computation. Therefore reject all differences outside FREE.
    if source.family != target.family:
        raise ValueError(f"weights of kind {source.label} cannot be transferred to a model of kind {target.label}")
    differences = []
    for field in fields(source):
        old_value = getattr(source, field.name)
        new_value = getattr(target, field.name)
        # With another kind of pooling, the head is new.
        is_of_pooling = field.name in ("map_heads", "map_mlp", "pool_prefix")
        if is_of_pooling and getattr(source, "pool", None) != getattr(target, "pool", None):
            continue
        # The initial value of an existing LayerScale no longer matters.
        if field.name == "layer_scale" and None not in (old_value, new_value):
            continue
        if old_value != new_value and field.name not in FREE:
            differences.append(f"{field.name}: {old_value!r} -> {new_value!r}")
    if differences:
        shown = "; ".join(differences)
        raise ValueError(f"weights cannot be transferred to a different architecture: {shown}")


def keeps_head(source: ModelConfig, target: ModelConfig, new_head: bool) -> bool:
    """Return whether a transfer keeps the source's head, and therefore the meaning of its outputs."""
    if new_head or source.family != target.family:
        return False
    return all(getattr(source, name) == getattr(target, name) for name in source.head_fields)
