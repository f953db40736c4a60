"""What preflight reads of a set: some bytes of three shards, and a reason if it cannot."""

import pytest

from data.extras.reach import read_some
from data.shards.packing import pack
from data.sources.samples import digits

pytestmark = pytest.mark.quick


@pytest.fixture
def index(tmp_path):
    return pack(list(digits(train=False, image_size=16))[:40], tmp_path / "set", name="test", shard_samples=8)


def test_the_first_the_middle_and_the_last_shard_are_read(index, tmp_path):
    reach = read_some(str(tmp_path / "set"))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "set").glob("*.tar"))]
    assert len(sizes) == 5
    assert reach["bytes"] == sizes[0] + sizes[2] + sizes[4]
    assert reach["error"] == ""
    assert reach["seconds"] > 0


def test_a_missing_shard_is_named_with_the_reason(index, tmp_path):
    (tmp_path / "set" / "test-000002.tar").unlink()
    assert read_some(str(tmp_path / "set"))["error"].endswith("test-000002.tar: No such file or directory")


def test_a_missing_set_is_an_answer_and_no_exception(tmp_path):
    reach = read_some(str(tmp_path / "none"))
    assert "this index does not exist" in reach["error"]
    assert reach["bytes"] == 0
