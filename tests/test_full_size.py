"""ViT-H/14, whole: counted everywhere, and trained for one step where there is memory for it."""

import psutil
import pytest
import torch

import models
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from tests import ranks


def test_vit_h14_has_the_papers_632_million_parameters_and_its_training_the_papers_exaflops():
    with torch.device("meta"):
        model = models.build("H/14")
    assert sum(p.numel() for p in model.parameters()) == models.parameters_of(models.config_of("H/14")) == 632_045_800
    flops = models.training_flops(models.config_of("H/14"), 14 * 303_000_000)
    assert flops / 1e18 == pytest.approx(4262, rel=0.002)  # paper, table 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vit_h14_takes_an_optimizer_step_under_zero(tmp_path):
    if psutil.virtual_memory().available < 18 * 2**30:
        pytest.skip("needs 18 GiB of free memory")
    outcome = run_worker_group(
        ranks.one_step_of_h14,
        {"zero": 2},
        cluster=ClusterConfig(workers=1, backend="processes"),
        name="h14",
        directory=tmp_path,
    )
    print(outcome)
    assert outcome["updates"] == 1 and outcome["moved"] > 0 and outcome["loss"] == pytest.approx(6.9, abs=0.5)
