"""The data structures of a resolved recipe: its stages with their kinds, keys and folders.

- `StageKind` is the base class of all stage kinds. A kind defines its inputs, model and checks, and how it runs. Each
  kind is a class in a file of jobs/stages or of an extra.
- `Stage` is one section of a recipe, and `Campaign` the whole recipe. jobs/recipe/campaign.py builds both.
- `Context` is a running stage of a campaign; it is passed to `StageKind.run` and used by the stage's attempts.
- `CheckResult` is the result of one check of a stage. `Available` reads the existing data sets for these checks
  (jobs/recipe/validate.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from data.errors import ClusterError, ConfigError, DataError, ExitCode, PatchlineError, exit_code
from data.files import error_text
from data.index.document import load_index
from data.index.index import Index
from data.storage import Storage, open_storage
from jobs.cluster_config import ClusterConfig
from models import ModelConfig
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.config import ConfigDataclass

MaybeText = TypeVar("MaybeText", str, str | None)

# ------------------------------------------------------------------------ stage kinds


class Reads(Enum):
    """The type of an input. Any input may also be another stage's output: "@stage/part"."""

    SET = "set"  # the index of a data set, or the index's folder
    WEIGHTS = "weights"  # a folder written by a stage or by `import`
    ANY_WEIGHTS = "any weights"  # the same, or weights from timm, transformers or the official repository
    FILE = "file"  # identified by the digest of its content
    OUTCOME = "outcome"  # the result of a finished stage of any kind, even if it diverged
    TABLE = "table"  # a sweep's table: the folder with its sweep.json


OF_WEIGHTS = (Reads.WEIGHTS, Reads.ANY_WEIGHTS)


@dataclass(frozen=True)
class SharedClasses:
    """Data sets, and optionally weights, that must agree on the meaning of class ids."""

    sets: Mapping[str, str]  # field → path, or "@stage/set"
    with_head: bool = False  # include the weights at `init`, if the stage keeps their head
    trained: Collection[str] = ()  # fields of the training sets, whose class names become those of the model's outputs


class StageKind:
    """Base class of stage kinds: a kind's inputs, model, checks, and how it runs.

    A subclass sets the class attributes and overrides the methods that it needs. In all methods, `cfg` is an instance
    of `config`.
    """

    name: str  # name of the kind in a recipe
    config: type[ConfigDataclass]  # the config of a stage's section
    defaults: ConfigDataclass | None = None  # the kind's defaults, if they differ from those of `config`
    # Dotted names of the fields that name inputs; "*" matches every name in a section.
    inputs: ClassVar[Mapping[str, Reads]] = {}
    files: tuple[str, ...] = ()  # other fields that may contain relative paths
    makes_weights = False  # other stages can start from its weights
    needs_workers = True  # False: the driver does the work
    trains = False  # `config` is a TrainConfig
    missing_module = ""  # path of the missing file or folder, for a kind that cannot be imported

    def run(self, cfg: Any, context: "Context") -> Mapping[str, Any]:
        """Run the stage; return its entries for done.json."""
        raise NotImplementedError

    def is_input(self, cfg: Any, field_name: str) -> bool:
        """Return whether the stage's key depends on the content of this field's input instead of its path."""
        return True

    def sets(self, cfg: Any) -> Collection[str]:
        """Return the names of the data sets that the stage writes; other stages read them as "@stage/set"."""
        return ()

    def set_classes(self, cfg: Any, name: str) -> int | str | None:
        """Return the minimum number of classes of a data set that the stage writes; None if the number is unknown.

        If the data set has the classes of another data set, return the path of the other or a reference to it.
        """
        return None

    def model(self, cfg: Any, source: ModelConfig | None) -> ModelConfig | None:
        """Return the architecture of the stage's model; None if the stage has no model or the model is unknown.

        `source` is the architecture of the initial weights; None if there are none or they do not exist yet.
        """
        return None

    def shared_classes(self, cfg: Any) -> list[SharedClasses]:
        """Return groups of data sets within which a class id must mean the same class."""
        return []

    def keeps_head(self, cfg: Any, source: ModelConfig | None, model: ModelConfig | None) -> bool:
        """Return whether the model keeps the head of its initial weights.

        `source` is the architecture of the initial weights, and `model` the architecture of the stage's model.
        """
        return True

    def checks(self, stage: "Stage", available: "Available") -> Iterable["CheckResult"]:
        """Check a stage before it runs: raise an exception for an error, and yield all other results."""
        return ()

    def ways_to_train_longer(self, stage: "Stage", folder: Path, available: "Available") -> Iterable[str]:
        """Return commands that train a stage for more steps; `folder` is that of its earlier start.

        Each command is followed by a description of its effect. Called if only the length of the stage has changed.
        """
        return ()

    def check_outputs(self, stage: "Stage", done: Mapping[str, Any], available: "Available") -> Iterable["CheckResult"]:
        """Check the outputs of a finished stage, in addition to the digests of its files; `done` is its done.json."""
        return ()

    def metrics(self, cfg: Any) -> Iterable[str]:
        """Return the names of the metrics that the finished stage reports."""
        return ()

    def repeat_evaluation(
        self, campaign: "Campaign", stage: "Stage", changed: Collection[str]
    ) -> tuple[Collection[str], list[str]]:
        """Return evaluation settings, and commands that re-evaluate a finished stage with the current settings.

        `changed` names the fields changed since the stage finished. Both results are empty if no command is needed.
        """
        return (), []

    # Methods that work on the whole recipe.

    def expand(self, sections: "Sections", kinds: "Kinds") -> "Sections":
        """Replace sections before parsing, for example a sweep's section with one per run; return all sections."""
        return sections

    def placeholders(self, cfg: Any) -> Mapping[str, object]:
        """Return a placeholder, by name, for each value that this stage determines for other stages.

        Other stages refer to the value as "@stage/name".
        """
        return {}

    def values(self, folder: Path) -> Mapping[str, object]:
        """Return the values that a finished stage has determined for other stages, by name."""
        return {}

    def value_in_words(self, cfg: Any, name: str) -> str:
        """Describe how the stage determines the value of one of its `placeholders`."""
        raise NotImplementedError

    def check_parent(self, stage: "Stage", parent: "Stage", available: "Available") -> None:
        """Check a parent stage, whose output this stage reads, before the parent runs.

        Raises ConfigError or DataError if this stage could not use the parent's output.
        """

    def make_absolute(
        self, name: str, section: dict[str, Any], patterns: Sequence[str], absolute: "MakeAbsolute"
    ) -> None:
        """Make relative paths absolute in the parts of a section that only this stage kind understands.

        `patterns` match the fields of section `name` that contain paths.
        """

    @property
    def reads_outcomes(self) -> bool:
        """Return whether a stage reads the results of its parents even if they have diverged."""
        return Reads.OUTCOME in self.inputs.values()

    def inputs_of(self, cfg: ConfigDataclass) -> dict[str, tuple[str, Reads]]:
        """Return the non-empty input fields, for example {"data.train": ("@shards/train", Reads.SET)}."""
        inputs: dict[str, tuple[str, Reads]] = {}
        for pattern, reads in self.inputs.items():
            for field_name, value in fields_matching(pattern, cfg).items():
                if value is None or not self.is_input(cfg, field_name):
                    continue
                assert isinstance(value, str), "every field of `inputs` is a string or None"
                inputs[field_name] = (value, reads)
        return inputs


def fields_matching(pattern: str, stage_config: ConfigDataclass) -> dict[str, object]:
    """Return the config's fields that match a pattern, by dotted name; "*" matches every name in a section."""
    reached: dict[str, object] = {"": stage_config}
    # Descend one level per iteration: "data.mixture.*.train" → data → mixture → each data set → its train.
    for part in pattern.split("."):
        deeper: dict[str, object] = {}
        for path, section in reached.items():
            if part == "*":
                assert isinstance(section, Mapping), "* matches the names in a section"
                for name, entry in section.items():
                    deeper[f"{path}.{name}"] = entry
            else:
                deeper[f"{path}.{part}".lstrip(".")] = getattr(section, part)
        reached = deeper
    return reached


# ------------------------------------------------------------------------ a campaign


def reference(value: str) -> tuple[str, str] | None:
    """Split the reference "@shards/train" into ("shards", "train"); return None for a path."""
    if not value.startswith("@"):
        return None
    stage, _, part = value[1:].partition("/")
    return stage, part


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe; `key.resolve` fills in the fields from `model` on.

    The values that other stages determine (`references`) become known while the campaign runs; until then, `config` has
    placeholders for them.
    """

    name: str
    kind: StageKind
    config: Any  # an instance of the kind's config
    source: str  # its section in the recipe; a sweep's section becomes several stages
    references: Mapping[str, str] = field(default_factory=dict)  # field → "@stage/name" that determines its value
    chosen: Mapping[str, object] = field(default_factory=dict)  # field of `references` → its value, if known
    # input field → "@stage/part" or a path; includes `references`
    parents: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Reads] = field(default_factory=dict)  # input field → its type, except for `references`

    model: ModelConfig | None = None  # the model after the stage; None if there is no model or it is unknown
    keeps_head: bool = False  # whether the model has the head of its initial weights, whose class ids then apply
    key: str = ""
    # Inputs in the key → digest of their content, or the key of the stage that writes them.
    inputs: Mapping[str, str] = field(default_factory=dict)
    eval_inputs: Mapping[str, str] = field(default_factory=dict)  # the same for data sets not in the key
    missing: "tuple[MissingInput, ...]" = ()  # missing inputs from outside the campaign

    @property
    def is_run(self) -> bool:
        """Return whether the stage is a run of a sweep: one of several stages expanded from the same section."""
        return self.name != self.source

    @property
    def pending(self) -> tuple[str, ...]:
        """Return the fields of `references` with unknown values."""
        return tuple(name for name in self.references if name not in self.chosen)

    @property
    def links(self) -> dict[str, tuple[str, str]]:
        """Return the fields of `parents` that refer to another stage: field → (name of the stage, part)."""
        links = {name: reference(value) for name, value in self.parents.items()}
        return {name: link for name, link in links.items() if link is not None}


@dataclass(frozen=True)
class StageSection:
    """A stage's section of a recipe, after the expansion of sweeps."""

    values: Any  # the section; or a single value, if the recipe has a value instead of a section
    source: str  # name of the recipe's section from which this one was expanded


Sections = Mapping[str, StageSection]  # by stage name
Kinds = Mapping[str, StageKind]  # by the kind's name in a recipe
MakeAbsolute = Callable[[str, str], str]  # (key of a recipe, its relative path) → absolute path


@dataclass(frozen=True)
class Campaign:
    """A resolved recipe: the run directory, the cluster, and the stages in order."""

    run: Path  # a local folder, also if the run is stored in an object store
    cluster: ClusterConfig
    stages: tuple[Stage, ...]
    trackers: ConfigDataclass | None = None  # experiment trackers; None if their extra is not installed
    remote: str | None = None  # URL of the run in an object store; None: all nodes share `run`
    budget: float | None = None  # maximum exaFLOPs of all training stages together; None: no limit

    @property
    def storage(self) -> Storage:
        """Return the storage that contains the run's files."""
        return open_storage(self.run, self.remote)

    def stage(self, name: str) -> Stage:
        """Return the stage with this name.

        If there is no such stage, raises ConfigError, which suggests the most similar name.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(f"the recipe has no stage {name!r}{did_you_mean(name, names)}")

    def directory(self, stage: Stage) -> Path:
        """Return the folder of a stage in the run directory."""
        return self.run / f"{stage.name}-{stage.key[:8]}"

    def path_of(self, value: MaybeText) -> MaybeText:
        """Return the absolute path of "@stage/part" or of a path; URLs and None are returned unchanged."""
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
        """Return a stage's done.json, or None if the stage has not finished. Raises DataError if it is damaged."""
        return artifacts.read_done(self.directory(stage))


@dataclass(frozen=True)
class Context:
    """A running stage with its campaign, and callbacks for logging, progress and stop requests."""

    campaign: Campaign
    stage: Stage
    log: Callable[[str], None]
    # called while an attempt's workers run: (number of the attempt, last step that every worker has reported)
    poll: Callable[[int, int], None]
    stop_requested: Callable[[], bool]  # whether this process should stop
    class_names: tuple[str, ...] = ()  # of the model's outputs, as far as known (jobs/recipe/class_names.py)
    # (done, total, text) → whether a terminal shows the progress line
    show_progress: Callable[[int, int | None, str], bool] = lambda done, total, text: False
    # called before each attempt; raises RunOwned if another process has taken over the run
    check_owned: Callable[[], None] = lambda: None

    @property
    def directory(self) -> Path:
        """Return the stage's folder in the run directory."""
        return self.campaign.directory(self.stage)

    def attempt_folder(self, attempt: int) -> Path:
        """Return the folder for the records and logs of an attempt's workers."""
        return attempt_folder(self.directory, attempt)

    @property
    def checkpoints(self) -> StageCheckpoints:
        """Return the checkpoints of the stage."""
        return StageCheckpoints(self.campaign.storage, self.directory.name)

    @property
    def model(self) -> ModelConfig:
        """Return the architecture of the stage's model; call this only for stages with a model."""
        assert self.stage.model is not None, f"{self.stage.name} has no model, or its initial weights are missing"
        return self.stage.model


# ------------------------------------------------------------------------ checks

MEMORY = "memory"  # subject of results about a stage's memory
ERRORS: dict[int, type[PatchlineError]] = {
    ExitCode.CONFIG: ConfigError,
    ExitCode.DATA: DataError,
    ExitCode.UNAVAILABLE: ClusterError,
}


@dataclass(frozen=True)
class CheckResult:
    """A check's result: OK, WARN or FAIL. `plan` and `run` exit with the first FAIL's code; `preflight` reports all."""

    level: Literal["OK", "WARN", "FAIL"]
    subject: str
    text: str
    remedy: str = ""  # lines with what was expected and what to type
    exit_code: ExitCode = ExitCode.DONE  # for a FAIL, the exit code of the command

    @staticmethod
    def of(error: Exception, subject: str) -> "CheckResult":
        """Convert an exception to a check result of level FAIL."""
        text, _, remedy = (error_text(error) if isinstance(error, OSError) else str(error)).partition("\n")
        return CheckResult("FAIL", subject, text, remedy, ExitCode(exit_code(error)))

    @property
    def message(self) -> str:
        """Return the text and the remedy."""
        return f"{self.text}\n{self.remedy}".rstrip("\n")

    def error(self) -> PatchlineError:
        """Convert this result, which must have level FAIL, to an exception."""
        error = ERRORS.get(self.exit_code, PatchlineError)(self.message)
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True)
class MissingInput(CheckResult):
    """A FAIL for an input from outside the campaign that does not exist or cannot be used."""

    stage: str = ""
    field: str = ""  # the field of the stage's config that names the input: data.train
    reads: Reads = Reads.FILE
    path: str = ""
    problem: str = ""  # in one line

    @staticmethod
    def at(stage: str, field: str, reads: Reads, path: str, message: str) -> "MissingInput":
        """Return the result for an input; the first line of `message` is the problem."""
        problem, _, remedy = message.partition("\n")
        text = f"{stage}.{field}: {problem}"
        return MissingInput("FAIL", "inputs", text, remedy, ExitCode.DATA, stage, field, reads, path, problem)


def index_if_made(path: str) -> Index | None:
    """Load a data set's index; return None if it is unreadable, for example because the data is not packed yet."""
    try:
        return load_index(path)
    except PatchlineError:
        return None


class Available:
    """Reads the existing data sets of a campaign; loads each index once."""

    def __init__(self, campaign: Campaign, *, checks_files: bool = True) -> None:
        self.campaign = campaign
        self.checks_files = checks_files  # False: compare only the recipe and the indexes
        self.indexes: dict[str, Index | None] = {}
        self.readers_of: dict[str, list[Stage]] = {}  # parent stage's name → stages that read its output

    def index(self, value: str) -> Index | None:
        """Return the index of a data set named in the recipe; None if the index does not exist yet."""
        if value not in self.indexes:
            path = self.campaign.path_of(value)
            self.indexes[value] = index_if_made(path)
        return self.indexes[value]

    def classes(self, value: str) -> int | None:
        """Return the number of classes in a data set (before packing, a lower bound); None if unknown."""
        index = self.index(value)
        if index is not None:
            return index.classes
        link = reference(value)
        if link is None:
            return None
        maker = self.campaign.stage(link[0])
        known = maker.kind.set_classes(maker.config, link[1])
        # A subset has the classes of its parent data set.
        return self.classes(known) if isinstance(known, str) else known

    def readers(self, stage: Stage) -> list[Stage]:
        """Return the stages that read the output of this stage."""
        if not self.readers_of:
            for reader in self.campaign.stages:
                self.readers_of.setdefault(reader.name, [])
                for parent in dict.fromkeys(parent for parent, _ in reader.links.values()):
                    self.readers_of.setdefault(parent, []).append(reader)
        return self.readers_of[stage.name]

    def made(self, values: Collection[str]) -> list[Index]:
        """Return the loaded index of each data set in `values` that exists."""
        indexes = []
        for value in values:
            index = self.index(value)
            if index is not None:
                indexes.append(index)
        return indexes
