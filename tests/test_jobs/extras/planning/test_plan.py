"""The output and exit codes of `plan`."""

import re

from data.bucket import Bucket
from jobs.__main__ import main
from pipeline import artifacts
from tests.support.campaigns import load
from tests.support.stores import store


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


def test_plan_finds_checkpoints_in_an_object_store(recipe, capsys):
    overrides = ["run=s3://images/runs/half", f"cluster.scratch={recipe.parent}"]
    with store("s3", {}):
        stage = load(recipe, overrides).stage("pretrain")
        manifest = f"pretrain-{stage.key[:8]}/checkpoints/step-0000000008/MANIFEST.json"
        Bucket("s3://images/runs/half", recipe.parent / "here").put(manifest, b"{}")
        assert main(["plan", str(recipe), *overrides]) == 0
    out = capsys.readouterr().out
    assert f"pretrain (pretrain, key {stage.key[:8]}): unfinished, would resume from its newest checkpoint" in out


def test_a_stage_with_a_similar_name_has_not_run_before(recipe, capsys):
    other = recipe.parent / "run" / "finetune-b-00000000"
    other.mkdir(parents=True)
    artifacts.write_record(other / "stage.json", {"resumed": 1.0})
    artifacts.write_record(other / "done.json", {"finished": 1.0})
    assert main(["plan", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^finetune \(.*\): would run$", out, re.MULTILINE)


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


def test_plan_lists_missing_inputs_once_and_refuses_only_misspelled_ones(recipe, capsys):
    missing = ["pretrain.data.train=/nowhere", "fewshot.probe.test=/neither", "fewshot.probe.train=/neither"]
    assert main(["plan", str(recipe), *missing]) == 0
    assert capsys.readouterr().out.endswith(
        "still missing, until then run exits with code 65: 2 inputs\n"
        "  /nowhere: this index does not exist (pretrain.data.train)\n"
        "  /neither: this index does not exist (fewshot.probe.train, fewshot.probe.test)\n"
    )
    assert main(["run", str(recipe), *missing]) == 65
    error = capsys.readouterr().err
    assert error.startswith("error: 3 inputs are missing: pretrain.data.train: /nowhere: this index does not exist")
    log = (recipe.parent / "run" / "log.txt").read_text()
    assert " ended with exit code 65: 3 inputs are missing: pretrain.data.train" in log

    (recipe.parent / "pictures").mkdir()
    misspelled = f"pretrain.data.train={recipe.parent / 'pictrues'}"
    assert main(["plan", str(recipe), misspelled]) == 65
    assert f"pretrain.data.train: {recipe.parent / 'pictrues'}: this index does not exist" in capsys.readouterr().err
    assert main(["plan", str(recipe), misspelled, "--without-data"]) == 0


def test_plan_without_initial_weights_knows_neither_model_nor_compute(recipe, capsys):
    assert main(["plan", str(recipe), "finetune.init=/nowhere", "--without-data"]) == 0
    out = capsys.readouterr().out
    assert "\n  model   unknown: the initial weights are missing\n" in out
    assert "exaFLOPs; NOT counted: finetune" in out
