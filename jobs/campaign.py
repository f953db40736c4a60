"""A campaign: one recipe, its stages in order, one run directory.

A recipe's top level holds `run`, `cluster`, and one section a stage; a section's kind is its name, or its `kind:` key.
Stages name each other's outputs as "@stage" or "@stage/part". All are validated before the first one starts. A stage's
key digests its forbidden fields, the keys or contents of its inputs and the schema; its folder is named by the key, so
an edited recipe never overwrites what another recipe made.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

import models
from data.errors import ConfigError, DataError, Preempted
from data.files import write_whole
from data.shards.index import load_index
from jobs.cluster.worker_group import ClusterConfig
from jobs.context import Context, reference, write_done
from jobs.stages import fewshot, finetune, pack, pretrain, resize
from models.checks import did_you_mean
from pipeline import config
from pipeline.arithmetic import batch_arithmetic
from pipeline.config import require
from pipeline.training_config import TrainConfig, model_config, trained_model

KINDS: dict[str, ModuleType] = {
    "pack": pack,
    "pretrain": pretrain,
    "resize": resize,
    "finetune": finetune,
    "fewshot": fewshot,
}
SCHEMA = 1  # of a stage's outputs; a bump runs every stage again


@dataclass(frozen=True)
class Stage:
    """One section of a recipe, resolved."""

    name: str
    kind: str
    config: Any
    parents: dict[str, str]  # input field → what stands behind it: "@stage/part", or a path's digest
    model: Any  # resolved architecture
    key: str
    inputs: dict[str, str]  # those that the key is of → digest of their content, or the key of who makes them
    missing: tuple[str, ...] = ()  # inputs outside the campaign that are not there, as messages

    @property
    def module(self) -> ModuleType:
        return KINDS[self.kind]


@dataclass(frozen=True)
class Campaign:
    run: Path
    cluster: ClusterConfig
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """Raises ConfigError with the nearest name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"the recipe has no stage {name!r}{did_you_mean(name, [s.name for s in self.stages])}")

    def directory(self, stage: Stage) -> Path:
        return self.run / f"{stage.name}-{stage.key[:8]}"

    def resolve(self, value: str | None) -> str | None:
        """The absolute path behind "@stage/part" or a path."""
        if value is None:
            return None
        link = reference(value)
        if link is None:
            return value if "://" in value else str(Path(value).resolve())
        return str(self.directory(self.stage(link[0])) / link[1])

    def done(self, stage: Stage) -> dict[str, Any] | None:
        """What a finished stage left behind, or None."""
        marker = self.directory(stage) / "done.json"
        return json.loads(marker.read_text()) if marker.exists() else None


# ------------------------------------------------------------------------------------------------ reading a recipe


def load(recipe: Path, overrides: list[str]) -> Campaign:
    """A validated campaign. Raises ConfigError or data.DataError for anything that could not run."""
    values = config.plain_yaml(config.read_yaml(recipe, overrides))
    run = Path(values.pop("run", None) or Path("runs") / recipe.stem).resolve()
    cluster = config.build(ClusterConfig, values.pop("cluster", {}), "cluster")
    require(bool(values), f"{recipe} names no stage; known kinds: {', '.join(KINDS)}")
    sections = {name: _section(name, section) for name, section in values.items()}
    stages: dict[str, Stage] = {}
    for name in _in_order(sections):
        stages[name] = _resolve(name, *sections[name], stages)
    campaign = Campaign(run, cluster, tuple(stages[name] for name in stages))
    for stage in campaign.stages:
        if isinstance(stage.config, TrainConfig):
            _check_training(stage, cluster)
    return campaign


def _section(name: str, section: Any) -> tuple[str, Any]:
    require(
        isinstance(section, Mapping),
        f"{name} is {section!r}, expected a stage's section{did_you_mean(name, KINDS)}",
    )
    values = dict(section)
    kind = values.pop("kind", name)
    hint = "" if "kind" in section else f"; or give the section a kind: {', '.join(KINDS)}"
    require(kind in KINDS, f"unknown stage or key {kind!r}{did_you_mean(kind, [*KINDS, 'run', 'cluster'])}{hint}")
    module = KINDS[kind]
    for given, other in (("steps", "passes"), ("passes", "steps")):
        if given in values:  # a recipe's length replaces the default one, whichever way either is given
            values.setdefault(other, None)
    return kind, config.build(module.Config, values, name, module.DEFAULTS)


def _inputs(module: ModuleType, cfg: Any) -> dict[str, str]:
    """The fields of a stage that name inputs, those that are set; "*" stands for every name of a section."""
    found: dict[str, Any] = {}
    for field in module.INPUTS:
        at = {"": cfg}
        for part in field.split("."):
            if part == "*":
                at = {f"{path}.{name}": one for path, section in at.items() for name, one in section.items()}
            else:
                at = {f"{path}.{part}".lstrip("."): getattr(section, part) for path, section in at.items()}
        found |= at
    return {field: value for field, value in found.items() if value is not None}


def _in_order(sections: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Stage names so that every one comes after what it reads; the recipe's order otherwise."""
    graph = {}
    for name, (kind, cfg) in sections.items():
        links = {field: reference(value) for field, value in _inputs(KINDS[kind], cfg).items()}
        for field, link in links.items():
            known = link is None or link[0] in sections
            require(
                known,
                f"{name}.{field} is @{link and link[0]}, no such stage"
                f"{did_you_mean(link[0] if link else '', sections)}",
            )
        graph[name] = {link[0] for link in links.values() if link}
    sorter, order, ready = TopologicalSorter(graph), [], set()
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"stages read each other in a circle: {' ← '.join(error.args[1])}") from None
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        order.append(min(ready, key=list(sections).index))
        ready.remove(order[-1])
        sorter.done(order[-1])
    return order


def _resolve(name: str, kind: str, cfg: Any, earlier: Mapping[str, Stage]) -> Stage:
    parents: dict[str, str] = {}
    keys: dict[str, str] = {}
    missing: list[str] = []
    for field, value in _inputs(KINDS[kind], cfg).items():
        link = reference(value)
        parents[field] = value
        if link is None:
            require(value != "???", f"{name}.{field} is missing: a path, or @stage")
            keys[field] = _content(name, field, value, missing)
        else:
            _check_part(name, field, link, earlier[link[0]])
            keys[field] = f"{earlier[link[0]].key}/{link[1]}"
    model = _model(name, kind, cfg, earlier)
    forbidden = config.tagged(cfg, "forbid")
    inputs = {field: key for field, key in keys.items() if field in forbidden}  # a test set may change half way
    fields = {k: v for k, v in forbidden.items() if k not in parents and k not in KINDS[kind].INPUTS}
    described = {"schema": SCHEMA, "kind": kind, "config": fields, "inputs": inputs}
    return Stage(name, kind, cfg, parents, model, config.digest(described), inputs, tuple(missing))


def _content(name: str, field: str, value: str, missing: list[str]) -> str:
    """Digest of an input that lies outside the campaign; what is not there is noted, and stops `run`, not `plan`."""
    try:
        if field != "init":
            return load_index(value).digest
        with open(Path(value) / "weights.safetensors", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except DataError as error:
        missing.append(f"{name}.{field}: {error}")
    except OSError:
        missing.append(f"{name}.{field}: no weights.safetensors in {value}\n  give a folder that holds one, or @stage")
    return "missing"


def _check_part(name: str, field: str, link: tuple[str, str], parent: Stage) -> None:
    if parent.kind == "pack":
        require(
            link[1] in parent.config.sets,
            f"{name}.{field}: {parent.name} packs no set {link[1]!r}{did_you_mean(link[1], parent.config.sets)}",
        )
    elif field != "init" or link[1] or parent.kind == "fewshot":
        raise ConfigError(
            f"{name}.{field} is @{link[0]}: a {parent.kind} stage makes no {'data' if field != 'init' else 'weights'}"
        )


def _model(name: str, kind: str, cfg: Any, earlier: Mapping[str, Stage]) -> Any:
    """The architecture a stage ends with: named by its recipe, or what it changes of the weights it starts from."""
    if kind == "pack":
        return None
    source = None
    if cfg.init is not None:
        link = reference(cfg.init)
        source = earlier[link[0]].model if link else _config_in(cfg.init)
        if source is None:
            return None
    try:
        if kind == "fewshot":
            return source
        if kind == "resize":
            return model_config({"image_size": cfg.image_size}, source)
        return trained_model(cfg, source)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def _config_in(folder: str) -> Any:
    """The architecture of weights outside the campaign; None where there are none (`missing` says so)."""
    path = Path(folder) / "model.json"
    return models.from_dict(json.loads(path.read_text())) if path.is_file() else None


def _check_training(stage: Stage, cluster: ClusterConfig) -> None:
    given = stage.config.data
    require(
        bool(given.train or given.mixture), f"{stage.name}.data.train is missing: a path, or @stage; or data.mixture"
    )
    try:
        batch_arithmetic(stage.config, cluster.workers)
    except ConfigError as error:
        raise ConfigError(f"{stage.name}: {error}") from None


# ------------------------------------------------------------------------------------------------ running it


def resume_conflict(campaign: Campaign, stage: Stage) -> list[str]:
    """What changed since an unfinished stage of the same name was last run, and may not; empty: no conflict."""
    if campaign.directory(stage).exists():
        return []
    folders = campaign.run.glob(f"{stage.name}-{'[0-9a-f]' * 8}")
    for folder in sorted(folders, key=_last_attempt, reverse=True):
        record = folder / "stage.json"
        if record.exists() and not (folder / "done.json").exists() and any((folder / "checkpoints").glob("step-*")):
            old = json.loads(record.read_text())
            changed = config.differences(old["forbid"], _forbidden(stage))
            return changed or [f"key: {old['key'][:8]} → {stage.key[:8]}, by another version of Patchline"]
    return []


def _last_attempt(folder: Path) -> str:
    """Name of a stage's newest attempt: attempts are numbered over the whole run, clocks may jump."""
    return max((path.name for path in (folder / "attempts").glob("attempt-*")), default="")


def resolved(campaign: Campaign) -> str:
    """The whole campaign as YAML with every default written out: what a recipe's golden text holds."""
    stages = {s.name: {"kind": s.kind, **config.plain(s.config)} for s in campaign.stages}
    return config.to_yaml({"cluster": config.plain(campaign.cluster), **stages})


def _forbidden(stage: Stage) -> dict[str, Any]:
    """Flat and JSON-able: what the key is of, the resolved model in place of what the recipe says of it."""
    fields = {name: value for name, value in config.tagged(stage.config, "forbid").items() if name != "model"}
    model = {f"model.{name}": value for name, value in models.to_dict(stage.model).items()} if stage.model else {}
    inputs = {f"content of {field}": key for field, key in stage.inputs.items()}
    return json.loads(json.dumps(fields | model | inputs, default=str))


def run(
    campaign: Campaign,
    *,
    say: Callable[[str], None],
    tick: Callable[[Path, int], None],
    stopping: Callable[[], bool],
    fresh: bool = False,
    only: str | None = None,
) -> list[dict[str, Any]]:
    """Walk the stages in order; returns one row a stage. `only` runs one stage, whose inputs must be there."""
    for problem in (message for stage in campaign.stages if only in (None, stage.name) for message in stage.missing):
        raise DataError(problem)
    rows = []
    for stage in campaign.stages:
        if only is not None and stage.name != only:
            continue
        done = campaign.done(stage)
        if done is not None:
            other = _warned(campaign.directory(stage), stage)
            but = f", but for {'; '.join(other)}; move {campaign.directory(stage)} away to do it over" if other else ""
            say(f"{stage.name}: skipped, finished with the same config and inputs (key {stage.key[:8]}){but}")
            rows.append({"stage": stage.name, "skipped": True, **done})
            continue
        if stopping():
            raise Preempted(f"stopped before {stage.name}; run the same command again to go on")
        rows.append({"stage": stage.name, "skipped": False, **_run_stage(campaign, stage, say, tick, stopping, fresh)})
    return rows


def _run_stage(campaign: Campaign, stage: Stage, say: Any, tick: Any, stopping: Any, fresh: bool) -> dict[str, Any]:
    began = time.time()
    for field, value in stage.parents.items():
        link = reference(value)
        if link and campaign.done(campaign.stage(link[0])) is None:
            raise ConfigError(
                f"{stage.name}.{field} is {value}, which has not run\n  run the campaign, or {link[0]} alone first"
            )
    conflict = resume_conflict(campaign, stage)
    if conflict and not fresh:
        raise ConfigError(
            f"{stage.name} is half done with another config:\n    " + "\n    ".join(conflict) + "\n"
            "  undo the change to resume it, or pass --fresh to start this stage over (the old one is kept)"
        )
    directory = campaign.directory(stage)
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "name": stage.name,
        "kind": stage.kind,
        "key": stage.key,
        "model": models.to_dict(stage.model) if stage.model else None,
        "forbid": _forbidden(stage),
        "config": config.plain(stage.config),
    }
    warn = _warned(directory, stage)
    if warn:
        say(f"{stage.name}: resuming with a changed {'; '.join(warn)}")
    write_whole(directory / "stage.json", json.dumps(record | {"warn": config.tagged(stage.config, "warn")}, indent=1))
    say(f"{stage.name}: key {stage.key[:8]}, in {directory}")
    context = Context(
        stage.name,
        campaign.run,
        directory,
        stage.key,
        campaign.cluster,
        campaign.resolve,
        stage.model,
        say,
        tick,
        stopping,
    )
    outcome = stage.module.run(stage.config, context)
    parents = {field: campaign.resolve(value) or "" for field, value in stage.parents.items()}
    write_done(context, dataclasses.asdict(stage.config), parents, outcome, began)
    return campaign.done(stage) or {}


def _warned(directory: Path, stage: Stage) -> list[str]:
    record = directory / "stage.json"
    if not record.exists():
        return []
    return config.differences(json.loads(record.read_text())["warn"], config.tagged(stage.config, "warn"))
