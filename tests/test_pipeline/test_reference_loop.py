"""Patchline trains, evaluates and probes like a plain torch loop that shares no code with `pipeline/`.

test_twin.py compares with the original's trace; this file covers the rest. No tolerance is chosen: the
loop runs in float64 and float32, and Patchline may differ from float64 by FACTOR times what float32 does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import models
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.run.session import run_campaign
from pipeline.monitoring.telemetry import read_metrics
from tests.support import campaigns
from tests.support import reference_loop as loop
from tests.support import reference_runs as runs
from tests.support.reference_loop import Plan, Trained
from tests.support.reference_runs import CASES, PROBE, SIZE, WITH_DROPOUT, Case, Images

FACTOR = 4  # as in test_twin.py: two correct float32 runs differ by their noise, and this one was measured once


@dataclass(frozen=True)
class World:
    """The sets, and Patchline's results for every case."""

    sets: Path
    images: dict[str, Images]
    given: nn.Module  # the weights to start from
    folder: Path  # of the stages, named like their cases
    timeouts: dict[int, list[float]]  # of the process groups, by number of workers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Run all cases; those with the same world size run in one worker group, one after another."""
    folder = tmp_path_factory.mktemp("reference")
    images = runs.make_sets(folder / "sets")
    given = runs.given_weights(folder / "given")
    timeouts = {}
    for workers in (1, 2):
        tasks = []
        for name, case in {**CASES, "dropout": WITH_DROPOUT}.items():
            if case.world == workers:
                tasks.append(runs.task_of(case, name, folder / "sets", folder / "given", folder))
        cluster = ClusterConfig(workers=workers, backend="processes")
        timeouts[workers] = run_worker_group(
            runs.train_all, {"cases": tasks}, cluster=cluster, name=f"group-{workers}", directory=folder
        )
    return World(folder / "sets", images, given, folder, timeouts)


@dataclass(frozen=True)
class Expected:
    """Expected results of a case, from the plain loop in float64 and float32."""

    network: nn.Module
    exact: Trained
    rounded: Trained

    def noise(self, values_of: Callable[[Trained], Tensor]) -> Tensor:
        """Return the tolerance: FACTOR times the difference between float32 and float64, at least one last bit."""
        exact = values_of(self.exact).double()
        distance = (values_of(self.rounded).double() - exact).abs().max()
        last_bit = exact.abs().max() * torch.finfo(torch.float32).eps
        return FACTOR * torch.maximum(distance, last_bit)


def start_of(case: Case, given: nn.Module) -> nn.Module:
    """Return the initial network of a case, as documented."""
    if not case.keeps_weights:
        return models.from_config(given.config, torch.Generator().manual_seed(case.plan.seed))
    network = models.from_config(given.config)
    network.load_state_dict(given.state_dict())
    if case.changes.get("new_head"):
        torch.nn.init.zeros_(network.head.weight)
        torch.nn.init.zeros_(network.head.bias)
    return network


def without_dropout(network: nn.Module) -> nn.Module:
    """Return a network with the same weights but without dropout in training."""
    plain = models.from_config(replace(network.config, dropout=0.0))
    plain.load_state_dict(network.state_dict())
    return plain


def follow(case: Case, world: World) -> Expected:
    """Train the plain loop on the same samples as Patchline."""
    network = without_dropout(start_of(case, world.given))
    batches = runs.batches_of(case)
    images, labels = world.images["train"]
    exact = loop.train(network, case.plan, batches, images, labels, torch.float64)
    rounded = loop.train(network, case.plan, batches, images, labels, torch.float32)
    return Expected(network, exact, rounded)


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, Expected]:
    """Return the expected results of every case; with one thread, like the workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    followed = {name: follow(case, world) for name, case in CASES.items()}
    torch.set_num_threads(threads)
    return followed


def steps_of(stage: Path) -> tuple[list[float], list[float]]:
    """Return Patchline's loss and gradient norm of every step."""
    losses: list[float] = []
    norms: list[float] = []
    for record in read_metrics(stage):
        losses += record["losses"]
        norms += record["grad_norms"]
    return losses, norms


def ended_with(trained: Trained, plan: Plan) -> dict[str, Tensor]:
    """Return the exported weights of a stage."""
    return trained.average if plan.polyak else trained.weights


def flat(weights: dict[str, Tensor]) -> Tensor:
    """Return all weights in one vector, without the biases of keys.

    Their gradient is zero in theory; in floating point Adam turns rounding noise into updates, without effect.
    """
    parts = []
    for name in sorted(weights):
        values = weights[name].detach().double().flatten()
        if name.endswith("qkv.bias"):
            queries, _, of_values = values.chunk(3)
            values = torch.cat([queries, of_values])
        parts.append(values)
    return torch.cat(parts)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_match_the_plain_loop(name: str, world: World, expected: dict[str, Expected]):
    losses, norms = steps_of(world.folder / name)
    trained = expected[name]
    assert len(losses) == len(norms) == CASES[name].plan.steps
    for values, attribute in ((losses, "losses"), (norms, "norms")):
        wanted = torch.tensor(getattr(trained.exact, attribute), dtype=torch.float64)
        tolerance = trained.noise(lambda run, attribute=attribute: torch.tensor(getattr(run, attribute)))
        error = (torch.tensor(values, dtype=torch.float64) - wanted).abs().max()
        assert error <= tolerance, (attribute, values, wanted.tolist())


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_match_the_plain_loop(name: str, world: World, expected: dict[str, Expected]):
    plan = CASES[name].plan
    weights, _ = models.load_weights(world.folder / name)
    trained = expected[name]
    error = (flat(weights) - flat(ended_with(trained.exact, plan))).abs().max()
    assert error <= trained.noise(lambda run: flat(ended_with(run, plan)))


# ------------------------------------------------------------------------------------------ evaluation, probe


@dataclass(frozen=True)
class Outputs:
    """Outputs for the evaluated sets: features (N, D) of both, logits (N, C) of the test set."""

    shots: np.ndarray
    test: np.ndarray
    logits: np.ndarray


def outputs_of(network: nn.Module, weights: dict[str, Tensor], images: dict[str, Images]) -> Outputs:
    """Compute features and logits of the centre of every image, without dropout."""
    shots, _ = loop.outputs_of(network, weights, loop.central_crop(images["shots"][0], SIZE))
    test, logits = loop.outputs_of(network, weights, loop.central_crop(images["test"][0], SIZE))
    return Outputs(shots, test, logits)


def assert_same_accuracy(found: float, exact: np.ndarray, rounded: np.ndarray, labels: np.ndarray) -> None:
    """Compare an accuracy with float64 scores; only near ties of two scores may differ."""
    ties = loop.near_ties(exact, FACTOR * np.abs(rounded - exact).max())
    assert ties <= 1, "the scores are too noisy to judge by"
    assert abs(found - loop.share_right(exact, labels)) * len(labels) <= ties + 1e-9


def assert_same_probe(found: dict[str, float], exact: Outputs, rounded: Outputs, images: dict[str, Images]) -> None:
    """Compare the few-shot accuracies, of every draw and their means, with the closed form of SPEC 4."""
    _, shot_labels = images["shots"]
    _, test_labels = images["test"]
    for shots in PROBE["shots"]:
        draws = []
        for seed in PROBE["seeds"]:
            in_exact = loop.probe_scores((exact.shots, shot_labels), exact.test, shots, seed)
            in_rounded = loop.probe_scores((rounded.shots, shot_labels), rounded.test, shots, seed)
            draws.append(found[f"{shots}shot-seed-{seed}"])
            assert_same_accuracy(draws[-1], in_exact, in_rounded, test_labels)
        assert found[f"{shots}shot"] == pytest.approx(sum(draws) / len(draws))


def assert_same_evaluation(found: dict[str, Any], exact: Outputs, rounded: Outputs, images: dict[str, Images]) -> None:
    """Compare an evaluation's record with the plain loop's logits and features; each sample counts once."""
    _, test_labels = images["test"]
    assert found["judged"] == len(test_labels)
    assert_same_accuracy(found["accuracy"], exact.logits, rounded.logits, test_labels)
    assert_same_probe(found, exact, rounded, images)


IN_FP32 = [name for name, case in CASES.items() if not case.plan.bf16]


@pytest.mark.parametrize("name", IN_FP32)
def test_accuracy_and_few_shot_probe_match_the_plain_loop(name: str, world: World, expected: dict[str, Expected]):
    trained = expected[name]
    plan = CASES[name].plan
    exact = outputs_of(trained.network, ended_with(trained.exact, plan), world.images)
    rounded = outputs_of(trained.network, ended_with(trained.rounded, plan), world.images)
    (record,) = read_metrics(world.folder / name, "evaluate")
    assert_same_evaluation(record, exact, rounded, world.images)


def test_evaluation_has_no_dropout(world: World):
    network = models.load(world.folder / "dropout")
    assert network.config.dropout == 0.5
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    in_float64 = {name: parameter.double() for name, parameter in weights.items()}
    exact = outputs_of(network, in_float64, world.images)
    (record,) = read_metrics(world.folder / "dropout", "evaluate")
    assert_same_evaluation(record, exact, outputs_of(network, weights, world.images), world.images)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_process_group_has_the_timeout_of_the_recipe(workers: int, world: World):
    assert world.timeouts[workers] == [runs.TIMEOUT_S]


# From the command on, including the driver and the few-shot stage.
CAMPAIGN = Case(Plan(**runs.ADAM, smoothing=0.1), world=2, zero=2, micro_batch=8, keeps_weights=False)


def test_stages_of_a_run_train_and_evaluate_like_the_plain_loop(world: World, tmp_path: Path):
    cfg = runs.train_config(CAMPAIGN, world.sets, world.folder / "given")
    recipe = {
        "run": str(tmp_path / "run"),
        "cluster": {"workers": CAMPAIGN.world, "backend": "processes"},
        "pretrain": runs.recipe_of(cfg),
        "fewshot": {"init": "@pretrain", "probe": runs.recipe_of(cfg)["probe"], "preprocess": runs.PREPROCESS},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = campaigns.load(tmp_path / "recipe.yaml", [])
    run_campaign(loaded, quiet=True)
    trained = follow(CAMPAIGN, world)
    exact = outputs_of(trained.network, trained.exact.weights, world.images)
    rounded = outputs_of(trained.network, trained.rounded.weights, world.images)

    pretrained = loaded.directory(loaded.stage("pretrain"))
    weights, _ = models.load_weights(pretrained)
    assert (flat(weights) - flat(trained.exact.weights)).abs().max() <= trained.noise(lambda run: flat(run.weights))
    (record,) = read_metrics(pretrained, "evaluate")
    assert_same_evaluation(record, exact, rounded, world.images)
    probed = loaded.directory(loaded.stage("fewshot"))
    result = json.loads((probed / "metrics.json").read_text())
    assert (result["train_samples"], result["test_samples"]) == (runs.SAMPLES["shots"], runs.SAMPLES["test"])
    assert_same_probe(result["metrics"], exact, rounded, world.images)
