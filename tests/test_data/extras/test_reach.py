"""The read test of preflight reads three shards, and reports a reason if it fails."""

import pytest

from data.extras.reach import measure_reads
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits

pytestmark = pytest.mark.quick


@pytest.fixture
def index(tmp_path):
    return pack(list(digits(train=False, image_size=16))[:40], tmp_path / "set", name="test", shard_samples=8)


def test_first_middle_and_last_shard_are_read(index, tmp_path):
    reach = measure_reads(str(tmp_path / "set"))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "set").glob("*.tar"))]
    assert len(sizes) == 5
    assert reach["bytes"] == sizes[0] + sizes[2] + sizes[4]
    assert reach["error"] == ""
    assert reach["seconds"] > 0


def test_missing_shard_is_reported_with_the_reason(index, tmp_path):
    (tmp_path / "set" / "test-000002.tar").unlink()
    assert measure_reads(str(tmp_path / "set"))["error"].endswith("test-000002.tar: No such file or directory")


def test_missing_set_is_reported_without_an_exception(tmp_path):
    reach = measure_reads(str(tmp_path / "none"))
    assert "this index does not exist" in reach["error"]
    assert reach["bytes"] == 0
