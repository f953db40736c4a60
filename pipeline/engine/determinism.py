"""Reports whether a resume is bitwise exact on this device, and selects deterministic kernels on a GPU.

1. `use_deterministic_kernels` is called in exact mode on a GPU, before CUDA is initialised.
2. `resume_line` returns an attempt's first log line, which says whether a resume would be bitwise exact:

    In:  Conditions(is_gpu=True, world=2, zero=2, backend="nccl")
    Out: "resuming may change the last bits: GPU kernels may add in any order, NCCL chooses the order of its sums"

Effects of `torch.use_deterministic_algorithms(True)` in torch 2.13, according to its source code and documentation:
- Flash attention adds dQ in a fixed order, and memory-efficient attention does not split the keys
  (aten/src/ATen/native/transformers/cuda/attention_backward.cu). With `warn_only=True` neither is the case.
- cuDNN's attention is rejected (check_cudnn_deterministic in sdp_utils.cpp).
- Inductor does not choose kernels by timing them (`torch._inductor.config.deterministic`).
- cuBLAS needs CUBLAS_WORKSPACE_CONFIG; otherwise torch raises at the first matrix product.
"""

import os
from dataclasses import dataclass

import torch

from data.errors import ConfigError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")  # with these values cuBLAS is deterministic; the first needs 32 MiB and is faster


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels; call this before CUDA is initialised.

    An operator without a deterministic kernel raises at its first use. Raises ConfigError if the environment forbids
    determinism.
    """
    value = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_VALUES[0])
    if value not in CUBLAS_VALUES:
        raise ConfigError(
            f"{CUBLAS_VARIABLE} is {value!r}: with this value, cuBLAS may sum in a different order each time\n"
            f"  expected {' or '.join(CUBLAS_VALUES)}, because exact_parts guarantees bitwise equal results\n"
            f"  run unset {CUBLAS_VARIABLE}, or set cluster.environment.{CUBLAS_VARIABLE}={CUBLAS_VALUES[0]}"
        )
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills every new tensor with NaN, which helps to find bugs but changes no bit of a correct program.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_cudnn_sdp(False)


# ------------------------------------------------------------------------ is resuming bitwise exact?


@dataclass(frozen=True)
class Conditions:
    """The conditions that affect the bits of a step, in addition to recipe keys, the data and package versions."""

    is_gpu: bool
    world: int  # number of workers
    zero: int  # ZeRO stage
    exact_parts: int = 0  # number of parts in exact mode; 0: plain mode
    is_compiled: bool = False
    decodes_on_gpu: bool = False
    pools: bool = False  # the model has a ResNet's max pooling
    backend: str = "gloo"  # communication backend of the workers, gloo or nccl


def doubts(now: Conditions) -> list[str]:
    """Return the reasons why a resume under the same conditions may change the last bits; an empty list if none apply.

    On a GPU, only operations that torch documents as deterministic are trusted.
    """
    if not now.is_gpu:
        return []
    reasons = []
    if not now.exact_parts:
        reasons.append("GPU kernels may add in any order")
    if not now.exact_parts and now.world > 1 and now.backend == "nccl":
        reasons.append("NCCL chooses the order of its sums")
    if now.is_compiled:
        reasons.append("compiled kernels have not been compared on a GPU")
    if now.decodes_on_gpu:
        reasons.append("the GPU decodes the images")
    if now.pools:
        reasons.append("max pooling may add in any order on a GPU")
    return reasons


def changes(before: Conditions, now: Conditions) -> list[str]:
    """Return the changes in conditions since the checkpoint was saved that may affect results bitwise."""
    # On CPUs exact mode gives the same bits at every world size and ZeRO stage. On GPUs this has not been measured: the
    # stage decides the address of a weight, and cuBLAS may choose its kernel by the address.
    if now.exact_parts and not now.is_gpu:
        return []
    texts = []
    if before.world != now.world:
        texts.append(f"workers: {before.world} → {now.world}")
    if before.zero != now.zero:
        texts.append(f"ZeRO: {before.zero} → {now.zero}")
    return texts


def resume_line(now: Conditions, before: Conditions | None = None) -> str:
    """Describe whether resuming this attempt would be bitwise exact and, for a resumed attempt, whether its start was.

    `before` holds the conditions stored in the checkpoint that the attempt resumed from.
    """
    texts = []
    if before is not None:
        changed = changes(before, now)
        if changed:
            texts.append(f"results may differ bitwise from here on ({', '.join(changed)})")
    reasons = doubts(now)
    if reasons:
        texts.append(f"resuming may change the last bits: {', '.join(reasons)}")
    elif now.exact_parts and not now.is_gpu:
        texts.append(f"resuming with 1 to {now.exact_parts} workers on the same hardware is bitwise exact")
    else:
        workers = "1 worker" if now.world == 1 else f"{now.world} workers"
        kernels = " (deterministic kernels)" if now.is_gpu else ""
        texts.append(f"resuming with {workers} at ZeRO {now.zero} on the same hardware is bitwise exact{kernels}")
    return "; ".join(texts)
