"""Open what a person names: the folder or URL of a run, of a stage, or of one checkpoint.

For a run at s3://… the records and metrics are fetched into a temporary folder. A checkpoint is fetched only by a
command that needs all of it. Commands print the URL instead of the folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from data.bucket import Bucket, check_store_url, local_name
from data.errors import DataError, UsageError
from data.files import MANIFEST, state_folder, write_atomically
from data.storage import Folder, Storage
from jobs.named_stages import CHECKPOINTS, RECORD, find_stage
from jobs.run.sync import fetch_small_files
from models.weights.folder import CONFIG
from pipeline.artifacts import (
    DONE,
    EXAMPLES,
    EXCLUDED_STEPS,
    PROVENANCE,
    TASK,
    WEIGHT_FILES,
    read_done,
)
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints, checkpoints_in

# Files of the run and of each stage that the commands read.
OF_RUN = ("status.json",)
OF_STAGE = (RECORD, TASK, DONE, CONFIG, PROVENANCE, "metrics.jsonl", "incidents.txt")
SMALL_FILES = (*OF_RUN, *OF_STAGE, "evaluation.json", "sweep.json", EXAMPLES, EXCLUDED_STEPS)


@dataclass(frozen=True)
class OpenedRun:
    """A run that a person has named, or one of its stages, or one of its checkpoints."""

    name: str  # as it was typed
    storage: Storage
    stages: list[StageCheckpoints]  # all of the run, or the one that was named
    only: str = ""  # the checkpoint that was named; "" for a run or a stage

    def in_words(self, line: str) -> str:
        """Return a line with the run's URL instead of its local copy."""
        return line.replace(str(self.storage.local), self.storage.address())


@contextmanager
def opened(name: str) -> Iterator[OpenedRun]:
    """Yield the run, stage or checkpoint of this path or URL. Raises UsageError if there is none."""
    if "://" in name:
        with local_copy(name) as (store, stage):
            yield OpenedRun(name, store, [StageCheckpoints(store, stage)] if stage else stages_of(store))
        return

    path = Path(name)
    if not path.exists():
        path = Path(find_stage(name, CHECKPOINTS))
    path = path.resolve()
    if (path / MANIFEST).exists():
        checkpoints = checkpoints_in(path.parent)
        yield OpenedRun(name, checkpoints.storage, [checkpoints], path.name)
    elif (path / "checkpoints").is_dir():
        checkpoints = checkpoints_in(path / "checkpoints")
        yield OpenedRun(name, checkpoints.storage, [checkpoints])
    else:
        storage = Folder(path)
        yield OpenedRun(name, storage, stages_of(storage))


def stages_of(storage: Storage) -> list[StageCheckpoints]:
    """Return the checkpoints of every stage that has any, sorted by name. Raises UsageError if there are none."""
    stages: set[str] = set()
    for name in storage.list():
        stage, _, below = name.partition("/")
        if below.split("/")[0] == "checkpoints":
            stages.add(stage)
    if not stages:
        raise UsageError(
            f"{storage.address()} holds no checkpoints\n"
            "  name a run directory, a stage's folder in it, or a step-* folder"
        )
    return [StageCheckpoints(storage, stage) for stage in sorted(stages)]


@contextmanager
def local_copy(url: str, *, with_logs: bool = False) -> Iterator[tuple[Bucket, str]]:
    """Yield a run with a temporary local folder, and the stage in it that the URL names, "" for none.

    The folder has the files that commands read, and each log.txt if `with_logs`. Raises UsageError if there is no run,
    StorageError.
    """
    run = check_store_url(url)
    stage = ""
    stage_name = ""
    with TemporaryDirectory(prefix="patchline-run-") as temporary:
        folder = Path(temporary).resolve()
        # A stage's folder has a record; the end of the last command is read from the run above it.
        if Bucket(run, folder).read("stage.json") is not None:
            run, _, stage = run.rpartition("/")
        store = Bucket(run, folder / run.rpartition("/")[2])
        is_there = bool(store.list())
        # RUN/STAGE without the key of the stage's folder; the run itself has two names or more after s3://.
        if not is_there and run.count("/") > 3:
            run, _, stage_name = run.rpartition("/")
            store = Bucket(run, folder / run.rpartition("/")[2])
            is_there = any(file.count("/") == 1 and file.endswith(f"/{RECORD}") for file in store.list())
        if not is_there:
            raise UsageError(f"no run at {url}\n  expected s3://BUCKET/NAME, as the recipe's run: says")
        store.local.mkdir()
        files = (*SMALL_FILES, "log.txt") if with_logs else SMALL_FILES
        # Small files lie in the run or in a stage.
        fetch_small_files(store, lambda name: name.count("/") < 2 and name.rpartition("/")[2] in files)
        try:
            if stage_name:
                stage = Path(find_stage(str(store.local / stage_name), RECORD, typed=url)).name
            yield store, stage
        except DataError as error:
            raise DataError(str(error).replace(str(store.local), store.url)) from None


def fetch_weights(url: str) -> str:
    """Return a folder of the user's cache with the weights of a URL: RUN, RUN/STAGE, or a stage's folder.

    Files that are there already are compared, not fetched again. Raises UsageError, DataError, StorageError,
    CheckpointError.
    """
    with local_copy(url) as (store, stage):
        folder = Path(find_stage(str(store.local / stage), typed=url))
        done = read_done(folder)
        if done is None:
            raise DataError(
                f"{url}: {folder.name} has not finished\n  wait for its end, and type the same command again"
            )
        cache = Bucket(store.url, state_folder() / "weights" / local_name(store.url))
        for name in (*WEIGHT_FILES, PROVENANCE):
            if name in done["files"]:
                record = done["files"][name]
                cache.ensure_local(f"{folder.name}/{name}", record["bytes"], record["sha256"])
        # Last: it promises that the others are there.
        write_atomically(cache.local / folder.name / DONE, (folder / DONE).read_bytes())
        return str(cache.local / folder.name)
