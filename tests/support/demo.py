"""Run `make demo`: a complete campaign in which one worker is killed, and the proof that the result is the same.

    python -m tests.support.demo --directory runs

1. Pretraining runs under Ray with two workers, on CPUs or with one GPU each. With a single GPU there is one worker,
   unless PATCHLINE_WORKERS_PER_GPU=2 lets two workers share it.
2. A few steps after a checkpoint is committed, one worker receives SIGKILL; the run resumes from that checkpoint.
3. The later stages run, up to the few-shot probe.
4. The same pretraining runs again, uninterrupted and in plain processes.
5. Every loss and every byte of the last checkpoint are compared. GPUs reproduce them only in exact mode, so on GPUs
   pretraining uses it.
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from data.errors import ExitCode
from jobs.__main__ import WATCHERS
from jobs.resolved_recipe import Campaign, Context
from jobs.run.reading import StatusMessage
from jobs.run.session import run_campaign
from jobs.run.watchers import Watcher
from pipeline.checkpoints.manifest import Manifest, committed, read_manifest, step_of
from pipeline.extras.replays.batch import steps_in
from pipeline.identity import workers_per_gpu
from pipeline.monitoring.telemetry import read_metrics
from tests.support import campaigns
from tests.support.worker_records import records

RECIPE = Path(__file__).parents[2] / "jobs" / "recipes" / "digits.yaml"
WORKERS = 2  # at most


def overrides_for(gpus: int) -> list[str]:
    """Return the recipe overrides for this number of visible GPUs; an empty list without GPUs."""
    if gpus == 0:
        return []
    workers = min(gpus, WORKERS)
    return [f"cluster.workers={workers}", "cluster.gpus_per_worker=1", f"pretrain.exact_parts={WORKERS}"]


class Killer(Watcher):
    """Kills one worker, once, between two commits of pretraining.

    A thread reads the stage's files many times a second: the driver reports twice a second, and a fast device trains
    from one commit to the next in less.
    """

    PERIOD_S = 0.01

    def __init__(self, loaded: Campaign) -> None:
        stage = loaded.stage("pretrain")
        self.directory = loaded.directory(stage)
        self.save_every = stage.config.save_every
        self.world = loaded.cluster.most
        self.victim = self.world - 1  # rank of the worker to kill
        self.killed_at: int | None = None
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None

    def stage(self, context: Context) -> None:
        """Start watching when pretraining starts."""
        if context.directory == self.directory:
            self.thread = threading.Thread(target=self.wait_and_kill, daemon=True)
            self.thread.start()

    def status(self, message: StatusMessage) -> None:
        """Stop watching when pretraining ends."""
        if message.directory == self.directory and message.state == "ended" and self.thread is not None:
            self.is_over.set()
            self.thread.join()

    def wait_and_kill(self) -> None:
        """Kill the worker once the reports are a quarter of the way from one commit to the next."""
        while not self.is_over.wait(self.PERIOD_S):
            saved = max((step_of(path) for path in committed(self.directory / "checkpoints")), default=-1)
            reported = max(step_losses(self.directory), default=-1)
            # Before the first commit a restart would begin anew, and show nothing about checkpoints. Right after a
            # commit there would be no lost steps, and repeating them is part of the proof.
            if saved <= 0 or reported < saved + self.save_every // 4:
                continue
            attempt = max((self.directory / "attempts").iterdir())
            pid = records(attempt, self.world)[self.victim]["pid"]
            print(
                f"demo: SIGKILL to worker {self.victim} (pid {pid}) after step {reported}, last commit step {saved}",
                flush=True,
            )
            os.kill(pid, signal.SIGKILL)
            self.killed_at = reported
            return


def demo(parent: Path) -> int:
    """Run the campaign, then its uninterrupted twin; return exit code 0 if both agree bit for bit."""
    run = parent / time.strftime("demo-%Y%m%d-%H%M%S")
    began = time.monotonic()
    gpus = torch.cuda.device_count() * workers_per_gpu()
    overrides = overrides_for(gpus)
    loaded = campaigns.load(RECIPE, [f"run={run}", *overrides])
    killer = Killer(loaded)
    place = f" on {torch.cuda.device_count()} GPUs" if gpus else ""
    print(f"demo: {RECIPE.name} with {loaded.cluster.most} Ray workers{place} in {run}", flush=True)
    run_campaign(loaded, watchers=[killer, *WATCHERS])

    twin = campaigns.load(RECIPE, [f"run={run / 'twin'}", "cluster.backend=processes", *overrides])
    print("demo: the same pretraining again, uninterrupted and without Ray, to compare", flush=True)
    # Only pretraining is compared: the twin needs its shards, but none of the later stages.
    for only in ("shards", "pretrain"):
        run_campaign(twin, only=only, quiet=True)

    equal = report(loaded, twin, killer)
    print(f"demo: {time.monotonic() - began:.0f}s in all; the run is in {loaded.run}")
    if equal:
        return ExitCode.DONE
    return ExitCode.INTERNAL


def report(loaded: Campaign, twin: Campaign, killer: Killer) -> bool:
    """Print the comparison; return True if everything is equal."""
    directory = loaded.directory(loaded.stage("pretrain"))
    twin_directory = twin.directory(twin.stage("pretrain"))

    # Losses: both computations of a repeated step must give the twin's loss.
    losses = step_losses(directory)
    twin_losses = step_losses(twin_directory)
    equal_losses = killer.killed_at is not None and losses.keys() == twin_losses.keys()
    computed_twice = 0
    for step, values in losses.items():
        if len(values) > 1:
            computed_twice += 1
        for loss in values:
            if step in twin_losses and loss != twin_losses[step][0]:
                equal_losses = False

    # Checkpoints: a manifest holds the sha256 of every file, so equal manifests mean equal bytes.
    manifest = newest_manifest(directory)
    twin_manifest = newest_manifest(twin_directory)
    equal_files = manifest.files == twin_manifest.files and manifest.ledger == twin_manifest.ledger

    print(f"demo: killed after step {killer.killed_at}; {computed_twice} steps were computed twice")
    verdict = "equal the uninterrupted run's bit for bit" if equal_losses else "DIFFER from the uninterrupted run's"
    print(f"demo: {len(losses)} step losses {verdict}")
    verdict = "equal in both runs" if equal_files else "DIFFERENT"
    print(f"demo: last checkpoint (weights, moments, ledger): sha256 {verdict}")
    return equal_losses and equal_files


def newest_manifest(directory: Path) -> Manifest:
    return read_manifest(committed(directory / "checkpoints")[0])


def step_losses(directory: Path) -> dict[int, list[float]]:
    """Return all logged losses by step; a repeated step has two."""
    losses_of: dict[int, list[float]] = {}
    for record in read_metrics(directory):
        for step, loss in zip(steps_in(record), record["losses"], strict=True):
            losses_of.setdefault(step, []).append(loss)
    return losses_of


def main() -> int:
    """Run the demo in a new folder under --directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where its run directory goes")
    return demo(parser.parse_args().directory)


if __name__ == "__main__":
    sys.exit(main())
