"""The checks of a training stage: decoding speed, and cores of this machine."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.images.augment import AugmentConfig
from data.index.shard import Shard
from jobs.__main__ import main
from jobs.extras.planning.stage_checks import GPU_FLOPS, TrainedFacts, cores, images_per_cpu_s, milliseconds
from tests.support.campaigns import load


def test_plan_reports_whether_the_cores_can_feed_the_gpus(recipe, capsys, monkeypatch):
    def feed(*options: str) -> str:
        assert main(["plan", str(recipe), "cluster.gpus_per_worker=1", *options]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  feed"))

    assert "measured on this data set" in feed()
    monkeypatch.setattr("jobs.extras.planning.stage_checks.images_per_cpu_s", lambda *_: 1000.0)
    monkeypatch.setattr("models.training_flops", lambda _model, images, _kept=None: GPU_FLOPS / 3500 * images)
    line = feed()
    assert "trains on 3,500 images/s" in line
    assert "TOO SLOW" in line
    assert "pretrain.data.processes=4 cluster.cpus_per_worker=5," in line
    assert "TOO SLOW" in feed("pretrain.data.processes=4"), "four processes on one core"
    assert "is enough" in feed("pretrain.data.processes=4", "cluster.cpus_per_worker=5")
    monkeypatch.setattr("jobs.extras.planning.stage_checks.images_per_cpu_s", lambda *_: None)
    assert "a core decodes 650 images/s (assumed" in feed()


@pytest.mark.parametrize(
    ("core_count", "overrides", "expected"),
    [
        (1, [], ["2 workers share the 1 cores of this machine, so a step takes 2.0 × longer"]),
        (2, [], []),
        (1, ["cluster.gpus_per_worker=1"], []),
        (1, ["cluster.backend=ray"], []),
    ],
)
def test_more_workers_than_cores_are_reported_on_this_machine_without_gpus(
    recipe, monkeypatch, core_count, overrides, expected
):
    campaign = load(recipe, overrides)
    monkeypatch.setattr("jobs.cluster_config.cores", lambda: core_count)
    verdicts = list(cores(TrainedFacts(campaign, campaign.stage("pretrain"))))
    assert [verdict.text.partition(" than")[0] for verdict in verdicts] == expected


def test_decoding_speed_is_that_of_the_first_shard_with_samples(tmp_path: Path) -> None:
    index = pack(islice(digits(True), 300), tmp_path, shard_samples=70)
    empty = replace(index, shards=(Shard("empty.tar", 0, 0, ""),))
    assert images_per_cpu_s(empty, 16, AugmentConfig()) is None
    assert images_per_cpu_s(replace(index, shards=empty.shards + index.shards), 16, AugmentConfig()) > 0


@pytest.mark.parametrize(("seconds", "text"), [(0.00031, "0.31 ms"), (0.412, "412 ms"), (3.24, "3.2 s")])
def test_short_times_are_in_milliseconds(seconds, text):
    assert milliseconds(seconds) == text
