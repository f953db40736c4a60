"""What every stage is given, and how one stage names another's outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import PatchlineError
from data.index.document import load_index
from data.index.index import Index
from data.storage import Storage, open_storage
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints


@dataclass(frozen=True)
class Context:
    """One stage of one campaign, ready to run."""

    name: str
    run: Path  # the campaign's directory
    directory: Path  # the stage's own, named by its key
    key: str
    cluster: ClusterConfig
    resolve: Callable[[str | None], str | None]  # "@stage/part" or a path → absolute path
    model: Any  # resolved architecture, None for stages without one
    say: Callable[[str], None]
    tick: Callable[[Path, int], None]  # called with an attempt's folder and number while its workers work
    stopping: Callable[[], bool]  # somebody asked this process to end
    class_names: tuple[str, ...] = ()  # of the model's outputs, as far as known (jobs/recipe/class_names.py)
    remote: str | None = None  # URL of the run in an object store; `run` is then a local folder on every node
    check_owned: Callable[[], None] = lambda: None  # before an attempt; raises RunOwned where the run was taken over

    @property
    def storage(self) -> Storage:
        """Return where the run keeps its files."""
        return open_storage(self.run, self.remote)

    @property
    def checkpoints(self) -> StageCheckpoints:
        """Return the checkpoints of this stage."""
        return StageCheckpoints(self.storage, self.directory.name)


def reference(value: str) -> tuple[str, str] | None:
    """Return ("shards", "train") of "@shards/train"; None of a path."""
    if not value.startswith("@"):
        return None
    stage, _, part = value[1:].partition("/")
    return stage, part


def index_if_made(path: str) -> Index | None:
    """Return the index of a set; None where it cannot be read, as before the stage that makes it has run."""
    try:
        return load_index(path)
    except PatchlineError:
        return None
