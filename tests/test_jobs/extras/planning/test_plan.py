"""The output and exit codes of `plan`."""

import re

from jobs.__main__ import main


def test_plan_describes_the_stages_that_would_run(recipe, capsys):
    assert main(["plan", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "16 = 2 workers × micro_batch 4 × accumulation 2" in out
    assert "would run" in out
    assert "parameters" in out
    assert "GMACs" in out
    assert "24 (384 images, 0.27 passes over 1,442 samples)" in out
    assert "feed" not in out, "no GPU to feed"
    # All compute is counted, no stage continues another one, and no value is chosen by a sweep.
    assert re.search(r"^compute        \S+ exaFLOPs$", out, re.MULTILINE)
    assert "  chosen  " not in out


def test_plan_shows_when_and_in_which_buckets_gradients_are_reduced(recipe, capsys):
    file = recipe.parent / "ds.json"
    file.write_text('{"zero_optimization": {"overlap_comm": true, "reduce_bucket_size": 1000}}')

    def sums(*options: str) -> list[str]:
        assert main(["plan", str(recipe), *options]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  sums")]

    assert "one bucket of" in sums("pretrain.zero=2")[0]
    tuned = sums("pretrain.zero=2", f"pretrain.deepspeed={file}")[0]
    assert "buckets of 0.001 million gradients" in tuned
    assert tuned.endswith("(overlap_comm on)")
    assert sums("cluster.workers=1") == []


def test_plan_lists_missing_inputs_and_exits_like_run_unless_allowed(recipe, capsys):
    missing = ["pretrain.data.train=/nowhere", "fewshot.probe.test=/neither"]
    assert main(["plan", str(recipe), *missing]) == 65
    planned = capsys.readouterr()
    assert "  MISSING pretrain.data.train: /nowhere: this index does not exist" in planned.out
    error = planned.err[planned.err.index("error: ") :]
    assert error.startswith("error: 2 inputs are missing: pretrain.data.train: /nowhere: this index does not exist")
    assert "\n  fewshot.probe.test: /neither: this index does not exist" in error
    assert main(["run", str(recipe), *missing]) == 65
    assert capsys.readouterr().err == error
    log = (recipe.parent / "run" / "log.txt").read_text()
    assert " ended with exit code 65: 2 inputs are missing: pretrain.data.train" in log

    assert main(["plan", str(recipe), *missing, "--without-data"]) == 0
    out = capsys.readouterr().out
    assert "  MISSING fewshot.probe.test: /neither" in out
    assert out.endswith("planned without 2 missing inputs; until they exist, run exits with code 65\n")


def test_plan_without_initial_weights_knows_neither_model_nor_compute(recipe, capsys):
    assert main(["plan", str(recipe), "finetune.init=/nowhere", "--without-data"]) == 0
    out = capsys.readouterr().out
    assert "\n  model   unknown: the initial weights are missing\n" in out
    assert "exaFLOPs; NOT counted: finetune" in out
