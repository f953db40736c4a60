"""Train the whole ViT-H/14 for one step, if there is enough memory."""

import psutil
import pytest

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from tests.support import ranks


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
    assert outcome["updates"] == 1
    assert outcome["moved"] > 0
    assert outcome["loss"] == pytest.approx(6.9, abs=0.5)
