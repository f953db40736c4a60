"""The JSON of an index: read from its folder, wherever that is, and refused if it was altered."""

import json
import shutil

import pytest

from data.errors import DataError
from data.index.document import load_index, seal_of
from data.index.index import digest_of
from data.index.shard import Shard
from tests.support.hostile_names import HOSTILE_NAMES
from tests.support.shards import digits, write_set

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path):
    write_set(list(digits(train=False, image_size=16))[:9], tmp_path / "set", name="t", names=tuple("abcdefghij"))
    return tmp_path / "set"


def test_json_describes_the_packed_data(folder):
    content = json.loads((folder / "t.index.json").read_text())
    index = load_index(folder)
    assert content["samples"] == index.samples == 9
    assert sum(content["class_counts"]) == 9
    assert index.names == tuple("abcdefghij")
    assert index == load_index(folder / "t.index.json")


def test_index_and_tars_may_move_together(folder, tmp_path):
    before = load_index(folder)
    shutil.move(folder, tmp_path / "moved")
    after = load_index(tmp_path / "moved")
    assert after.digest == before.digest
    assert after.location(0) == str(tmp_path / "moved" / "t-000000.tar")


@pytest.mark.parametrize(("field", "value"), [("class_counts", [9]), ("directory", "/other"), ("names", [])])
def test_edited_field_is_detected(field, value, folder):
    path = folder / "t.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError):
        load_index(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "expected one .*found none, and neither tars nor images"),
        (["a.tar"], "tars without an index\n  run python -m jobs index"),
        (["t.index.json.partial"], "belongs to an unfinished packing or indexing"),
        (["cat/1.jpg"], "images in 1 folders, which must be packed first"),
        (["1.jpg"], "images without class folders"),
        (["a.index.json", "b.index.json"], "found a.index.json, b.index.json"),
    ],
)
def test_error_for_a_folder_without_an_index_names_the_command(files, message, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        load_index(tmp_path)


def test_a_missing_index_and_a_url_are_refused(tmp_path):
    with pytest.raises(DataError, match="this index does not exist"):
        load_index(tmp_path / "none")
    with pytest.raises(DataError, match="an index must be local"):
        load_index("s3://bucket/train")


def forge(path, column, value):
    """Replace one column of the first shard, with a correct seal and digest, as an attacker would."""
    content = json.loads(path.read_text())
    content["shards"][0][column] = value
    shards = [Shard(*row) for row in content["shards"]]
    content["digest"] = digest_of(shards, content["class_counts"], content["names"])
    content["seal"] = seal_of(content)
    path.write_text(json.dumps(content))


# An absolute shard name is allowed, because an index may be in another folder than its tars.
@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name not in ("/abs", "//abs")])
def test_sealed_index_with_an_unsafe_shard_name_is_refused(name, folder):
    forge(folder / "t.index.json", 0, name)
    with pytest.raises(DataError, match="unsafe name"):
        load_index(folder)


@pytest.mark.parametrize("name", ["s3://bucket/../a.tar", "https://host//../a.tar", "/data/../../a.tar"])
def test_sealed_index_with_dots_in_a_url_or_absolute_path_is_refused(name, folder):
    forge(folder / "t.index.json", 0, name)
    with pytest.raises(DataError, match="unsafe name"):
        load_index(folder)


@pytest.mark.parametrize("digest", ["../../outside", "/abs", "", None, "0" * 63 + "\0"])
def test_sealed_index_whose_sha256_is_a_path_is_refused(digest, folder):
    """A remote shard is stored under its sha256 in the cache."""
    forge(folder / "t.index.json", 3, digest)
    with pytest.raises(DataError, match="is not a sha256"):
        load_index(folder)
