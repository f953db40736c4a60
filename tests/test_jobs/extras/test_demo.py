"""The overrides of `make demo` for different numbers of GPUs; the demo itself takes minutes and is run by hand."""

import pytest

from tests.support import campaigns, demo

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("gpus", "workers", "gpus_per_worker", "exact_parts"),
    [(0, 2, 0, 0), (1, 1, 1, 2), (2, 2, 1, 2), (8, 2, 1, 2)],
)
def test_the_demo_fits_the_gpus_and_kills_its_last_worker(
    gpus, workers, gpus_per_worker, exact_parts, tmp_path
) -> None:
    """On GPUs, bit-equal results need exact mode."""
    loaded = campaigns.load(demo.RECIPE, [f"run={tmp_path}", *demo.overrides_for(gpus)])
    assert (loaded.cluster.most, loaded.cluster.gpus_per_worker) == (workers, gpus_per_worker)
    assert loaded.stage("pretrain").config.exact_parts == exact_parts
    assert demo.Killer(loaded).victim == workers - 1


def test_without_a_gpu_the_demo_does_not_change_the_recipe() -> None:
    assert demo.overrides_for(0) == []
