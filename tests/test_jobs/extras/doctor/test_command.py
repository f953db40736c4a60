"""`data list` prints every sample of a set, and of a part that was held out."""

from pathlib import Path

import pytest

from data.shards.packing import pack
from data.sources.samples import Sample
from jobs.__main__ import main
from tests.support.tars import picture

pytestmark = pytest.mark.quick

NAMES = ("cat", "tabby, dog")


def test_the_samples_of_a_set_and_of_its_parts_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"{NAMES[number % 2]}/{number}" for number in range(20)]
    samples = [Sample(key, picture(number), (number % 2,)) for number, key in enumerate(keys)]
    pack(samples, tmp_path / "all", name="all", names=NAMES, shard_samples=7)
    parts = []
    for part, folder in ((":80%", "train"), ("80%:", "held-out")):
        parts += ["--part", part, "--output", str(tmp_path / folder)]
    assert main(["subset", str(tmp_path / "all"), *parts, "--seed", "0"]) == 0
    capsys.readouterr()
    assert main(["data", "list", str(tmp_path / "all")]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected = [[key, f"all-{number // 7:06}.tar", NAMES[number % 2], "all"] for number, key in enumerate(keys)]
    assert rows == expected
    assert main(["data", "list", str(tmp_path / "train"), str(tmp_path / "held-out")]) == 0
    listed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert sorted(row[:3] for row in listed) == sorted(row[:3] for row in expected)
    held_out = {row[0] for row in listed if row[3] == "held-out"}
    assert len(held_out) == 4
    assert {key.partition("/")[0] for key in held_out} == set(NAMES)
