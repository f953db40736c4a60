"""One order, one owner, one result: whatever ZeRO stage, decoding processes or Ray do (kills without Ray:
test_checkpoint_runs.py)."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from data.storage import Folder
from jobs.__main__ import main
from jobs.cluster.ray_agent import WORKER_GAUGE
from jobs.extras.monitor.gauges import OF_DRIVER, OF_REPORT
from jobs.ownership import Lease
from jobs.recipe import campaign
from jobs.run.session import run_campaign
from pipeline.checkpoints.manifest import committed, read_manifest
from pipeline.monitoring.telemetry import read_metrics
from tests.support import campaigns
from tests.support.demo import step_losses
from tests.support.drives import assert_same_stage
from tests.support.families import answers, family_of
from tests.support.recipes import TINY
from tests.support.scrape import EXPORT_EVERY, Scraper
from tests.support.worker_records import records

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("FAULT_SEED", "20261120"))


# Seconds of training, enough to inject a fault.
LENGTH = ["pretrain.steps=96", "pretrain.save_every=24", "pretrain.log_every=2"]


def load(recipe: Path, *overrides: str) -> campaign.Campaign:
    return campaigns.load(recipe, [*LENGTH, *overrides])


def pretrain_of(recipe: Path, *overrides: str) -> Path:
    loaded = load(recipe, *overrides)
    return loaded.directory(loaded.stage("pretrain"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shards) -> Path:
    """Return the pretraining folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = folder / "tiny.yaml"
    recipe.write_text(TINY.format(run=folder / "run", shards=shards))
    run_campaign(load(recipe), only="pretrain", quiet=True)
    return pretrain_of(recipe)


def test_a_second_start_of_an_owned_run_exits_73_and_names_the_owner(recipe, capsys):
    with Lease(Folder(recipe.parent / "run"), print):
        assert main(["run", str(recipe)]) == 73
    assert f"owned by process {os.getpid()}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "tolerance"), [pytest.param("zero=3", 2e-4, marks=pytest.mark.slow), ("data.processes=1", 0.0)]
)
def test_zero_stages_agree_to_rounding_and_loader_processes_to_the_bit(recipe, uninterrupted, override, tolerance):
    run_campaign(load(recipe, f"pretrain.{override}"), only="pretrain", quiet=True)
    folder = pretrain_of(recipe, f"pretrain.{override}")
    expected = {step: losses[0] for step, losses in step_losses(uninterrupted).items()}
    found = {step: losses[0] for step, losses in step_losses(folder).items()}
    assert found == pytest.approx(expected, abs=tolerance)
    ours, theirs = (read_manifest(committed(stage / "checkpoints")[0]) for stage in (folder, uninterrupted))
    assert ours.ledger == theirs.ledger


# Metrics of a run on a CPU, whose model FLOPs utilization is unknown.
SHOWN = {f"ray_patchline_{name}" for name in {*OF_REPORT, *OF_DRIVER} - {"mfu"}}


def assert_visible(scraper: Scraper, run: Path, folder: Path) -> None:
    """Assert that the run was visible in Prometheus and in Ray's dashboard."""
    for name in SHOWN:
        labels = scraper.seen.get(name, {})
        assert (labels.get("run"), labels.get("stage")) == (run.name, "pretrain"), (name, sorted(scraper.seen))
    assert scraper.seen["ray_patchline_lease_age_s"]["run"] == run.name
    worker = scraper.seen[f"ray_{WORKER_GAUGE}"]
    assert (worker["run"], worker["stage"]) == (run.name, "pretrain")
    assert worker["rank"] in "01"


def kill_by_plan(folder: Path, plan: list[tuple[int, str]], pauses: list[float]) -> None:
    """Send SIGKILL to a worker or to the agent in each attempt, some time after it reports the step."""
    attempt = 0
    for (step, victim), pause in zip(plan, pauses, strict=True):
        while not (found := [r for r in read_metrics(folder) if r["attempt"] > attempt and r["step"] >= step]):
            time.sleep(0.01)
        attempt = found[0]["attempt"]
        time.sleep(pause)
        if victim == "agent":
            (pid,) = answers(family_of(), lambda p: [p.pid] if "RayAgent" in " ".join(p.cmdline()) else [])
        else:
            pid = records(folder / "attempts" / f"attempt-{attempt:06d}", 2)[int(victim)]["pid"]
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(9000)
@pytest.mark.parametrize(("rounds", "agents"), [(1, 1), pytest.param(17, 3, marks=pytest.mark.slow)])
def test_under_ray_a_killed_worker_and_agent_leave_no_trace_either(
    rounds, agents, recipe, uninterrupted, capsys, monkeypatch
):
    """A worker and the agent are killed several times per round, each in a separate attempt."""
    rng = random.Random(SEED)
    # The path is relative to the current directory of this process; Ray's workers have another one.
    monkeypatch.chdir(recipe.parent)
    Path("ds.json").write_text("{}")
    monkeypatch.setenv(*EXPORT_EVERY)
    for number in range(rounds):
        options = ["cluster.backend=ray", f"run={recipe.parent / f'run-{number}'}", "pretrain.deepspeed=ds.json"]
        loaded = load(recipe, *options)
        folder = loaded.directory(loaded.stage("pretrain"))
        first = ((36, "1"), (rng.randrange(26, 42), "agent"))
        more = ((rng.randrange(50, 66), "agent"), (rng.randrange(74, 84), "agent"))
        plan = [*first, *more][: 1 + agents]
        pauses = [rng.random() * 0.1 for _ in plan]
        killer = threading.Thread(target=kill_by_plan, args=(folder, plan, pauses), daemon=True)
        killer.start()
        scraper = Scraper({*SHOWN, f"ray_{WORKER_GAUGE}"}, held_attempt=1 + len(plan))
        run_campaign(loaded, only="pretrain", watchers=[scraper, "jobs.extras.monitor.gauges:Gauges"])
        killer.join(timeout=1)
        out = capsys.readouterr().out
        assert not killer.is_alive(), f"{plan}, FAULT_SEED={SEED}\n{out}"
        assert "dashboard: http://127.0.0." in out, f"{plan}, FAULT_SEED={SEED}\n{out}"
        assert "worker 1 on" in out
        assert "killed by SIGKILL; restarting from step 24" in out
        died = "its node's agent died (killed, or crashed), together with its workers; restarting from step"
        assert out.count(died) == agents
        assert_same_stage(folder, uninterrupted)
        assert_visible(scraper, loaded.run, folder)
