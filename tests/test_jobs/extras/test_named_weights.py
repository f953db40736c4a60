"""Find weights by path, and refuse invalid paths before torch is imported."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import models
from data.errors import DataError
from jobs.__main__ import main
from jobs.extras.named_weights import check_weights_exist, find_weights, how_to_download
from pipeline.artifacts import write_record
from tests.support.photos import make_photos

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("files", [["model.json"], ["model.safetensors"]])
def test_folders_of_our_and_foreign_weights_are_accepted(files, tmp_path):
    for name in files:
        save_file({"x": np.zeros(3)}, tmp_path / name)
    assert find_weights(str(tmp_path)) == str(tmp_path)


def test_a_part_of_an_npz_is_selected_after_a_colon(tmp_path):
    np.savez(tmp_path / "siglip.npz", x=np.zeros(3))
    check_weights_exist(f"{tmp_path}/siglip.npz:img")
    with pytest.raises(DataError, match="no file or folder at"):
        check_weights_exist(f"{tmp_path}/sigl.npz:img")


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("model.bin", ["model.bin"], "the file is not a weights file\n  expected an official .npz, the .pth of DINOv2"),
        ("empty", ["empty/notes.txt"], "the folder contains neither model.json nor model.safetensors"),
        ("set", ["set/t.index.json"], "is a data set, not weights\n  give the weights first, then the data sets"),
        (
            "run",
            ["run/checkpoints/step-0000000030/MANIFEST.json"],
            "has checkpoints but no exported weights yet\n  instead, run python -m jobs export .*/run/step-30 FOLDER",
        ),
        (
            "started",
            ["started/checkpoints/.tmp-x"],
            "no exported weights yet\n  wait until its stage has saved a checkpoint",
        ),
    ],
)
def test_a_path_without_weights_is_an_error_with_a_remedy(name, files, message, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=message):
        check_weights_exist(str(tmp_path / name))


@pytest.mark.parametrize("command", ["new", "import", "evaluate", "predict"])
def test_name_of_a_model_is_answered_with_the_python_that_downloads_it(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos")
    words = {
        "new": ["new", "photos", "--init", "NAME"],
        "import": ["import", "NAME", "out"],
        "evaluate": ["evaluate", "NAME", "photos"],
        "predict": ["predict", "NAME", "photos"],
    }[command]
    for typed, python in {
        "vit_tiny_patch16_224": "timm.create_model('vit_tiny_patch16_224', pretrained=True), 'FOLDER', safe",
        "timm/vit_tiny_patch16_224.augreg_in21k": "timm.create_model('vit_tiny_patch16_224.augreg_in21k', pretrained",
        "google/vit-base-patch16-224": "snapshot_download('google/vit-base-patch16-224', local_dir='FOLDER')",
    }.items():
        assert main([typed if word == "NAME" else word for word in words]) == 65
        error = capsys.readouterr().err
        assert f"no file or folder at {typed}" in error
        assert python in error
    # A missing file is no name.
    assert main([word.replace("NAME", "vit_b16.npz") for word in words]) == 65
    assert "download" not in capsys.readouterr().err


def test_folder_made_by_the_suggested_python_can_be_imported(tmp_path, timm):
    """Without its download: the weights are random."""
    code = how_to_download("vit_tiny_patch16_224").splitlines()[-1].split('"')[1]
    code = code.replace("FOLDER", str(tmp_path / "theirs")).replace("pretrained=True", "pretrained=False")
    exec(code)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert models.parameters_of(models.load(tmp_path / "ours").config) == 5_717_416  # Touvron et al. 2021, DeiT-Ti


@pytest.mark.parametrize("length", [0, 3, 20, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "ViT-B_16.npz", "dinov2.pth"])
def test_truncated_weights_are_refused_by_name(name, length, tmp_path):
    path = tmp_path / name
    if name.endswith(".safetensors"):
        save_file({"x": np.zeros(3)}, path)
    else:
        with open(path, "wb") as file:
            np.savez(file, x=np.zeros(3))  # a zip archive, like a .pth
    check_weights_exist(str(path))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=rf"{name} is not a complete {path.suffix} file.*\n  download or copy it again"):
        check_weights_exist(str(path))


def test_legacy_pth_is_accepted(tmp_path):
    # timm's clean_checkpoint.py writes this format.
    torch.save({"x": torch.zeros(3)}, tmp_path / "vit.pth", _use_new_zipfile_serialization=False)
    check_weights_exist(str(tmp_path / "vit.pth"))


def test_a_stage_name_without_a_run_lists_the_runs_that_have_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, stage in (("a", "pretrain-00000001"), ("a", "pretrain-00000002"), ("b", "pretrain-00000001")):
        folder = tmp_path / "runs" / run / stage
        folder.mkdir(parents=True)
        write_record(folder / "stage.json", {"started": 1.0})
        write_record(folder / "done.json", {"finished": 2.0})
    with pytest.raises(DataError, match="2 runs; use one of them:\n  runs/a/pretrain\n  runs/b/pretrain\n"):
        find_weights("pretrain")
