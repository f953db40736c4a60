"""The live audit repeats drawn parts on another worker: a flipped bit is named, and a clean run is not accused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import live_audit as bench
from data.errors import ConfigError, CorruptWorker
from data.shards.packing import pack
from data.sources.samples import digits
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.extras.live_audit import Draw, LiveAudit, UndecidedAudit, draw, verdict
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from tests.support import audited_runs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "shards"
    pack(digits(train=True, image_size=16), folder, name="train", shard_samples=100)
    return folder


def test_share_of_the_parts_is_drawn_evenly_and_repeatably():
    draws = [draw(7, step, 0.01, world=4, parts=8) for step in range(20_000)]
    assert draws == [draw(7, step, 0.01, world=4, parts=8) for step in range(20_000)]
    drawn = [one for one in draws if one is not None]
    # 160,000 parts at 1 %: 1,600, with a standard deviation of 40.
    assert 1440 < sum(len(one.parts) for one in drawn) < 1760
    assert {part for one in drawn for part in one.parts} == set(range(8))
    assert {one.shift for one in drawn} == {1, 2, 3}, "never the same worker"
    assert draw(7, 0, 1.0, world=1, parts=2).shift == 0, "a single worker repeats its own parts"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("votes", "accused", "right"),
    [
        # original, repetition by worker 2, then one more repetition by each of the workers
        ("baaaaa", 0, "a"),  # a transient error of worker 0
        ("baabaa", 0, "a"),
        ("bacaaa", 0, "a"),  # an error of worker 0 that is different each time
        ("abaaaa", 2, "a"),  # the repetition was wrong
        ("babbaa", None, "a"),  # a tie
        ("ba" + "ba", None, "a"),  # a lasting error with two workers
        ("baa", 0, "a"),  # a transient error of a single worker
    ],
)
def test_majority_decides_which_worker_is_wrong(votes: str, accused: int | None, right: str):
    tensors = [torch.tensor([float(ord(vote)), 1.0]) for vote in votes]
    rank, correct = verdict(tensors, 0, 2)
    assert rank == accused
    assert correct[0] == ord(right)


def test_no_worker_is_accused_without_a_majority():
    audit = object.__new__(LiveAudit)
    audit.rank = 1
    audit.drawn = Draw(5, frozenset({0}), 1, 0.0)
    # The supervisor excludes the node of a worker that ends with CorruptWorker.
    with pytest.raises(UndecidedAudit, match="live audit of step 6: worker 0 or worker 1 computes wrong results"):
        audit.accuse(None, "the loss differs from a repetition", (1, 0))


def test_share_is_checked_and_exact_mode_is_required():
    with pytest.raises(ConfigError, match=r"health\.audit is 2, expected a fraction of the steps, 0 to 1"):
        HealthConfig(audit=2)
    with pytest.raises(ConfigError, match=r"set exact_parts to the largest number of workers, or health\.audit=0"):
        SpikeConfig(steps=1, health=HealthConfig(audit=0.01))


def test_flips_are_named_and_clean_steps_are_not_accused(shards: Path, tmp_path: Path):
    """Run 24 clean and 7 wrong steps; the benchmark has more cases."""
    faults = []
    for number, what in enumerate(bench.KINDS):
        fault = {"what": what, "step": 4 * (number + 1), "rank": number % 4, "bit": 20, "kind": "exp_avg_sq"}
        faults.append({**fault, "u": 0.4, "v": 0.6, "w": 0.2})
    config = bench.config_of(shards, 4 * len(faults) + 3, 1.0)
    task = bench.task_of(tmp_path / "run", shards, config)
    task |= {"hooks": {bench.HOOK: {}}, "faults": faults}
    cluster = ClusterConfig(workers=4, backend="processes")
    accusations: Any = run_worker_group(bench.train_with_flips, task, cluster=cluster, name="w", directory=tmp_path)
    ranks_at: dict[int, set[int]] = {}
    for accusation in accusations:
        ranks_at.setdefault(accusation["found"], set()).add(accusation["rank"])
    assert ranks_at == {fault["step"]: {fault["rank"]} for fault in faults}
    texts = {accusation["found"]: accusation["text"] for accusation in accusations}
    assert texts[4].startswith("the gradient of ") and texts[4].endswith(" differs from a repetition")
    assert texts[12].startswith("the exp_avg_sq of ") and texts[12].endswith(" changed in memory after the update")
    assert texts[16].startswith("the weight of ")
    assert texts[20].startswith("the gradient of ") and " and " in texts[20], "a pixel changes many gradients"


def test_accused_worker_ends_the_attempt_before_the_wrong_step_is_committed(shards: Path, tmp_path: Path):
    task = bench.task_of(tmp_path / "run", shards, bench.config_of(shards, 8, 1.0))
    task["config"]["save_every"] = 3
    task |= {"hooks": {bench.HOOK: {}}, "flip": {"step": 5, "rank": 1}}
    cluster = ClusterConfig(workers=2, backend="processes")
    with pytest.raises(WorkerGroupError) as caught:
        run_worker_group(audited_runs.train_with_flip, task, cluster=cluster, name="w", directory=tmp_path)
    assert caught.value.rank == 1
    assert caught.value.kind == CorruptWorker.__name__
    assert caught.value.exit_code is None
    assert "live audit of step 6: worker 1 computed wrong results: the gradient of " in caught.value.cause
    steps = [step_of(name) for name in committed(tmp_path / "run" / "pretrain-00000000" / "checkpoints")]
    assert steps and max(steps) <= 5
