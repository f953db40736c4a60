"""Whether cores feed GPUs, as `plan` says it."""

from jobs.__main__ import main
from jobs.extras.planning.stage_checks import GPU_FLOPS


def test_plan_says_whether_the_cores_can_feed_the_gpus(recipe, capsys, monkeypatch):
    def said(*options: str) -> str:
        assert main(["plan", str(recipe), "cluster.gpus_per_worker=1", *options]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  feed"))

    assert "measured on this set" in said()
    monkeypatch.setattr("jobs.extras.planning.stage_checks.images_per_cpu_s", lambda *_: 1000.0)
    monkeypatch.setattr("models.training_flops", lambda _model, images, _kept=None: GPU_FLOPS / 3500 * images)
    line = said()
    assert "takes 3,500 images/s" in line and "TOO SLOW" in line
    assert "pretrain.data.processes=4 cluster.cpus_per_worker=5," in line
    assert "CANNOT" in said("pretrain.data.processes=4"), "four processes on one core"
    assert "keeps up" in said("pretrain.data.processes=4", "cluster.cpus_per_worker=5")
    monkeypatch.setattr("jobs.extras.planning.stage_checks.images_per_cpu_s", lambda *_: None)
    assert "a core decodes 650 (assumed" in said()
