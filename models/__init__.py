"""The networks of the paper and the weights that go in and out of them.

models.build("B/16", image_size=224, classes=1000)    a freshly initialised module
models.load(path), models.save(model, path, format)   a module from and to files of ours and of others
models.transfer(weights, source, target)              the same weights for another size or head
"""

from models import masked
from models.catalog import (
    Model,
    ModelConfig,
    blocks,
    build,
    compile_blocks,
    config_of,
    decayed,
    from_config,
    from_dict,
    macs_of,
    parameters_of,
    to_dict,
    training_flops,
)
from models.positions import resize_positions
from models.transfer import TransferReport, check_architecture, keeps_head, transfer
from models.vit import ViT, ViTConfig
from models.weights.files import load, load_class_names, load_preprocessing, load_weights, save, save_weights
from models.weights.preprocessing import Preprocessing

__all__ = [
    "Model",
    "ModelConfig",
    "Preprocessing",
    "TransferReport",
    "ViT",
    "ViTConfig",
    "blocks",
    "build",
    "check_architecture",
    "compile_blocks",
    "config_of",
    "decayed",
    "from_config",
    "from_dict",
    "keeps_head",
    "load",
    "load_class_names",
    "load_preprocessing",
    "load_weights",
    "macs_of",
    "masked",
    "parameters_of",
    "resize_positions",
    "save",
    "save_weights",
    "to_dict",
    "training_flops",
    "transfer",
]
