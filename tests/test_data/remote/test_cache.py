"""Remote shards are downloaded once, complete and verified, whatever the storage does; or the error says why not."""

import hashlib
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.decoder import send_heartbeat
from data.errors import DataError, StorageError
from data.loader import TrainLoader
from data.order import Ledger, Order
from data.reader import ShardReader
from data.remote import cache as cache_module
from data.remote import urls
from data.remote.cache import Cache, Prefetcher
from data.remote.config import CacheConfig
from jobs.__main__ import main
from jobs.run.session import run_campaign
from tests.support import campaigns
from tests.support.shards import index_at

PATIENT = {"attempts": 12, "backoff_s": 0.01, "timeout_s": 1.0}


def take(index, cache, steps=8, **options):
    order = Order(index.shard_samples, seed=0, batch_size=40)
    loader = TrainLoader(index, order, image_size=16, slots=range(40), micro_batch=40, cache=cache, **options)
    batches = loader.__iter__()
    taken = [next(batches) for _ in range(steps)]
    batches.close()
    return torch.cat([batch.images for batch in taken])


def test_a_remote_set_gives_the_same_batches_and_each_shard_is_fetched_once(faulty, local, tmp_path):
    # The store works, but on a busy machine a timeout of one second could cause additional requests.
    cache = CacheConfig(str(tmp_path), **PATIENT | {"timeout_s": 30.0})
    assert torch.equal(take(faulty.index, cache, processes=2), take(local, None))
    assert len(faulty.gets) == len(set(faulty.gets)) == 8


def test_failing_short_and_stalling_responses_do_not_change_the_data(faulty, local, tmp_path):
    chance = random.Random(0)
    faulty.fault = lambda path: chance.choice([500, 503, "short", "stall"]) if chance.random() < 0.3 else None
    assert torch.equal(take(faulty.index, CacheConfig(str(tmp_path), **PATIENT)), take(local, None))
    assert len(faulty.gets) > 8


def test_expired_credentials_are_read_again_from_the_environment(faulty, tmp_path):
    answers = iter([403, 403])
    faulty.fault = lambda path: next(answers, None)
    shard = faulty.index.shards[0]
    Cache(CacheConfig(str(tmp_path), **PATIENT)).path(faulty.index.location(0), shard)
    assert len(faulty.gets) == 3


@pytest.mark.parametrize("code", [503, 403])
def test_storage_that_never_answers_is_named_without_secrets(faulty, tmp_path, code, caplog):
    faulty.fault = lambda path: code
    cache = Cache(CacheConfig(str(tmp_path), attempts=3, backoff_s=0.001, timeout_s=1.0))
    outcome = "denied" if code == 403 else "no response"
    with pytest.raises(StorageError, match=rf"://images/set/train-000000.tar: {outcome} after 3 attempts") as error:
        cache.path(faulty.index.location(0), faulty.index.shards[0])
    assert "very-secret" not in str(error.value)
    assert "train-000000.tar: request failed (" in caplog.text
    assert ("check the credentials in the environment" in str(error.value)) == (code == 403)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_error_for_silent_storage_does_not_blame_decoding_processes(faulty, tmp_path):
    faulty.fault = lambda path: "stall"
    cache = CacheConfig(str(tmp_path), attempts=2, backoff_s=0.001, timeout_s=0.3)
    with pytest.raises(StorageError, match=r"://images/set/train-00000\d.tar: no response after 2 attempts"):
        # On a busy machine a new process needs seconds until it answers.
        take(faulty.index, cache, steps=1, processes=1, timeout_s=20.0)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_decoding_processes_wait_for_a_shard_as_long_as_it_grows(faulty, local, tmp_path, monkeypatch):
    """Each shard takes twice `timeout_s` to arrive, in pieces."""
    calls = []

    def slow(*piece):
        calls.append(piece)
        time.sleep(0.5)
        return urls.read_range(*piece)

    size = max(shard.bytes for shard in faulty.index.shards)
    monkeypatch.setattr(cache_module, "read_range", slow)
    monkeypatch.setattr(cache_module, "PIECE", size // 16)
    cache = CacheConfig(str(tmp_path), fetchers=8, **PATIENT)
    index = faulty.index
    with ThreadPoolExecutor(len(index.shards)) as pool:
        # Begin the downloads before the decoding process starts, which would otherwise fetch the shards itself.
        for number, shard in enumerate(index.shards):
            pool.submit(Cache(cache).path, index.location(number), shard)
        while len({url for url, *_ in calls}) < len(index.shards):
            time.sleep(0.01)
        images = take(index, cache, steps=1, processes=1, timeout_s=4.0)
    assert torch.equal(images, take(local, None, steps=1))
    assert len(calls) > 16


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_cache_too_small_for_the_shards_in_use_is_reported_before_the_run(faulty, recipe, local, capsys):
    total = sum(shard.bytes for shard in local.shards)
    options = [f"pretrain.data.train={faulty.index.tables / 'train.index.json'}", "pretrain.data.evaluate=null"]
    for limit, fits in ((total, True), (total - 1, False)):
        assert main(["plan", str(recipe), *options, f"pretrain.data.cache.limit_bytes={limit}"]) == 0
        said = capsys.readouterr().out
        assert "a worker needs 8 remote shards (0.00" in said
        assert (
            f"THEY DO NOT FIT and would be downloaded repeatedly; set data.cache.limit_bytes={total}" in said
        ) != fits


def test_local_shards_are_not_prefetched_and_need_no_cache_space(local, tmp_path):
    """As in a mixture of local and remote sets."""
    order = Order(local.shard_samples, seed=0, batch_size=40)
    prefetcher = Prefetcher(local, order, range(40), 0, CacheConfig(str(tmp_path)))
    prefetcher.fetch(0)
    prefetcher.stop()
    prefetcher.thread.join()
    assert not list(tmp_path.iterdir())


def test_stopping_does_not_wait_for_pending_shards(local, tmp_path, monkeypatch):
    asked = fake_storage(monkeypatch, Path(local.location(0)).read_bytes())
    elsewhere, first = replace(local, directory="s3://b"), threading.Event()
    slow = cache_module.read_range
    monkeypatch.setattr("data.remote.cache.read_range", lambda *piece: (first.set(), time.sleep(0.1), slow(*piece))[2])
    order = Order(local.shard_samples, seed=0, batch_size=40)
    prefetcher = Prefetcher(elsewhere, order, range(40), 0, CacheConfig(str(tmp_path), fetchers=1))
    assert first.wait(60)
    prefetcher.stop()
    prefetcher.thread.join()
    assert len(asked) == 1
    assert [part.stat().st_size > 0 for part in tmp_path.glob("*.part")] == [True]


def test_a_missing_shard_and_a_replaced_one_are_data_errors(faulty, tmp_path):
    cache = Cache(CacheConfig(str(tmp_path), **PATIENT))
    with pytest.raises(DataError, match="this shard or its bucket does not exist"):
        cache.path(f"{faulty.set}/absent.tar", faulty.index.shards[0])
    with pytest.raises(DataError, match="sha256 differs from the index"):
        cache.path(faulty.index.location(0), replace(faulty.index.shards[0], sha256="0" * 64))
    assert not list(tmp_path.glob("*.tar"))
    assert not any(part.stat().st_size for part in tmp_path.glob("*.part"))


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_run_reads_remote_sets_through_the_cache_that_its_recipe_names(faulty, recipe, local, tmp_path):
    cache = tmp_path / "cache"
    loaded = campaigns.load(
        recipe,
        [
            f"pretrain.data.train={faulty.index.tables / 'train.index.json'}",
            f"pretrain.data.cache={{directory: {cache}, backoff_s: 0.01}}",
            "pretrain.data.evaluate=null",
            "pretrain.steps=3",
            "pretrain.optim.schedule.warmup_steps=3",
        ],
    )
    faulty.fault = lambda path: 503 if len(faulty.gets) % 3 == 1 else None
    run_campaign(loaded, only="pretrain", quiet=True)
    said = (loaded.directory(loaded.stage("pretrain")) / "log.txt").read_text()
    assert "cache of this node: 8 remote shards (0.00" in said
    assert "the cache holds 200 GiB" in said
    assert {path.stem for path in cache.glob("*.tar")} <= {shard.sha256 for shard in local.shards}
    assert list(cache.glob("*.tar"))
    assert len(faulty.gets) > 1
    order, ledger = Order(local.shard_samples, seed=0, batch_size=16), Ledger.start(local.digest, 0)
    for step in range(3):
        ledger = ledger.update(step, *order.batch(step))
    done = json.loads((loaded.directory(loaded.stage("pretrain")) / "done.json").read_text())
    assert done["ledger"] == ledger.hex, "the same as of a local copy"


def fake_storage(monkeypatch, content: bytes) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []

    def read(url, start, stop, timeout_s):
        asked.append((start, stop))
        return content[start:stop]

    monkeypatch.setattr(cache_module, "read_range", read)
    monkeypatch.setattr(cache_module, "PIECE", 100)
    return asked


def shard_of(content: bytes) -> cache_module.Shard:
    return cache_module.Shard("x.tar", 1, len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("suffix", "left", "first_asked"),
    [
        pytest.param(".part", slice(0, 650), (650, 750), id="a broken download goes on where it stopped"),
        pytest.param(".part", slice(300, 304), (4, 104), id="a corrupt part is fetched again from the start"),
        pytest.param(".tar", slice(0, 0), (0, 100), id="what a power cut left is fetched again"),
    ],
)
def test_partial_download_is_reused_only_if_it_is_correct(tmp_path, monkeypatch, suffix, left, first_asked):
    content = os.urandom(1000)
    asked = fake_storage(monkeypatch, content)
    shard = shard_of(content)
    (tmp_path / f"{shard.sha256}{suffix}").write_bytes(content[left])
    assert Cache(CacheConfig(str(tmp_path))).path("s3://b/x.tar", shard).read_bytes() == content
    assert asked[0] == first_asked


def test_download_resumed_after_a_day_evicts_neither_its_own_part_nor_a_shard_that_fits(tmp_path, monkeypatch):
    """The limit is two shards: the finished one, and the whole of the one in progress."""
    content = os.urandom(1000)
    asked = fake_storage(monkeypatch, content)
    shard = shard_of(content)
    day_ago = time.time() - 86400
    for path, size in ((tmp_path / f"{shard.sha256}.part", 650), (tmp_path / "other.tar", 1000)):
        path.write_bytes(content[:size])
        os.utime(path, (day_ago, day_ago))
    Cache(CacheConfig(str(tmp_path), limit_bytes=2000)).path("s3://b/x.tar", shard)
    assert asked[0] == (650, 750)
    assert (tmp_path / "other.tar").exists()


def test_the_cache_stays_within_its_limit_and_drops_the_longest_unused(tmp_path, monkeypatch):
    cache = Cache(CacheConfig(str(tmp_path), limit_bytes=2500))
    contents = [os.urandom(1000) for _ in range(4)]
    for number in (0, 1, 0, 2, 3):
        fake_storage(monkeypatch, contents[number])
        cache.path("s3://b/x.tar", shard_of(contents[number]))
        time.sleep(0.01)
    assert {path.stem for path in tmp_path.glob("*.tar")} == {shard_of(contents[n]).sha256 for n in (2, 3)}
    with pytest.raises(DataError, match="exceeds the cache's limit"):
        cache.path("s3://b/x.tar", replace(shard_of(contents[0]), bytes=3000))


def test_shard_evicted_before_it_is_open_is_downloaded_again(tmp_path, local, monkeypatch):
    reader = ShardReader(replace(local, directory="s3://b"), cache=CacheConfig(str(tmp_path)))
    asked = fake_storage(monkeypatch, Path(local.location(0)).read_bytes())
    path, calls = Cache.path, []

    def evicting(self, url, shard):
        fetched = path(self, url, shard)
        calls.append(url)
        if len(calls) == 1:
            fetched.unlink()
        return fetched

    monkeypatch.setattr(Cache, "path", evicting)
    assert reader.read(0, 3) == ShardReader(local).read(0, 3)
    assert len(calls) == 2
    assert asked


def test_shard_evicted_before_its_use_is_recorded_is_downloaded_again(tmp_path, local, monkeypatch):
    cfg = CacheConfig(str(tmp_path))
    asked = fake_storage(monkeypatch, Path(local.location(0)).read_bytes())
    ShardReader(replace(local, directory="s3://b"), cache=cfg).read(0, 3)
    requests_of_a_fetch = len(asked)
    has, evicted = Cache.has, []

    def evicting(cache, shard):
        was_here = has(cache, shard)
        if not evicted:
            evicted.append(cache.directory / f"{shard.sha256}.tar")
            evicted[0].unlink()
        return was_here

    monkeypatch.setattr(Cache, "has", evicting)
    assert ShardReader(replace(local, directory="s3://b"), cache=cfg).read(0, 3) == ShardReader(local).read(0, 3)
    assert evicted
    assert len(asked) == 2 * requests_of_a_fetch


def test_busy_loader_does_not_block_a_download(tmp_path, monkeypatch):
    """A process sends more progress messages than a pipe holds before the loader reads from it."""
    content = os.urandom(200_000)
    fake_storage(monkeypatch, content)
    unread, there = Pipe()
    cache = Cache(CacheConfig(str(tmp_path)))
    cache.progress = lambda: send_heartbeat(there)
    fetching = threading.Thread(target=cache.path, args=("s3://b/x.tar", shard_of(content)), daemon=True)
    fetching.start()
    fetching.join(60)
    assert not fetching.is_alive()
    assert unread.poll()


def test_error_names_a_cache_folder_that_cannot_be_created(local, tmp_path):
    remote_index = index_at(local, "s3://b/set", tmp_path / "i")
    with pytest.raises(
        StorageError, match=r"cannot create the cache folder /proc/x \(.*\); set another cache\.directory"
    ):
        ShardReader(remote_index, cache=CacheConfig("/proc/x")).read(0, 0)


def test_stopped_process_does_not_wait_for_another_download(tmp_path):
    shard = shard_of(b"x")
    with cache_module.locked(tmp_path / f"{shard.sha256}.lock"), pytest.raises(StorageError, match="another process"):
        Cache(CacheConfig(str(tmp_path)), lambda: True).path("s3://b/x.tar", shard)


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (100, {"used.tar", "older.tar", "coming.part", "given-up.part", "x.lock"}),
        (300, {"used.tar", "older.tar", "coming.part", "given-up.part", "x.lock"}),
        (301, {"used.tar", "older.tar", "coming.part", "x.lock"}),
        (501, {"used.tar", "coming.part", "x.lock"}),
        (901, {"coming.part", "x.lock"}),
        (2500, {"coming.part", "x.lock"}),
    ],
)
def test_least_recently_used_shards_and_abandoned_downloads_are_evicted(wanted, left, tmp_path, monkeypatch):
    """2,200 of 2,500 bytes are used; a download that grew within the last hour stays even if space is short."""
    now_s = 1_800_000_000
    ages = {"used.tar": (900, 5), "older.tar": (400, 3000), "coming.part": (700, 3590), "given-up.part": (200, 3610)}
    for name, (size, age_s) in {**ages, "x.lock": (5000, 9999)}.items():
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, (now_s - age_s, now_s - age_s))
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(time_ns=lambda: now_s * 10**9))
    Cache(CacheConfig(str(tmp_path), limit_bytes=2500)).make_room(wanted)
    assert {path.name for path in tmp_path.iterdir()} - {"eviction.lock"} == left


def test_progress_of_another_process_download_is_reported(tmp_path, monkeypatch):
    shard = shard_of(b"x")
    part = tmp_path / f"{shard.sha256}.part"
    sizes = [None, 0, 0, 5, 5, 5, 9, 9]  # sizes of the file at successive polls
    looks = []
    told = []

    def sleep(seconds):
        looks.append(seconds)
        size = sizes[len(looks) - 1]
        if size is not None and not (part.exists() and part.stat().st_size == size):
            part.write_bytes(bytes(size))
        if len(looks) == 5:
            other.keep_alive(part)  # the download waits as its store asks

    monkeypatch.setattr(cache_module, "time", SimpleNamespace(sleep=sleep))
    other = Cache(CacheConfig(str(tmp_path)))
    cache = Cache(CacheConfig(str(tmp_path)), lambda: len(looks) == len(sizes))
    cache.progress = lambda: told.append(part.stat().st_size)
    with cache_module.locked(tmp_path / f"{shard.sha256}.lock"), pytest.raises(StorageError, match="another process"):
        cache.path("s3://b/x.tar", shard)
    assert told == [0, 5, 5, 9]


def test_a_missing_client_is_named_at_once(tmp_path, monkeypatch):
    def filesystem(*_, **options):
        raise ImportError

    monkeypatch.setattr("fsspec.filesystem", filesystem)
    urls.forget_credentials()
    with pytest.raises(DataError, match="gs:// needs a client library; run pip install gcsfs"):
        Cache(CacheConfig(str(tmp_path))).path("gs://b/x.tar", shard_of(b"x"))


@pytest.mark.parametrize(("scheme", "package"), urls.CLIENTS.items())
def test_client_without_its_known_retry_settings_is_named(scheme, package, monkeypatch):
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **options: object())
    urls.forget_credentials()
    with pytest.raises(DataError, match=rf"{package} \S+ .*pip install {package}==2026"):
        urls.client(scheme, 1.0)


def test_documented_tested_clients_match_the_constraints():
    pinned = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={number}" for name, number in urls.TESTED.items()} <= set(pinned)


def test_abandoned_download_is_evicted_but_an_active_one_is_not(tmp_path, monkeypatch):
    contents = [os.urandom(400), os.urandom(401)]
    for age, asks in ((0, 18), (7200, 9)):  # pieces of 100 bytes: both shards twice, or once
        directory = tmp_path / str(age)
        directory.mkdir()
        part = directory / f"{'0' * 64}.part"
        part.write_bytes(bytes(500))
        os.utime(part, (time.time() - age, time.time() - age))
        cache = Cache(CacheConfig(str(directory), limit_bytes=1000))
        asked = 0
        for content in contents * 2:
            pieces = fake_storage(monkeypatch, content)
            cache.path("s3://b/x", shard_of(content))
            asked += len(pieces)
        assert part.exists() == (age == 0)
        assert asked == asks


def test_error_for_a_cache_without_space_has_a_remedy(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    fake_storage(monkeypatch, b"x")
    monkeypatch.setattr("data.remote.cache.os.replace", full)
    with pytest.raises(StorageError, match=r"No space left on device: .* free\)\n.*\n  lower cache\.limit_bytes"):
        Cache(CacheConfig(str(tmp_path))).path("s3://b/x", shard_of(b"x"))


def test_many_at_once_fetch_a_shard_once(tmp_path, monkeypatch):
    content = os.urandom(1000)
    asked = fake_storage(monkeypatch, content)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: Cache(CacheConfig(str(tmp_path))).path("s3://b/x", shard_of(content)), range(8)))
    assert len(asked) == 10


@pytest.mark.parametrize("url", ["pipe:cat /etc/passwd", "http://x/y", "file:///etc/passwd", "ftp://x/y", "gopher://x"])
def test_other_schemes_are_refused(url):
    with pytest.raises(DataError, match="is not supported"):
        urls.read_range(url, 0, 10, 1.0)


def test_urls_are_shown_without_their_secrets():
    assert urls.redacted("https://user:pass@host/a/b.tar?sig=s3cret#x") == "https://host/a/b.tar"
