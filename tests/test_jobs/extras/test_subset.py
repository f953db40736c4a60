"""`python -m jobs subset`: its summary, and the outputs it refuses."""

from pathlib import Path

import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.index.index import Index
from jobs.__main__ import main
from tests.support.tars import picture

pytestmark = pytest.mark.quick

LABELS = [3, 0, 1, 1, 2, 0, 3, 3, 1, 0, 2, 1, 0, 0, 3, 1, 2, 3, 1, 0, 1, 3, 0, 1, 3]  # class 2, cat, has three samples


@pytest.fixture
def parent(tmp_path: Path) -> Index:
    samples = [Sample(f"s{number:02d}", picture(10 * number, 16), (label,)) for number, label in enumerate(LABELS)]
    return pack(samples, tmp_path / "train", shard_samples=7, names=("ant", "bee", "cat", "dog"))


def test_subset_prints_a_summary_of_its_selection(tmp_path, parent, capsys):
    output = tmp_path / "few"
    words = ["subset", str(parent.tables), "--shots", "6", "--seed", "0", "--keep", "3", "--keep", "cat", "--output"]
    assert main([*words, str(output)]) == 0
    printed = capsys.readouterr().out
    assert "9 of 25 samples (36.000%) in 4 of 4 shards" in printed
    assert "by keep [3, 'cat'], shots 6, seed 0" in printed
    assert "1 classes have fewer than 6 samples, the first is cat" in printed
    assert main(["subset", str(parent.tables), "--output", str(output)]) == 78


def test_subset_refuses_a_file_as_its_output_folder(tmp_path, parent, capsys):
    (tmp_path / "file").touch()
    assert main(["subset", str(parent.tables), "--part", ":3", "--output", str(tmp_path / "file")]) == 64
    assert f"{tmp_path}/file is a file\n  expected a folder for the shards" in capsys.readouterr().err


def test_name_applies_to_only_one_subset(tmp_path, parent, capsys):
    words = ["subset", str(parent.tables), "--name", "half"]
    two = ["--part", ":12", "--output", str(tmp_path / "a"), "--part", "12:", "--output", str(tmp_path / "b")]
    assert main([*words, *two]) == 64
    assert "2 --part, 2 --output and one --name\n  expected one --output for each --part" in capsys.readouterr().err
    assert main([*words, "--part", ":12", "--output", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "half.index.json").is_file()
