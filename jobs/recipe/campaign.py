"""A campaign: one recipe, its stages in order, one run directory.

How a recipe becomes a campaign, in order (`load`):
1. the YAML file is read and `key=value` overrides are laid on top;
2. `run`, `cluster` and `trackers` are taken out; any other section is a stage, whose kind is its name or its `kind:`;
3. a section with `sweep` becomes many (sweeps.py); each becomes the frozen config of its kind: a wrong key stops here;
4. stages are put in order: one that names another's output ("@stage" or "@stage/part") comes after it;
5. each stage gets its model, and its key: the digest of its "forbid" fields and of its inputs (stage_inputs.py);
6. what sweeps have chosen already is put into the configs that wait for it (choices.py);
7. `check_stage` compares each stage with the data that is there already (stage_checks.py); before it runs it is
   compared once more.

For example `pretrain: {data: {train: "@shards/train"}}` reads the set `train` that the stage `shards` packs. A stage's
folder is named by its key, `<run>/pretrain-1a2b3c4d`, so an edited recipe never overwrites what another recipe made.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Protocol

from data.bucket import check_store_url
from data.checks import check_name
from data.errors import ConfigError
from data.files import state_folder
from data.images.augment import RESIZE_BEFORE_RANDOM_CROP
from data.images.preprocess import corrections
from jobs.cluster_config import ClusterConfig
from jobs.context import reference
from jobs.monitor.trackers import TrackersConfig
from jobs.ownership import check_place
from jobs.recipe import sweeps
from jobs.recipe.choices import config_as_known, settled
from jobs.recipe.stage_checks import check_stage
from jobs.recipe.stage_inputs import MISSING, Digests, check_part, content_digest, model_of_stage
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import evaluate, fewshot, finetune, pack, pretrain, resize, sweep
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import require


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
    "sweep": sweep,
}
SCHEMA = 1  # of a stage's outputs; a bump runs every stage again


@dataclass(frozen=True)
class Section:
    """A section of a recipe, typed, or one that a sweep has written."""

    kind: str
    config: Any  # an instance of the kind's Config
    source: str  # the section that stands in the recipe
    chosen: Mapping[str, str]  # field → "@stage" of the table that chooses its value


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

    sections = {}
    for name, written in sweeps.expand(values, read_section).items():
        sections[name] = Section(*read_section(name, written.values), written.source, written.chosen)
    # Parents first, because a stage's key and its model come from the stages that it reads.
    stages: dict[str, Stage] = {}
    digests: Digests = {}
    for name in order_of_stages(sections):
        stages[name] = resolve_stage(name, sections[name], stages, digests)

    # Every stage is checked before the first starts: the last must not be refused when the others have been computed.
    remote = check_store_url(run) if "://" in run else None
    folder = Path(run).resolve() if remote is None else scratch_folder(remote, cluster.scratch)
    campaign = Campaign(folder, cluster, tuple(stages.values()), trackers, remote)
    check_place(campaign.run)
    if remote is not None:
        check_no_pack(campaign)
    campaign = settled(campaign)
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
            # A set's path is an input where it is of another set; that of images has no digest to speak of.
            is_path_of_images = isinstance(stage_config, pack.Config) and not pack.is_input(stage_config, field)
            if value is not None and not is_path_of_images:
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


def order_of_stages(sections: Mapping[str, Section]) -> list[str]:
    """Return the names of the stages: each after the stages that it reads, otherwise in the recipe's order."""
    reads: dict[str, set[str]] = {}
    for name, section in sections.items():
        reads[name] = set()
        for field, value in {**inputs_of(section.kind, section.config), **section.chosen}.items():
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


def resolve_stage(name: str, section: Section, earlier: Mapping[str, Stage], digests: Digests) -> Stage:
    """Look at a section's inputs, find its model, compute its key, and return its stage; `digests`: content_digest."""
    stage_config = section.config
    missing: list[str] = []
    keys = keys_of_inputs(name, section, earlier, missing, digests)
    if isinstance(stage_config, pack.Config):
        missing += pack.missing_sources(name, stage_config)
    inputs = inputs_in_key(name, section, keys, earlier)
    key = config.digest(identity_of(name, section, keys, inputs))
    # Weights that are missing or have changed tell nothing about the model.
    model = None
    if keys.get("init") != MISSING:
        model = model_of_stage(name, section.kind, stage_config, earlier, missing)
    forbidden = config.tagged(stage_config, "forbid")
    return Stage(
        name,
        section.kind,
        stage_config,
        {**inputs_of(section.kind, stage_config), **section.chosen},
        model,
        key,
        inputs,
        tuple(missing),
        source=section.source,
        chosen=section.chosen,
        judged_on={field: key for field, key in keys.items() if field not in forbidden},
    )


def keys_of_inputs(
    name: str, section: Section, earlier: Mapping[str, Stage], missing: list[str], digests: Digests
) -> dict[str, str]:
    """Return a key for what each input of a section holds, by its field; adds to `missing` what is not there."""
    keys: dict[str, str] = {}
    # The key of a parent stands for its output, which need not exist yet: so `plan` knows all keys before a run.
    for field, value in inputs_of(section.kind, section.config).items():
        link = reference(value)
        if link is None:
            require(value != "???", f"{name}.{field} is missing: a path, or @stage")
            keys[field] = content_digest(name, section.kind, field, value, missing, digests)
        else:
            parent_name, part = link
            parent = earlier[parent_name]
            check_part(f"{name}.{field}", value, part, parent)
            keys[field] = f"{parent.key}/{part}"
    return keys


def inputs_in_key(name: str, section: Section, keys: Mapping[str, str], earlier: Mapping[str, Stage]) -> dict[str, str]:
    """Return those inputs that a stage's key is of, and what a sweep chooses for it, each with its own key."""
    # The key is of what may not change on resume. A test set may change half way: it is tagged otherwise.
    forbidden = config.tagged(section.config, "forbid")
    inputs = {field: key for field, key in keys.items() if field in forbidden}
    # A value that is still to be chosen stands in the config as the first of its grid, with the key of who chooses.
    for field, value in section.chosen.items():
        require(field not in keys, f"{name}: {field} names an input, which a grid with held_out cannot choose")
        inputs[field] = f"{earlier[value[1:]].key}/{field}"
    if name != section.source:
        inputs |= judged_by(section.config, keys)
    return inputs


def identity_of(name: str, section: Section, keys: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return what a stage's key is the digest of; `keys` are those of all its inputs, `inputs` those that count."""
    forbidden = config.tagged(section.config, "forbid")
    # Inputs are in the key by content and not by path: the same data in another place is the same stage.
    input_fields = {*keys, *KINDS[section.kind].INPUTS}
    described_config = {field: value for field, value in forbidden.items() if field not in input_fields}
    identity: dict[str, Any] = {"schema": SCHEMA, "kind": section.kind, "config": described_config, "inputs": inputs}
    judging: dict[str, Any] = {}
    if name != section.source:
        judging = config.tagged(section.config, "warn")
    # Only where there are any: the keys of all other stages stay what they were.
    corrected = corrected_ops(forbidden | judging)
    if corrected:
        identity["corrected"] = corrected
    return identity


def corrected_ops(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the corrections of the preprocessing that a stage's fields, by dotted name, ask for; {} of most."""
    corrected: dict[str, int] = {}
    for field, value in fields.items():
        if field.endswith("augment.crop") and value == "random":
            corrected |= corrections(RESIZE_BEFORE_RANDOM_CROP)
        elif field.split(".")[-1] == "preprocess" and value is not None:
            corrected |= corrections(value)
    return corrected


def judged_by(stage_config: Any, keys: Mapping[str, str]) -> dict[str, str]:
    """Return what the numbers of a sweep's run depend on beyond its weights: a run of a sweep is there to be judged."""
    judges = {}
    for field, value in config.tagged(stage_config, "warn").items():
        if field in ("data.evaluate", "data.preprocess") or field.startswith("probe."):
            judges[field] = keys.get(field, str(value))
    return judges


def recipe_digest(campaign: Campaign) -> str:
    """Return a short digest of all stages' keys: campaigns that have the same one compute the same."""
    keys = {stage.name: stage.key for stage in campaign.stages}
    return config.digest(keys)[:12]


def resolved(campaign: Campaign) -> str:
    """Return the campaign as YAML with every default written out, as the golden text of a recipe has it.

    Of the runs of a sweep the first is written out; of the others, what is different.
    """
    sections: dict[str, Any] = {"cluster": config.plain(campaign.cluster), "trackers": config.plain(campaign.trackers)}
    first_runs: dict[tuple[str, str], Stage] = {}  # by the sweep and the kind
    for stage in campaign.stages:
        first = first_runs.setdefault((stage.source, stage.kind), stage)
        values = config_as_known(campaign, stage)
        if first is not stage and stage.is_run and stage.kind != "sweep":
            before = sweeps.flat(config_as_known(campaign, first), stage.name)
            after = sweeps.flat(values, stage.name)
            sections[stage.name] = {"as": first.name, "but": what_differs(before, after)}
        else:
            sections[stage.name] = {"kind": stage.kind, **values}
    return config.to_yaml(sections)


def what_differs(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `after` whose value differs from `before`'s; "absent" where the field is gone."""
    changed = {}
    for field in {**before, **after}:
        value = after.get(field, "absent")
        if before.get(field, "absent") != value:
            changed[field] = value
    return changed
