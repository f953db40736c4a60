"""`make demo`: the whole campaign on handwritten digits, one worker killed on purpose, and the proof that all is equal.

Pretraining runs under Ray with two workers; once a checkpoint is committed and a few more steps are done, one worker
gets SIGKILL. The run restarts from the commit. Afterwards the same stage runs once more without any interruption, in
plain processes, and every loss and every byte of the last checkpoint is compared.
"""

import os
import signal
import time
from pathlib import Path

from jobs import campaign
from jobs.campaign import Campaign
from jobs.cluster.worker_group import records
from jobs.session import run_campaign
from jobs.supervisor import last_step
from pipeline import checkpoint
from pipeline.telemetry import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "digits.yaml"
VICTIM = 1  # rank of the worker that is killed


class Killer:
    """Kills one worker, once, between two commits of pretraining."""

    def __init__(self, loaded: Campaign) -> None:
        stage = loaded.stage("pretrain")
        self.directory = loaded.directory(stage)
        self.save_every = stage.config.save_every
        self.world = loaded.cluster.workers
        self.killed_at: int | None = None

    def tick(self, folder: Path, number: int) -> None:
        if self.killed_at is not None or folder.parents[1] != self.directory:
            return
        steps = [record["step"] for record in read_metrics(self.directory)]
        saved = last_step(self.directory)
        if saved > 0 and steps and steps[-1] >= saved + self.save_every // 4:
            victim = records(folder, self.world)[VICTIM]["pid"]
            print(
                f"demo: SIGKILL to worker {VICTIM} (pid {victim}) after step {steps[-1]}, last commit step {saved}",
                flush=True,
            )
            os.kill(victim, signal.SIGKILL)
            self.killed_at = steps[-1]


def demo(parent: Path) -> int:
    """Run the campaign, then the uninterrupted twin; 0 when both agree bit for bit."""
    run = parent / time.strftime("demo-%Y%m%d-%H%M%S")
    began = time.monotonic()
    loaded = campaign.load(RECIPE, [f"run={run}"])
    killer = Killer(loaded)
    print(f"demo: {RECIPE.name} with {loaded.cluster.workers} Ray workers in {run}", flush=True)
    run_campaign(loaded, also=killer.tick)
    twin = campaign.load(RECIPE, [f"run={run / 'twin'}", "cluster.backend=processes"])
    print("demo: the same pretraining again, uninterrupted and without Ray, to compare", flush=True)
    for only in ("shards", "pretrain"):
        run_campaign(twin, only=only, quiet=True)
    same = report(loaded, twin, killer)
    print(f"demo: {time.monotonic() - began:.0f}s in all; the run is in {loaded.run}")
    return 0 if same else 70


def report(loaded: Campaign, twin: Campaign, killer: Killer) -> bool:
    """Print what was compared; True when everything is equal."""
    ours, theirs = (c.directory(c.stage("pretrain")) for c in (loaded, twin))
    losses, reference = step_losses(ours), step_losses(theirs)
    replayed = [step for step, values in losses.items() if len(values) > 1]
    flat = {loss for step, values in losses.items() for loss in values if loss != reference[step][0]}
    same_losses = killer.killed_at is not None and losses.keys() == reference.keys() and not flat
    files, expected = (checkpoint.read_manifest(checkpoint.committed(d / "checkpoints")[0]) for d in (ours, theirs))
    same_files = files.files == expected.files and files.ledger == expected.ledger
    print(f"demo: killed after step {killer.killed_at}; {len(replayed)} steps were computed twice")
    verdict = "equal the uninterrupted run's bit for bit" if same_losses else "DIFFER from the uninterrupted run's"
    print(f"demo: {len(losses)} step losses {verdict}")
    print(
        "demo: last checkpoint (weights, moments, ledger): sha256",
        "equal in both runs" if same_files else "DIFFERENT",
    )
    return same_losses and same_files


def step_losses(directory: Path) -> dict[int, list[float]]:
    """Every loss logged for every step; a step that was computed twice has two."""
    found: dict[int, list[float]] = {}
    for record in read_metrics(directory):
        first = record["step"] - len(record["losses"]) + 1
        for step, loss in enumerate(record["losses"], start=first):
            found.setdefault(step, []).append(loss)
    return found
