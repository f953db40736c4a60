"""The checked models have the layers of the run's model: the same kinds, and one block of full width."""

import torch

import models
from pipeline.extras.engine_check.models import CLASSES, CheckedModel, checked_config


def kinds(model: torch.nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


def test_narrow_model_has_the_same_kinds_of_layers():
    for name, fields in (("B/16", {}), ("Ti/8", {"rope": "axial", "norm": "rms", "qk_norm": True}), ("BiT-R50x1", {})):
        config = models.config_of(name, 64, 10, **fields)
        narrow = checked_config(config, is_full_width=False)
        assert kinds(models.from_config(narrow)) == kinds(models.build(name, 64, 10, **fields))
        assert models.parameters_of(narrow) < 1_000_000


def test_full_width_block_has_the_parameters_of_a_block_of_the_model():
    config = models.config_of("S/16", 224, 1000)
    full = models.from_config(checked_config(config, is_full_width=True))
    (block,) = models.blocks(full).values()
    # Vaswani et al. 2017: 12 width² in the kernels; then the biases (9 width) and two norms (4 width).
    assert sum(p.numel() for p in block.parameters()) == 12 * 384**2 + 13 * 384


def test_every_parameter_gets_a_gradient():
    generator = torch.Generator().manual_seed(0)
    config = models.config_of("mu/8", 16, 10, layer_scale=1e-5)
    model = CheckedModel([checked_config(config, is_full_width=wide) for wide in (False, True)], generator)
    logits = model(*model.images(2, generator))
    assert logits.shape == (2, CLASSES)
    logits.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
