"""A sample that causes loss spikes is found during training on a local Ray, and masked in resumes and replays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replay import pattern
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.files import import_path
from pipeline import artifacts
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
from pipeline.monitoring.telemetry import read_metrics
from tests.support.drives import stage

POISONED = 137
RECIPE = """
run: run
cluster: {workers: 1, cpus_per_worker: 1}
pretrain:
  data: {train: set, augment: {crop: none, flip: false}}
  model: {name: mu/8, width: 32, depth: 2, mlp: 64, heads: 2, image_size: 16, classes: 10}
  optim: {lr: 3.0e-3, schedule: {warmup_steps: 10}}
  loss: softmax
  steps: 20000
  batch_size: 32
  micro_batch: 4
  exact_parts: 8
  precision: fp32
  save_every: 50
  keep: 99
  health: {on_spike: bisect}
"""


@pytest.mark.slow
def test_a_poisoned_sample_is_found_during_training_and_masked_permanently(tmp_path: Path) -> None:
    """The patterns are learned in a few epochs; from then on the mislabelled one causes a spike in each epoch."""
    rng = np.random.default_rng([0, 1])
    samples = []
    for number in range(320):
        encoded, label = pattern(0, rng, 10)
        wrong = (label + (number == POISONED)) % 10
        samples.append(Sample(f"{number:05d}", encoded, (wrong,), "png"))
    pack(samples, tmp_path / "set", name="train", classes=10, shard_samples=100)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = tmp_path / "run"

    def jobs(*words: str, wait: Callable[[], bool] | None = None) -> int:
        """Run a command, and stop it when `wait` becomes true."""
        environment = {**os.environ, "PYTHONPATH": import_path()}
        with open(tmp_path / "log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobs", *words], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )
            deadline = time.monotonic() + 400
            while wait is not None and process.poll() is None and time.monotonic() < deadline:
                if wait():
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.2)
            return process.wait()

    def masked() -> list[dict[str, Any]]:
        return read_metrics(stage(run), "masked") if list(run.glob("pretrain-*")) else []

    def newest() -> int:
        return max((step_of(path) for path in committed(stage(run) / "checkpoints")), default=0)

    # 1. The sample is found and masked; the run is stopped, and resumes without it.
    assert jobs("run", "recipe.yaml", wait=lambda: bool(masked()) and newest() >= masked()[0]["step"] + 100) == 75
    text = (tmp_path / "log").read_text()
    (record,) = masked()
    since = record["step"]
    assert [(each["shard"], each["key"]) for each in record["samples"]] == [("train-000001.tar", f"{POISONED:05d}")]
    assert f"step {since}: 1 sample masked from this step, 1 in total: train-000001.tar {POISONED:05d}" in text
    end = newest()
    assert jobs("run", "recipe.yaml", wait=lambda: newest() >= end + 100) == 75
    assert "), 1 sample masked; 1 workers" in (tmp_path / "log").read_text()
    newest_commit = committed(stage(run) / "checkpoints")[0]
    assert read_manifest(newest_commit).masked == [[since, 1, POISONED - 100, POISONED - 99]]
    # The sample caused a spike in every epoch; without it there are none.
    spikes = [spike["step"] for spike in read_metrics(stage(run), "spike")]
    assert spikes
    assert max(spikes) <= since
    assert newest() > since + 100

    # 2. Audit before, across and after the mask's first step, and after the resume, with one worker and with two.
    behind = (end // 50 + 1) * 50
    workers_of = {(since - 100, since - 50): 1, (since - 50, since + 50): 2, (since, since + 50): 2}
    for (first, last), workers in {**workers_of, (behind, behind + 50): 1}.items():
        words = ["--from", str(first), "--to", str(last), f"cluster.workers={workers}", "--output", "audit"]
        assert jobs("audit", "run", *words) == 0, (tmp_path / "log").read_text()
        (finding,) = artifacts.read_record(tmp_path / "audit" / "audit.json")["stretches"]
        assert (finding["verdict"], finding["steps"], finding["traced"]) == ("equal", last - first, last - first)
