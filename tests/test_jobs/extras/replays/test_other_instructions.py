"""A run audited or resumed with another CPU instruction set is reported as such, not as corrupt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.files import import_path
from pipeline import artifacts
from tests.support.recipes import without_check

RECIPE = without_check("""
run: run
cluster: {workers: 1, backend: processes, backoff_s: 0.1}
shards: {kind: pack, shard_samples: 100, sets: {train: {source: digits, split: train, image_size: 16}}}
pretrain:
  data: {train: "@shards/train"}
  model: {name: mu/8, width: 64, depth: 2, mlp: 128, heads: 2, image_size: 16, classes: 10}
  optim: {lr: 1.0e-3, schedule: {decay: constant, warmup_steps: 5}}
  loss: softmax
  steps: 10
  batch_size: 16
  micro_batch: 16
  precision: fp32
  save_every: 5
  keep: 9
""")
# Torch without AVX, and MKL's kernels for every processor.
OTHER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}


def jobs(folder: Path, words: str, **variables: str) -> tuple[int, str]:
    """Run a command in a separate process; return its exit code and its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path(), **variables}
    command = [sys.executable, "-m", "jobs", *words.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instructions")
    (folder / "small.yaml").write_text(RECIPE)
    code, output = jobs(folder, "run small.yaml")
    assert code == 0, output
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_audit_with_other_instructions_is_inconclusive_and_names_them(folder: Path) -> None:
    code, output = jobs(folder, "audit run --from 5 --to 10 --output other", **OTHER)
    (finding,) = artifacts.read_record(folder / "other" / "audit.json")["stretches"]
    before, after = finding["conditions"]["arithmetic"]
    assert "MKL_CBWR" not in before
    assert after["MKL_CBWR"] == "COMPATIBLE"
    assert after["instructions of torch"] == "DEFAULT" != before["instructions of torch"]
    # On this processor the bits differ; on another they may be equal, and then there is nothing to judge.
    if finding["verdict"] != "equal":
        assert finding["verdict"] == "other hardware or libraries: cannot judge"
        assert code == 69, output
        assert "cannot audit pretrain" in output, output
        assert "arithmetic" in output, output
    assert "corruption" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_under_other_instructions_reports_them(folder: Path) -> None:
    code, output = jobs(folder, "run small.yaml pretrain.steps=15 run=longer")
    assert code == 0, output
    (stage,) = (folder / "longer").glob("pretrain-*")
    (stage / "done.json").unlink()
    for newest in stage.glob("checkpoints/step-*15"):
        newest.rename(folder / newest.name)
    code, output = jobs(folder, "run small.yaml pretrain.steps=15 run=longer", **OTHER)
    assert code == 0, output
    assert "conditions have changed since the previous attempt" in output, output
    assert "MKL_CBWR" in output, output
    assert "the last bits may differ from here on" in output, output
