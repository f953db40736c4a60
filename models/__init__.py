"""The paper's models, and functions to load, save and transfer their weights.

models.build("B/16", image_size=224, classes=1000)    a freshly initialised model
models.load(path), models.save(model, path, format)   read and write our own and other libraries' weight files
models.transfer(weights, source, target)              adapt weights to another image size or head
"""

from importlib import import_module
from typing import TYPE_CHECKING

from models.configs import ModelConfig, ViTConfig, check_architecture, config_of, from_dict, keeps_head, to_dict
from models.weights.folder import Preprocessing, load_class_names, load_preprocessing

if TYPE_CHECKING:
    from models.catalog import (
        Model,
        blocks,
        build,
        compile_blocks,
        decayed_parameters,
        from_config,
        macs_of,
        parameters_of,
        training_flops,
    )
    from models.positions import resize_positions
    from models.vit import ViT
    from models.weight_transfer import TransferReport, transfer
    from models.weights.files import load, load_weights, save, save_weights

# These names import torch, which takes a second, so they are imported on first use. The block above is for mypy only.
# No module may have one of these names: after its import, the module would replace the function.
LATER = {
    "models.catalog": (
        "Model blocks build compile_blocks decayed_parameters from_config macs_of parameters_of training_flops"
    ),
    "models.positions": "resize_positions",
    "models.weight_transfer": "TransferReport transfer",
    "models.vit": "ViT",
    "models.weights.files": "load load_weights save save_weights",
}


def __getattr__(name: str) -> object:
    """Import a name listed in LATER on first use (PEP 562)."""
    for module, names in LATER.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'models' has no attribute {name!r}")
