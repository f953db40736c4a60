"""Warnings of a finished pack stage whose source has changed since it was packed."""

import errno
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.extras.sources.samples import digits
from jobs.__main__ import main
from pipeline import artifacts

RECIPE = """
run: {folder}/run
cluster: {{workers: 1, backend: processes}}
shards: {{kind: pack, restarts: {restarts}, sets: {{train: {train}}}}}
"""
AGAIN = "; train is not packed again (to pack it in a new run, set run=FOLDER)"


def packed(folder: Path, train: str, *, restarts: str = "false") -> str:
    """Write a recipe that packs `train`, run it, and return its path."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, train=train, restarts=restarts))
    assert main(["run", str(recipe)]) == 0
    return str(recipe)


def class_folders(folder: Path) -> Path:
    """Write four images in two class folders: class0/0.png, class0/sub/2.png, class1/1.png and class1/sub/3.png."""
    images = folder / "images"
    for number, sample in zip(range(4), digits(train=False, image_size=16), strict=False):
        path = images / f"class{number % 2}" / ("sub" if number > 1 else "") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.read())
    return images


def move(images: Path) -> None:
    (images / "class0/sub/2.png").rename(images / "class1/sub/2.png")


def rename(images: Path) -> None:
    (images / "class0/0.png").rename(images / "class0/zero.png")


def replace(images: Path) -> None:
    (images / "class0/0.png").write_bytes((images / "class0/0.png").read_bytes() + b"\0")


def swap(images: Path) -> None:
    shutil.copy(images / "class0/0.png", images / "class0/new.png")
    (images / "class1/1.png").unlink()


def remove_class(images: Path) -> None:
    shutil.rmtree(images / "class1")


def add(images: Path) -> None:
    shutil.copy(images / "class0/0.png", images / "class0/new.png")


CHANGES: dict[Callable[[Path], None], str] = {
    move: "has changed since train was packed (1 moved: class0/sub/2 → class1/sub/2)",
    rename: "has changed since train was packed (1 added, 1 removed: class0/zero, class0/0)",
    replace: "has changed since train was packed (1 of another size: class0/0)",
    swap: "has changed since train was packed (1 added, 1 removed: class0/new, class1/1)",
    remove_class: "now has 2 images, but train was packed from 4 (2 removed: class1/1, class1/sub/3)",
    add: "now has 5 images, but train was packed from 4 (1 added: class0/new)",
}


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_source_folder_is_named(
    change: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = class_folders(tmp_path)
    recipe = packed(tmp_path, f"{{path: {images}}}")
    (done,) = (tmp_path / "run").glob("shards-*/done.json")
    before = done.read_bytes()
    capsys.readouterr()
    change(images)
    for command in ("plan", "run"):
        assert main([command, recipe]) == 0
        out = capsys.readouterr().out
        assert out.count(f"shards: {images} {CHANGES[change]}{AGAIN}") == 1
    # The skipped stage does not claim that its source is the same.
    assert "shards: skipped, finished with the same config (key" in out
    assert done.read_bytes() == before


@pytest.mark.quick
def test_no_change_is_reported_for_a_copy_with_unreadable_and_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = class_folders(tmp_path)
    (images / "class0" / "torn.jpg").write_bytes(b"\xff\xd8 no jpeg")
    (images / "class0" / "empty.jpg").touch()
    (images / "class0" / "v1.2.jpg").write_bytes((images / "class0/0.png").read_bytes())
    (images / "class0" / "0.jpg").write_bytes((images / "class0/0.png").read_bytes())
    (images / "class0" / "notes.txt").touch()
    recipe = packed(tmp_path, f"{{path: {images}}}")
    images.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", images, copy_function=shutil.copyfile)  # with new modification times
    for path in images.rglob("*"):
        os.utime(path, (time.time() + 10, time.time() + 10))
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "packed" not in capsys.readouterr().out


@pytest.mark.quick
def test_a_missing_source_is_reported_and_an_unreadable_one_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = class_folders(tmp_path)
    recipe = packed(tmp_path, f"{{path: {images}}}")
    images.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    for command in ("plan", "run"):
        assert main([command, recipe]) == 0
        assert f"shards: {images} is no longer there; its images packed as train are used" in capsys.readouterr().out

    def stale(*args: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    (tmp_path / "elsewhere").rename(images)
    add(images)
    monkeypatch.setattr("jobs.extras.packing.changed_sources.images_below", stale)
    assert main(["run", recipe]) == 0
    assert "packed" not in capsys.readouterr().out


@pytest.mark.quick
def test_excluded_classes_are_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = class_folders(tmp_path)
    recipe = packed(tmp_path, f"{{path: {images}, keep: [class1]}}")
    shutil.copy(images / "class0/0.png", images / "class0/new.png")
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "packed" not in capsys.readouterr().out
    remove_class(images)
    assert main(["run", recipe]) == 0
    assert f"{images} can no longer be packed as train: " in capsys.readouterr().out


def test_restart_markers_are_no_change_but_a_moved_jpeg_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adding restart markers changes the size of each packed JPEG."""
    images = tmp_path / "images"
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    for number, image in enumerate(pixels):
        path = images / f"class{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    recipe = packed(tmp_path, f"{{path: {images}}}", restarts="true")
    (tar,) = (tmp_path / "run").glob("shards-*/train/*.tar")
    with tarfile.open(tar) as shard:
        sizes = {Path(member.name).name: member.size for member in shard if member.name.endswith(".jpg")}
    assert sizes["0.jpg"] != (images / "class0/0.jpg").stat().st_size
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
    (images / "class0/0.jpg").rename(images / "class1/0.jpg")
    assert main(["run", recipe]) == 0
    assert "(1 moved: class0/0 → class1/0)" in capsys.readouterr().out


@pytest.mark.quick
def test_a_large_folder_is_compared_only_if_a_class_folder_is_newer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.extras.packing.changed_sources.MANY", 3)
    images = class_folders(tmp_path)
    recipe = packed(tmp_path, f"{{path: {images}}}")
    # A done.json of an earlier version, without the time of packing, is readable.
    (done,) = (tmp_path / "run").glob("shards-*/done.json")
    values = artifacts.read_record(done)
    del values["finished"]
    artifacts.write_record(done, values)
    replace(images)  # does not change the folder
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
    os.utime(images / "class1", (time.time() + 10, time.time() + 10))
    assert main(["run", recipe]) == 0
    assert CHANGES[replace] in capsys.readouterr().out


@pytest.mark.quick
def test_a_changed_label_in_a_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = class_folders(tmp_path)
    table = images / "list.csv"
    rows = ["path,label", "class0/0.png,cat", "class0/sub/2.png,cat", "class1/1.png,dog", "class1/sub/3.png,dog"]
    table.write_text("\n".join(rows))
    recipe = packed(tmp_path, f"{{source: table, path: {table}}}")
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
    table.write_text("\n".join(rows).replace("2.png,cat", "2.png,dog"))
    assert main(["run", recipe]) == 0
    text = f"shards: {table} has changed since train was packed (1 relabelled: class0/sub/2){AGAIN}"
    assert text in capsys.readouterr().out
    table.write_text("\n".join(rows).replace("2.png,cat", "2.png,bird"))
    assert main(["run", recipe]) == 0
    assert f"shards: {table} has other classes than train: bird{AGAIN}" in capsys.readouterr().out


@pytest.mark.quick
def test_a_changed_class_list_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = class_folders(tmp_path)
    listed = tmp_path / "classes.txt"
    listed.write_text("class0\nclass1\n")
    recipe = packed(tmp_path, f"{{path: {images}, names: {listed}}}")
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
    for names in (("class1", "class0"), ("class0", "class1", "class2")):
        listed.write_text("".join(f"{name}\n" for name in names))
        assert main(["run", recipe]) == 0
        changed = "class1, class0" if len(names) == 2 else "class2"
        out = capsys.readouterr().out
        assert f"shards: {images} has other classes in {listed} than train: {changed}{AGAIN}" in out


def test_other_tars_are_reported_unless_an_earlier_version_packed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tars = tmp_path / "tars"
    tars.mkdir()
    for number, sample in zip(range(2), digits(train=False, image_size=16), strict=False):
        (tmp_path / "image.jpg").write_bytes(sample.read())
        (tmp_path / "image.cls").write_text(str(number))
        with tarfile.open(tars / f"{number}.tar", "w") as tar:
            tar.add(tmp_path / "image.jpg", f"{number}.jpg")
            tar.add(tmp_path / "image.cls", f"{number}.cls")
    recipe = packed(tmp_path, f"{{source: tars, path: {tars}}}")
    capsys.readouterr()
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
    shutil.copy(tars / "0.tar", tars / "2.tar")
    os.utime(tars / "2.tar", (time.time() + 10, time.time() + 10))
    assert main(["run", recipe]) == 0
    text = f"shards: {tars} has changed: train was packed from 2 files, now there are 3, newer than train: 2.tar{AGAIN}"
    assert text in capsys.readouterr().out
    (done,) = (tmp_path / "run").glob("shards-*/done.json")
    values = artifacts.read_record(done)
    del values["sets"]["train"]["source_digest"], values["sets"]["train"]["source_files"]
    artifacts.write_record(done, values)
    assert main(["run", recipe]) == 0
    assert "not packed again" not in capsys.readouterr().out
