"""The evaluate stage and command: own and foreign weights, and equal results for any number of workers."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import models
from data.evaluation import EvaluationSet
from data.images import preprocess
from data.index.document import load_index
from data.seal import seal
from jobs.__main__ import COMMANDS, main
from jobs.cluster.worker import Task
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.recipe import campaign
from jobs.resolved_recipe import Campaign
from jobs.stages import evaluate as stage
from models.catalog import normalise
from pipeline import artifacts
from pipeline.architecture import preprocessing_of
from pipeline.evaluation import any_weights
from pipeline.evaluation.protocols import FEATURES, PROTOCOLS, Protocol
from pipeline.recipe import Recipe
from tests.support import campaigns, ranks
from tests.support.golden import GOLDEN
from tests.support.shards import DIGIT_NAMES, digits, write_set

LOCAL = ("cluster.backend=processes", "micro_batch=32")


def record_weights(folder: Path) -> None:
    """Record the digests of imported weights."""
    files = artifacts.digests(folder, artifacts.WEIGHT_FILES)
    artifacts.write_record(folder / artifacts.PROVENANCE, {"files": files})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a read-only folder with two data sets of named digits, and random weights with the same class names."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name in ("train", "test"):
        write_set(
            digits(name == "train", image_size=16), folder / name, name=name, shard_samples=100, names=DIGIT_NAMES
        )
    model = models.from_config(models.config_of("mu/8", 16, 10), torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    models.save(model, folder / "weights", class_names=DIGIT_NAMES)
    record_weights(folder / "weights")
    return folder


def judged(world: Path, output: Path, *words: str, weights: str = "weights") -> dict[str, Any]:
    """Run the command and return evaluation.json."""
    arguments = ["evaluate", str(world / weights), str(world / "test"), *LOCAL, "--output", str(output), *words]
    assert main(arguments) == 0
    return json.loads((output / "evaluation.json").read_text())


def all_protocols(world: Path) -> list[str]:
    words = [f"train={world / 'train'}", "fewshot.shots=[1,5]", "logistic.l2=[1e-2,1.0]", "logistic.iterations=20"]
    for name in PROTOCOLS:
        words += ["--protocol", name]
    return words


def outputs(world: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the features, logits and labels of a data set, computed in one batch."""
    model = models.load(world / "weights")
    index = load_index(world / name)
    (batch,) = EvaluationSet(index, "resize(16)", batch_size=index.samples)
    with torch.no_grad():
        features = model.features(normalise(batch.images, model.config, torch.float32, torch.device("cpu")))
        return features.numpy(), model.head(features).numpy(), batch.labels[:, 0].numpy()


def values(document: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for result in document["results"]:
        found |= {name: entry["value"] for name, entry in result["values"].items()}
    return found


def test_two_workers_evaluate_every_sample_once(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare two gloo workers with one batch of all images; `status` shows the results."""
    document = judged(world, tmp_path, "cluster.workers=2", *all_protocols(world))
    features, logits, labels = outputs(world, "test")
    found = values(document)
    ranks = (logits > logits[np.arange(len(labels)), labels][:, None]).sum(1)
    assert found["top-1"] == found["real"] == pytest.approx((ranks == 0).mean(), abs=1 / len(labels))
    assert found["top-5"] == pytest.approx((ranks < 5).mean(), abs=1 / len(labels))
    train, _, train_labels = outputs(world, "train")
    cosine = (features / np.linalg.norm(features, axis=1, keepdims=True)) @ (
        train / np.linalg.norm(train, axis=1, keepdims=True)
    ).T
    nearest = np.argsort(-cosine, axis=1)[:, :10]
    votes = np.zeros((len(labels), 10))
    for row, neighbours in enumerate(nearest):
        np.add.at(votes[row], train_labels[neighbours], np.exp(cosine[row, neighbours] / 0.07))
    assert found["knn-10"] == pytest.approx((votes.argmax(1) == labels).mean(), abs=2 / len(labels))

    by_protocol = {result["protocol"]["name"]: result for result in document["results"]}
    assert list(by_protocol) == list(PROTOCOLS)
    index = load_index(world / "test")
    for name, result in by_protocol.items():
        assert result["set"] == {
            "name": "test",
            "path": str(world / "test"),
            "digest": index.digest,
            "samples": index.samples,
            "judged": index.samples,
        }
        assert (result["train"] is not None) == (name in FEATURES)
        assert result["leaks"] == "not checked"
    assert [entry["name"] for entry in by_protocol["per-class"]["classes"]] == list(DIGIT_NAMES)
    counted = Counter(zip(labels.tolist(), logits.argmax(1).tolist(), strict=True))
    mistakes = {pair: times for pair, times in counted.items() if pair[0] != pair[1]}
    confusions = by_protocol["per-class"]["confusions"]
    # Two images may differ: their two best classes are equal but for the last bits.
    difference = Counter({(label, predicted): times for label, predicted, times in confusions})
    difference.subtract(mistakes)
    assert sum(map(abs, difference.values())) <= 2
    assert all("confusions" not in result for name, result in by_protocol.items() if name != "per-class")
    shots = by_protocol["fewshot"]["shots"]["5shot"]["0"]
    starts = np.cumsum([0, *load_index(world / "train").shard_samples])
    picked = [train_labels[starts[shard] + sample] for shard, sample in shots]
    assert np.bincount(picked).tolist() == [5] * 10
    assert not list(tmp_path.glob("*/attempts/*/features-*"))
    capsys.readouterr()
    assert main(["status", str(tmp_path)]) == 0
    assert f"top-1 {found['top-1']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluation_json_is_identical_for_1_2_and_4_workers(world: Path, tmp_path: Path) -> None:
    texts = set()
    for workers in (1, 2, 4):
        judged(world, tmp_path / str(workers), f"cluster.workers={workers}", *all_protocols(world))
        texts.add((tmp_path / str(workers) / "evaluation.json").read_text())
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("format", ["npz", "timm", "hf"])
def test_foreign_weights_get_the_same_results_as_ours(format: str, world: Path, tmp_path: Path) -> None:
    theirs = "theirs.npz" if format == "npz" else format
    assert main(["export", str(world / "weights"), str(tmp_path / theirs), "--format", format]) == 0
    ours = judged(world, tmp_path / "ours")
    words = ["model.image_size=[16,16]"] if format == "npz" else []
    document = judged(world, tmp_path / "theirs", *words, weights=str(tmp_path / theirs))
    assert values(document) == pytest.approx(values(ours), abs=0.01)
    assert document["weights"]["digest"] != ours["weights"]["digest"]


@pytest.mark.slow
def test_an_unreadable_data_set_is_named(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worker 1 reads the last shard, which has a wrong byte."""
    shutil.copytree(world / "test", tmp_path / "test")
    shard = max((tmp_path / "test").glob("*.tar"))
    flipped = bytearray(shard.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    shard.write_bytes(flipped)
    output = str(tmp_path / "out")
    words = [str(world / "weights"), str(tmp_path / "test"), *LOCAL, "cluster.workers=2", "--output", output]
    assert main(["evaluate", *words]) == 65
    said = capsys.readouterr().err
    assert f"{tmp_path / 'test'}: worker 1: DataError" in said
    assert shard.name in said
    assert "run the same command again" in said


@pytest.mark.slow
def test_all_workers_receive_rank_0s_result_or_error(tmp_path: Path) -> None:
    cluster = ClusterConfig(workers=2, backend="processes")
    task = {"folder": str(tmp_path)}
    rank_0, rank_1 = run_worker_group(ranks.hear_of_rank_0, task, cluster=cluster, name="alone", directory=tmp_path)
    failed, stopped = (
        "EvaluationFailed: worker 0: DataError: rank 0 cannot",
        "EvaluationStopped: stopped during an evaluation",
    )
    assert rank_0 == ["done", failed, stopped]
    assert rank_1 == ["None", failed, stopped]


# ------------------------------------------------------------------------------------------------ requests


class Workers:
    """A fake worker group that records requests and returns their names as results."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.leaked: list[list[int] | None] = []

    def __call__(self, function: Any, make_task: Any, context: Any, **_: Any) -> dict[str, Any]:
        task: Task = make_task(1)
        results = []
        for request in task["requests"]:
            name = request["protocol"]["name"]
            self.asked.append((Path(request["test"]).name, name))
            self.leaked.append(request["leaked"])
            index = load_index(request["test"])
            protocol = Protocol(**request["protocol"])
            train = None
            if request["train"] is not None:
                train = {"digest": load_index(request["train"]).digest, "samples": 1442, "used": 1442}
            entry = {"value": 0.5, "low": 0.4, "high": 0.6, "samples": 10, "interval": ""}
            results.append(
                {
                    "set": {"digest": index.digest, "samples": index.samples, "judged": 10},
                    "train": train,
                    "protocol": {"name": name, "fields": protocol.fields, "digest": protocol.digest},
                    "values": {name: entry},
                    "leaks": "not checked" if request["leaked"] is None else {"leaked": 3, "values": {name: entry}},
                }
            )
        return {"results": results}


def test_only_a_changed_data_set_or_protocol_is_evaluated_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = Workers()
    monkeypatch.setattr(stage, "supervise", workers)
    train = f"train={world / 'train'}"
    judged(world, tmp_path, "--protocol", "top-1", "--protocol", "knn", train)
    assert workers.asked == [("test", "top-1"), ("test", "knn")]
    judged(world, tmp_path, "--protocol", "top-1", "--protocol", "knn", train)
    assert len(workers.asked) == 2, "finished: skipped"
    document = judged(world, tmp_path, "--protocol", "knn", "--protocol", "linear", "--protocol", "top-1", train)
    assert workers.asked[2:] == [("test", "linear")]
    assert [result["protocol"]["name"] for result in document["results"]] == ["knn", "linear", "top-1"]
    assert "knn on test reused from evaluate-" in capsys.readouterr().out
    judged(world, tmp_path, "--protocol", "knn", train, "knn.k=[5]")
    assert workers.asked[3:] == [("test", "knn")], "another k is another protocol"
    judged(world, tmp_path, str(world / "train"), "--protocol", "top-1")
    assert workers.asked[4:] == [("train", "top-1")], "another set"
    judged(world, tmp_path, "--protocol", "top-1", "micro_batch=16")
    assert workers.asked[5:] == [("test", "top-1")], "another batch may round otherwise"
    shutil.copytree(world / "weights", tmp_path / "weights")
    model = models.load(tmp_path / "weights")
    model.head.weight.data *= 2
    models.save(model, tmp_path / "weights", class_names=DIGIT_NAMES)
    record_weights(tmp_path / "weights")
    judged(world, tmp_path, "--protocol", "top-1", weights=str(tmp_path / "weights"))
    assert workers.asked[6:] == [("test", "top-1")], "other weights"


def test_results_from_before_a_correction_are_not_reused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    monkeypatch.setattr(stage, "supervise", workers)
    options = ("--protocol", "top-1", "preprocess=resize_small(18)|central_crop(16)")
    with monkeypatch.context() as before:
        before.setattr(preprocess, "CORRECTIONS", {})
        judged(world, tmp_path, *options)
    document = judged(world, tmp_path, *options)
    assert workers.asked == [("test", "top-1"), ("test", "top-1")]
    assert document["results"][0]["protocol"]["fields"]["corrected"] == {"resize_small": 1}


def test_workers_receive_the_leaked_samples_of_each_data_set(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    monkeypatch.setattr(stage, "supervise", workers)
    index = load_index(world / "test")
    pairs = []
    for number in (3, 102, 354):
        key = bytes(index.table(number // 100)["key"][number % 100]).decode()
        test = [index.shards[number // 100].name, key]
        pairs.append({"train": ["t.tar", "x"], "test": test, "kind": "exact", "distance": 0.0})
    compared = {"path": "shards/test", "digest": index.digest}
    leaks = {"schema": 2, "train": [compared], "test": [compared], "pairs": pairs}
    (tmp_path / "leaks.json").write_text(seal(leaks))
    document = judged(world, tmp_path / "out", f"leaks={tmp_path / 'leaks.json'}")
    assert workers.leaked == [[3, 102, 354]]
    (result,) = document["results"]
    assert result["leaks"]["train"] == [compared]
    assert result["leaks"]["path"] == str(tmp_path / "leaks.json")
    judged(world, tmp_path / "out")
    assert workers.leaked == [[3, 102, 354], None], "without the document is another question"


def trained(folder: Path, world: Path, inputs: dict[str, str]) -> Path:
    """Write the weights of `world` as the output of a stage with these training inputs."""
    shutil.copytree(world / "weights", folder)
    recorded: dict[str, dict[str, str | None]] = {}
    for field, path in inputs.items():
        if field == "init":
            sha256 = hashlib.sha256((Path(path) / "weights.safetensors").read_bytes()).hexdigest()
            recorded[field] = {"path": path, "digest": sha256}
        else:
            index = load_index(path)
            part_of = index.origin.digest if index.origin else None
            recorded[field] = {"path": path, "digest": index.digest, "part_of": part_of}
    artifacts.write_record(folder / "provenance.json", {"stage": folder.name, "inputs": recorded})
    artifacts.write_record(folder / "done.json", {"key": "k", "seconds": 1, "files": artifacts.digests(folder)})
    return folder


@pytest.mark.parametrize(
    "compared", [["train"], ["other"], ["train", "pretrain"], ["train", "pretrain", "extra", "other"]]
)
def test_leaks_list_which_training_sets_were_compared(
    compared: list[str],
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The weights were trained on three data sets, one from a mixture; the protocol learns from a fourth."""
    sets = {"train": world / "train", "test": world / "test"}
    for number, name in enumerate(("pretrain", "extra", "finetune", "other")):
        sets[name] = tmp_path / name
        write_set(list(digits(True, image_size=16))[number : number + 20], sets[name], name=name, names=DIGIT_NAMES)
    first = {"data.mixture.a.train": str(sets["pretrain"]), "data.mixture.b.train": str(sets["extra"])}
    trained(tmp_path / "first", world, {**first, "probe.train": str(sets["other"])})
    second = {"init": str(tmp_path / "first"), "data.evaluate": str(sets["other"]), "data.train": str(sets["finetune"])}
    weights = trained(tmp_path / "second", world, second)
    workers = Workers()
    monkeypatch.setattr(stage, "supervise", workers)

    digest = {name: load_index(path).digest for name, path in sets.items()}
    train_sets = [{"path": name, "digest": digest[name]} for name in compared]
    leaks = {"schema": 2, "train": train_sets, "test": [{"path": "t", "digest": digest["test"]}], "pairs": []}
    (tmp_path / "leaks.json").write_text(seal(leaks))
    words = ["--protocol", "knn", f"train={sets['train']}", f"leaks={tmp_path / 'leaks.json'}"]
    document = judged(world, tmp_path / "out", *words, weights=str(weights))
    assert document["weights"]["trained_on"]["unknown"] == ""
    assert [one["digest"] for one in document["weights"]["trained_on"]["sets"]] == [
        digest[name] for name in ("finetune", "pretrain", "extra")
    ]
    verdict = document["results"][0]["leaks"]
    learned = ("finetune", "pretrain", "extra", "train")
    assert [one["digest"] for one in verdict["not_checked"]] == [digest[n] for n in learned if n not in compared]
    assert [one["digest"] for one in verdict["checked"]] == [digest[n] for n in learned if n in compared]
    said = capsys.readouterr().out
    for name in learned:
        assert (f"{sets[name]} ({digest[name][:8]}) not checked" in said) == (name not in compared)
    for name in compared:
        assert digest[name][:8] in said
    # If none of the training sets was compared, there is no value without leaks.
    assert ("50.00% without 3 samples shared with" in said) == (compared != ["other"])


def test_training_sets_are_identified_by_digest_not_path(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced data sets and weights are different inputs; a subset is identified by its parent."""
    monkeypatch.setattr(stage, "supervise", Workers())
    images = list(digits(True, image_size=16))
    for name, first in (("old", 0), ("new", 40)):
        write_set(images[first : first + 20], tmp_path / name, name="train", names=DIGIT_NAMES)
    assert main(["subset", str(world / "train"), "--part", ":50", "--output", str(tmp_path / "part")]) == 0
    digest = {name: load_index(tmp_path / name).digest for name in ("old", "new", "part")}
    shutil.copytree(tmp_path / "old", tmp_path / "set")
    first = trained(tmp_path / "first", world, {"data.train": str(tmp_path / "part")})
    second = trained(tmp_path / "second", world, {"init": str(first), "data.train": str(tmp_path / "set")})
    compared = [load_index(world / "train").digest, digest["new"]]
    leaks = {
        "schema": 2,
        "train": [{"path": "t", "digest": one} for one in compared],
        "test": [{"path": "t", "digest": load_index(world / "test").digest}],
        "pairs": [],
    }
    (tmp_path / "leaks.json").write_text(seal(leaks))
    # Replace the data set at this path by the one of the comparison.
    shutil.rmtree(tmp_path / "set")
    shutil.copytree(tmp_path / "new", tmp_path / "set")
    shutil.rmtree(tmp_path / "part")
    document = judged(world, tmp_path / "out", f"leaks={tmp_path / 'leaks.json'}", weights=str(second))
    verdict = document["results"][0]["leaks"]
    assert [one["digest"] for one in verdict["not_checked"]] == [digest["old"]]
    assert [one["digest"] for one in verdict["checked"]] == [digest["part"]]

    # Other weights at the path of the initial weights: their training sets are not those of the stage.
    with open(first / "weights.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    artifacts.write_record(first / "done.json", {"key": "k", "seconds": 1, "files": artifacts.digests(first)})
    document = judged(world, tmp_path / "again", weights=str(second))
    sets, unknown = document["weights"]["trained_on"].values()
    assert ([one["digest"] for one in sets], unknown) == ([digest["old"]], str(first))


def test_weights_are_evaluated_with_their_recorded_preprocessing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "supervise", Workers())
    ops = "resize_small(20)|central_crop(16)"
    model = models.load(world / "weights")
    models.save(model, tmp_path / "weights", class_names=DIGIT_NAMES, preprocessing=preprocessing_of(ops, model.config))
    record_weights(tmp_path / "weights")
    squash = "resize((16, 16))"
    other = "resize(16, antialias=True)"
    cases = [
        (
            world,
            [],
            squash,
            f"preprocessing {squash} (the default, because none is recorded with the weights)",
        ),
        (tmp_path, [], ops, f"preprocessing {ops} (recorded with the weights)"),
        (
            tmp_path,
            [f"preprocess={other}"],
            other,
            f"preprocessing {other} (from the recipe, overriding {ops}, recorded with the weights)",
        ),
    ]
    # Both runs use one folder: the recorded preprocessing must be in the key, or the second would be skipped.
    for home, words, expected, line in cases:
        document = judged(world, tmp_path / "out", *words, weights=str(home / "weights"))
        assert document["results"][0]["protocol"]["fields"]["preprocess"] == expected
        assert f"evaluate: {line}\n" in capsys.readouterr().out


def test_unknown_training_data_and_overlapping_test_sets_are_reported(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "supervise", Workers())
    compared = [{"path": "t", "digest": load_index(world / "test").digest}]
    leaks = {"schema": 2, "train": compared, "test": compared, "pairs": []}
    (tmp_path / "leaks.json").write_text(seal(leaks))
    document = judged(world, tmp_path / "out", f"leaks={tmp_path / 'leaks.json'}")
    assert document["weights"]["trained_on"] == {"sets": [], "unknown": str(world / "weights")}
    assert f"training sets of {world / 'weights'}: not checked" in capsys.readouterr().out
    weights = trained(tmp_path / "weights", world, {"data.train": str(world / "test")})
    judged(world, tmp_path / "again", weights=str(weights))
    assert "the weights were trained on this set; not checked" in capsys.readouterr().out


def test_invalid_evaluations_are_refused_before_workers_start(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "supervise", Workers())
    swapped = (*DIGIT_NAMES[:3], DIGIT_NAMES[4], DIGIT_NAMES[3], *DIGIT_NAMES[5:])
    write_set(digits(False, image_size=16), tmp_path / "swapped", name="test", names=swapped)
    few = models.from_config(models.config_of("mu/8", 16, 3), torch.Generator())
    models.save(few, tmp_path / "few")
    headless = models.from_config(models.config_of("mu/8", 16, 0), torch.Generator())
    models.save(headless, tmp_path / "headless")
    copied = shutil.copytree(world / "test", tmp_path / "copied")
    leaks = {"schema": 2, "train": [], "test": [{"path": "elsewhere/test", "digest": "f" * 64}], "pairs": []}
    (tmp_path / "leaks.json").write_text(seal(leaks))
    weights, test, train = str(world / "weights"), str(world / "test"), str(world / "train")
    cases: list[tuple[list[str], int, str]] = [
        ([weights, "micro_batch=3"], 64, "expected a data set to evaluate on"),
        ([weights, test, "--protocol", "top1"], 64, "did you mean 'top-1'?"),
        (
            [weights, test, "--protocol", "knn"],
            78,
            "sets.test.train is missing, but a training set is needed for knn",
        ),
        ([weights, str(tmp_path / "swapped")], 65, f"class 3 is '{DIGIT_NAMES[3]}' and '{DIGIT_NAMES[4]}'"),
        ([weights, test, f"train={tmp_path / 'swapped'}", "--protocol", "knn"], 65, "class 3 is"),
        (
            [weights, test, f"train={copied}", "--protocol", "knn"],
            65,
            f"test {test} and train {copied} are the same data set",
        ),
        ([str(tmp_path / "few"), test], 65, "has 10 classes, but the weights have only 3, without 3, 4, 5, 6, 7"),
        (
            [str(tmp_path / "few"), test, "--protocol", "top-5"],
            78,
            "top-5 needs at least 5 classes, but the weights have 3",
        ),
        (
            [str(tmp_path / "headless"), test],
            78,
            "top-1 need the outputs of a head, but the weights have no head",
        ),
        ([weights, test, f"leaks={tmp_path / 'leaks.json'}"], 65, "does not cover the data set test: "),
        ([weights, test, "leaks=nowhere.json"], 65, "evaluate.leaks: cannot be read"),
        ([str(tmp_path / "nothing"), test], 65, "nothing"),
        ([weights, test, "preprocess=resize(24)"], 78, "produces 24×24 images, but the model expects 16×16"),
    ]
    for words, code, message in cases:
        assert main(["evaluate", *words, "--output", str(tmp_path / "out"), "cluster.backend=processes"]) == code
        said = capsys.readouterr().err
        assert message in said, f"{words}: {said}"
    # Weights without a head, or with other classes, can be evaluated by their features.
    words = [str(tmp_path / "headless"), test, f"train={train}", "--protocol", "knn", "--output", str(tmp_path / "out")]
    assert main(["evaluate", *words]) == 0


def test_the_command_reads_the_weights_once_for_the_key(world: Path, tmp_path: Path, monkeypatch) -> None:
    """On a machine with two workers; the command must not read the weights again to start them."""
    read: list[str] = []
    digest_of = any_weights.digest_of

    def counted(path: str, log: Callable[[str], None]) -> str:
        read.append(path)
        return digest_of(path, log)

    monkeypatch.setattr(any_weights, "digest_of", counted)
    monkeypatch.setattr("jobs.cluster_config.cores", lambda: 2)
    started: list[Campaign] = []
    monkeypatch.setattr("jobs.run.session.run_campaign", lambda campaign, watchers: started.append(campaign))
    context: Any = SimpleNamespace(obj=COMMANDS)
    words = [str(world / "test"), "cluster.max_restarts=7"]
    with pytest.raises(FileNotFoundError):  # nothing has run
        COMMANDS.load("evaluate")(context, str(world / "weights"), words, output=str(tmp_path))
    assert read == [str(world / "weights")]
    cluster = started[0].cluster
    assert (cluster.workers, cluster.max_restarts, cluster.backend) == (2, 7, "processes")


def test_foreign_weights_have_their_model_and_class_names(world: Path, tmp_path: Path) -> None:
    if not GOLDEN.exists():
        pytest.skip("golden data is absent: ../shared/golden")
    keys = set()
    for name in ("hf_vit_cls", "vit_tok_linen.ckpt.npz"):
        size = {} if name == "hf_vit_cls" else {"image_size": (32, 32)}  # which an .npz cannot tell
        expected = models.load(GOLDEN / name, **size)
        overrides = {"model": {key: list(value) for key, value in size.items()}}
        options = {"train": str(world / "train"), "test": str(world / "test")}
        section = {"init": str(GOLDEN / name), "sets": {"test": options}, "protocols": ["knn"], **overrides}
        loaded = campaign.resolve(Recipe({"evaluate": section}, "the test", str(tmp_path / "run")), campaigns.KINDS)
        assert loaded.stages[0].model == expected.config
        assert not loaded.stages[0].missing
        keys.add(loaded.stages[0].key)
    assert len(keys) == 2


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_weights_with_other_pixel_values_get_them(format: str, world: Path, tmp_path: Path) -> None:
    theirs = tmp_path / format
    assert main(["export", str(world / "weights"), str(theirs), "--format", format]) == 0
    assert any_weights.load(str(theirs), {}).config.pixel_mean == (0.5, 0.5, 0.5)
    file = theirs / ("config.json" if format == "timm" else "preprocessor_config.json")
    described = json.loads(file.read_text())
    section = described["pretrained_cfg"] if format == "timm" else described
    section["mean" if format == "timm" else "image_mean"] = [0.485, 0.456, 0.406]
    file.write_text(json.dumps(described))
    config = any_weights.load(str(theirs), {}).config
    assert (config.pixel_mean, config.pixel_std) == ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))
