"""Measure the costs that grow with the number of workers or the length of a run, with files from many fake ranks.

    python -m benchmarks.scale                    # all, or some of them by name

- look: the driver's CPU time for one round of reports from the agents, and the size of the reports. Between rounds,
  every fake rank enters a new phase.
- metrics: the cost of `status` on a metrics.jsonl of a million steps.
- manifest: rank 0's work for a commit: seal and read back a manifest of many files, and check every file.
- restore: the number of files that workers open to load a checkpoint.
- attempts: the cost of a restart after many attempts.
- order: the cost of computing a step's ledger.
- index: the cost of a data set with three billion samples for a worker and a decoding process, before and after the
  index columns were memory-mapped.

"Before" is the code of commit a5385cc (index: 3e7c59f), copied here or taken from git. Both run in turn; a ratio is the
median of the per-round ratios.
"""

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from data.files import MANIFEST, write_durably
from data.index.document import SUFFIX, load_index, seal_of
from data.index.index import digest_of
from data.index.shard import Shard
from data.order import Ledger
from data.storage import Folder
from jobs.cluster.agent import NodeAgent, NodeReport, WorkerState
from jobs.cluster.worker import WorkerRecord
from jobs.cluster.worker_group import AgentLink, WorkerGroup
from jobs.cluster_config import ClusterConfig
from jobs.ownership import claim_attempt
from jobs.recipe.records import newest_attempt
from pipeline.checkpoints.manifest import (
    DIGEST_LENGTH,
    ChunkedRecord,
    Manifest,
    chunk_bytes_of,
    digest,
    read_manifest,
    sealed,
)
from pipeline.checkpoints.reader import Reader
from pipeline.checkpoints.stage_checkpoints import WrittenFile
from pipeline.monitoring.watchdog import PhaseReport, Watch

WORLDS = (64, 256, 1024, 4096)
ROUNDS = 9
WORKERS_OF_A_NODE = 8
STEPS = 1_000_000
KINDS = ("master", "exp_avg", "exp_avg_sq")
BEFORE_COLUMNS = "3e7c59f"  # the last commit at which every process loaded the index into memory


def main(words: list[str]) -> None:
    """Run the named measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(MEASUREMENTS), choices=[*MEASUREMENTS, []])
    names = parser.parse_args(words).names
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{name}")
            MEASUREMENTS[name](Path(folder))


class Opened:
    """Counter of the files that this process opens."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self.hear)

    def hear(self, event: str, details: tuple[object, ...]) -> None:
        """Handle an audit event from the interpreter."""
        if event in ("open", "os.scandir", "os.listdir"):
            self.count += 1


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU time of a call, in ms."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def row(*cells: object) -> None:
    """Print a row of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


# ------------------------------------------------------------------------ agents' reports


def report_of(node: int, entered: int) -> bytes:
    """Return the serialised report that a node's agent sends about its workers."""
    phase = ("data", "forward", "backward", "reduce")[entered % 4]
    workers = []
    for rank in range(node * WORKERS_OF_A_NODE, (node + 1) * WORKERS_OF_A_NODE):
        record: WorkerRecord = {"rank": rank, "node": f"n{node}", "node_id": "f" * 56, "pid": 4711, "started": 1.7e9}
        place = PhaseReport(entered, phase, entered // 4, "train-000017.tar")
        workers.append(WorkerState(rank, pid=4711, record=record, phase=place))
    return pickle.dumps(NodeReport(entered, workers))


def measure_look(folder: Path) -> None:
    """Receive and merge the reports of all nodes, and check the workers, for each group size."""
    row("workers", "nodes", "bytes per report", "CPU ms per round")
    for world in WORLDS:
        reports: dict[int, bytes] = {}

        def poll(method: str, *arguments: object, node: int, reports: dict[int, bytes] = reports) -> Future[NodeReport]:
            answer: Future[NodeReport] = Future()
            answer.set_result(pickle.loads(reports[node]))
            return answer

        nodes: Any = None  # no node is lost here
        group = WorkerGroup(nodes, ClusterConfig(workers=world), folder)
        for node in range(world // WORKERS_OF_A_NODE):
            agent = NodeAgent(f"n{node}", f"id{node}", "10.0.0.1", WORKERS_OF_A_NODE, partial(poll, node=node))
            group.links.append(AgentLink(agent, []))
        watch = Watch(world, stall_s=600)

        def look(group: WorkerGroup = group, watch: Watch = watch) -> None:
            group.poll(0.0)
            watch.find_stall(group.phases(), group.is_frozen)

        times = []
        for entered in range(1, ROUNDS + 1):
            for node in range(world // WORKERS_OF_A_NODE):
                reports[node] = report_of(node, entered)
            times.append(cpu_ms(look))
        row(world, world // WORKERS_OF_A_NODE, len(reports[0]), f"{statistics.median(times):.1f}")


# ------------------------------------------------------------------------ metrics

STATUS = """
import sys
from pathlib import Path
from pipeline.monitoring.telemetry import account
from jobs.stage_folders import last_metrics
from pipeline.monitoring.telemetry import read_metrics
last_metrics(Path(sys.argv[1]))
print(account(read_metrics(Path(sys.argv[1]), None)).line())
"""
USED = """
import time
# Not getrusage, whose peak would include that of the parent process if larger.
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time(), int(peak.split()[1]) / 1024)
"""


def write_metrics(path: Path, steps: int, log_every: int, attempts: int) -> None:
    """Write a stage's metrics, with the same number of steps in each attempt."""
    rng = random.Random(1)
    clock = 1.7e9
    names = ["lr", "images_per_s", "tflops_per_worker", "wait", "wait_storage", "wait_decode", "wait_transfer"]
    names += ["eta_s", "memory_gb"]
    with path.open("w") as file:
        for attempt in range(1, attempts + 1):
            first = (attempt - 1) * (steps // attempts)
            start = {"kind": "start", "time": clock, "attempt": attempt, "step": first, "claimed": clock - 20}
            file.write(json.dumps(start) + "\n")
            for step in range(first + log_every, first + steps // attempts + 1, log_every):
                clock += log_every * 0.5
                losses = [rng.random() * 7 for _ in range(log_every)]
                norms = [rng.random() for _ in range(log_every)]
                record = {"kind": "train", "time": round(clock, 3), "attempt": attempt, "step": step, "steps": steps}
                record |= {name: rng.random() for name in names}
                record |= {"loss": losses[-1], "losses": losses, "grad_norm": norms[-1], "grad_norms": norms}
                record |= {"mfu": None, "seconds": log_every * 0.5, "stalled_s": 0.0, "evaluated_s": 0.0, "world": 8}
                record |= {"samples_seen": step * 4096, "bad_samples": 0, "ledger": f"{rng.getrandbits(256):064x}"}
                file.write(json.dumps(record) + "\n")


def in_a_process(code: str, folder: Path) -> tuple[float, float]:
    """Run a Python program on a stage; return its CPU seconds and peak memory in MB."""
    words = [sys.executable, "-c", code + USED, str(folder)]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    cpu_s, memory_mb = output.split()
    return float(cpu_s), float(memory_mb)


def measure_metrics(folder: Path) -> None:
    """Measure the cost of `status` for long runs."""
    row("log_every", "attempts", "file, MB", "CPU s", "memory, MB")
    for log_every, attempts in ((50, 1), (50, 1000), (5, 1)):
        stage = folder / f"{log_every}-{attempts}"
        stage.mkdir()
        path = stage / "metrics.jsonl"
        write_metrics(path, STEPS, log_every, attempts)
        used = [in_a_process(STATUS, stage) for _ in range(3)]
        cpu_s = statistics.median(value[0] for value in used)
        memory_mb = statistics.median(value[1] for value in used)
        row(log_every, attempts, f"{path.stat().st_size / 1e6:.0f}", f"{cpu_s:.2f}", f"{memory_mb:.0f}")


# ------------------------------------------------------------------------ checkpoints


def measure_manifest(folder: Path) -> None:
    """Seal, write and read manifests of many files, stat every file, and gather the file records."""
    row("workers", "manifest, KB", "seal, ms", "write, ms", "read and check, ms", "stat of all, ms", "gathered, KB")
    for world in WORLDS:
        measure_one_manifest(folder / f"step-{world:010d}", world)


def measure_one_manifest(checkpoint: Path, world: int) -> None:
    """Print the row for one world size; the write is in wall time, including fsync, and the rest in CPU time."""
    checkpoint.mkdir()
    chunk_bytes = chunk_bytes_of(2**30)
    digests = "0" * DIGEST_LENGTH * (2**30 // chunk_bytes)
    results = []
    for rank in range(world):
        record: ChunkedRecord = {
            "bytes": 2**30,
            "sha256": f"{rank:064x}",
            "chunk_bytes": chunk_bytes,
            "chunks": digests,
        }
        results.append(WrittenFile(f"rank-{rank:05d}.safetensors", record))
    for result in results:
        (checkpoint / result.name).touch()
    files = {result.name: result.record for result in results if result.record}
    manifest = Manifest(world, 0, 0, "0" * 64, 1, world, 2, {}, "key", "code", files=files)
    text = sealed(manifest)
    seals, writes, reads, stats = [], [], [], []
    for _ in range(ROUNDS):
        seals.append(cpu_ms(lambda: sealed(manifest)))
        began = time.perf_counter()
        write_durably(checkpoint / MANIFEST, text)
        writes.append(1000 * (time.perf_counter() - began))
        reads.append(cpu_ms(lambda: read_manifest(checkpoint)))
        stats.append(cpu_ms(lambda: [(checkpoint / result.name).stat() for result in results]))
    gathered = sum(len(pickle.dumps(result)) for result in results) / 1000
    medians = [f"{statistics.median(values):.1f}" for values in (seals, writes, reads, stats)]
    row(world, f"{len(text) / 1000:.0f}", *medians, f"{gathered:.0f}")


def measure_restore(folder: Path) -> None:
    """Count the files that one worker opens to read its part of a flat state saved by many workers."""
    row("saved by", "loaded by", "files opened by a worker, before", "after", "CPU ms of the worker, before", "after")
    for world in WORLDS:
        checkpoint = folder / str(world)
        checkpoint.mkdir()
        files: dict[str, ChunkedRecord] = {}
        for rank in range(world):
            path = checkpoint / f"rank-{rank:05d}.safetensors"
            views = {f"w|{kind}|{rank * 16}": torch.zeros(16) for kind in KINDS}
            save_file(views, path)
            files[path.name] = digest(memoryview(path.read_bytes()))
        for next_world in (world, world // 2):
            measure_one_restore(checkpoint, files, next_world)


def measure_one_restore(checkpoint: Path, files: dict[str, ChunkedRecord], next_world: int) -> None:
    """Print the row for a worker that loads a checkpoint saved by a different number of workers."""
    part = len(files) * 16 // next_world
    rank = next_world // 3
    opened = {}
    times: dict[str, list[float]] = {"before": [], "after": []}

    def load(name: str, share: float | None) -> None:
        reader = Reader(checkpoint, files, share)
        for kind in KINDS:
            reader("w", kind, rank * part, part)
        opened[name] = len(reader.opened)

    for _ in range(3):
        times["before"].append(cpu_ms(lambda: load("before", None)))
        times["after"].append(cpu_ms(lambda: load("after", (rank + 0.5) / next_world)))
    medians = [f"{statistics.median(values):.1f}" for values in times.values()]
    row(len(files), next_world, opened["before"], opened["after"], *medians)


# ------------------------------------------------------------------------ attempts, order


def measure_attempts(folder: Path) -> None:
    """Claim an attempt, and find the newest one of a stage, after many attempts."""
    row("attempts before", "claim, ms", "find the newest of the stage, ms")
    for count in (1, 100, 1000, 10_000):
        run = folder / str(count)
        stage = run / "pretrain-00000000"
        (run / "attempts").mkdir(parents=True)
        for number in range(1, count + 1):
            (run / "attempts" / f"{number:06d}.json").write_text("{}")
            (stage / "attempts" / f"attempt-{number:06d}").mkdir(parents=True)
        claim = statistics.median(cpu_ms(lambda run=run: claim_attempt(Folder(run))) for _ in range(ROUNDS))
        newest = statistics.median(cpu_ms(lambda stage=stage: newest_attempt(stage)) for _ in range(ROUNDS))
        row(count, f"{claim:.1f}", f"{newest:.1f}")


def measure_order(folder: Path) -> None:
    """Compute the ledger of a step for several batches."""
    row("batch", "ledger of a step, ms")
    ledger = Ledger.start("0" * 64, 0)
    for batch in (4096, 32_768, 262_144):
        ids = np.arange(batch)
        times = [cpu_ms(lambda ids=ids: ledger.update(7, ids, ids, ids)) for _ in range(ROUNDS)]
        row(f"{batch:,}", f"{statistics.median(times):.2f}")


INDEX_COSTS = """
import sys, time
from pathlib import Path
import data.decoder
from data.decoder import Decoder, BatchLayout, DecodeTask
try:
    from data.decoder import DecoderProcess
except ImportError:
    from data.decoder_process import DecoderProcess  # where it was before
from data.errors import DataError
from data.images.augment import AugmentConfig
from data.order import Order
try:
    from data.shards.index import load_index  # where it was before
except ModuleNotFoundError:
    from data.index.document import load_index
from data.reader import ShardReader

def private_mib(pid="self"):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024

def decoder_mib(index, order):
    decoder = Decoder(index, order, BatchLayout(1, 16, 1), AugmentConfig(), 0, ShardReader(index))
    process = DecoderProcess(decoder, 1)
    process.brief()
    process.give(DecodeTask(0, 0, 1))
    try:
        process.answer(60.0)
    except DataError:  # the shards are not there: the batch was computed before that was seen
        pass
    used = private_mib(process.child.pid)
    process.end()
    return used

small = load_index(sys.argv[2])
small_decoder = decoder_mib(small, Order(small.shard_samples, seed=0, batch_size=1))
begin = private_mib()
start = time.process_time()
index = load_index(sys.argv[1])
loaded = time.process_time()
order = Order(index.shard_samples, seed=0, batch_size=4096)
order.batch(0)
first = time.process_time()
for step in range(1, 101):
    order.batch(step)
done = time.process_time()
order.batch(index.samples // 4096)  # across the end of the epoch
held = private_mib() - begin
in_decoder = decoder_mib(index, order) - small_decoder
print(loaded - start, 1000 * (first - loaded), 10 * (done - first), held, in_decoder)
"""


def write_large_index(path: Path, shards: int, schema: int) -> None:
    """Write an index of many nonexistent shards of 10,000 samples; the earlier code used schema 2."""
    rows = []
    for number in range(shards):
        digests = [sha256(f"{kind} {number}".encode()).hexdigest() for kind in ("tar", "table")]
        rows.append([f"train-{number:06d}.tar", 10_000, 1_100_000_000, *digests])
    counts = [shards * 10_000]
    content: dict[str, object] = {"schema": schema, "directory": ".", "class_counts": counts}
    if schema == 1:
        content |= {"names": [], "origin": None, "refused": {}, "first_refused": {}}
    content |= {"digest": digest_of([Shard(*values) for values in rows], counts), "shards": rows}
    path.write_text(json.dumps(content | {"seal": seal_of(content)}, indent=1))


def measure_index(folder: Path) -> None:
    """Load an index and compute batches of 4,096 in a worker and in a decoding process, with the old and the new code.

    Private memory is not shared with other processes; another process keeps the same columns mapped throughout.
    """
    os.environ["PATCHLINE_CACHE"] = str(folder / "node")
    trees = {"before": folder / "before", "after": Path(__file__).parents[1]}
    trees["before"].mkdir()
    archive = subprocess.run(["git", "archive", BEFORE_COLUMNS, "data"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(trees["before"])], check=True, input=archive)
    schemas = {"before": 2, "after": 1}
    small = {name: folder / f"small-{name}{SUFFIX}" for name in trees}
    for name, path in small.items():
        write_large_index(path, 1, schemas[name])
    row(
        "samples", "shards", "JSON, MB", "", "load, CPU s", "first batch, ms", "next, ms",
        "private MiB of a worker", "of a decoding process",
    )  # fmt: skip
    for shards in (3_000, 30_000, 300_000):
        paths = {name: folder / f"s{shards}-{name}{SUFFIX}" for name in trees}
        for name, path in paths.items():
            write_large_index(path, shards, schemas[name])
        began = time.process_time()
        mapped = load_index(paths["after"])
        made_s = time.process_time() - began
        assert mapped.samples == sum(shard.samples for shard in mapped.shards), "which touches all that is mapped"
        measured: dict[str, list[list[float]]] = {name: [] for name in trees}
        for turn in range(3):
            for name in sorted(trees, reverse=turn % 2 == 0):
                words = [sys.executable, "-P", "-c", INDEX_COSTS, str(paths[name]), str(small[name])]
                environment = {**os.environ, "PYTHONPATH": str(trees[name])}
                output = subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout
                measured[name].append([float(value) for value in output.split()])
        for name, values in measured.items():
            medians = [statistics.median(column) for column in zip(*values, strict=True)]
            load_s, first_ms, next_ms, worker_mib, decoder_mib = medians
            what = name if name == "before" else f"after (made once a node, in {made_s:.1f} CPU s)"
            cells = (f"{load_s:.2f}", f"{first_ms:.0f}", f"{next_ms:.2f}", f"{worker_mib:.1f}", f"{decoder_mib:.1f}")
            row(f"{shards * 10_000:,}", f"{shards:,}", f"{paths[name].stat().st_size / 1e6:.0f}", what, *cells)


MEASUREMENTS: dict[str, Callable[[Path], None]] = {
    "look": measure_look,
    "metrics": measure_metrics,
    "manifest": measure_manifest,
    "restore": measure_restore,
    "attempts": measure_attempts,
    "order": measure_order,
    "index": measure_index,
}

if __name__ == "__main__":
    main(sys.argv[1:])
