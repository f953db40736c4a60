"""A campaign: one recipe, its stages in order, one run directory.

How a recipe becomes a campaign, in order (`load`):
1. the YAML file is read and `key=value` overrides are laid on top;
2. `run`, `cluster` and `trackers` are taken out; any other section is a stage, whose kind is its name or its `kind:`;
3. each section becomes the frozen config of its kind, so that a wrong key stops here;
4. stages are put in order: one that names another's output ("@stage" or "@stage/part") comes after it;
5. each stage gets its model, and its key: the digest of its "forbid" fields and of its inputs;
6. `check_stage` compares each stage with the data that is there already; before it runs it is compared once more.

For example `pretrain: {data: {train: "@shards/train"}}` reads the set `train` that the stage `shards` packs. A stage's
folder is named by its key, `<run>/pretrain-1a2b3c4d`, so an edited recipe never overwrites what another recipe made.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Protocol

import models
from data.checks import check_name
from data.errors import ConfigError, DataError
from data.files import state_folder
from data.shards.index import Index, load_index
from data.store import check_store_url
from jobs import class_names
from jobs.cluster.worker_group import ClusterConfig
from jobs.context import index_if_made, reference
from jobs.monitoring.trackers import TrackersConfig
from jobs.ownership import check_place
from jobs.stages import any_weights, evaluate, fewshot, finetune, pack, pretrain, resize
from jobs.worlds import allowed_worlds
from models.checks import did_you_mean
from models.weights.files import CONFIG
from pipeline import config, handover
from pipeline.arithmetic import steps_of
from pipeline.config import require
from pipeline.evaluation.evaluate import check_shape
from pipeline.training_config import TrainConfig, check_model, check_schedule, model_config, trained_model


class StageKind(Protocol):
    """What a module in jobs/stages has: its config, its kind's own defaults, which fields name inputs, its work."""

    @property
    def Config(self) -> type: ...

    @property
    def DEFAULTS(self) -> Any: ...  # an instance of Config, or None

    @property
    def INPUTS(self) -> tuple[str, ...]: ...  # dotted names; "*" stands for every name of a section

    @property
    def FILES(self) -> tuple[str, ...]: ...  # other fields that may be relative paths, in the same way

    @property
    def run(self) -> Any: ...  # run(config, context) → what the stage did


KINDS: dict[str, StageKind] = {
    "pack": pack,
    "pretrain": pretrain,
    "resize": resize,
    "finetune": finetune,
    "fewshot": fewshot,
    "evaluate": evaluate,
}
MAKE_WEIGHTS = ("pretrain", "resize", "finetune")  # kinds that `init` may name
SCHEMA = 1  # of a stage's outputs; a bump runs every stage again
MISSING = "missing"  # stands for the digest of an input that cannot be read


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
    judges: str = ""  # the finished stage that it judges anew, of a stage that no recipe names (jobs/reevaluation.py)

    @property
    def module(self) -> StageKind:
        """Return the module in jobs/stages that does this kind's work."""
        return KINDS[self.kind]


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
        return self.remote or str(self.run)

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
        return handover.read_done(self.directory(stage))


# ------------------------------------------------------------------------------------------------ reading a recipe


def load(recipe: Path, overrides: list[str]) -> Campaign:
    """Read and validate a recipe. Raises ConfigError or DataError for anything that could not run."""
    values = config.with_home(config.plain_yaml(config.read_yaml(recipe, overrides)))
    return load_values(values, f"runs/{recipe.stem}", str(recipe))


def load_values(values: dict[str, Any], default_run: str, source: str) -> Campaign:
    """Validate the values of a recipe, which came from `source`. Raises ConfigError or DataError as `load`."""
    values = dict(values)
    # These three belong to the whole campaign; whatever is left is a stage.
    run = values.pop("run", default_run)
    # An empty variable of a shell, as in run=$RUN, must not lead into a run that is there.
    require(run not in (None, ""), f"run is empty, expected a folder\n  type run={default_run}")
    require(isinstance(run, str), f"run is {run!r}, expected a folder\n  type run=./{run}")
    # What is left of a `~` names somebody who has no home here; the folder of this name would be no home either.
    require(not run.startswith("~"), f"run is {run}: no user of this name is known here\n  type the path: run=/…")
    cluster = config.build(ClusterConfig, values.pop("cluster", {}), "cluster")
    trackers = config.build(TrackersConfig, values.pop("trackers", {}), "trackers")
    require(bool(values), f"{source} names no stage; known kinds: {', '.join(KINDS)}")

    sections = {name: read_section(name, section) for name, section in values.items()}
    # Parents first, because a stage's key and its model come from the stages that it reads.
    stages: dict[str, Stage] = {}
    for name in order_of_stages(sections):
        kind, stage_config = sections[name]
        stages[name] = resolve_stage(name, kind, stage_config, stages)

    # Every stage is checked before the first starts: the last must not be refused when the others have been computed.
    remote = check_store_url(run) if "://" in run else None
    folder = Path(run).resolve() if remote is None else scratch_folder(remote, cluster.scratch)
    campaign = Campaign(folder, cluster, tuple(stages.values()), trackers, remote)
    check_place(campaign.run)
    if remote is not None:
        check_no_pack(campaign)
    for stage in campaign.stages:
        check_stage(campaign, stage)
    return campaign


def scratch_folder(remote: str, base: str) -> Path:
    """Return the local folder of a run in an object store, the same on every node: named by the URL, below `base`."""
    name = f"{Path(remote).name}-{hashlib.sha256(remote.encode()).hexdigest()[:8]}"
    if base:
        return Path(base).expanduser().resolve() / name
    return (state_folder() / "runs" / name).resolve()


def check_no_pack(campaign: Campaign) -> None:
    """Raise ConfigError where a stage of a run in an object store packs shards, which only this machine would have."""
    for stage in campaign.stages:
        require(
            stage.kind != "pack",
            f"{stage.name} is a pack stage, and run is {campaign.remote}: other nodes could not read what it packs\n"
            "  expected sets that every node can read, such as data.train: indexes/train of shards at s3://…\n"
            "  pack them first, with a run in a folder or `python -m jobs pack`; copy the tars to the store;\n"
            "  then type python -m jobs index s3://BUCKET/SET --output indexes/train (docs/storage.md)",
        )


def read_section(name: str, section: Any) -> tuple[str, Any]:
    """Return the kind of a stage's section, and its config, an instance of the kind's Config."""
    check_name(name, "a stage", "rename it, and what reads it as @stage")
    hint = "" if name in KINDS else did_you_mean(name, KINDS)
    require(
        isinstance(section, Mapping),
        f"{name} is {section!r}, expected a stage's section{hint}\n"
        f"  take {name} out of the recipe, or give it keys: {name}.kind=…",
    )
    values = dict(section)
    kind = values.pop("kind", name)
    kinds = ", ".join(KINDS)
    require(isinstance(kind, str), f"{name}.kind is {kind!r}, expected one of {kinds}")
    if kind not in KINDS and "kind" in section:
        raise ConfigError(f"{name}.kind is {kind!r}, expected one of {kinds}{did_you_mean(kind, KINDS)}")
    if kind not in KINDS:
        nearest = did_you_mean(kind, [*KINDS, "run", "cluster", "trackers"])
        raise ConfigError(f"unknown stage or key {kind!r}{nearest}; or give the section a kind: {kinds}")

    # The defaults of a kind name its length in steps or in passes; a recipe may use the other way.
    if "steps" in values:
        values.setdefault("passes", None)
    if "passes" in values:
        values.setdefault("steps", None)
    module = KINDS[kind]
    return kind, config.build(module.Config, values, name, module.DEFAULTS)


def inputs_of(kind: str, stage_config: Any) -> dict[str, str]:
    """Return the fields of a stage that name inputs, where they are set: {"data.train": "@shards/train"}."""
    inputs: dict[str, str] = {}
    for pattern in KINDS[kind].INPUTS:
        for field, value in fields_matching(pattern, stage_config).items():
            if value is not None:
                inputs[field] = value
    return inputs


def fields_matching(pattern: str, stage_config: Any) -> dict[str, Any]:
    """Return the config's fields that a pattern names, by dotted name; "*" stands for every name of a section."""
    reached = {"": stage_config}
    # One level of the config a round: "data.mixture.*.train" goes to data, to mixture, to each set, to its train.
    for part in pattern.split("."):
        deeper = {}
        for path, section in reached.items():
            if part == "*":
                for name, entry in section.items():
                    deeper[f"{path}.{name}"] = entry
            else:
                deeper[f"{path}.{part}".lstrip(".")] = getattr(section, part)
        reached = deeper
    return reached


def order_of_stages(sections: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Return the names of the stages: each after the stages that it reads, otherwise in the recipe's order."""
    reads: dict[str, set[str]] = {}
    for name, (kind, stage_config) in sections.items():
        reads[name] = set()
        for field, value in inputs_of(kind, stage_config).items():
            link = reference(value)
            if link is None:
                continue
            # The sorter would take a name that does not exist for one more stage: refuse it here.
            parent, _ = link
            require(
                parent in sections,
                f"{name}.{field} is @{parent}, no such stage{did_you_mean(parent, sections)}",
            )
            reads[name].add(parent)

    sorter = TopologicalSorter(reads)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"stages read each other in a circle: {' ← '.join(error.args[1])}") from None

    # Of the stages that could come next, take the one that stands first in the recipe.
    recipe_order = list(sections)
    order: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        first = min(ready, key=recipe_order.index)
        ready.remove(first)
        order.append(first)
        sorter.done(first)
    return order


def resolve_stage(name: str, kind: str, stage_config: Any, earlier: Mapping[str, Stage]) -> Stage:
    """Look at a section's inputs, find its model, compute its key, and return its stage."""
    parents = inputs_of(kind, stage_config)
    keys: dict[str, str] = {}
    missing: list[str] = []
    # The key of a parent stands for its output, which need not exist yet: so `plan` knows all keys before a run.
    for field, value in parents.items():
        link = reference(value)
        if link is None:
            require(value != "???", f"{name}.{field} is missing: a path, or @stage")
            keys[field] = content_digest(name, kind, field, value, missing)
        else:
            parent_name, part = link
            parent = earlier[parent_name]
            check_part(f"{name}.{field}", value, part, parent)
            keys[field] = f"{parent.key}/{part}"
    if isinstance(stage_config, pack.Config):
        missing += pack.missing_sources(name, stage_config)

    # The key is of what may not change on resume. A test set may change half way: it is tagged otherwise.
    forbidden = config.tagged(stage_config, "forbid")
    inputs = {field: key for field, key in keys.items() if field in forbidden}
    input_fields = {*parents, *KINDS[kind].INPUTS}
    # Inputs are in the key by content and not by path: the same data in another place is the same stage.
    described_config = {field: value for field, value in forbidden.items() if field not in input_fields}
    key = config.digest({"schema": SCHEMA, "kind": kind, "config": described_config, "inputs": inputs})
    # Weights that are missing or have changed tell nothing about the model.
    model = None
    if keys.get("init") != MISSING:
        model = model_of_stage(name, kind, stage_config, earlier, missing)
    return Stage(name, kind, stage_config, parents, model, key, inputs, tuple(missing))


def content_digest(name: str, kind: str, field: str, path: str, missing: list[str]) -> str:
    """Return the digest of an input from outside the campaign: an index's own, or the sha256 of weights or a document.

    What does not exist, or is not what its maker wrote, is noted in `missing`, which stage_run.check_inputs refuses.
    """
    try:
        if field == "leaks":
            return handover.digest_of(Path(path))["sha256"]
        if field != "init":
            return load_index(path).digest
        if kind == "evaluate":
            return any_weights.digest_of(path, say=not_now)
        return handover.check_weights(Path(path), say=not_now).sha256
    except DataError as error:
        missing.append(f"{name}.{field}: {error}")
    except OSError as error:
        what = "the weights" if field == "init" else "the document"
        missing.append(f"{name}.{field}: cannot read {what}: {error}\n  give a path that holds them, or @stage")
    return MISSING


def not_now(text: str) -> None:
    """Leave a line unsaid: a stage says it when it starts from these weights; reading a recipe prints nothing."""


def check_part(field: str, value: str, part: str, parent: Stage) -> None:
    """Raise ConfigError unless the parent stage makes what the field wants: sets of data, or weights for `init`."""
    if field.endswith(".init"):
        require(
            parent.kind in MAKE_WEIGHTS and not part,
            f"{field} is {value}: that is no weights\n"
            f"  expected @stage, of one of the kinds {', '.join(MAKE_WEIGHTS)}, or a folder of weights",
        )
        return
    require(
        parent.kind == "pack",
        f"{field} is {value}: a {parent.kind} stage makes no data\n"
        "  expected @stage/set of a pack stage, or the path of an index",
    )
    sets = parent.config.sets
    require(
        part in sets,
        f"{field} is {value}: {parent.name} packs no set {part!r}{did_you_mean(part, sets)}\n"
        f"  expected one of its sets: {', '.join(f'@{parent.name}/{name}' for name in sets)}",
    )


def model_of_stage(name: str, kind: str, stage_config: Any, earlier: Mapping[str, Stage], missing: list[str]) -> Any:
    """Return the architecture that a stage ends with: that of its recipe, or of its weights with what it changes.

    It is None for pack, and where the weights that the stage starts from do not exist yet; where they do, and tell
    nothing of their model, that is noted in `missing`.
    """
    if kind == "pack":
        return None
    source = None
    if stage_config.init is not None:
        if kind == "evaluate" and any_weights.is_foreign(stage_config.init):
            return any_weights.load(stage_config.init, stage_config.model).config
        source = source_model(stage_config.init, earlier)
        if source is None:
            if reference(stage_config.init) is None:
                missing.append(
                    f"{name}.init: no {CONFIG} in {stage_config.init}, which tells the model of the weights\n"
                    "  give a folder as a stage or `python -m jobs import` writes it, or @stage"
                )
            return None
    try:
        if kind in ("fewshot", "evaluate"):
            return source
        if kind == "resize":
            return model_config({"image_size": stage_config.image_size}, source)
        return trained_model(stage_config, source)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def source_model(init: str, earlier: Mapping[str, Stage]) -> Any:
    """Return the architecture of the weights that `init` names; None where they are missing (see `Stage.missing`)."""
    link = reference(init)
    if link is not None:
        parent_name, _ = link
        return earlier[parent_name].model
    path = Path(init) / CONFIG
    if not path.is_file():
        return None
    try:
        return models.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # weights without digests may hold anything
        raise DataError(f"{path} is torn or altered: {error}\n  bring it back from a copy, or import again") from None


def check_stage(campaign: Campaign, stage: Stage) -> None:
    """Raise ConfigError or DataError where a stage does not fit the cluster, or the data that is there.

    `load` asks for every stage, so that `plan` refuses what `run` would; data that a stage before it makes is there
    when the stage is about to run, and then it asks again.
    """
    cfg = stage.config
    class_names.check(campaign, stage)
    if isinstance(cfg, fewshot.Config):
        # One question is enough: ProbeConfig takes both sets or neither.
        require(cfg.probe.train is not None, f"{stage.name}.probe.train and .test are missing: which sets?")
        if stage.model is not None:
            check_shape(cfg.preprocess, stage.model, f"{stage.name}.preprocess")
    if isinstance(cfg, evaluate.Config) and stage.model is not None:
        indexes = {path: index for path in cfg.paths().values() if (index := index_of(campaign, path)) is not None}
        evaluate.check_head(cfg, stage.model, indexes, stage.name)
    if not isinstance(cfg, TrainConfig):
        return
    require(
        bool(cfg.data.train or cfg.data.mixture),
        f"{stage.name}.data.train is missing: a path, or @stage; or data.mixture",
    )
    try:
        allowed_worlds(cfg, campaign.cluster)  # reads and checks the user's DeepSpeed file as well
    except ConfigError as error:
        raise ConfigError(f"{stage.name}: {error}") from None

    classes: dict[str, int] = {}  # of every labelled set that is there, by what the recipe calls it
    samples: list[int] = []  # of every set to train on that is there
    sets = cfg.data.sets().values()
    for path, _weight in sets:
        index = index_of(campaign, path)
        if index is not None:
            if index.samples == 0:
                raise DataError(f"{stage.name}: {path} holds no samples\n  expected some: pack or index it again")
            classes[path] = index.classes
            samples.append(index.samples)
    if cfg.data.evaluate is not None:
        index = index_of(campaign, cfg.data.evaluate)
        if index is not None:
            classes[cfg.data.evaluate] = index.classes

    # The model is not known where the weights that it starts from do not exist.
    if stage.model is not None:
        check_model(cfg, stage.model, classes, f"{stage.name}.model")
        is_judged = cfg.data.evaluate is not None or cfg.probe.train is not None
        if is_judged:
            check_shape(cfg.data.preprocess, stage.model, f"{stage.name}.data.preprocess")
    # The steps are not known where passes are to be made over data that is not there.
    all_samples = sum(samples) if len(samples) == len(sets) else cfg.data.samples
    if cfg.steps is not None or all_samples is not None:
        check_schedule(cfg, steps_of(cfg, all_samples or 0), stage.name)


def index_of(campaign: Campaign, path: str) -> Index | None:
    """The index of a set that a recipe names, None where it has not been made yet."""
    return index_if_made(campaign.resolve(path) or "")


def recipe_digest(campaign: Campaign) -> str:
    """Return a short digest of all stages' keys: campaigns that have the same one compute the same."""
    keys = {stage.name: stage.key for stage in campaign.stages}
    return config.digest(keys)[:12]


def resolved(campaign: Campaign) -> str:
    """Return the campaign as YAML with every default written out, as the golden text of a recipe has it."""
    sections: dict[str, Any] = {"cluster": config.plain(campaign.cluster), "trackers": config.plain(campaign.trackers)}
    for stage in campaign.stages:
        sections[stage.name] = {"kind": stage.kind, **config.plain(stage.config)}
    return config.to_yaml(sections)
