"""Reads and verifies the manifest of a checkpoint, which lists its contents and the digests of its files.

    MANIFEST.json   {"step": 1200, …, "files": {"rank-00000.safetensors": {"bytes": 4096, …}}, "sha256": "9f3c…"}

For each worker's file, the manifest contains the sha256 of the whole file and a short digest of every chunk, so that a
reader can verify only the part that it needs.

This module does not import torch, which takes 1.4 CPU-seconds, because `status` reads manifests too. The records of a
stage list files in the same way (pipeline/artifacts.py). pipeline/checkpoints/reader.py reads the checkpoints.
"""

import errno
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from xxhash import xxh3_64_hexdigest

from data.checks import check_file_name
from data.errors import CheckpointError, DataError
from data.files import MANIFEST
from data.seal import Unsealed, seal, unseal
from data.storage import Folder, Storage

SCHEMA = 1
ATTEMPTS = "attempts"  # folder of the run with one file per claimed attempt
# These errors mean that the file itself is bad. Any other error is a failure of the storage, not of a checkpoint.
UNREADABLE = {errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
# A reader of a small range reads up to two chunks too many; each digest takes 16 characters of the manifest.
MIN_CHUNK_BYTES = 1 << 18  # minimum size of a chunk in bytes
MAX_CHUNKS = 1 << 12  # maximum number of chunks in a file
DIGEST_LENGTH = 16  # hexadecimal digits of a chunk's digest


class FileRecord(TypedDict):
    """Recorded size and digest of a file."""

    bytes: int
    sha256: str


class ChunkedRecord(FileRecord):
    """Recorded size and digests of a worker's file, in the manifest."""

    chunk_bytes: int  # size of a chunk; the last may be shorter
    # 64-bit XXH3 detects accidental changes as sha256 does, at a fifteenth of the cost: 27 GB/s here
    # (benchmarks/README.md).
    chunks: str  # the concatenated digests of all chunks


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest, as plain data."""

    step: int
    samples_seen: int
    updates: int  # optimizer updates: steps without the skipped ones
    ledger: str
    attempt: int
    world: int
    zero: int
    config: dict[str, Any]  # "forbid" fields of the stage, to show differences when a resume is refused
    key: str  # key of the stage
    code: str  # version of the code that wrote the checkpoint
    bad_samples: int = 0
    # Ranges of masked samples: (first step that masks them, …), see pipeline/extras/replays/masking.py.
    masked: Sequence[Sequence[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # empty: a step is evaluated after its commit
    files: dict[str, ChunkedRecord] = field(default_factory=dict)  # file name → record
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """Return the name that the checkpoint has once it is committed."""
        return f"step-{self.step:010d}"

    @property
    def total_bytes(self) -> int:
        """Return the total size of all files."""
        return sum(file["bytes"] for file in self.files.values())


class DamagedCheckpoint(CheckpointError):
    """A file in a checkpoint differs from the committed file; other checkpoints may be intact."""


class NewerSchema(CheckpointError):
    """The checkpoint was written by a newer version of Patchline: it is intact and must not be quarantined."""


# ------------------------------------------------------------------------ names


def newest_attempt(storage: Storage) -> int:
    """Return the highest attempt number claimed in a run; 0 if there is none.

    Raises StorageError or OSError if the storage fails.
    """
    newest = 0
    for name in storage.list(ATTEMPTS):
        number = name.removeprefix(f"{ATTEMPTS}/").removesuffix(".json")
        if number.isdigit():
            newest = max(newest, int(number))
    return newest


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return the folder, inside the stage's folder, for the records, logs and phases of an attempt's workers.

    `attempt` counts all attempts in the run, because it is the fencing token that rejects late commits; logs and
    metrics.jsonl use the same number.
    """
    return directory / "attempts" / f"attempt-{attempt:06d}"


def committed(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest step first; for equal steps, the later attempt comes first."""
    return [folder / name for name in Folder(folder).published("")]


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a committed checkpoint's folder."""
    return int(checkpoint.name.split("-")[1])


# ------------------------------------------------------------------------ manifest and verification


def sealed(manifest: Manifest) -> bytes:
    """Return the content of a manifest file, sealed with its digest."""
    return seal(asdict(manifest)).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises CheckpointError if the manifest is missing, truncated or altered, belongs to another step, or is newer than
    this code. Raises OSError if the storage fails; the checkpoint may then be intact.
    """
    return manifest_in(Folder(checkpoint.parent), checkpoint.name)


def manifest_in(storage: Storage, checkpoint: str) -> Manifest:
    """Read and check a checkpoint's manifest in a run's storage.

    Raises the same errors as `read_manifest`, or StorageError if an object store fails.
    """
    path = f"{storage.address(checkpoint)}/{MANIFEST}"
    try:
        content = storage.read(f"{checkpoint}/{MANIFEST}")
    except OSError as error:
        raise unreadable(path, error) from None
    if content is None:
        raise DamagedCheckpoint(f"{path}: file not found")
    try:
        values = unseal(content)
        # Check the schema before the fields, which a newer schema may have renamed. Falling back to an older checkpoint
        # instead would lose progress.
        if values["schema"] > SCHEMA:
            raise NewerSchema(
                f"{storage.address(checkpoint)} has schema {values['schema']}, but this code reads up to {SCHEMA}\n"
                "  update Patchline to load it"
            )
        manifest = Manifest(**values)
        for name in manifest.files:
            check_file_name(name, path)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except Unsealed as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is not a valid manifest") from None
    # Detect a folder renamed by hand, whose weights would be loaded as those of another step.
    name = checkpoint.rpartition("/")[2]
    if name.startswith("step-") and step_of(Path(name)) != manifest.step:
        raise CheckpointError(f"{path} is the manifest of step {manifest.step}, but its folder is named {name}")
    return manifest


def sizes_in(storage: Storage, folder: str) -> dict[str, int]:
    """Return {file name: size} for every file in a folder. Raises StorageError or OSError if the storage fails."""
    return {name.removeprefix(f"{folder}/"): size for name, size in storage.list(folder).items()}


def inspect_checkpoint(storage: Storage, checkpoint: str) -> Manifest:
    """Read a checkpoint's manifest, and check that exactly the listed files exist and have the listed sizes.

    Raises CheckpointError, which names the file and the difference, if the files do not match the manifest, or OSError
    or StorageError if the storage fails.
    """
    address = storage.address(checkpoint)
    present = sizes_in(storage, checkpoint)
    # Check the listing first, because opening a pipe, for example, could block for ever.
    if MANIFEST not in present:
        raise DamagedCheckpoint(f"{address}/{MANIFEST}: file not found")
    manifest = manifest_in(storage, checkpoint)
    del present[MANIFEST]
    # Reject additional files like missing ones: the folder differs from what was committed.
    missing = sorted(manifest.files.keys() - present.keys())
    extra = sorted(present.keys() - manifest.files.keys())
    if missing or extra:
        raise DamagedCheckpoint(f"{address}: missing files: {missing or 'none'}; unexpected files: {extra or 'none'}")
    for name, record in manifest.files.items():
        if present[name] != record["bytes"]:
            raise DamagedCheckpoint(f"{address}/{name} has {present[name]} bytes, expected {record['bytes']}")
    return manifest


def unreadable(path: Path | str, error: OSError) -> Exception:
    """Return the error to raise: DamagedCheckpoint if the file is damaged, the OSError itself if the storage fails."""
    if error.errno in UNREADABLE:
        return DamagedCheckpoint(f"{path}: {error.strerror or error}")
    return error


# ------------------------------------------------------------------------ files


def digest(content: memoryview) -> ChunkedRecord:
    """Return the size and digests of a file with this content."""
    chunk_bytes = chunk_bytes_of(len(content))
    chunks = (content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes))
    return digest_chunks(chunks, chunk_bytes)


def chunk_bytes_of(size: int) -> int:
    """Return the chunk size for a file of this size: a power of two."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes * MAX_CHUNKS < size:
        chunk_bytes *= 2
    return chunk_bytes


def digest_chunks(chunks: Iterable[memoryview], chunk_bytes: int) -> ChunkedRecord:
    """Return the size and digests of a file that consists of these chunks; each chunk is read once."""
    file_digest = hashlib.sha256()
    digests: list[str] = []
    size = 0
    for chunk in chunks:
        file_digest.update(chunk)
        # The chunk is still in the CPU cache for the second digest.
        digests.append(xxh3_64_hexdigest(chunk))
        size += len(chunk)
    return {"bytes": size, "sha256": file_digest.hexdigest(), "chunk_bytes": chunk_bytes, "chunks": "".join(digests)}


def check_size(path: Path, expected: FileRecord) -> None:
    """Raise DamagedCheckpoint unless the path is a regular file of the recorded size."""
    # Opening a pipe would block for ever.
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is not a regular file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes, expected {expected['bytes']}")


def chunks_of(path: Path, chunk_bytes: int) -> Iterator[memoryview]:
    """Iterate over the chunks of a file; each chunk is overwritten when the next chunk is read."""
    memory = memoryview(bytearray(chunk_bytes))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(memory):
            # A read may return fewer bytes than requested; fill the chunk anyway.
            while length < chunk_bytes and (more := file.readinto(memory[length:])):
                length += more
            yield memory[:length]
