"""Parquet files on the Hub are packed into the same bytes as local ones, and each is downloaded once."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.extras.sources import remote_files
from data.extras.sources.samples import digits
from jobs.__main__ import main
from tests.support.hub import Hub, hub

pytestmark = pytest.mark.quick
SET = "hf://datasets/me/photos"
FEATURES = '{"info": {"features": {"label": {"names": ["even", "odd"], "_type": "ClassLabel"}}}}'


@pytest.fixture(params=["ids with names in the schema", "names"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write two Parquet files of 60 digits, labelled even or odd."""
    samples = list(digits(False))[:120]
    (tmp_path / "data").mkdir()
    for number in range(2):
        part = samples[60 * number : 60 * (number + 1)]
        odd = [sample.labels[0] % 2 for sample in part]
        labels = odd if request.param.startswith("ids") else [("even", "odd")[label] for label in odd]
        images = [{"bytes": sample.image, "path": None} for sample in part]
        table = pyarrow.table({"image": images, "label": labels})
        if request.param.startswith("ids"):
            table = table.replace_schema_metadata({"huggingface": FEATURES})
        parquet.write_table(table, tmp_path / "data" / f"train-{number}-of-2.parquet", row_group_size=20)
    return tmp_path / "data"


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    with hub({f"data/{path.name}": path for path in folder.iterdir()}) as state:
        yield state


def contents(folder: Path) -> dict[str, bytes]:
    """Return the tars and tables of a set."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".npy")}


@pytest.mark.parametrize(
    ("pattern", "smallest"), [("data/*.parquet", 0), ("data", 1 << 20), ("data/train-{0..1}-of-2.parquet", 1 << 20)]
)
def test_packed_bytes_are_those_of_local_files(
    pattern, smallest, server, folder, tmp_path, capsys, monkeypatch
) -> None:
    # Files of this size or less are downloaded before their columns are inspected.
    monkeypatch.setattr(remote_files, "SMALLEST", smallest)
    server.throttled = 0.2
    server.retry_after = "0"
    options = ["--shard-samples", "50", "--name", "train"]
    assert main(["pack", "parquet", str(folder), str(tmp_path / "local"), *options]) == 0
    assert main(["pack", "parquet", f"{SET}/{pattern}", str(tmp_path / "remote"), *options]) == 0
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    assert (tmp_path / "remote" / "train.index.json").read_text() == (
        tmp_path / "local" / "train.index.json"
    ).read_text()
    assert "class names: 'even', 'odd'" in capsys.readouterr().out
    copies = list((tmp_path / "cache").rglob("*.tar"))
    assert sorted(copy.stat().st_size for copy in copies) == sorted(path.stat().st_size for path in folder.iterdir())


def test_packing_again_downloads_nothing_and_keeps_the_commit(server, folder, tmp_path) -> None:
    command = ["pack", "parquet", f"{SET}/data/*.parquet", str(tmp_path / "remote")]
    assert main(command) == 0
    server.commits["b" * 40] = {}
    server.main = "b" * 40
    assert main(command) == 0
    assert server.bytes == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("folder", ["names"], indirect=True)
def test_sources_that_cannot_be_urls_are_refused(server, tmp_path, capsys) -> None:
    target = str(tmp_path / "out")
    assert main(["pack", "folder", f"{SET}/train", target]) == 65
    assert f"source folder: path is {SET}/train, expected a path on this machine" in capsys.readouterr().err
    assert main(["pack", "parquet", "s3://bucket/a.parquet", target]) == 65
    assert (
        "s3://bucket/a.parquet: Parquet files can be packed only from hf:// or from a folder" in capsys.readouterr().err
    )
    assert main(["pack", "parquet", f"{SET}/train", target]) == 65
    assert "found no *.parquet files" in capsys.readouterr().err
    server.has_lfs = False
    server.commits["b" * 40] = dict(server.commits[server.main])
    assert main(["pack", "parquet", f"{SET}@{'b' * 40}/data", target]) == 65
    assert "is not stored with LFS or Xet, so it has no recorded sha256" in capsys.readouterr().err
