"""A sweep must not choose values on training or final evaluation samples; plans check data before training."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.extras.shards.packing import pack
from data.extras.shards.subset import Rule
from data.extras.shared_samples import shared_samples
from data.extras.sources.samples import digits
from data.index.document import load_index
from jobs.__main__ import main
from tests.support.archives import make_subset
from tests.support.recipes import without_check

RECIPE = without_check("""
run: {run}
cluster: {{workers: 1, backend: processes}}
finetune:
  model: {{name: mu/8, image_size: 16, classes: 10}}
  data: {{train: {sets}/train, evaluate: {sets}/test}}
  optim: {{schedule: {{warmup_steps: 1}}}}
  steps: 2
  batch_size: 8
  micro_batch: 8
  precision: fp32
  sweep:
    grid: {{optim: {{lr: [0.01, 0.1]}}}}
    held_out: {{data: {{train: {sets}/{train}, evaluate: {sets}/{evaluated}}}}}
    seeds: [0, 1]
""")
PARTS = {"most": ("train", "17:"), "rest": ("train", ":17"), "overlap": ("train", "16:40"), "of-test": ("test", ":60")}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of digits: training and test images, random parts of both of unequal size, and the test set packed again."""
    folder = tmp_path_factory.mktemp("sets")
    for name, train, shard_samples in (("train", True, 100), ("test", False, 100), ("again", False, 64)):
        pack(digits(train=train, image_size=16), folder / name, name=name, shard_samples=shard_samples)
    for name, (parent, part) in PARTS.items():
        make_subset(load_index(folder / parent), folder / name, Rule(part=part, seed=5), name=name)
    return folder


def bytes_of(index) -> list[tuple[bytes, bytes]]:
    """Read the bytes of every sample with plain file access, at the offsets in the index."""
    samples = []
    for number, shard in enumerate(index.shards):
        raw = Path(index.location(shard)).read_bytes()
        for row in index.table(number):
            image, label = int(row["image"]), int(row["label"])
            samples.append((raw[image : image + row["image_size"]], raw[label : label + row["label_size"]]))
    return samples


@pytest.mark.parametrize("other", ["train", "test", "again", "most", "rest", "overlap", "of-test"])
@pytest.mark.parametrize("name", ["test", "rest", "overlap", "of-test"])
def test_shared_samples_are_counted_like_by_a_loop_over_all_pairs(sets: Path, name: str, other: str) -> None:
    one, two = load_index(sets / name), load_index(sets / other)
    same_places, same_bytes = shared_samples(one, two)
    second_bytes = set(bytes_of(two))
    assert same_bytes == sum(sample in second_bytes for sample in bytes_of(one))
    parents = {"again": "again", "train": "train", "test": "test"} | {part: PARTS[part][0] for part in PARTS}
    places = []
    for part, index in ((name, one), (other, two)):
        locations = set()
        for number, shard in enumerate(index.shards):
            locations |= {(parents[part], shard.name, int(place)) for place in index.table(number)["image"]}
        places.append(locations)
    assert same_places == len(places[0] & places[1])


@pytest.mark.parametrize(
    ("train", "evaluated", "overlapping"),
    [
        ("most", "rest", ""),
        ("most", "test", "finetune.seed-0.data.evaluate"),
        ("most", "of-test", "finetune.seed-0.data.evaluate"),
        ("most", "again", "finetune.seed-0.data.evaluate"),  # the same images, packed again
        ("most", "overlap", "finetune.lr-0.01.data.train"),
        ("train", "rest", "finetune.lr-0.01.data.train"),
    ],
)
def test_a_grid_must_be_evaluated_on_samples_neither_trained_on_nor_in_the_result(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture, train: str, evaluated: str, overlapping: str
) -> None:
    recipe = tmp_path / "held.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", sets=sets, train=train, evaluated=evaluated))
    assert main(["plan", str(recipe)]) == (65 if overlapping else 0)
    error = capsys.readouterr().err
    assert (f"are also in {overlapping}" in error) == bool(overlapping)
    # A single final run is checked in the same way.
    assert main(["plan", str(recipe), "finetune.sweep.seeds=[0]"]) == (65 if overlapping else 0)
    assert main(["plan", str(recipe), "finetune.sweep.chosen_on_test=true"]) == 0


def test_a_table_chosen_on_test_is_labelled(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "held.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", sets=sets, train="most", evaluated="test"))
    assert main(["run", str(recipe)]) == 65
    assert main(["run", str(recipe), "finetune.sweep.chosen_on_test=true", "finetune.sweep.seeds=[0]"]) == 0
    assert "finetune.grid, in %, chosen on test" in capsys.readouterr().out


def test_a_grid_without_held_out_is_labelled_as_chosen_on_test(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "grid.yaml"
    text = RECIPE.format(run=tmp_path / "run", sets=sets, train="", evaluated="")
    recipe.write_text("".join(line for line in text.splitlines(True) if "held_out:" not in line))
    assert main(["run", str(recipe), "finetune.sweep.seeds=[0]"]) == 0
    out = capsys.readouterr().out
    assert "finetune, in %, chosen on test" in out
    assert ", the best of 2, chosen on test" in out
    (record,) = (tmp_path / "run").glob("finetune-*/sweep.json")
    assert json.loads(record.read_text())["chosen_on_test"] is True
    # Without a grid nothing is chosen.
    recipe.write_text(
        "".join(line for line in text.splitlines(True) if "held_out:" not in line and "grid:" not in line)
    )
    capsys.readouterr()
    assert main(["run", str(recipe), "finetune.sweep.seeds=[0]", f"run={tmp_path / 'seeds'}"]) == 0
    assert "chosen on test" not in capsys.readouterr().out


PROBED = without_check("""
run: {run}
cluster: {{workers: 1, backend: processes}}
pretrain:
  data: {{train: {sets}/train}}
  model: {{name: mu/8, image_size: 16, classes: 10}}
  optim: {{schedule: {{warmup_steps: 1}}}}
  steps: 2
  batch_size: 8
  micro_batch: 8
  precision: fp32
  probe: {{train: {sets}/most, test: {sets}/test, shots: [1]}}
fewshot: {{init: "@pretrain", probe: {{train: {sets}/most, test: {sets}/test, shots: [1]}}}}
evaluate:
  init: "@pretrain"
  sets: {{small: {{train: {sets}/most, test: {sets}/test}}}}
  protocols: [knn]
""")


@pytest.mark.parametrize("key", ["pretrain.probe", "fewshot.probe", "evaluate.sets.small"])
def test_a_probe_must_not_be_evaluated_on_its_training_set(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture, key: str
) -> None:
    """Sets are compared by digest: a copy in another folder is the same set."""
    recipe = tmp_path / "probed.yaml"
    recipe.write_text(PROBED.format(run=tmp_path / "run", sets=sets))
    copied = shutil.copytree(sets / "test", tmp_path / "copied")
    assert main(["plan", str(recipe)]) == 0
    capsys.readouterr()
    for command in ("plan", "run"):
        assert main([command, str(recipe), f"{key}.train={copied}"]) == 65
        assert f"{key}: test {sets}/test and train {copied} are the same data set" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("pretrain-*"))


FOLDERS = without_check("""
run: {run}
cluster: {{workers: 64, backend: processes}}
shards: {{kind: pack, sets: {{train: {{source: folder, path: {images}}}}}}}
pretrain:
  data: {{train: "@shards/train", processes: 1}}
  model: {{name: mu/8, image_size: 16, classes: 3}}
  optim: {{schedule: {{warmup_steps: 1}}}}
  steps: 2
  batch_size: 64
  micro_batch: 1
  precision: fp32
""")


def test_plan_counts_class_folders_and_cores_before_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Four folders are four classes before they are packed; more workers than cores are reported."""
    for number in range(4):
        (tmp_path / "images" / f"class{number}").mkdir(parents=True)
        for sample in list(digits(train=False, image_size=16))[number : number + 3]:
            (tmp_path / "images" / f"class{number}" / f"{sample.key.replace('/', '-')}.png").write_bytes(sample.image)
    recipe = tmp_path / "folders.yaml"
    recipe.write_text(FOLDERS.format(run=tmp_path / "run", images=tmp_path / "images"))
    assert main(["plan", str(recipe), "--without-data"]) == 65
    assert "set pretrain.model.classes=4" in capsys.readouterr().err
    assert main(["plan", str(recipe), "--without-data", "pretrain.model.classes=4"]) == 0
    assert "64 workers share the" in capsys.readouterr().out
    gpu = ["cluster.workers=1", "cluster.backend=ray", "cluster.gpus_per_worker=1", "pretrain.precision=bf16"]
    assert main(["plan", str(recipe), "--without-data", "pretrain.model.classes=4", *gpu]) == 0
    out = capsys.readouterr().out
    assert "for such a small model, decoding is the limit" in out
    assert "type pretrain.data.processes" not in out


@pytest.mark.parametrize("most", [2, 3, 7])
def test_the_maximum_number_of_labels_in_an_index_is_checked_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture, most: int
) -> None:
    rng = np.random.default_rng(most)
    images = [sample.image for sample in list(digits(train=False, image_size=16))[:20]]
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "a.tar", "w") as tar:
        for number, image in enumerate(images):
            count = most if number == 11 else int(rng.integers(1, most + 1))
            labels = ",".join(map(str, rng.choice(12, count, replace=False))).encode()
            for suffix, content in (("png", image), ("cls", labels)):
                member = tarfile.TarInfo(f"{number:03}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    assert main(["index", str(tmp_path / "tars"), "--output", str(tmp_path / "set"), "--classes", "12"]) == 0
    recipe = tmp_path / "labels.yaml"
    text = FOLDERS.format(run=tmp_path / "run", images=tmp_path)
    recipe.write_text(text.replace("workers: 64", "workers: 1").replace("classes: 3", "classes: 12"))
    words = [str(recipe), f"pretrain.data.train={tmp_path / 'set'}", "--without-data"]
    capsys.readouterr()
    assert main(["plan", *words]) == 78
    error = capsys.readouterr().err
    advised = int(error.partition("set pretrain.data.max_labels=")[2].split(",")[0])
    assert advised >= most, error
    assert main(["plan", *words, f"pretrain.data.max_labels={advised}"]) == 0
