"""What the workers of `jobs calibrate` have reported, put together into one calibration; of several nodes the slowest.

In:  by world what rank 0 of the worker group has returned (pipeline/plan/measure.py)
Out: a pipeline.plan.calibration.Calibration
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jobs.cluster_config import ClusterConfig
from pipeline.plan.calibration import Calibration, Hardware, Storage
from pipeline.plan.engine_cost import EngineTime
from pipeline.plan.operations import Operation
from pipeline.preflight.machine import cores, processor
from pipeline.versions import package_versions

Report: TypeAlias = Mapping[str, Any]  # of one worker, from JSON


class Computing(NamedTuple):
    """What the operators of one precision take on a node, its workers all at once."""

    operations: list[tuple[Operation, float]]  # medians over the workers, in seconds
    call_s: float  # of a call beside its operator
    at_once: int  # workers that computed
    ratio: float  # how many times as long as a worker alone

    @property
    def total_s(self) -> float:
        """Return the seconds of one call of each operator."""
        return sum(seconds for _, seconds in self.operations)


def put_together(
    reports: Mapping[int, Mapping[str, Any]], cluster: ClusterConfig, load: float, folder: str
) -> Calibration:
    """Make a calibration of the reports of all worker groups, by world; `folder` is where storage was measured."""
    workers: Sequence[Report] = reports[max(reports)]["workers"]
    nodes = by_node(workers)
    by_precision = slowest(nodes)
    engines = []
    for report in reports.values():
        # All workers have the same numbers: those of the slowest.
        engines += [EngineTime(**engine_time) for engine_time in report["workers"][0]["engines"]]

    operations = {}
    call_s = {}
    together: dict[str, list[tuple[int, float]]] = {}
    for precision, (_node, computing) in by_precision.items():
        # A forecast begins with one worker alone, and slows it down by as many as will be beside it.
        operations[precision] = [(operation, s / computing.ratio) for operation, s in computing.operations]
        call_s[precision] = computing.call_s / computing.ratio
        together[precision] = [(computing.at_once, computing.ratio)] if computing.at_once > 1 else []
    slowest_node = list(by_precision.values())[-1][0]
    return Calibration(
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        driver=Hardware(processor(), cores(), "cpu"),
        worker=Hardware(*nodes[slowest_node][0]["hardware"]),
        versions=package_versions(),
        threads=workers[0]["threads"],
        gpus=cluster.gpus_per_worker,
        backend=cluster.backend,
        nodes=len(nodes),
        workers_on_a_node=max(len(node_workers) for node_workers in nodes.values()),
        operations=operations,
        call_s=call_s,
        together=together,
        engines=engines,
        collectives=collectives_of(workers[0]),
        copy_bytes_per_s=min(worker["copy_bytes_per_s"] for worker in workers),
        storage=storage_of(workers, folder),
        noise=statistics.median(spread(worker["probes"]) for worker in workers),
        load=round(load, 2),
    )


def by_node(workers: Sequence[Report]) -> dict[str, list[Report]]:
    """Return the reports of each node's workers."""
    nodes: dict[str, list[Report]] = {}
    for worker in workers:
        nodes.setdefault(worker["node"], []).append(worker)
    return nodes


def slowest(nodes: Mapping[str, Sequence[Report]]) -> dict[str, tuple[str, Computing]]:
    """Return by precision the node that computes slowest, and what it takes."""
    first_workers = next(iter(nodes.values()))
    by_precision = {}
    for precision in first_workers[0]["compute"]:
        by_name = {node: computing_of(workers, precision) for node, workers in nodes.items()}
        name = max(by_name, key=lambda node: by_name[node].total_s)
        by_precision[precision] = (name, by_name[name])
    return by_precision


def computing_of(workers: Sequence[Report], precision: str) -> Computing:
    """Return what one node's workers have found of a precision's operators."""
    # More workers than cores are there for the engine and the links alone.
    tables = [worker["compute"][precision] for worker in workers if "compute" in worker]
    seconds: dict[Operation, list[float]] = {}
    for table in tables:
        for name, dtype, flops, size, shape, took in table["operations"]:
            seconds.setdefault(Operation(name, dtype, flops, size, tuple(shape)), []).append(took)
    ratio = 1.0
    for worker in workers:
        if precision in worker["alone"]:
            at_once_s = statistics.median(table["passes_s"] for table in tables)
            ratio = max(at_once_s / worker["alone"][precision]["passes_s"], 1.0)
            break
    return Computing(
        operations=[(operation, statistics.median(times)) for operation, times in seconds.items()],
        call_s=statistics.median(table["call_s"] for table in tables),
        at_once=workers[0]["at_once"],
        ratio=ratio,
    )


def collectives_of(worker: Report) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """Return by world and name the seconds of each size; what the backend cannot do is left out."""
    worlds = {}
    for members, times in worker["collectives"].items():
        by_name = {}
        for name, points in times.items():
            if points:
                by_name[name] = [(int(size), seconds) for size, seconds in points]
        worlds[int(members)] = by_name
    return worlds


def storage_of(workers: Sequence[Report], folder: str) -> Storage | None:
    """Return the rates of the slowest node; None where none was measured."""
    rates = [worker["storage"] for worker in workers if worker.get("storage")]
    if not rates:
        return None
    return Storage(folder, min(written for written, _ in rates), min(read for _, read in rates))


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of times over their median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle
