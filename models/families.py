"""The families of models, and the types that stand for a config and for a module of any of them.

Another architecture is a file with its config and its module, and one entry in each of the three names here. A module
has `config`, `recomputed_blocks`, `features(images)` and `forward(images)`; its config is a frozen dataclass with
`family`, `image_size`, `classes`, `head_bias` and `feature_width`.
"""

from __future__ import annotations

from models.axial import AxialConfig, AxialViT
from models.masked import MaskedConfig, MaskedViT
from models.resnet import BiT, BiTConfig
from models.vit import ViT, ViTConfig

ModelConfig = ViTConfig | BiTConfig  # AxialConfig and MaskedConfig are ViTConfigs
Model = ViT | MaskedViT | BiT  # AxialViT is a ViT

# The family's name stands in every model.json: a name that changes here makes saved weights unreadable.
FAMILIES: dict[str, tuple[type[ModelConfig], type[Model]]] = {  # family: (config, module)
    "vit": (ViTConfig, ViT),
    "bit": (BiTConfig, BiT),
    "axial": (AxialConfig, AxialViT),
    "masked": (MaskedConfig, MaskedViT),
}
