"""The command `report`."""

from pathlib import Path

import pytest

from jobs.__main__ import main
from pipeline import artifacts
from tests.support.paged_runs import add, incident, make_run, report, start

SPIKE = {"kind": "spike", "step": 14, "grad_norm": 321.5, "limit": 12.0, "ids": [[0, 0, 1]]}
SPIKE["recent"] = [{"step": 14, "loss": 9.5, "grad_norm": 321.5, "ledger": "0" * 12}]
RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes}}
pretrain:
  data: {{train: {shards}/train, evaluate: {shards}/test}}
  model: {{name: mu/8, width: 16, depth: 1, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{lr: {lr}, schedule: {{warmup_steps: 2}}}}
  loss: softmax
  steps: 6
  batch_size: 16
  micro_batch: 16
  precision: fp32
  zero: 0
  log_every: 1
"""


@pytest.fixture
def restarted(tmp_path: Path, shards: Path) -> Path:
    """A run that was killed at step 24 and took the steps from 17 on again; with whatever a page can show."""
    folder = make_run(tmp_path / "run", shards)
    second = [start(2, 16), report(2, 20, 28, [1.0, 0.75, 0.5, 0.625], "a" * 64)]
    second += [report(2, 28, 28, [0.4] * 8, "b" * 64)]
    add(folder, SPIKE, *second)
    add(folder, {"kind": "evaluate", "step": 8, "accuracy": 0.5, "judged": 100, "seconds": 1.5})
    values = {"accuracy": 0.8125, "judged": 352, "5shot": 0.7, "5shot-seed-0": 0.6, "5shot-seed-1": 0.8}
    add(folder, {"kind": "evaluate", "step": 28, **values})
    (folder / "incidents.txt").write_text(incident(15, "worker 1 on n7, in backward of step 24: killed by SIGKILL"))
    (folder / "log.txt").write_text("[worker 1] bad sample 1 replaced: train-000001.tar k7: not a JPEG\n")
    artifacts.write_record(folder / artifacts.EXCLUDED_STEPS, {"stretches": [[20, 22]]})
    return folder


def test_the_command_writes_one_page_or_says_what_is_wrong(restarted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(restarted.parent)]) == 0
    assert (restarted.parent / "report.html").exists()
    assert main(["report", str(restarted.parent), str(restarted)]) == 0
    assert (tmp_path / "comparison.html").exists()
    capsys.readouterr()
    assert main(["report", "nowhere"]) == 64
    assert "no run at" in capsys.readouterr().err
    assert main(["report", str(restarted), "--output", "gone/page.html"]) == 64
    assert "there is no folder gone" in capsys.readouterr().err


def run(folder: Path, shards: Path, lr: float) -> Path:
    """A run of six steps; returns its directory."""
    recipe = folder / f"lr-{lr}.yaml"
    recipe.write_text(RECIPE.format(run=folder / f"lr-{lr}", shards=shards, lr=lr))
    assert main(["run", str(recipe)]) == 0
    return folder / f"lr-{lr}"
