"""What a trained stage ends with: averaged weights, and masked patch prediction as another objective."""

from pathlib import Path

import pytest
import torch

import data
import models
from jobs import campaign
from jobs.session import run_campaign
from pipeline import checkpoint
from pipeline.evaluate import accuracy
from pipeline.telemetry import read_metrics


def run_stages(recipe: Path, *names: str, overrides: tuple[str, ...] = ()) -> list[Path]:
    """Run some stages of a recipe; the folders of their outputs."""
    loaded = campaign.load(recipe, list(overrides))
    for name in names:
        run_campaign(loaded, only=name, quiet=True)
    return [loaded.directory(loaded.stage(name)) for name in names]


def test_a_stage_with_polyak_hands_on_and_evaluates_the_averaged_weights(recipe, shards):
    (folder,) = run_stages(recipe, "pretrain", overrides=("pretrain.polyak=0.9",))
    last = checkpoint.committed(folder / "checkpoints")[0]
    reader = checkpoint.Reader(last, checkpoint.read_manifest(last).files)
    weights, _ = models.load_weights(folder)
    shapes = {name: w.shape for name, w in weights.items()}
    average, master = reader.weights(shapes, "average"), reader.weights(shapes)
    assert all(torch.equal(weights[name], average[name]) for name in shapes)
    assert not torch.equal(average["head.weight"], master["head.weight"])

    test = data.EvaluationSet(data.load_index(shards / "test"), "resize(16)", batch_size=64)
    right, _ = accuracy(models.load(folder), test, torch.float32, torch.device("cpu"))
    assert read_metrics(folder, "evaluate")[-1]["accuracy"] == pytest.approx(right)
    log = (folder / "log.txt").read_text()
    assert "of the weights averaged by 0.9" in log and "averaged weights in" in log
