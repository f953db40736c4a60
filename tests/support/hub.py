"""An emulated Hugging Face Hub on loopback: https, one data set, and a storage host with signed addresses that expire.

It serves what huggingface_hub and our reader request: /api/datasets/ID (revisions), …/auth-check, …/tree (in pages),
and /datasets/ID/resolve, which redirects to a second server under an address that expires. Some requests are answered
with 429 and Retry-After. Every request is recorded.

    with hub({"train/a.tar": Path("a.tar")}) as server:
        index = build_index("hf://datasets/me/photos/train/*.tar", output="indexes/train")
"""

import hashlib
import http.server
import json
import random
import secrets
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from data.extras import hub as client
from data.remote import urls
from tests.support.certificates import certificate
from tests.support.stores import QuietHandler, served

REPOSITORY = "me/photos"
TOKEN = "hf_tokenThatMustNotAppearAnywhere0123"
Response = tuple[int, bytes, dict[str, str]]


class Hub:
    """The state of the emulated Hub; tests change its attributes and read what was requested."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.commits = {"a" * 40: dict(files)}  # commit → files
        self.main = "a" * 40
        self.page = 1000  # entries of a page of the listing
        self.is_gated = False  # files only with TOKEN
        self.is_private = False  # everything only with TOKEN
        self.has_lfs = True  # the listing has the sha256 of files
        self.throttled = 0.0  # fraction of requests that are refused with 429
        self.retry_after = "1"  # seconds
        self.expires_s = 3600.0  # life of a signed address
        self.most_uses = 1 << 30  # requests after which a signed address counts as expired
        self.uses: Counter[str] = Counter()  # by signature
        self.chance = random.Random(0)
        self.requests: Counter[str] = Counter()  # by kind: info, auth, tree, resolve, storage, 429, expired
        self.tokens: set[str] = set()  # Authorization headers that the Hub received
        self.tokens_at_storage: set[str] = set()  # the same for the storage
        self.refused_at: dict[str, float] = {}  # path → time of its last 429
        self.too_early = 0  # requests for a path within the pause of its 429
        self.bytes = 0  # bytes of files that were sent
        self.lock = threading.Lock()
        self.key = secrets.token_hex(8)
        self.port = 0
        self.storage_port = 0

    # ------------------------------------------------------------------------------------ the Hub's answers

    def answer(self, path: str, authorization: str) -> Response:
        """Return the response to a request to the Hub."""
        self.tokens.add(authorization)
        if self.refuses(path):
            return 429, b"{}", {"Retry-After": self.retry_after}
        url = urlsplit(path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        has_token = authorization == f"Bearer {TOKEN}"
        if parts[:1] == ["api"]:
            parts = parts[1:]
        repository = "/".join(parts[1:3])
        rest = parts[3:]
        if repository != REPOSITORY or (self.is_private and not has_token):
            return 401, b"{}", {"X-Error-Code": "RepoNotFound"}
        if rest[:1] == ["auth-check"]:
            self.count("auth")
            return self.denied_if_gated(has_token) or (200, b"{}", {})
        if rest == [] or rest[0] == "revision":
            self.count("info")
            commit = self.commit_of(rest[1] if rest else "main")
            if commit is None:
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            return 200, json.dumps({"id": REPOSITORY, "sha": commit}).encode(), {}
        commit = self.commit_of(rest[1])
        if commit is None:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if rest[0] == "tree":
            self.count("tree")
            return self.tree(self.commits[commit], "/".join(rest[2:]), url.path, parse_qs(url.query))
        self.count("resolve")
        return self.resolve(commit, "/".join(rest[2:]), has_token)

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a branch or commit; None if it does not exist."""
        commit = self.main if revision == "main" else revision
        return commit if commit in self.commits else None

    def denied_if_gated(self, has_token: bool) -> Response | None:
        """Return the refusal of a gated set; None for a request with access."""
        return (403, b"{}", {"X-Error-Code": "GatedRepo"}) if self.is_gated and not has_token else None

    def tree(self, files: dict[str, Path], folder: str, path: str, query: dict[str, list[str]]) -> Response:
        """Return a page of the listing of a folder, with the address of the next page."""
        prefix = f"{folder}/" if folder else ""
        is_recursive = query.get("recursive", ["false"])[0].lower() == "true"
        entries: dict[str, dict[str, object]] = {}
        for name, file in sorted(files.items()):
            if not name.startswith(prefix):
                continue
            below = name.removeprefix(prefix).split("/")
            for depth in range(1, len(below)):
                entry = prefix + "/".join(below[:depth])
                if depth == 1 or is_recursive:
                    entries[entry] = {"type": "directory", "path": entry, "oid": "0" * 40, "size": 0}
            if len(below) == 1 or is_recursive:
                content = file.read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                entries[name] = {"type": "file", "path": name, "oid": "1" * 40, "size": len(content)}
                if self.has_lfs:
                    entries[name]["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        if not entries:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        listed = list(entries.values())
        start = int(query.get("cursor", ["0"])[0])
        fields = {}
        if start + self.page < len(listed):
            address = f"https://localhost:{self.port}{path}?recursive={is_recursive}&cursor={start + self.page}"
            fields["Link"] = f'<{address}>; rel="next"'
        return 200, json.dumps(listed[start : start + self.page]).encode(), fields

    def resolve(self, commit: str, name: str, has_token: bool) -> Response:
        """Return the redirect to a file at the storage."""
        if name not in self.commits[commit]:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        denied = self.denied_if_gated(has_token)
        if denied:
            return denied
        expires = time.time() + self.expires_s
        signature = self.signature(commit, name, expires)
        query = f"expires={expires:.6f}&signature={signature}"
        return 302, b"", {"Location": f"https://localhost:{self.storage_port}/{commit}/{name}?{query}"}

    # ------------------------------------------------------------------------------------ the storage's answers

    def signature(self, commit: str, name: str, expires: float) -> str:
        return hashlib.sha256(f"{self.key} {commit} {name} {expires:.6f}".encode()).hexdigest()

    def stored(self, path: str, authorization: str, byte_range: str) -> Response:
        """Return a range of a file, if its address has not expired."""
        if authorization:
            self.tokens_at_storage.add(authorization)
        url = urlsplit(path)
        query = parse_qs(url.query)
        commit, _, name = unquote(url.path).lstrip("/").partition("/")
        expires = float(query["expires"][0])
        signature = query["signature"][0]
        with self.lock:
            self.uses[signature] += 1
            is_used_up = self.uses[signature] > self.most_uses
        if is_used_up or signature != self.signature(commit, name, expires) or time.time() > expires:
            self.count("expired")
            return 403, b"<Error><Code>AccessDenied</Code></Error>", {}
        self.count("storage")
        first, last = map(int, byte_range.removeprefix("bytes=").split("-"))
        file = self.commits[commit][name]
        size = file.stat().st_size
        with open(file, "rb") as opened:
            opened.seek(first)
            content = opened.read(last + 1 - first)
        with self.lock:
            self.bytes += len(content)
        return 206, content, {"Content-Range": f"bytes {first}-{first + len(content) - 1}/{size}"}

    # ------------------------------------------------------------------------------------ counts

    def count(self, kind: str) -> None:
        with self.lock:
            self.requests[kind] += 1

    def refuses(self, path: str) -> bool:
        """Return whether a request is refused with 429, and record whether it came before the end of a pause."""
        with self.lock:
            now = time.monotonic()
            refused_at = self.refused_at.pop(path, None)
            if refused_at is not None and now < refused_at + float(self.retry_after):
                self.too_early += 1
            if self.chance.random() >= self.throttled:
                return False
            self.refused_at[path] = now
            self.requests["429"] += 1
            return True


def handler(hub: Hub, is_storage: bool) -> type[http.server.BaseHTTPRequestHandler]:
    """Return the class of request handlers of the Hub or of its storage."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            authorization = self.headers.get("Authorization", "")
            if is_storage:
                status, content, fields = hub.stored(self.path, authorization, self.headers.get("Range", ""))
            else:
                status, content, fields = hub.answer(self.path, authorization)
            self.answer(status, content, fields)

        do_HEAD = do_GET

    return Handler


@contextmanager
def hub(files: dict[str, Path]) -> Iterator[Hub]:
    """Run the Hub with a data set's files (name → local file) in the block; `HF_ENDPOINT` points to it."""
    package = pytest.importorskip("huggingface_hub")
    state = Hub(files)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pem = certificate(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        state.storage_port = stack.enter_context(served(handler(state, True), context))
        state.port = stack.enter_context(served(handler(state, False), context))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SSL_CERT_FILE", pem)
        patch.setenv("HF_ENDPOINT", f"https://localhost:{state.port}")
        patch.setenv("PATCHLINE_PRIVATE_HOSTS", "localhost")
        patch.delenv("HF_TOKEN", raising=False)
        package.close_session()  # its connections know other certificates
        urls.forget_credentials()
        client._signed.clear()
        urls._denied_since.clear()
        yield state
        package.close_session()
        urls.forget_credentials()
        client._signed.clear()
