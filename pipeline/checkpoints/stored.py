"""The checkpoints of a stage in an object store, where its nodes share no folder: the same rules, other means.

In the store, under `<run>/<stage>/checkpoints/`; every name holds the attempt, so that no two attempts share one:
    step-0000001200-000007/    committed: MANIFEST.json is there, created last, and no marker
        rank-00000.safetensors   as on disk (checkpoint.py)
        MANIFEST.json            as on disk
        REFUSED.json             a marker: it did not match its manifest; never loaded, never deleted by us
        SWEPT.json               a marker: its attempt ended amid the save; nothing but two small objects is left

A save, in order:
1. each worker's thread puts its file (`put`); rank 0's also metrics.jsonl, because a commit implies its metrics. On
   another node than the driver's it does not: the driver then gathers the lines of all nodes, and puts them;
2. rank 0 looks whether all files are there in their size, and whether its attempt is still the newest (`commit`);
3. it creates MANIFEST.json, which is the commit.
No owner that was frozen between 2 and 3 can commit: before a newer attempt looks for a checkpoint, it creates the
MANIFEST.json of every save that has none (`sweep`), and a name is created once.

How all workers load from there together is in stored_restore.py.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from data.errors import CheckpointError, StorageError
from data.files import naming, write_whole
from data.store import Store, each
from pipeline.checkpoints.checkpoint import Chosen, verify
from pipeline.checkpoints.manifest import (
    MANIFEST,
    NAME,
    FileRecord,
    Manifest,
    NewerSchema,
    bring,
    committed,
    read_manifest,
    seal,
    step_of,
)

REFUSED = "REFUSED.json"
SWEPT = "SWEPT.json"
ATTEMPTS = "attempts"  # in the run's folder: an object for each attempt that was claimed
METRICS = "metrics.jsonl"
FETCHING = "fetching.lock"  # of the local folder
DISCARD_ATTEMPTS = 3  # of a request: the save has failed already, perhaps because the store is gone


def committed_steps(directory: Path, remote: str | None) -> list[int]:
    """Return the steps that a stage has committed, newest first, by their names alone.

    `remote` is the URL of the run, None where its folder is shared by all nodes.
    """
    if remote is None:
        return [step_of(folder) for folder in committed(directory / "checkpoints")]
    return [step_of(Path(name)) for name in StoredCheckpoints(remote, directory).committed()]


def newest_attempt_in(store: Store) -> int:
    """Return the highest attempt number claimed in a run; 0 where there is none."""
    newest = 0
    for name in store.sizes(ATTEMPTS):
        number = Path(name).stem
        if number.isdigit():
            newest = max(newest, int(number))
    return newest


class StoredCheckpoints:
    """The checkpoints of one stage in a store; `directory` is the stage's local folder, whose name it has there too."""

    def __init__(self, run: str, directory: Path, *, has_all_metrics: bool = False) -> None:
        self.has_all_metrics = has_all_metrics  # the stage's metrics.jsonl here is not that of one node alone
        self.store = Store(run)
        self.stage = directory.name
        self.directory = directory
        self.folder = directory / "checkpoints"  # local copies, of those that were fetched

    def name(self, checkpoint: str, file: str) -> str:
        """Return the name of a checkpoint's file in the store."""
        return f"{self.stage}/checkpoints/{checkpoint}/{file}"

    def listing(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every file of every checkpoint, whole or not, by both names."""
        files: dict[str, dict[str, int]] = {}
        for name, size in self.store.sizes(f"{self.stage}/checkpoints").items():
            *_, checkpoint, file = name.split("/")
            if NAME.fullmatch(checkpoint):
                files.setdefault(checkpoint, {})[file] = size
        return files

    def committed(self) -> list[str]:
        """List the checkpoints that have a manifest and no marker, newest step first, then the later attempt."""
        names = []
        for checkpoint, files in self.listing().items():
            if MANIFEST in files and REFUSED not in files and SWEPT not in files:
                names.append(checkpoint)
        return sorted(names, reverse=True)

    # ------------------------------------------------------------------------ writing

    def put(self, file: str, content: memoryview, manifest: Manifest, is_first: bool) -> None:
        """Put a worker's file of a save, and the stage's metrics with that of the first.

        Raises StorageError, OSError.
        """
        # By way of the local disk, because the stores' clients put large files in parts, and large bytes in a copy.
        checkpoint = name_of(manifest)
        local = self.folder / f".tmp-{checkpoint}-{file}"
        try:
            with naming(local, len(content)):
                local.write_bytes(content)
            self.store.put_file(self.name(checkpoint, file), local)
        finally:
            local.unlink(missing_ok=True)
        # Not those of a former owner that was frozen, whose lines would take the place of newer ones.
        if is_first and self.has_all_metrics and newest_attempt_in(self.store) <= manifest.attempt:
            self.send([METRICS])

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest of a save whose files are all there; False where a newer attempt has taken its name.

        Runs on rank 0 alone. Raises CheckpointError where a file is missing or torn, StorageError.
        """
        checkpoint = name_of(manifest)
        present = self.listing().get(checkpoint, {})
        for file, record in manifest.files.items():
            if present.get(file) != record["bytes"]:
                address = self.store.address(self.name(checkpoint, file))
                raise CheckpointError(f"{address}: {present.get(file, 'no')} bytes are there, of {record['bytes']} put")
        return self.store.create(self.name(checkpoint, MANIFEST), seal(manifest).encode())

    def discard(self, manifest: Manifest) -> None:
        """Delete the files of a save that was not committed; what cannot be deleted is left to the next attempt."""
        checkpoint = name_of(manifest)
        # A store of its own: a deletion of old checkpoints may be asking this one, and keeps its patience.
        brief = StoredCheckpoints(self.store.url, self.directory)
        brief.store.attempts = DISCARD_ATTEMPTS
        try:
            files = brief.listing().get(checkpoint, {})
            # The same step was saved before, and committed: only the answer to its commit was lost.
            if MANIFEST in files:
                return
            brief.store.delete(self.name(checkpoint, file) for file in files)
        except (StorageError, OSError):
            return

    def prune(self, keep: int, keep_every: int) -> list[str]:
        """Delete old checkpoints as `checkpoint.prune` does, each one's manifest first; returns their names.

        Raises StorageError.
        """
        removed = []
        listing = self.listing()
        for checkpoint in self.committed()[max(keep, 2) :]:
            is_milestone = keep_every > 0 and step_of(Path(checkpoint)) % keep_every == 0
            if is_milestone:
                continue
            # Without a manifest it is none: what is left when this is interrupted is swept by a later attempt.
            self.store.delete([self.name(checkpoint, MANIFEST)])
            self.store.delete(self.name(checkpoint, file) for file in listing[checkpoint])
            removed.append(checkpoint)
        return removed

    def send(self, names: Iterable[str]) -> None:
        """Put files of the stage's folder, those of them that are there, under the same names."""
        for name in names:
            if (self.directory / name).exists():
                self.store.put_file(f"{self.stage}/{name}", self.directory / name)

    def bring_exactly(self, records: Mapping[str, FileRecord]) -> None:
        """Fetch those files of the stage that are not here, or not in the bytes of their record.

        Raises CheckpointError where the store has other bytes, StorageError, OSError.
        """
        for name, record in records.items():
            bring(self.store, f"{self.stage}/{name}", self.directory / name, record)

    # ------------------------------------------------------------------------ which one to load

    def sweep(self, attempt: int) -> None:
        """Make sure that no save of an earlier attempt is committed any more, and delete its files; rank 0 alone.

        Raises CheckpointError where a newer attempt owns the run, StorageError.
        """
        newest = newest_attempt_in(self.store)
        if newest > attempt:
            raise CheckpointError(
                f"attempt {newest} owns {self.store.address('')} now, this is attempt {attempt}\n"
                "  nothing of the newer attempt was touched; this process should end"
            )
        reason = json.dumps({"swept by attempt": attempt}).encode()
        for checkpoint, files in self.listing().items():
            is_checkpoint = MANIFEST in files and SWEPT not in files
            is_swept = files.keys() == {MANIFEST, SWEPT}
            if attempt_of(checkpoint) >= attempt or REFUSED in files or is_checkpoint or is_swept:
                continue
            # From here on its owner, should it wake up, cannot create it. Where it was faster, this is a checkpoint.
            if MANIFEST not in files and not self.store.create(self.name(checkpoint, MANIFEST), reason):
                continue
            self.store.put(self.name(checkpoint, SWEPT), reason)
            self.store.delete(self.name(checkpoint, file) for file in files if file not in (MANIFEST, SWEPT))

    def fetch(self, checkpoint: str) -> Chosen:
        """Bring a checkpoint into the local folder, and read every byte of it there; a file that is here stays.

        Raises CheckpointError where it is bad in the store, StorageError, OSError.
        """
        try:
            return self.fetched(checkpoint)
        except NewerSchema:
            raise
        except CheckpointError:
            # The copy may be at fault: the transfer, or a disk that has lost it since. A second one tells.
            shutil.rmtree(self.folder / checkpoint, ignore_errors=True)
            return self.fetched(checkpoint)

    def fetched(self, checkpoint: str) -> Chosen:
        """Do what `fetch` does, once."""
        folder = self.folder / checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        content = self.store.get(self.name(checkpoint, MANIFEST))
        if content is None:
            raise CheckpointError(f"{self.store.address(self.name(checkpoint, MANIFEST))} is not there any more")
        write_whole(folder / MANIFEST, content)
        manifest = read_manifest(folder)
        # The sizes first: a file that is torn or missing is found before gigabytes of the others are fetched.
        present = self.listing().get(checkpoint, {})
        for file, record in manifest.files.items():
            size = present.get(file, "no")
            if size != record["bytes"]:
                address = self.store.address(self.name(checkpoint, file))
                raise CheckpointError(f"{address}: {size} bytes, the manifest says {record['bytes']}")

        def bring_file(file: str) -> None:
            path = folder / file
            expected = manifest.files[file]["bytes"]
            if not path.is_file() or path.stat().st_size != expected:
                self.store.fetch(self.name(checkpoint, file), path, expected)

        each(manifest.files, bring_file)
        return Chosen(folder, verify(folder))

    def fetch_newest(self) -> Chosen:
        """Bring the newest committed checkpoint here, as `fetch` does."""
        return self.fetch(self.committed()[0])

    def refuse(self, checkpoint: str, problem: str, attempt: int) -> None:
        """Mark a checkpoint as bad: a person may want to look at it, and no later attempt tries it again."""
        marker = json.dumps({"refused by attempt": attempt, "because": problem})
        self.store.put(self.name(checkpoint, REFUSED), marker.encode())

    def forget_others(self, checkpoint: str) -> None:
        """Delete local copies of other checkpoints, and what is left of saves: the store has all that counts."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name == FETCHING:
                    continue
                if path.is_file():
                    path.unlink(missing_ok=True)
                elif path.name != checkpoint:
                    shutil.rmtree(path, ignore_errors=True)


def name_of(manifest: Manifest) -> str:
    """Return the name of the checkpoint that a save becomes."""
    return f"step-{manifest.step:010d}-{manifest.attempt:06d}"


def attempt_of(checkpoint: str) -> int:
    """Return the attempt in a checkpoint's name; 0 for one that was copied here from a folder and has none."""
    _, _, attempt = checkpoint.removeprefix("step-").partition("-")
    return int(attempt or 0)
