"""Whole trained stages: averaged weights, resumes, and masked patch prediction."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import models
from data.errors import CheckpointError, ConfigError, DataError
from data.evaluation import EvaluationSet
from data.index.document import load_index
from data.order import Ids
from jobs.run.session import run_campaign
from models.catalog import normalise
from pipeline import health
from pipeline.checkpoints import manifest
from pipeline.checkpoints import reader as checkpoint_reader
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.monitoring.telemetry import read_metrics
from pipeline.train import StepOutcome, count_step
from pipeline.training_config import DataConfig
from pipeline.worker import TrainingLog
from tests.support import campaigns


def run_stages(recipe: Path, *names: str, overrides: tuple[str, ...] = ()) -> list[Path]:
    """Run some stages of a recipe; return the folders of their outputs."""
    loaded = campaigns.load(recipe, list(overrides))
    for name in names:
        run_campaign(loaded, only=name, quiet=True)
    return [loaded.directory(loaded.stage(name)) for name in names]


def test_stage_with_polyak_exports_and_evaluates_averaged_weights(recipe, shards):
    (folder,) = run_stages(recipe, "pretrain", overrides=("pretrain.polyak=0.9",))
    last = manifest.committed(folder / "checkpoints")[0]
    reader = checkpoint_reader.Reader(last, manifest.read_manifest(last).files)
    weights, _ = models.load_weights(folder)
    shapes = {name: w.shape for name, w in weights.items()}
    average, master = reader.weights(shapes, "average"), reader.weights(shapes)
    assert all(torch.equal(weights[name], average[name]) for name in shapes)
    assert not torch.equal(average["head.weight"], master["head.weight"])

    test = EvaluationSet(load_index(shards / "test"), "resize(16)", batch_size=64)
    model = models.load(folder)
    right = 0
    with torch.no_grad():
        for batch in test:
            predicted = model(normalise(batch.images, model.config, torch.float32, torch.device("cpu"))).argmax(1)
            right += int(((predicted == batch.labels[:, 0]) & batch.mask).sum())
    accuracy = right / load_index(shards / "test").samples
    assert read_metrics(folder, "evaluate")[-1]["accuracy"] == pytest.approx(accuracy)
    log = (folder / "log.txt").read_text()
    assert "of the weights averaged with decay 0.9" in log
    assert "averaged weights in" in log


MASKED = (
    "pretrain.objective=masked",
    "pretrain.data.evaluate=null",
    "pretrain.model={name: Masked-mu/8, image_size: 16, depth: 2}",
    "pretrain.steps=60",
    "pretrain.optim.weight_decay=0.0",
)


RESUMED = ("pretrain.steps=2", "pretrain.optim.schedule.warmup_steps=1", "finetune.save_every=2", "cluster.workers=1")
BF16 = (
    "cluster.workers=1",
    "pretrain.steps=2",
    "pretrain.optim.schedule.warmup_steps=1",
    "pretrain.data.evaluate=null",
    "pretrain.precision=bf16",
)


IN_BF16 = '{"communication_data_type": "bf16"}'


@pytest.mark.parametrize(
    ("zero", "content", "said"),
    [(1, "{}", "fp32; resuming "), (2, IN_BF16, "fp32 over micro-batches, in bf16 over workers; resuming ")],
)
def test_log_names_the_data_type_of_gradient_sums(zero, content, said, recipe, monkeypatch):
    """The DeepSpeed file is in the driver's folder, which need not be the workers' folder."""
    (recipe.parent / "ds.json").write_text(content)
    monkeypatch.chdir(recipe.parent)
    (folder,) = run_stages(recipe, "pretrain", overrides=("pretrain.deepspeed=ds.json", f"pretrain.zero={zero}", *BF16))
    assert f"ZeRO {zero} bf16, gradients summed in {said}" in (folder / "log.txt").read_text()
    task = json.loads((folder / "task.json").read_text())
    assert task["config"]["deepspeed"] == str(recipe.parent / "ds.json")


def test_resume_does_not_need_the_initial_weights(recipe):
    """Fine-tuning resumes from its own checkpoint and ends with the same weights."""
    _, resized, folder = run_stages(recipe, "pretrain", "resize", "finetune", overrides=RESUMED)
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "done.json").unlink()
    shutil.rmtree(manifest.committed(folder / "checkpoints")[0])
    (resized / "weights.safetensors").unlink()
    run_stages(recipe, "finetune", overrides=RESUMED)
    assert re.search(r"resumed from step 2 \(attempt \d", (folder / "log.txt").read_text())
    assert (folder / "weights.safetensors").read_bytes() == weights
    assert len(read_metrics(folder, "transfer")) == 1


def test_masked_prediction_learns_and_fine_tuning_extracts_the_vit(recipe):
    pretrained, resized, finetuned = run_stages(recipe, "pretrain", "resize", "finetune", overrides=MASKED)
    losses = [loss for record in read_metrics(pretrained) for loss in record["losses"]]
    assert len(losses) == 60, "512 colours: guessing costs ln 512 = 6.24"
    assert losses[0] > 6.0, "512 colours: guessing costs ln 512 = 6.24"
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]

    (report,) = read_metrics(finetuned, "transfer")
    dropped = {line.split()[1] for line in report["report"].splitlines() if line.startswith("dropped")}
    assert dropped == {"corruption.token", "prediction.weight", "prediction.bias"}
    assert "0 resized, 2 new, 3 dropped" in (finetuned / "log.txt").read_text()
    assert models.load(finetuned).config.family == "vit"
    source, config = models.load_weights(resized)
    assert config.family == "masked"
    assert config.image_size == (24, 24)
    assert "vit.embedding.weight" in source


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("pretrain.objective=masked",), "objective=masked does not use labels"),
        (("pretrain.objective=masked", "pretrain.data.evaluate=null"), "cannot train a model of family vit"),
        (MASKED[2:3], "cannot train a model of family masked"),
    ],
)
def test_objective_incompatible_with_the_model_is_refused(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        campaigns.load(recipe, list(overrides))


def test_corruption_does_not_depend_on_the_world_size(recipe):
    losses = []
    for workers in (1, 2):
        overrides = (*MASKED[:3], "pretrain.steps=2", "pretrain.optim.schedule.warmup_steps=2")
        overrides += ("pretrain.exact_parts=2", f"cluster.workers={workers}")
        (folder,) = run_stages(recipe, "pretrain", overrides=(*overrides, f"run={recipe.parent / str(workers)}"))
        losses.append([loss for record in read_metrics(folder) for loss in record["losses"]])
    assert losses[0] == losses[1]


def worker_with_bad_samples(folder: Path, monkeypatch, saver: SimpleNamespace, events: list[str]) -> SimpleNamespace:
    """Return a worker for `count_step` that adds its log lines to `events`."""
    monkeypatch.setattr(health, "read_excluded", lambda folder: [])
    telemetry = SimpleNamespace(log=events.append)
    cfg = SimpleNamespace(batch_size=16, max_skipped=5, data=SimpleNamespace(max_bad_fraction=0.001))
    return SimpleNamespace(
        engine=SimpleNamespace(gradient_norm=1.0, trace=None),
        cfg=cfg,
        health=health.Health(cfg, folder, checkpoints_in(folder), telemetry),
        job=SimpleNamespace(train=["digits"]),
        saver=saver,
        group=SimpleNamespace(rank=0, telemetry=telemetry),
        log=TrainingLog(),
    )


def count_bad_samples(worker: SimpleNamespace, step: int, bad_samples: int) -> None:
    """Count a step after which this many samples were bad."""
    ledger = SimpleNamespace(hex="9f3c", update=lambda *args: ledger)
    progress = SimpleNamespace(step=step - 1, bad_samples=bad_samples - 1, ledger=ledger)
    taken = StepOutcome(2.0, bad_samples=1, stopping=False, all_written=False, planned=Ids([], [], []), ids=[])
    count_step(worker, progress, taken)


def test_bad_samples_are_reported_even_if_the_save_in_flight_fails(tmp_path, monkeypatch):
    """In that case only the error of the save is raised, with its own exit code."""
    events: list[str] = []

    def fail(step: int) -> None:
        events.append("the save fails")
        raise CheckpointError("3 consecutive saves failed")

    saver = SimpleNamespace(in_flight=True, finish=fail)
    with pytest.raises(CheckpointError):
        count_bad_samples(worker_with_bad_samples(tmp_path, monkeypatch, saver, events), 13, 12)
    said = "step 13: 12 of 208 samples were bad, more than data.max_bad_fraction=0.001 allows"
    assert events == [said, "the save fails"]


@pytest.mark.parametrize(("step", "bad_samples", "limit"), [(13, 12, "0.1"), (2, 31, "1")])
def test_suggested_limit_for_bad_samples_is_accepted(step, bad_samples, limit, tmp_path, monkeypatch):
    saver = SimpleNamespace(in_flight=False, finish=lambda step: None, end=lambda step: None)
    with pytest.raises(DataError, match=rf"set data\.max_bad_fraction={limit} of this stage"):
        count_bad_samples(worker_with_bad_samples(tmp_path, monkeypatch, saver, []), step, bad_samples)
    DataConfig(max_bad_fraction=float(limit))
