"""Load a recipe as a campaign, which has ordered stages and one run directory.

How `load` turns a recipe into a campaign:
1. `read_recipe` reads the YAML file once.
2. `parse` separates `run`, `cluster`, `trackers` and `budget`; every other section is a stage, whose kind is its
   name or its `kind:`. First, kinds may replace a section with several (`StageKind.expand`), as sweeps do, and an extra
   adds a stage that indexes the data sets named by URLs (jobs/extras/url_sets.py). Each section is parsed into its
   kind's frozen config; an unknown key is an error. Stages are sorted: a stage that reads another stage's output
   ("@stage" or "@stage/part") comes after it.
3. Each stage gets its model, and its key: a digest of its "forbid" fields and its inputs (key.py).
4. Values determined by finished stages replace the placeholders in other stages (references.py).
5. Each stage is checked against the cluster and the existing indexes (validate.py).

For example, `pretrain: {data: {train: "@shards/train"}}` reads the data set `train` packed by the stage `shards`. A
stage's folder is named after its key, `<run>/pretrain-1a2b3c4d`, so an edited recipe never overwrites the results of
the previous one.
"""

from collections.abc import Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from data.bucket import check_store_url, local_name
from data.checks import check_name
from data.errors import ConfigError
from data.files import state_folder, with_home
from data.optional import MissingExtra, load_optional
from jobs.cluster_config import ClusterConfig
from jobs.named_stages import find_set, find_stage
from jobs.ownership import check_run_path
from jobs.recipe import key
from jobs.recipe.references import filled, references_in, with_field, with_values
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Campaign, Kinds, Reads, Sections, Stage, StageKind, StageSection, reference
from jobs.stage_folders import TABLE
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import ConfigDataclass
from pipeline.recipe import Recipe, read_recipe
from pipeline.variables import texts_in

TRACKERS = "jobs.extras.monitor.trackers_config:TrackersConfig"
READ_BUDGET = "jobs.extras.studies.law:read_budget"
CHECK_BUDGET = "jobs.extras.studies.law:check_budget"
URL_SETS = "jobs.extras.url_sets:with_indexed_urls"
NOT_STAGES = ("run", "cluster", "trackers", "budget")  # keys of a recipe that apply to the whole campaign


def load(recipe: Path, overrides: list[str], kinds: Kinds) -> Campaign:
    """Read and validate a recipe. Raises ConfigError or DataError if the recipe cannot run."""
    return resolve(read_recipe(recipe, overrides), kinds)


def resolve(recipe: Recipe, kinds: Kinds) -> Campaign:
    """Turn a recipe into a validated campaign. Raises ConfigError or DataError if the recipe cannot run."""
    campaign = parse(recipe, kinds)
    # Parents first: a stage's key and model depend on the stages that it reads.
    stages: dict[str, Stage] = {}
    digests: dict[tuple[Reads, str], str] = {}
    for stage in campaign.stages:
        stages[stage.name] = key.resolve(stage, stages, digests, kinds)
        # If the run is in an object store, packed shards would be on this machine only.
        if campaign.remote is not None and stage.kind.sets(stage.config):
            raise ConfigError(
                f"{stage.name} is a {stage.kind.name} stage, but run is {campaign.remote}: other nodes could not read "
                "the data sets that it writes\n"
                "  expected data sets that every node can read, such as data.train: indexes/train for shards at "
                "s3://…\n"
                "  first pack images with python -m jobs pack, and copy the tars to the store;\n"
                "  then run python -m jobs index s3://BUCKET/SET --output indexes/train, also for a URL in the recipe\n"
                "  (docs/run-storage.md)"
            )
    check_run_path(campaign.run)
    campaign = with_values(replace(campaign, stages=tuple(stages.values())))
    # Check every stage before the first one starts, so that the last one does not fail its checks after days.
    available = Available(campaign, checks_files=False)
    for stage in campaign.stages:
        refuse(validate(stage, available))
    if campaign.budget is not None:
        load_optional(CHECK_BUDGET, "budget")(campaign)
    return campaign


def parse(recipe: Recipe, kinds: Kinds) -> Campaign:
    """Parse a recipe's sections into configs; the resulting stages have no inputs, models or keys yet.

    Raises ConfigError, which names the key, if a key or value is invalid.
    """
    # 1. The run: a path, or a URL in an object store.
    run = recipe.values.get("run", recipe.default_run)
    # An empty shell variable, as in run=$RUN, must not select an existing run.
    if run in (None, ""):
        raise ConfigError(f"run is empty, expected a folder\n  set run={recipe.default_run}")
    if not isinstance(run, str):
        raise ConfigError(f"run is {run!r}, expected a folder\n  set run=./{run}")
    # A remaining `~` belongs to an unknown user: do not create a folder of this name.
    if run.startswith("~"):
        raise ConfigError(f"run is {run}, but there is no such user\n  use an absolute path: run=/…")

    # 2. The sections of the whole campaign, and the stages.
    cluster = config.build(ClusterConfig, recipe.values.get("cluster", {}), "cluster")
    trackers = None
    try:
        trackers = config.build(
            load_optional(TRACKERS, "the section trackers"), recipe.values.get("trackers", {}), "trackers"
        )
    except MissingExtra:
        if "trackers" in recipe.values:
            raise
    budget = recipe.values.get("budget")
    if budget is not None:
        try:
            budget = load_optional(READ_BUDGET, "budget")(budget)
        except MissingExtra:
            raise ConfigError(
                "budget cannot be checked, because the extra that counts exaFLOPs is not in this checkout\n"
                "  remove the key"
            ) from None
    sections = dict(recipe.values)
    for name in NOT_STAGES:
        sections.pop(name, None)
    if not sections:
        raise ConfigError(f"{recipe.source} has no stage\n  expected a section named {', '.join(kinds)}")
    stages = {}
    # Resolved folders of inputs, cached so that each is reported only once, even if many runs of a sweep read it.
    folders: dict[tuple[str, Reads], str] = {}
    expanded: Sections = {name: StageSection(values, name) for name, values in sections.items()}
    for kind in kinds.values():
        expanded = kind.expand(expanded, kinds)
    if any("://" in text for section in expanded.values() for text in texts_in(section.values)):
        expanded = load_optional(URL_SETS, "the URL of a data set")(expanded, kinds)
    placeholders = Placeholders(expanded, kinds)
    # Read unexpanded sections before the many runs of sweeps, so that an unknown key is reported without delay.
    for name, section in sorted(expanded.items(), key=lambda item: item[0] != item[1].source):
        references = placeholders.references_of(name)
        kind, stage_config = read_section(name, placeholders.fill(name, references), kinds)
        # Inputs from other runs may be given without the stage's key: runs/x/parts/train.
        parents: dict[str, str] = {}
        types: dict[str, Reads] = {}
        for field, (path, reads) in kind.inputs_of(stage_config).items():
            parents[field] = path
            types[field] = reads
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
                parents[field] = folders[path, reads]
        parents |= references
        stages[name] = Stage(
            name, kind, stage_config, section.source, references=references, parents=parents, reads=types
        )
    ordered = in_order({name: stages[name] for name in expanded})

    # 3. A run in an object store also has a local folder, named after the URL so that it is the same on all nodes.
    remote = None
    folder = Path(run).resolve()
    if "://" in run:
        remote = check_store_url(run)
        scratch = state_folder() / "runs"
        if cluster.scratch:
            scratch = with_home(cluster.scratch)
        folder = (scratch / local_name(remote)).resolve()
    return Campaign(folder, cluster, ordered, trackers, remote, budget)


class Placeholders:
    """Placeholders for config values to be determined by other stages."""

    def __init__(self, sections: Sections, kinds: Kinds) -> None:
        self.sections = sections
        self.kinds = kinds
        self.known: dict[str, Mapping[str, object]] = {}  # by the stage that determines them

    def references_of(self, name: str) -> dict[str, str]:
        """Return the fields of a stage's section with values determined by other stages: field → reference.

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
            # A string that begins with "@" is not always a reference.
            if not self.of(source):
                continue
            if part not in self.of(source):
                raise ConfigError(
                    f"{name}.{field} is {value}, but {source} does not have the value {part!r}"
                    f"{did_you_mean(part, self.of(source))}"
                )
            references[field] = value
        return references

    def of(self, source: str) -> Mapping[str, object]:
        """Return the placeholders for the values determined by a stage."""
        if source not in self.known:
            self.known[source] = {}
            if source in self.sections:
                # A stage that determines values never refers to values of other stages.
                section = self.sections[source].values
                kind = self.kinds.get(str(section.get("kind", source))) if isinstance(section, Mapping) else None
                if kind is not None and type(kind).placeholders is not StageKind.placeholders:
                    kind, stage_config = read_section(source, section, self.kinds)
                    self.known[source] = kind.placeholders(stage_config)
        return self.known[source]

    def fill(self, name: str, references: Mapping[str, str]) -> object:
        """Return a stage's section with its references replaced with placeholders."""
        values = {}
        for field, value in references.items():
            source, part = value[1:].split("/", 1)
            values[field] = self.of(source)[part]
        section = self.sections[name].values
        return filled(section, values) if values else section


def read_section(name: str, section: object, kinds: Kinds) -> tuple[StageKind, ConfigDataclass]:
    """Return a section's stage kind, and the section parsed into the kind's config."""
    check_name(name, "a stage", "rename it, and all references to it (@stage)")
    if not isinstance(section, Mapping):
        # The user may have typed a stage's key without the stage: lr=1e-3.
        kinds_with_key = [kind.name for kind in kinds.values() if config.find_key(name, kind.config)]
        remedy = f"remove {name} from the recipe, or make it a section: {name}.kind=…"
        if name not in kinds and kinds_with_key:
            kind_name = "pretrain" if "pretrain" in kinds_with_key else kinds_with_key[0]
            path = f"{kind_name}.{config.find_key(name, kinds[kind_name].config)}"
            remedy = f"add the name of the stage, for example {path}={config.shown(section)}"
        raise ConfigError(f"{name} is {config.shown(section)}, expected a stage's section\n  {remedy}")
    values = dict(section)
    kind_name = values.pop("kind", name)
    names = ", ".join(kinds)
    if not isinstance(kind_name, str):
        raise ConfigError(f"{name}.kind is {config.shown(kind_name)}, expected one of {names}")
    if kind_name not in kinds and "kind" in section:
        raise ConfigError(f"{name}.kind is {kind_name}{did_you_mean(kind_name, kinds)}\n  expected one of {names}")
    if kind_name not in kinds:
        nearest = did_you_mean(kind_name, [*kinds, *NOT_STAGES])
        key_of_stage = config.find_key(name, kinds["pretrain"].config) if "pretrain" in kinds else None
        if key_of_stage is not None:
            raise ConfigError(
                f"{name} is a key of a stage (pretrain.{key_of_stage}), not a stage\n  indent it below its stage"
            )
        raise ConfigError(
            f"unknown stage or key {kind_name}{nearest}\n"
            f"  to add a stage with this name, set {name}.kind=… with one of {names}"
        )

    # A kind's default length is in steps or in passes; a recipe may use either.
    if "steps" in values:
        values.setdefault("passes", None)
    if "passes" in values:
        values.setdefault("steps", None)
    kind = kinds[kind_name]
    if kind.missing_module:
        raise ConfigError(
            f"{name} is a {kind_name} stage, which needs {kind.missing_module}, but it is not in this checkout\n"
            "  restore it from the repository, or remove the stage from the recipe"
        )
    return kind, config.build(kind.config, values, name, kind.defaults)


def in_order(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Sort the stages so that each follows the stages it reads; otherwise, keep the order in the recipe."""
    reads: dict[str, set[str]] = {}
    for name, stage in stages.items():
        reads[name] = set()
        for field, (parent, _) in stage.links.items():
            if parent == name:
                raise ConfigError(f"{name}.{field} is @{parent}, the stage itself\n  expected another stage, or a path")
            # Report unknown names here, because the sorter would treat them as additional stages.
            if parent not in stages:
                raise ConfigError(
                    f"{name}.{field} is @{parent}, but the recipe has no stage {parent}{did_you_mean(parent, stages)}"
                )
            reads[name].add(parent)

    sorter = TopologicalSorter(reads)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"stages must not read each other in a cycle: {' ← '.join(error.args[1])}") from None

    # If several stages could come next, take the first in the recipe.
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
