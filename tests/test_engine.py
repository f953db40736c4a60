"""DeepSpeed ZeRO 0–3 on gloo as Patchline uses it; also the guard at every DeepSpeed bump."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jobs.cluster import ClusterConfig, run_gang
from pipeline.engine import deepspeed_config
from pipeline.errors import ConfigError
from pipeline.optimizer import OptimConfig, build_optimizer
from tests import ranks

CASES = [(0, "fp32", 2), (1, "fp32", 2), (2, "fp32", 2), (3, "fp32", 2), (2, "fp32", 1), (2, "bf16", 2), (3, "bf16", 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], Any]:
    folder = tmp_path_factory.mktemp("engine")
    found = {}
    for zero, precision, world in CASES:
        found[zero, precision, world] = run_gang(
            ranks.go_back_and_repeat,
            {"zero": zero, "precision": precision},
            cluster=ClusterConfig(workers=world, backend="processes"),
            name=f"{zero}-{precision}-{world}",
            directory=folder,
        )
    return found


def in_one_process() -> list[float]:
    """The same six steps in plain torch; losses of the first half of every batch, which is worker 0's of two."""
    model = ranks.small_model()
    optimizer = build_optimizer(model, {"0.weight", "2.weight"}, OptimConfig(lr=1e-2))
    losses = []
    for step in range(6):
        x, y = ranks.batch_of(step)
        losses.append(F.cross_entropy(model(x[:4]), y[:4]).item())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.parametrize("case", CASES)
def test_a_restored_state_is_the_saved_one_and_repeats_the_same_losses_bit_for_bit(results, case):
    assert results[case]["back"] and results[case]["repeats"]
    assert results[case]["updates"] == 3


@pytest.mark.parametrize("case", CASES)
def test_a_non_finite_gradient_never_reaches_weights_or_moments(results, case):
    assert not results[case]["finite"]
    assert results[case]["unharmed"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks_of_every_stage_match_one_process(results, zero):
    assert results[zero, "fp32", 2]["losses"] == pytest.approx(in_one_process(), abs=2e-6)


def test_bf16_starts_from_the_unrounded_weights(results):
    masters = {results[zero, precision, 2]["initial"] for zero, precision, world in CASES if world == 2}
    assert len(masters) == 1


def test_a_users_deepspeed_file_is_merged_and_a_conflict_shows_both_values(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"overlap_comm": false}, "gradient_clipping": "auto"}')
    given = {"zero": 2, "precision": "fp32", "micro_batch": 4, "accumulation": 1, "clip": 1.0, "user_file": str(file)}
    merged = deepspeed_config(**given)
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": False} and merged["gradient_clipping"] == 1.0
    file.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match="zero_optimization.stage: your file says 3, the recipe 2"):
        deepspeed_config(**given)


@pytest.mark.parametrize("case", CASES)
def test_torchs_linear_is_left_alone(results, case):
    assert results[case]["linear_untouched"]
