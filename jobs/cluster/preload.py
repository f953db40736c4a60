"""What the fork server imports once for all workers that it will fork (fork_server.py), and none of them anew.

Importing must start no thread and touch no GPU: neither outlives a fork.
"""

# Torch imports the first, its compiler, and the second, which brings sympy, to work out shapes on the meta device, as
# every worker does when it makes its model and counts its products; the third writes event files, in rank 0.
import torch._dynamo
import torch.fx.experimental.symbolic_shapes
import torch.utils.tensorboard

from pipeline.engine.deepspeed import import_deepspeed

__all__ = ["import_deepspeed", "torch"]

import_deepspeed()
