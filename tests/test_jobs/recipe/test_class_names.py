"""Class names are saved with data sets and weights, and an id must mean the same class in all of them."""

import json
import tarfile
from hashlib import sha256
from pathlib import Path

import cv2
import numpy as np
import pytest

import models
from data.errors import DataError
from data.evaluation import EvaluationSet
from data.index.document import load_index, seal_of
from data.index.index import join
from data.reader import ShardReader
from jobs.__main__ import main
from jobs.recipe import class_names
from jobs.resolved_recipe import Available
from tests.support.campaigns import load
from tests.support.shards import Picture, write_set
from tests.support.tars import write_tar


def picture(value: int) -> bytes:
    return cv2.imencode(".jpg", np.full((16, 16, 3), value, np.uint8))[1].tobytes()


def class_folders(root: Path, names: str, images: int = 3) -> Path:
    """Write class folders; each image has a different colour."""
    for number_, name in enumerate(names.split()):
        (root / name).mkdir(parents=True)
        for image in range(images):
            (root / name / f"{root.name}-{name}-{image}.jpg").write_bytes(picture(40 * number_ + 10 * image))
    return root


def labels_by_class(folder: Path) -> dict[str, set[bytes]]:
    """Return the labels in the tars of a data set by the class folder in the samples' keys."""
    index = load_index(folder)
    reader = ShardReader(index)
    labels: dict[str, set[bytes]] = {}
    for shard, samples in enumerate(index.shard_samples):
        for sample in range(samples):
            key, _, label = reader.read(shard, sample)
            labels.setdefault(key.split("/")[-2], set()).add(label)
    return labels


def recipe_of(tmp_path: Path, sets: str, more: str = "") -> str:
    path = tmp_path / "pack.yaml"
    path.write_text(f"run: {tmp_path}/run\nshards: {{kind: pack, sets: {{{sets}}}}}\n{more}")
    return str(path)


# ------------------------------------------------------------------------------------------- packing


def test_two_splits_of_a_recipe_have_the_same_class_ids(tmp_path, capsys):
    """A real bug: *cat* was 2 in train and 1 in test, and the accuracy was wrong without an error."""
    class_folders(tmp_path / "train", "airplane bird cat")
    class_folders(tmp_path / "test", "bird cat")
    sets = f"test: {{path: {tmp_path}/test}}, train: {{path: {tmp_path}/train}}"
    assert main(["run", recipe_of(tmp_path, sets)]) == 0
    assert "test: using the class numbering of train" in capsys.readouterr().out
    (packed,) = (tmp_path / "run").glob("shards-*")
    assert labels_by_class(packed / "train") == {"airplane": {b"0"}, "bird": {b"1"}, "cat": {b"2"}}
    assert labels_by_class(packed / "test") == {"bird": {b"1"}, "cat": {b"2"}}
    assert load_index(packed / "test").names == ("airplane", "bird", "cat")


def test_classes_of_numbers_classes_as_another_data_set_and_reports_missing_ones(tmp_path, capsys):
    class_folders(tmp_path / "train", "airplane bird cat")
    class_folders(tmp_path / "test", "bird kitty")
    assert main(["pack", "folder", f"{tmp_path}/train", f"{tmp_path}/a"]) == 0
    command = ["pack", "folder", f"{tmp_path}/test", f"{tmp_path}/b", "--classes-of", f"{tmp_path}/a"]
    capsys.readouterr()
    assert main(command) == 65
    said = capsys.readouterr().err
    assert "1 of its 2 classes are not in" in said
    assert ": 'kitty'" in said
    assert "'airplane', 'bird', 'cat'" in said
    assert "rename" in said
    assert main([*command, "--rename", "kitty=cat"]) == 0
    assert labels_by_class(tmp_path / "b") == {"bird": {b"1"}, "kitty": {b"2"}}
    assert "class names: 'airplane', 'bird', 'cat'" in capsys.readouterr().out
    assert main([*command, "--rename", "puppy=cat"]) == 65
    assert "rename contains 'puppy', but this source has no such class" in capsys.readouterr().err
    assert main([*command, "--rename", "kitty"]) == 64


def test_classes_are_kept_by_name_and_keep_their_ids(tmp_path, capsys):
    class_folders(tmp_path / "train", "airplane bird cat dog")
    sets = f"train: {{path: {tmp_path}/train, keep: [cat, 1]}}"
    assert main(["run", recipe_of(tmp_path, sets)]) == 0
    (packed,) = (tmp_path / "run").glob("shards-*")
    assert labels_by_class(packed / "train") == {"bird": {b"1"}, "cat": {b"2"}}
    assert main(["run", recipe_of(tmp_path, sets.replace("cat", "cow"))]) == 65
    assert "keep contains 'cow', but this source has no such class" in capsys.readouterr().err
    assert main(["run", recipe_of(tmp_path, sets.replace("cat", "-1"))]) == 78


def test_classes_can_be_numbered_as_in_another_pack_stage(tmp_path):
    class_folders(tmp_path / "train", "airplane bird cat")
    class_folders(tmp_path / "test", "bird cat")
    more = f'later: {{kind: pack, sets: {{test: {{path: {tmp_path}/test, classes_of: "@shards/train"}}}}}}'
    assert main(["run", recipe_of(tmp_path, f"train: {{path: {tmp_path}/train}}", more)]) == 0
    (packed,) = (tmp_path / "run").glob("later-*")
    assert labels_by_class(packed / "test") == {"bird": {b"1"}, "cat": {b"2"}}


# -------------------------------------------------------------------------------- class lists


def test_ids_and_names_in_one_column_are_refused(tmp_path, capsys):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "table.csv").write_text("path,label\na.jpg,3\na.jpg,cat\n")
    assert main(["pack", "table", f"{tmp_path}/table.csv", f"{tmp_path}/set"]) == 65
    assert "some labels are class ids (3), others are names ('cat')" in capsys.readouterr().err


# ----------------------------------------------------------------------------- text labels


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write a tar with text labels, in a .cls and in a .json, and a file with the class names."""
    labels = [
        ("0.cls", b"tench"),
        ("1.json", b'{"label": "great white shark"}'),
        ("2.cls", b"1"),
        ("3.cls", b"tench\n"),
    ]
    members = []
    for name, label in labels:
        members += [(f"{name[0]}.jpg", picture(int(name[0]))), (name, label)]
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "t.tar", members)
    (tmp_path / "classes.txt").write_text("goldfish\ngreat white shark\ntench\n")
    return tmp_path / "tars"


def test_class_names_are_collected_from_text_labels_but_not_from_captions(tmp_path, capsys):
    """Also if a name is in only one shard, in several labels of a sample, or was read before a kill."""
    labels = [b"tench", b'["shark", "tench"]', b"great white", b"tench"]
    for shard, label in enumerate(labels):
        extension = "json" if label.startswith(b"[") else "cls"
        write_tar(tmp_path / f"{shard}.tar", [("a.jpg", picture(shard)), (f"a.{extension}", label)])
    assert main(["index", str(tmp_path), "--name", "t"]) == 0
    index = load_index(tmp_path)
    assert index.names == ("great white", "shark", "tench")
    assert index.class_counts == (1, 1, 3)
    assert not index.refused.counts
    batches = list(EvaluationSet(index, "resize(16)", batch_size=4, max_labels=2))
    assert batches[0].labels.tolist() == [[2, -1], [1, 2], [0, -1], [2, -1]]
    assert main(["index", str(tmp_path), "--name", "t", "--classes", "2"]) == 65
    (tmp_path / "t.index.json").unlink()
    assert main(["index", str(tmp_path), "--name", "t", "--classes", "2"]) == 65
    assert "labels are 3 names, 'great white', 'shark', 'tench', but classes is 2" in capsys.readouterr().err
    # Texts that rarely repeat are not classes.
    members = []
    for dog in range(1100):
        members += [(f"{dog}.jpg", picture(dog % 256)), (f"{dog}.cls", f"a photo of dog {dog}".encode())]
    (tmp_path / "captions").mkdir()
    write_tar(tmp_path / "captions" / "c.tar", members)
    assert main(["index", str(tmp_path / "captions")]) == 65
    assert "refused: 1,100 × label is a text that no class list has, first 0 of c.tar" in capsys.readouterr().err


def test_unlabelled_images_are_indexed_packed_and_checked_on_request(tmp_path, capsys):
    members = [(f"{number}.jpg", picture(number)) for number in range(6)]
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "t.tar", members)
    assert main(["index", str(tmp_path / "tars")]) == 65
    assert "to index images without labels for objective: masked, add --unlabelled" in capsys.readouterr().err
    assert main(["pack", "tars", str(tmp_path / "tars"), str(tmp_path / "packed")]) == 65
    for command, folder in (
        (["index", str(tmp_path / "tars"), "--unlabelled"], tmp_path / "tars"),
        (["pack", "tars", str(tmp_path / "tars"), str(tmp_path / "packed"), "--unlabelled"], tmp_path / "packed"),
    ):
        assert main(command) == 0
        assert "6 samples in 1 shard, without labels" in capsys.readouterr().out
        index = load_index(folder)
        assert index.samples == 6
        assert index.class_counts == ()
        assert index.names == ()
        assert main(["data", "check", str(folder)]) == 0
        assert main(["data", "repair", str(folder), f"{folder}-mended"]) == 0
        assert load_index(f"{folder}-mended").samples == 6
        # The same command again finds the data set finished.
        assert main(command) == 0
        assert load_index(folder).digest == index.digest
    with tarfile.open(next((tmp_path / "packed").glob("*.tar"))) as tar:
        assert sorted(tar.getnames()) == [f"t/{number}.jpg" for number in range(6)]
    assert main(["index", str(tmp_path / "tars"), "--unlabelled", "--classes", "2"]) == 64


def test_unknown_names_and_ambiguous_class_lists_are_refused(texts, tmp_path, capsys):
    assert main(["index", str(texts)]) == 0, "one of the labels is an id"
    assert "refused: 3 × label is a text that no class list has, first 0 of t.tar" in capsys.readouterr().out
    (tmp_path / "few.txt").write_text("goldfish\ntench\n")
    assert main(["index", str(texts), "--names", f"{tmp_path}/few.txt"]) == 65
    assert "sample 1 has label 'great white shark', which is not one of the 2 class names" in capsys.readouterr().err
    (tmp_path / "numbers.txt").write_text("7\n1\n")
    assert main(["index", str(texts), "--names", f"{tmp_path}/numbers.txt"]) == 65
    assert "class 0 has the name 7, but a label 7 would mean class 7" in capsys.readouterr().err
    assert main(["pack", "tars", str(texts), f"{tmp_path}/p", "--names", f"{tmp_path}/classes.txt"]) == 0
    assert main(["pack", "tars", str(texts), f"{tmp_path}/q", "--names", f"{tmp_path}/nowhere.txt"]) == 65


# -------------------------------------------------------------------------------------------- the index


def test_the_digest_of_an_index_covers_class_names(tmp_path):
    samples = [Picture(f"s{n}", picture(n), (n,)) for n in range(2)]
    named = write_set(samples, tmp_path / "named", name="set", names=("cat", "dog", "cow"))
    nameless = write_set(samples, tmp_path / "nameless", name="set")
    (shard,) = nameless.shards
    described = [1, [[shard.name, shard.samples, shard.bytes, shard.sha256]], [1, 1]]
    assert nameless.digest == sha256(json.dumps(described).encode()).hexdigest()
    assert named.digest == sha256(json.dumps([*described, ["cat", "dog", "cow"]]).encode()).hexdigest()
    path = tmp_path / "named" / "set.index.json"
    content = json.loads(path.read_text())
    content["names"][0] = "cow"
    content["seal"] = seal_of(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="its digest does not match its contents"):
        load_index(path)


def test_class_names_are_kept_only_from_an_index_of_the_same_tars(tmp_path, capsys):
    samples = [Picture(f"s{n}", picture(n), (n,)) for n in range(2)]
    named = write_set(samples, tmp_path / "set", name="set", names=("cat", "dog"))
    command = ["index", f"{tmp_path}/set"]
    assert main(command) == 0
    assert load_index(tmp_path / "set").digest == named.digest
    with open(tmp_path / "set" / "set-000000.tar", "ab") as tar:
        tar.write(bytes(512))
    capsys.readouterr()
    assert main(command) == 0
    assert load_index(tmp_path / "set").names == ()
    assert "no class names, so labels" in capsys.readouterr().out


def test_data_sets_with_different_class_names_are_not_joined(tmp_path):
    samples = [Picture(f"s{n}", picture(n), (n,)) for n in range(2)]
    sets = [
        write_set(samples, tmp_path / f"{n}", name="set", names=names)
        for n, names in enumerate([("cat", "dog"), (), ("cat", "dog", "cow"), ("dog", "cat")])
    ]
    assert join(sets[:3], [1, 1, 1]).names == ("cat", "dog", "cow")
    with pytest.raises(DataError, match=r"class 0 is 'cat' and 'dog'; class 1 is 'dog' and 'cat'"):
        join(sets, [1, 1, 1, 1])


# ------------------------------------------------------------------------------- campaigns and weights

STAGES = """
cluster: {{workers: 1, backend: processes}}
pretrain:
  data: {{train: {a}/a, evaluate: {b}, augment: {{crop: none}}}}
  model: {{name: mu/8, image_size: 16, classes: 4}}
  loss: softmax
  steps: 2
  batch_size: 4
  micro_batch: 4
  precision: fp32
  optim: {{schedule: {{warmup_steps: 1}}}}
resize: {{init: "@pretrain", image_size: 24}}
more:
  kind: finetune
  init: "@resize"
  new_head: {new_head}
  data: {{train: {c}}}
  model: {{classes: 4}}
  steps: 2
  batch_size: 4
  micro_batch: 4
  precision: fp32
  optim: {{schedule: {{warmup_steps: 1}}}}
fewshot: {{init: "@resize", probe: {{train: {a}/a, test: {c}, shots: [1]}}}}
"""


@pytest.fixture
def three_sets(tmp_path: Path) -> Path:
    """Pack data sets: `a` and `b` with the same class names, `c` with others, `d` without; `e` has other samples."""
    samples = [Picture(f"s{n}", picture(60 * n), (n % 3,)) for n in range(4)]
    named = {"a": ("airplane", "bird", "cat"), "b": ("airplane", "bird"), "c": ("bird", "cat", "cow"), "d": ()}
    for name, names in named.items():
        counted = samples if name != "b" else samples[:2]
        write_set(counted, tmp_path / name, name=name, names=names)
    others = [Picture(f"e{n}", picture(50 * n + 10), (n % 3,)) for n in range(4)]
    write_set(others, tmp_path / "e", name="e", names=named["a"])
    return tmp_path


def campaign(folder: Path, b: str = "b", c: str = "e", new_head: str = "false") -> str:
    text = STAGES.format(a=folder, b=folder / b, c=folder / c, new_head=new_head)
    path = folder / "stages.yaml"
    path.write_text(f"run: {folder}/run\n{text}")
    return str(path)


def test_plan_refuses_conflicting_class_names_and_reports_missing_ones(three_sets, capsys):
    assert main(["plan", campaign(three_sets)]) == 0
    assert "names   'airplane', 'bird', 'cat'" in capsys.readouterr().out
    assert main(["plan", campaign(three_sets, b="c")]) == 65
    said = capsys.readouterr().err
    assert "pretrain: data.train" in said
    assert "class 0 is 'airplane' and 'bird'; class 1 is 'bird' and 'cat'" in said
    assert "--classes-of" in said
    assert main(["plan", campaign(three_sets, c="c")]) == 65
    assert "more: the weights @resize and data.train" in capsys.readouterr().err, "the head is kept"
    assert main(["plan", campaign(three_sets, c="c", new_head="true")]) == 65
    assert "fewshot: probe.train" in capsys.readouterr().err, "a head of its own has names of its own; a probe has two"
    assert main(["plan", campaign(three_sets, b="d")]) == 0
    assert f"no class names in data.evaluate ({three_sets}/d), so labels cannot be compared" in capsys.readouterr().out


@pytest.mark.parametrize(("train", "new_head", "expected"), [("c", "true", "bird cat cow"), ("d", "true", ""),
                                                           ("d", "false", "airplane bird cat")])  # fmt: skip
def test_a_new_head_gets_class_names_from_its_data_and_a_kept_head_keeps_them(three_sets, train, new_head, expected):
    recipe = Path(campaign(three_sets, c=train, new_head=new_head))
    recipe.write_text(recipe.read_text().partition("fewshot:")[0])
    loaded = load(recipe, [])
    assert class_names.of_stage(loaded.stage("more"), Available(loaded)) == tuple(expected.split())
    assert class_names.of_stage(loaded.stage("resize"), Available(loaded)) == ("airplane", "bird", "cat")


def test_class_names_are_saved_with_weights_in_stages_exports_and_imports(three_sets, tmp_path, capsys):
    recipe = campaign(three_sets)
    Path(recipe).write_text(Path(recipe).read_text().partition("more:")[0])
    assert main(["run", recipe]) == 0
    (resized,) = (tmp_path / "run").glob("resize-*")
    expected = ["airplane", "bird", "cat"]
    assert json.loads((resized / "classes.json").read_text()) == expected
    assert "classes.json" in json.loads((resized / "done.json").read_text())["files"]
    for format in ("hf", "safetensors"):
        assert main(["export", str(resized), f"{tmp_path}/{format}", "--format", format]) == 0
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["id2label"] == {"0": "airplane", "1": "bird", "2": "cat", "3": "LABEL_3"}
    assert described["label2id"]["cat"] == 2
    assert main(["import", f"{tmp_path}/hf", f"{tmp_path}/again"]) == 0
    assert json.loads((tmp_path / "again" / "classes.json").read_text()) == expected
    assert "classes  'airplane', 'bird', 'cat'; the remaining 1 classes have no names" in capsys.readouterr().out
    (tmp_path / "list.txt").write_text("one\ntwo\nthree\nfour\n")
    assert main(["import", f"{tmp_path}/hf", f"{tmp_path}/named", "--names", f"{tmp_path}/list.txt"]) == 0
    assert models.load_class_names(tmp_path / "named") == ("one", "two", "three", "four")
    assert models.load_class_names(tmp_path / "safetensors") == tuple(expected)
    models.save(models.load(resized), tmp_path / "timm", "timm", class_names=[*expected, "cow"])
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["label_names"] == [*expected, "cow"]
    assert models.load_class_names(tmp_path / "timm") == (*expected, "cow")
    (pretrained,) = (tmp_path / "run").glob("pretrain-*")
    checkpoint = max((pretrained / "checkpoints").glob("step-*"))
    assert main(["export", str(checkpoint), f"{tmp_path}/half"]) == 0
    assert json.loads((tmp_path / "half" / "classes.json").read_text()) == expected
    # So is the preprocessing of the stage that evaluated them, but not at another image size.
    size = models.load_weights(pretrained)[1].image_size
    assert models.load_preprocessing(pretrained) == models.Preprocessing(f"resize({size})", size, size)
    assert (tmp_path / "half" / "preprocessing.json").read_bytes() == (pretrained / "preprocessing.json").read_bytes()
    assert "preprocessing.json" in json.loads((pretrained / "done.json").read_text())["files"]
    assert models.load_preprocessing(resized) is None
    names = resized / "classes.json"
    names.write_text(names.read_text().replace("cat", "cow"))
    assert main(["plan", recipe]) == 65
    assert "classes.json has changed: its sha256 is" in capsys.readouterr().err
