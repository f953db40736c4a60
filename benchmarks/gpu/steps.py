"""Time a training step of our, timm's and transformers' models against a matrix product (benchmarks/train_step.py).

Contenders run one after the other, because five models of H/14's size do not fit on one GPU. Each alternates with a
matrix product of the model's shape, so that a change of the GPU's clock affects both. Therefore read "of the product's
speed", and "time / ours", which is the ratio of two of these values.
"""

import gc
import statistics

import torch

import models
from benchmarks import train_step
from benchmarks.gpu.parts import Context, Row
from pipeline.monitoring.telemetry import peak_flops

CONTENDERS = ["ours, compiled", "timm, compiled", "ours", "transformers", "timm"]


def time_models(context: Context, model: str) -> None:
    """Report a row for each contender: seconds per step, and the step's share of the matrix product's speed."""
    torch.set_num_threads(1)
    setting = train_step.Setting(model, torch.bfloat16, context.size.models[model], context.device)
    step_flops = models.training_flops(models.config_of(model), setting.batch)
    _, product_flops = train_step.product_step(setting)
    for name in CONTENDERS:
        row: Row = {"model": model, "images": setting.batch, "code": name}
        try:
            seconds = train_step.measure(setting, [name], context.size.rounds)
        except ImportError as error:
            row["note"] = f"not measured: {error.name or error} is not installed"
        except Exception as error:  # out of memory, for example: the others are still worth measuring
            row["note"] = f"{type(error).__name__}: {error}"[:300]
        else:
            shares = []
            for step_s, product_s in zip(seconds[name], seconds["product"], strict=True):
                shares.append(step_flops / step_s / (product_flops / product_s))
            row["step_s"] = statistics.median(seconds[name])
            row["of_product"] = statistics.median(shares)
            row["of_peak"] = share_of_peak(step_flops, row["step_s"], context.device)
        context.report(**row)
        release_memory(context.device)


def share_of_peak(flops: float, seconds: float, device: str) -> float | None:
    """Return the share of the GPU's peak that a step's matrix products reached; None if the peak is unknown."""
    peak = peak_flops(torch.device(device))
    if peak is None:
        return None
    return flops / seconds / peak


def release_memory(device: str) -> None:
    """Release the device memory of the last contender."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
