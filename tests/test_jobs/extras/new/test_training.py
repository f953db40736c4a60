"""Recipe settings that `jobs new` derives from the images."""

from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.extras.new.training import by_images
from tests.support.image_sources import NAMES, class_folders, new, table, tars, three_digits


@pytest.fixture(autouse=True)
def in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.extras.new.training.MEASURED_S", 0.0)


def test_labels_packed_sets_and_file_names_determine_the_recipe(tmp_path, capsys):
    samples = three_digits()
    # Several labels per image.
    rows = table(tmp_path / "several", samples).read_text().splitlines()
    lines = [rows[0]]
    for number, row in enumerate(rows[1:]):
        lines.append(f"{row.rpartition(',')[0]},{number % 3} {3 if number % 2 else ''}")
    (tmp_path / "several" / "photos.csv").write_text("\n".join(lines))
    config = new(tmp_path / "several").stages[-1].config
    assert (config.loss, config.data.max_labels, config.model["classes"]) == ("sigmoid", 2, 4)
    # A packed set is read in place; the set next to it becomes the test set.
    class_folders(tmp_path / "letters" / "train", samples)
    for name, letter in zip(NAMES, "abc", strict=True):
        (tmp_path / "letters" / "train" / name).rename(tmp_path / "letters" / "train" / letter)
    for part in ("train", "test"):
        assert main(["pack", "folder", "letters/train", f"packed/{part}"]) == 0
    Path("recipe.yaml").unlink()
    campaign = new("packed")
    (stage,) = campaign.stages
    assert stage.config.data.train == str(tmp_path / "packed" / "train")
    assert stage.config.data.evaluate == str(tmp_path / "packed" / "test")
    assert not stage.config.data.augment.flip
    # File names determine the parts of a set, in a folder or with a pattern.
    for part, some in (("train", samples[:40]), ("val", samples[40:])):
        tars(tmp_path / "tars", some, lambda sample: {"cls": sample.labels[0]}, name=f"digits-{part}")
    several = sorted(map(str, Path("tars").iterdir()))
    for places in (["tars"], ["tars/digits-*.tar"], several):
        Path("recipe.yaml").unlink()
        sets = new(*places).stages[0].config.sets
        paths = {
            name: sorted(path.name for path in tmp_path.glob(f"tars/{Path(cfg.path).name}"))
            for name, cfg in sets.items()
        }
        assert paths == {"train": ["digits-train-00.tar", "digits-train-01.tar"], "test": ["digits-val-00.tar"]}
    # A pattern, expanded by the shell or not, selects only the files that match.
    for places in (["tars/digits-train-*.tar"], several[:2]):
        Path("recipe.yaml").unlink()
        campaign = new(*places)
        assert list(campaign.stages[0].config.sets) == ["train"]
        assert campaign.stages[0].config.sets["train"].path == str(tmp_path / "tars/digits-train-*.tar")
        assert campaign.stages[-1].config.data.evaluate == "@parts/held-out"
    Path("tars/more.tar").write_bytes(b"")
    for words, code, message in (
        (["tars"], 65, "to use only the others, run python -m jobs new 'tars/digits-*.tar'"),
        ([several[0], "tars/more.tar"], 64, "no folder or pattern matches exactly these paths"),
        (["tars", "--minutes", "0"], 64, "--minutes is 0, expected a training time"),
        (["tars", "--minutes", "nan"], 64, "--minutes nan: expected a training time"),
    ):
        assert main(["new", *words, "--output", "other.yaml"]) == code
        assert message in capsys.readouterr().err


def test_a_row_of_a_table_applies_from_its_minimum_number_of_images_on():
    table = ((1000, 30), (100, 20), (0, 10))
    assert [by_images(images, table) for images in (1001, 1000, 999, 100, 99, 0)] == [30, 30, 20, 20, 10, 10]
