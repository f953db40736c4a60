"""Free resources of this machine next to a worker group."""

import pytest

from jobs.cluster_config import ClusterConfig, cores
from jobs.extras.async_evaluation.spare_places import SpareCore, spare_place_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("busy", [cores() - 1, cores()])
def test_a_core_is_free_if_training_leaves_one(busy) -> None:
    place = spare_place_of(ClusterConfig(workers=1, backend="processes"), busy)
    assert isinstance(place, SpareCore)
    try:
        assert place.is_free() == (busy < cores())
        place.has_training_ended = True
        assert place.is_free()
    finally:
        place.close()
