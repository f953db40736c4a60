"""Weighted mixtures of sets, from the recipe to the last checkpoint: exact counts, one ledger, exact resume."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.evaluation import EvaluationSet
from data.images.augment import AugmentConfig
from data.index.document import load_index
from data.index.index import exclude, join
from data.loader import TrainLoader
from data.order import Ledger, Mixture
from jobs.__main__ import main
from pipeline.checkpoints import manifest
from pipeline.checkpoints import reader as checkpoint_reader
from pipeline.extras.recorded_config import recorded_config
from pipeline.extras.replays.batch import rebuild
from pipeline.training_data import training_order
from tests.support import campaigns
from tests.support.recipes import without_check

RECIPE = without_check("""
run: {run}
cluster: {{workers: 2, backend: processes, backoff_s: 0}}
shards:
  kind: pack
  shard_samples: 50
  sets:
    high: {{source: digits, image_size: 16, keep: [5, 6, 7, 8, 9]}}
    low: {{source: digits, image_size: 16, keep: [0, 1, 2, 3, 4]}}
pretrain:
  data:
    mixture:
      low: {{train: "@shards/low", weight: 0.7}}
      high: {{train: "@shards/high", weight: 0.3}}
  model: {{name: mu/8, width: 16, depth: 1, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{schedule: {{warmup_steps: 2}}}}
  loss: softmax
  steps: 24
  batch_size: 16
  micro_batch: 4
  precision: fp32
  save_every: 8
  log_every: 1
""")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(RECIPE.format(run=tmp_path / "run"))
    return path


def test_a_mixture_trains_on_its_exact_shares_and_resumes_as_if_never_stopped(mixed, capsys):
    assert main(["run", str(mixed)]) == 0
    loaded = campaigns.load(mixed, [])
    folder, shards = (loaded.directory(loaded.stage(name)) for name in ("pretrain", "shards"))
    last = manifest.committed(folder / "checkpoints")[0]
    whole = checkpoint_reader.verify(last)

    sets = [load_index(shards / name) for name in ("high", "low")]  # by name
    index = join(sets, [0.3, 0.7])
    mixture = Mixture(
        index.shard_samples, groups=[len(part.shards) for part in sets], weights=[0.3, 0.7], seed=0, batch_size=16
    )
    ledger = Ledger.start(index.digest, 0)
    seen = []
    for step in range(24):
        ids = mixture.batch(step)
        ledger = ledger.update(step, *ids)
        seen.append(np.stack(ids, 1))
    assert whole.ledger == ledger.hex
    high = np.stack(seen)[..., 1] < len(sets[0].shards)  # (steps, slots)
    assert (high.sum(1) == 5).all(), "0.3 of 16 is 4.8, and 0.7 is 11.2"
    ids = np.concatenate(seen)
    assert len(np.unique(ids, axis=0)) == len(ids), "no sample comes twice in a pass over its set"

    task = json.loads((folder / "task.json").read_text())
    cfg = recorded_config(task)
    trained = training_order(cfg, [load_index(path) for path in task["job"]["train"]])
    _, labels, _, bad, _ = rebuild(cfg, *trained, 16, 7)
    assert ((labels[:, 0] >= 5) == high[7]).all()
    assert not bad

    (folder / "done.json").unlink()
    shutil.rmtree(last)
    capsys.readouterr()
    assert main(["run", str(mixed)]) == 0
    assert "resumed from step 16" in capsys.readouterr().out
    again = checkpoint_reader.verify(manifest.committed(folder / "checkpoints")[0])
    assert (again.step, again.ledger, again.files) == (24, whole.ledger, whole.files)


def test_a_lost_shard_ends_the_run_unless_the_config_drops_it_and_then_the_count_says_so(mixed, tmp_path, capsys):
    def ids(step: int) -> np.ndarray:
        assert main(["replay", str(folder), f"step={step}", "--to", str(tmp_path / "batch.npz")]) == 0
        return np.load(tmp_path / "batch.npz")["ids"]

    assert main(["run", str(mixed)]) == 0
    loaded = campaigns.load(mixed, [])
    folder, shards = (loaded.directory(loaded.stage(name)) for name in ("pretrain", "shards"))
    number = len(load_index(shards / "high").shards) + 3
    early = ids(4)
    late = ids(20)
    assert (late[:, 1] == number).any()
    shutil.rmtree(manifest.committed(folder / "checkpoints")[0])
    (folder / "done.json").unlink()
    lost = (shards / "low" / "low-000003.tar").rename(tmp_path / "lost.tar")
    capsys.readouterr()
    assert main(["run", str(mixed)]) == 65
    assert "train without them: 'pretrain.data.drop=[low-000003.tar]'" in capsys.readouterr().err
    assert main(["run", str(mixed), "pretrain.data.drop=[low-3.tar]"]) == 65
    assert "data.drop: 0 shards match low-3.tar, expected exactly one: a name such as /" in capsys.readouterr().err
    assert main(["run", str(mixed), "pretrain.data.drop=[low-000003.tar]"]) == 0
    said = capsys.readouterr().out
    assert "data.drop: excluding 1 shard with 50 of 1,442 samples" in said
    assert "resuming with changed settings" in said
    assert "resumed from step 16" in said
    mended = ids(20)
    high = late[:, 1] < number - 3
    assert (mended[:, 1] != number).all()
    assert np.array_equal(mended[high], late[high])
    lost.rename(shards / "low" / "low-000003.tar")
    assert np.array_equal(ids(4), early), "computed before the shard was lost"
    capsys.readouterr()
    assert main(["run", str(mixed)]) == 0
    assert "except for data.drop: ['low-000003.tar'] → []; to run it again, move" in capsys.readouterr().out


def test_dropped_shard_needs_a_unique_end_of_its_path(shards, tmp_path):
    shutil.copytree(shards / "train", tmp_path / "other" / "train")
    sets = [load_index(shards / "train"), load_index(tmp_path / "other" / "train")]
    with pytest.raises(DataError, match=r"2 shards match train-000000\.tar, expected exactly one"):
        exclude(sets, ["train-000000.tar"])
    first, second = exclude(sets, ["other/train/train-000000.tar"])
    assert first == sets[0]
    assert second.shards[0].samples == 0
    assert second.digest != sets[1].digest


def test_plan_counts_every_set_of_a_mixture(recipe, shards, capsys):
    sets = f"a: {{train: {shards}/train, weight: 3}}, b: {{train: {shards}/test, weight: 1}}"
    overrides = ["pretrain.data.train=null", f"pretrain.data.mixture={{{sets}}}", "pretrain.steps=30"]
    assert main(["plan", str(recipe), *overrides]) == 0
    out = capsys.readouterr().out
    assert "30 (480 images, 0.27 passes over 1,797 samples)" in out
    assert "mixture a: 12 of every batch, 0.25 passes over 1,442 samples" in out
    assert "mixture b: 4 of every batch, 0.34 passes over 355 samples" in out


def test_plan_and_run_alike_refuse_a_set_without_samples(recipe, shards, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    tarfile.open(tmp_path / "none/0.tar", "w").close()
    assert main(["index", str(tmp_path / "none"), "--classes", "10"]) == 65
    sets = f"a: {{train: {shards}/train, weight: 3}}, b: {{train: {tmp_path}/none, weight: 1}}"
    for command in ("plan", "run"):
        overrides = ["pretrain.data.train=null", f"pretrain.data.mixture={{{sets}}}"]
        assert main([command, str(recipe), *overrides]) == 65
        assert f"pretrain: {tmp_path}/none has no samples" in capsys.readouterr().err


def test_key_depends_on_content_and_weight_of_every_set_but_not_on_its_path(recipe, shards, tmp_path):
    def key(a: Path, b: Path, weight: float = 1) -> str:
        sets = f"a: {{train: {a}, weight: 1}}, b: {{train: {b}, weight: {weight}}}"
        loaded = campaigns.load(recipe, [f"pretrain.data={{mixture: {{{sets}}}}}", "pretrain.data.train=null"])
        return loaded.stage("pretrain").key

    train = shards / "train"
    test = shards / "test"
    moved = tmp_path / "moved"
    shutil.copytree(test, moved)
    assert key(train, test) == key(train, moved)
    assert len({key(train, test), key(train, train), key(test, train), key(train, test, 2)}) == 4


def test_joined_sets_are_read_each_from_its_own_tables(shards):
    sets = [load_index(shards / name) for name in ("train", "test")]
    joined = join(sets, [1, 1])
    order = Mixture(
        joined.shard_samples, groups=[len(part.shards) for part in sets], weights=[1, 1], seed=0, batch_size=8
    )
    options = {"image_size": 16, "augment": AugmentConfig(crop="none", flip=False), "micro_batch": 8}
    batch = next(iter(TrainLoader(joined, order, slots=range(8), **options)))
    images = []
    for part in sets:
        whole_set = EvaluationSet(part, "resize(16)", batch_size=part.samples)
        images.append(next(iter(whole_set)).images)
    starts = np.cumsum([0, *joined.shard_samples])
    for image, (_, shard, sample) in zip(batch.images, batch.ids.tolist(), strict=True):
        number = starts[shard] + sample
        if number < sets[0].samples:
            assert (image == images[0][number]).all()
        else:
            assert (image == images[1][number - sets[0].samples]).all()
    assert joined.classes == 10
    assert sum(joined.class_counts) == 1797
