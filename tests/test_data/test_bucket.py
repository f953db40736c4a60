"""Single files in an object store are complete or absent, and created only once, whatever faults occur."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data import bucket as bucket_module
from data.bucket import Bucket, check_store_url
from data.errors import ConfigError, DataError, StorageError
from data.remote import urls
from tests.support.stores import objects, store

BUCKET = "images"
SCRATCH = Path("/nowhere")  # unused: these tests store only small files
FLAKY = [500, 503, 429, "deaf", "stall"]


def test_another_client_reads_the_uploaded_bytes(run, bucket, tmp_path) -> None:
    content = random.Random(0).randbytes(100_000)
    (tmp_path / "file").write_bytes(content)
    folder = Bucket(run, SCRATCH)
    folder.put("a.json", b"{}")
    folder.put("a.json", b"[]")
    folder.put_file("b/file", tmp_path / "file")
    assert objects(bucket, run) == {"a.json": b"[]", "b/file": content}
    assert folder.list() == {"a.json": 2, "b/file": 100_000}
    assert folder.list("b") == {"b/file": 100_000}
    assert folder.read("a.json") == b"[]"
    assert folder.read("nothing") is None
    assert folder.list("nothing") == {}
    folder.fetch("b/file", tmp_path / "fetched", 100_000)
    assert (tmp_path / "fetched").read_bytes() == content
    folder.delete(["b/file", "nothing"])
    assert objects(bucket, run) == {"a.json": b"[]"}


def test_only_one_of_twenty_writers_creates_a_name(run, bucket) -> None:
    def create(number: int) -> bool:
        return Bucket(run, SCRATCH).create_once("attempts/000001.json", f"{number}".encode())

    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(create, range(20)))
    assert answers.count(True) == 1
    assert objects(bucket, run)["attempts/000001.json"] == str(answers.index(True)).encode()


def test_creator_of_a_name_is_recognised_after_a_lost_response(run, proxy) -> None:
    faults = iter(["deaf"])
    proxy.fault_of_any = lambda method, path: next(faults, None) if method == "PUT" else None
    assert Bucket(run, SCRATCH).create_once("name", b"mine")
    assert not Bucket(run, SCRATCH).create_once("name", b"another's")


def test_refusal_without_a_named_condition_counts_as_an_existing_name(run, proxy) -> None:
    """MinIO responds this way; the proxy's 412 has no content at all."""
    assert Bucket(run, SCRATCH).create_once("name", b"mine")
    asked = []

    def refuse(method: str, path: str) -> int | None:
        if method != "PUT":
            return None
        asked.append(path)
        return 412

    proxy.fault_of_any = refuse
    assert not Bucket(run, SCRATCH).create_once("name", b"another's")
    assert len(asked) == 1
    assert Bucket(run, SCRATCH).create_once("name", b"mine")


def test_store_that_fails_often_only_delays_the_run(run, proxy, bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "PIECE", 10_000)
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 30)
    monkeypatch.setattr(bucket_module, "TIMEOUT_S", 0.5)
    chance = random.Random(0)
    proxy.fault_of_any = lambda method, path: chance.choice(FLAKY) if chance.random() < 0.2 else None
    proxy.fault = lambda path: chance.choice([500, "short"]) if chance.random() < 0.2 else None
    folder = Bucket(run, SCRATCH)
    contents = {f"file-{number}": chance.randbytes(30_000) for number in range(5)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        folder.put_file(name, tmp_path / name)
        assert folder.create_once(f"{name}.json", name.encode())
        folder.fetch(name, tmp_path / "fetched", 30_000)
        assert (tmp_path / "fetched").read_bytes() == content
    assert len(folder.list()) == 10
    folder.delete(f"{name}.json" for name in contents)
    proxy.fault_of_any = lambda method, path: None
    assert objects(bucket, run) == contents


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (503, r"no response after 3 attempts, the last error was \w+; run the same"),
        (403, "denied after 3 attempts: HTTP 403; check the credentials in the environment"),
    ],
)
def test_a_store_that_never_answers_is_named_without_secrets(code, message, run, proxy) -> None:
    proxy.fault_of_any = lambda method, path: code
    with pytest.raises(StorageError, match=f"{run}/a.json: {message}") as error:
        Bucket(run, SCRATCH, 3).put("a.json", b"{}")
    assert "very-secret" not in str(error.value)


def test_each_request_of_a_listing_is_retried_separately(run, proxy, bucket, monkeypatch) -> None:
    """Every other request fails: retrying all requests of a listing together would never succeed."""
    prefix = run.removeprefix(f"s3://{BUCKET}/")
    monkeypatch.setattr(bucket_module, "PAGE_OBJECTS", 10)
    for number in range(25):
        bucket.put_object(Key=f"{prefix}/many/{number:04d}", Body=b"x")
    bucket.put_object(Key=f"{prefix}/many2", Body=b"x")
    bucket.put_object(Key=f"{prefix}/console/", Body=b"")
    asked: list[str] = []

    def fail_every_other(method: str, path: str) -> int | None:
        asked.append(path)
        return 503 if len(asked) % 2 else None

    proxy.fault_of_any = fail_every_other
    assert Bucket(run, SCRATCH, 2).list("many") == {f"many/{number:04d}": 1 for number in range(25)}
    assert len(asked) == 6, "three pages, each asked twice"
    asked.clear()
    assert Bucket(run, SCRATCH, 2).list("empty") == {}
    assert len(asked) == 2
    asked.clear()
    assert Bucket(run, SCRATCH, 2).list("console") == {}
    proxy.fault_of_any = lambda method, path: None
    assert Bucket("s3://no-such-bucket/run", SCRATCH, 2).list() == {}


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", "the credentials have expired: renew them"),
        (403, "InvalidAccessKeyId", "the store does not know this access key: check AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "the credentials are valid, but not for this request: allow s3:GetObject"),
        (403, "RequestTimeTooSkewed", "this machine's clock differs from the store's by more than 15 minutes"),
        (403, "SignatureDoesNotMatch", "the secret key does not belong to the access key: check AWS_ACCESS"),
    ],
)
def test_denial_is_reported_with_its_cause_within_the_limit(status, code, remedy, run, proxy, monkeypatch) -> None:
    monkeypatch.setattr(urls, "DENIED_S", 0.1)
    requests: list[str] = []

    def deny(method: str, path: str) -> tuple[int, str]:
        requests.append(path)
        return status, code

    proxy.fault_of_any = deny
    folder = Bucket(run, SCRATCH, 100_000)
    with pytest.raises(StorageError, match=rf"{run}/a.json: denied after \d+ attempts: {code}; {remedy}") as error:
        folder.put("a.json", b"{}")
    assert error.value.exit_code == 69
    assert "very-secret" not in str(error.value)
    # The next request of this process knows that the limit has passed.
    asked = len(requests)
    with pytest.raises(StorageError, match=f"denied after 1 attempts: {code}"):
        folder.list()
    assert len(requests) == asked + 1
    # Once the store accepts requests again, the next denial gets the whole limit.
    proxy.fault_of_any = lambda method, path: None
    folder.put("a.json", b"{}")
    assert not urls._denied_since


@pytest.mark.parametrize("source", ["environment", "file"])
def test_renewed_credentials_are_used_by_the_next_attempt(source, run, proxy, tmp_path, monkeypatch) -> None:
    """The access key of each request is in its Authorization header; the store accepts only the new key."""
    shared = tmp_path / "credentials"

    def write(key: str) -> None:
        if source == "environment":
            os.environ["AWS_ACCESS_KEY_ID"] = key
        else:
            shared.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")  # restored at the end
    if source == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    write("old")
    urls.forget_credentials()
    denied: list[str] = []

    def deny_old(method: str, path: str) -> tuple[int, str] | None:
        if proxy.access_key == "new":
            return None
        denied.append(proxy.access_key)
        if len(denied) == 3:
            write("new")
        return 400, "ExpiredToken"

    proxy.fault_of_any = deny_old
    Bucket(run, SCRATCH, 100).put("a.json", b"{}")
    urls.forget_credentials()
    assert denied == ["old"] * 3


def test_lowered_number_of_attempts_ends_a_pending_request(run, proxy) -> None:
    folder = Bucket(run, SCRATCH, 1000)
    asked: list[str] = []

    def refuse(method: str, path: str) -> int:
        asked.append(path)
        if len(asked) == 5:
            folder.retry.attempts = 3
        return 503

    proxy.fault_of_any = refuse
    with pytest.raises(StorageError, match="no response after 5 attempts"):
        folder.put("a.json", b"{}")


def test_forked_process_has_a_separate_client(run) -> None:
    Bucket(run, SCRATCH).put("name", b"content")
    child = os.fork()
    if child == 0:
        os._exit(0 if Bucket(run, SCRATCH).read("name") == b"content" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_clients_of_other_stores_support_all_operations_of_a_run(scheme, proxy, tmp_path) -> None:
    """A store that would let two owners commit is refused: Google's emulator ignores conditions."""
    with store(scheme, {}):
        folder = Bucket(f"{scheme}://images/run", SCRATCH)
        (tmp_path / "file").write_bytes(b"content")
        folder.put_file("a/file", tmp_path / "file")
        folder.fetch("a/file", tmp_path / "fetched", 7)
        assert (tmp_path / "fetched").read_bytes() == b"content"
        assert folder.list("a") == {"a/file": 7}
        folder.delete(["a/file", "nothing"])
        assert folder.list("a") == {}
        assert folder.read("a/file") is None
        if scheme == "gs":
            with pytest.raises(StorageError, match="replaced an existing object although the request forbade it"):
                folder.check_exclusive_create("attempts/000000.json")
        else:
            folder.check_exclusive_create("attempts/000000.json")
            assert folder.create_once("name", b"mine")
            assert not folder.create_once("name", b"another's")
            assert folder.read("name") == b"mine"


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://bucket/", "s3://bucket/a/../b", "s3://key:secret@bucket/a"]
)
def test_a_url_that_names_no_folder_in_a_bucket_is_refused(url) -> None:
    with pytest.raises(ConfigError, match="expected a bucket and a folder in it, without") as error:
        check_store_url(url)
    assert "secret" not in str(error.value)


def test_url_has_one_normal_form_and_other_schemes_are_refused() -> None:
    assert check_store_url("s3://bucket/a/b/") == check_store_url("s3://bucket/a/b") == "s3://bucket/a/b"
    with pytest.raises(ConfigError, match="expected a folder, or one of s3://, gs://, az://"):
        check_store_url("https://host/a")


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "./a", "/abs", "//abs", "a//b", "a/./b"])
def test_listing_with_a_name_that_leads_outside_is_refused(key, run, bucket) -> None:
    bucket.put_object(Key=f"{run.removeprefix(f's3://{BUCKET}/')}/{key}", Body=b"attack")
    with pytest.raises(DataError, match="unsafe name"):
        Bucket(run, SCRATCH).list()
