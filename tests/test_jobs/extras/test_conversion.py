"""`jobs import` and `jobs export`: whose weights, what became of them, and what cannot be."""

import json
import resource
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from jobs.__main__ import main
from pipeline import artifacts
from tests.support.golden import GOLDEN, needs_golden
from tests.support.stores import store

pytestmark = pytest.mark.quick


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return the folder of a small model with the numerics of the paper's code."""
    torch.manual_seed(0)
    model = models.build("mu/8", 16, 5, dropout=0.1)
    torch.nn.init.normal_(model.head.weight)
    models.save(model, tmp_path / "ours")
    return tmp_path / "ours"


@needs_golden
def test_an_official_file_exported_to_transformers_has_the_original_logits(tmp_path, capsys):
    steps = [
        ["import", str(GOLDEN / "vit_tok_linen.ckpt.npz"), str(tmp_path / "in")],
        ["export", str(tmp_path / "in"), str(tmp_path / "hf"), "--format", "hf"],
        ["import", str(tmp_path / "hf"), str(tmp_path / "again")],
    ]
    assert [main(step) for step in steps] == [0, 0, 0]
    out = capsys.readouterr().out
    assert "none are missing or unknown" in out
    assert "gelu_tanh, norm_eps 1e-06, as in the paper's code" in out
    assert "differ by at most 0.0e+00" in out
    assert json.loads((tmp_path / "in/provenance.json").read_text())["imported"].endswith("vit_tok_linen.ckpt.npz")
    arrays = np.load(GOLDEN / "vit_tok_linen.io.npz")
    images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = models.load(tmp_path / "again")(images)
    torch.testing.assert_close(found, torch.from_numpy(arrays["logits"]), atol=1e-5, rtol=0)


@needs_golden
def test_numerics_of_transformers_are_kept_and_reported_as_inexact_in_an_npz(tmp_path, capsys):
    assert main(["import", str(GOLDEN / "hf_vit_cls"), str(tmp_path / "in")]) == 0
    assert "computes gelu" in capsys.readouterr().out
    assert models.load(tmp_path / "in").config.activation == "gelu"
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out.npz"), "--format", "npz"]) == 0
    out = capsys.readouterr().out
    assert "INEXACT" in out
    assert "becomes  activation: gelu → gelu_tanh" in out
    assert "differ by at most 0.0e+00" not in out


@pytest.mark.parametrize("format", ["safetensors", "npz", "timm", "hf"])
def test_every_format_reads_back_to_the_same_outputs(ours, tmp_path, capsys, format):
    path = tmp_path / ("out.npz" if format == "npz" else "out")
    assert main(["export", str(ours), str(path), "--format", format]) == 0
    out = capsys.readouterr().out
    assert "differ by at most 0.0e+00" in out
    assert ("becomes  dropout: 0.1 → 0.0" in out) == (format != "safetensors"), "what is lost is said"


@pytest.mark.parametrize("format", ["safetensors", "npz", "timm", "hf"])
@pytest.mark.parametrize("is_made", [False, True])
def test_refused_export_leaves_nothing_and_the_same_command_then_succeeds(ours, tmp_path, capsys, format, is_made):
    folder = tmp_path / "to"
    path = folder / ("out.npz" if format == "npz" else "out")
    if is_made and format != "npz":
        path.mkdir(parents=True)
    command = ["export", str(ours), str(path), "--format", format]
    # Longer than the weights, so that the second file can fail after the first was written.
    (ours / "classes.json").write_text(json.dumps([letter * 1_000_000 for letter in "abcde"]))
    before = sorted(found for found in tmp_path.rglob("*") if found != folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (ours / "weights.safetensors").stat().st_size
    assert size < 4_000_000
    for limit in (4_000_000, 100):
        if limit > size and format == "npz":
            continue
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            code = main(command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert code == 74, capsys.readouterr().err
        assert str(path) in capsys.readouterr().err
        assert sorted(found for found in tmp_path.rglob("*") if found != folder) == before
    assert main(command) == 0
    assert not list(tmp_path.rglob(".tmp-*"))
    with torch.no_grad():
        image = torch.ones(1, 3, 16, 16)
        exported = models.load(path, **({"image_size": (16, 16)} if format == "npz" else {}))
        assert torch.equal(exported.eval()(image), models.load(ours).eval()(image))


@needs_golden
def test_a_setting_that_the_file_lacks_is_required_by_name(tmp_path, capsys):
    arguments = ["import", str(GOLDEN / "bv_gap_sincos_rep.ckpt.npz"), str(tmp_path / "in")]
    assert main(arguments) == 65
    assert "pass image_size=" in capsys.readouterr().err
    assert main([*arguments, "image_size=[32, 48]"]) == 0
    assert models.load(tmp_path / "in").config.image_size == (32, 48)


def test_invalid_conversions_are_refused_and_nothing_is_written(ours, tmp_path, capsys):
    gap = models.build("mu/8", 16, 5, pool="map")
    models.save(gap, tmp_path / "gap")
    torn = tmp_path / "torn.npz"
    torn.write_bytes(b"PK\x03\x04 not whole")
    empty = tmp_path / "empty.npz"
    empty.touch()
    (tmp_path / "run" / "pretrain-1a2b3c4d").mkdir(parents=True)
    (tmp_path / "run" / "pretrain-1a2b3c4d" / "stage.json").touch()
    cases = [
        (["export", str(tmp_path / "gap"), str(tmp_path / "x"), "--format", "hf"], 64, "pooling by map"),
        (
            ["export", str(ours), str(tmp_path / "x"), "--format", "onnx"],
            64,
            "'onnx' is not one of 'safetensors'",
        ),
        (["export", str(tmp_path / "gap"), str(ours), "--format", "npz"], 64, "already exists"),
        (["export", str(tmp_path / "gap"), f"{tmp_path}/run/pretrain", "--format", "npz"], 64, "is inside the run"),
        (["import", str(torn), str(tmp_path / "x")], 65, "torn.npz is not a complete .npz file"),
        (["import", str(empty), str(tmp_path / "x")], 65, f"{empty} is not a complete .npz file"),
        (["import", str(tmp_path / "nowhere"), str(tmp_path / "x")], 65, "no file or folder at"),
        (["export", str(ours), str(tmp_path / "x"), "--format", "npz"], 64, "does not end in .npz, so other programs"),
        (["export", str(ours), str(tmp_path / "x.npz"), "--format", "hf"], 64, "a name without .npz"),
        (["export", str(tmp_path / "nowhere"), str(tmp_path / "x"), "--format", "hf"], 65, "no file or folder at"),
        (["import", str(ours), str(tmp_path / "x"), "heads=5"], 65, "heads"),
        (["import", str(ours), str(tmp_path / "x"), "heads"], 78, "expected key=value"),
        (["import", str(ours), str(tmp_path / "x"), "heds=2"], 65, "heds"),
    ]
    for arguments, code, message in cases:
        assert main(arguments) == code, arguments
        assert message in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


def test_transformers_preprocesses_for_an_exported_model_as_our_evaluation_does(ours, tmp_path, transformers):
    assert main(["export", str(ours), str(tmp_path / "out"), "--format", "hf"]) == 0
    photo = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    black = np.zeros((40, 30, 3), np.uint8)
    of_photo, of_black = (processor(image, return_tensors="np")["pixel_values"] for image in (photo, black))
    # Values from −1 to 1, channels first, resized to the model's image size.
    np.testing.assert_allclose(of_photo[0], photo.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)
    assert of_black.shape == (1, 3, 16, 16)
    assert of_black.max() == -1


def test_a_missing_tensor_is_named(ours, tmp_path, capsys):
    assert main(["export", str(ours), str(tmp_path / "out.npz"), "--format", "npz"]) == 0
    arrays = dict(np.load(tmp_path / "out.npz"))
    del arrays["Transformer/encoder_norm/bias"]
    np.savez(tmp_path / "less.npz", **arrays)
    assert main(["import", str(tmp_path / "less.npz"), str(tmp_path / "x")]) == 65
    assert "missing Transformer/encoder_norm/bias" in capsys.readouterr().err


def test_weights_of_a_run_in_a_store_have_the_same_names_as_in_a_folder(ours, tmp_path, capsys, monkeypatch):
    """A stage in a store is exported by name, key or run, with exactly the uploaded bytes."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    for number, key in enumerate(("00000001", "00000002", "00000003")):
        stage = tmp_path / "x" / f"finetune-{key}"
        shutil.copytree(ours, stage)
        artifacts.write_record(stage / "stage.json", {"name": "finetune", "started": 1e9 + number})
        artifacts.write_record(stage / "task.json", {})
        if number < 2:
            weights = artifacts.digests(stage, artifacts.WEIGHT_FILES)
            artifacts.write_record(stage / "done.json", {"finished": 1e9 + number, "files": weights})
        else:
            (stage / "model.json").unlink()
    files = {}
    for path in (tmp_path / "x").rglob("*.*"):
        files[f"runs/{path.relative_to(tmp_path)}"] = path
    with store("s3", files) as proxy:
        for number, name in enumerate(("finetune", "finetune-00000001", "")):
            target = str(tmp_path / f"out-{number}")
            assert main(["export", f"s3://images/runs/x/{name}".rstrip("/"), target, "--format", "safetensors"]) == 0
            said = capsys.readouterr().err
            assert ("finetune-00000002, finished 2001-09-09" in said) == (number != 1), said
            assert models.load(target).config == models.load(ours).config
        fetched = [get for get in proxy.gets if get.endswith("weights.safetensors")]
        assert len(fetched) == 2, "what is in the cache is compared, and not fetched again"
        for name, words in (
            ("x/finetnue", "s3://images/runs/x has no stage 'finetnue'; did you mean 'finetune'?"),
            ("x/finetune-00000003", "s3://images/runs/x/finetune has not finished"),
            ("y", "no run at s3://images/runs/y"),
        ):
            assert main(["export", f"s3://images/runs/{name}", str(tmp_path / "no"), "--format", "hf"]) != 0
            assert words in capsys.readouterr().err


def test_the_next_commands_printed_for_a_run_in_a_store_work(recipe, shards, tmp_path, capsys, monkeypatch):
    """The commands, and `analyze` of its weights, work from an unrelated folder."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    recipe.write_text(recipe.read_text().partition("resize:")[0])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = [str(recipe), "run=s3://images/runs/tiny", f"cluster.scratch={tmp_path / 'scratch'}"]
    with store("s3", {}):
        assert main(["run", *words, "pretrain.steps=6"]) == 0
        printed = capsys.readouterr().out.partition("next, for example:\n")[2]
        commands = [line.strip() for line in printed.splitlines() if line.startswith("  python -m jobs ")]
        tar = next((shards / "test").glob("*.tar"))
        commands.append(f"python -m jobs analyze s3://images/runs/tiny/pretrain {tar} --output looked --limit 4")
        monkeypatch.setattr("webbrowser.open", lambda url: True)
        for command in commands:
            assert main(shlex.split(command)[3:]) == 0, command
    verbs = [command.split()[3] for command in commands]
    assert verbs == ["report", "evaluate", "export", "run", "analyze"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_weights_with_nan_are_refused_and_nothing_is_written(command, ours, tmp_path, capsys):
    model = models.load(ours)
    with torch.no_grad():
        model.head.bias[4] = float("inf")
    models.save(model, ours)
    arguments = [command, str(ours), str(tmp_path / "out")]
    if command == "export":
        arguments += ["--format", "timm"]
    assert main(arguments) == 65
    assert "head.bias (1 of 5 values)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("loss", ["sigmoid", "softmax", None])
def test_problem_type_follows_the_loss_through_import_and_export(loss, ours, tmp_path, capsys):
    if loss is not None:
        artifacts.write_record(ours / "provenance.json", {"config": {"loss": loss}, "inputs": {}})
    commands = [
        ["export", str(ours), str(tmp_path / "copy"), "--format", "safetensors"],
        ["export", str(tmp_path / "copy"), str(tmp_path / "hf"), "--format", "hf"],
        ["import", str(tmp_path / "hf"), str(tmp_path / "again")],
        ["export", str(tmp_path / "again"), str(tmp_path / "last"), "--format", "hf"],
    ]
    assert [main(command) for command in commands] == [0, 0, 0, 0]
    out = capsys.readouterr().out
    assert ("unknown whether the head was trained with sigmoid or softmax" in out) == (loss is None)
    expected = {"sigmoid": "multi_label_classification", "softmax": "single_label_classification", None: None}[loss]
    for folder in ("hf", "last"):
        assert json.loads((tmp_path / folder / "config.json").read_text()).get("problem_type") == expected
