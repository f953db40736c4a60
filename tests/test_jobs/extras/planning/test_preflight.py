"""`jobs preflight` with two real workers, and with problems that it must report."""

import os
import re

import pytest

import models
from data.errors import ExitCode
from data.extras.reach import measure_reads
from jobs.__main__ import main
from jobs.extras.planning.preflight import stage_requirements
from tests.support.campaigns import load

# ------------------------------------------------------------------------ real parts


def test_a_readable_set_is_measured_and_a_missing_set_is_an_error(shards) -> None:
    reach = measure_reads(str(shards / "train"))
    sizes = sorted((shards / "train").glob("*.tar"))
    chosen = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    assert reach["error"] == ""
    assert reach["bytes"] == sum(min(path.stat().st_size, 2**22) for path in chosen)
    assert "this index does not exist" in measure_reads(str(shards / "nowhere"))["error"]


def test_two_real_workers_are_checked_and_leave_nothing_behind(recipe, tmp_path, capsys) -> None:
    assert main(["preflight", str(recipe)]) == 0
    out = capsys.readouterr().out
    for subject in (
        "workers",
        "code",
        "versions",
        "GPUs",
        "all-reduce",
        "links",
        "run folder",
        "clocks",
        "disk",
        "data",
    ):
        assert re.search(rf"^OK   {subject} ", out, re.MULTILINE), out
    assert f"OK   workers     2 on 1 node ({os.uname().nodename}: 0,1), on cpu" in out
    # The fp32 gradients of pretraining, counted from the model; reduced twice because micro-batches are accumulated.
    parameters = sum(parameter.numel() for parameter in models.build("mu/8", 16, 10, dropout=0.1).parameters())
    assert f"pretrain: 2 × {4 * parameters / 1e3:.1f} kB of gradients" in out
    assert re.search(r"slowest 0–1 \(\S+, \S+\): [\d.]+ .B in [\d.]+ ms", out)
    assert not (tmp_path / "run").exists(), "a run directory that did not exist is removed again"
    levels = re.findall(r"^(OK|WARN|FAIL) +\S", out, re.MULTILINE)
    counts = [f"{levels.count(level)} {level}" for level in ("OK", "WARN", "FAIL")]
    assert f"\npreflight: {', '.join(counts)} in " in out


def test_an_unusable_run_directory_and_a_missing_set_are_failures(recipe, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["preflight", str(recipe), f"run={tmp_path}/file/run"]) == ExitCode.CONFIG, "like plan and run"
    gone = tmp_path / "gone"
    assert main(["preflight", str(recipe), "cluster.gpus_per_worker=1", f"pretrain.data.evaluate={gone}"]) == 65
    out = capsys.readouterr().out
    assert re.search(rf"^FAIL inputs .*{gone}", out, re.MULTILINE)
    assert re.search(
        r"^FAIL workers     nothing was measured: expected at least 2 GPUs for 2 workers with .*, but torch finds 0",
        out,
        re.M,
    )


@pytest.mark.parametrize(("zero", "reductions"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 3.0)])
def test_gradients_are_reduced_per_micro_batch_from_zero_2_on_and_zero_3_also_gathers_weights(recipe, zero, reductions):
    """By hand: two micro-batches per step; ZeRO 3 adds half of the traffic (Rajbhandari et al. 2020, section 7)."""
    campaign = load(recipe, [f"pretrain.zero={zero}"])
    requirements = stage_requirements(campaign, campaign.stage("pretrain"), 2)
    assert requirements.reductions == reductions
    assert requirements.compute_s is None, "the speed of a CPU is unknown"


def test_compute_time_of_a_step_assumes_every_gpu_at_its_best(recipe):
    """By hand: 6 FLOPs per MAC and image, 16 images, 2 H100 at 40 % of 989 TFLOP/s."""
    campaign = load(recipe, ["cluster.gpus_per_worker=1"])
    stage = campaign.stage("pretrain")
    requirements = stage_requirements(campaign, stage, 2)
    by_hand = 6 * models.macs_of(stage.model) * 16 / (2 * 0.4 * 989e12)
    assert requirements.compute_s == pytest.approx(by_hand, rel=1e-6)
