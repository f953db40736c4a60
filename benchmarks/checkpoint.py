"""Measure checkpoint costs: ours against the raw disk, torch's DCP (async) and DeepSpeed, interleaved in one run.

    python benchmarks/checkpoint.py [--model S/16] [--workers 2] [--zero 2] [--rounds 10]
    python benchmarks/checkpoint.py --model B/16 --depth 24 --saves-only      (1 GB a worker)

Each contender runs once per round, in rotated order, on the same state. The tables show medians over the rounds, and
ratios to the raw disk (for saves, also to a raw write that bypasses the page cache). All workers start together, after
the disk has finished the work of the previous turn, and a measurement ends when the last worker is done.

Saves. Raw: the same bytes written from memory with fsync, through the page cache and, like ours, bypassing it. Ours,
loop blocked: the copy to host memory, and the commit after all files are written; until durable: until the folder is
renamed and fsynced, after an fsync of the metrics, with nothing else running; until the old one is deleted: including
the deletion of the superseded checkpoint, for which training does not wait. DCP: its async_save, which includes fsync.
DeepSpeed blocks during the whole save, without fsync and digests; one more row adds the fsync.

Loads, once from disk (after evicting the files from the page cache) and once from the page cache. Raw: read a worker's
file into existing memory. Ours: choose the checkpoint, and fill master weights and moments with verified data; then
also gather the compute weights from all workers. "As before": rank 0 reads and hashes every file while the others wait,
and then all workers load.

Changed world size: the number of files that a worker opens, and the bytes that it hashes, if a different number of
workers has saved the checkpoint.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import models
from data.files import write_durably
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints import restore
from pipeline.checkpoints.manifest import Manifest, committed, read_manifest
from pipeline.checkpoints.reader import Reader, verify
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import Chosen, checkpoints_in
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group
from pipeline.training_config import SavingConfig

CHANGES = ((2, 1), (1, 2), (2, 4))  # (number of saving workers, number of loading workers)
Rows = dict[str, list[float]]  # seconds of every round, by row
Turn = TypeVar("Turn")


class Contenders:
    """Two engines with the same state, and the files that they write; every turn is collective."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.folder = Path(task["folder"])
        self.rank = dist.get_rank()
        self.engine = engine_of(task)
        self.theirs = engine_of(
            task
        )  # separate, because DeepSpeed's load removes the links with which ours finds its fragments
        quiet = Telemetry(self.folder, 1, 1)  # rank 1 does not write any records
        self.metrics = self.folder / "metrics.jsonl"  # fsynced by every save of ours, as in a run
        if self.rank == 0:
            self.metrics.touch()
        phases = Phases(self.folder, self.rank, 600.0)
        ours = checkpoints_in(self.folder / "ours")
        self.saver = Saver(ours, quiet, phases, SavingConfig(keep=2, keep_every=0, max_failed_saves=1))
        self.rows: Rows = {}
        self.number = 0  # number of the round

    def settle(self) -> None:
        """Flush the disk, so that the space of deleted files is freed, too."""
        dist.barrier()
        if self.rank == 0:
            os.sync()
        dist.barrier()

    @contextmanager
    def timed(self, row: str) -> Iterator[None]:
        """Time a block from its common start until all workers have finished."""
        dist.barrier()
        began = time.monotonic()
        yield
        dist.barrier()
        self.add(row, time.monotonic() - began)

    def add(self, row: str, seconds: float) -> None:
        """Record a duration, except in the first round, which warms up caches and allocators."""
        if self.number:
            self.rows.setdefault(row, []).append(seconds)

    # -------------------------------------------------------------------- saves

    def save_raw(self) -> None:
        """Write the bytes of our last save, which are still in memory."""
        path = self.folder / f"raw-{self.rank}"
        path.unlink(missing_ok=True)
        self.settle()
        with self.timed("raw write and fsync"), open(path, "wb") as file:
            file.write(self.saver.snapshot.numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def save_past_the_cache(self) -> None:
        """Write the same bytes in the same way as our files, but without digests and commit."""
        path = self.folder / f"past-{self.rank}"
        path.unlink(missing_ok=True)
        self.settle()
        with self.timed("raw write past the page cache and fsync"):
            write_durably(path, self.saver.snapshot.numpy().data)

    def save_ours(self) -> None:
        """Save like the training loop."""
        manifest = Manifest(self.number, 0, 0, "", 1, dist.get_world_size(), self.engine.zero, {}, "", "")
        self.settle()
        if self.rank == 0:
            with open(self.metrics, "a") as file:  # a record of a hundred steps, not flushed yet
                file.write(json.dumps({"step": self.number, "losses": [1 / 3] * 100, "norms": [2 / 3] * 100}) + "\n")
        dist.barrier()
        began = time.monotonic()
        self.saver.begin(self.engine.fragments(), manifest)
        blocked = time.monotonic() - began
        while not self.saver.written:
            time.sleep(0.001)  # the loop would train here until all workers have written
        dist.barrier()
        commit = time.monotonic()
        self.saver.finish(manifest.step)
        self.add("ours, loop blocked", blocked + time.monotonic() - commit)
        dist.barrier()
        self.add("ours, until durable", time.monotonic() - began)
        self.saver.wait_for_deleting()
        dist.barrier()
        self.add("ours, until the old one is deleted", time.monotonic() - began)

    def save_dcp(self) -> None:
        """Save the same fragments with torch's DCP, which copies them and writes in a thread."""
        folder = self.folder / "dcp"
        self.remove(folder)
        self.settle()
        began = time.monotonic()
        written = dcp.async_save(self.dcp_state(), checkpoint_id=folder)
        self.add("DCP async, loop blocked", time.monotonic() - began)
        written.result()
        dist.barrier()
        self.add("DCP async, until written", time.monotonic() - began)

    def dcp_state(self) -> dict[str, torch.Tensor]:
        """Return this worker's fragments under unique names, because DCP writes each tensor name only once."""
        state = {}
        for fragment in self.engine.fragments():
            for kind, view in fragment.tensors.items():
                state[f"{self.rank}|{fragment.name}|{kind}"] = view.detach()
        return state

    def save_deepspeed(self) -> None:
        """Save with DeepSpeed, and then fsync its files."""
        folder = self.folder / "deepspeed"
        self.remove(folder)
        self.settle()
        began = time.monotonic()
        self.theirs.engine.save_checkpoint(str(folder), tag="last")
        dist.barrier()
        self.add("DeepSpeed, loop blocked", time.monotonic() - began)
        for path in (folder / "last").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        dist.barrier()
        self.add("DeepSpeed and fsync", time.monotonic() - began)

    def remove(self, folder: Path) -> None:
        """Delete the files of the previous round."""
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    # -------------------------------------------------------------------- loads

    def load_raw(self, where: str) -> None:
        """Read this worker's file from our checkpoint into existing memory."""
        path = committed(self.folder / "ours")[0] / f"rank-{self.rank:05d}.safetensors"
        memory = memoryview(bytearray(path.stat().st_size))
        with self.timed(f"raw read, {where}"), open(path, "rb", buffering=0) as file:
            position = 0
            while length := file.readinto(memory[position:]):
                position += length

    def load_ours(self, where: str) -> None:
        """Choose and load a checkpoint as at the start of training."""
        folder = self.folder / "ours"
        refresh = self.engine.state.refresh

        def note_and_refresh() -> None:
            dist.barrier()
            self.add(f"ours, all read, verified and filled in, {where}", time.monotonic() - began)
            refresh()

        self.engine.state.refresh = note_and_refresh  # type: ignore[method-assign]
        with self.timed(f"ours, and the weights gathered, {where}"):
            began = time.monotonic()
            checkpoints = checkpoints_in(folder)
            chosen = restore.choose_together(checkpoints, 1, print)
            assert chosen is not None
            restore.load_together(self.engine.load, checkpoints, chosen, 1, print)
        self.engine.state.refresh = refresh  # type: ignore[method-assign]

    def load_as_before(self, where: str) -> None:
        """Verify every file in rank 0 while the others wait, then load."""
        folder = committed(self.folder / "ours")[0]
        with self.timed(f"ours as before, {where}"):
            if self.rank == 0:
                verify(folder)
            dist.barrier()
            manifest = read_manifest(folder)
            chosen = Chosen(folder.name, folder, manifest)
            restore.load_together(self.engine.load, checkpoints_in(folder.parent), chosen, 1, print)

    def load_dcp(self, where: str) -> None:
        """Load into the same tensors with DCP."""
        state = self.dcp_state()
        with self.timed(f"DCP load, {where}"):
            dcp.load(state, checkpoint_id=self.folder / "dcp")

    def load_deepspeed(self, where: str) -> None:
        """Load DeepSpeed's own checkpoint with DeepSpeed."""
        with self.timed(f"DeepSpeed load, {where}"):
            self.theirs.engine.load_checkpoint(str(self.folder / "deepspeed"), tag="last")

    def prepare(self, where: str) -> None:
        """Evict all files from the page cache, or read them into it."""
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    prepare_file(path, where)


def prepare_file(path: Path, where: str) -> None:
    """Evict a flushed file from the page cache, or read it into the cache."""
    with open(path, "rb") as file:
        if where == "page cache":
            while file.read(1 << 20):
                pass
        else:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def engine_of(task: dict[str, Any]) -> Engine:
    """Return an engine whose optimizer state is allocated."""
    changes = {"depth": task["depth"]} if task["depth"] else {}
    config = models.config_of(task["model"], 224, 1000, **changes)
    model = models.from_config(config, torch.Generator().manual_seed(0))
    settings = deepspeed_config(
        zero=task["zero"], precision="fp32", micro_batch=1, accumulation=1, clip=1.0, user_file=None
    )
    return Engine(model, models.decayed_parameters(model), OptimConfig(), settings)


def rotated(turns: list[Turn], number: int) -> list[Turn]:
    """Rotate the turns, so that a different one is first in each round."""
    first = number % len(turns)
    return turns[first:] + turns[:first]


def interleave(task: dict[str, Any]) -> dict[str, Any]:
    """Run all contenders in turn, and return one worker's times by row."""
    join_group(600)
    logging.disable(logging.WARNING)
    contenders = Contenders(task)
    saves = [
        contenders.save_ours,
        contenders.save_raw,
        contenders.save_past_the_cache,
        contenders.save_dcp,
        contenders.save_deepspeed,
    ]
    places = () if task["saves_only"] else ("disk", "page cache")
    for number in range(task["rounds"] + 1):
        contenders.number = number
        # The first round starts with ours, which allocates the memory that the raw write uses.
        for save in rotated(saves, number):
            save()
        for where in places:
            loads = [
                contenders.load_raw,
                contenders.load_ours,
                contenders.load_as_before,
                contenders.load_dcp,
                contenders.load_deepspeed,
            ]
            for load in rotated(loads, number):
                contenders.prepare(where)
                load(where)
    size = sum(path.stat().st_size for path in committed(contenders.folder / "ours")[0].iterdir())
    return {"rows": contenders.rows, "MB": size / 1e6}


def save_once(task: dict[str, Any]) -> None:
    """Save one checkpoint with the current number of workers."""
    join_group(600)
    Contenders(task).save_ours()


def load_and_count(task: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Load a checkpoint; return, for each worker, the number of files opened and the megabytes read and hashed."""
    join_group(600)
    engine = engine_of(task)
    folder = committed(Path(task["folder"]) / "ours")[0]
    share = (dist.get_rank() + 0.5) / dist.get_world_size()
    reader = Reader(folder, read_manifest(folder).files, share)
    engine.restore(reader)
    needed = 0
    for fragment in engine.fragments():
        needed += sum(view.nbytes for view in fragment.tensors.values())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (len(reader.opened), needed / 1e6, reader.hashed_bytes / 1e6))
    return everybody


def in_a_group(function: Callable[[dict[str, Any]], Any], workers: int, task: dict[str, Any]) -> Any:
    """Run a function in a process group of `workers` processes, and return the result of rank 0."""
    cluster = ClusterConfig(workers=workers, backend="processes")
    return run_worker_group(function, task, cluster=cluster, name=function.__name__, directory=Path(task["folder"]))


def print_table(rows: Rows, kind: str, *bare_rows: str) -> None:
    """Print the rows of one kind, with their ratios to each raw-disk row."""
    heads = "".join(f" ratio to {bare} |" for bare in bare_rows)
    print(f"\n| {kind} | median s | min | max |{heads}\n|---|--:|--:|--:|{'--:|' * len(bare_rows)}")
    for row, seconds in rows.items():
        line = f"| {row} | {statistics.median(seconds):.3f} | {min(seconds):.3f} | {max(seconds):.3f} |"
        for bare in bare_rows:
            # Use the median of the per-round ratios, because the speed of a shared disk varies between rounds.
            ratios = [ours / raw for ours, raw in zip(seconds, rows[bare], strict=True)]
            line += f" {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) |"
        print(line)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--depth", type=int, default=0, help="number of blocks; by default that of the model")
    parser.add_argument("--saves-only", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = in_a_group(interleave, options.workers, {**vars(options), "folder": folder})
    print(f"{options.model}, {outcome['MB']:.0f} MB, {options.workers} workers, ZeRO {options.zero}")
    rows: Rows = outcome["rows"]
    of_disk = {row: seconds for row, seconds in rows.items() if row.endswith(", disk")}
    of_cache = {row: seconds for row, seconds in rows.items() if row.endswith(", page cache")}
    of_saves = {row: seconds for row, seconds in rows.items() if row not in of_disk | of_cache}
    print_table(of_saves, "save", "raw write past the page cache and fsync", "raw write and fsync")
    if options.saves_only:
        return
    print_table(of_disk, "load", "raw read, disk")
    print_table(of_cache, "load", "raw read, page cache")

    print("\n| saved by | loaded by | files opened, each worker | MB it reads | MB it hashes |\n|---|---|---|---|---|")
    for before, after in CHANGES:
        with tempfile.TemporaryDirectory() as folder:
            task = {**vars(options), "folder": folder}
            in_a_group(save_once, before, task)
            counts = in_a_group(load_and_count, after, task)
        opened, needed, hashed = zip(*counts, strict=True)
        cells = [", ".join(f"{number:.0f}" for number in numbers) for numbers in (opened, needed, hashed)]
        print(f"| {before} | {after} | {' | '.join(cells)} |")


if __name__ == "__main__":
    # Import this module under its own name, because workers cannot find functions of `__main__`.
    from benchmarks import checkpoint

    checkpoint.main()
