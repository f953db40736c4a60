"""What a checkpoint says about itself, and whether files have the bytes that were promised; all without torch.

    MANIFEST.json   {"step": 1200, …, "files": {"rank-00000.safetensors": {"bytes": 4096, …}}, "sha256": "9f3c…"}

Of a worker's file it holds the sha256 of the whole and a short digest of every chunk, so that a reader of a part can
check that part alone.

`status` reads manifests, and a record of a stage (pipeline/artifacts.py) promises files in the same way: neither needs
torch, which takes 1.4 CPU-seconds to import. The checkpoints themselves: pipeline/checkpoints/reader.py.
"""

import errno
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from xxhash import xxh3_64_hexdigest

from data.errors import CheckpointError
from data.files import MANIFEST
from data.seal import Unsealed, seal, unseal
from data.storage import Folder, Storage

SCHEMA = 1
ATTEMPTS = "attempts"  # in the run: a file for each attempt that was claimed
# With these errors the file itself is bad; any other error means the storage is, and no checkpoint is to blame.
UNREADABLE = {errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
# A reader of a small range reads up to two chunks too much; a digest is 16 characters of the manifest.
LEAST_CHUNK = 1 << 18  # bytes
MOST_CHUNKS = 1 << 12  # of a file
DIGEST_LENGTH = 16  # hexadecimal digits of a chunk's digest


class FileRecord(TypedDict):
    """Holds what a record promises of one file."""

    bytes: int
    sha256: str


class ChunkedRecord(FileRecord):
    """Holds what a manifest promises of one worker's file."""

    chunk_bytes: int  # of all chunks but the last, which may be shorter
    # XXH3 of 64 bits finds any accident, as sha256 does, and costs a fifteenth: 27 GB/s here (benchmarks/README.md).
    chunks: str  # the digests of all chunks, one behind the other


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
    # Ranges of samples that weigh nothing, each behind the step from which on (pipeline/extras/replays/masking.py).
    masked: Sequence[Sequence[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # empty now: what a step scores is known after its commit
    files: dict[str, ChunkedRecord] = field(default_factory=dict)  # by name
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """Return the name of the checkpoint that the save becomes."""
        return f"step-{self.step:010d}"

    @property
    def total_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file["bytes"] for file in self.files.values())


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is not what was committed: another checkpoint may be whole."""


class NewerSchema(CheckpointError):
    """The checkpoint was written by a newer Patchline: it is sound, only not for this code, and never quarantined."""


# ------------------------------------------------------------------------ names


def newest_attempt(storage: Storage) -> int:
    """Return the highest attempt number claimed in a run; 0 where there is none. Raises StorageError, OSError."""
    newest = 0
    for name in storage.list(ATTEMPTS):
        number = name.removeprefix(f"{ATTEMPTS}/").removesuffix(".json")
        if number.isdigit():
            newest = max(newest, int(number))
    return newest


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return where the workers of an attempt leave their records, logs and places, in their stage's directory.

    `attempt` counts over the whole run, because it fences late commits; logs and metrics.jsonl have the same number.
    """
    return directory / "attempts" / f"attempt-{attempt:06d}"


def committed(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest step first, and of one step the later attempt first."""
    return [folder / name for name in Folder(folder).published("")]


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a committed checkpoint's folder."""
    return int(checkpoint.name.split("-")[1])


# ------------------------------------------------------------------------ manifest and verification


def sealed(manifest: Manifest) -> bytes:
    """Return the content of a manifest file."""
    return seal(asdict(manifest)).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read what a checkpoint says about itself.

    Raises CheckpointError where the manifest is missing, torn, altered, of another step or newer than this code.
    Raises OSError where the storage fails, which says nothing about the checkpoint.
    """
    return manifest_in(Folder(checkpoint.parent), checkpoint.name)


def manifest_in(storage: Storage, checkpoint: str) -> Manifest:
    """Do what `read_manifest` does, of a checkpoint by its name in the storage; raises StorageError too."""
    path = f"{storage.address(checkpoint)}/{MANIFEST}"
    try:
        content = storage.read(f"{checkpoint}/{MANIFEST}")
    except OSError as error:
        raise unreadable(path, error) from None
    if content is None:
        raise DamagedCheckpoint(f"{path}: no such file")
    try:
        values = unseal(content)
        # Refused before the fields are read, which a newer schema may have renamed; and never passed over for an older
        # checkpoint, because that would throw away progress.
        if values["schema"] > SCHEMA:
            raise NewerSchema(
                f"{storage.address(checkpoint)} has schema {values['schema']}, this code reads up to {SCHEMA}\n"
                "  update Patchline to load it"
            )
        manifest = Manifest(**values)
    except Unsealed as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is not a manifest") from None
    # A folder that was renamed by hand would be loaded as another step than its weights are of.
    name = checkpoint.rpartition("/")[2]
    if name.startswith("step-") and step_of(Path(name)) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, the folder's name says {step_of(Path(name))}")
    return manifest


def sizes_in(storage: Storage, folder: str) -> dict[str, int]:
    """Return the bytes of every file of a folder, by its name in there. Raises StorageError, OSError."""
    return {name.removeprefix(f"{folder}/"): size for name, size in storage.list(folder).items()}


def inspect_checkpoint(storage: Storage, checkpoint: str) -> Manifest:
    """Read the manifest, and look whether the files that it names are there, in their sizes, and no others.

    Raises CheckpointError naming the file and what differs; OSError, StorageError where the storage fails.
    """
    address = storage.address(checkpoint)
    present = sizes_in(storage, checkpoint)
    # Not opened where it is no regular file: to read from a pipe would be to wait for ever.
    if MANIFEST not in present:
        raise DamagedCheckpoint(f"{address}/{MANIFEST}: no such file")
    manifest = manifest_in(storage, checkpoint)
    del present[MANIFEST]
    # A file too many is refused like one too few: it is not what was committed.
    missing = sorted(manifest.files.keys() - present.keys())
    extra = sorted(present.keys() - manifest.files.keys())
    if missing or extra:
        raise DamagedCheckpoint(f"{address}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    for name, record in manifest.files.items():
        if present[name] != record["bytes"]:
            raise DamagedCheckpoint(f"{address}/{name}: {present[name]} bytes, the manifest says {record['bytes']}")
    return manifest


def unreadable(path: Path | str, error: OSError) -> Exception:
    """Return the error to raise: about this file where the file is bad, the same OSError where the storage is."""
    if error.errno in UNREADABLE:
        return DamagedCheckpoint(f"{path}: {error.strerror or error}")
    return error


# ------------------------------------------------------------------------ files


def digest(content: memoryview) -> ChunkedRecord:
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


def digest_chunks(chunks: Iterable[memoryview], chunk_bytes: int) -> ChunkedRecord:
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


def check_size(path: Path, expected: FileRecord) -> None:
    """Raise DamagedCheckpoint unless this is a regular file of the size that the manifest gives it."""
    # To read from a pipe would be to wait for ever.
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is not a regular file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise DamagedCheckpoint(f"{path}: {size} bytes, the manifest says {expected['bytes']}")


def chunks_of(path: Path, chunk_bytes: int) -> Iterator[memoryview]:
    """Iterate a file's chunks; each is gone when the next one is asked for."""
    memory = memoryview(bytearray(chunk_bytes))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(memory):
            # A read may end early, and a chunk is whole all the same.
            while length < chunk_bytes and (more := file.readinto(memory[length:])):
                length += more
            yield memory[:length]
