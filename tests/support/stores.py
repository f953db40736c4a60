"""Emulated object stores for each protocol on loopback, and a proxy that injects faults."""

import base64
import http.client
import http.server
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from data.remote import urls

Files = dict[str, Path]  # key → file
Fault = int | str | bytes | tuple[int, str] | None
AT_ONCE = 1 << 16  # bytes per write of the proxy


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A request handler that logs nothing, with a method for complete responses."""

    def answer(self, status: int, content: bytes, fields: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a server in the block, with TLS if a context is given, and yield its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        # The handshake takes place in the thread of the request, so that a silent client does not block others.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class Proxy:
    """Forwards HTTP byte for byte unless `fault` returns a fault; counts the GETs of each object.

    `fault` receives the path of every read and returns None or a fault:
    - an HTTP status, or a pair of a status and S3's error code, such as (400, "ExpiredToken");
    - "short": half of the content, under the full content length;
    - "stall": no response for 1.5 s;
    - "whole": the complete object, as from a store that ignores ranges;
    - bytes: the content of a response with status 200, such as an error page.
    `fault_of_any` receives the method and path of every other request. It may also return "torn" (the store receives
    half of the content) or "deaf" (the store executes the request, but its response is lost).
    `pace` is called before every few bytes of a read are sent, so that it can delay them.
    """

    def __init__(self) -> None:
        self.upstream = 0  # port of the store
        self.fault: Callable[[str], Fault] = lambda path: None
        self.fault_of_any: Callable[[str, str], Fault] = lambda method, path: None
        self.pace: Callable[[int], object] = lambda piece_bytes: None
        self.gets: list[str] = []
        self.access_key = ""  # S3's, of the last request
        # A real store checks and writes a name atomically; moto's threads could all check before one writes.
        self.one_write_at_a_time = threading.Lock()

    def handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        """Return the class of request handlers."""
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def handle_request(self):
                # "AWS4-HMAC-SHA256 Credential=KEY/20261128/us-east-1/s3/aws4_request, …"
                proxy.access_key = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
                is_read = self.command == "GET" and ("Range" in self.headers or "x-ms-range" in self.headers)
                if is_read:
                    fault = proxy.fault(self.path)
                    proxy.gets.append(self.path)
                else:
                    fault = proxy.fault_of_any(self.command, self.path)
                body = self.body()
                if fault == "stall":
                    time.sleep(1.5)
                elif fault == "deaf":
                    self.pass_on(body)
                elif isinstance(fault, int | tuple):
                    status, code = fault if isinstance(fault, tuple) else (fault, "")
                    content = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
                    if self.command == "HEAD":
                        content = b""
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                elif isinstance(fault, bytes):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(fault)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(fault)
                elif fault == "whole":
                    del self.headers["Range"]
                    self.answer(self.pass_on(body))
                elif fault == "torn":
                    self.answer(self.pass_on(body[: len(body) // 2]))
                else:
                    self.answer(self.pass_on(body), is_short=fault == "short")

            def body(self) -> bytes:
                # botocore sends a put's content only after "100 Continue".
                if "Expect" in self.headers:
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    del self.headers["Expect"]
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def pass_on(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
                if "If-None-Match" not in self.headers:
                    return self.pass_on_at_once(body)
                with proxy.one_write_at_a_time:
                    return self.pass_on_at_once(body)

            def pass_on_at_once(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", proxy.upstream)
                fields = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
                if body or "Content-Length" in self.headers:
                    fields["Content-Length"] = str(len(body))
                connection.request(self.command, self.path, body, fields)
                answer = connection.getresponse()
                return answer, answer.read()

            def answer(self, answered: tuple[http.client.HTTPResponse, bytes], is_short: bool = False) -> None:
                answer, content = answered
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.end_headers()
                if is_short:
                    content = content[: len(content) // 2]
                for start in range(0, len(content), AT_ONCE):
                    piece = content[start : start + AT_ONCE]
                    if self.command == "GET":
                        proxy.pace(len(piece))
                    self.wfile.write(piece)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request

            def log_message(self, *_):
                pass

        return Handler


@contextmanager
def s3(proxy: Proxy, port: int, files: Files) -> Iterator[None]:
    """Run moto, and point `AWS_ENDPOINT_URL` to it."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    proxy.upstream = server.get_host_and_port()[1]
    # All moto servers of a process share their buckets, so clear those of earlier servers first.
    reset = http.client.HTTPConnection("127.0.0.1", proxy.upstream)
    reset.request("POST", "/moto-api/reset")
    assert reset.getresponse().status == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="images")
        for key, path in files.items():
            client.upload_file(str(path), "images", key)
        yield
    server.stop()


@contextmanager
def gs(proxy: Proxy, port: int, files: Files) -> Iterator[None]:
    """Run gcp-storage-emulator, and point `STORAGE_EMULATOR_HOST` to it."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        pytest.importorskip("gcsfs")
        server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="images")
        server.start()
        proxy.upstream = server._api._httpd.server_address[1]
        client = urls.client("gs", 5.0)
        for key, path in files.items():
            client.pipe_file(f"images/{key}", path.read_bytes())
        yield
        server.stop()


@contextmanager
def az(proxy: Proxy, port: int, files: Files) -> Iterator[None]:
    """Serve the part of Azure's blob API that the client needs; `AZURE_STORAGE_CONNECTION_STRING` points to it."""
    pytest.importorskip("adlfs")
    contents = {key: path.read_bytes() for key, path in files.items()}
    lock = threading.Lock()

    class Handler(QuietHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            key = unquote(url.path.removeprefix("/account/images").lstrip("/"))
            if query.get("comp") == ["list"]:
                prefix = query.get("prefix", [""])[0]
                self.answer(200, listing(contents, prefix), {"Content-Type": "application/xml"})
            elif key not in contents:
                self.answer(404, b"", {"x-ms-error-code": "BlobNotFound"})
            else:
                self.answer_blob(contents[key])

        def do_PUT(self):
            key = unquote(urlsplit(self.path).path.removeprefix("/account/images/"))
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            # Like the real Put Blob: 409 BlobAlreadyExists if `If-None-Match: *` fails.
            with lock:
                is_refused = self.headers.get("If-None-Match") == "*" and key in contents
                if not is_refused:
                    contents[key] = content
            if is_refused:
                self.answer(409, b"", {"x-ms-error-code": "BlobAlreadyExists"})
            else:
                self.answer(201, b"", {"ETag": '"1"', "Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT"})

        def do_DELETE(self):
            key = unquote(urlsplit(self.path).path.removeprefix("/account/images/"))
            is_there = contents.pop(key, None) is not None
            self.answer(202 if is_there else 404, b"", {} if is_there else {"x-ms-error-code": "BlobNotFound"})

        def answer_blob(self, content: bytes) -> None:
            status = 200
            fields = {"ETag": '"1"', "Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT", "x-ms-blob-type": "BlockBlob"}
            if "x-ms-range" in self.headers:
                status = 206
                first, last = map(int, self.headers["x-ms-range"].removeprefix("bytes=").split("-"))
                fields["Content-Range"] = f"bytes {first}-{min(last + 1, len(content)) - 1}/{len(content)}"
                content = content[first : last + 1]
            self.answer(status, content, fields)

        do_HEAD = do_GET

    key = base64.b64encode(b"very-secret").decode()
    with served(Handler) as upstream, pytest.MonkeyPatch.context() as patch:
        proxy.upstream = upstream
        patch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName=account;AccountKey={key};BlobEndpoint=http://127.0.0.1:{port}/account",
        )
        yield


def listing(contents: dict[str, bytes], prefix: str) -> bytes:
    """Return Azure's XML listing of the blobs with a prefix."""
    blobs = ""
    for key, content in sorted(contents.items()):
        if key.startswith(prefix):
            blobs += (
                f"<Blob><Name>{escape(key)}</Name><Properties><Content-Length>{len(content)}</Content-Length>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            )
    return f"<EnumerationResults ContainerName='images'><Blobs>{blobs}</Blobs></EnumerationResults>".encode()


@contextmanager
def store(scheme: str, files: Files, proxy: Proxy | None = None) -> Iterator[Proxy]:
    """Run a store with the files in its bucket `images`, and a proxy to which the environment directs clients.

    Clients of another test's store are forgotten, because they keep its address.
    """
    proxy = proxy or Proxy()
    start = {"s3": s3, "gs": gs, "az": az}[scheme]
    urls.forget_credentials()
    try:
        with served(proxy.handler()) as port, start(proxy, port, files):
            yield proxy
    finally:
        urls.forget_credentials()


def objects(bucket: Any, run: str) -> dict[str, bytes]:
    """Return the objects under a run's URL by name, read with boto3."""
    prefix = run.removeprefix(f"s3://{bucket.name}/") + "/"
    return {
        entry.key.removeprefix(prefix): entry.get()["Body"].read() for entry in bucket.objects.filter(Prefix=prefix)
    }
