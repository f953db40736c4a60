"""What a checkpoint says about itself, and whether files have the bytes that were promised; all without torch.

    MANIFEST.json   {"sha256": "9f3c…", "body": "{\"step\": 1200, \"files\": {\"rank-00000.safetensors\": …}, …}"}

Of a worker's file it holds the sha256 of the whole and a short digest of every chunk, so that whoever reads a part can
check that part alone. Manifests from before there were chunks are read as ever; their files are checked whole.

`status` reads manifests, and a record of a stage (pipeline/artifacts.py) promises files in the same way: neither needs
torch, which takes 1.4 CPU-seconds to import. The checkpoints themselves: pipeline/checkpoints/checkpoint.py.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from xxhash import xxh3_64_hexdigest

from data.errors import CheckpointError
from data.files import temporary_name
from data.store import Store

SCHEMA = 1
MANIFEST = "MANIFEST.json"
NAME = re.compile(r"step-\d{10}(-\d{6})?")  # of a committed checkpoint
# With these errors the file itself is bad; any other error means the storage is, and no checkpoint is to blame.
UNREADABLE = {errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
# A reader of a small range reads up to two chunks too much; a digest is 16 characters of the manifest.
LEAST_CHUNK = 1 << 18  # bytes
MOST_CHUNKS = 1 << 12  # of a file
DIGEST_LENGTH = 16  # hexadecimal digits of a chunk's digest


class FileRecord(TypedDict):
    """Holds what a manifest says of one file."""

    bytes: int
    sha256: str
    chunk_bytes: NotRequired[int]  # of all chunks but the last, which may be shorter
    # XXH3 of 64 bits finds any accident, as sha256 does, and costs a fifteenth: 27 GB/s here (benchmarks/README.md).
    chunks: NotRequired[str]  # the digests of all chunks, one behind the other


@dataclass(frozen=True)
class Manifest:
    """Holds what a checkpoint says about itself; it is plain data that prints."""

    step: int
    samples_seen: int
    updates: int  # optimizer updates: step less skipped ones
    ledger: str
    attempt: int
    world: int
    zero: int
    config: dict[str, Any]  # forbidden fields of the stage, for the diff at resume
    key: str  # of the stage
    code: str  # version of the code that wrote it
    bad_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # empty now: what a step scores is known after its commit
    files: dict[str, FileRecord] = field(default_factory=dict)  # by name
    schema: int = SCHEMA


class Damaged(CheckpointError):
    """A file of a checkpoint is not what was committed: another checkpoint may be whole."""


class NewerSchema(CheckpointError):
    """The checkpoint was written by a newer Patchline: it is sound, only not for this code, and never quarantined."""


# ------------------------------------------------------------------------ names


def newest_attempt(directory: Path) -> int:
    """Return the highest attempt number claimed in a run directory; 0 where there is none."""
    newest = 0
    for path in (directory / "attempts").glob("*.json"):
        if path.stem.isdigit():
            newest = max(newest, int(path.stem))
    return newest


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return where the workers of an attempt leave their records, logs and places, in their stage's directory."""
    return directory / "attempts" / f"attempt-{attempt:06d}"


def attempt_of_stage(directory: Path, attempt: int) -> int:
    """Return how many attempts a stage had when this one began, itself counted: what people are told.

    `attempt` counts over the whole run, because it fences late commits.
    """
    earlier = 0
    for folder in (directory / "attempts").glob("attempt-*"):
        number = folder.name.removeprefix("attempt-")
        # A folder of any other name is a copy that somebody made.
        if number.isdigit() and int(number) < attempt:
            earlier += 1
    return earlier + 1


def committed(folder: Path) -> list[Path]:
    """List the checkpoints that were renamed into place, newest step first, and of one step the later attempt first.

    A folder of any other name, such as a copy that somebody made, is no checkpoint.
    """
    # By name, never by time: clocks of nodes differ, and a copy of a run has times of its own.
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a committed checkpoint's folder."""
    return int(checkpoint.name.split("-")[1])


# ------------------------------------------------------------------------ manifest and verification


def seal(manifest: Manifest) -> str:
    """Return the text of a manifest file: the values and their digest; there is exactly one text for given values."""
    return sealed_text(json.dumps(asdict(manifest), indent=1, sort_keys=True))


def sealed_text(body: str) -> str:
    """Return the JSON text that holds `body` and its sha256."""
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})


def read_manifest(checkpoint: Path) -> Manifest:
    """Read what a checkpoint says about itself.

    Raises CheckpointError where the manifest is missing, torn, altered, of another step or newer than this code.
    Raises OSError where the storage fails, which says nothing about the checkpoint.
    """
    path = checkpoint / MANIFEST
    try:
        text = path.read_text()
        body = json.loads(text)["body"]
        # The whole text is compared, not the digest alone: a change outside the body would pass otherwise.
        if text != sealed_text(body):
            raise CheckpointError(f"{path} does not match its own digest")
        values = json.loads(body)
        # Refused before the fields are read, which a newer schema may have renamed; and never passed over for an older
        # checkpoint, because that would throw away progress.
        if values["schema"] > SCHEMA:
            raise NewerSchema(
                f"{checkpoint} has schema {values['schema']}, this code reads up to {SCHEMA}\n"
                "  update Patchline to load it"
            )
        manifest = Manifest(**values)
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is torn or not a manifest") from None
    # A folder that was renamed by hand would be loaded as another step than its weights are of.
    if checkpoint.name.startswith("step-") and step_of(checkpoint) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, the folder's name says {step_of(checkpoint)}")
    return manifest


def unreadable(path: Path, error: OSError) -> Exception:
    """Return the error to raise: about this file where the file is bad, the same OSError where the storage is."""
    if error.errno in UNREADABLE:
        return Damaged(f"{path}: {error.strerror or error}")
    return error


# ------------------------------------------------------------------------ files


def digest(content: memoryview) -> FileRecord:
    """Return the record of a file with this content."""
    chunk_bytes = chunk_bytes_of(len(content))
    chunks = (content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes))
    return digest_chunks(chunks, chunk_bytes)


def chunk_bytes_of(size: int) -> int:
    """Return how large the chunks of a file are: a power of two."""
    chunk_bytes = LEAST_CHUNK
    while chunk_bytes * MOST_CHUNKS < size:
        chunk_bytes *= 2
    return chunk_bytes


def digest_chunks(chunks: Iterable[memoryview], chunk_bytes: int) -> FileRecord:
    """Return the record of the file that has these chunks, of which each is looked at once."""
    whole = hashlib.sha256()
    digests: list[str] = []
    size = 0
    for chunk in chunks:
        whole.update(chunk)
        # The second digest finds the chunk in the processor's cache.
        digests.append(xxh3_64_hexdigest(chunk))
        size += len(chunk)
    return {"bytes": size, "sha256": whole.hexdigest(), "chunk_bytes": chunk_bytes, "chunks": "".join(digests)}


def verify_file(path: Path, expected: FileRecord) -> FileRecord:
    """Read a whole file, and return its record with the digests of its chunks, also where `expected` lacks these.

    Raises Damaged unless it has the size and digests that the manifest gives it, OSError where the storage fails.
    """
    # The size first: a truncated file is found without reading gigabytes of it.
    check_size(path, expected)
    chunk_bytes = expected.get("chunk_bytes", chunk_bytes_of(expected["bytes"]))
    try:
        actual = digest_chunks(chunks_of(path, chunk_bytes), chunk_bytes)
    except OSError as error:
        raise unreadable(path, error) from None
    if actual["sha256"] != expected["sha256"]:
        raise Damaged(f"{path}: its sha256 is not the manifest's; the file has changed")
    if actual["chunks"] != expected.get("chunks", actual["chunks"]):
        raise Damaged(f"{path}: its sha256 is the manifest's, and the digests of its chunks are not")
    return actual


def check_size(path: Path, expected: FileRecord) -> None:
    """Raise Damaged unless this is a regular file of the size that the manifest gives it."""
    # To read from a pipe would be to wait for ever.
    if not path.is_file():
        raise Damaged(f"{path} is not a regular file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise Damaged(f"{path}: {size} bytes, the manifest says {expected['bytes']}")


def chunks_of(path: Path, chunk_bytes: int) -> Iterator[memoryview]:
    """Iterate a file's chunks; each is gone when the next one is asked for."""
    memory = memoryview(bytearray(chunk_bytes))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(memory):
            # A read may end early, and a chunk is whole all the same.
            while length < chunk_bytes and (more := file.readinto(memory[length:])):
                length += more
            yield memory[:length]


def bring(store: Store, name: str, path: Path, record: FileRecord) -> None:
    """Fetch an object unless the local file has the bytes of its record; the file appears when it has them.

    Raises CheckpointError where the store has other bytes, FileNotFoundError, StorageError, OSError.
    """
    with suppress(CheckpointError):
        verify_file(path, record)
        return
    # Under a temporary name, because the driver puts whatever changes in the run's folder, over the good one too.
    temporary = temporary_name(path)
    try:
        # Where the transfer was at fault, a second one is right.
        for _ in range(2):
            store.fetch(name, temporary, record["bytes"])
            with suppress(CheckpointError):
                verify_file(temporary, record)
                os.replace(temporary, path)
                return
    finally:
        temporary.unlink(missing_ok=True)
    raise CheckpointError(
        f"{store.address(name)} has changed: fetched twice, its sha256 is not that of its record\n"
        "  bring the object back from a copy, then run the same command again"
    )
