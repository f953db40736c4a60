"""What `plan` makes of trials: time, failures and money, by hand."""

import dataclasses
import re
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.extras.planning.trial import trial_key
from pipeline.extras.plan.trial import Trial, write_trial
from tests.support.campaigns import load


def key_in(recipe: Path, name: str, *overrides: str) -> str:
    loaded = load(recipe, list(overrides))
    return trial_key(loaded, loaded.stage(name))


def lines_of(said: str, start: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(start)]


@pytest.fixture
def tried(recipe, tmp_path) -> Trial:
    """A trial of both stages on 2 workers, by hand: 100 ms a step of 16 images, of which 80 ms are computing."""
    values = {"backend": "processes", "gpus_per_worker": 0, "cpus_per_worker": 1, "hardware": "Abacus", "commit": ""}
    trial = Trial(
        stage="pretrain",
        key=key_in(recipe, "pretrain"),
        world=2,
        date="2030-01-01",
        steps=25,
        images_per_s=160.0,
        step_s=0.1,
        compute_s=0.08,
        storage_s=0.0,
        decode_s=0.02,
        transfer_s=0.0,
        memory_gib=1.5,
        save_stall_s=0.02,
        save_s=0.5,
        until_steady_s=10.0,
        **values,
    )
    write_trial(tmp_path / "run", trial)
    write_trial(tmp_path / "run", dataclasses.replace(trial, stage="finetune", key=key_in(recipe, "finetune")))
    return trial


def test_plan_multiplies_a_trial_and_adds_saves_evaluations_and_failures(recipe, tried, capsys):
    """By hand: 24,000 steps of 0.1 s, every eighth with a save of 0.02 s; 360 images are evaluated, once."""
    long = ["pretrain.steps=24000"]  # a trial holds for any length
    images = 360
    expected_s = 24_000 * 0.1 + 3000 * 0.02 + images / (3 * 160)
    assert main(["plan", str(recipe), *long]) == 0
    said = capsys.readouterr().out
    assert "(measured 2030-01-01; Abacus, 1.5 GiB at most)" in said
    assert (
        "100 ms a step on 2 workers: compute 80 ms, storage 0.00 ms, decode 20 ms, transfer 0.00 ms; 160 images/s"
        in said
    )
    minutes, seconds = divmod(int(expected_s), 60)
    assert f"  finish  {minutes}m{seconds:02}s for 24,000 steps and evaluations (0s, a third of" in said
    assert f"; {2 * expected_s / 3600:,.1f} worker-hours (--price 2.5 says what they cost)" in said
    assert "with" not in lines_of(said, "time ")[0]
    # A failure every half hour: Young's interval is √(2 · 0.02 · 1,800) = 8.5 s of work, 85 steps.
    assert main(["plan", str(recipe), *long, "--mtbf", "0.5", "--price", "2"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"  save    every 8 steps; every 8\d ends [23]% sooner \(Young 1974\): type pretrain.save_every=8", said
    )
    assert re.search(r"time    \d+m\d\ds for 2 trained stages with 1\.\d failures", said), said[:400]
    assert re.search(r"cost    1\.\d worker-hours, [23]\.\d\d at 2 each", said)


def test_plan_says_what_it_assumes_of_a_world_that_was_not_tried(recipe, tried, tmp_path, capsys):
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    said = capsys.readouterr().out
    assert "50 ms a step on 4 workers: compute 40 ms" in said
    assert "320 images/s (assuming the same images/s per worker as on 2 workers; Abacus" in said
    # With one on 8 workers, each of which takes 60 images/s and not 80, those of 4 lie in the middle: 70.
    write_trial(tmp_path / "run", dataclasses.replace(tried, world=8, images_per_s=480.0))
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    assert "280 images/s (between trials on 2 and 8 workers; Abacus" in capsys.readouterr().out


def test_a_trial_of_other_workers_is_not_gone_by(recipe, tried, capsys):
    assert main(["plan", str(recipe), "cluster.cpus_per_worker=4"]) == 0
    said = capsys.readouterr().out
    assert "time    not known: type python -m jobs trial RECIPE, which takes 30 steps of each stage, or --gpu" in said
    assert "\ncost    not known without the time\n" in said
    assert main(["plan", str(recipe), "cluster.gpus_per_worker=1"]) == 0
    assert "a GPU's peak is of bf16, and this stage computes in fp32; type python -m jobs" in capsys.readouterr().out


def test_an_estimate_is_a_range_and_says_that_it_is_one(recipe, capsys):
    """By hand: 24 × 16 images × 6 × MACs, at a fifth and at two fifths of 2 × 989 TFLOP/s."""
    words = ["cluster.gpus_per_worker=1", "pretrain.precision=bf16", "finetune.precision=bf16", "finetune.zero=1"]
    long = ["pretrain.steps=100000000000000"]
    loaded = load(recipe, [*words, *long])
    assert main(["plan", str(recipe), *words, *long, "--gpu", "h100", "--price", "2"]) == 0
    said = capsys.readouterr().out
    flops = float(re.search(r"compute ([\d.e+]+) exaFLOPs", said)[1]) * 1e18
    least_h = flops / (0.4 * 2 * 989e12) / 3600
    assert lines_of(said, "time ")[0].startswith("time    ESTIMATE, not measured: ")
    hours = re.search(r"finish  .* without saves and failures; ([\d,.]+) to ([\d,.]+) worker-hours, ([\d,.]+) to", said)
    least, most, money = (float(text.replace(",", "")) for text in hours.groups())
    assert least == pytest.approx(2 * least_h, rel=0.01) and most == pytest.approx(2 * least, rel=0.01)
    assert money == pytest.approx(2 * least, rel=0.01)
    assert "20 to 40 % of the peak of 2 H100; python -m jobs trial RECIPE measures it" in said
    assert re.match(r"fits    yes: finetune needs the most, .* a worker of 79\.1 GiB \(an H100\)\n", said)
    assert loaded.cluster.most == 2
