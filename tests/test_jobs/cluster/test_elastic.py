"""Elastic training: the allowed numbers of workers of a stage, and when a run grows."""

import json

import pytest

from data.errors import ConfigError
from jobs.__main__ import main
from jobs.cluster.elastic import Growth, Proven, Sizes
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.stages.training import allowed_worlds
from pipeline.training_config import TrainConfig
from tests.support import campaigns


def config(**fields: object) -> TrainConfig:
    return TrainConfig(**{"steps": 9, "batch_size": 48, "micro_batch": 4, "precision": "fp32"} | fields)


def between(least: int, most: int) -> ClusterConfig:
    return ClusterConfig(workers=WorkerRange(least=least, most=most))


@pytest.mark.parametrize(
    ("fields", "least", "most", "worlds"),
    [
        ({}, 1, 12, (12, 6, 4, 3, 2, 1)),  # 48 / 4 = 12 micro-batches, so a divisor of 12
        ({}, 1, 16, (12, 6, 4, 3, 2, 1)),
        ({}, 5, 11, (6,)),
        ({"exact_parts": 4}, 1, 12, (4, 2, 1)),
        ({"uneven": True}, 45, 50, (48, 47, 46, 45)),  # no worker without a sample
    ],
)
def test_allowed_worlds_divide_the_batch(fields, least, most, worlds) -> None:
    assert allowed_worlds(config(**fields), between(least, most)) == worlds


def test_deepspeed_file_allows_only_worlds_that_fit_its_accumulation(tmp_path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 4}))
    assert allowed_worlds(config(deepspeed=str(file)), between(1, 12)) == (3,)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        allowed_worlds(config(deepspeed=str(file)), between(4, 12))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.workers={least: 5, most: 7}"],
            "pretrain: batch_size 16 cannot be divided into micro-batches of",
        ),
        (
            ["cluster.workers={least: 5, most: 7}"],
            "for any number of workers from 5 to 7\n  set cluster.workers.least=4\n",
        ),
        (["cluster.workers={least: 3, most: 3}"], "16 is not a multiple of micro_batch 4 × 3 workers = 12; nearest"),
        (
            ["cluster.workers={least: 3, most: 3}", "pretrain.micro_batch=1", "pretrain.exact_parts=16"],
            "pretrain: batch_size 16 is not a multiple of micro_batch 1 × 3 workers = 3",
        ),
        (
            ["cluster.workers={least: 3, most: 7}", "pretrain.micro_batch=2", "pretrain.exact_parts=2"],
            "exact_parts of 2 for any number of workers from 3 to 7\n  set cluster.workers.least=2\n",
        ),
        (["cluster.workers={least: 5, most: 6}", "pretrain.micro_batch=2"], "least=4 or cluster.workers.most=8"),
        (["cluster.workers={least: 0, most: 7}"], "cluster: workers.least is 0, expected 1 or more"),
        (["cluster.workers={least: 4, most: 2}"], "cluster: workers.most is 2, expected 4 or more"),
        (["cluster.workers.least=1"], "cluster.workers.most is missing"),
        (["cluster.workers={leest: 1, most: 2}"], "unknown key cluster.workers.leest; did you mean 'least'?"),
        (["cluster.workers=some"], "cluster.workers is some, expected a whole number, or a section with the keys"),
        (["cluster.patience_s=-1"], "patience_s is -1.0, expected 0 or more"),
    ],
)
def test_unusable_range_is_refused_before_anything_starts(recipe, capsys, overrides, message) -> None:
    assert main(["run", str(recipe), *overrides]) == 78
    assert message in capsys.readouterr().err
    assert not (recipe.parent / "run").exists()


def test_number_of_workers_may_come_from_an_environment_variable(recipe, monkeypatch) -> None:
    monkeypatch.setenv("WORKERS", "2")
    for override, workers in (
        ("cluster.workers=${oc.env:WORKERS}", 2),
        ("cluster.workers={least: 1, most: '${oc.env:WORKERS}'}", WorkerRange(least=1, most=2)),
    ):
        assert campaigns.load(recipe, [override]).cluster.workers == workers


def test_plan_prints_the_allowed_worlds_and_resolves_the_range(recipe, capsys) -> None:
    words = ["plan", str(recipe), "cluster.workers.least=1", "cluster.workers.most=6"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "cluster        1 to 6 workers (processes)\n" in out
    assert "  batch   16 = 4 workers × micro_batch 4 × accumulation 1\n" in out
    assert "  workers 4, 2 or 1, depending on available nodes; values per worker are for 1\n" in out
    assert main([*words, "--resolved"]) == 0
    assert "  workers:\n    least: 1\n    most: 6\n" in capsys.readouterr().out
    assert main([*words[:3], "cluster.workers.most=9", "pretrain.uneven=true"]) == 0
    assert "  workers 9, 8, 7 … 1, depending on available nodes; " in capsys.readouterr().out


# ------------------------------------------------------------------------ when a run grows


class Cluster:
    """A fake cluster: room, newest commit and clock are set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.room = 2
        self.step = 100

    def growth(self, not_before: float = 0.0) -> Growth:
        return Growth((8, 4), 60.0, lambda: self.room, lambda: self.step, not_before, clock=lambda: self.now)


def test_run_grows_at_the_first_commit_after_nodes_have_stayed_for_patience_s() -> None:
    cluster = Cluster()
    growth = cluster.growth()

    def is_due(now: float, room: int, step: int) -> bool:
        cluster.now, cluster.room, cluster.step = now, room, step
        growth.check_room()
        return growth.is_due()

    assert not is_due(0, room=2, step=100)
    assert not is_due(10, room=4, step=110), "a node has joined"
    assert not is_due(40, room=3, step=120), "and has left"
    assert not is_due(50, room=5, step=130)
    assert not is_due(109, room=5, step=140), "the room has not lasted 60 s yet"
    assert not is_due(110, room=8, step=150), "it has, but an earlier commit does not count"
    assert growth.target is None
    assert is_due(112, room=8, step=160)
    assert growth.target == 4, "there has been room for eight workers for only two seconds"
    assert is_due(113, room=2, step=160), "the workers have been asked to end, so it stays due"


def is_due(growth: Growth) -> bool:
    """Check the room once, and return whether growing is due."""
    growth.check_room()
    return growth.is_due()


def test_largest_world_with_stable_room_is_chosen() -> None:
    cluster = Cluster()
    growth = cluster.growth()
    cluster.room = 9
    growth.check_room()
    cluster.now = 60
    assert not is_due(growth)
    cluster.step += 1
    assert is_due(growth)
    assert growth.target == 8


def test_growth_is_postponed_after_a_failed_growth() -> None:
    cluster = Cluster()
    growth = cluster.growth(not_before=600.0)
    cluster.room = 8
    growth.check_room()
    cluster.now = 599
    assert not is_due(growth)
    cluster.step += 1
    assert not is_due(growth)
    cluster.now = 600
    assert not is_due(growth), "only a later commit counts"
    cluster.step += 1
    assert is_due(growth)


def test_unanswered_check_is_repeated_later(monkeypatch) -> None:
    monkeypatch.setattr("jobs.cluster.elastic.CHECK_EVERY_S", 0.01)

    def no_answer() -> int:
        asked.append(growth.has_ended.set())
        raise ConnectionError

    asked: list[None] = []
    growth = Growth((4,), 0.0, no_answer, lambda: 0)
    growth.watch()
    assert asked == [None]
    assert not growth.is_due()


def test_larger_attempt_without_a_commit_falls_back_and_postpones_growth_longer_each_time() -> None:
    now = [0.0]
    sizes = Sizes((8, 4, 2), clock=lambda: now[0])
    sizes.record_start(8)
    assert sizes.fall_back(8) is None, "no smaller attempt has committed: an ordinary failure"
    sizes.record_commit(4, {"a", "b"})
    assert sizes.fall_back(4) is None
    sizes.record_scale_up(8)
    sizes.record_start(8)
    assert sizes.fall_back(8) == Proven(4, {"a", "b"})
    assert sizes.open_worlds() == [4, 2]
    assert sizes.not_before == 600
    now[0] = 1000.0
    sizes.record_scale_up(8)
    assert sizes.open_worlds() == [8, 4, 2]
    sizes.record_start(4)
    assert sizes.not_before == 1000 + 1200, "the attempt did not get its places"
    sizes.record_start(2)
    assert sizes.not_before == 1000 + 1200, "fewer workers than before is not a failed growth"
    sizes.record_commit(8, {"a", "b", "c"})
    sizes.record_commit(2, {"a"})
    assert sizes.fall_back(4) == Proven(2, {"a"}), "the last attempt that committed, on its nodes"
    assert sizes.not_before == 1000 + 600, "the run has grown since then"


def test_old_checkpoint_in_a_store_that_responds_late_is_not_a_new_commit() -> None:
    steps: list[int] = []
    growth = Growth((4,), 0.0, lambda: 4, steps.pop)
    with pytest.raises(IndexError):  # the store does not respond
        growth.check_room()
    assert not growth.is_due()
    for step, is_due in ((40, False), (40, False), (41, True)):
        steps.append(step)
        growth.check_room()
        assert growth.is_due() == is_due
