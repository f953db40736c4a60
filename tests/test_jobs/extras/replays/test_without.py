"""The samples that `without` removes, as ranges; test_replays.py repeats runs without them."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import DataError, UsageError
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.index import Index
from data.order import Order
from jobs.extras.replays import without
from jobs.extras.replays.without import masked_ranges, metrics_with

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Seven samples in shards of 3, 3 and 1."""
    samples = list(digits(train=False, image_size=16))[:7]
    return pack(samples, tmp_path_factory.mktemp("set"), name="t", shard_samples=3)


def test_listed_samples_become_ranges_of_their_shards(index, tmp_path) -> None:
    keys = [sample.key for sample in list(digits(train=False, image_size=16))[:7]]
    (tmp_path / "bad.txt").write_text("\n".join([keys[1], keys[2], keys[4], keys[6]]))
    # [epoch (0: every), shard, first sample, the sample after the last]
    assert masked_ranges(index, str(tmp_path / "bad.txt"), []) == [[0, 0, 1, 3], [0, 1, 1, 2], [0, 2, 0, 1]]


def test_a_shard_is_one_range(index) -> None:
    assert masked_ranges(index, None, ["t-000001.tar"]) == [[0, 1, 0, 3]]


def test_an_empty_list_removes_nothing(index, tmp_path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    assert masked_ranges(index, str(tmp_path / "none.txt"), []) == []


def test_an_unknown_shard_is_refused_with_an_example(index) -> None:
    with pytest.raises(
        DataError,
        match=r"--shards t-9\.tar matches 0 shards of the data set\n  expected exactly one: for example .*tar",
    ):
        masked_ranges(index, None, ["t-9.tar"])


def test_a_branch_is_not_repeated_without_samples_of_its_trunk(index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step uses all seven samples. The branch begins at step 2, so its first weights depend on them."""
    cfg = SimpleNamespace(first_step=2)
    stage = SimpleNamespace(cfg=cfg, commits={2: "", 4: ""}, sets=[index], config_at=lambda first, last: cfg)
    replays = SimpleNamespace(stage=stage, name="cool", between=lambda first, last: (first, last))
    monkeypatch.setattr(without, "Replays", lambda *arguments: replays)
    order = Order(index.shard_samples, seed=0, batch_size=7)
    monkeypatch.setattr(without, "training_order", lambda cfg, sets: (index, order))
    with pytest.raises(UsageError, match="begins at step 2, but its trunk has trained with these samples since step 1"):
        without.without("run", samples=None, shards=["t-000001.tar"], to=4, output=None, overrides=[])


@pytest.mark.parametrize(
    ("polyak", "step", "metrics"), [(0.0, 10, {"accuracy": 0.5}), (0.9, 10, {}), (0.9, 20, {"accuracy": 0.75})]
)
def test_metrics_of_averaged_weights_are_not_compared_with_others(polyak: float, step: int, metrics: object) -> None:
    """A run with `polyak` evaluates averaged weights only after its last step; a repetition always does."""
    records = [
        {"kind": "evaluate", "step": 10, "accuracy": 0.5},
        {"kind": "evaluate", "step": 20, "accuracy": 0.75},
    ]
    stage: Any = SimpleNamespace(cfg=SimpleNamespace(polyak=polyak), steps=20, records=records)
    assert metrics_with(stage, step) == metrics
