"""Test the search for slow workers (pipeline/extras/slow_worker) on simulated and on real workers.

    python -m benchmarks.slow_workers quiet --windows 1000000        false alarms among equally fast workers
    python -m benchmarks.slow_workers planted --cases 100            simulated workers, one of which becomes slow
    python -m benchmarks.slow_workers real --cases 10                two real workers on gloo, one of which becomes slow
    python -m benchmarks.slow_workers link --worlds 2 3 --cases 3    workers on hosts in namespaces, with a slow link

`quiet` draws independent windows of a group, without a slow worker, for each kind of noise. `planted` simulates runs in
which one worker becomes slow at a random step; a run is compared every PART steps, and delayed by PART steps, as in a
real run. A case is right if only the slow worker is named, with the right cause, within 100 steps, and with a factor
within 10 % of the planted one.

`real` trains a small model with two workers of this machine. After BEGIN steps, worker 1 sleeps while it decodes
(data), computes longer in its forward pass (compute), is stopped by signals in turns (host), or collects cyclic garbage
every fifth step (gc). With `--cause none`, nothing is planted. Links need hosts of their own: `link` makes two or three
namespaces of the kernel, and delays the frames of the last one (needs root).
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import replay
from data.decoder import Decoder
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.images.augment import AugmentConfig
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import train
from pipeline.extras.slow_worker import stopwatch
from pipeline.extras.slow_worker.comparison import (
    CAUSES,
    GC,
    LINK,
    PART,
    WINDOW,
    Seconds,
    are_slow,
    link_seconds,
    slow_workers,
)
from pipeline.extras.slow_worker.hook import SlowWorkerConfig
from pipeline.monitoring.telemetry import read_metrics
from pipeline.monitoring.watchdog import read_phase
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig

WORLDS = (2, 4, 8, 64, 512)
FACTORS = (1.1, 1.15, 1.25, 1.5, 2.0)
ROUND_TRIP_S = 0.0002
COLLECTIVES = 0.1  # seconds of a step, in addition to the slowest worker's 1 s
OFFSET = 0.01  # largest constant difference of a worker's speed
OF_CAUSE = {"data": 0.05, "compute": 0.9, "host": 0.02}  # seconds of a step

# B: groups, W: workers, S: steps


class Group(NamedTuple):
    """The times of simulated groups."""

    seconds: Seconds  # (B, W, S, causes)
    collectives: Seconds  # (B, S)
    round_trips: Seconds  # (B, W, S / PART)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return 1 + 0.05 * rng.standard_normal(shape, np.float32)


def lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return np.exp(0.1 * rng.standard_normal(shape, np.float32))


def pareto(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    """One of twenty steps takes longer; the mean exists, the variance does not."""
    spikes = (rng.random(shape, np.float32) < 0.05) * 0.2 * rng.pareto(1.5, shape)
    return 1 + 0.02 * rng.standard_normal(shape, np.float32) + spikes


def two_speeds(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    """Each worker's steps take 1 or 1.3, three of ten the latter."""
    return 1 + 0.02 * rng.standard_normal(shape, np.float32) + 0.3 * (rng.random(shape, np.float32) < 0.3)


def two_shared_speeds(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return (1 + 0.3 * (rng.random((shape[0], 1, shape[2])) < 0.5)) * normal(rng, shape)


def stretches(rng: np.random.Generator, shape: tuple[int, ...], slower: float = 0.1) -> Seconds:
    """Each worker alternates between two speeds, for five steps each on average."""
    switches = rng.random(shape, np.float32) < 0.2
    state = (np.cumsum(switches, -1) + rng.integers(2, size=(*shape[:2], 1))) % 2
    return 1 + 0.02 * rng.standard_normal(shape, np.float32) + slower * state


def long_stretches(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return stretches(rng, shape, 0.2)


def drift(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return np.linspace(1, 1.5, shape[2]) * normal(rng, shape)


def correlated(rng: np.random.Generator, shape: tuple[int, ...], noise: float = 0.01) -> Seconds:
    """Each worker's noise decays by 10 % per step."""
    shocks = noise * np.sqrt(1 - 0.9**2) * rng.standard_normal(shape, np.float32)
    values = np.empty(shape, np.float32)
    values[..., 0] = noise * rng.standard_normal(shape[:2])
    for step in range(1, shape[2]):
        values[..., step] = 0.9 * values[..., step - 1] + shocks[..., step]
    return 1 + values


def correlated_2(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return correlated(rng, shape, 0.02)


def correlated_5(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    return correlated(rng, shape, 0.05)


def saves(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    """All workers save every 20 steps, at different speeds, and evaluate every 50."""
    times = normal(rng, shape)
    first = rng.integers(20)
    times[..., first::20] *= 3 * np.exp(0.3 * rng.standard_normal(times[..., first::20].shape))
    times[..., first::50] += 5 * normal(rng, times[..., first::50].shape)
    return times


def rank_0_reports(rng: np.random.Generator, shape: tuple[int, ...]) -> Seconds:
    times = normal(rng, shape)
    times[:, 0, ::20] += 0.3
    return times


NOISE = (
    normal,
    lognormal,
    pareto,
    two_speeds,
    two_shared_speeds,
    stretches,
    drift,
    correlated,
    saves,
    rank_0_reports,
)
# Workers that differ by several percent for ten steps at a time, so that their means over 80 steps do, too.
WANDERING = (long_stretches, correlated_2, correlated_5)


def quiet_groups(noise: Any, rng: np.random.Generator, groups: int, world: int, steps: int) -> Group:
    """Return groups of equally fast workers; a worker's collections take 1.5 to 4 % of its time."""
    shape = (groups, world, steps)
    seconds = np.zeros((*shape, len(CAUSES)), np.float32)
    speed = (1 + OFFSET * rng.uniform(-1, 1, (groups, world, 1))) * noise(rng, shape)
    for cause, usual in OF_CAUSE.items():
        seconds[..., CAUSES.index(cause)] = usual * speed
    seconds[..., CAUSES.index("data")] *= np.exp(0.3 * rng.standard_normal(shape, np.float32))
    seconds[..., CAUSES.index("host")] *= rng.standard_exponential(shape, np.float32)
    period = rng.integers(8, 40, (groups, world, 1))
    share = rng.uniform(0.015, 0.04, (groups, 1, 1))
    phase = rng.integers(0, 40, (groups, world, 1))
    seconds[..., GC] = ((np.arange(steps) + phase) % period == 0) * period * share
    collectives = COLLECTIVES * np.exp(0.2 * rng.standard_normal((groups, steps)))
    trips = (groups, world, steps // PART)
    return Group(np.maximum(seconds, 0), collectives, ROUND_TRIP_S * np.exp(0.2 * rng.standard_normal(trips)))


def with_links(group: Group, window: slice) -> Seconds:
    """Return the seconds of a window, with those of the links, as rank 0 computes them."""
    seconds = group.seconds[..., window, :].copy()
    own = seconds.sum(-1)
    steps = own.max(-2) + group.collectives[..., window]
    trips = group.round_trips[..., window.start // PART : window.stop // PART]
    seconds[..., LINK] = link_seconds(own, steps, trips, group.round_trips[..., : window.stop // PART].min(-1))
    return seconds


def quiet(options: argparse.Namespace) -> None:
    """Print the false alarms for each number of workers and each kind of noise."""
    print("| noise | " + " | ".join(f"{world} workers" for world in options.worlds) + " |")
    print("|---|" + "--:|" * len(options.worlds))
    windows: Counter[int] = Counter()
    alarms: Counter[int] = Counter()
    kinds = WANDERING if options.wandering else NOISE
    if options.noise is not None:
        kinds = tuple(kind for kind in (*NOISE, *WANDERING) if kind.__name__ == options.noise)
    for number, noise in enumerate(kinds):
        cells = []
        for world in options.worlds:
            rng = np.random.default_rng([options.seed, number, world])
            # Of large groups, the windows of each worker are counted.
            of_group = world if world >= 64 else 1
            wanted = options.windows // len(kinds)
            false = done = 0
            while done < wanted:
                groups = max(1, min(2_000 // world, (wanted - done) // of_group))
                steady, bursts = are_slow(with_links(quiet_groups(noise, rng, groups, world, WINDOW), slice(0, WINDOW)))
                false += int((steady.any(-1) | bursts).any(-1).sum())
                done += groups * of_group
            windows[world] += done
            alarms[world] += false
            cells.append(f"{false} of {done:,}")
        print(f"| {noise.__name__} | {' | '.join(cells)} |", flush=True)
    print("| all | " + " | ".join(f"{alarms[world]} of {windows[world]:,}" for world in options.worlds) + " |")


class Case(NamedTuple):
    """A planted case and its outcome."""

    cause: str
    factor: float
    noise: str
    named: str  # "" if nothing was found within the limit
    delay: int
    estimate: float


def plant(group: Group, cause: str, factor: float, rank: int, begin: int, rng: np.random.Generator) -> None:
    """Make a worker of the first group slow from a step on."""
    after = slice(begin, group.seconds.shape[2])
    steps = after.stop - begin
    total = np.median(group.seconds[0].sum(-1))
    excess = (factor - 1) * total * np.exp(0.2 * rng.standard_normal(steps) - 0.02)
    times = group.seconds[0, rank, after]
    if cause == "gc":
        period = int(rng.integers(5, 20))
        excess = (np.arange(steps) % period == 0) * period * (factor - 1) * total
    if cause == "host":
        excess *= rng.gamma(4, 1 / 4, steps)
    if cause == "link":
        group.collectives[0, after] += excess
        group.round_trips[0, rank, -(-begin // PART) :] *= rng.uniform(5, 100)
        if group.seconds.shape[1] == 2:
            group.round_trips[0, :] = group.round_trips[0, rank]
        return
    times[:, CAUSES.index(cause)] += excess


def planted_case(cause: str, factor: float, noise: Any, world: int, seed: list[int]) -> Case:
    """Simulate a run until a worker is named, at most 100 steps after it became slow."""
    rng = np.random.default_rng(seed)
    begin = int(rng.integers(WINDOW, 2 * WINDOW))
    steps = 4 * WINDOW
    group = quiet_groups(noise, rng, 1, world, steps)
    rank = int(rng.integers(world))
    plant(group, cause, factor, rank, begin, rng)
    for end in range(WINDOW, begin + 100 - PART + 1, PART):
        (seconds,) = with_links(group, slice(end - WINDOW, end))
        found = slow_workers(seconds)
        if not found:
            continue
        ranks = {worker.rank for worker in found}
        # Two workers share their link.
        is_right = ranks == {rank} or (world == 2 and found[0].cause == cause == "link")
        named = found[0].cause if is_right else "wrong worker"
        return Case(cause, factor, noise.__name__, named, end + PART - begin, found[0].factor)
    return Case(cause, factor, noise.__name__, "", 0, 0.0)


def planted(options: argparse.Namespace) -> None:
    """Print how many planted cases were found, by number of workers."""
    print("| workers | planted | worker | cause | factor within 10 % | steps until found, median (most) | wrong |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    for world in options.worlds:
        cases = []
        for number in range(options.cases):
            cause = CAUSES[number % len(CAUSES)]
            factor = FACTORS[number // len(CAUSES) % len(FACTORS)]
            noise = NOISE[number // (len(CAUSES) * len(FACTORS)) % len(NOISE)]
            if options.noise is not None:
                noise = next(kind for kind in (*NOISE, *WANDERING) if kind.__name__ == options.noise)
            cases.append(planted_case(cause, factor, noise, world, [options.seed, world, number]))
        found = [case for case in cases if case.named not in ("", "wrong worker")]
        right = [case for case in found if case.named == case.cause]
        near = [case for case in right if abs(case.estimate / case.factor - 1) <= 0.1]
        delays = [case.delay for case in found] or [0]
        wrong = Counter(
            f"{case.cause} {case.factor} ({case.noise}): {case.named or 'not found'}"
            for case in cases
            if case.named != case.cause
        )
        text = "; ".join(f"{name} ×{count}" for name, count in wrong.most_common(8))
        print(
            f"| {world} | {len(cases)} | {len(found)} | {len(right)} | {len(near)} | "
            f"{np.median(delays):.0f} ({max(delays)}) | {text} |",
            flush=True,
        )


# ------------------------------------------------------------------------ real workers

HOOK = "pipeline.extras.slow_worker.hook:SlowWorkers"
MODEL = {"name": "mu/8", "image_size": 16, "classes": 10, "width": 64, "depth": 6, "mlp": 256, "heads": 4}
BEGIN = 100  # steps before a worker becomes slow
AFTER = 110  # steps after that
PLANTED = "planted.txt"  # file with the seconds by which the slow worker's steps are longer
# Stops a process for a part of each period, until it ends.
STOPS = """
import os, signal, sys, time
try:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))  # otherwise other programs decide how long a stop lasts
except PermissionError:
    pass
pid, stopped_s, running_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""


@contextmanager
def folder_with_digits(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for runs, and packed digits in it; delete the folder afterwards unless its path is given."""
    with tempfile.TemporaryDirectory() as name:
        root = keep or Path(name)
        shards = root / "shards"
        pack(digits(train=True, image_size=16), shards, name="train", shard_samples=100)
        yield root, shards


def task_of(folder: Path, shards: Path, steps: int) -> dict[str, Any]:
    """Return the task of a small run."""
    cfg = SlowWorkerConfig(
        data=DataConfig(train=str(shards), augment=AugmentConfig(min_area=0.7, flip=False), processes=0),
        model=MODEL,
        optim=OptimConfig(lr=1e-4, schedule=ScheduleConfig(warmup_steps=20)),
        loss="softmax",
        steps=steps,
        batch_size=64,
        micro_batch=32,
        precision="fp32",
        log_every=50,
        save_every=10**9,
    )
    return replay.task_of(folder, shards, cfg) | {"hooks": {HOOK: {}}}


def spin(seconds: float) -> None:
    """Use the processor for some seconds of processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def train_slowly(task: dict[str, Any]) -> None:
    """Train, and make a worker slow from step BEGIN on, relative to the median step before."""
    if task["realtime"]:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    record_times(Path(task["job"]["run"]))
    take_step = train.take_step
    fill = Decoder.fill
    rank = int(os.environ["RANK"])
    cause = task["cause"] if rank == task["rank"] else "none"
    times: list[float] = []
    excess = [0.0]
    stops: list[subprocess.Popen[bytes]] = []

    def filling(self: Any, row: int, key: int, arrays: Any) -> Any:
        # A sleep of 0 s takes 29 µs: 32 of them, 4 % of a step of 22 ms, were found before anything was planted.
        if cause == "data" and excess[0]:
            time.sleep(excess[0] / task["config"]["micro_batch"])
        return fill(self, row, key, arrays)

    def taking(worker: Any, step: int, batches: Any) -> Any:
        if step == BEGIN and cause != "none":
            excess[0] = (task["factor"] - 1) * float(np.median(times[20:]))
            Path(task["job"]["run"], PLANTED).write_text(str(excess[0]))
            if cause == "host":
                period = 0.005  # shorter than a forward pass
                stopped = period * (1 - 1 / task["factor"])
                words = [sys.executable, "-c", STOPS, str(os.getpid()), str(stopped), str(period - stopped)]
                stops.append(subprocess.Popen(words))
            if cause == "compute":
                worker.engine.model.register_forward_pre_hook(lambda module, inputs: spin(excess[0]))
        if excess[0] and cause == "gc" and step % 5 == 0:
            collect_for(5 * excess[0])
        began = time.monotonic()
        outcome = take_step(worker, step, batches)
        times.append(time.monotonic() - began)
        return outcome

    Decoder.fill = filling  # type: ignore[method-assign]
    train.take_step = taking  # type: ignore[assignment]
    try:
        train.train(task)
    finally:
        for process in stops:
            process.kill()
            process.wait()


def record_times(folder: Path) -> None:
    """Write the times of this worker's steps to a file, to compare them in another way after the run."""
    by_cause = stopwatch.seconds_by_cause
    path = folder / f"times-{os.environ['RANK']}.jsonl"

    def recording(steps: list[stopwatch.StepTimes], **options: bool) -> Any:
        with path.open("a") as file:
            file.writelines(json.dumps(step) + "\n" for step in steps)
        return by_cause(steps, **options)

    stopwatch.seconds_by_cause = recording  # type: ignore[assignment]


def collect_for(seconds: float) -> None:
    """Create cyclic garbage, and collect garbage for some seconds of processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        gc.disable()
        for _ in range(2_000):
            cycle: list[Any] = []
            cycle.append(cycle)
        gc.enable()
        gc.collect()


def records_of(folder: Path) -> list[Any]:
    """Return the records of slow workers of a run."""
    return list(read_metrics(folder / replay.STAGE, "slow", []))


def real_case(folder: Path, shards: Path, cause: str, factor: float, rank: int, *, realtime: bool = False) -> list[Any]:
    """Train with two workers, one of which becomes slow; return the records of slow workers."""
    task = task_of(folder, shards, BEGIN + AFTER)
    task |= {"cause": cause, "factor": factor, "rank": rank, "realtime": realtime}
    cluster = ClusterConfig(workers=2, backend="processes")
    run_worker_group(train_slowly, task, cluster=cluster, name="workers", directory=folder)
    return records_of(folder)


def real(options: argparse.Namespace) -> None:
    """Print the records of real cases."""
    print("| cause | step longer by | planted, ms | worker | found as | factor | ms | steps until found |")
    print("|---|--:|--:|--:|---|--:|--:|--:|", flush=True)
    right = 0
    with folder_with_digits(options.keep) as (root, shards):
        for number in range(options.cases):
            cause = options.cause or ("data", "compute", "host", "gc")[number % 4]
            factor = options.factor or FACTORS[number // 4 % len(FACTORS)]
            rank = number % 2
            records = real_case(root / str(number), shards, cause, factor, rank, realtime=options.realtime)
            early = [record for record in records if record["step"] <= BEGIN or record["factor"] == 1.0]
            rest = [record for record in records if record not in early]
            found = "; ".join(f"worker {record['rank']}: {record['cause']}" for record in rest) or "nothing"
            if early:
                found += f"; before: {[(record['rank'], record['cause'], record['step']) for record in early]}"
            estimate = "– | – | –"
            if rest:
                first = rest[0]
                excess_ms = 1000 * (first["seconds"] - first["others"])
                delay = first["step"] + PART - BEGIN
                estimate = f"{first['factor']:.2f} | {excess_ms:.1f} | {delay}"
                right += (first["rank"], first["cause"]) == (rank, cause) and delay <= 100
            planted_ms = 1000 * float((root / str(number) / PLANTED).read_text()) if cause != "none" else 0.0
            print(f"| {cause} | {factor - 1:.0%} | {planted_ms:.1f} | {rank} | {found} | {estimate} |", flush=True)
    print(f"right: {right} of {options.cases}")


def link_case(root: Path, shards: Path, world: int, delay_s: float) -> list[Any]:
    """Train on hosts in namespaces, and delay the frames of the last host from step BEGIN on; return the records."""
    from tests.support.hosts import Network

    folder = root / f"{world}-{delay_s}"
    task = task_of(folder, shards, BEGIN + AFTER)
    # All workers have a micro-batch of the same size.
    task["config"] |= {"batch_size": 32 * world}
    task |= {"cause": "none", "factor": 1.0, "rank": 0, "realtime": False}
    (folder / "task.json").write_text(json.dumps(task))
    with Network(folder) as network, (folder / "output.txt").open("w") as output:
        hosts = [network.boot(f"h{rank}") for rank in range(world)]
        workers = []
        for rank, host in enumerate(hosts):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            words = [sys.executable, "-m", "benchmarks.slow_workers", "worker", "--task", str(folder / "task.json")]
            workers.append(host.start(words, output, **environment))
        attempt = Path(task["job"]["directory"]) / "attempts" / "attempt-000001"
        while workers[0].poll() is None:
            report = read_phase(attempt, 0)
            if report is not None and report.step >= BEGIN and hosts[-1].relay is None:
                hosts[-1].slow(delay_s, loss=0.0, seed=1)
            time.sleep(0.02)
        for worker in workers:
            if worker.wait(60) != 0:
                raise SystemExit((folder / "output.txt").read_text())
    return records_of(folder)


def link(options: argparse.Namespace) -> None:
    """Print the records of runs in which the link of the last worker becomes slow."""
    print("| workers | added round trip, ms | found | factor | ms a step | steps until found |")
    print("|--:|--:|---|--:|--:|--:|", flush=True)
    with folder_with_digits(options.keep) as (root, shards):
        for world in options.worlds:
            for delay_s in (0.002, 0.01, 0.05)[: options.cases]:
                for_case = root / f"{world}-{delay_s}"
                for_case.mkdir()
                # A host sees the folder of the run and nothing else of this machine's temporary files.
                shutil.copytree(shards, for_case / "shards")
                records = link_case(root, for_case / "shards", world, delay_s)
                found = "; ".join(f"worker {r['rank']}: {r['cause']} (step {r['step']})" for r in records) or "nothing"
                first = next((record for record in records if record["step"] > BEGIN), None)
                values = "– | – | –"
                if first is not None:
                    values = f"{first['factor']:.2f} | {1000 * first['seconds']:.1f} | {first['step'] + PART - BEGIN}"
                print(f"| {world} | {1000 * delay_s:.0f} | {found} | {values} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quiet", "planted", "real", "link", "worker"])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--windows", type=int, default=1_000_000)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--noise", choices=[noise.__name__ for noise in (*NOISE, *WANDERING)])
    parser.add_argument("--wandering", action="store_true", help="noise that lasts for many steps")
    parser.add_argument("--cause", choices=["none", *CAUSES])
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--realtime", action="store_true", help="workers run before all other programs (needs root)")
    parser.add_argument("--factor", type=float)
    parser.add_argument("--keep", type=Path, help="new folder in which the runs remain, with the times of their steps")
    parser.add_argument("--seed", type=int, default=44)
    options = parser.parse_args()
    began = time.monotonic()
    if options.what == "worker":
        train_slowly(json.loads(options.task.read_text()))
        return
    {"quiet": quiet, "planted": planted, "real": real, "link": link}[options.what](options)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    # Workers import functions by the name of their module, which is not __main__.
    from benchmarks import slow_workers as module

    module.main()
