"""A recipe, resolved: which stages a campaign has, with which keys, and where each of them lies in the run directory.

jobs/recipe/campaign.py makes these of a recipe; all else that works on a campaign reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.bucket import open_storage
from data.errors import ConfigError
from data.storage import Storage
from jobs.cluster_config import ClusterConfig
from jobs.context import reference
from jobs.monitor.trackers import TrackersConfig
from models.checks import did_you_mean
from pipeline import artifacts


@dataclass(frozen=True)
class Stage:
    """One section of a recipe, resolved."""

    name: str
    kind: str
    config: Any  # an instance of the kind's Config
    parents: dict[str, str]  # input field → what the recipe says: "@stage/part", or a path
    model: Any  # the architecture that the stage ends with; None for pack
    key: str
    # Inputs that the key is of → digest of their content, or the key of the stage that makes them.
    inputs: dict[str, str]
    missing: tuple[str, ...] = ()  # inputs outside the campaign that do not exist, as messages
    source: str = ""  # the section of the recipe: for a run of a sweep, the sweep's
    chosen: Mapping[str, str] = field(default_factory=dict)  # field → "@stage" of the table that chooses its value
    known: Mapping[str, Any] = field(default_factory=dict)  # field → value, as far as it has been chosen
    judged_on: Mapping[str, str] = field(default_factory=dict)  # sets that are not in the key → as `inputs`
    # The finished stage that it judges anew, of a stage that no recipe names (jobs/run/reevaluation.py).
    judges: str = ""

    @property
    def is_run(self) -> bool:
        """Return whether the stage is one of the runs of a sweep, or a table inside it."""
        return self.name != self.source


@dataclass(frozen=True)
class Campaign:
    """What one recipe asks for: where, on how many workers, and which stages in which order."""

    run: Path  # a local folder also where the run is kept in an object store
    cluster: ClusterConfig
    stages: tuple[Stage, ...]
    trackers: TrackersConfig = TrackersConfig()  # noqa: RUF009 (frozen)
    remote: str | None = None  # URL of the run in an object store; None: all nodes share `run`

    @property
    def place(self) -> str:
        """Return where the run is kept, for people."""
        return self.storage.address()

    @property
    def storage(self) -> Storage:
        """Return where the run keeps its files."""
        return open_storage(self.run, self.remote)

    def stage(self, name: str) -> Stage:
        """Return the stage of this name. Raises ConfigError, which suggests the nearest name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(f"the recipe has no stage {name!r}{did_you_mean(name, names)}")

    def directory(self, stage: Stage) -> Path:
        """Return the folder of a stage in the run directory."""
        return self.run / f"{stage.name}-{stage.key[:8]}"

    def resolve(self, value: str | None) -> str | None:
        """Return the absolute path behind "@stage/part" or a path; a URL stays what it is."""
        if value is None:
            return None
        link = reference(value)
        if link is not None:
            stage_name, part = link
            return str(self.directory(self.stage(stage_name)) / part)
        if "://" in value:
            return value
        return str(Path(value).resolve())

    def done(self, stage: Stage) -> dict[str, Any] | None:
        """What a finished stage left behind; None where it has not finished. Raises DataError for an altered record."""
        return artifacts.read_done(self.directory(stage))
