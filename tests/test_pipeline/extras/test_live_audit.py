"""The live audit repeats drawn parts on another worker: a flipped bit is named, and a clean run is not accused."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import live_audit as bench
from benchmarks.replay import STAGE
from data.errors import ConfigError, CorruptWorker, ExitCode
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import train
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.extras.live_audit import LiveAudit, UndecidedAudit, drawn_shift
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from pipeline.monitoring.telemetry import read_metrics
from tests.support import audited_runs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "shards"
    pack(digits(train=True, image_size=16), folder, name="train", shard_samples=100)
    return folder


def test_share_of_the_steps_is_drawn_evenly_and_repeatably():
    shifts = [drawn_shift(7, step, 0.01, world=4) for step in range(100_000)]
    assert shifts == [drawn_shift(7, step, 0.01, world=4) for step in range(100_000)]
    drawn = Counter(shift for shift in shifts if shift is not None)
    # 100,000 steps at 1 %: 1,000, with a standard deviation of 31.
    assert 850 < drawn.total() < 1150
    assert set(drawn) == {1, 2, 3}, "never the same worker"
    assert drawn_shift(7, 0, 1.0, world=1) == 0, "a single worker repeats its own steps"


def test_no_worker_is_accused_without_a_majority():
    audit = object.__new__(LiveAudit)
    audit.rank = 1
    audit.step = 5
    # The supervisor excludes the node of a worker that ends with CorruptWorker.
    with pytest.raises(UndecidedAudit, match="live audit of step 6: worker 0 or worker 1 computes wrong results"):
        audit.accuse(None, "the loss differs from a repetition", (1, 0))


def test_share_is_checked():
    with pytest.raises(ConfigError, match=r"health\.audit is 2, expected a fraction of the steps, 0 to 1"):
        HealthConfig(audit=2)


def accused(shards: Path, folder: Path, kinds: Sequence[str], config: SpikeConfig, mode: str) -> Any:
    """Return the accusations of a run with a flip of each kind, and the planted faults."""
    faults = []
    for number, what in enumerate(kinds):
        fault = {"what": what, "step": 4 * (number + 1), "rank": number % 4, "bit": 20, "kind": "exp_avg_sq"}
        faults.append({**fault, "u": 0.4, "v": 0.6, "w": 0.2})
    task = bench.task_of(folder / "run", shards, config)
    task |= {"hooks": {bench.HOOK: {}}, "faults": faults, "mode": mode}
    cluster = ClusterConfig(workers=4, backend="processes")
    accusations: Any = run_worker_group(bench.train_with_flips, task, cluster=cluster, name="w", directory=folder)
    return accusations, faults


def ranks_at(accusations: Any) -> dict[int, set[int]]:
    ranks: dict[int, set[int]] = {}
    for accusation in accusations:
        ranks.setdefault(accusation["found"], set()).add(accusation["rank"])
    return ranks


def test_flips_are_named_and_clean_steps_are_not_accused(shards: Path, tmp_path: Path):
    """Run 24 clean and 7 wrong steps, then 16 steps with wrong updates; the benchmark has more cases."""
    kinds = [kind for kind in bench.KINDS if kind not in bench.OF_UPDATES]
    config = bench.config_of(shards, 4 * len(kinds) + 24, 1.0)
    accusations, faults = accused(shards, tmp_path, [*kinds, "sticky moment"], config, "exact")
    *_, sticky = faults
    of_updates = [accusation for accusation in accusations if accusation["found"] >= sticky["step"]]
    others = [accusation for accusation in accusations if accusation["found"] < sticky["step"]]
    assert ranks_at(others) == {fault["step"]: {fault["rank"]} for fault in faults[:-1]}
    texts = {accusation["found"]: accusation["text"] for accusation in others}
    assert texts[4].startswith("the gradient of ") and texts[4].endswith(" differs from a repetition")
    assert texts[12].startswith("the exp_avg_sq of ") and texts[12].endswith(" changed in memory after the update")
    assert texts[16].startswith("the weight of ")
    assert texts[20].startswith("the gradient of ") and " and " in texts[20], "a pixel changes many gradients"
    assert {accusation["rank"] for accusation in of_updates} == {sticky["rank"]}
    assert (
        of_updates[0]["text"].startswith("the exp_avg_sq of ") and "after the update differs" in of_updates[0]["text"]
    )


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        pytest.param(0, "fp32", marks=pytest.mark.slow),
        pytest.param(2, "bf16", marks=pytest.mark.slow),
        (3, "fp32"),
    ],
)
def test_gradients_of_deepspeed_are_compared_bit_for_bit(zero: int, precision: str, shards: Path, tmp_path: Path):
    kinds = ["gradient", "sticky gradient", "pixel"]
    config = bench.config_of(shards, 16, 1.0, "plain", zero, precision)
    accusations, faults = accused(shards, tmp_path, kinds, config, "plain")
    assert ranks_at(accusations) == {fault["step"]: {fault["rank"]} for fault in faults}


def test_gradients_with_noise_are_compared_within_it(shards: Path, tmp_path: Path):
    """Bit 20, a quarter of a number, is far above the noise of sums in another order."""
    config = bench.config_of(shards, 16, 1.0, "noise")
    accusations, faults = accused(shards, tmp_path, ["gradient", "sticky gradient", "pixel"], config, "noise")
    assert ranks_at(accusations) == {fault["step"]: {fault["rank"]} for fault in faults}


def test_workers_that_compute_other_bits_than_each_other_are_refused(shards: Path, tmp_path: Path):
    task = bench.task_of(tmp_path / "run", shards, bench.config_of(shards, 4, 1.0, "plain"))
    task |= {"hooks": {audited_runs.OTHER_ORDER: {}, bench.HOOK: {}}}
    cluster = ClusterConfig(workers=2, backend="processes")
    with pytest.raises(WorkerGroupError) as caught:
        run_worker_group(train.train, task, cluster=cluster, name="w", directory=tmp_path)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert (
        "health.audit needs equal workers, but their devices differ, or the gradients that each computes"
        in caught.value.cause
    )
    assert "use nodes with the same processors and cluster.cpus_per_worker, or set health.audit=0" in caught.value.cause


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in (0, 1, 2)), 3])
def test_audit_changes_no_bit_of_a_run(zero: int, shards: Path, tmp_path: Path):
    losses = []
    for share in (0.0, 0.5):
        config = bench.config_of(shards, 8, share, "plain", zero)
        folder = tmp_path / str(share)
        task = bench.task_of(folder, shards, config) | {"hooks": {bench.HOOK: {}} if share else bench.NO_AUDIT}
        cluster = ClusterConfig(workers=2, backend="processes")
        run_worker_group(train.train, task, cluster=cluster, name="w", directory=folder)
        records = read_metrics(folder / STAGE)
        losses.append([loss for record in records for loss in record["losses"]])
        audited = records[-1].get("audited_parts")
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert audited and audited >= 2
    log = (folder / STAGE / "log.txt").read_text()
    assert "live audit: another worker repeats 50.00% of the steps, compared bit for bit" in log


@pytest.mark.parametrize(("workers", "rank"), [(1, 0), (2, 1)])
def test_accused_worker_ends_the_attempt_before_the_wrong_step_is_committed(
    workers: int, rank: int, shards: Path, tmp_path: Path
):
    task = bench.task_of(tmp_path / "run", shards, bench.config_of(shards, 8, 1.0))
    task["config"]["save_every"] = 3
    task |= {"hooks": {audited_runs.FLIP: {"step": 5, "rank": rank}, bench.HOOK: {}}}
    cluster = ClusterConfig(workers=workers, backend="processes")
    with pytest.raises(WorkerGroupError) as caught:
        run_worker_group(train.train, task, cluster=cluster, name="w", directory=tmp_path)
    assert caught.value.rank == rank
    assert caught.value.kind == CorruptWorker.__name__
    assert caught.value.exit_code is None
    assert f"live audit of step 6: worker {rank} computed wrong results: the gradient of " in caught.value.cause
    steps = [step_of(name) for name in committed(tmp_path / "run" / "pretrain-00000000" / "checkpoints")]
    assert steps and max(steps) <= 5
