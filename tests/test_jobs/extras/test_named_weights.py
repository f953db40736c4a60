"""Find weights by path, and refuse invalid paths before torch is imported."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from data.errors import DataError
from jobs.extras.named_weights import check_weights_exist, find_weights
from pipeline.artifacts import write_record

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
