"""Recipe settings that `jobs new` derives from the images."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import models
from data.extras.survey.survey import FoundSet, Sets
from jobs.__main__ import main
from jobs.extras.new.training import Machine, by_images, candidates_for, choose, images_per_s
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
        (["tars"], 65, "to use only the other files, run python -m jobs new 'tars/digits-*.tar'"),
        ([several[0], "tars/more.tar"], 64, "no folder or pattern matches exactly these"),
        (["tars", "--minutes", "0"], 64, "--minutes is 0, expected a finite training time"),
        (["tars", "--minutes", "nan"], 64, "--minutes is nan, expected a finite training time"),
        (["tars", "--minutes", "1e999"], 64, "--minutes is inf, expected a finite training time"),
    ):
        assert main(["new", *words, "--output", "other.yaml"]) == code
        assert message in capsys.readouterr().err


def test_a_row_of_a_table_applies_from_its_minimum_number_of_images_on():
    table = ((1000, 30), (100, 20), (0, 10))
    assert [by_images(images, table) for images in (1001, 1000, 999, 100, 99, 0)] == [30, 30, 20, 20, 10, 10]


def sets_of(images: int, side: int) -> Sets:
    """Return two classes of images of this size, with another set to evaluate on."""
    counts = Counter({"cats": images // 2, "dogs": images - images // 2})
    train = FoundSet("folders", "/images", images, counts, labelled=images, sides=[(side, side)])
    return Sets(train, test=FoundSet("folders", "/others"))


@pytest.mark.parametrize(("images", "largest"), [(999_999, "S/16"), (1_000_000, "B/16")])
def test_vit_b_is_a_candidate_from_one_million_images_on(images, largest):
    machine = Machine("1 × H100", 16, 1, 1, 80 * 10**9, "bf16")
    assert candidates_for(sets_of(images, 300), machine, None)[-1].section["name"] == largest


@pytest.mark.parametrize(
    ("rate", "name", "steps"),
    [
        # 600 s are enough for all passes: 300 × 1,000 images in batches of 64 are 4,688 steps, rounded down to 4,600.
        (1000.0, "S/4", 4600),
        # 60,000 images are too few for a larger model; they are 938 steps.
        (100.0, "Ti/4", 930),
    ],
)
def test_time_and_passes_limit_model_and_steps(rate, name, steps, monkeypatch):
    monkeypatch.setattr("jobs.extras.new.training.images_per_s", lambda *_: rate)
    monkeypatch.setattr("jobs.extras.new.training.decoding_seconds", lambda *_: 0.001)
    choice = choose(sets_of(1000, 32), Machine("1 core", 1, 0, 1, 10**11, "fp32"), 600.0, name=None, init=None)
    assert (choice.section["name"], choice.batch_size, choice.steps) == (name, 64, steps)


def test_the_level_of_augmentation_is_the_first_reason(monkeypatch):
    monkeypatch.setattr("jobs.extras.new.training.images_per_s", lambda *_: 1000.0)
    monkeypatch.setattr("jobs.extras.new.training.decoding_seconds", lambda *_: 0.001)
    choice = choose(sets_of(1000, 256), Machine("1 GPU", 8, 1, 1, 10**11, "bf16"), 600.0, name=None, init=None)
    # The row of ViT-S in big_vision's configs/vit_i1k.py.
    assert choice.augment == {"randaug_layers": 2, "randaug_magnitude": 15}
    assert choice.reasons == ["level medium1 of AugReg (Steiner et al. 2022)"]


def test_small_images_get_no_randaugment(monkeypatch):
    monkeypatch.setattr("jobs.extras.new.training.images_per_s", lambda *_: 1000.0)
    monkeypatch.setattr("jobs.extras.new.training.decoding_seconds", lambda *_: 0.001)
    choice = choose(sets_of(1000, 32), Machine("1 core", 1, 0, 1, 10**11, "fp32"), 600.0, name=None, init=None)
    assert choice.augment == {"min_area": 0.3}
    assert choice.mixup == 0.2
    assert choice.reasons == [
        "no RandAugment, because the model sees images of 32 px, and AugReg's levels lower the accuracy of such images",
        "crops of at least 30 % of the area, because the model sees images of 32 px",
    ]


@pytest.mark.gpu
def test_speed_is_measured_until_the_gpu_has_finished():
    """Launching a pass of ViT-L takes a fraction of its time: without a wait, the GPU is still busy at the end."""
    machine = Machine("1 × GPU", 16, 1, 1, 80 * 10**9, "bf16")
    assert images_per_s(models.config_of("L/16", 224, 1000), machine, decode_s=1e-9) > 0
    assert torch.cuda.current_stream().query()
