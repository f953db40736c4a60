"""Collectives with known results: correct ones pass, and a single wrong element is named."""

from pathlib import Path

import pytest

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from tests.support import engine_checks


@pytest.mark.parametrize("world", [2, 4])
def test_single_wrong_element_of_a_collective_is_named(world: int, tmp_path: Path):
    cluster = ClusterConfig(workers=world, backend="processes")
    correct, *planted = run_worker_group(engine_checks.check_sums, {}, cluster=cluster, name="sums", directory=tmp_path)
    assert correct == []
    for name, wrong in zip(("all-reduce", "broadcast", "all-gather", "reduce"), planted, strict=True):
        (text,) = wrong
        assert text.startswith(f"the {name} of float32 over {cluster.workers} workers: 1 of ")
        assert "element 7 is" in text
