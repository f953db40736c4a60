"""`jobs new` on every kind of image source: its findings, the recipe, and a run of the unedited recipe.

The images are digits of 16 pixels; expected counts come from the samples themselves, tarfile and webdataset.
"""

import io
import json
import math
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from data.extras.sources.samples import digits
from data.extras.survey.survey import FoundSet, Sets, survey
from data.index.document import load_index
from jobs.__main__ import main
from jobs.extras.new.new import bad_fraction, write_recipe
from jobs.extras.new.training import Machine, choose
from tests.support.campaigns import load
from tests.support.foreign_vits import save_timm, transformers_model
from tests.support.image_sources import (
    NAMES,
    class_folders,
    flat_folder,
    name_of,
    new,
    parquet,
    parquet_without_labels,
    table,
    table_without_labels,
    tars,
    three_digits,
)
from tests.support.weights import random_model

FEW = ("cluster.workers=1", "pretrain.steps=3", "pretrain.optim.schedule.warmup_steps=1")
# Every kind of source: a function that makes it, a line that `new` prints, and the set for accuracy (None: no labels).
KINDS: dict[str, tuple[Callable[[Path], Path], str, str | None]] = {
    "folders": (
        lambda p: class_folders(class_folders(p / "train", three_digits()).parent / "val", three_digits(False)).parent,
        "60 images of 3 classes",
        "@shards/test",
    ),
    "cls ids": (
        lambda p: tars(p, three_digits(), lambda sample: {"cls": sample.labels[0]}),
        "60 images of 3 classes",
        "@parts/held-out",
    ),
    "json names": (
        lambda p: tars(p, three_digits(), lambda sample: {"json": {"label": name_of(sample), "size": 16}}),
        "60 images of 3 classes (eins",
        "@parts/held-out",
    ),
    "cls names": (
        lambda p: tars(p, three_digits(), lambda sample: {"cls": name_of(sample)}),
        "60 images of 3 classes (eins",
        "@parts/held-out",
    ),
    "csv": (lambda p: table(p, three_digits()), "60 images of 3 classes (eins", "@parts/held-out"),
    "parquet": (lambda p: parquet(p, three_digits()), "40 images of 3 classes", "@shards/test"),
    "unlabelled images": (lambda p: flat_folder(p, three_digits()), "60 images without labels", None),
    "csv without labels": (lambda p: table_without_labels(p, three_digits()), "60 images without labels", None),
    "parquet without labels": (lambda p: parquet_without_labels(p, three_digits()), "60 images without labels", None),
    "tars without labels": (lambda p: tars(p, three_digits(), lambda _: {}), "60 images without labels", None),
}
RUN = ("folders", "json names", "unlabelled images")  # trained completely; for the others only the data is made


@pytest.fixture(autouse=True)
def in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.extras.new.training.MEASURED_S", 0.0)


@pytest.mark.parametrize(
    "kind", [kind if kind == RUN[0] else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_recipe_of_new_runs_unedited(kind, tmp_path, capsys):
    make, line, evaluated = KINDS[kind]
    campaign = new(make(tmp_path / "in put"))
    out = capsys.readouterr().out
    assert line in out
    assert "next: python -m jobs run recipe.yaml" in out
    stage = campaign.stages[-1]
    assert stage.config.data.evaluate == evaluated
    assert main(["run", "recipe.yaml", *FEW]) == 0
    done = next((tmp_path / "runs").glob("*/pretrain-*/done.json"))
    record = json.loads(done.read_text())
    if evaluated is None:
        assert models.load(done.parent).config.family == "masked"
        assert record["metrics"] == {}
    else:
        assert 0 <= record["metrics"]["accuracy"] <= 1
        assert models.load_class_names(done.parent) == (tuple(sorted(NAMES)) if kind != "cls ids" else ())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RUN])
def test_the_recipe_packs_or_indexes_every_kind_of_source(kind, tmp_path):
    make, _, _ = KINDS[kind]
    new(make(tmp_path / "input"))
    assert main(["run", "recipe.yaml", "--only", "shards"]) == 0
    index = load_index(next((tmp_path / "runs").glob("*/shards-*/train")))
    kept = three_digits()[: 40 if kind == "parquet" else 60]
    assert index.samples == len(kept)
    counts = Counter(sample.labels[0] if kind == "cls ids" else name_of(sample) for sample in kept)
    if kind.endswith("without labels"):
        assert index.classes == 0
    else:
        assert index.class_counts == tuple(counts[label] for label in sorted(counts))
        assert index.names == (() if kind == "cls ids" else tuple(sorted(NAMES)))


def test_the_held_out_part_is_disjoint_and_has_its_share_of_every_class(tmp_path):
    """Compares the written keys and labels with those in the index tables."""
    samples = [sample for sample in digits(train=True, image_size=16) if sample.labels[0] < 3][:300]
    campaign = new(tars(tmp_path / "input", samples, lambda sample: {"cls": name_of(sample)}))
    for stage in ("shards", "parts"):
        assert main(["run", "recipe.yaml", "--only", stage]) == 0
    label_of_key = {sample.key: name_of(sample) for sample in samples}
    parts = {}
    for name in ("train", "held-out"):
        index = load_index(next(tmp_path.glob(f"runs/*/parts-*/{name}")))
        parts[name] = [key for number in range(len(index.shards)) for key in index.keys(number)]
    assert len(parts["train"]) == 240
    assert len(parts["held-out"]) == 60
    assert sorted(parts["train"] + parts["held-out"]) == sorted(label_of_key)
    of_all = Counter(label_of_key.values())
    for name, count in Counter(label_of_key[key] for key in parts["held-out"]).items():
        assert abs(count - of_all[name] / 5) <= 1
    assert campaign.stages[-1].config.data.train == "@parts/train"


def test_weights_are_fine_tuned_with_a_new_head(tmp_path, capsys):
    config = models.config_of("mu/8", 16, 10)
    models.save_weights(models.from_config(config).state_dict(), tmp_path / "weights", config)
    folder = class_folders(tmp_path / "input", three_digits())
    campaign = new(folder, "--init", "weights")
    (stage,) = [stage for stage in campaign.stages if stage.kind.trains]
    assert stage.name == "finetune"
    assert stage.model == models.config_of("mu/8", 16, 3)
    assert (
        main(["run", "recipe.yaml", "cluster.workers=1", "finetune.steps=2", "finetune.optim.schedule.warmup_steps=1"])
        == 0
    )
    for words, message in (
        (["--init", "nowhere"], "no file or folder at nowhere"),
        (["--probe"], "add --init WEIGHTS"),
        (["--init", "weights", "--model", "S/16"], "omit --model"),
    ):
        assert main(["new", str(folder), "--output", "other.yaml", *words]) != 0
        assert message in capsys.readouterr().err
        assert not Path("other.yaml").exists()


@pytest.mark.slow
def test_a_linear_probe_is_evaluated_with_the_recorded_preprocessing(transformers, tmp_path, capsys):
    theirs = transformers_model(transformers, "dinov2")
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size=32).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "weights"]) == 0
    folder = class_folders(tmp_path / "input", three_digits())
    campaign = new(folder, "--init", "weights", "--probe")
    stage = campaign.stages[-1]
    assert (stage.kind.name, stage.config.protocols) == ("evaluate", ("logistic", "knn"))
    capsys.readouterr()
    assert main(["run", "recipe.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "preprocessing resize_pillow(40, 'bicubic')|central_crop(32) (recorded with the weights)" in printed
    assert re.search(r"logistic +[\d.]+", printed)
    assert not list(tmp_path.glob("runs/*/*/checkpoints"))


def test_imported_weights_are_fine_tuned_with_settings_of_their_kind(transformers, tmp_path):
    transformers_model(transformers, "clip").save_pretrained(tmp_path / "theirs")
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "weights"]) == 0
    campaign = new(class_folders(tmp_path / "input", three_digits()), "--init", "weights")
    (stage,) = [stage for stage in campaign.stages if stage.kind.trains]
    optim = stage.config.optim
    expected = 3e-5 * (stage.config.batch_size / 512) ** 0.5  # WiSE-FT
    assert (optim.name, optim.weight_decay) == ("adam", 0.1)
    assert optim.lr == pytest.approx(expected, rel=0.1)
    assert stage.config.data.preprocess == "resize_pillow(32, 'bicubic')|central_crop(32)"
    assert "WiSE-FT" in Path("recipe.yaml").read_text()


def test_weights_of_another_library_are_imported_next_to_the_recipe(transformers, tmp_path, capsys):
    theirs = transformers_model(transformers, "clip")
    theirs.save_pretrained(tmp_path / "clip-tiny")
    folder = class_folders(tmp_path / "input", three_digits())
    # Images without labels are refused before anything is imported.
    assert main(["new", str(folder), "--output", "recipe.yaml", "--init", "clip-tiny", "--unlabelled"]) == 64
    assert not Path("weights").exists()
    new(folder, "--init", "clip-tiny")
    printed = capsys.readouterr().out
    assert "importing clip-tiny, which is in the format of another library, into weights/clip-tiny\n" in printed
    assert re.search(r"\n  init: \S*weights/clip-tiny\b", Path("recipe.yaml").read_text())
    model = models.load("weights/clip-tiny")
    ours = model.state_dict()["blocks.0.mlp.up.weight"]
    (expected,) = (tensor for name, tensor in theirs.state_dict().items() if name.endswith("layers.0.mlp.fc1.weight"))
    assert torch.equal(ours, expected)
    # A second recipe uses the imported weights.
    assert main(["new", str(folder), "--output", "other.yaml", "--init", "clip-tiny"]) == 64
    message = capsys.readouterr().err
    assert "already exists\n  use --init weights/clip-tiny, or remove that folder first" in message
    assert main(["new", str(folder), "--output", "other.yaml", "--init", "weights/clip-tiny"]) == 0


def test_a_folder_of_timm_and_an_official_file_are_imported_too(timm, tmp_path):
    folder = class_folders(tmp_path / "input", three_digits())
    save_timm(timm, "vit_base_patch14_dinov2", tmp_path / "timm")
    models.save(random_model("mu/8", 32, 5), tmp_path / "official.npz", format="npz")
    for name in ("timm", "official.npz"):
        words = ["--init", str(tmp_path / name)]
        if name == "official.npz":
            words.append("--probe")
        assert main(["new", str(folder), "--output", f"{name[:4]}.yaml", *words]) == 0
    assert models.load_weights(Path("weights/timm"))[1].layer_scale
    assert models.load_weights(Path("weights/official"))[1].classes == 5


def test_an_existing_recipe_is_not_overwritten(tmp_path, capsys):
    folder = class_folders(tmp_path / "input", three_digits())
    Path("input.yaml").write_text("mine")
    assert main(["new", str(folder)]) == 64
    assert Path("input.yaml").read_text() == "mine"
    assert "input.yaml already exists" in capsys.readouterr().err


@pytest.mark.quick
def test_no_table_of_leaf_classes_is_left_without_a_recipe(tmp_path, capsys):
    for name in ("a/cat", "a/dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.jpg").write_text("not an image")
    (tmp_path / "p-test.csv").write_text("mine")
    words = ["new", str(tmp_path / "photos"), "--leaf-classes", "--output", str(tmp_path / "p.yaml")]
    assert main(words) == 65
    assert "cannot read any of the 2 sampled images" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p-test.csv", "photos"]


def test_a_given_model_gets_images_of_at_least_64_patches(tmp_path, capsys):
    folder = class_folders(tmp_path / "input", three_digits())
    new(folder, "--model", "mu/8", "--minutes", "0.0001")
    assert (
        "this takes longer than --minutes, because useful training takes at least 10 steps" in capsys.readouterr().out
    )
    Path("recipe.yaml").unlink()
    stage = new(folder, "--model", "mu/8").stages[-1]
    assert stage.model == models.config_of("mu/8", 64, 3)
    # Every line with a choice gives its reason.
    text = Path("recipe.yaml").read_text()
    assert 20 <= len(text.splitlines()) <= 36
    assert re.search(r"\n    # no RandAugment, which needs more passes .*\n    augment: ", text)
    for key in ("model", "lr", "schedule", "steps", "micro_batch"):
        assert re.search(rf"^ *{key}: .*  # ", text, re.MULTILINE), key


# ---------------------------------------------------------------------------------------------- odd folders


def test_odd_folders_are_read_or_refused_with_advice(tmp_path, capsys):
    samples = three_digits()
    grey = samples[0].image
    cut = samples[1].image[:200]

    def make_folder(name: str, files: dict[str, bytes]) -> Path:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    several = {f"{name}/{number}.jpg": grey for name in "ab" for number in range(8)}
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz"):
        pass
    cases: list[tuple[str, dict[str, bytes], int, str]] = [
        ("empty", {}, 65, "no images in this path or its sub-folders"),
        (
            "no-images",
            {"a/readme.txt": b"x", "b/x.heic": b"x"},
            65,
            "no images in this path or its sub-folders\n  1 × .txt, 1 × .heic: excluded, because they are not jpg",
        ),
        ("heic", {"a/1.heic": b"x", "b/2.heic": b"x"}, 65, "2 × .heic: excluded, because they are not jpg"),
        (
            "all-cut",
            {f"{name}/{n}.jpg": cut for name in "ab" for n in range(5)},
            65,
            "cannot read any of the 10 sampled images",
        ),
        ("one class", {"cat/1.jpg": grey, "cat/2.jpg": grey}, 65, "to train without labels, add --unlabelled"),
        ("an empty class", {**several, "c/readme.txt": b"x"}, 65, "no images in the class folders 'c'"),
        (
            "names",
            {f"{name}/{number} ü.jpg": grey for name in ("Grüne Äpfel", "日本 犬") for number in range(8)},
            0,
            "日本 犬 8",
        ),
        ("one-each", {f"{name}/1.jpg": grey for name in "abcdefghijkl"}, 0, "most classes have too few images"),
        (
            "corrupt",
            {**several, "a/9.jpg": cut},
            0,
            "1 of 17 opened images cannot be read: 1 × truncated; the first is ",
        ),
        ("wrapped/deep/photos", {f"train/{name}": content for name, content in several.items()}, 0, "16 images of 2"),
        ("gifs", {**several, "a/x.gif": b"GIF"}, 0, "1 × .gif: excluded, because they are not jpg, jpeg, png, webp"),
        (
            "hidden",
            {**several, "a/.ipynb_checkpoints/1-checkpoint.jpg": grey, "b/._1.jpg": grey},
            0,
            "(a 8, b 8), median size 16 × 16 px\n  2 hidden files are excluded",
        ),
        ("beside", {**several, "x.jpg": grey}, 0, "1 images outside the class folders are excluded"),
        (
            "competition",
            {**{f"train/{name}": grey for name in several}, "test/1.jpg": grey},
            0,
            "is not used for evaluation",
        ),
        (
            "a new class",
            {**{f"train/{name}": grey for name in several}, "val/a/1.jpg": grey, "val/z/1.jpg": grey},
            65,
            "'z'",
        ),
        ("known", {"cifar-10-binary.tar.gz": b"x"}, 0, "50,000 images of 10 classes"),
        (
            "trains",
            {f"{name}/{n}.jpg": grey for name in ("car", "train") for n in range(8)},
            0,
            "16 images of 2 classes",
        ),
        (
            "notes",
            {**{f"train/{name}": grey for name in several}, "val/a/1.jpg": grey, "x.csv": b"a,b"},
            0,
            "val: 1 images",
        ),
        ("compressed", {"x.tar.gz": tar.getvalue()}, 65, "gzip -d"),
        ("half", {"train-0.tar": b"", "val-0.tar": b"", "more.tar": b""}, 65, "'more.tar' have neither train nor test"),
    ]
    for name, files, code, message in cases:
        make_folder(name, files)
        output = tmp_path / f"{name.replace('/', '-')}.yaml"
        place = str(tmp_path / name.partition("/")[0])
        assert main(["new", place, "--output", str(output), "--minutes", "0.01"]) == code, name
        printed = capsys.readouterr()
        assert message in printed.out + printed.err, name
        assert output.exists() == (code == 0), name
        if code == 0:
            load(output, [])
    assert main(["new", str(tmp_path / "nowhere")]) == 65
    assert f"no file or folder at {tmp_path}/nowhere" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "one class"), "--unlabelled", "--output", "u.yaml"]) == 0
    assert "objective: masked" in Path("u.yaml").read_text()


def test_new_explains_training_without_labels_and_how_to_add_classes(tmp_path, capsys):
    photos = class_folders(tmp_path / "photos", three_digits())
    cases = [
        (
            photos / "eins",
            f"and the folders 'null', 'zwei' next to it are other classes, run python -m jobs new {photos}",
        ),
        (
            flat_folder(tmp_path / "alone" / "flat", three_digits()),
            "to train on classes, sort the images into one subfolder",
        ),
        (
            table_without_labels(tmp_path / "table", three_digits()),
            "to train on classes, add a column label to the table",
        ),
        (tars(tmp_path / "tars", three_digits(), lambda _: {}), "to train on classes, add a .cls or .json"),
    ]
    for place, how in cases:
        new(place)
        out = capsys.readouterr().out
        assert "no labels: masked patch prediction learns features" in out, place
        assert how in out, place
        Path("recipe.yaml").unlink()
    new(cases[0][0], "--unlabelled")
    assert "no labels" not in capsys.readouterr().out, "the user asked for it"


def test_the_current_folder_similar_classes_and_repeated_rows_are_named(tmp_path, monkeypatch, capsys):
    folder = class_folders(tmp_path / "input", three_digits())
    (folder / "eins").rename(folder / "NULL")
    new(folder)
    assert "1 class names differ from another class name only in case" in capsys.readouterr().out
    Path("recipe.yaml").unlink()
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        assert main(["new", "."]) == 64
    assert f"run cd {tmp_path}, then python -m jobs new input" in capsys.readouterr().err
    rows = table(tmp_path / "rows", three_digits())
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[-1] + "\n")
    assert main(["new", str(rows), "--output", "rows.yaml"]) == 65
    assert "are the same file" in capsys.readouterr().err


def test_the_recipe_shows_commands_as_the_user_typed_them(tmp_path, monkeypatch):
    folder = class_folders(tmp_path / "input", three_digits())
    for program, typed in (("/venv/bin/patchline", "patchline"), ("/checkout/jobs/__main__.py", "python -m jobs")):
        monkeypatch.setattr("sys.argv", [program])
        new(folder)
        comments = Path("recipe.yaml").read_text().splitlines()[:2]
        assert f"written by `{typed} new` for" in comments[0]
        assert comments[1].startswith(f"#   {typed} run recipe.yaml")
        Path("recipe.yaml").unlink()


def test_the_median_size_is_printed_and_grey_images_are_read(tmp_path, capsys):
    import cv2
    import numpy as np

    for number, (height, width) in enumerate([(300, 400), (200, 100), (500, 700)] * 4):
        path = tmp_path / "mixed" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((height, width), number, np.uint8))
    stage = new(tmp_path / "mixed").stages[-1]
    assert "12 images of 2 classes (a 6, b 6), median size 400 × 300 px" in capsys.readouterr().out
    assert stage.model.image_size == (64, 64)


def test_classes_with_one_image_are_named_if_a_part_is_held_out(tmp_path, capsys):
    import cv2
    import numpy as np

    for name, images in {"a": 10, "b": 10, "c": 10, "rare": 1}.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(images):
            cv2.imwrite(str(tmp_path / "set" / name / f"{number}.png"), np.full((64, 64), number, np.uint8))
    new(tmp_path / "set")
    printed = capsys.readouterr().out
    assert "held out: 20% of each class" in printed
    assert "1 class with one image: 'rare'; classes whose image is held out cannot be learned" in printed


def test_each_recipe_has_a_separate_run(tmp_path, capsys):
    samples = three_digits()
    (tmp_path / "input").mkdir()
    rows = table(tmp_path / "input" / "rows", samples)
    folder = class_folders(tmp_path / "input" / "mine", samples)
    mine = rows.rename(rows.parent / "mine.csv")
    assert main(["new", str(folder), "--minutes", "0.01"]) == 0
    # The default name of the second recipe is that of the first, which is not overwritten.
    assert main(["new", str(mine), "--minutes", "0.01"]) == 64
    assert "mine.yaml already exists" in capsys.readouterr().err
    assert main(["new", str(mine), "--output", "other.yaml", "--minutes", "0.01"]) == 0
    Path("runs/third").mkdir(parents=True)
    assert main(["new", str(mine), "--output", "third.yaml", "--minutes", "0.01"]) == 0
    runs = [str(load(Path(f"{name}.yaml"), []).run) for name in ("mine", "other", "third")]
    assert [Path(run).name for run in runs] == ["mine", "other", "third-2"]
    assert "writes runs/third-2" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "length"), [(2, "2 steps of 30 images, 1 pass, "), (4, "2 passes, ")])
def test_the_length_is_printed_in_passes(tmp_path, capsys, steps, length):
    images = survey(str(class_folders(tmp_path / "input", three_digits())), report=lambda count: None).train
    sets = Sets(images, test=images)  # nothing is held out of the 60 images
    machine = Machine("1 core", 1, 0, 1, 10**11, "fp32")
    choice = replace(choose(sets, machine, 1.0, name="mu/8", init=None), steps=steps, batch_size=30)
    write_recipe(Path("length.yaml"), "length", sets, choice, machine)
    assert length in capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "opened", "bad", "limit"),
    [(500, 500, 0, ""), (500, 500, 5, "0.02"), (50_000, 1000, 0, "0.003"), (50_000, 1000, 10, "0.023")],
)
def test_limit_on_bad_samples_allows_for_the_images_that_were_not_opened(images, opened, bad, limit):
    image_set = FoundSet("folder", "photos", images, opened=opened, bad=Counter(truncated=bad))
    assert bad_fraction(image_set) == limit
    # With more bad images than the limit, so few would be found in at most 5 % of all samples (Poisson).
    if opened < images:
        mean = float(limit) * opened
        chance = sum(math.exp(-mean) * mean**found / math.factorial(found) for found in range(bad + 1))
        assert chance < 0.05


def test_limit_on_bad_samples_allows_for_unlabelled_samples():
    counts = Counter(cat=475, dog=475)
    image_set = FoundSet("shards", "photos", 1000, counts, labelled=950, opened=1000)
    # A plain loop: a sample without a label is replaced by the next one, and each such sample counts as bad.
    random = np.random.default_rng(0)
    bad = 0
    for _ in range(20_000):
        while random.random() < 0.05:
            bad += 1
    assert bad / 20_000 < float(bad_fraction(image_set)) < 4 * bad / 20_000
    assert bad_fraction(replace(image_set, source="tars")) == "", "they are not packed"
