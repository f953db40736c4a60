"""Open the run, stage or checkpoint named by a command's argument: RUN, RUN/STAGE or RUN/STAGE/step-50, a path or URL.

The small files (records and metrics) of a run at s3://… are downloaded to a temporary folder. Checkpoints are
downloaded only by the commands that read them. Commands print the URL instead of the temporary folder.
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
from jobs.extras.checkpoint_names import names_checkpoint
from jobs.named_stages import find_stage
from jobs.run.sync import fetch_small_files
from jobs.stage_folders import CHECKPOINTS, RECORD
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

# Small files read by commands: those of the run, and those of each stage.
OF_RUN = ("status.json",)
OF_STAGE = (RECORD, TASK, DONE, CONFIG, PROVENANCE, "metrics.jsonl", "incidents.txt")
SMALL_FILES = (*OF_RUN, *OF_STAGE, "evaluation.json", "sweep.json", EXAMPLES, EXCLUDED_STEPS)


@dataclass(frozen=True)
class OpenedRun:
    """The run, stage or checkpoint named by a command's argument."""

    name: str  # as the user typed it
    storage: Storage
    stages: list[StageCheckpoints]  # all stages of the run, or only the named one
    only: str = ""  # the named checkpoint, such as "step-50"; "" for a run or a stage

    def in_words(self, line: str) -> str:
        """Replace the local copy's path in a line with the run's URL."""
        return line.replace(str(self.storage.local), self.storage.address())


@contextmanager
def opened(name: str) -> Iterator[OpenedRun]:
    """Open a run, stage or checkpoint by path or URL. Raises UsageError if there is none."""
    run, only = name, ""
    if names_checkpoint(name) and not (Path(name) / MANIFEST).exists():
        run, _, only = name.rstrip("/").rpartition("/")
        run = run.removesuffix("/checkpoints")
    if "://" in run:
        with local_copy(run) as (store, stage):
            yield OpenedRun(run, store, [StageCheckpoints(store, stage)] if stage else stages_of(store), only)
        return

    path = Path(run)
    if not path.exists():
        path = Path(find_stage(run, CHECKPOINTS))
    path = path.resolve()
    if (path / MANIFEST).exists():
        checkpoints = checkpoints_in(path.parent)
        yield OpenedRun(name, checkpoints.storage, [checkpoints], path.name)
    elif (path / "checkpoints").is_dir():
        checkpoints = checkpoints_in(path / "checkpoints")
        yield OpenedRun(run, checkpoints.storage, [checkpoints], only)
    else:
        storage = Folder(path)
        yield OpenedRun(run, storage, stages_of(storage), only)


def stages_of(storage: Storage) -> list[StageCheckpoints]:
    """Return the checkpoints of all stages with checkpoints, sorted by stage. Raises UsageError if there are none."""
    stages: set[str] = set()
    for name in storage.list():
        stage, _, below = name.partition("/")
        if below.split("/")[0] == "checkpoints":
            stages.add(stage)
    if not stages:
        raise UsageError(
            f"found no checkpoints in {storage.address()}\n"
            "  expected a run directory, a stage's folder in it, or a checkpoint, such as RUN/STAGE/step-50"
        )
    return [StageCheckpoints(storage, stage) for stage in sorted(stages)]


@contextmanager
def local_copy(url: str, *, with_logs: bool = False) -> Iterator[tuple[Bucket, str]]:
    """Download a run's small files to a temporary folder; yield the run's local folder and the stage in the URL.

    The stage is "" if the URL names the whole run. `with_logs` also downloads each log.txt. Raises UsageError if there
    is no run at the URL, DataError if the run lacks the stage, or StorageError if the store cannot be read.
    """
    run = check_store_url(url)
    stage = ""
    stage_name = ""
    with TemporaryDirectory(prefix="patchline-run-") as temporary:
        folder = Path(temporary).resolve()
        # 1. RUN/STAGE-KEY: a stage's folder has a stage.json. Open its run, which has the last command's result.
        if Bucket(run, folder).read("stage.json") is not None:
            run, _, stage = run.rpartition("/")
        store = Bucket(run, folder / run.rpartition("/")[2])
        exists = bool(store.list())
        # 2. RUN/STAGE without the key. A run's URL has at least two names after s3://.
        if not exists and run.count("/") > 3:
            run, _, stage_name = run.rpartition("/")
            store = Bucket(run, folder / run.rpartition("/")[2])
            exists = any(file.count("/") == 1 and file.endswith(f"/{RECORD}") for file in store.list())
        if not exists:
            raise UsageError(f"no run at {url}\n  expected s3://BUCKET/NAME, as in the recipe's run: key")
        store.local.mkdir()
        files = (*SMALL_FILES, "log.txt") if with_logs else SMALL_FILES
        # Small files are directly in the run's folder or in a stage's folder.
        fetch_small_files(store, lambda name: name.count("/") < 2 and name.rpartition("/")[2] in files)
        try:
            if stage_name:
                stage = Path(find_stage(str(store.local / stage_name), RECORD, typed=url)).name
            yield store, stage
        except DataError as error:
            raise DataError(str(error).replace(str(store.local), store.url)) from None


def fetch_weights(url: str) -> str:
    """Download the weights of a run or stage from an object store to the user's cache; return the cache folder.

    Files already in the cache are verified by digest and not downloaded again. Raises UsageError if there is no run at
    the URL, DataError if the stage is missing or unfinished, CheckpointError if a downloaded file is damaged, or
    StorageError if the store cannot be read.
    """
    with local_copy(url) as (store, stage):
        folder = Path(find_stage(str(store.local / stage), typed=url))
        done = read_done(folder)
        if done is None:
            raise DataError(
                f"{url}: the stage {folder.name} has not finished, so it has no weights yet\n"
                "  wait until it has finished, then run the same command again"
            )
        cache = Bucket(store.url, state_folder() / "weights" / local_name(store.url))
        for name in (*WEIGHT_FILES, PROVENANCE):
            if name in done["files"]:
                record = done["files"][name]
                cache.ensure_local(f"{folder.name}/{name}", record["bytes"], record["sha256"])
        # done.json comes last: it marks the folder as complete.
        write_atomically(cache.local / folder.name / DONE, (folder / DONE).read_bytes())
        return str(cache.local / folder.name)
