"""Whether a resume repeats the bits of a run on this device, and the kernels that make a GPU repeat them.

1. `use_deterministic_kernels` is called in exact mode on a GPU, before CUDA starts.
2. `resume_line` says in the line that opens an attempt what a resume repeats:

    In:  Conditions(is_gpu=True, world=2, zero=2, backend="nccl")
    Out: "a resume may differ in the last bits: GPU kernels may add in any order, NCCL chooses the order of its sums"

What torch 2.13 does under `torch.use_deterministic_algorithms(True)`, by its sources and documentation:
- Flash attention adds dQ in a fixed order, and memory-efficient attention no longer splits the keys
  (aten/src/ATen/native/transformers/cuda/attention_backward.cu). Neither does so with `warn_only=True`.
- cuDNN's attention is refused (check_cudnn_deterministic in sdp_utils.cpp).
- Inductor chooses no kernel by its time (`torch._inductor.config.deterministic`).
- cuBLAS must have CUBLAS_WORKSPACE_CONFIG, or torch raises at the first matrix product.
"""

import os
from dataclasses import dataclass

import torch

from data.errors import ConfigError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")  # with which cuBLAS repeats its bits; the first needs 32 MiB and is the faster one


def use_deterministic_kernels() -> None:
    """Have torch compute with kernels that give the same bits every time; call it before CUDA starts.

    An operator that has no such kernel raises at its first use. Raises ConfigError if the environment forbids it.
    """
    value = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_VALUES[0])
    if value not in CUBLAS_VALUES:
        raise ConfigError(
            f"{CUBLAS_VARIABLE} is {value!r}: with it cuBLAS may add in another order each time\n"
            f"  expected {' or '.join(CUBLAS_VALUES)}, because exact_parts promises the same bits\n"
            f"  type unset {CUBLAS_VARIABLE}, or cluster.environment.{CUBLAS_VARIABLE}={CUBLAS_VALUES[0]}"
        )
    torch.use_deterministic_algorithms(True)
    # Torch would fill every new tensor with NaN, which finds bugs and changes no bit of a correct program.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_cudnn_sdp(False)


# ------------------------------------------------------------------------ what a resume repeats


@dataclass(frozen=True)
class Conditions:
    """What the bits of a step depend on, besides the recipe's other keys, the data and the versions."""

    is_gpu: bool
    world: int  # workers
    zero: int  # ZeRO stage
    exact_parts: int = 0  # 0: plain mode
    is_compiled: bool = False
    decodes_on_gpu: bool = False
    pools: bool = False  # the model has a ResNet's max pooling
    backend: str = "gloo"  # over which the workers talk, or "nccl"


def doubts(now: Conditions) -> list[str]:
    """Return why a resume under the same conditions may differ in its last bits; nothing if it repeats every bit.

    On a GPU only what torch documents as deterministic is left out.
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
    """Return what has changed since the checkpoint was saved that changes the bits from there on."""
    # On CPUs exact mode has the same bits at every world and ZeRO stage. On GPUs that has not been measured: the stage
    # decides at which address a weight begins, and cuBLAS may choose its kernel by that.
    if now.exact_parts and not now.is_gpu:
        return []
    texts = []
    if before.world != now.world:
        texts.append(f"workers: {before.world} → {now.world}")
    if before.zero != now.zero:
        texts.append(f"ZeRO: {before.zero} → {now.zero}")
    return texts


def resume_line(now: Conditions, before: Conditions | None = None) -> str:
    """Return what a resume of this attempt repeats, and for an attempt that resumes, whether this one does.

    `before` are the conditions of the checkpoint that the attempt resumes from.
    """
    texts = []
    if before is not None:
        changed = changes(before, now)
        if changed:
            texts.append(f"the bits may differ from here on ({', '.join(changed)})")
    reasons = doubts(now)
    if reasons:
        texts.append(f"a resume may differ in the last bits: {', '.join(reasons)}")
    elif now.exact_parts and not now.is_gpu:
        texts.append(f"a resume with 1 to {now.exact_parts} workers on the same hardware repeats every bit")
    else:
        workers = "1 worker" if now.world == 1 else f"{now.world} workers"
        kernels = " (deterministic kernels)" if now.is_gpu else ""
        texts.append(f"a resume with {workers} at ZeRO {now.zero} on the same hardware repeats every bit{kernels}")
    return "; ".join(texts)
