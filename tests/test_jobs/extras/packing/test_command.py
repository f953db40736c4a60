"""`jobs pack`, `jobs index` and `jobs data`: shards made, found, looked at and mended from the command line."""

import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import cv2
import numpy as np
import psutil
import pyarrow.parquet
import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import DIGITS, digits
from data.index.document import load_index
from jobs.__main__ import main
from tests.support.families import wait_until
from tests.support.hostile_names import ESCAPED, tar_with_control_characters

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[4]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write twelve images in two class folders, and a table with six of them."""
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number:02}.jpg"), rng.integers(0, 256, (20, 24, 3), dtype=np.uint8))
    with open(tmp_path / "table.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows([[f"cat/{number:02}.jpg", 3] for number in range(0, 12, 2)])
    return tmp_path / "photos"


def test_packing_class_folders_twice_gives_the_same_data_set(photos, tmp_path, capsys):
    command = ["pack", "folder", str(photos), str(tmp_path / "set"), "--shard-samples", "5", "--workers", "2"]
    assert main(command) == 0
    assert "12 samples in 3 shards, 2 classes, digest " in capsys.readouterr().out
    first = load_index(tmp_path / "set")
    assert main(command) == 0
    assert load_index(tmp_path / "set").digest == first.digest
    assert first.class_counts == (6, 6)


@pytest.mark.parametrize(
    ("source", "samples", "classes"),
    [("table", 6, 4), ("tars", 12, 2), ("parquet", 3, 8), ("digits", 1442, 10)],
)
def test_other_sources_can_be_packed(photos, tmp_path, capsys, source, samples, classes):
    from pyarrow import Table, parquet

    main(["pack", "folder", str(photos), str(tmp_path / "tars")])
    image = (photos / "cat" / "00.jpg").read_bytes()
    rows = [{"image": {"bytes": image, "path": None}, "label": 7}] * 3
    parquet.write_table(Table.from_pylist(rows), tmp_path / "images.parquet")
    paths = {"table": "table.csv", "parquet": "images.parquet", "tars": "tars", "digits": "-"}
    path = "-" if source == "digits" else str(tmp_path / paths[source])
    root = ["--root", str(photos)] if source == "table" else []
    assert main(["pack", source, path, str(tmp_path / "set"), *root]) == 0
    index = load_index(tmp_path / "set")
    assert (index.samples, index.classes) == (samples, classes)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pack", "folder", "/nowhere", "OUT"], 65, "no file or folder at /nowhere"),
        (["pack", "cifar10", "PHOTOS", "OUT"], 65, "binary version"),
        (["pack", "foldr", "PHOTOS", "OUT"], 64, "foldr"),
        (["pack", "imagenet-validation", "FILE", "OUT"], 65, "the classes of these images are unknown"),
        (["pack", "folder", "PHOTOS", "OUT", "--classes", "1"], 65, "expected one or more of 0 … 0"),
        (["pack", "tars", "PHOTOS", "OUT"], 65, "no files match *.tar"),
        (["pack", "parquet", "PHOTOS", "OUT"], 65, "no files match *.parquet"),
        (
            ["pack", "folder", "PHOTOS", "OUT", "--workers", "0"],
            64,
            "Input should be greater than or equal to 1",
        ),
        (["index", "OUT"], 65, "this folder does not exist; use the folder that contains the shards"),
        (["index", "FILE"], 65, "not a *.tar file"),
        (["index", "PHOTOS"], 65, "no *.tar here"),
        (
            ["index", "s3://", "--output", "OUT"],
            65,
            "has no bucket or host; expected a URL like s3://bucket/train",
        ),
        (["index", "PHOTOS", "--output", "FILE"], 64, "expected a folder for the shards"),
        (["pack", "digits", "-", "FILE"], 64, "expected a folder for the shards"),
        (["pack", "digits", "-", "FILE/set"], 64, "expected a folder for the shards"),
        (["data", "repair", "PHOTOS", "FILE"], 64, "expected a folder for the shards"),
        (["pack", "parquet", "FILE", "OUT"], 65, "FILE: not a complete Parquet file"),
        (["pack", "tars", "FILE", "OUT"], 65, "FILE: no valid tar header"),
        (["pack", "folder", "FILE", "OUT"], 65, "FILE is a file, expected a folder of class folders"),
        (["pack", "csv", "TYPO", "OUT"], 64, "source is csv; did you mean 'table'?"),
        (["pack", "webdataset", "PHOTOS", "OUT"], 64, "source is webdataset; did you mean 'tars'?"),
        (["pack", "table", "SEMI", "OUT"], 65, "separated by semicolons: path;label\n  expected commas: save it again"),
        (["pack", "table", "TABS", "OUT"], 65, "separated by tabs: path\\tlabel\n  expected commas: save it again"),
        (
            ["pack", "parquet", "COLUMNS", "OUT"],
            65,
            "found foo, bar\n  rename the columns: images can be called image",
        ),
        (["index", "ZERO"], 65, "zero.tar: empty, 0 bytes\n  expected a tar: copy, download or pack it again"),
        (
            ["index", "ZIP"],
            65,
            "zip.tar: a zip archive, expected a tar\n  unpack it, then run python -m jobs pack",
        ),
        (["pack", "table", "TYPO", "OUT"], 65, "labels [99999999999999999999], expected one or more of 0 … 999999"),
        (["index", "s3://bucket/set"], 65, "--output"),
        (["data", "check", "s3://bucket/set"], 65, "an index must be local"),
        (["data", "check", "OUT"], 65, "expected one *.index.json|this index does not exist"),
        (["data", "mend", "OUT"], 64, "No such command 'mend'"),
    ],
)
def test_invalid_sources_and_data_sets_are_refused(photos, tmp_path, capsys, arguments, code, message):
    file = tmp_path / "random.bin"
    file.write_bytes(bytes(range(256)) * 8)
    typo = photos / "typo.csv"
    typo.write_text("path,label\ncat/00.jpg,99999999999999999999\n")
    places = {"PHOTOS": photos, "OUT": tmp_path / "out", "FILE": file, "FILE/set": file / "set", "TYPO": typo}
    for name, content in (("semi.csv", "path;label\n"), ("tabs.csv", "path\tlabel\n"), ("zero.tar", "")):
        (tmp_path / name).write_text(content + content)
        places[name[:4].upper()] = tmp_path / name
    with zipfile.ZipFile(tmp_path / "zip.tar", "w") as archive:
        archive.writestr("a.jpg", "")
    pyarrow.parquet.write_table(pyarrow.Table.from_pydict({"foo": [1], "bar": ["a"]}), tmp_path / "columns.parquet")
    places |= {"ZIP": tmp_path / "zip.tar", "COLUMNS": tmp_path / "columns.parquet"}
    assert main([str(places.get(word, word)) for word in arguments]) == code
    error = capsys.readouterr().err
    assert any(part.replace("FILE", str(file)) in error for part in message.split("|"))
    assert "a bug" not in error
    assert not (tmp_path / "out").exists()


def test_existing_tars_are_indexed_in_place_or_in_another_folder(photos, tmp_path, capsys):
    main(["pack", "folder", str(photos), str(tmp_path / "set"), "--shard-samples", "5"])
    made = load_index(tmp_path / "set").digest
    assert main(["index", str(tmp_path / "set")]) == 0
    assert load_index(tmp_path / "set").digest == made, "the names are those of the index that is made again"
    (tmp_path / "set" / "set.index.json").unlink()
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    capsys.readouterr()
    assert main(["index", str(tmp_path / "set"), "--names", str(tmp_path / "classes.txt")]) == 0
    assert "12 samples in 3 shards" in capsys.readouterr().out
    assert load_index(tmp_path / "set").digest == made
    tars = sorted(str(path) for path in (tmp_path / "set").glob("*.tar"))[:2]
    apart = ["--output", str(tmp_path / "apart"), "--name", "two", "--at", "s3://bucket/set", "--workers", "2"]
    assert main(["index", *tars, *apart]) == 0
    assert load_index(tmp_path / "apart" / "two.index.json").location(0) == "s3://bucket/set/set-000000.tar"


def test_real_labels_of_imagenet_are_packed_by_the_command(tmp_path, capsys):
    """One of two images has an empty list of labels, which excludes it from the protocol."""
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name in ("v0.JPEG", "v1.JPEG"):
            body = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    (tmp_path / "real.json").write_text("[[], [3, 7]]")
    files = [str(tmp_path / "val.tar"), str(tmp_path / "set")]
    assert main(["pack", "imagenet-validation", *files, "--real", str(tmp_path / "real.json"), "--partial"]) == 0
    assert "1 samples in 1 shard, 8 classes" in capsys.readouterr().out


def test_two_shards_with_the_same_table_name_are_refused(photos, tmp_path, capsys):
    main(["pack", "folder", str(photos), str(tmp_path / "a"), "--name", "b"])
    shutil.copy(tmp_path / "a" / "b-000000.tar", tmp_path / "a--b-000000.tar")
    capsys.readouterr()
    tars = [str(tmp_path / "a" / "b-000000.tar"), str(tmp_path / "a--b-000000.tar")]
    assert main(["index", *tars, "--output", str(tmp_path / "index")]) == 65
    assert "two shards would have the same table a--b-000000.npy; rename one" in capsys.readouterr().err


def test_an_index_does_not_overwrite_the_tables_of_another_one(photos, tmp_path, capsys):
    for name in ("one", "two"):
        main(["pack", "folder", str(photos), str(tmp_path / name), "--name", "train"])
    place = ["--output", str(tmp_path / "index")]
    assert main(["index", str(tmp_path / "one"), "--name", "a", *place]) == 0
    assert main(["index", str(tmp_path / "one"), "--name", "b", *place]) == 0, "the same tars"
    capsys.readouterr()
    assert main(["index", str(tmp_path / "two"), "--name", "c", *place]) == 65
    assert "has a different shard named train-000000.tar, whose table would be overwritten" in capsys.readouterr().err


def test_samples_skipped_by_indexing_are_reported(tmp_path, capsys):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        image = next(digits(train=True, image_size=16)).image
        for name, body in (("a.tiff", b"1"), ("a.cls", b"1"), ("b.jpg", image), ("b.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    assert main(["index", str(tmp_path)]) == 0
    assert "refused: 1 × member type .tiff, first a.tiff of x.tar" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../elsewhere", "..", "a b", "x" * 65])
def test_the_name_of_a_data_set_must_be_a_file_name(photos, shards, tmp_path, capsys, name):
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ["pack", "folder", str(photos), str(tmp_path / "set")],
        ["index", str(shards / "test"), "--output", str(tmp_path / "index")],
    ):
        assert main([*words, "--name", name]) == 78
        assert f"a set is named {name!r}\n  expected 1 to 64 of the characters" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written, here or elsewhere"


def test_control_characters_in_member_names_are_escaped(tmp_path, capsys):
    tar_path = str(tar_with_control_characters(tmp_path))
    assert main(["index", tar_path, "--name", "theirs", "--classes", "5"]) == 65
    assert f"sample {ESCAPED} has label 7" in capsys.readouterr().err
    assert main(["index", tar_path, "--name", "theirs"]) == 0


# ------------------------------------------------------------------------------------------- signals

SOON_S = 5.0  # on a machine that others use too; unheard, a stop would take 14 s
# A slow disk, also in forked processes.
ON_A_SLOW_DISK = """
import sys, time
from data.extras.sources import samples, tar_offsets
from jobs.__main__ import main
read, sample_digest = samples.Sample.read, tar_offsets.sample_digest
samples.Sample.read = lambda sample: time.sleep(0.02) or read(sample)
tar_offsets.sample_digest = lambda image, label: time.sleep(0.02) or sample_digest(image, label)
sys.exit(main())
"""


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """`python -m jobs …` on a slow disk."""
    command = [sys.executable, "-c", ON_A_SLOW_DISK, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alive(child: psutil.Process) -> bool:
    return child.is_running() and child.status() != psutil.STATUS_ZOMBIE


def stop(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a process and check that it reports the stop soon and exits with 75."""
    process.send_signal(number)
    asked_at = time.monotonic()
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("stopped by"):
            assert time.monotonic() - asked_at < SOON_S, said
            assert line.startswith(f"stopped by {number.name}; ")
            assert "is kept, run the same command again" in line
    assert process.wait() == 75, said
    assert "Traceback" not in said, said
    assert "stopped by" in said, said


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_a_pack_stage_soon(tmp_path, number):
    recipe = tmp_path / "pack.yaml"
    recipe.write_text(
        f"run: {tmp_path}/run\nshards: {{kind: pack, workers: 2, shard_samples: 700,\n"
        "  sets: {train: {source: digits, image_size: 16}}}"
    )
    process = started(["run", str(recipe)])
    wait_until(lambda: any(tmp_path.glob("run/shards-*/train/.tmp-*.tar")), timeout_s=60)
    stop(process, number)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["exit_code"] == 75
    assert "stopped by" in status["message"]
    assert not list(tmp_path.glob("run/shards-*/train/.tmp-*")), "nothing half written stays"
    assert main(["run", str(recipe)]) == 0
    whole = pack(digits(train=True, image_size=16), tmp_path / "whole", shard_samples=700, names=DIGITS)
    assert load_index(next(tmp_path.glob("run/shards-*")) / "train").digest == whole.digest


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_signal_stops_indexing_soon(shards, tmp_path, capsys, workers):
    command = ["index", str(shards / "train"), "--output", str(tmp_path / "index"), "--workers", workers]
    process = started(command)
    journal = tmp_path / "index/train.index.json.partial"
    wait_until(lambda: journal.exists() and len(journal.read_text().splitlines()) > 1, timeout_s=60)
    children = psutil.Process(process.pid).children()
    stop(process, signal.SIGTERM)
    assert not any(map(alive, children))
    assert len(journal.read_text().splitlines()) > 1
    assert main(command) == 0
    assert load_index(tmp_path / "index").digest == load_index(shards / "train").digest


def test_indexing_processes_end_if_the_command_is_killed(shards, tmp_path):
    process = started(["index", str(shards / "train"), "--output", str(tmp_path), "--workers", "2"])
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, timeout_s=60)
    wait_until(lambda: any(tmp_path.glob("*.npy")), timeout_s=60)
    children = psutil.Process(process.pid).children()
    process.kill()
    wait_until(lambda: not any(map(alive, children)))
    process.wait()
