"""What `jobs calibrate` says of a calibration: a line for each thing that was measured, with its unit."""

import statistics
from collections.abc import Sequence

from data.files import size_text
from pipeline.monitoring.telemetry import counted, milliseconds
from pipeline.plan.calibration import Calibration
from pipeline.plan.engine_cost import EngineTime
from pipeline.plan.operations import Operation
from pipeline.plan.rates import kind_of

SAID_ELEMENTS = 20_000_000  # of the models under the engine the largest is said


def lines(calibration: Calibration) -> list[str]:
    """Return what was measured, a line each, with units."""
    worker = calibration.worker
    said = [
        f"machine    {worker.processor}, {worker.cores} cores, {worker.device}; {counted(calibration.nodes, 'node')}, "
        f"{counted(calibration.threads, 'thread')} a worker"
    ]
    for precision, samples in calibration.operations.items():
        call_us = 1e6 * calibration.call_s[precision]
        said.append(f"{precision:10} {compute_text(samples)}; a call {call_us:.1f} µs beside")
        for workers, ratio in calibration.together[precision]:
            said.append(f"{precision:10} {workers} workers of a node at once take {ratio:.2f} × as long")
    for engine_time in calibration.engines:
        if engine_time.elements > SAID_ELEMENTS:
            said.append(engine_line(engine_time))
    for world, times in calibration.collectives.items():
        for name, points in times.items():
            parts = [f"{size_text(size)} in {milliseconds(seconds)}" for size, seconds in points]
            said.append(f"{name.replace('_', '-'):14} {counted(world, 'worker')}: {', '.join(parts)}")
    said.append(f"copying    {size_text(round(calibration.copy_bytes_per_s))}/s in memory")
    if calibration.storage is not None:
        storage = calibration.storage
        said.append(
            f"storage    {size_text(round(storage.write_bytes_per_s))}/s written, fsync included, "
            f"{size_text(round(storage.read_bytes_per_s))}/s read, in {storage.folder}"
        )
    for name, rate in calibration.decode.items():
        said.append(f"decode     {rate:,.0f} images a CPU-second of {name}")
    said.append(
        f"noise      one product's times through the measurement: interquartile range {calibration.noise:.0%} of the "
        f"median; load {calibration.load} when it began"
    )
    return said


def compute_text(samples: Sequence[tuple[Operation, float]]) -> str:
    """Return the rates of the kinds of operators: FLOP/s of what computes, bytes a second of what moves."""
    kinds: dict[str, list[tuple[Operation, float]]] = {}
    for operation, seconds in samples:
        name = kind_of(operation)[0]
        label = "others"
        if name in ("mm", "bmm"):
            label = "products"
        elif name.startswith("_scaled_dot_product"):
            label = "attention"
        elif name.startswith("convolution"):
            label = "convolutions"
        elif "norm" in name or "softmax" in name:
            label = "norms and softmax"
        kinds.setdefault(label, []).append((operation, seconds))
    parts = []
    for label in ("products", "attention", "convolutions", "norms and softmax", "others"):
        group = [(operation, seconds) for operation, seconds in kinds.get(label, []) if seconds > 1e-4]
        if not group:
            continue
        if label in ("products", "attention", "convolutions"):
            rates = sorted(operation.flops / seconds / 1e9 for operation, seconds in group)
            parts.append(f"{label} {statistics.median(rates):,.0f} GFLOP/s ({rates[0]:,.0f} … {rates[-1]:,.0f})")
        else:
            rates = sorted(operation.bytes / seconds / 1e9 for operation, seconds in group)
            parts.append(f"{label} {statistics.median(rates):.1f} GB/s")
    return ", ".join(parts)


def engine_line(engine_time: EngineTime) -> str:
    """Return what the engine adds to a small model."""
    kind = engine_time.precision
    if engine_time.optimizer != "adam":
        kind += f", {engine_time.optimizer}"
    if engine_time.exact:
        kind += ", exact"
    return (
        f"ZeRO {engine_time.zero}     {kind}, {counted(engine_time.world, 'worker')}: "
        f"{milliseconds(engine_time.step_s)} a step for {engine_time.elements / 1e6:.1f}M parameters in "
        f"{engine_time.tensors} tensors, {milliseconds(engine_time.micro_s)} a micro-batch more"
    )
