"""Measure startup costs: CPU-seconds and seconds of commands, and of runs until their first steps.

    python -m benchmarks.start [--other CHECKOUT] [--rounds 5] [--backends processes ray] [--digits]
    python -m benchmarks.start --attempts 20 --rounds 0

1. The complete commands `--help`, `status` and `plan`.
2. A run of two workers on a tiny model: from the command to the first step; from a kill of worker 1 to the first step
   of the next attempt; and from there to the first step of the next stage, including the end of the first stage.
3. With `--digits`, the complete digits recipe.
4. With `--attempts N`, N worker groups of two in this process, from the call to the result of an all-reduce,
   alternating between plain processes and Ray. The first group of each, which includes imports, is listed separately.

CPU-seconds include all descendants of the command, including Ray's processes. `--other` is a checkout to compare with:
both run in turn, and the last column is the median of the per-round ratios.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from data.extras.shards.packing import pack
from data.extras.sources.samples import digits

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants become children of this process, so that they are counted
POLL_S = 0.1
TIMEOUT_S = 600.0
RECIPE = """
run: {folder}/run
cluster: {{workers: 2, backend: {backend}, backoff_s: 0}}
pretrain:
  data: {{train: {folder}/shards}}
  model: {{name: mu/8, image_size: 16, classes: 10}}
  optim: {{lr: 2.0e-3, schedule: {{warmup_steps: 5}}}}
  loss: softmax
  steps: 150
  batch_size: 16
  micro_batch: 4
  precision: fp32
  log_every: 1
  save_every: 10
finetune:
  init: "@pretrain"
  data: {{train: {folder}/shards}}
  model: {{classes: 10}}
  steps: 4
  optim: {{lr: 0.05, schedule: {{warmup_steps: 2}}}}
  batch_size: 16
  micro_batch: 8
  precision: fp32
"""

Cost = tuple[float, float]  # CPU-seconds, seconds


class Family:
    """CPU time of a process and all its descendants, including those that have exited."""

    def __init__(self, command: list[str], checkout: Path, log: Path) -> None:
        self.seconds: dict[tuple[int, float], float] = {}  # (pid, start time) → CPU-seconds
        self.began = time.monotonic()
        with log.open("w") as said:
            self.process = subprocess.Popen(command, cwd=checkout, stdout=said, stderr=said, start_new_session=True)

    def cost(self) -> Cost:
        """Return the cost so far, after reading the times of all running descendants."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self.seconds[process.pid, process.create_time()] = times.user + times.system
        return sum(self.seconds.values()), time.monotonic() - self.began

    def until(self, claim: Callable[[], bool]) -> Cost:
        """Wait until a condition is true, and return the cost so far."""
        cost = self.cost()
        while not claim():
            assert cost[1] < TIMEOUT_S and self.process.poll() is None, "the run has ended or hangs"
            time.sleep(POLL_S)
            cost = self.cost()
        return cost

    def end(self) -> Cost:
        """Wait until the command and all its descendants have exited; return the cost."""
        cost = self.cost()
        while psutil.Process().children():
            time.sleep(POLL_S / 10)
            cost = self.cost()
            with suppress(ChildProcessError):
                self.process.poll()
                os.waitpid(-1, os.WNOHANG)
        return cost


def rows(run: Path, stage: str, kind: str) -> Iterator[dict[str, object]]:
    """Yield a stage's records of one kind."""
    for path in run.glob(f"{stage}-*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # the line is still being written
                record = json.loads(line)
                if record["kind"] == kind:
                    yield record


def has_step(run: Path, stage: str, attempt: int) -> Callable[[], bool]:
    """Return a function that returns whether an attempt of the run has reported a step of a stage."""
    return lambda: any(record["attempt"] == attempt for record in rows(run, stage, "train"))


def costs_of_run(checkout: Path, folder: Path, backend: str) -> dict[str, Cost]:
    """Run the recipe, kill a worker during training, and return the cost of each part of the run."""
    run = folder / "run"
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, backend=backend))
    subprocess.run(["rm", "-rf", str(run)], check=True)
    family = Family([python_of(checkout), "-m", "jobs", "run", str(recipe)], checkout, folder / f"{backend}.log")
    first = family.until(has_step(run, "pretrain", 1))
    (record,) = run.glob("pretrain-*/attempts/attempt-000001/rank-00001.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    again = family.until(has_step(run, "pretrain", 2))
    following = family.until(has_step(run, "finetune", 3))
    whole = family.end()
    return {
        f"{backend}: command to first step": first,
        f"{backend}: kill to first step of the next attempt": (again[0] - first[0], again[1] - first[1]),
        f"{backend}: from there to the first step of the next stage": (
            following[0] - again[0],
            following[1] - again[1],
        ),
        f"{backend}: complete run": whole,
    }


def cost_of_digits(checkout: Path, folder: Path, backend: str) -> dict[str, Cost]:
    """Run the digits recipe to its end."""
    run = folder / "digits"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    words = ["run", str(checkout / "jobs" / "recipes" / "digits.yaml"), f"run={run}", f"cluster.backend={backend}"]
    family = Family([python_of(checkout), "-m", "jobs", *words], checkout, folder / f"digits-{backend}.log")
    cost = family.end()
    assert family.process.returncode == 0, (folder / f"digits-{backend}.log").read_text()
    return {f"{backend}: digits, complete run": cost}


def add_ranks(task: dict[str, object]) -> float:
    """All-reduce the sum of all workers' ranks with gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def time_attempts(count: int, backends: Sequence[str], folder: Path) -> None:
    """Run worker groups of two workers with alternating backends, and print their times."""
    from benchmarks.start import add_ranks  # workers import it by this name
    from jobs.cluster.ray import disconnect
    from jobs.cluster.worker_group import run_worker_group
    from jobs.cluster_config import ClusterConfig

    seconds: dict[str, list[float]] = {backend: [] for backend in backends}
    for number in range(count):
        for backend in backends if number % 2 else list(reversed(backends)):
            cluster = ClusterConfig(workers=2, backend="ray" if backend == "ray" else "processes")
            began = time.monotonic()
            name = f"{backend}-{number}"
            value = run_worker_group(add_ranks, {}, cluster=cluster, name=name, directory=folder / "run" / "stage-0")
            assert value == 1.0
            seconds[backend].append(time.monotonic() - began)
    disconnect()
    print(f"load {os.getloadavg()[0]:.1f}\n| | first, s | others, median s | least | most |\n|---|--:|--:|--:|--:|")
    for backend, (first, *others) in seconds.items():
        middle = statistics.median(others)
        print(f"| {backend} | {first:.2f} | {middle:.3f} | {min(others):.3f} | {max(others):.3f} |")


def costs_of_commands(checkout: Path, folder: Path) -> dict[str, Cost]:
    """Return the cost of commands that do not start workers, after a run of the recipe."""
    costs = {}
    for words in (["--help"], ["status", str(folder / "run")], ["plan", str(folder / "recipe.yaml")]):
        before = os.times()
        began = time.monotonic()
        command = [python_of(checkout), "-m", "jobs", *words]
        subprocess.run(command, cwd=checkout, capture_output=True, check=True)
        after = os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        costs[words[0]] = (cpu_s, time.monotonic() - began)
    return costs


def python_of(checkout: Path) -> str:
    """Return the Python interpreter of a checkout's environment."""
    return str(checkout / ".venv" / "bin" / "python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["processes", "ray"], choices=["processes", "ray"])
    parser.add_argument("--digits", action="store_true", help="also run the digits recipe, which takes minutes")
    parser.add_argument("--attempts", type=int, default=0, help="worker groups in one process")
    arguments = parser.parse_args()
    # The agents of the attempts are children of this process, but the cost of a run is known only without children.
    if arguments.attempts and arguments.rounds:
        parser.error("--attempts cannot be combined with --rounds\n  pass --attempts N --rounds 0")
    if arguments.attempts:
        with tempfile.TemporaryDirectory() as directory:
            time_attempts(arguments.attempts, arguments.backends, Path(directory))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    checkouts = {"this": ROOT}
    if arguments.other is not None:
        checkouts["other"] = arguments.other.resolve()

    measured: dict[str, dict[str, list[Cost]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        pack(digits(train=True, image_size=16), folder / "shards", name="train", shard_samples=100)
        for number in range(arguments.rounds):
            order = list(checkouts)
            if number % 2:
                order.reverse()
            for name in order:
                costs = {}
                for backend in arguments.backends:
                    costs.update(costs_of_run(checkouts[name], folder, backend))
                    if arguments.digits:
                        costs.update(cost_of_digits(checkouts[name], folder, backend))
                costs.update(costs_of_commands(checkouts[name], folder))
                for what, cost in costs.items():
                    measured.setdefault(what, {}).setdefault(name, []).append(cost)
                    print(f"round {number + 1}, {name}: {what} {cost[0]:.2f} CPU-s, {cost[1]:.2f} s", file=sys.stderr)
    print_table(measured)


def print_table(measured: dict[str, dict[str, list[Cost]]]) -> None:
    """Print the medians over all rounds, and the medians of the per-round ratios."""
    print("| what | CPU-s, other | CPU-s, this | other / this | s, other | s, this |\n|---|--:|--:|--:|--:|--:|")
    for what, costs in measured.items():
        this = costs["this"]
        other = costs.get("other", [])
        cells = [what, median(other, 0), median(this, 0), "", median(other, 1), median(this, 1)]
        if other:
            ratios = [before[0] / after[0] for before, after in zip(other, this, strict=True)]
            cells[3] = f"{statistics.median(ratios):.2f} ×"
        print(f"| {' | '.join(cells)} |")


def median(costs: list[Cost], place: int) -> str:
    """Return the median of the CPU-seconds (0) or the seconds (1)."""
    if not costs:
        return ""
    value = statistics.median(cost[place] for cost in costs)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    main()
