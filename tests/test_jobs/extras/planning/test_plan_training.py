"""Times, failures and costs that `plan` derives from trials; expected values are computed by hand."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import models
from jobs.__main__ import main
from jobs.extras.planning.plan_training import reduction_line
from pipeline.engine.settings import deepspeed_config
from pipeline.extras.plan.trial import Trial, write_trial
from tests.support.campaigns import load
from tests.support.trials import write_trials


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.fixture
def tried(recipe, tmp_path) -> Trial:
    return write_trials(tmp_path / "run", recipe)


def test_plan_scales_a_trial_and_adds_saves_evaluations_and_failures(recipe, tried, capsys):
    """By hand: 24,000 steps of 0.1 s, a save of 0.02 s every 8 steps; 360 images are evaluated once."""
    long = ["pretrain.steps=24000"]  # a trial applies to any length
    images = 360
    expected_s = 24_000 * 0.1 + 3000 * 0.02 + images / (3 * 160)
    assert main(["plan", str(recipe), *long]) == 0
    out = capsys.readouterr().out
    assert "(measured 2030-01-01; Abacus, at most 1.5 GiB)" in out
    assert (
        "100 ms per step on 2 workers: compute 80 ms, storage 0.00 ms, decode 20 ms, transfer 0.00 ms; 160 images/s"
        in out
    )
    minutes, seconds = divmod(int(expected_s), 60)
    assert f"  finish  {minutes}m{seconds:02}s for 24,000 steps and evaluations (0s, at a third of" in out
    assert f"; {2 * expected_s / 3600:,.1f} worker-hours (for the cost, add --price 2.5)" in out
    assert "with" not in lines_of(out, "time ")[0]
    # A failure every half hour: Young's interval is √(2 · 0.02 · 1,800) = 8.5 s of work, 85 steps.
    assert main(["plan", str(recipe), *long, "--mtbf", "0.5", "--price", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"  save    every 8 steps; saving every 8\d steps would make it finish [23]% sooner \(Young 1974\): set "
        r"pretrain.save_every=8",
        out,
    )
    assert re.search(r"time    \d+m\d\ds for 2 training stages with 1\.\d failures", out), out[:400]
    assert re.search(r"cost    1\.\d worker-hours, [23]\.\d\d at 2 each", out)


def test_plan_states_its_assumption_for_an_untried_number_of_workers(recipe, tried, tmp_path, capsys):
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    out = capsys.readouterr().out
    assert "50 ms per step on 4 workers: compute 40 ms" in out
    assert "320 images/s (assuming the same images/s per worker as on 2 workers; Abacus" in out
    # With another trial on 8 workers at 60 instead of 80 images/s each, interpolate to 70 on 4 workers.
    write_trial(tmp_path / "run", dataclasses.replace(tried, world=8, images_per_s=480.0))
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    assert "280 images/s (interpolated between trials on 2 and 8 workers; Abacus" in capsys.readouterr().out


def test_a_trial_with_other_resources_per_worker_is_ignored(recipe, tried, capsys):
    assert main(["plan", str(recipe), "cluster.cpus_per_worker=4"]) == 0
    out = capsys.readouterr().out
    assert f"time    unknown: to measure 30 steps of each stage, run python -m jobs trial {recipe}" in out
    assert "\ncost    unknown, because the time is unknown\n" in out
    assert main(["plan", str(recipe), "cluster.gpus_per_worker=1"]) == 0
    assert (
        "estimates assume bf16, but this stage uses fp32; to measure it, run python -m jobs" in capsys.readouterr().out
    )


def test_hints_repeat_the_typed_recipe_and_overrides_and_no_estimate_is_offered_for_fp32(recipe, capsys):
    override = "pretrain.model={name: mu/8, image_size: 16, classes: 10}"
    assert main(["plan", str(recipe), override, "pretrain.steps=30"]) == 0
    [line] = lines_of(capsys.readouterr().out, "time ")
    command = f"python -m jobs trial {recipe} '{override}' pretrain.steps=30"
    assert line == f"time    unknown: to measure 30 steps of each stage, run {command}"
    assert main(["plan", str(recipe), "pretrain.precision=bf16"]) == 0
    [line] = lines_of(capsys.readouterr().out, "time ")
    assert line.endswith("pretrain.precision=bf16; for an estimate, add --gpu h100")


def test_an_estimate_is_a_range_and_is_labelled_as_estimate(recipe, capsys):
    """By hand: 24 × 16 images × 6 × MACs, at 20 % and 40 % of 2 × 989 TFLOP/s."""
    words = ["cluster.gpus_per_worker=1", "pretrain.precision=bf16", "finetune.precision=bf16", "finetune.zero=1"]
    long = ["pretrain.steps=100000000000000"]
    loaded = load(recipe, [*words, *long])
    assert main(["plan", str(recipe), *words, *long, "--gpu", "h100", "--price", "2"]) == 0
    out = capsys.readouterr().out
    flops = float(re.search(r"compute ([\d.e+]+) exaFLOPs", out)[1]) * 1e18
    # Six operations per multiplication: two forward, and twice as many backward.
    trained = [stage for stage in loaded.stages if stage.kind.trains]
    by_hand = sum(stage.config.steps * stage.config.batch_size * 6 * models.macs_of(stage.model) for stage in trained)
    assert flops == pytest.approx(by_hand, rel=1e-3)
    least_h = by_hand / (0.4 * 2 * 989e12) / 3600
    assert lines_of(out, "time ")[0].startswith("time    ESTIMATE, not measured: ")
    hours = re.search(r"finish  .* without saves and failures; ([\d,.]+) to ([\d,.]+) worker-hours, ([\d,.]+) to", out)
    least, most, money = (float(text.replace(",", "")) for text in hours.groups())
    assert least == pytest.approx(2 * least_h, rel=0.01)
    assert most == pytest.approx(2 * least, rel=0.01)
    assert money == pytest.approx(2 * least, rel=0.01)
    assert f"20 to 40 % of the peak performance of 2 H100; to measure it, run python -m jobs trial {recipe}" in out
    assert re.match(r"fits    yes: finetune needs the most, .* per worker of 79\.1 GiB \(an H100\)\n", out)
    assert loaded.cluster.most == 2


@pytest.mark.parametrize(
    ("zero", "tuning", "world", "parts", "line"),
    [
        (2, {}, 8, 0, "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each"),
        (3, {}, 8, 0, "13 buckets of 50 million gradients, 190.7 MiB each; during the backward pass"),
        (1, {"overlap_comm": True, "reduce_bucket_size": 5e8}, 8, 0, "2 buckets of 500 million gradients, 1.9 GiB"),
        (1, {"overlap_comm": True}, 8, 0, "during the backward pass (overlap_comm on)"),
        (3, {"overlap_comm": False}, 8, 0, "the backward pass waits for each (overlap_comm off)"),
        (0, {}, 8, 0, "all gradients at once after the backward pass (ZeRO 0)"),
        (2, {}, 8, 16, "all gradients at once after the backward pass, in a fixed order (exact_parts)"),
    ],
)
def test_plan_describes_the_reduction_of_gradients(zero, tuning, world, parts, line):
    settings = deepspeed_config(zero=zero, precision="fp32", micro_batch=1, accumulation=1, clip=1.0, user_file=None)
    section = {**settings["zero_optimization"], **tuning}
    assert line in reduction_line(section, 632_045_800, world, parts)


def test_small_model_has_one_bucket_and_one_worker_needs_no_reduction():
    assert "one bucket of 22 million gradients" in reduction_line({"stage": 2}, 22_000_000, 4)
    assert reduction_line({"stage": 2}, 22_000_000, 1) == ""


def test_the_time_of_a_stage_that_resumes_is_marked_as_that_of_all_its_steps(recipe, capsys):
    words = ["plan", str(recipe), "pretrain.precision=bf16", "--gpu", "h100"]
    assert main([*words, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    [stage] = [stage for stage in before["stages"] if stage["name"] == "pretrain"]
    assert "finished steps" not in before["time"]
    folder = Path(before["run"]) / f"pretrain-{stage['key'][:8]}"
    (folder / "checkpoints" / "step-0000000012").mkdir(parents=True)
    assert main([*words, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert "includes the finished steps of pretrain" in after["time"]
    [resumed] = [stage for stage in after["stages"] if stage["name"] == "pretrain"]
    assert resumed["most_s"] == pytest.approx(stage["most_s"])
