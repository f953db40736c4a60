"""Tars at https:// are read and indexed from public addresses only."""

import http.client
import http.server
import socket
import ssl
import threading
from itertools import islice
from pathlib import Path

import pytest

from data.errors import DataError, StorageError
from data.extras import https
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.listing import size_of
from data.extras.sources.samples import digits
from data.remote import urls
from tests.support.certificates import certificate
from tests.support.stores import QuietHandler, served

SIGN_IN = b"<!DOCTYPE html>\n<html><head><title>Sign in to the proxy</title></head><body><h1>Hello</h1></body></html>\n"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "169.254.169.254", "10.0.0.1", "[::1]", "0x7f.1", "0.0.0.0"]
)
def test_private_addresses_are_refused_before_a_connection(host, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("connected"))
    with pytest.raises(DataError, match="is not a public address"):
        urls.read_range(f"https://{host}/x", 0, 10, 1.0)


def test_public_address_preferred_by_the_resolver_is_used(monkeypatch):
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 443)) for ip in ("1.1.1.1", "8.8.8.8")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    monkeypatch.setattr(socket, "create_connection", lambda address, *_: address)
    assert https.connect_public(("host", 443), 1.0) == ("1.1.1.1", 443)


def test_https_is_read_and_indexed_and_a_redirect_to_a_private_address_is_refused(tmp_path, monkeypatch):
    local = pack(islice(digits(True), 400), tmp_path / "shards", shard_samples=50)
    files = {f"/{shard.name}": Path(local.location(n)).read_bytes() for n, shard in enumerate(local.shards)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", f"https://127.0.0.1:{self.server.server_address[1]}/x")
                self.end_headers()
                return
            if self.path in ("/mute.tar", "/whole.tar"):
                self.send_response(200)
                if self.path == "/whole.tar":
                    self.send_header("Content-Length", "1000000")
                return self.end_headers()
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            content = files[self.path]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}")
            self.end_headers()
            self.wfile.write(content[first : last + 1])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "both.pem"))
    monkeypatch.setenv("PATCHLINE_PRIVATE_HOSTS", "localhost")
    url = f"https://localhost:{server.server_address[1]}"
    name, content = next(iter(files.items()))
    assert urls.read_range(f"{url}{name}", 10, 20, 5.0) == content[10:20]
    index = build_index([f"{url}/train-{{000000..000007}}.tar"], output=tmp_path / "index", name="train")
    assert (index.digest, index.directory) == (local.digest, url)
    with pytest.raises(DataError, match=r"/mute.tar: the server does not report the file size; copy"):
        build_index([f"{url}/mute.tar"], output=tmp_path / "none", name="train")
    assert size_of(f"{url}/whole.tar", 5.0) == 1_000_000
    with pytest.raises(DataError, match=r"/whole.tar: the server ignores byte ranges; copy"):
        urls.read_range(f"{url}/whole.tar", 10, 20, 5.0)
    with pytest.raises(DataError, match=r"127.0.0.1 is not a public address"):
        urls.read_range(f"{url}/away", 0, 10, 5.0)
    server.shutdown()
    server.server_close()


def test_an_error_page_of_a_web_server_is_quoted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server speaks plain HTTP, because only the content of its answers matters here."""

    class Handler(QuietHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(SIGN_IN)))
            self.end_headers()
            if self.headers["Range"] != "bytes=0-0":
                self.wfile.write(SIGN_IN)

    monkeypatch.setenv("PATCHLINE_PRIVATE_HOSTS", "127.0.0.1")
    monkeypatch.setattr(https.PublicConnection, "connect", http.client.HTTPConnection.connect)
    with served(Handler) as port:
        for place in ("a.tar", "with space/ünï.tar", "a%20b.tar"):
            with pytest.raises(StorageError, match="sent an error page: Sign in to the proxy"):
                build_index([f"https://127.0.0.1:{port}/{place}"], output=tmp_path, name="train")
        for first in (0, 512):
            with pytest.raises(StorageError, match="sent an error page: Sign in to the proxy"):
                urls.read_range(f"https://127.0.0.1:{port}/a.tar", first, first + 512, 5.0)
