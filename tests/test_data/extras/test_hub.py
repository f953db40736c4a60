"""Sets on the Hugging Face Hub: the same samples as from local files, one commit for all readers, and a secret token.

The Hub is emulated on loopback (tests/support/hub.py); huggingface_hub and our reader are the real ones.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from data.errors import DataError, StorageError
from data.extras.hub import pin
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.index import Index
from data.loader import TrainLoader
from data.order import Order
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from data.remote.urls import Refused, read_range
from data.seal import unseal
from jobs.__main__ import main
from tests.support.hub import TOKEN, Hub, hub

pytestmark = pytest.mark.quick
SET = "hf://datasets/me/photos"
FIRST = "a" * 40
SECOND = "b" * 40


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Pack four shards of 50 digits."""
    return pack(islice(digits(True), 200), tmp_path_factory.mktemp("shards"), shard_samples=50)


@pytest.fixture
def server(local: Index) -> Iterator[Hub]:
    """Serve the shards in the folder train of a data set."""
    with hub({f"train/{shard.name}": Path(local.location(n)) for n, shard in enumerate(local.shards)}) as state:
        yield state


def images(index: Index, cache: CacheConfig | None) -> torch.Tensor:
    """Return the images of all samples, in the order of training."""
    order = Order(index.shard_samples, seed=0, batch_size=40)
    loader = TrainLoader(index, order, image_size=16, slots=range(40), micro_batch=40, cache=cache)
    batches = iter(loader)
    taken = [next(batches).images for _ in range(5)]
    batches.close()
    return torch.cat(taken)


def test_set_on_the_hub_gives_the_digest_and_images_of_the_local_files(server, local, tmp_path) -> None:
    server.page = 3  # the listing takes two pages
    index = build_index(f"{SET}/train/*.tar", output=tmp_path / "index", name="train")
    assert index.digest == local.digest
    assert torch.equal(images(index, CacheConfig(str(tmp_path / "cache"))), images(local, None))
    # Once for the index and once for the cache.
    assert server.bytes == 2 * sum(shard.bytes for shard in local.shards)


@pytest.mark.parametrize("source", [f"{SET}/train", f"{SET}@main/train/train-{{000000..000003}}.tar"])
def test_folder_and_named_tars_are_found_with_one_listing(source, server, local, tmp_path) -> None:
    assert build_index([source], output=tmp_path, name="train").digest == local.digest
    # huggingface_hub lists the folder, and its parent to see that it is a folder.
    assert server.requests["tree"] <= 2


def test_readers_keep_the_commit_of_the_first_index_after_the_branch_has_moved(server, local, tmp_path) -> None:
    index = build_index(f"{SET}/train/*.tar", output=tmp_path, name="train")
    files = dict(server.commits[FIRST])
    del files["train/train-000003.tar"]
    server.commits[SECOND] = files
    server.main = SECOND
    assert index.directory == f"{SET}@{FIRST}/train"
    assert unseal((tmp_path / "hub.json").read_bytes()) == {"datasets/me/photos@main": FIRST}
    assert build_index(f"{SET}/train/*.tar", output=tmp_path, name="train").digest == local.digest
    assert len(build_index(f"{SET}/train/*.tar", output=tmp_path / "new", name="train").shards) == 3
    assert build_index(f"{SET}@{FIRST}/train", output=tmp_path / "old", name="train").digest == local.digest


def test_damaged_record_of_the_commit_is_refused_and_never_replaced(server, local, tmp_path) -> None:
    build_index(f"{SET}/train/*.tar", output=tmp_path, name="train")
    record = tmp_path / "hub.json"
    whole = record.read_bytes()
    server.requests.clear()
    for place in range(len(whole)):
        record.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"hub\.json: .*\n  restore the file; or delete it"):
            pin(f"{SET}/train/*.tar", tmp_path, lambda url, ask: ask(), 30.0)
    assert not server.requests, "no commit was requested in place of the recorded one"


def test_index_of_local_tars_that_runs_read_from_the_hub_names_its_commit(server, local, tmp_path) -> None:
    index = build_index(local.directory, output=tmp_path, name="train", at=f"{SET}/train")
    assert index.directory == f"{SET}@{FIRST}/train"
    assert server.bytes == 0


def test_requests_wait_as_long_as_the_hub_asks_and_do_not_count_as_attempts(server, tmp_path) -> None:
    index = build_index(f"{SET}/train/*.tar", output=tmp_path / "index", name="train")
    server.requests.clear()
    server.throttled = 0.5
    cache = Cache(CacheConfig(str(tmp_path / "cache"), attempts=1))
    server.key = "other"  # all signed addresses have expired
    for number, shard in enumerate(index.shards):
        cache.path(index.location(number), shard)
    assert server.requests["429"] > 0
    assert server.too_early == 0


def test_expired_address_is_replaced_without_an_attempt(server, local, tmp_path) -> None:
    url = f"{SET}@{FIRST}/train/train-000000.tar"
    content = Path(local.location(0)).read_bytes()
    assert read_range(url, 0, 100, 5.0) == content[:100]
    assert read_range(url, 100, 200, 5.0) == content[100:200]
    assert server.requests == {"resolve": 1, "storage": 2}
    server.key = "other"
    assert read_range(url, 200, 300, 5.0) == content[200:300]
    assert server.requests == {"resolve": 2, "storage": 3, "expired": 1}


def test_token_is_sent_to_the_hub_but_not_to_its_storage_and_is_in_no_file(
    server, local, tmp_path, monkeypatch, caplog, capfd
) -> None:
    server.is_gated = server.is_private = True
    server.throttled = 0.2
    server.retry_after = "0"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["index", f"{SET}/train/*.tar", "--output", str(tmp_path / "index")]) == 0
    assert server.tokens == {f"Bearer {TOKEN}"}
    assert server.tokens_at_storage == set()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    output = capfd.readouterr()
    for text in (*written, caplog.text.encode(), output.out.encode(), output.err.encode()):
        assert TOKEN.encode() not in text
        assert b"signature=" not in text


def test_gated_set_without_access_is_refused_with_the_page_to_open(server, tmp_path, capsys) -> None:
    server.is_gated = True
    assert main(["index", f"{SET}/train/*.tar", "--output", str(tmp_path / "index")]) == 69
    message = capsys.readouterr().err
    assert f"error: {SET}: access denied (HF_TOKEN is not set): the data set is gated: accept its conditions" in message
    assert f"https://localhost:{server.port}/datasets/me/photos" in message
    assert server.bytes == 0


def test_access_that_is_lost_during_a_run_is_named(server, tmp_path, monkeypatch) -> None:
    index = build_index(f"{SET}/train/*.tar", output=tmp_path / "index", name="train")
    server.is_gated = True
    server.key = "other"
    cache = Cache(CacheConfig(str(tmp_path / "cache"), attempts=2, backoff_s=0.001))
    with pytest.raises(StorageError, match=r"train-000000.tar: denied after 2 attempts: GatedRepo; the data set"):
        cache.path(index.location(0), index.shards[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{SET}s/train/*.tar", r"photoss: the Hub has no such data set, or it is private \(HF_TOKEN is not set\)"),
        (f"{SET}@v9/train/*.tar", r"photos: there is no revision v9\n.*\n  check the part after @"),
        (f"{SET}/train/nine.tar", r"/train/nine.tar: this shard or its bucket does not exist"),
        (f"{SET}/test/*.tar", r"/test/\*.tar: found no \*.tar files"),
    ],
)
def test_missing_sets_revisions_and_files_are_data_errors(source, message, server, tmp_path) -> None:
    with pytest.raises(DataError, match=message):
        build_index([source], output=tmp_path, name="train")


@pytest.mark.parametrize("url", ["hf://me/model/a.tar", "hf://datasets/photos", "hf://buckets/me/b/a.tar"])
def test_urls_of_other_things_are_refused(url, server, tmp_path) -> None:
    with pytest.raises(Refused, match=r"expected hf://datasets/OWNER/NAME/train/\*.tar"):
        build_index([url], output=tmp_path, name="train")


def test_endpoint_without_tls_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1/hub")
    with pytest.raises(DataError, match=r"HF_ENDPOINT is http://localhost:1/hub, expected https://"):
        build_index(f"{SET}/train", output=tmp_path, name="train")


def test_missing_package_is_named_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"hf:// needs a client library; run pip install huggingface_hub"):
        build_index(f"{SET}/train", output=tmp_path, name="train")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_48_readers_of_a_throttling_hub_need_no_restart_and_no_more_bytes() -> None:
    """`make soak` runs the same for an hour."""
    command = [sys.executable, "-m", "tests.support.hub_soak", "--minutes", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
