"""A campaign: one recipe, its stages in order, one run directory.

How a recipe becomes a campaign, in order (`load`):
1. `read_recipe` reads the YAML file, once a command.
2. `parse` takes out `run`, `cluster`, `trackers` and `budget`; any other section is a stage, whose kind is its name or
   its `kind:`. A kind may replace a section by several first (`StageKind.expand`): sweeps do. Each section becomes the
   frozen config of its kind: a wrong key stops here. Stages are put in order: a stage that names another's output
   ("@stage" or "@stage/part") comes after it.
3. Each stage gets its model, and its key: the digest of its "forbid" fields and of its inputs (key.py).
4. Values that finished stages have determined for others are put into the configs of these (references.py).
5. Each stage is compared with the cluster, and with the indexes that exist already (validate.py).

For example `pretrain: {data: {train: "@shards/train"}}` reads the set `train` that the stage `shards` packs. A stage's
folder is named by its key, `<run>/pretrain-1a2b3c4d`, so an edited recipe never overwrites what another recipe made.
"""

from collections.abc import Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from data.bucket import check_store_url, local_name
from data.checks import check_name
from data.errors import ConfigError
from data.files import state_folder
from jobs.cluster_config import ClusterConfig
from jobs.named_stages import TABLE, find_set, find_stage
from jobs.ownership import check_run_path
from jobs.recipe import key
from jobs.recipe.references import filled, references_in, with_field, with_values
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Campaign, Kinds, Reads, Sections, Stage, StageKind, StageSection, reference
from jobs.trackers_config import TrackersConfig
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import ConfigDataclass, require
from pipeline.recipe import Recipe, read_recipe
from pipeline.values import read_number

NOT_STAGES = ("run", "cluster", "trackers", "budget")  # keys of a recipe that belong to the whole campaign


def load(recipe: Path, overrides: list[str], kinds: Kinds) -> Campaign:
    """Read and validate a recipe. Raises ConfigError or DataError for anything that could not run."""
    return resolve(read_recipe(recipe, overrides), kinds)


def resolve(recipe: Recipe, kinds: Kinds) -> Campaign:
    """Return the campaign of a recipe. Raises ConfigError or DataError for anything that could not run."""
    campaign = parse(recipe, kinds)
    # Parents first, because a stage's key and its model come from the stages that it reads.
    stages: dict[str, Stage] = {}
    digests: dict[tuple[Reads, str], str] = {}
    for stage in campaign.stages:
        stages[stage.name] = key.resolve(stage, stages, digests, kinds)
        # Of a run in an object store only this machine would have what it packs.
        require(
            campaign.remote is None or not stage.kind.sets(stage.config),
            f"{stage.name} is a {stage.kind.name} stage, and run is {campaign.remote}: other nodes could not read what "
            "it packs\n"
            "  expected sets that every node can read, such as data.train: indexes/train of shards at s3://…\n"
            "  pack them first, with a run in a folder or `python -m jobs pack`; copy the tars to the store;\n"
            "  then type python -m jobs index s3://BUCKET/SET --output indexes/train (docs/run-storage.md)",
        )
    check_run_path(campaign.run)
    campaign = with_values(replace(campaign, stages=tuple(stages.values())))
    # Every stage is checked before the first starts: the last must not be refused when the others have been computed.
    available = Available(campaign, checks_files=False)
    for stage in campaign.stages:
        refuse(validate(stage, available))
    for kind in kinds.values():
        kind.check_campaign(campaign)
    return campaign


def parse(recipe: Recipe, kinds: Kinds) -> Campaign:
    """Return the typed sections of a recipe, whose stages have no inputs, models and keys yet.

    Raises ConfigError, which names the key.
    """
    # 1. Where: a path, or the URL of a run in an object store.
    run = recipe.values.get("run", recipe.default_run)
    # An empty variable of a shell, as in run=$RUN, must not lead into a run that is there.
    require(run not in (None, ""), f"run is empty, expected a folder\n  type run={recipe.default_run}")
    require(isinstance(run, str), f"run is {run!r}, expected a folder\n  type run=./{run}")
    # A `~` that is left names a user without a home here; a folder of this name would be no home either.
    require(not run.startswith("~"), f"run is {run}: no user of this name is known here\n  type the path: run=/…")

    # 2. The sections: those of the whole campaign, and the stages.
    cluster = config.build(ClusterConfig, recipe.values.get("cluster", {}), "cluster")
    trackers = config.build(TrackersConfig, recipe.values.get("trackers", {}), "trackers")
    budget = recipe.values.get("budget")
    if budget is not None:
        typed = budget
        budget = read_number(budget, "budget", whole=False)
        require(budget is not None and budget > 0, f"budget is {typed}, expected exaFLOPs, more than 0")
        is_checked = any(kind.checks_budget for kind in kinds.values())
        require(is_checked, "budget is not checked: no kind of stage of this checkout counts exaFLOPs\n  leave it out")
    sections = dict(recipe.values)
    for name in NOT_STAGES:
        sections.pop(name, None)
    require(bool(sections), f"{recipe.source} names no stage\n  expected a section of {', '.join(kinds)}")
    stages = {}
    folders: dict[tuple[str, Reads], str] = {}  # that inputs mean: each is said once, however many runs read it
    expanded: Sections = {name: StageSection(values, name) for name, values in sections.items()}
    for kind in kinds.values():
        expanded = kind.expand(expanded, kinds)
    placeholders = Placeholders(expanded, kinds)
    # A wrong key does not wait for the runs of a sweep, whose first run has been read.
    for name, section in sorted(expanded.items(), key=lambda item: item[0] != item[1].source):
        references = placeholders.references_of(name)
        kind, stage_config = read_section(name, placeholders.fill(name, references), kinds)
        # Inputs from outside the campaign may be named without the keys of their stages: runs/x/parts/train.
        for field, (path, reads) in kind.inputs_of(stage_config).items():
            if reference(path) is not None or path == "???" or reads in (Reads.FILE, Reads.OUTCOME):
                continue
            if (path, reads) not in folders:
                if reads is Reads.SET:
                    folders[path, reads] = find_set(path)
                elif reads is Reads.TABLE:
                    folders[path, reads] = find_stage(path, TABLE)
                else:
                    folders[path, reads] = find_stage(path)
            if folders[path, reads] != path:
                stage_config = with_field(stage_config, field.split("."), folders[path, reads])
        stages[name] = Stage(name, kind, stage_config, section.source, references, tuple(references))
    ordered = in_order({name: stages[name] for name in expanded})

    # 3. A run in an object store has a local folder as well, the same on every node: named by the URL.
    remote = None
    folder = Path(run).resolve()
    if "://" in run:
        remote = check_store_url(run)
        scratch = state_folder() / "runs"
        if cluster.scratch:
            scratch = Path(cluster.scratch).expanduser()
        folder = (scratch / local_name(remote)).resolve()
    return Campaign(folder, cluster, ordered, trackers, remote, budget)


class Placeholders:
    """What stands in a config for values that other stages determine."""

    def __init__(self, sections: Sections, kinds: Kinds) -> None:
        self.sections = sections
        self.kinds = kinds
        self.known: dict[str, Mapping[str, object]] = {}  # by the stage that determines them

    def references_of(self, name: str) -> dict[str, str]:
        """Return the fields of a stage's section whose values other stages determine, each with its reference.

        Raises ConfigError for a reference to a value that its stage does not determine.
        """
        section = self.sections[name].values
        if not isinstance(section, Mapping):
            return {}
        kind = self.kinds.get(str(section.get("kind", name)))
        inputs = () if kind is None else tuple(kind.inputs)
        references = {}
        for field, value in references_in(section, inputs):
            source, part = value[1:].split("/", 1)
            # Any other text may begin with an @.
            if not self.of(source):
                continue
            require(
                part in self.of(source),
                f"{name}.{field} is {value}: {source} determines no {part!r}{did_you_mean(part, self.of(source))}",
            )
            references[field] = value
        return references

    def of(self, source: str) -> Mapping[str, object]:
        """Return the placeholders for the values that a stage determines."""
        if source not in self.known:
            self.known[source] = {}
            if source in self.sections:
                # A stage of which other stages take a value has no such reference of its own.
                section = self.sections[source].values
                kind = self.kinds.get(str(section.get("kind", source))) if isinstance(section, Mapping) else None
                if kind is not None and type(kind).placeholders is not StageKind.placeholders:
                    kind, stage_config = read_section(source, section, self.kinds)
                    self.known[source] = kind.placeholders(stage_config)
        return self.known[source]

    def fill(self, name: str, references: Mapping[str, str]) -> object:
        """Return a stage's section with placeholders for these references."""
        values = {}
        for field, value in references.items():
            source, part = value[1:].split("/", 1)
            values[field] = self.of(source)[part]
        section = self.sections[name].values
        return filled(section, values) if values else section


def read_section(name: str, section: object, kinds: Kinds) -> tuple[StageKind, ConfigDataclass]:
    """Return the kind of a stage's section, and its config, an instance of the kind's config."""
    check_name(name, "a stage", "rename it, and what reads it as @stage")
    if not isinstance(section, Mapping):
        # A key of a stage that was typed without the stage: lr=1e-3.
        kinds_with_key = [kind.name for kind in kinds.values() if config.find_key(name, kind.config)]
        remedy = f"take {name} out of the recipe, or indent its keys below it: {name}.kind=…"
        if name not in kinds and kinds_with_key:
            kind_name = "pretrain" if "pretrain" in kinds_with_key else kinds_with_key[0]
            path = f"{kind_name}.{config.find_key(name, kinds[kind_name].config)}"
            remedy = f"a key stands behind its stage; type for example {path}={config.shown(section)}"
        raise ConfigError(f"{name} is {config.shown(section)}, expected a stage's section\n  {remedy}")
    values = dict(section)
    kind_name = values.pop("kind", name)
    names = ", ".join(kinds)
    require(isinstance(kind_name, str), f"{name}.kind is {config.shown(kind_name)}, expected one of {names}")
    if kind_name not in kinds and "kind" in section:
        raise ConfigError(f"{name}.kind is {kind_name}{did_you_mean(kind_name, kinds)}\n  expected one of {names}")
    if kind_name not in kinds:
        nearest = did_you_mean(kind_name, [*kinds, *NOT_STAGES])
        key_of_stage = config.find_key(name, kinds["pretrain"].config) if "pretrain" in kinds else None
        if key_of_stage is not None:
            raise ConfigError(
                f"{name} is no stage, but a key of one: pretrain.{key_of_stage}\n  indent it below its stage"
            )
        raise ConfigError(
            f"unknown stage or key {kind_name}{nearest}\n"
            f"  a stage of another name says what it is: {name}.kind=…, one of {names}"
        )

    # The defaults of a kind name its length in steps or in passes; a recipe may use the other way.
    if "steps" in values:
        values.setdefault("passes", None)
    if "passes" in values:
        values.setdefault("steps", None)
    kind = kinds[kind_name]
    require(
        not kind.missing_module,
        f"{name} is a {kind_name} stage, and this checkout has no {kind.missing_module}, which runs it",
    )
    return kind, config.build(kind.config, values, name, kind.all_defaults)


def in_order(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Return the stages, each after the stages that it reads, otherwise in the recipe's order."""
    reads: dict[str, set[str]] = {}
    for name, stage in stages.items():
        reads[name] = set()
        values = dict(stage.references)
        for field, (value, _reads) in stage.kind.inputs_of(stage.config).items():
            values.setdefault(field, value)
        for field, value in values.items():
            link = reference(value)
            if link is None:
                continue
            # The sorter would take a name that does not exist for one more stage: refuse it here.
            parent, _ = link
            require(
                parent != name, f"{name}.{field} is @{parent}, the stage itself\n  expected another stage, or a path"
            )
            # The nearest name is looked for where it is needed: that takes as long as all the rest of a large sweep.
            if parent not in stages:
                raise ConfigError(f"{name}.{field} is @{parent}, no such stage{did_you_mean(parent, stages)}")
            reads[name].add(parent)

    sorter = TopologicalSorter(reads)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"stages read each other in a circle: {' ← '.join(error.args[1])}") from None

    # Of the stages that could come next, take the first in the recipe.
    recipe_order = list(stages)
    ordered: list[Stage] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        first = min(ready, key=recipe_order.index)
        ready.remove(first)
        ordered.append(stages[first])
        sorter.done(first)
    return tuple(ordered)
