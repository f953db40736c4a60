"""One command runs all stages, the same command resumes them, and invalid recipes do not start."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

import models
from data.images import preprocess
from data.index.document import load_index
from jobs.__main__ import main
from pipeline.checkpoints import manifest
from pipeline.monitoring.telemetry import read_metrics
from tests.support.campaigns import load
from tests.support.shards import Picture, digits, write_set
from tests.support.tars import picture, write_tar

ROOT = Path(__file__).parents[3]
PACKED = "shards={kind: pack, sets: {train: {source: digits}}}"
MIXTURE = "pretrain.data={train: null, mixture: {a: {train: x, weight: 1}, b: {train: y, weight: 2}}}"

LARGE = ("pretrain.batch_size=2048", "pretrain.micro_batch=512")


def error_of(capsys) -> str:
    """Return the stderr of a command without the progress of `plan`."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("plan: "))


def stage_folder(recipe: Path, name: str, *overrides: str) -> Path:
    loaded = load(recipe, list(overrides))
    return loaded.directory(loaded.stage(name))


def test_a_second_run_skips_all_finished_stages_with_the_reason(recipe, shards, capsys):
    previous = os.umask(0o002)
    try:
        assert main(["run", str(recipe)]) == 0
    finally:
        os.umask(previous)
    out = capsys.readouterr().out
    assert "random weights from seed 0, step 0" in out
    assert "weights from" in out
    assert "1shot" in out
    pretrained, finetuned = stage_folder(recipe, "pretrain"), stage_folder(recipe, "finetune")
    weights, config = models.load_weights(pretrained)
    assert config.image_size == (16, 16)
    assert all(w.dtype == torch.float32 for w in weights.values())
    provenance = json.loads((finetuned / "provenance.json").read_text())
    assert len(provenance["code"]) == 64
    resized = stage_folder(recipe, "resize")
    sha256 = hashlib.sha256((resized / "weights.safetensors").read_bytes()).hexdigest()
    train = json.loads(next((shards / "train").glob("*.index.json")).read_text())
    assert provenance["inputs"] == {
        "init": {"path": str(resized), "digest": sha256},
        "data.train": {"path": str(shards / "train"), "digest": train["digest"], "part_of": None},
    }
    assert provenance["ledger"] == json.loads((finetuned / "done.json").read_text())["ledger"]
    record = read_metrics(pretrained)[-1]
    assert record["step"] == record["steps"] == 24
    assert record["samples_seen"] == 24 * 16
    assert read_metrics(pretrained, "evaluate")[-1]["judged"] == 355
    assert any((pretrained / "tensorboard").iterdir())
    # Attempts are numbered across the run: the only attempt of `finetune` has number 2 in logs, metrics and folders.
    assert "attempt 2: weights from" in (finetuned / "log.txt").read_text()
    assert {record["attempt"] for record in read_metrics(finetuned, None)} == {2}
    assert [path.name for path in (finetuned / "attempts").iterdir()] == ["attempt-000002"]
    written = [path for path in (recipe.parent / "run").rglob("*") if path.is_file()]
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in written}
    assert set(modes.values()) == {0o664}, modes
    folders = [recipe.parent / "run", *(path for path in (recipe.parent / "run").rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o775}

    # log.txt has every line from the start to the end of the command.
    log = (recipe.parent / "run" / "log.txt").read_text().splitlines()
    # log.txt also has the keys of stages.
    without_keys = [re.sub(r"^\[(.+)-[0-9a-f]{8}\] ", r"[\1] ", line) for line in log]
    assert without_keys[1:-1] == out.splitlines()
    assert log != without_keys
    assert " started: python " in log[0]
    assert log[-1].endswith(" done")
    # Stages are listed in the order of their first start, even if a folder changes later.
    (pretrained / "note").touch()

    assert main(["run", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert out.count("skipped, finished with the same config") == 4
    assert main(["status", str(pretrained.parent)]) == 0
    listed = capsys.readouterr().out.splitlines()[2:]
    assert [line.partition("-")[0] for line in listed] == ["pretrain", "resize", "finetune", "fewshot"]
    assert all("done in" in line for line in listed)

    # after editing one key, only the stages that depend on it run again
    assert main(["run", str(recipe), "finetune.steps=3"]) == 0
    out = capsys.readouterr().out
    assert out.count("skipped, finished") == 3
    assert "finetune: key" in out
    assert (finetuned / "done.json").exists(), "the old output is kept under its key"


@pytest.mark.parametrize(
    "override",
    ["fewshot.preprocess=resize_small(27)|central_crop(24)", "pretrain.data.augment.crop=random"],
)
def test_a_preprocessing_correction_changes_the_key(recipe, monkeypatch, override):
    stage = override.partition(".")[0]
    now = stage_folder(recipe, stage, override)
    plain = stage_folder(recipe, stage)
    monkeypatch.setattr(preprocess, "CORRECTIONS", {})
    assert stage_folder(recipe, stage, override) != now
    assert stage_folder(recipe, stage) == plain, "a stage that does not use the op stays finished"


def test_weights_without_a_model_and_invalid_indexes_are_missing_inputs(recipe, tmp_path, capsys):
    bare = tmp_path / "bare"
    models.save(models.build("mu/8", 16, 10), bare)
    (bare / "model.json").unlink()
    wrong = {
        f"pretrain.init={bare}": f"pretrain.init: {bare} has no model.json, so the architecture",
        "resize.init=/nowhere": "resize.init: no weights.safetensors in /nowhere",
        "pretrain.data.train=/etc/passwd": "pretrain.data.train: /etc/passwd is a file",
    }
    for override, message in wrong.items():
        said = []
        for command in ("plan", "run"):
            assert main([command, str(recipe), override]) == 65
            said.append(error_of(capsys))
        assert message in said[0]
        assert said[0] == said[1]


def test_a_tilde_that_the_shell_did_not_expand_is_expanded(recipe, shards, tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    home.mkdir()
    (home / "shards").symlink_to(shards)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    packs = "shards={kind: pack, sets: {train: {path: %s/images}}}"
    written_out = ["run=run", f"pretrain.data.train={shards}/train", packs % home]
    with_a_tilde = ["run=~/runs/x", "pretrain.data.train=~/shards/train", packs % "~"]
    keys = [stage.key for stage in load(recipe, written_out).stages]
    assert [stage.key for stage in load(recipe, with_a_tilde).stages] == keys
    assert main(["plan", str(recipe), *with_a_tilde, "--without-data"]) == 0
    assert f"run directory  {home}/runs/x\n" in capsys.readouterr().out
    assert main(["run", str(recipe), *with_a_tilde]) == 65, "there are no images to pack"
    assert f"no file or folder at {home}/images" in capsys.readouterr().err
    assert (home / "runs" / "x" / "log.txt").exists()
    assert not (tmp_path / "~").exists()


def test_missing_and_truncated_files_of_a_packed_data_set_are_detected_before_use(tmp_path, capsys):
    recipe = tmp_path / "pack.yaml"
    packs = (
        f"run: {tmp_path}/my run\ncluster: {{backend: processes}}\n"
        "shards: {kind: pack, shard_samples: 500, sets: {train: {source: digits, image_size: 16, keep: [1, 2]}}}\n"
    )
    recipe.write_text(packs)
    pretrain = (
        "pretrain: {data: {train: '@shards/train'}, model: {name: mu/8, image_size: 16, classes: 3}, steps: 2,\n"
        "  batch_size: 4, micro_batch: 4, precision: fp32, optim: {schedule: {warmup_steps: 0}}}\n"
    )
    assert main(["run", str(recipe)]) == 0
    capsys.readouterr()
    (folder,) = (tmp_path / "my run").glob("shards-*")
    index, tar, table = (folder / "train" / f"train{end}" for end in (".index.json", "-000000.tar", "-000000.npy"))
    digest = load_index(index).digest

    def refused(file: Path, problem: str) -> str:
        said = []
        recipe.write_text(packs + pretrain)
        assert main(["run", str(recipe), "--only", "pretrain"]) == 65
        assert main(["plan", str(recipe)]) == 65
        assert capsys.readouterr().err.count(f"{file}: {problem}") == 2
        recipe.write_text(packs)
        for command in ("plan", "run"):
            assert main([command, str(recipe)]) == 65
            said.append(error_of(capsys))
        assert said[0] == said[1]
        assert f"{file}: {problem}" in said[0]
        return said[0]

    for file in (index, tar, table):
        kept = file.rename(tmp_path / "kept")
        refused(file, "No such file or directory" if file == tar else "missing")
        kept.rename(file)
    content = tar.read_bytes()
    tar.write_bytes(content[:-512])
    index.write_text(index.read_text().replace("train-000000.tar", "train-00000O.tar"))
    message = refused(index, "damaged")
    assert not list((tmp_path / "my run").glob("pretrain-*"))

    # After the printed command, the recipe packs the same data set again.
    subprocess.run(message.partition("again, run\n  ")[2].splitlines()[0], shell=True, check=True)
    assert main(["run", str(recipe)]) == 0
    assert load_index(index).digest == digest
    assert tar.read_bytes() == content


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["pretrain.optim.lrr=1"], 78, "did you mean 'lr'"),
        (["pretrian.steps=1"], 78, "did you mean 'pretrain'"),
        (["pretrain.steps=x"], 78, "pretrain.steps is x, expected a whole number"),
        (["pretrain.batch_size=20"], 78, "nearest: 16 or 24"),
        (["pretrain.model.image_size=20"], 78, "nearest image_size: 16 or 24"),
        (["pretrain.model.classes=7"], 65, "labels up to 9, but the model has only 7 classes"),
        (["finetune.init=@resizee"], 78, "did you mean 'resize'"),
        (["resize.init=@fewshot"], 78, "cycle"),
        (["resize.init=/nowhere"], 65, "no weights.safetensors in /nowhere"),
        (["pretrain.data.train=/nowhere"], 65, "this index does not exist"),
        (["pretrain.data.train=null"], 78, "pretrain.data.train is missing, so there are no images to train on"),
        ([MIXTURE, "pretrain.data.mixture.a.train=/nowhere"], 65, "pretrain.data.mixture.a.train: /nowhere"),
        (
            [MIXTURE, "pretrain.data.mixture.a.train=@shards/a"],
            78,
            "pretrain.data.mixture.a.train is @shards, but the recipe has no stage shards",
        ),
        ([MIXTURE, "pretrain.data.mixture.b.weight=0"], 78, "weight is 0.0, expected more than 0"),
        (["finetune.data.train=@resize/train"], 78, "writes no data set"),
        (["finetune.init=@fewshot"], 78, "finetune.init is @fewshot, which has no weights"),
        (["pretrain.data.preprocess=foo"], 78, "preprocess: "),
        (["pretrain.data.lanes=0"], 78, "lanes is 0, expected 1 or more"),
        (
            ["pretrain.data.tail=drop", *LARGE],
            78,
            "1,442 samples do not fill a batch of 2,048, so tail=drop would skip",
        ),
        (["pretrain.optim.lr=1e-6"], 78, "pretrain.optim.lr 1e-06 is below pretrain.optim.schedule.end 1e-05"),
        (["pretrain.mixup=0.8", "pretrain.micro_batch=1"], 78, "set micro_batch=2, or mixup=0"),
        (["pretrain.data.drop=[x.tar]"], 65, "data.drop: 0 shards match x.tar"),
        (["cluster.workers=0"], 78, "workers is 0"),
        (["nonsense"], 78, "expected key=value"),
    ],
)
def test_invalid_recipes_are_refused_before_the_first_stage(recipe, capsys, overrides, code, message):
    assert main(["run", str(recipe), *overrides]) == code
    assert message in capsys.readouterr().err
    assert not list((recipe.parent / "run").glob("*/checkpoints/step-*"))


def test_mixture_whose_set_is_smaller_than_its_share_of_a_batch_is_refused_with_tail_drop(recipe, shards, capsys):
    sets = f"a: {{train: {shards}/train, weight: 1}}, b: {{train: {shards}/test, weight: 1}}"
    words = ["run", str(recipe), "pretrain.batch_size=1024", "pretrain.micro_batch=512"]
    words.append(f"pretrain.data={{train: null, evaluate: null, tail: drop, mixture: {{{sets}}}}}")
    assert main(words) == 78
    # Half of the batch is larger than the 355 test images.
    assert "pretrain: 355 samples do not fill a batch of 512, so tail=drop" in capsys.readouterr().err
    assert not list((recipe.parent / "run").glob("pretrain-*/attempts/*"))


def test_warm_up_as_long_as_the_stage_is_reported(recipe, capsys):
    words = ["plan", str(recipe), "finetune.optim.schedule.warmup_steps=4", "pretrain.steps=6"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert (
        "finetune: the warm-up is as long as the stage (4 steps), so the learning rate only reaches 75% of optim.lr"
        in out
    )
    assert "pretrain: the warm-up is as long" not in out


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (
            ["pretrain.model.classes=7"],
            65,
            "labels up to 9, but the model has only 7 classes\n  set pretrain.model.classes=10",
        ),
        (["finetune.model.classes=9"], 65, "set finetune.model.classes=10"),
        (
            ["finetune.optim.schedule.warmup_steps=5"],
            78,
            "finetune: 5 warm-up steps exceed the length of the stage, 4 steps",
        ),
        (["finetune.optim.schedule.cooldown_steps=3"], 78, "2 warm-up steps and 3 of cool-down exceed"),
        # 0.02 passes over 1,442 samples are two batches of 16
        (["pretrain.steps=null", "pretrain.passes=0.02"], 78, "set pretrain.optim.schedule.warmup_steps=0"),
        (["pretrain.stall_s=-1"], 78, "stall_s is -1.0, expected more than 0"),
        (["pretrain.data.cache.timeout_s=nan"], 78, "cache.timeout_s is nan, expected a finite number, more than 0"),
        (["cluster.backoff_s=-1"], 78, "backoff_s is -1.0, expected 0 or more"),
        (["pretrain.optim.lr=nan"], 78, "optim.lr is nan, expected a finite number, more than 0"),
        (["pretrain.model.head_bias=nan"], 78, "head_bias must be a number, found nan"),
        (["shqrds.kind=1"], 78, "shqrds.kind is 1, expected one of pack, pretrain"),
        (["={kind: resize}"], 78, "invalid override ={kind: resize}\n  expected key=value"),
        (["more/words={kind: resize, init: '@pretrain'}"], 78, "a stage is named 'more/words'"),
        (["run=3"], 78, "run is 3, expected a folder\n  set run=./3"),
        (["run="], 78, "run is empty, expected a folder\n  set run=runs/tiny"),
        (["probe={kind: fewshot, init: '@resize'}"], 78, "probe.probe.train and probe.probe.test are missing"),
        (
            ["fewshot=null"],
            78,
            "fewshot is null, expected a stage's section\n  remove fewshot from the recipe, or",
        ),
        (
            ["pretrain.kind=pretrian"],
            78,
            "pretrain.kind is pretrian; did you mean 'pretrain'?\n  expected one of pack, pretrain",
        ),
        (
            [PACKED, "fewshot.init=@shards"],
            78,
            "fewshot.init is @shards, which has no weights\n  expected @stage",
        ),
        (["run=/"], 78, "run is /, expected a separate folder\n  set run=/NAME"),
        ([f"run={'x' * 300}"], 78, "run contains a name of 300 bytes: xxx"),
        (["run=/dev/null/x"], 78, "/dev/null is a file\n  expected a run directory"),
        (
            ["run=~nobody-here/x"],
            78,
            "run is ~nobody-here/x, but there is no such user\n  use an absolute path",
        ),
        (["pretrain.steps=99999999999999999999"], 78, "expected at most 576,460,752,303,423,487 steps"),
        (["pretrain.model.name="], 78, "pretrain.model.name is null, expected a name like S/16, B/16"),
        (["pretrain.model.name=1"], 78, "pretrain.model.name is 1, expected a name like S/16, B/16"),
        (["fewshot.probe.shots=[1.5]"], 78, "fewshot.probe.shots is 1.5, expected a whole number"),
        (["fewshot.preprocess=resize(0)"], 78, "fewshot: preprocess: preprocessing op resize(0) has a side of 0"),
        (
            ["pretrain.data.preprocess=resize(8)"],
            78,
            "pretrain.data.preprocess: 'resize(8)' produces 8×8 images, but the model expects 16×16\n"
            "  set 'pretrain.data.preprocess=resize((16, 16))'",
        ),
        (["fewshot.preprocess=decode"], 78, "fewshot.preprocess: 'decode' produces 1024×1024 images"),
    ],
)
def test_plan_refuses_what_run_would(recipe, capsys, overrides, code, message):
    said = []
    for command in ("plan", "run"):
        assert main([command, str(recipe), *overrides]) == code
        said.append(error_of(capsys))
    assert message in said[0]
    assert said[0] == said[1]
    assert not (recipe.parent / "run").exists()


def test_a_stage_name_must_not_be_a_path_out_of_the_run(recipe, capsys):
    recipe.write_text(recipe.read_text() + '"../../elsewhere": {kind: resize, init: "@pretrain"}\n')
    assert main(["run", str(recipe)]) == 78
    assert "a stage is named '../../elsewhere'" in capsys.readouterr().err
    assert [path.name for path in recipe.parent.parent.glob("elsewhere*")] == []


def test_a_warm_up_may_be_as_long_as_the_training(recipe):
    loaded = load(recipe, ["finetune.optim.schedule.warmup_steps=4"])
    assert loaded.stage("finetune").config.optim.schedule.warmup_steps == 4


def test_the_output_of_a_stage_is_checked_before_the_workers_of_the_next_start(tmp_path, capsys):
    members = {}
    for number in range(12):
        members |= {f"{number}.jpg": picture(20 * number), f"{number}.cls": str(number % 10).encode()}
    write_tar(tmp_path / "digits.tar", members)
    file = tmp_path / "r.yaml"
    file.write_text(
        f"run: {tmp_path}/run\ncluster: {{backend: processes}}\n"
        f"shards: {{kind: pack, sets: {{train: {{source: tars, path: {tmp_path}/digits.tar}}}}}}\n"
        "pretrain: {data: {train: '@shards/train'}, model: {name: mu/8, image_size: 16, classes: 5}, steps: 2,\n"
        "  batch_size: 4, micro_batch: 4, precision: fp32, optim: {schedule: {warmup_steps: 0}}}\n"
    )
    assert main(["plan", str(file)]) == 0, "the labels of tars are not known before they are packed"
    assert main(["run", str(file)]) == 65
    message = "labels up to 9, but the model has only 5 classes\n  set pretrain.model.classes=10"
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("pretrain-*"))
    assert main(["plan", str(file)]) == 65, "now the shards are there"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_a_missing_or_short_shard_stops_before_the_first_step(recipe, shards, tmp_path, capsys, fault):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    shard = copy / "train" / "train-000003.tar"
    if fault == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-512])
    code = main(["run", str(recipe), f"pretrain.data.train={copy / 'train'}"])
    assert code == 65
    assert "train-000003.tar" in capsys.readouterr().err


def test_a_short_shard_of_a_later_stage_is_found_before_the_first_one_runs(recipe, shards, tmp_path, capsys):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    (copy / "test" / "test-000002.tar").write_bytes(b"")
    for override in (f"finetune.data.evaluate={copy / 'test'}", f"fewshot.probe.test={copy / 'test'}"):
        said = []
        for command in ("plan", "run"):
            assert main([command, str(recipe), override]) == 65
            said.append(error_of(capsys))
        assert "test-000002.tar: found 0 bytes, but the index lists " in said[0]
        assert said[0] == said[1]
    assert not list((recipe.parent / "run").glob("pretrain-*")), "no step was trained in vain"


def test_too_many_corrupt_images_stop_training_with_65_and_name_the_first(recipe, shards, tmp_path, capsys):
    broken = (
        Picture(s.key, b"\xff\xd8 no jpeg" if n % 5 == 0 else s.image, s.labels)
        for n, s in enumerate(digits(train=True, image_size=16))
    )
    write_set(broken, tmp_path / "broken", name="train")
    path = f"pretrain.data.train={tmp_path / 'broken'}"
    assert main(["run", str(recipe), path]) == 65
    captured = capsys.readouterr()
    assert "bad sample 1 replaced: train-000000.tar digit" in captured.out
    assert "more than data.max_bad_fraction" in captured.err


def test_a_forbidden_change_of_an_unfinished_stage_is_refused_with_the_difference(recipe, capsys):
    folder = stage_folder(recipe, "pretrain")
    assert main(["run", str(recipe), "finetune.data.max_bad_fraction=0.5"]) == 0
    (folder / "done.json").unlink()
    capsys.readouterr()
    assert main(["run", str(recipe), "pretrain.optim.lr=0.003"]) == 78
    said = error_of(capsys)
    assert "its config has changed:\n    optim.lr: 0.002 → 0.003\n" in said, "and nothing else"

    # `plan` reports the same, and the effect of `--fresh`.
    assert main(["plan", str(recipe), "pretrain.optim.lr=0.003"]) == 78
    assert error_of(capsys) == said
    assert main(["plan", str(recipe), "pretrain.optim.lr=0.003", "--fresh"]) == 0
    assert "unfinished with another config, would restart from step 0" in capsys.readouterr().out

    # There is no conflict after a later stage of the same name, started with `--fresh`, has finished.
    later = folder.with_name("pretrain-0123abcd")
    (later / "attempts" / "attempt-0009").mkdir(parents=True)
    assert main(["plan", str(recipe), "pretrain.optim.lr=0.003"]) == 78
    (later / "done.json").write_text("{}")
    assert main(["plan", str(recipe), "pretrain.optim.lr=0.003"]) == 0
    shutil.rmtree(later)

    assert main(["run", str(recipe), "pretrain.log_every=2", "pretrain.keep=5"]) == 0
    assert "resumed from step 24" in capsys.readouterr().out, "free fields may change"


def test_a_changed_unfinished_stage_is_reported_before_the_first_stage_runs(recipe, capsys):
    assert main(["run", str(recipe)]) == 0
    (stage_folder(recipe, "finetune") / "done.json").unlink()
    capsys.readouterr()
    assert main(["run", str(recipe), "pretrain.seed=1"]) == 78
    assert "finetune is unfinished, and its config has changed" in capsys.readouterr().err
    assert not stage_folder(recipe, "pretrain", "pretrain.seed=1").exists(), "no step was trained in vain"


def test_changed_training_data_at_the_same_path_does_not_restart_a_stage_silently(recipe, shards, tmp_path, capsys):
    moved = tmp_path / "train"
    shutil.copytree(shards / "train", moved)
    change = f"pretrain.data.train={moved}"
    assert main(["run", str(recipe), change]) == 0
    (stage_folder(recipe, "pretrain", change) / "done.json").unlink()
    shutil.rmtree(moved)
    shutil.copytree(shards / "test", moved)
    capsys.readouterr()
    assert main(["run", str(recipe), change]) == 78
    assert "content of data.train: " in capsys.readouterr().err


def test_an_empty_test_set_is_refused(recipe, tmp_path, capsys):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    assert main(["index", str(tmp_path / "x.tar"), "--name", "x"]) == 65
    assert main(["run", str(recipe), f"pretrain.data.evaluate={tmp_path}/x.index.json"]) == 65
    assert "has 0 samples and 0 classes" in capsys.readouterr().err


def test_the_test_set_of_an_unfinished_stage_may_change(recipe, shards, capsys):
    assert main(["run", str(recipe)]) == 0
    (stage_folder(recipe, "pretrain") / "done.json").unlink()
    sets = f"pretrain.probe={{train: {shards}/train, test: {shards}/test, shots: [1], seeds: [0]}}"
    capsys.readouterr()
    assert main(["run", str(recipe), f"pretrain.data.evaluate={shards}/train", sets]) == 0
    said = capsys.readouterr().out
    assert "resuming with changed settings" in said
    assert "resumed from step 24" in said
    assert "1shot" in said


def test_a_checkpoint_with_a_flipped_bit_is_reported_and_the_previous_one_used(recipe, capsys):
    assert main(["run", str(recipe)]) == 0
    folder = stage_folder(recipe, "pretrain")
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "done.json").unlink()
    file = manifest.committed(folder / "checkpoints")[0] / "rank-00001.safetensors"
    blob = bytearray(file.read_bytes())
    blob[-7] ^= 4
    file.write_bytes(blob)
    capsys.readouterr()
    assert main(["run", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"rank-00001.safetensors: bytes 0 to \d+ do not match their digest .* \(read by worker 1 on ", out)
    assert "resumed from step 16" in out
    assert (folder / "weights.safetensors").read_bytes() == weights
