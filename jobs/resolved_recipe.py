"""A recipe, resolved: which stages a campaign has, of which kinds, with which keys, and where each of them lies.

- `StageKind` is the base class of all kinds of stages: what a kind reads, its model, its checks, and how it runs. Each
  kind is a class in a file of jobs/stages or of an extra.
- `Stage` is a section of a recipe, `Campaign` all of them: jobs/recipe/campaign.py makes these of a recipe, and
  all else that works on a campaign reads them.
- `Context` is a stage of a campaign that runs: `StageKind.run` and the attempts of its workers are given it.
- `CheckResult` is the outcome of a check of a stage; `Available` holds the data that checks compare a stage with
  (jobs/recipe/validate.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from data.errors import ClusterError, ConfigError, DataError, ExitCode, PatchlineError, exit_code
from data.files import error_text
from data.index.document import load_index
from data.index.index import Index
from data.storage import Storage, open_storage
from jobs.cluster_config import ClusterConfig
from jobs.trackers_config import TrackersConfig
from models import ModelConfig
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.config import ConfigDataclass, structured

MaybeText = TypeVar("MaybeText", str, str | None)

# ------------------------------------------------------------------------ kinds of stages


class Reads(Enum):
    """What a field that names an input leads to. Each may also be the output of another stage: "@stage/part"."""

    SET = "set"  # the index of a set, or its folder
    WEIGHTS = "weights"  # a folder that a stage or `import` has written
    ANY_WEIGHTS = "any weights"  # the same, or weights of other projects
    FILE = "file"  # known by the digest of its content
    OUTCOME = "outcome"  # of a finished stage of any kind, also of one that has diverged
    TABLE = "table"  # of a sweep: the folder of its sweep.json


@dataclass(frozen=True)
class SharedClasses:
    """Sets in which a class id has to mean the same, and whether it has to in the weights that `init` names."""

    sets: Mapping[str, str]  # field → path, or "@stage/set"
    with_head: bool = False  # the weights' too, where the stage goes on with their head
    trained: Collection[str] = ()  # fields of the sets after which the model's own outputs are called


# `init` → the architecture of these weights; None where they are missing
SourceModel = Callable[[str], ModelConfig | None]


class StageKind:
    """A kind of stage: what it reads, its model, its checks, and how it runs.

    A subclass sets the class attributes and overrides the methods that it needs. In all methods, `cfg` is an instance
    of `config`.
    """

    name: str  # in a recipe
    config: type[ConfigDataclass]  # of the stage's section
    defaults: ConfigDataclass | None = None  # of the kind, if they differ from those of `config`
    # Fields that name inputs, by dotted name; "*" stands for every name of a section.
    inputs: ClassVar[Mapping[str, Reads]] = {}
    files: tuple[str, ...] = ()  # other fields that may be relative paths
    makes_weights = False  # which other stages may start from
    needs_workers = True  # otherwise the driver does the work
    trains = False  # `config` is a TrainConfig
    checks_budget = False  # `check_campaign` compares the stages with the recipe's `budget`
    missing_module = ""  # of a kind whose module is not in this checkout

    def run(self, cfg: Any, context: "Context") -> Mapping[str, Any]:
        """Do the work; return the stage's entries for done.json."""
        raise NotImplementedError

    def is_input(self, cfg: Any, field_name: str) -> bool:
        """Return whether a set field of `inputs` names an input by its content."""
        return True

    def missing(self, cfg: Any) -> Iterable[str]:
        """Return messages about fields of `files` whose files do not exist."""
        return ()

    def sets(self, cfg: Any) -> Collection[str]:
        """Return the names of the sets that the stage makes, which others read as "@stage/set"."""
        return ()

    def set_classes(self, cfg: Any, name: str) -> int | str | None:
        """Return the minimum number of classes of a set that the stage makes, as far as its source shows it.

        The result is a path or a reference if the set has the classes of another set.
        """
        return None

    def model(self, cfg: Any, source_model: SourceModel) -> ModelConfig | None:
        """Return the architecture of the stage's result; None if there is none or it is unknown."""
        return None

    def shared_classes(self, cfg: Any) -> list[SharedClasses]:
        """Return the groups of sets in which a class id must have one meaning."""
        return []

    def keeps_head(self, cfg: Any, source: ModelConfig | None, model: ModelConfig | None) -> bool:
        """Return whether the model keeps the head of the weights that it starts from.

        `source` is the architecture of these weights, `model` the stage's own.
        """
        return True

    def checks(self, stage: "Stage", available: "Available") -> Iterable["CheckResult"]:
        """Check a stage before it runs: raise for errors, yield all other results."""
        return ()

    def check_outputs(self, stage: "Stage", available: "Available") -> Iterable["CheckResult"]:
        """Check the outputs of a finished stage, in addition to the digests of its files."""
        return ()

    def metrics(self, cfg: Any) -> Iterable[str]:
        """Return the names of the metrics that the stage will have."""
        return ()

    # What a kind may do with a recipe as a whole.

    def expand(self, sections: "Sections", kinds: "Kinds") -> "Sections":
        """Return the sections of a recipe before they are parsed; a kind may replace one section by several."""
        return sections

    def placeholders(self, cfg: Any) -> Mapping[str, object]:
        """Return the values that other stages may refer to as "@stage/name", each with what stands for it until then.

        `values` has the same names.
        """
        return {}

    def values(self, folder: Path) -> Mapping[str, object]:
        """Return the values that a finished stage has determined for others, as far as it could."""
        return {}

    def value_in_words(self, cfg: Any, name: str) -> str:
        """Return in words how the stage finds one of its `placeholders`."""
        raise NotImplementedError

    def check_parent(self, stage: "Stage", parent: "Stage", available: "Available") -> None:
        """Check a stage that this one reads, before that one runs. Raises ConfigError or DataError."""

    def check_campaign(self, campaign: "Campaign") -> None:
        """Check a campaign whose stages have passed their checks. Raises ConfigError."""

    def make_absolute(
        self, name: str, section: dict[str, Any], patterns: Sequence[str], absolute: "MakeAbsolute"
    ) -> None:
        """Make relative paths absolute in parts of a section that only this kind understands.

        `patterns` name the fields of paths in the section `name`.
        """

    @property
    def reads_outcomes(self) -> bool:
        """Return whether a stage needs only the outcomes of its parents, which may have diverged."""
        return Reads.OUTCOME in self.inputs.values()

    @cached_property
    def all_defaults(self) -> Any:
        """Return the defaults in the form that `config.build` reads fastest: a sweep may have a hundred stages."""
        return structured(self.defaults or self.config)

    def inputs_of(self, cfg: ConfigDataclass) -> dict[str, tuple[str, Reads]]:
        """Return the fields that name inputs, where they are set: {"data.train": ("@shards/train", Reads.SET)}."""
        inputs: dict[str, tuple[str, Reads]] = {}
        for pattern, reads in self.inputs.items():
            for field_name, value in fields_matching(pattern, cfg).items():
                if value is None or not self.is_input(cfg, field_name):
                    continue
                assert isinstance(value, str), "every field of `inputs` is a text or None"
                inputs[field_name] = (value, reads)
        return inputs


def fields_matching(pattern: str, stage_config: ConfigDataclass) -> dict[str, object]:
    """Return the config's fields that a pattern names, by dotted name; "*" stands for every name of a section."""
    reached: dict[str, object] = {"": stage_config}
    # One level of the config a round: "data.mixture.*.train" goes to data, to mixture, to each set, to its train.
    for part in pattern.split("."):
        deeper: dict[str, object] = {}
        for path, section in reached.items():
            if part == "*":
                assert isinstance(section, Mapping), "a * stands for the names of a section"
                for name, entry in section.items():
                    deeper[f"{path}.{name}"] = entry
            else:
                deeper[f"{path}.{part}".lstrip(".")] = getattr(section, part)
        reached = deeper
    return reached


# ------------------------------------------------------------------------ a campaign


def reference(value: str) -> tuple[str, str] | None:
    """Return ("shards", "train") of "@shards/train"; None of a path."""
    if not value.startswith("@"):
        return None
    stage, _, part = value[1:].partition("/")
    return stage, part


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe; `key.resolve` fills in the fields below `pending`."""

    name: str
    kind: StageKind
    config: Any  # an instance of the kind's config
    source: str  # the section of the recipe that it comes from, which may have become several stages
    references: Mapping[str, str] = field(default_factory=dict)  # field → "@stage/name" of what determines its value
    pending: tuple[str, ...] = ()  # fields of `references` whose values are not known yet: `config` has placeholders

    # input field → "@stage/part" or a path, and `references`
    parents: Mapping[str, str] = field(default_factory=dict)
    model: ModelConfig | None = None  # that the stage ends with; None for one without, and where it is not known
    key: str = ""
    # Inputs that the key is of → digest of their content, or the key of the stage that makes them.
    inputs: Mapping[str, str] = field(default_factory=dict)
    eval_inputs: Mapping[str, str] = field(default_factory=dict)  # sets that are not in the key → as `inputs`
    missing: tuple[str, ...] = ()  # inputs outside the campaign that do not exist, as messages

    @property
    def is_run(self) -> bool:
        """Return whether the stage is one of several that a section has become."""
        return self.name != self.source


@dataclass(frozen=True)
class StageSection:
    """A stage's section as it would stand in a recipe that spells everything out."""

    values: Any  # the section, or a value if the recipe has one in its place
    source: str  # the section of the recipe that it comes from


Sections = Mapping[str, StageSection]  # by the names of their stages
Kinds = Mapping[str, StageKind]  # by the names of kinds in a recipe
MakeAbsolute = Callable[[str, str], str]  # (key of a recipe, its relative path) → the absolute path


@dataclass(frozen=True)
class Campaign:
    """What one recipe asks for: where, on how many workers, and which stages in which order."""

    run: Path  # a local folder also where the run is kept in an object store
    cluster: ClusterConfig
    stages: tuple[Stage, ...]
    trackers: TrackersConfig = TrackersConfig()  # noqa: RUF009 (frozen)
    remote: str | None = None  # URL of the run in an object store; None: all nodes share `run`
    budget: float | None = None  # exaFLOPs that all trained stages together may take; None: any

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

    def path_of(self, value: MaybeText) -> MaybeText:
        """Return the absolute path behind "@stage/part" or a path; a URL stays what it is, and None stays None."""
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


@dataclass(frozen=True)
class Context:
    """One stage of one campaign, ready to run: how its work is logged, and how somebody may end it."""

    campaign: Campaign
    stage: Stage
    log: Callable[[str], None]
    # called while an attempt's workers run, with its number and the last step that every worker has reported
    poll: Callable[[int, int], None]
    stop_requested: Callable[[], bool]  # this process is to end
    class_names: tuple[str, ...] = ()  # of the model's outputs, as far as known (jobs/recipe/class_names.py)
    # (done, total, text) → whether a terminal shows it, below the lines
    show_progress: Callable[[int, int | None, str], bool] = lambda done, total, text: False
    check_owned: Callable[[], None] = lambda: None  # before an attempt; raises RunOwned where the run was taken over

    @property
    def directory(self) -> Path:
        """Return the stage's own folder in the run directory."""
        return self.campaign.directory(self.stage)

    def attempt_folder(self, attempt: int) -> Path:
        """Return where the workers of an attempt leave their records and logs."""
        return attempt_folder(self.directory, attempt)

    @property
    def checkpoints(self) -> StageCheckpoints:
        """Return the checkpoints of the stage."""
        return StageCheckpoints(self.campaign.storage, self.directory.name)

    @property
    def model(self) -> ModelConfig:
        """Return the architecture that the stage ends with; a stage without one must not ask for it."""
        assert self.stage.model is not None, f"{self.stage.name} starts when the weights that tell its model are there"
        return self.stage.model


# ------------------------------------------------------------------------ checks

INPUTS = "inputs"  # the subject of results about inputs that are missing
MEMORY = "memory"  # of results about what a stage needs of it
ERRORS: dict[int, type[PatchlineError]] = {
    ExitCode.CONFIG: ConfigError,
    ExitCode.DATA: DataError,
    ExitCode.UNAVAILABLE: ClusterError,
}


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check: `plan` and `run` refuse a FAIL with its exit code, `preflight` shows all of them."""

    level: Literal["OK", "WARN", "FAIL"]
    subject: str
    text: str
    remedy: str = ""  # what was expected, and what to type next; a line each
    exit_code: ExitCode = ExitCode.DONE  # of a FAIL: what the run would end with

    @staticmethod
    def of(error: Exception, subject: str) -> "CheckResult":
        """Return the FAIL that an error is."""
        text, _, remedy = (error_text(error) if isinstance(error, OSError) else str(error)).partition("\n")
        return CheckResult("FAIL", subject, text, remedy, ExitCode(exit_code(error)))

    def error(self) -> PatchlineError:
        """Return the error that a FAIL is for a command that cannot go on."""
        error = ERRORS.get(self.exit_code, PatchlineError)(f"{self.text}\n{self.remedy}".rstrip("\n"))
        error.exit_code = self.exit_code
        return error


def index_if_made(path: str) -> Index | None:
    """Return the index of a set; None where it cannot be read, as before the stage that makes it has run."""
    try:
        return load_index(path)
    except PatchlineError:
        return None


class Available:
    """The data of a campaign that exists at the moment; each set is read once."""

    def __init__(self, campaign: Campaign, *, checks_files: bool = True) -> None:
        self.campaign = campaign
        self.checks_files = checks_files  # otherwise recipe and indexes alone are compared
        self.indexes: dict[str, Index | None] = {}
        self.readers_of: dict[str, list[Stage]] = {}  # by the name of the stage that is read

    def index(self, value: str) -> Index | None:
        """Return the index of a set that a recipe names; None where it has not been made yet."""
        if value not in self.indexes:
            self.indexes[value] = index_if_made(self.campaign.path_of(value))
        return self.indexes[value]

    def classes(self, value: str) -> int | None:
        """Return how many classes a set has, or will have at the least; None where nothing tells yet."""
        index = self.index(value)
        if index is not None:
            return index.classes
        link = reference(value)
        if link is None:
            return None
        maker = self.campaign.stage(link[0])
        known = maker.kind.set_classes(maker.config, link[1])
        # A part of another set is numbered as that one.
        return self.classes(known) if isinstance(known, str) else known

    def readers(self, stage: Stage) -> list[Stage]:
        """Return the stages that read a stage's output."""
        if not self.readers_of:
            for reader in self.campaign.stages:
                self.readers_of.setdefault(reader.name, [])
                links = [reference(value) for value in reader.parents.values()]
                for parent in dict.fromkeys(link[0] for link in links if link is not None):
                    self.readers_of.setdefault(parent, []).append(reader)
        return self.readers_of[stage.name]

    def made(self, values: Collection[str]) -> list[Index]:
        """Return the indexes of those sets that are there."""
        indexes = []
        for value in values:
            index = self.index(value)
            if index is not None:
                indexes.append(index)
        return indexes
