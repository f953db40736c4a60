"""What `patchline status` and `patchline checkpoints` do with a run at s3://…: they read a copy of its small files.

1. A temporary folder gets what the commands read: records, metrics, and of every checkpoint the manifest alone.
2. The command does its work there, as in any run directory, and says the URL instead of the folder.
3. Only what has to be read whole (`verify`, `inspect`, `export`) is fetched, one checkpoint at a time.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from data.errors import CheckpointError, UsageError
from data.files import write_whole
from data.store import Store, check_store_url, each
from jobs.commands import checkpoints
from jobs.commands import status as status_command
from jobs.ownership import OWNER_FILE
from pipeline.checkpoints.manifest import MANIFEST, committed
from pipeline.checkpoints.stored import ATTEMPTS, REFUSED, SWEPT, StoredCheckpoints

# Of the run and of each stage; other files are read by no command here.
SMALL_FILES = ("status.json", OWNER_FILE, "stage.json", "task.json", "done.json", "metrics.jsonl")


def status(url: str) -> list[str]:
    """Show where a run stands, as `status.status` does. Raises UsageError where there is no run, StorageError."""
    with local_copy(url) as copy:
        return [copy.in_words(line) for line in status_command.status(copy.path)]


def list_all(url: str) -> Iterator[str]:
    """List every checkpoint of every stage, as `checkpoints.list_all` does."""
    with local_copy(url) as copy:
        for line in checkpoints.list_all(copy.path):
            yield copy.in_words(line)


def verify_all(url: str, step: int | None) -> Iterator[str]:
    """Fetch and read every byte of every checkpoint meant. Raises CheckpointError in the end where one is bad."""
    bad = 0
    with local_copy(url) as copy:
        for folder in checkpoints.selected(copy.path, step):
            began = time.monotonic()
            try:
                copy.fetch(folder)
            except CheckpointError as error:
                bad += 1
                yield copy.in_words(f"{checkpoints.name_of(folder)}  BAD: {error}")
            else:
                yield f"{checkpoints.name_of(folder)}  whole ({time.monotonic() - began:.1f}s)"
            # The room of one checkpoint has to do.
            shutil.rmtree(folder)
    if bad:
        raise CheckpointError(f"bad checkpoints: {bad}\n  a start marks them, and loads the newest whole one")


def inspect(url: str, step: int | None) -> Iterator[str]:
    """Show the manifest and the parameters of a checkpoint, as `checkpoints.inspect` does."""
    with local_copy(url) as copy:
        folder = checkpoints.newest(copy.path, step)
        copy.fetch(folder)
        for line in checkpoints.inspect(folder, None):
            yield copy.in_words(line)


def export_weights(url: str, step: int | None, target: Path) -> Iterator[str]:
    """Write the weights of a checkpoint into a local folder, as `checkpoints.export_weights` does."""
    with local_copy(url) as copy:
        folder = checkpoints.newest(copy.path, step)
        copy.fetch(folder)
        for line in checkpoints.export_weights(folder, None, target):
            yield copy.in_words(line)


def prune(url: str, keep: int, keep_every: int) -> Iterator[str]:
    """Delete old checkpoints in the store, as `checkpoints.prune` does on disk, after the same checks."""
    checkpoints.check_keep(keep)
    with local_copy(url) as copy:
        stages = checkpoints.stage_folders(copy.path)
        for stage in stages:
            for folder in committed(stage / "checkpoints")[:keep]:
                copy.fetch(folder)
                shutil.rmtree(folder)
        for stage in stages:
            for name in StoredCheckpoints(copy.run, stage).prune(keep, keep_every):
                yield f"{stage.name}: {name} deleted"


class Copy:
    """A local copy of a run's small files: `path` is that of the run, or of the stage that the URL names."""

    def __init__(self, run: str, folder: Path, stage: str) -> None:
        self.run = run
        self.folder = folder
        self.path = folder / stage if stage else folder

    def in_words(self, line: str) -> str:
        """Return a line with the run's URL in the place of the folder."""
        return line.replace(str(self.folder), self.run)

    def fetch(self, checkpoint: Path) -> None:
        """Bring the files of a checkpoint here and read every byte. Raises CheckpointError where it is bad."""
        StoredCheckpoints(self.run, checkpoint.parents[1]).fetch(checkpoint.name)


@contextmanager
def local_copy(url: str) -> Iterator[Copy]:
    """Give the block a copy of what commands read of a run, or of one of its stages, in a temporary folder."""
    run = check_store_url(url)
    stage = ""
    # A stage's folder is told by its record, and of the run above it the end of the last command is read.
    if Store(run).get("stage.json") is not None:
        run, _, stage = run.rpartition("/")
    store = Store(run)
    sizes = store.sizes()
    if not sizes:
        raise UsageError(f"no run at {run}\n  expected s3://BUCKET/NAME, as the recipe's run: says")
    with TemporaryDirectory(prefix="patchline-run-") as temporary:
        folder = Path(temporary).resolve() / Path(run).name

        def fetch(name: str) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, store.get(name) or b"")

        folder.mkdir()
        each([name for name in sizes if is_read(name)], fetch)
        each(
            [name for name in sizes if name.startswith(f"{ATTEMPTS}/")], lambda name: mark_attempt(store, name, folder)
        )
        name_uncommitted(folder, sizes)
        yield Copy(run, folder, stage)


def is_read(name: str) -> bool:
    """Tell whether a command reads the file of this name whole: a small one of the run or a stage, or a manifest."""
    *folders, file = name.split("/")
    return (len(folders) < 2 and file in SMALL_FILES) or file == MANIFEST


def mark_attempt(store: Store, name: str, folder: Path) -> None:
    """Make the folder of an attempt that was claimed, by which a stage's attempts are counted."""
    stage = json.loads(store.get(name) or b"{}").get("stage")
    if stage:
        (folder / stage / "attempts" / f"attempt-{Path(name).stem}").mkdir(parents=True, exist_ok=True)


def name_uncommitted(folder: Path, sizes: dict[str, int]) -> None:
    """Give the folders of what is not committed the names that they have on disk: "bad-…" and ".tmp-…"."""
    for checkpoint in {Path(name).parent for name in sizes if Path(name).parent.parent.name == "checkpoints"}:
        local = folder / checkpoint
        names = {Path(name).name for name in sizes if Path(name).parent == checkpoint}
        number = checkpoint.name.removeprefix("step-")
        if REFUSED in names or SWEPT in names or MANIFEST not in names:
            shutil.rmtree(local, ignore_errors=True)
        if REFUSED in names:
            local.with_name(f"bad-{number}").mkdir(parents=True)
        elif MANIFEST not in names:
            local.with_name(f".tmp-{number}").mkdir(parents=True)


def refuse(path: str, command: str) -> None:
    """Raise UsageError where a command that reads folders is given the URL of a run."""
    if "://" in path:
        raise UsageError(
            f"{command} takes a folder, found {path}\n"
            "  status and checkpoints read a run in a store; for the others copy it to a disk first,\n"
            f"  with the store's own tools, for example: aws s3 sync {path} runs/NAME"
        )


def refuse_as_weights(path: str, command: str) -> None:
    """Raise UsageError, which names the command that helps, where one that reads weights is given a run's URL."""
    if "://" in path:
        raise UsageError(
            f"{command} takes weights on a disk, found {path}\n"
            "  fetch those of a run in a store first\n"
            f"  type: python -m jobs checkpoints export {path} --to weights/NAME, then {command} weights/NAME"
        )
