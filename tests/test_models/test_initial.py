"""Initial parameter values, compared with the statistics of the original initialisers."""

import math

import models


def test_the_packed_projection_is_three_matrices():
    weight = models.build("mu/8", 16, width=256, heads=4).blocks[0].attention.qkv.weight
    bound = math.sqrt(6 / 512)  # of a (256, 256) matrix; packed, it would be sqrt(6 / 1024)
    for part in weight.chunk(3):
        assert 0.98 * bound < part.abs().max() <= bound
