"""Keys with any characters, and error pages with a success status, as some stores and proxies send them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.bucket import Bucket
from data.checks import redacted
from data.error_pages import words_of
from data.errors import DataError, StorageError
from data.extras.shards.indexing import build_index
from data.reader import ShardReader
from data.remote.config import CacheConfig
from jobs.__main__ import main
from tests.support.stores import Proxy, store
from tests.support.tars import picture, tar_of

# Characters of keys. An emulator of gs reads `;` as the end of a path.
LETTERS = [
    "?",
    "#",
    "%",
    "%20",
    "+",
    " ",
    "&",
    "=",
    "'",
    '"',
    "\\",
    ":",
    "@",
    "~",
    "ünï",
    "🐱",
    "[1]",
    "{b}",
    "^|<d>",
    ";",
]
EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code>'
    b"<Message>Request has expired</Message><RequestId>4442587FB7D0A2F9</RequestId></Error>"
)
SIGN_IN = b"<!DOCTYPE html>\n<html><head><title>Sign in to the proxy</title></head><body><h1>Hello</h1></body></html>\n"
QUOTA = b'{"error": {"code": 403, "message": "Quota exceeded"}}'
PAGES = {
    EXPIRED: "AccessDenied: Request has expired",
    SIGN_IN: "Sign in to the proxy",
    QUOTA: "403: Quota exceeded",
    b"<html><body><h1>502 Bad Gateway</h1></body></html>": "502 Bad Gateway",
    b"<html><body>try later</body></html>": "try later",
    b'{"message": "no healthy upstream"}': "no healthy upstream",
    b'{"Code": "SlowDown", "Message": "Reduce your request rate"}': "SlowDown: Reduce your request rate",
    b"\xef\xbb\xbf\r\n<HTML><TITLE>\n 503  busy </TITLE></HTML>": "503 busy",
}


def a_tar(folder: Path) -> Path:
    entries = []
    for number in range(3):
        entries += [(f"{number}.jpg", picture(number)), (f"{number}.cls", b"%d" % (number % 2))]
    (folder / "a.tar").write_bytes(tar_of(entries))
    return folder / "a.tar"


@pytest.fixture(params=["s3", "gs", "az"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The scheme of a store with a folder for each of LETTERS, whose tar has it in its name too."""
    tar = a_tar(tmp_path)
    with store(request.param, {f"set{letters}/t{letters}0.tar": tar for letters in LETTERS}):
        yield request.param


def test_keys_of_any_characters_are_indexed_and_read(named: str, tmp_path: Path) -> None:
    cache = CacheConfig(str(tmp_path / "cache"), attempts=2, backoff_s=0.01, timeout_s=5.0)
    wrong = []
    for number, letters in enumerate(LETTERS):
        if named == "gs" and letters == ";":
            continue
        folder = f"{named}://images/set{letters}"
        # One of three forms of a source for each of the letters.
        sources: list[str | list[str]] = [folder, [f"{folder}/t{letters}0.tar"], f"{folder}/*.tar"]
        source = sources[number % 3]
        index = build_index(source, output=tmp_path / str(number), name="train", cache=cache)
        reader = ShardReader(index, cache=cache)
        content = [reader.read(0, sample)[:2] for sample in range(3)]
        names = [shard.name for shard in index.shards]
        if content != [(str(sample), picture(sample)) for sample in range(3)] or names != [f"t{letters}0.tar"]:
            wrong.append((source, names))
    assert not wrong


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/what?/a#1.tar", "s3://b/what?/a#1.tar"),
        ("gs://b/a.tar#3?", "gs://b/a.tar#3?"),
        ("s3://me:secret@b/a.tar", "s3://b/a.tar"),
        ("az://b/a.tar?sv=2021&sig=secret", "az://b/a.tar"),
        ("s3://b/a.tar?X-Amz-Signature=secret", "s3://b/a.tar"),
        ("https://h/a.tar?secret", "https://h/a.tar"),
        ("https://h/a.tar#secret", "https://h/a.tar"),
    ],
)
def test_signatures_are_hidden_and_characters_of_keys_are_not(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize("page", PAGES)
def test_the_words_of_an_error_page_are_quoted(page: bytes) -> None:
    assert words_of(page) == PAGES[page]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"label": 3}',
        b'{"error": ',
        EXPIRED[:40],
        b"\x1b[2J",
        b"cat",
        picture(3),
        tar_of([("<html>.jpg", picture(1))]),
        tar_of([("{.cls", b"1")]),
    ],
)
def test_other_contents_are_not_mistaken_for_error_pages(content: bytes) -> None:
    assert words_of(content) == ""


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Proxy]:
    with store("s3", {"set/a.tar": a_tar(tmp_path)}) as proxy:
        yield proxy


@pytest.mark.parametrize("page", [EXPIRED, SIGN_IN, QUOTA])
@pytest.mark.parametrize("is_for_sizes_too", [False, True])
def test_an_error_page_instead_of_a_tar_is_quoted_at_once(
    s3: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], page: bytes, is_for_sizes_too: bool
) -> None:
    s3.fault = lambda path: page
    if is_for_sizes_too:
        s3.fault_of_any = lambda method, path: page if method == "HEAD" else None
    out = ["--output", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(["index", "s3://images/set/a.tar", *out]) == 69
    assert f"sent an error page: {PAGES[page]}" in capsys.readouterr().err
    assert len(s3.gets) == 1  # with retries, this would take a minute


BROKEN_HTML = b"<html><body><h1>502 Bad Gateway</h1><hr></body></html>"  # no XML, as most pages of servers


@pytest.mark.parametrize("page", [EXPIRED, SIGN_IN, QUOTA, BROKEN_HTML])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_error_page_instead_of_a_list_is_quoted_at_once(
    scheme: str, page: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(page)
    assert words
    with store(scheme, {"set/a.tar": a_tar(tmp_path)}) as proxy:
        asked: list[str] = []
        # Azure's client first asks with HEAD whether the folder is an object; such an answer has no words.
        is_missing = 404 if scheme == "az" else None
        proxy.fault_of_any = lambda method, path: is_missing if method == "HEAD" else asked.append(path) or page
        for source in (f"{scheme}://images/set", f"{scheme}://images/set/*.tar"):
            asked.clear()
            assert main(["index", source, "--output", str(tmp_path / "out")]) == 69
            message = capsys.readouterr().err
            assert f"{source}: instead of the expected response, the store sent an error page: {words}" in message
            assert len(asked) == 1
        # The files of a run are listed by another request.
        asked.clear()
        with pytest.raises(StorageError, match=f"sent an error page: {words}"):
            Bucket(f"{scheme}://images/run", tmp_path).list("stage")
        assert len(asked) == 1


def test_an_error_that_arrives_after_a_copy_has_begun_is_retried(tmp_path: Path) -> None:
    """S3 answers 200 to the end of a large upload before it has joined the parts; the body may report an error."""
    with store("s3", {}) as proxy:
        bucket = Bucket("s3://images/run", tmp_path)
        bucket.retry.backoff_s = 0.01
        ends: list[str] = []

        def fault(method: str, path: str) -> bytes | None:
            if method == "POST" and "uploadId=" in path:
                ends.append(path)
            is_first = method == "POST" and "uploadId=" in path and len(ends) == 1
            return b"<Error><Code>InternalError</Code><Message>Try again.</Message></Error>" if is_first else None

        proxy.fault_of_any = fault
        (tmp_path / "large").write_bytes(bytes(12 << 20))
        bucket.request(
            "large",
            lambda client, path: client.put_file(str(tmp_path / "large"), path, chunksize=5 << 20, max_concurrency=1),
        )
        assert len(ends) == 2
        assert bucket.list() == {"large": 12 << 20}


@pytest.mark.parametrize("content", [EXPIRED, SIGN_IN, QUOTA])
def test_an_object_of_a_run_may_have_the_content_of_an_error_page(content: bytes, tmp_path: Path) -> None:
    for scheme in ("s3", "gs", "az"):
        with store(scheme, {}):
            bucket = Bucket(f"{scheme}://images/run", tmp_path)
            bucket.put("stage/status.json", content)
            assert bucket.read("stage/status.json") == content
            assert bucket.list("stage") == {"stage/status.json": len(content)}


def test_an_error_page_instead_of_a_known_shard_is_quoted_at_once_and_not_stored(s3: Proxy, tmp_path: Path) -> None:
    cache = CacheConfig(str(tmp_path / "cache"), timeout_s=5.0)
    index = build_index("s3://images/set", output=tmp_path / "index", name="train", cache=cache)
    s3.fault = lambda path: EXPIRED
    s3.gets.clear()
    with pytest.raises(StorageError, match="sent an error page: AccessDenied: Request has expired"):
        ShardReader(index, cache=cache).read(0, 0)
    assert len(s3.gets) == 1
    # The store has recovered: nothing of the page is left in the cache.
    s3.fault = lambda path: None
    assert ShardReader(index, cache=cache).read(0, 2)[:2] == ("2", picture(2))


def test_an_error_page_saved_as_a_tar_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(SIGN_IN)
    with pytest.raises(DataError, match="an error page was saved as a tar: Sign in to the proxy"):
        build_index(tmp_path, name="train")
