"""One order, one owner, one result: whatever ZeRO stage, decoding processes or Ray do (kills without Ray:
test_checkpoint_runs.py)."""

import os
import signal
from pathlib import Path

import pytest

from jobs import campaign
from jobs.__main__ import main
from jobs.demo import step_losses
from jobs.gang import records
from jobs.ownership import owned
from jobs.session import run_campaign
from pipeline import checkpoint
from pipeline.telemetry import read_metrics

ROOT = Path(__file__).parents[1]


LENGTH = ["pretrain.steps=240", "pretrain.save_every=60", "pretrain.log_every=2"]  # seconds, so that a fault fits in


def load(recipe: Path, *overrides: str) -> campaign.Campaign:
    return campaign.load(recipe, [*LENGTH, *overrides])


def pretrain_of(recipe: Path, *overrides: str) -> Path:
    loaded = load(recipe, *overrides)
    return loaded.directory(loaded.stage("pretrain"))


def final_files(folder: Path) -> dict:
    """Digests of the last checkpoint's files: masters, moments of every rank, and the ledger."""
    manifest = checkpoint.verify(checkpoint.committed(folder / "checkpoints")[0])
    return {"step": manifest.step, "ledger": manifest.ledger, **manifest.files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shards) -> Path:
    """The pretraining stage folder of a run that nothing disturbed."""
    from tests.conftest import RECIPE

    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(run=folder / "run", shards=shards))
    run_campaign(load(recipe), only="pretrain", quiet=True)
    return pretrain_of(recipe)


def assert_same(folder: Path, reference: Path) -> None:
    assert final_files(folder) == final_files(reference)
    expected = {step: losses[0] for step, losses in step_losses(reference).items()}
    for step, losses in step_losses(folder).items():
        assert set(losses) == {expected[step]}, f"step {step}: {losses}, uninterrupted {expected[step]}"
    assert (folder / "weights.safetensors").read_bytes() == (reference / "weights.safetensors").read_bytes()


def test_a_second_start_of_an_owned_run_exits_73_and_names_the_owner(recipe, capsys):
    with owned(recipe.parent / "run"):
        assert main(["run", str(recipe)]) == 73
    assert f"owned by process {os.getpid()}" in capsys.readouterr().err


@pytest.mark.parametrize(("override", "tolerance"), [("zero=1", 2e-4), ("zero=3", 2e-4), ("data.processes=1", 0.0)])
def test_zero_stages_agree_to_rounding_and_loader_processes_to_the_bit(recipe, uninterrupted, override, tolerance):
    run_campaign(load(recipe, f"pretrain.{override}"), only="pretrain", quiet=True)
    folder = pretrain_of(recipe, f"pretrain.{override}")
    expected = {step: losses[0] for step, losses in step_losses(uninterrupted).items()}
    found = {step: losses[0] for step, losses in step_losses(folder).items()}
    assert found == pytest.approx(expected, abs=tolerance)
    assert final_files(folder)["ledger"] == final_files(uninterrupted)["ledger"]


def test_under_ray_a_killed_worker_leaves_no_trace_either(recipe, uninterrupted, capsys):
    killed = []

    def kill(folder: Path, number: int) -> None:
        found = read_metrics(folder.parents[1])
        if not killed and found and found[-1]["step"] >= 80:
            killed.append(records(folder, 2)[1]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    run_campaign(load(recipe, "cluster.backend=ray"), only="pretrain", also=kill)
    out = capsys.readouterr().out
    assert killed and "dashboard: http://127.0.0." in out and "worker 1 on" in out and "restarting from step 60" in out
    assert_same(pretrain_of(recipe), uninterrupted)
