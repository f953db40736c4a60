"""List the files of an object store, and request their sizes, to index or pack them; training lists nothing.

Each function works for every scheme of urls.py, and sends one request.

    list_tars("s3://bucket/train", 30.0)   →   {"s3://bucket/train/train-000000.tar": RemoteFile(6543360), …}
    size_of("s3://bucket/train-000000.tar", 30.0)              →   6543360
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from data.checks import check_file_name, redacted
from data.index.names import preview
from data.index.shard import COMPRESSED
from data.optional import load_optional
from data.remote.urls import REQUESTS, Refused, client, denied_as_such


def size_of(url: str, timeout_s: float) -> int:
    """Return the size in bytes of the object at a URL.

    Raises the errors of `read_range`, or Refused if the store does not report the size."""
    if not url.startswith("https:"):
        with denied_as_such():
            return client(urlsplit(url).scheme, timeout_s).info(url)["size"]

    # Request one byte instead of using HEAD, which many servers and all signed URLs reject.
    with load_optional(REQUESTS["https"], "https://")(url, timeout_s, "bytes=0-0") as answer:
        content_range = answer.headers.get("Content-Range", "")  # bytes 0-0/6543360
        size = content_range.rpartition("/")[2] or answer.headers.get("Content-Length", "")
    if not size.isdigit():
        raise Refused(f"{redacted(url)}: the server does not report the file size; copy the shards to this machine")
    return int(size)


class RemoteFile(NamedTuple):
    """A file in an object store."""

    size: int  # bytes
    sha256: str = ""  # only on the Hub; other stores do not report it


def list_tars(url: str, timeout_s: float) -> dict[str, RemoteFile]:
    """Return {URL: file} of the *.tar files in a folder or matching a pattern, or of a single tar.

    Raises the errors of `read_range`, Refused if a folder also contains compressed tars, which would be ignored, or
    DataError if a name is unsafe.
    """
    if url.startswith("https:"):
        raise Refused(
            f"{redacted(url)}: files cannot be listed over https; name the shards, as in …/train-{{000..099}}.tar"
        )
    compressed = []
    capital = []
    tars = {}
    for place, file in list_files(url, ".tar*", timeout_s).items():
        if place.endswith(COMPRESSED):
            # Without the folder, as in `data.extras.sources.tar_offsets`: messages abbreviate long names.
            compressed.append(place.rpartition("/")[2])
        elif place.endswith(".tar"):
            tars[place] = file
        elif place.lower().endswith(".tar"):
            capital.append(place.rpartition("/")[2])
    if compressed:
        raise Refused(
            f"{redacted(url)}: {preview(compressed)} are compressed tars and would be ignored; "
            f"decompress them; or, to use only the uncompressed tars, pass {redacted(url).rstrip('/')}/*.tar"
        )
    if capital:
        raise Refused(
            f"{redacted(url)}: {preview(capital)} would be ignored, because names of tars end in .tar; "
            f"rename them; or, to use only the other tars, pass {redacted(url).rstrip('/')}/*.tar"
        )
    return tars


def list_files(url: str, suffix: str, timeout_s: float) -> dict[str, RemoteFile]:
    """Return {URL: file} of the files matching a pattern, or those in a folder whose names end with `suffix`.

    A URL that itself ends with `suffix` names a file. Raises the errors of `read_range`.
    """
    scheme = urlsplit(url).scheme
    entries: Mapping[str, dict[str, Any]]
    with denied_as_such():
        if url.endswith(suffix.rstrip("*")) and "*" not in url:
            entry = client(scheme, timeout_s).info(url)
            entries = {entry["name"]: entry}
        else:
            # Only `*` is a wildcard; `?` and `[` are ordinary characters of a key.
            folder = url.rstrip("/").replace("[", "[[]").replace("?", "[?]")
            # Suffixes in other letters are listed too, so that callers can report them.
            any_case = "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in suffix)
            pattern = folder if "*" in url else f"{folder}/*{any_case}"
            entries = client(scheme, timeout_s).glob(pattern, detail=True)
    files = {}
    for path, entry in sorted(entries.items()):
        lfs = entry.get("lfs") or {}
        place = f"{scheme}://{check_file_name(path, redacted(url))}"
        files[place] = RemoteFile(entry["size"], lfs.get("sha256", ""))
    return files
