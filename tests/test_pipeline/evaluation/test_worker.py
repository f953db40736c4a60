"""The worker of an evaluation stage: its results match those of the whole model on the whole set."""

import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from data.errors import ExitCode
from data.evaluation import EvaluationSet
from data.index.document import load_index
from data.remote.config import CacheConfig
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from models.catalog import normalise
from pipeline import config
from pipeline.evaluation.evaluator import Request
from pipeline.evaluation.protocols import Protocol
from pipeline.evaluation.worker import WorkerConfig, worker
from pipeline.identity import code_version
from tests.support.shards import digits, write_set


def evaluate(run: Path, test: Path) -> Any:
    """Have two workers evaluate the weights of the run on a set; return the value of rank 0."""
    (run / "attempts").mkdir(parents=True)
    (run / "attempts" / "000001.json").write_text("{}")  # the driver's claim
    cfg = WorkerConfig(
        preprocess="resize(16)", max_labels=1, micro_batch=16, precision="fp32", stall_s=60.0, cache=CacheConfig()
    )
    task = {
        "run": str(run),
        "remote": None,
        "attempt": 1,
        "claimed": time.time(),
        "code": code_version(),
        "folder": str(run / "evaluate" / "attempts" / "attempt-000001"),
        "config": config.plain(cfg),
        "init": str(run / "weights"),
        "requests": [asdict(Request(str(test), None, Protocol("top-1", {})))],
    }
    cluster = ClusterConfig(workers=2, backend="processes")
    return run_worker_group(worker, task, cluster=cluster, name="group", directory=run)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with the weights of a small model."""
    model = models.from_config(models.config_of("mu/8", 16, 10), torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))  # a new head is all zeros
    models.save_weights(model, tmp_path / "run" / "weights")
    return tmp_path / "run"


def test_two_workers_count_the_right_predictions_of_the_whole_model(run: Path, tmp_path: Path) -> None:
    write_set(islice(digits(train=False, image_size=16), 50), tmp_path / "set", shard_samples=20)
    value = evaluate(run, tmp_path / "set")
    model = models.load(run / "weights")
    right = 0
    for batch in EvaluationSet(load_index(tmp_path / "set"), "resize(16)", batch_size=50):
        with torch.no_grad():
            predicted = model(normalise(batch.images, model.config, torch.float32, torch.device("cpu"))).argmax(1)
        right += int(((predicted == batch.labels[:, 0]) & batch.mask).sum())
    (result,) = value["results"]
    assert result["set"]["judged"] == 50
    assert result["values"]["top-1"]["value"] == right / 50


def test_missing_set_ends_all_workers_with_its_name_and_a_remedy(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="repair the set, then run the same command again") as failure:
        evaluate(run, tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(failure.value)
    assert failure.value.exit_code == ExitCode.DATA
