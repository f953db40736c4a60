"""`jobs data check|list|stats|repair`: bad samples are counted, shown and left out of a repaired data set."""

import json
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample, digits
from jobs.__main__ import main
from tests.support.hostile_names import ESCAPED, tar_with_control_characters
from tests.support.tars import picture

pytestmark = pytest.mark.quick

NAMES = ("cat", "tabby, dog")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return a data set of 20 digits with two unreadable images and one duplicate."""
    samples = list(digits(train=True, image_size=16))[:20]
    samples[3] = Sample(samples[3].key, b"\xff\xd8 no jpeg", samples[3].labels)
    samples[9] = Sample(samples[9].key, b"\xff\xd8 no jpeg", samples[9].labels)
    samples[15] = Sample(samples[15].key, samples[0].image, samples[0].labels)
    pack(samples, tmp_path / "broken", name="broken", shard_samples=8)
    return tmp_path / "broken"


def test_check_counts_bad_samples_and_a_repaired_data_set_passes(broken, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["data", "check", str(broken), "--page", str(page), "--world", "8"]) == 65
    out = capsys.readouterr().out
    assert "bad: 2 × " in out
    assert "duplicates: 1" in out
    assert "jobs data repair" in out
    assert "3 shards for 8 workers" in out
    assert page.read_text().startswith("<!doctype html>")
    assert main(["data", "repair", str(broken), str(tmp_path / "mended"), "--unique"]) == 0
    assert "17 samples in 1 shard," in (out := capsys.readouterr().out)
    assert "3 samples excluded" in out
    assert main(["data", "check", str(tmp_path / "mended"), "--workers", "2"]) == 0


def test_the_suggested_repair_of_a_set_with_a_space_in_its_name_can_be_typed(broken, tmp_path, capsys):
    spaced = broken.rename(tmp_path / "my set")
    assert main(["data", "check", str(spaced)]) == 65
    command = capsys.readouterr().out.partition("run python -m jobs ")[2].strip()
    words = [str(tmp_path / "new") if word == "NEW-FOLDER" else word for word in shlex.split(command)]
    assert main(words) == 0


def test_stats_show_the_distribution_of_sizes_and_classes(shards, capsys):
    assert main(["data", "stats", str(shards / "train")]) == 0
    out = capsys.readouterr().out
    assert "height: 1 % 16, median 16, 99 % 16" in out
    assert "most: class" in out
    assert "least: class" in out


def test_stats_do_not_decode_the_images(tmp_path, capsys):
    """A PNG has a valid header but damaged pixels."""
    image = cv2.imencode(".png", np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))[1].tobytes()
    pixels = image.index(b"IDAT") + 4
    damaged = image[:pixels] + bytes(20) + image[pixels + 20 :]
    pack([Sample("good", image, (0,), "png"), Sample("bad", damaged, (1,), "png")], tmp_path / "set", name="set")
    for command, code, expected in (("stats", 0, 0), ("check", 65, 1)):
        assert main(["data", command, str(tmp_path / "set")]) == code
        assert capsys.readouterr().out.count("bad: 1 × ") == expected


def test_repair_does_not_overwrite_the_original(broken, tmp_path, capsys):
    before = json.loads((broken / "broken.index.json").read_text())
    assert main(["data", "repair", str(broken), str(broken)]) == 65
    assert "use another folder for the repaired data set" in capsys.readouterr().err
    assert json.loads((broken / "broken.index.json").read_text()) == before


def test_repair_needs_a_name_that_can_be_a_file_name(broken, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["data", "repair", str(broken), str(tmp_path / "set"), "--name", "../elsewhere"]) == 78
    assert "expected 1 to 64 of the characters" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written, here or elsewhere"


def test_control_characters_in_member_names_are_escaped_on_the_terminal_and_the_page(tmp_path, capsys):
    tar = tar_with_control_characters(tmp_path)
    assert main(["index", str(tar), "--name", "theirs"]) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["data", "check", str(tmp_path / "theirs.index.json"), "--page", str(page)]) == 65
    assert f"first {ESCAPED} of theirs.tar\n" in capsys.readouterr().out
    assert page.read_text().count(ESCAPED) == 2, "in the summary and below the good image"
    assert not set("\x1b\x07\u202e\x9b") & set(page.read_text())


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
