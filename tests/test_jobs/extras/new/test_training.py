"""What images and machine decide of a new recipe."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from webdataset import ShardWriter

from data.sources.samples import Sample, digits
from jobs.__main__ import main
from jobs.resolved_recipe import Campaign
from tests.support.campaigns import load

NAMES = ("null", "eins", "zwei")  # in no alphabetic order


def three_digits(train: bool = True, most: int = 60) -> list[Sample]:
    """Return some of the digits 0, 1 and 2: of each class a third, or nearly so."""
    chosen = [sample for sample in digits(train=train, image_size=16) if sample.labels[0] < 3]
    return chosen[:most]


def name_of(sample: Sample) -> str:
    return NAMES[sample.labels[0]]


def class_folders(folder: Path, samples: list[Sample]) -> Path:
    for sample in samples:
        path = folder / name_of(sample) / f"{sample.key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    return folder


def tars(folder: Path, samples: list[Sample], label: Callable[[Sample], dict[str, object]], name: str = "x") -> Path:
    folder.mkdir(exist_ok=True)
    with ShardWriter(f"{folder}/{name}-%02d.tar", maxcount=25, verbose=0) as writer:
        for sample in samples:
            writer.write({"__key__": sample.key, "jpg": sample.image, **label(sample)})
    return folder


def table(folder: Path, samples: list[Sample]) -> Path:
    class_folders(folder / "images", samples)
    with open(folder / "photos.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "label"])
        for sample in samples:
            writer.writerow([f"images/{name_of(sample)}/{sample.key}.jpg", name_of(sample)])
    return folder / "photos.csv"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.extras.new.training.MEASURED_S", 0.0)


def new(place: object, *words: str) -> Campaign:
    """Return the campaign of the recipe that is written."""
    assert main(["new", str(place), "--output", "recipe.yaml", "--minutes", "0.01", *words]) == 0
    return load(Path("recipe.yaml"), [])


def test_what_is_found_decides_what_the_recipe_says(tmp_path, capsys):
    samples = three_digits()
    # Several labels an image.
    rows = table(tmp_path / "several", samples).read_text().splitlines()
    lines = [rows[0]]
    for number, row in enumerate(rows[1:]):
        lines.append(f"{row.rpartition(',')[0]},{number % 3} {3 if number % 2 else ''}")
    (tmp_path / "several" / "photos.csv").write_text("\n".join(lines))
    config = new(tmp_path / "several").stages[-1].config
    assert (config.loss, config.data.max_labels, config.model["classes"]) == ("sigmoid", 2, 4)
    # A set that has been packed is read where it lies; of the other set the same folder is known.
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
    # Parts that files' names tell, in one folder or by a pattern.
    for part, some in (("train", samples[:40]), ("val", samples[40:])):
        tars(tmp_path / "tars", some, lambda sample: {"cls": sample.labels[0]}, name=f"digits-{part}")
    several = sorted(map(str, Path("tars").iterdir()))
    for places in (["tars"], ["tars/digits-*.tar"], several):
        Path("recipe.yaml").unlink()
        sets = new(*places).stages[0].config.sets
        found = {
            name: sorted(path.name for path in tmp_path.glob(f"tars/{Path(cfg.path).name}"))
            for name, cfg in sets.items()
        }
        assert found == {"train": ["digits-train-00.tar", "digits-train-01.tar"], "test": ["digits-val-00.tar"]}
    # Of a pattern, and of what a shell makes of one, nothing else is taken.
    for places in (["tars/digits-train-*.tar"], several[:2]):
        Path("recipe.yaml").unlink()
        campaign = new(*places)
        assert list(campaign.stages[0].config.sets) == ["train"]
        assert campaign.stages[0].config.sets["train"].path == str(tmp_path / "tars/digits-train-*.tar")
        assert campaign.stages[-1].config.data.evaluate == "@parts/held-out"
    Path("tars/more.tar").write_bytes(b"")
    for words, code, message in (
        (["tars"], 65, "to use only the others, type python -m jobs new 'tars/digits-*.tar'"),
        ([several[0], "tars/more.tar"], 64, "no folder or pattern matches exactly these paths"),
        (["tars", "--minutes", "0"], 64, "--minutes 0: expected more than 0"),
        (["tars", "--minutes", "nan"], 64, "--minutes nan: expected more than 0"),
    ):
        assert main(["new", *words, "--output", "other.yaml"]) == code
        assert message in capsys.readouterr().err
