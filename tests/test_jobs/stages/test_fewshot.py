"""The few-shot stage evaluates every sample, however many labels the samples have."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.stages import fewshot
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator
from pipeline.monitoring.watchdog import Phases
from pipeline.training_config import ProbeConfig
from tests.support.evaluated_sets import CPU, Sums
from tests.support.shards import digits, write_set

pytestmark = pytest.mark.quick


def test_samples_with_several_labels_count_by_their_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third sample has a second label; the probe during training also evaluates these samples."""
    pictures = list(islice(digits(True, image_size=16), 90))
    several = []
    for number, picture in enumerate(pictures):
        labels = picture.labels or ()
        if number % 3 == 0:
            labels = (*labels, (labels[0] + 1) % 10)
        several.append(replace(picture, labels=labels))
    for name, samples in {"train": several[:60], "test": several[60:], "plain": pictures[60:]}.items():
        write_set(samples, tmp_path / name, classes=10)

    def evaluate_here(cfg: Any, init: str, requests: Any, context: Any) -> Any:
        phases = Phases(tmp_path, 0, 60.0)
        evaluator = Evaluator(
            group=EvaluationGroup(phases, CPU, wants_stop=lambda: False),
            model=model,
            dtype=torch.float32,
            folder=tmp_path,
            preprocess=cfg.preprocess,
            micro_batch=cfg.micro_batch,
            max_labels=cfg.max_labels,
        )
        results = evaluator.evaluate(requests)
        phases.close()
        return results

    model = Sums()
    monkeypatch.setattr(fewshot, "evaluate_on_workers", evaluate_here)
    context: Any = SimpleNamespace(
        model=SimpleNamespace(image_size=16),
        campaign=SimpleNamespace(path_of=lambda path: path),
        directory=tmp_path,
        log=print,
    )
    results = {}
    for test in ("test", "plain"):
        paths = [str(tmp_path / name) for name in ("train", test)]
        probe = ProbeConfig(train=paths[0], test=paths[1], shots=(2,))
        cfg = fewshot.FewShotStageConfig(init="weights", probe=probe, micro_batch=30)
        results[test] = fewshot.FewShot().run(cfg, context)
    assert results["test"]["train_samples"] == 60
    assert results["test"]["test_samples"] == 30
    assert results["test"]["metrics"] == results["plain"]["metrics"]
