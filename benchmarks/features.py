"""Measure the memory of a data set's features per worker: gathered on all workers, as before, or streamed to rank 0.

    OMP_NUM_THREADS=1 python benchmarks/features.py [--worlds 1 2 4] [--samples 60000] [--width 2048]

The model is a table lookup, so that only the features need memory. The result is the growth of a worker's anonymous
memory (the kernel can drop file pages) from before the pass to its peak, in units of the size of the feature set; also
for kNN, which compares part of the set with the full set.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.evaluation import EvaluationBatch
from data.index.index import Index
from data.index.shard import Shard
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.probes import Inputs
from pipeline.evaluation.protocols import NeighboursConfig
from pipeline.extras.probes import knn
from pipeline.process_group import join_group

BATCH = 64
QUERIES = 2048  # number of query rows for kNN


class Table(nn.Module):
    """Model that looks up features by the first pixel of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.randn(256, width, generator=torch.Generator().manual_seed(0))

    def features(self, images: Tensor) -> Tensor:
        return self.table[((images[:, 0, 0, 0] + 1) * 127.5).round().long()]


class Peak:
    """Context manager that records the peak of this process's anonymous memory, in bytes."""

    def __enter__(self) -> "Peak":
        self.before = self.now()
        self.most = self.before
        self.is_open = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        self.thread.join()

    def watch(self) -> None:
        while self.is_open:
            self.most = max(self.most, self.now())
            time.sleep(0.002)

    def now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise OSError("no RssAnon in /proc/self/status")


def batches(samples: int, rank: int, world: int) -> Iterator[EvaluationBatch]:
    """Yield this rank's batches of a set in one shard."""
    of_rank = ceil(ceil(samples / BATCH) / world)
    for number in range(rank * of_rank, (rank + 1) * of_rank):
        rows = torch.arange(number * BATCH, (number + 1) * BATCH)
        mask = rows < samples
        images = (rows % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 1, 1)
        ids = torch.where(mask, rows, -1)
        yield EvaluationBatch(images, rows[:, None] % 10, torch.stack([torch.zeros_like(ids), ids], 1), mask, ())


def gathered(model: Table, samples: Iterator[EvaluationBatch]) -> Tensor:
    """Gather the features of all workers as objects on every worker, as in an earlier implementation."""
    features_here = []
    for batch in samples:
        rows = model.features(batch.images.float() / 127.5 - 1)
        features_here.append(rows.float().cpu()[batch.mask])
    part = torch.cat(features_here)
    parts: list[Any] = [part] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


def measure(task: dict[str, Any]) -> list[dict[str, float]]:
    """Return the memory growth of each worker, in units of the feature set."""
    join_group(600.0)
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Table(task["width"])
    size = task["samples"] * task["width"] * 4
    part = batches(task["samples"], rank, world)
    grown = {}
    began = time.monotonic()
    with Peak() as peak:
        if task["way"] == "gathered":
            result = gathered(model, part)
            assert len(result) == task["samples"]
        else:
            index = Index((Shard("a.tar", task["samples"], 0, ""),), 10, (), "", "", Path())
            store = FeatureStore(index, Path(task["folder"]))
            collect(model, store.watching(part), store, torch.float32, torch.device("cpu"))
    grown["pass"] = (peak.most - peak.before) / size
    grown["MiB"] = (peak.most - peak.before) / 2**20
    grown["seconds"] = time.monotonic() - began
    if task["way"] == "streamed":
        with Peak() as peak:
            if rank == 0:
                few = FeatureStore(index, Path(task["folder"]))
                rows = store.rows[:QUERIES]
                few.keep(torch.from_numpy(rows), torch.zeros(len(rows), 1).long(), store.features(rows), None)
                inputs = Inputs("knn", store, few, few.labels, torch.device("cpu"), lambda: None)
                knn(inputs, NeighboursConfig((20,)))
        grown["knn"] = (peak.most - peak.before) / size
    all_grown: list[Any] = [None] * world
    dist.all_gather_object(all_grown, grown)
    dist.destroy_process_group()
    return all_grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    print(f"feature set: {options.samples * options.width * 4 / 2**20:.0f} MiB")
    with tempfile.TemporaryDirectory() as folder:
        for world in options.worlds:
            for way in ("gathered", "streamed"):
                task = {"way": way, "samples": options.samples, "width": options.width, "folder": folder}
                cluster = ClusterConfig(workers=world, backend="processes")
                name = f"{way}-{world}"
                grown: Any = run_worker_group(measure, task, cluster=cluster, name=name, directory=Path(folder))
                shown = []
                for rank, of_rank in enumerate(grown):
                    shown.append(f"rank {rank}: " + " ".join(f"{key} {value:.3f}" for key, value in of_rank.items()))
                print(f"{world} workers, {way}:  " + "  |  ".join(shown), flush=True)


if __name__ == "__main__":
    # Import this module under its name, because workers cannot import functions from `__main__`.
    from benchmarks import features

    features.main()
