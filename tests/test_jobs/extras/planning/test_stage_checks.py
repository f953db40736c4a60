"""The line of `plan` about decoding speed: whether CPU cores can feed the GPUs."""

from jobs.__main__ import main
from jobs.extras.planning.stage_checks import GPU_FLOPS


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
