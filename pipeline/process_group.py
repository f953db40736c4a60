"""The process group in which the workers of an attempt train together: joined once, with a time-out that holds.

In:  RANK, WORLD_SIZE, LOCAL_RANK and the address of rank 0 in the environment; under Ray Train a group that is there
Out: torch's and DeepSpeed's default group, and this worker's device
"""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def join_group(timeout_s: float) -> torch.device:
    """Join (or adopt) the process group and return this worker's device; NCCL on GPUs, gloo otherwise.

    The time-out holds for every later group too: DeepSpeed makes groups of its own and does not pass it on.
    """
    # DeepSpeed looks for an accelerator when it is imported; the import waits until the variable is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On CPUs DeepSpeed compiles this operator at start (81 CPU-seconds) and never uses it. A build that was killed
    # leaves a lock on which every later run hangs; one that loads leaves 69 MB a worker behind in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    # A collective that a worker never joins must fail in time; gloo's own time-out is 30 minutes.
    timeout = timedelta(seconds=timeout_s)
    # Under Ray Train the group is there already; plain processes make it here.
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)
    give_later_groups_the_timeout(timeout)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return device


def give_later_groups_the_timeout(timeout: timedelta) -> None:
    """Make `dist.new_group` use this time-out where its caller names none."""
    original = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        options.setdefault("timeout", timeout)
        return original(*args, **options)

    dist.new_group = new_group
