"""Run one long campaign unattended on three simulated hosts, with a random fault every minute.

    .venv/bin/python -m tests.support.cluster_soak --minutes 60 --seed 7

1. Three hosts with one processor each run the units of deploy/systemd (`SupervisedHosts` in
   tests/support/ray_hosts.py), which keep a Ray cluster and a campaign of two workers alive. The first host is the
   head and runs the driver.
2. Every minute the soak injects one of `FAULTS`, drawn from the seed. It kills a host during a step or a save, drains
   or disconnects it, makes its link slow or drop every packet, or kills the head and with it all nodes. After a while
   the soak restores the power or the link. It does nothing else to the hosts, and nobody types a command.
3. At the end the soak sends SIGTERM to the driver's unit: the run commits its step and exits with 75.
4. The ledger must match the order of the samples, and every step must be recorded. An undisturbed run of the same
   number of steps, without Ray and hosts, must have the same ledger, weights, moments and losses. This takes about as
   long as the steps did; `--without-twin` skips it.

The soak prints the cost of each fault, and at the end how the time was spent, computed from metrics.jsonl only. The
exit code is 0 if the run needed no help and equals the undisturbed run.
"""

import argparse
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from data.errors import ExitCode
from data.index.document import load_index
from data.order import Ledger, Order
from jobs.stage_folders import last_metrics
from pipeline.checkpoints.manifest import committed, read_manifest
from pipeline.monitoring.telemetry import Record, account, read_metrics
from pipeline.recipe import read_recipe
from tests.support import hosts, recipes
from tests.support.demo import step_losses
from tests.support.hosts import ROOT, login_environment
from tests.support.ray_hosts import SupervisedHosts, has_reported, is_saving, newest_nodes

NAMES = ["h0", "h1", "h2"]
EVERY_S = 60.0
AWAY_S = 20.0  # time until a dead host or link returns
SLOW_S = 30.0
STAYS_S = 30  # a drained host
POLL_S = 0.03  # a save takes about 0.06 s
STEP_TIMEOUT_S = 300.0
TWIN_TIMEOUT_S = 3600.0
# More steps than anybody has time for; the rate does not depend on their number, so an undisturbed run may have fewer.
OVERRIDES = ["pretrain.optim.schedule.decay=constant", "pretrain.micro_batch=1", "pretrain.log_every=5"]
OVERRIDES += ["pretrain.data.processes=1"]  # images are decoded while a step waits for the other host
OVERRIDES += ["pretrain.save_every=25", "cluster.backoff_s=1"]
ENDLESS = 10_000_000
BATCH = 16  # as in recipes.SMALL


@dataclass
class Soak:
    """The cluster, its campaign, and what has happened so far."""

    cluster: SupervisedHosts
    run: Path
    rng: random.Random

    def worker_host(self) -> str:
        """Return a training host other than the head."""
        nodes = newest_nodes(self.run).values()
        return self.rng.choice(sorted(node for node in nodes if node != self.cluster.names[0]))

    def until(self, claim: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a claim about the run is true. Raises an error after the timeout or if the driver's unit ends."""
        deadline = time.monotonic() + timeout_s
        while not claim():
            code = self.cluster.driver.poll() if self.cluster.driver is not None else None
            if code is not None or time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain; the driver's unit: {code}\n{self.output()[-4000:]}")
            time.sleep(POLL_S)

    def output(self) -> str:
        """Return what the driver and its supervisor have printed."""
        return (self.cluster.network.shared / f"{self.cluster.names[0]}-patchline-driver.log").read_text()


# ------------------------------------------------------------------------ what befalls them


def kill_in_step(soak: Soak) -> str:
    name = soak.worker_host()
    time.sleep(soak.rng.random() * 0.5)
    soak.cluster.network[name].kill()
    time.sleep(AWAY_S)
    soak.cluster.join(name)
    return name


def kill_in_save(soak: Soak) -> str:
    name = soak.worker_host()
    soak.until(is_saving(soak.run), STEP_TIMEOUT_S)
    soak.cluster.network[name].kill()
    time.sleep(AWAY_S)
    soak.cluster.join(name)
    return name


def drain(soak: Soak) -> str:
    name = soak.worker_host()
    soak.cluster.drain(name, soak.run, STAYS_S)
    time.sleep(STAYS_S)
    # The host is reclaimed, and another one replaces it.
    soak.cluster.network[name].kill()
    soak.cluster.join(name)
    return name


def cut(soak: Soak) -> str:
    name = soak.worker_host()
    soak.cluster.network[name].cut()
    return back_after_a_dead_link(soak, name)


def black_hole(soak: Soak) -> str:
    name = soak.worker_host()
    soak.cluster.network[name].black_hole()
    return back_after_a_dead_link(soak, name)


def back_after_a_dead_link(soak: Soak, name: str) -> str:
    time.sleep(AWAY_S + 20)
    soak.cluster.network[name].mend()
    return name


def slow(soak: Soak) -> str:
    name = soak.worker_host()
    soak.cluster.network[name].slow(delay_s=0.2, loss=0.05, seed=soak.rng.randrange(1000))
    time.sleep(SLOW_S)
    soak.cluster.network[name].mend()
    return name


def lose_head(soak: Soak) -> str:
    for name in NAMES:
        soak.cluster.network[name].kill()
    soak.cluster.start()
    return NAMES[0]


FAULTS: list[Callable[[Soak], str]] = [kill_in_step, kill_in_save, drain, cut, black_hole, slow, lose_head]


# ------------------------------------------------------------------------ the soak


def main() -> int:
    """Run the soak; return exit code 0 if the run needed no help and equals the undisturbed one."""
    words = parse(sys.argv[1:])
    reason = hosts.missing()
    if reason:
        print(f"cluster-soak: {reason}", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    shared = ROOT / "runs" / time.strftime("cluster-soak-%Y%m%d-%H%M%S")
    shared.mkdir(parents=True)
    recipe = shared / "small.yaml"
    recipe.write_text(recipes.SMALL)
    run = shared / "run"
    # The recipe of the driver's unit says all.
    whole = read_recipe(recipe, [f"run={run}", "cluster.backend=ray", *OVERRIDES, f"pretrain.steps={ENDLESS}"])
    unit_recipe = shared / "soak.yaml"
    unit_recipe.write_text(OmegaConf.to_yaml(whole.values))
    print(f"cluster-soak: {words.minutes:g} minutes, seed {words.seed}, in {shared}", flush=True)
    with SupervisedHosts(shared, NAMES, unit_recipe) as cluster:
        soak = Soak(cluster, run, random.Random(words.seed))
        code = suffer(soak, words.minutes * 60)
    restarts = soak.output().count("started again")
    print(f"cluster-soak: the driver's unit was started again {restarts} times; no command was typed")
    if code != ExitCode.PREEMPTED:
        print(f"cluster-soak: the run ended with {code}\n{soak.output()[-4000:]}")
        return ExitCode.INTERNAL
    is_good = adds_up(run) and (words.without_twin or is_same(shared, recipe, run))
    return ExitCode.DONE if is_good else ExitCode.INTERNAL


def parse(words: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the faults; drawn and printed")
    parser.add_argument("--without-twin", action="store_true", help="do not compare with an undisturbed run")
    return parser.parse_args(words)


def suffer(soak: Soak, seconds: float) -> int:
    """Inject a fault every minute until the time is over, then stop the run; return its exit code.

    Raises TimeoutError if the run ends by itself or makes no progress for minutes.
    """
    soak.until(has_reported(soak.run, 1), STEP_TIMEOUT_S)
    began = time.monotonic()
    count = 0
    to_come: list[Callable[[Soak], str]] = []
    while time.monotonic() - began < seconds - EVERY_S:
        next_at = time.monotonic() + EVERY_S
        minutes = (time.monotonic() - began) / 60
        # Shuffled anew each time, so that no fault repeats before all have occurred.
        if not to_come:
            to_come = soak.rng.sample(FAULTS, len(FAULTS))
        fault = to_come.pop()
        nodes = newest_nodes(soak.run)
        befell_at = time.time()
        step = last_report(soak.run)["step"]
        name = fault(soak)
        # Inject the next fault only while the run trains; otherwise the fault would test nothing.
        soak.until(has_reported_since(soak.run, time.time()), STEP_TIMEOUT_S)
        count += 1
        print(f"{minutes:5.1f} min: {fault.__name__} of {name}, workers on {', '.join(nodes.values())}, ", end="")
        print(f"step {step}; {longest_pause(soak.run, befell_at):.0f} s without a step", flush=True)
        time.sleep(max(0.0, next_at - time.monotonic()))
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    soak.cluster.stop_driver()
    assert soak.cluster.driver is not None
    code = soak.cluster.driver.wait(STEP_TIMEOUT_S)
    print(f"cluster-soak: {count} faults in {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return code


def last_report(run: Path) -> Record:
    """Return the run's newest report. Only the end of the file is read, because the hosts share this process's CPUs."""
    (folder,) = run.glob("pretrain-*")
    report = last_metrics(folder)
    assert report is not None
    return report


def has_reported_since(run: Path, moment: float) -> Callable[[], bool]:
    """Return the claim that the run has reported a step after a moment, in seconds since 1970."""
    return lambda: last_report(run)["time"] > moment


def longest_pause(run: Path, since: float) -> float:
    """Return the longest time between two reports, in seconds, of which the later came after a moment."""
    (folder,) = run.glob("pretrain-*")
    times = [record["time"] for record in read_metrics(folder)]
    pauses = [0.0]
    for earlier, later in itertools.pairwise(times):
        if later > since:
            pauses.append(later - earlier)
    return max(pauses)


# ------------------------------------------------------------------------ what came of it


def adds_up(run: Path) -> bool:
    """Print how the run spent its time and what happened; return whether its ledger and step records are complete."""
    (folder,) = run.glob("pretrain-*")
    last = read_manifest(committed(folder / "checkpoints")[0])
    print(f"cluster-soak: {last.step} steps; {account(read_metrics(folder, None)).line()}")
    incidents = []
    if (folder / "incidents.txt").exists():
        incidents = [line for line in (folder / "incidents.txt").read_text().splitlines() if " worker " in line[:44]]
    print("cluster-soak: incidents:", *incidents, sep="\n  ")

    index = load_index(next(run.glob("shards-*")) / "train")
    order = Order(index.shard_samples, seed=0, batch_size=BATCH)
    ledger = Ledger.start(index.digest, 0)
    for step in range(last.step):
        ledger = ledger.update(step, *order.batch(step))
    losses = step_losses(folder)
    return holds(
        {
            "the ledger is that of the order": last.ledger == ledger.hex,
            "every step is recorded": losses.keys() == set(range(1, last.step + 1)),
            "steps that were computed twice have one loss": all(len(set(values)) == 1 for values in losses.values()),
        }
    )


def is_same(shared: Path, recipe: Path, run: Path) -> bool:
    """Compare the run with an undisturbed one."""
    (folder,) = run.glob("pretrain-*")
    ours = read_manifest(committed(folder / "checkpoints")[0])
    twin = shared / "twin"
    words = [str(recipe), f"run={twin}", *OVERRIDES, "pretrain.save_every=1000", f"pretrain.steps={ours.step}"]
    began = time.monotonic()
    with (shared / "twin.log").open("w") as log:
        command = [sys.executable, "-m", "jobs", "run", *words]
        environment = login_environment() | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=TWIN_TIMEOUT_S, check=True)
    print(f"cluster-soak: {ours.step} undisturbed steps without Ray and hosts took {time.monotonic() - began:.0f} s")

    (twin_folder,) = twin.glob("pretrain-*")
    theirs = read_manifest(committed(twin_folder / "checkpoints")[0])
    expected = {step: set(values) for step, values in step_losses(twin_folder).items()}
    found = {step: set(values) for step, values in step_losses(folder).items()}
    return holds(
        {
            "the ledger is the undisturbed run's": ours.ledger == theirs.ledger,
            "weights and moments are": ours.files == theirs.files,
            "the loss of every step is": found == expected,
        }
    )


def holds(claims: dict[str, bool]) -> bool:
    """Print claims about the run and whether they hold; return whether all do."""
    for claim, is_true in claims.items():
        print(f"cluster-soak: {claim}: {'yes' if is_true else 'NO'}", flush=True)
    return all(claims.values())


if __name__ == "__main__":
    sys.exit(main())
