"""Derive facts about a stage's training and evaluation from its config. Stages with equal facts behave identically.

    passes: 300, of 1,281,167 images, in batches of 4096     {"images": 384,348,160, …}
    steps: 93835 in batches of 4096                          the same fact
    micro_batch: 64, cluster.workers: 8                      no fact, because splitting a batch changes no result

1. `of_campaign` and `of_run` yield the stages that train or evaluate; if runs differ only by seed, they yield only the
   first.
2. `facts_of` starts with the fields that must not change on resume, removes fields disabled by other fields, and
   replaces groups of fields with their combined meaning.
3. An unknown fact, for example the size of a data set not on this machine, has the value None.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data.images.preprocess import parse_ops
from data.index.index import Index
from data.order import DEFAULT_BLOCK, DEFAULT_LANES
from jobs.extras.diff.facts import Fact
from jobs.extras.history import flat, read_run
from jobs.extras.studies import table as sweep
from jobs.resolved_recipe import Available, Campaign, Kinds, Stage, StageKind, reference
from jobs.stages import evaluate, fewshot
from models.configs import ModelConfig, ViTConfig, from_dict
from pipeline import config
from pipeline.extras.recorded_config import build_recorded
from pipeline.optimization import learning_rate
from pipeline.training_data import steps_of

EVALUATING = (evaluate.Evaluate.name, fewshot.FewShot.name)
NONE = "none"  # value of a fact known to be absent
# Lists whose order has no meaning.
SETS = ("shots", "seeds", "k", "l2", "drop", "protocols")
# Schedules are compared at this number of steps. They are equal if at most SPAN of these rates differ by more than
# RATE, so that a drop may fall on the other side of a compared step.
COMPARED_STEPS = 2000
SPAN = 0.002
RATE = 0.05
# Evaluation protocols with a settings section, which matters only if the protocol is used.
WITH_SETTINGS = ("fewshot", "linear", "knn", "logistic")


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A stage's learning rate at every step, relative to the peak."""

    rates: tuple[float, ...]  # at COMPARED_STEPS steps after the warm-up
    end: str

    def __eq__(self, other: object) -> bool:
        """Return whether two curves agree, except at isolated steps."""
        if not isinstance(other, RateCurve) or self.end != other.end:
            return False
        differing = 0
        for rate, other_rate in zip(self.rates, other.rates, strict=True):
            differing += not math.isclose(rate, other_rate, rel_tol=RATE)
        return differing <= SPAN * len(self.rates)


@dataclass(frozen=True)
class ComparedStage:
    """A stage of a recipe or run, with its model and data sets if these are on this machine."""

    name: str  # name of its section in a recipe
    row: str  # its row in a sweep's table; its name if there is no sweep
    kind: StageKind
    config: Any  # an instance of the kind's config
    model: ModelConfig | None  # None if the initial weights are not on this machine
    image_size: tuple[int, int] | None
    size_key: str  # recipe key that sets the image size
    workers: int
    sets: Mapping[str, Index | None]  # field → data set; None if it is not on this machine
    choices: Mapping[str, list[Any]] = field(default_factory=dict)  # for sweeps: field → candidate values
    seeds: int = 1  # number of runs that differ only by seed
    has_held_out: bool | None = None  # of a sweep: whether it chooses values on samples other than those of its results

    @property
    def samples(self) -> int | None:
        """Return the number of training samples; None if neither the recipe nor an index specifies it."""
        samples = 0
        for name, index in self.sets.items():
            if name.startswith("data.train"):
                if index is None:
                    return self.config.data.samples
                samples += index.samples
        return samples

    @property
    def steps(self) -> int | None:
        """Return the number of training steps; None if this depends on an unknown number of samples."""
        if self.config.steps is None and self.samples is None:
            return None
        return steps_of(self.config, self.samples or 0)


def of_campaign(campaign: Campaign) -> Iterator[ComparedStage]:
    """Yield the stages of a recipe that train or evaluate; for a sweep, only the first run in each row."""
    available = Available(campaign)
    table_of: dict[str, Stage] = {}  # name of a run → its sweep's table
    referenced: set[str] = set()  # tables whose chosen values other stages use
    for stage in campaign.stages:
        referenced.update(stage.links[field][0] for field in stage.references)
        if stage.kind.name == sweep.Table.name:
            table_of.update(dict.fromkeys(stage.config.runs, stage))
    seen: set[tuple[str, str]] = set()
    for stage in campaign.stages:
        table = table_of.get(stage.name)
        is_candidate = table is not None and table.name in referenced
        if is_candidate or not (stage.kind.trains or stage.kind.name in EVALUATING):
            continue
        # 1. The row in a sweep's table, its number of runs, and the candidate values.
        row = stage.name
        seeds = 1
        chooser = None
        if table is not None:
            runs = table.config.runs
            row = runs[stage.name].row
            seeds = sum(run.row == row for run in runs.values())
            # The table chooses a value, but no other stage uses it: treat all rows of the grid as one.
            if table.config.chooses:
                chooser = table
                row = stage.source
        for name in stage.references:
            chooser = campaign.stage(stage.links[name][0])
        if (stage.source, row) in seen:
            continue
        seen.add((stage.source, row))
        choices: dict[str, list[Any]] = {}
        if chooser is not None:
            for run in chooser.config.runs.values():
                for key, value in run.values.items():
                    if value not in choices.setdefault(key, []):
                        choices[key].append(value)

        # 2. The data sets, if they are on this machine.
        sets = {}
        for name in stage.reads:
            if name != "init":
                sets[name.replace("mixture", "train")] = available.index(stage.parents[name])

        # 3. The image size, which may be set by a preceding resize stage.
        section = getattr(stage.config, "model", {})
        size = section.get("image_size")
        if stage.model is not None:
            size = stage.model.image_size
        size_key = f"{stage.source}.model.image_size"
        link = reference(stage.config.init or "")
        if link is not None and "image_size" not in section:
            maker = campaign.stage(link[0])
            if maker.kind.name == "resize":
                size = maker.config.image_size
                size_key = f"{maker.name}.image_size"
        if isinstance(size, int):
            size = (size, size)
        yield ComparedStage(
            name=stage.source,
            row=row,
            kind=stage.kind,
            config=stage.config,
            model=stage.model,
            image_size=size and tuple(size),
            size_key=size_key,
            workers=campaign.cluster.most,
            sets=sets,
            choices=choices,
            seeds=seeds,
            has_held_out=None if chooser is None else chooser is not table,
        )


def of_run(path: Path, kinds: Kinds) -> Iterator[ComparedStage]:
    """Yield a run's training and evaluation stages. Raises ConfigError for configs from another Patchline version."""
    for stage in read_run(path).stages:
        record = stage.record
        kind = kinds.get(record.get("kind", ""))
        if kind is None or not (kind.trains or kind.name in EVALUATING):
            continue
        model = None
        image_size = None
        if record["model"]:
            model = from_dict(record["model"])
            image_size = model.image_size
        workers = 1
        if stage.starts:
            workers = stage.starts[-1]["world"]
        sets = {}
        for name, index in stage.sets.items():
            # Convert "probe train" to "probe.train", and "train" to "data.train".
            name = f"data.{name}".replace("data.probe ", "probe.")
            sets[name] = index if isinstance(index, Index) else None
        # Records of earlier versions lack the section of a sweep's run.
        section = record.get("section", stage.name)
        yield ComparedStage(
            name=section,
            row=stage.name,
            kind=kind,
            config=build_recorded(kind.config, record["config"], stage.name),
            model=model,
            image_size=image_size,
            size_key=f"{section}.model.image_size",
            workers=workers,
            sets=sets,
        )


# ------------------------------------------------------------------------------------------------ facts


def facts_of(stage: ComparedStage, other: ComparedStage) -> dict[str, Fact]:
    """Return a stage's facts by field name.

    Schedules are evaluated with the peak learning rate and the warm-up of `other`, so that they can be compared.
    """
    facts = {}
    if stage.kind.trains:
        facts.update(facts_of_training(stage, other.config.optim.lr, other.config.optim.schedule.warmup_steps))
    else:
        facts.update(facts_of_evaluation(stage))
    for name, index in stage.sets.items():
        facts[f"content.{name}"] = Fact(None, "")
        if index is not None:
            facts[f"content.{name}"] = Fact(index.digest, f"digest {index.digest}"[:19], keys={})
    return facts


def fact_of_field(value: Any, keys: Mapping[str, Any] | None = None) -> Fact:
    """Return a fact for a field's value; None becomes NONE, because the value is known to be absent."""
    return Fact(NONE if value is None else value, config.shown(value), keys=keys)


def without_order(name: str, value: Any) -> Any:
    """Return a field's value; sort it if it is a list whose order has no meaning."""
    if isinstance(value, list) and name.rpartition(".")[2] in SETS:
        return sorted(value)
    return value


def facts_of_evaluation(stage: ComparedStage) -> dict[str, Fact]:
    """Return the facts of an evaluation: its protocols with their settings, and its preprocessing."""
    cfg = stage.config
    facts = {}
    for name, value in flat(config.plain(cfg)).items():
        section = name.partition(".")[0]
        # Weights and data sets are not settings, and how they are read does not change the results.
        is_path = section in ("init", "model", "sets", "leaks") or name.startswith("probe.t")
        is_free = section in ("micro_batch", "cache", "stall_s")
        is_unused = section in WITH_SETTINGS and section not in cfg.protocols
        if not (is_path or is_free or is_unused):
            facts[name] = Fact(without_order(name, value), config.shown(value))
    if stage.kind.name == evaluate.Evaluate.name:
        facts["protocols"] = Fact(sorted(cfg.protocols), ", ".join(sorted(cfg.protocols)))
    facts["preprocess"] = fact_of_ops(cfg.preprocess, stage.image_size)
    return facts


def facts_of_training(stage: ComparedStage, peak: float, warmup_steps: int) -> dict[str, Fact]:
    """Return the facts about a stage's training.

    Schedules are evaluated with the given peak, because an end such as 1e-5 is absolute, and with the given warm-up;
    the stage's peak and warm-up are separate facts.
    """
    cfg = stage.config
    optim = cfg.optim
    schedule = optim.schedule
    augment = cfg.data.augment
    values = flat(config.plain(cfg))
    # 1. Remove the fields that may change on resume, and those replaced by other facts below.
    unused = [*config.tagged(cfg, "warn"), *config.tagged(cfg, "free")]
    unused += ["passes", "steps", "data.train", "data.samples", "optim.head_weight_decay"]
    for name in values:
        if name.startswith(("model", "data.mixture", "optim.schedule.", "init")):
            unused.append(name)
    # 2. Remove the fields disabled by another field.
    switched_off = {
        "loss label_smoothing mixup data.max_labels": cfg.objective == "masked",
        "new_head": cfg.objective == "masked" or cfg.init is None,
        "optim.beta1 optim.beta2 optim.eps": optim.name == "sgd",
        "optim.momentum": optim.name != "sgd",
        "data.augment.min_area data.augment.min_aspect data.augment.max_aspect": augment.crop != "inception",
        "data.augment.reduced": augment.crop == "random",
        "data.augment.randaug_magnitude data.augment.randaug_relative": not augment.randaug_layers,
        "thinning.patch_dropout_until": not cfg.thinning.patch_dropout,
    }
    for names, is_off in switched_off.items():
        if is_off:
            unused += names.split()
    for name in unused:
        values.pop(name, None)

    # 3. Resolve defaults, and the interval of evaluations if the best weights are kept.
    values["data.lanes"] = cfg.data.lanes or min(DEFAULT_LANES, cfg.batch_size)
    values["data.shuffle_block"] = cfg.data.shuffle_block or DEFAULT_BLOCK
    values["data.drop"] = sorted(cfg.data.drop)
    if cfg.keep_best is not None:
        values["evaluate_every"] = cfg.evaluate_every
    if cfg.probe.train is not None:
        for name in ("shots", "seeds", "l2"):
            values[f"probe.{name}"] = without_order(name, config.plain(cfg.probe)[name])
    # Mixup combines images of the same micro-batch, so it has no effect on micro-batches of one image.
    if cfg.mixup and min(cfg.micro_batch, math.ceil(cfg.batch_size / stage.workers)) == 1:
        values["mixup"] = 0.0
    facts = {}
    for name, value in values.items():
        facts[name] = fact_of_field(value)
    facts["sweep.seeds"] = Fact(stage.seeds, str(stage.seeds), keys={"sweep.seeds": list(range(stage.seeds))})
    facts |= facts_of_model(stage)

    # 4. The data. No override can make these facts equal to those of another recipe.
    weights = cfg.data.weights()
    shares = sorted(round(weight / sum(weights), 6) for weight in weights)
    facts["data.mixture"] = Fact(shares, f"{len(shares)} sets with shares {shares}", keys={})
    facts["init"] = Fact("pretrained weights", "pretrained weights", keys={})
    if cfg.init is None:
        facts["init"] = Fact("random", "random", keys={})
    facts["data.evaluate"] = Fact("a separate set", "a separate set", keys={})
    if cfg.data.evaluate is None:
        facts["data.evaluate"] = Fact(NONE, NONE, keys={})
    if cfg.data.evaluate is not None or cfg.probe.train is not None:
        facts["data.preprocess"] = fact_of_ops(cfg.data.preprocess, stage.image_size)
    facts["data.samples"] = Fact(stage.samples, f"{stage.samples or 0:,} images")
    facts["images"] = Fact(None, "")
    if stage.steps is not None:
        images = stage.steps * cfg.batch_size
        facts["images"] = Fact(images, f"{images:,}", slack=cfg.batch_size)

    # 5. The optimizer. Different keys can give the same curve, so compare schedules by their rates.
    decay = optim.weight_decay
    of_head = optim.head_weight_decay
    if of_head is None:
        of_head = decay
    way = "added to the gradient"
    if optim.name == "adam":
        way = "decoupled, times the learning rate"
    decay_keys = {"optim.weight_decay": optim.weight_decay, "optim.head_weight_decay": optim.head_weight_decay}
    words = f"{decay:g}, {way}, on kernels"
    if of_head != decay:
        words = f"{decay:g}, {of_head:g} on the head"
    facts["optim.weight_decay"] = Fact([decay, of_head, way], words, keys=decay_keys)
    if of_head == decay == 0:
        facts["optim.weight_decay"] = Fact(NONE, NONE, keys=decay_keys)
    steps = stage.steps or 10 * (schedule.warmup_steps + schedule.cooldown_steps + 1)
    end = f"{learning_rate(steps, steps, peak, schedule):.2g}"
    compared = replace(schedule, warmup_steps=warmup_steps)
    rates = []
    for number in range(COMPARED_STEPS):
        step = warmup_steps + (number + 0.5) / COMPARED_STEPS * (steps - warmup_steps)
        rates.append(learning_rate(step, steps, peak, compared) / peak)
    words = schedule.decay
    if schedule.cooldown_steps:
        words += f", the last {schedule.cooldown_steps:,} steps linear to 0"
    schedule_keys = flat(config.plain(schedule), "optim.schedule.")
    warmup = schedule_keys.pop("optim.schedule.warmup_steps")
    facts["optim.schedule.decay"] = Fact(RateCurve(tuple(rates), end), f"{words}, ends at {end}", keys=schedule_keys)
    facts["optim.schedule.warmup_steps"] = Fact(warmup, f"{warmup:,} steps, {warmup / steps:.1%} of all")
    if schedule.drops:
        facts["optim.schedule.decay"] = replace(
            facts["optim.schedule.decay"], words=f"{words}, drops after {list(schedule.drops)}, ends at {end}"
        )
    # 6. A sweep chooses the best of several values, on held-out samples or on those of its results.
    if stage.has_held_out is not None:
        words = "on held-out samples" if stage.has_held_out else "on the samples of the results"
        facts["sweep.held_out"] = Fact(stage.has_held_out, words, keys={})
    for name, choices in stage.choices.items():
        words = f"the best of {', '.join(map(str, choices))}"
        facts[name] = Fact(tuple(choices), words, keys={f"sweep.grid.{name}": choices})
    return facts


def facts_of_model(stage: ComparedStage) -> dict[str, Fact]:
    """Return the facts of a stage's model; if the initial weights are missing, only facts given in the recipe."""
    model = stage.model
    values = dict(stage.config.model)
    values.pop("name", None)
    if model is not None:
        values = asdict(model)
    elif stage.config.new_head:
        values.setdefault("representation", None)
    values.pop("image_size", None)
    if isinstance(model, ViTConfig):
        if model.position_std is None:
            # Apply the same rule as models/initial.py.
            values["position_std"] = model.width**-0.5
            if model.class_slot and model.pool != "map":
                values["position_std"] = 0.02
        if model.positions in ("none", "sincos2d"):
            del values["position_std"], values["class_slot"], values["positions_at"]
        elif model.prefix_tokens == 0:
            del values["class_slot"]
        if model.stem is None:
            del values["stem_width"]
    facts = {}
    if model is not None:
        # There is no key for the family; the name of the model determines it.
        keys = {"model": stage.config.model["name"]} if "name" in stage.config.model else {}
        facts["model.family"] = Fact(model.family, model.family, keys=keys)
    for name, value in values.items():
        name = f"model.{name}"
        if isinstance(value, tuple):
            value = list(value)
        facts[name] = fact_of_field(value, {name: value})
    if stage.image_size is not None:
        height, width = stage.image_size
        # The key depends on the stage that sets the size, which can differ between the recipes.
        facts["model.image_size"] = Fact([height, width], f"{height} × {width} pixels")
    return facts


def fact_of_ops(ops: str | None, size: tuple[int, int] | None) -> Fact:
    """Return a fact for preprocessing ops, without `decode` and with "size" in place of the image size."""
    if ops is None:
        if size is None:
            return Fact(None, "")
        ops = f"resize({size[0]})"
    meant: list[object] = []
    for op, arguments in parse_ops(ops):
        if op.__name__ == "unchanged":
            continue
        numbers = list(arguments)
        for place, argument in enumerate(arguments):
            if size is not None and argument in (size, size[0]):
                numbers[place] = "size"
        meant.append((op.__name__, numbers))
    return Fact(meant, ops)
