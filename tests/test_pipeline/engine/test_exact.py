"""With `exact_parts` the bits do not depend on the world size (whole runs: test_checkpoint_runs.py)."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine import exact
from pipeline.engine.exact import ExactEngine
from pipeline.monitoring.telemetry import Telemetry
from pipeline.optimization import STATE, OptimConfig, build_optimizer
from pipeline.training_config import TrainConfig
from tests.support import ranks, savers

PLAIN = {"zero": 2, "precision": "fp32", "parts": 0}
PLAIN_SGD = {**PLAIN, "name": "sgd"}
EXACT = [
    {"zero": zero, "precision": precision, "parts": 4}
    for zero, precision in [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
]
EXACT += [{"zero": 2, "precision": "fp32", "parts": 8, "name": "sgd"}]
WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """Return the results of every case at every world size."""
    folder, found = tmp_path_factory.mktemp("elastic"), {}
    for world in WORLDS:
        cases = [PLAIN, PLAIN_SGD, *EXACT]
        cluster = ClusterConfig(workers=world, backend="processes")
        values = run_worker_group(
            ranks.train_exactly, {"cases": cases}, cluster=cluster, name=f"{world}", directory=folder
        )
        found |= {(world, json.dumps(case)): value for case, value in zip(cases, values, strict=True)}
    return found


@pytest.mark.parametrize("case", EXACT, ids=lambda case: "-".join(map(str, case.values())))
def test_exact_mode_has_the_same_bits_at_every_world_size(results, case):
    one, two, four = (results[world, json.dumps(case)]["same"] for world in WORLDS)
    assert one == two == four
    assert len(set(one["losses"])) == 6
    assert one["updates"] == 6


def test_without_exact_mode_the_bits_depend_on_the_world_size(results):
    assert len({results[world, json.dumps(PLAIN)]["same"]["state"] for world in WORLDS}) == 3


@pytest.mark.parametrize("case", [PLAIN, PLAIN_SGD], ids=["adam", "sgd"])
def test_updates_are_counted_without_skipped_steps(results, case):
    assert [results[world, json.dumps(case)]["same"]["updates"] for world in WORLDS] == [6, 6, 6], "of seven steps"


def test_exact_engine_trains_like_the_plain_engine(results):
    plain = results[1, json.dumps(PLAIN)]["same"]
    for case in EXACT[:4]:
        exact = results[1, json.dumps(case)]["same"]
        assert exact["losses"] == pytest.approx(plain["losses"], abs=2e-6)
        assert exact["norms"] == pytest.approx(plain["norms"], abs=2e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_non_finite_gradient_changes_nothing(results, world):
    assert all(results[world, json.dumps(case)]["skipped"] for case in EXACT)


def test_norm_of_a_long_gradient_is_accurate(monkeypatch):
    """On a CPU torch sums 16 million squares in a few running fp32 sums, with an error of 8e-4."""
    monkeypatch.setattr(exact, "dist", SimpleNamespace(**vars(savers.ALONE), all_reduce=lambda tensor: None))
    gradient = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    engine: Any = SimpleNamespace(
        _sums=[torch.cat([gradient, torch.zeros(1)])],
        _of_parts=[torch.zeros(2, dtype=torch.float64)],
        _plans=[],
        _count_update=lambda: None,
        parts=1,
        parts_here=1,
        clip=0.0,
        state=SimpleNamespace(flats=[], optimizer=SimpleNamespace(param_groups=[]), refresh=lambda: None),
    )
    ExactEngine._step(engine, 1e-3, None)
    expected = np.linalg.norm(gradient.numpy().astype(np.float64))
    assert engine.gradient_norm == pytest.approx(expected, rel=1e-7)


def test_cost_and_changed_conditions_are_reported(tmp_path, monkeypatch):
    engine: Any = SimpleNamespace(price=lambda: (0.25, 0.125), sizes={"w": 1_000_000})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    cfg, telemetry = TrainConfig(steps=1, exact_parts=4, precision="fp32"), Telemetry(tmp_path, 0, 1)
    for threads in (1, 1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ExactEngine.report_start(engine, cfg, telemetry, 0)
    telemetry.close()
    text = (tmp_path / "log.txt").read_text()
    assert text.count("waits 0.250s for the sum over 2 workers (one all-reduce: 0.125s); up to 14.0 MB") == 3
    assert text.count("results may differ bitwise from here on: threads: 1 → 2") == text.count("may differ") == 1


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_update_does_not_depend_on_partition_boundaries(name):
    torch.manual_seed(0)
    size, gradients = 20_003, [torch.randn(20_003) * 10.0 ** torch.empty(20_003).uniform_(-8, 0) for _ in range(3)]
    values, found = torch.randn(size), []
    for pieces in (1, 2, 3, 7, 100):
        model = nn.Module()
        for number, piece in enumerate(values.tensor_split(pieces)):
            model.register_parameter(str(number), nn.Parameter(piece.clone()))
        optimizer = build_optimizer(model, {n for n, _ in model.named_parameters()}, OptimConfig(name=name))
        for gradient in gradients:
            for p, piece in zip(model.parameters(), gradient.tensor_split(pieces), strict=True):
                p.grad = piece.clone()
            optimizer.step()
        kept = [torch.cat([optimizer.state[p][kind] for p in model.parameters()]) for kind in STATE[name]]
        found.append(torch.stack([torch.cat([p.detach() for p in model.parameters()]), *kept]))
    assert all(torch.equal(found[0], other) for other in found)
