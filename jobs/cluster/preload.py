"""What the fork server imports once for all workers that it will fork (processes.py), and none of them anew.

Importing must start no thread and touch no GPU: neither outlives a fork.
"""

# Torch's optimizers import the first at their first step; the second writes event files, in rank 0.
import torch._dynamo
import torch.utils.tensorboard

from pipeline.process_group import import_deepspeed

__all__ = ["import_deepspeed", "torch"]

import_deepspeed()
