"""A folder in an object store (`s3:// gs:// az://`): files put whole, created once, fetched, listed and deleted.

    store = Store("s3://bucket/runs/x")
    store.put("status.json", b"{}")                              replaces what is there
    store.create("attempts/000007.json", b"{…}")    → True       False where the name is taken: of many, one gets True
    store.put_file("a/rank-00000.safetensors", path)
    store.get("status.json")                        → b"{}"      None where there is none
    store.fetch("a/rank-00000.safetensors", path, 4096)          into a local file, piece by piece
    store.sizes("a")                                → {"a/rank-00000.safetensors": 4096}
    store.delete(["a/rank-00000.safetensors"])                   what is not there is deleted already

Whoever keeps a run in a store relies on three things, which S3, Google's and Azure's store promise:
1. an object appears whole or not at all, however its upload ends;
2. who lists or reads after a put has ended sees it;
3. of all who create one name, one succeeds: `If-None-Match: *` on S3 and Azure, `ifGenerationMatch=0` on Google's.
The third is asked of the store itself (`check_creates_once`), because some that speak S3's protocol ignore it.

Every request is made again when it fails, after a random part of a time that doubles; what never succeeds is a
StorageError that names the address. Credentials come from the environment, as those for remote shards do.
"""

import logging
import os
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from data.errors import ConfigError, DataError, StorageError
from data.files import whole_file
from data.remote.urls import CLIENTS, client, denied_as_such, forget_credentials, redacted

Answer = TypeVar("Answer")

ATTEMPTS = 10  # to have one request answered: about a minute of a store that refuses at once
BACKOFF_S = 0.5  # before the second attempt, at most; doubled each time
LONGEST_PAUSE_S = 30.0
TIMEOUT_S = 30.0  # of silence, after which a request is given up
WARN_AT_ATTEMPT = 2  # counted from 0: by the third attempt somebody waits
PIECE = 16 << 20  # bytes of one request of `fetch`: what a broken answer costs at most
AT_ONCE = 8  # requests of `each`

# A client's connections belong to the process that opened them: a fork that used them would hang.
os.register_at_fork(after_in_child=forget_credentials)


class Store:
    """A folder in an object store; names are relative to it, with "/" between their parts."""

    def __init__(self, url: str, attempts: int | None = None) -> None:
        self.url = url.rstrip("/")
        self.scheme, _, self.path = self.url.partition("://")
        self.attempts = ATTEMPTS if attempts is None else attempts

    def put(self, name: str, content: bytes) -> None:
        """Put an object whole, in the place of one that is there."""
        self.patiently(name, lambda client, path: client.pipe_file(path, content))

    def put_file(self, name: str, file: Path) -> None:
        """Put a local file whole; a large one goes up in parts, which the store joins when the last has come."""
        self.patiently(name, lambda client, path: client.put_file(str(file), path))

    def create(self, name: str, content: bytes) -> bool:
        """Put an object where there is none; False where somebody else was first. Content must be the caller's own."""

        def ask(client: Any, path: str) -> bool:
            try:
                client.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # MinIO does not name the condition that failed, without which s3fs takes the refusal for an error.
                response = getattr(error.__cause__, "response", None) or {}
                if response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

        if self.patiently(name, ask):
            return True
        # A request whose answer was lost may have created it, and then it was refused to the next one.
        return self.get(name) == content

    def get(self, name: str) -> bytes | None:
        """Return an object's content; None where there is none."""

        def ask(client: Any, path: str) -> bytes | None:
            try:
                return client.cat_file(path)
            except FileNotFoundError:
                return None

        return self.patiently(name, ask)

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Bring an object of `size` bytes into a local file, which appears when it is whole.

        Raises FileNotFoundError where there is no such object, OSError of the local disk.
        """
        with whole_file(file) as temporary, open(temporary, "wb") as local:
            while local.tell() < size:
                start = local.tell()
                local.write(self.read(name, start, min(start + PIECE, size)))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start … stop−1 of an object, or the first of them."""

        def ask(client: Any, path: str) -> bytes:
            piece = client.cat_file(path, start=start, end=stop)
            if not piece:
                raise ConnectionError("empty answer")
            return piece[: stop - start]

        return self.patiently(name, ask)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of every object below a folder, by name."""

        def ask(client: Any, path: str) -> dict[str, int]:
            try:
                entries = client.find(path, detail=True)
            except FileNotFoundError:
                return {}
            sizes = {}
            for entry_path, entry in sorted(entries.items()):
                # The consoles of some stores leave an empty object that stands for a folder.
                if entry.get("type") != "directory" and not entry_path.endswith("/"):
                    sizes[entry_path.removeprefix(f"{self.path}/")] = entry["size"]
            return sizes

        return self.patiently(folder, ask)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is not there is deleted already."""

        def delete_one(name: str) -> None:
            def ask(client: Any, path: str) -> None:
                with suppress(FileNotFoundError):
                    client.rm_file(path)

            self.patiently(name, ask)

        each(names, delete_one)

    def check_creates_once(self, name: str) -> None:
        """Raise StorageError where a second `create` of a name takes the place of the first; leaves an object there."""
        self.create(name, b'{"for": "a test whether this store creates a name once"}')
        is_created_twice = self.create(name, b'{"for": "a second object of this name, which must be refused"}')
        if is_created_twice:
            raise StorageError(
                f"{self.url}: the store lets a second object take the place of one that was to be created\n"
                "  expected a store with conditional writes (If-None-Match: * on S3), which keep two owners apart\n"
                "  give the run another store, or a folder: run=/elsewhere"
            )

    def address(self, name: str) -> str:
        """Return an object's URL, for people."""
        return redacted(f"{self.url}/{name}".rstrip("/"))

    def patiently(self, name: str, ask: Callable[[Any, str], Answer]) -> Answer:
        """Return what `ask(client, path)` answers in one of the attempts.

        Raises FileNotFoundError at once, because to ask again does not bring what is missing; DataError where the
        store's client is not installed; StorageError when all attempts were in vain.
        """
        reason = ""
        attempt = 0
        # Looked at anew each time: a command that ends has no more patience for what its threads still ask.
        while attempt < self.attempts:
            try:
                with denied_as_such():
                    return ask(client(self.scheme, TIMEOUT_S), f"{self.path}/{name}".rstrip("/"))
            except FileNotFoundError:
                raise FileNotFoundError(f"{self.address(name)}: there is no such object, or no such bucket") from None
            except DataError:  # the store's client is not installed
                raise
            except PermissionError:
                reason = "PermissionError"
                # The credentials may have expired: the next attempt reads what the environment says by then.
                forget_credentials()
            # Clients raise many kinds of errors, and any of their texts may hold a secret: only the kind is shown.
            except Exception as error:
                reason = type(error).__name__
            if attempt == WARN_AT_ATTEMPT:
                logging.getLogger(__name__).warning("%s: no answer (%s), asking again", self.address(name), reason)
            if attempt + 1 < self.attempts:
                # A random part, so that many workers do not all ask again at once.
                time.sleep(random.uniform(0, min(LONGEST_PAUSE_S, BACKOFF_S * 2**attempt)))
            attempt += 1

        is_denied = reason == "PermissionError" or "Credentials" in reason
        remedy = "credentials come from the environment" if is_denied else "run again when it answers"
        raise StorageError(f"{self.address(name)}: no answer after {attempt} attempts, last {reason}; {remedy}")


def each(values: Iterable[Any], act: Callable[[Any], None]) -> None:
    """Call a function with each of the values, several at once; raises the first error when all have ended."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for future in [threads.submit(act, value) for value in values]:
            future.result()


def check_store_url(url: str) -> str:
    """Return the URL of a run in its one spelling. Raises ConfigError unless it names a folder in a bucket."""
    parts = urlsplit(url)
    if parts.scheme not in CLIENTS:
        schemes = ", ".join(f"{scheme}://" for scheme in CLIENTS)
        raise ConfigError(
            f"run is {redacted(url)}, expected a folder, or one of {schemes}\n  type run=s3://BUCKET/NAME, or a path"
        )
    names = parts.path.strip("/").split("/")
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if not (parts.netloc and is_plain) or not all(name not in ("", ".", "..") for name in names):
        raise ConfigError(
            f"run is {redacted(url)}, expected a bucket and a folder in it, and nothing else\n"
            f"  type run={parts.scheme}://BUCKET/NAME; credentials come from the environment (docs/storage.md)"
        )
    return f"{parts.scheme}://{parts.netloc}/{'/'.join(names)}"
