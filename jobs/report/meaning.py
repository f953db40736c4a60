"""What a stage means, whatever keys say it: stages whose facts are equal train alike, and are judged alike.

    passes: 300, of 1,281,167 images, in batches of 4096     {"images": 384,348,160, …}
    steps: 93835 in batches of 4096                          the same
    micro_batch: 64, cluster.workers: 8                      no fact: how a batch is shared changes nothing

1. `of_campaign` and `of_run` read the stages that train or evaluate; of runs that differ by their seed, the first.
2. `facts_of` begins with the fields that a resume may not change, takes out those that another one switches off, and
   puts what follows from several fields in the place of these.
3. What nothing tells, as the size of a set that is not here, is a fact of the value None.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.images.preprocess import parse_ops
from data.index.index import Index
from data.order import DEFAULT_BLOCK, DEFAULT_LANES
from jobs.report.reading import flat, read_run
from jobs.resolved_recipe import Available, Campaign, StageKind, reference
from jobs.stages import evaluate, fewshot
from jobs.stages.kinds import KINDS
from jobs.stages.sweep import KIND as TABLE
from models.configs import ModelConfig, ViTConfig, from_dict
from pipeline import config
from pipeline.optimization import learning_rate
from pipeline.training_config import steps_of

JUDGING = (evaluate.KIND, fewshot.KIND)
NONE = "none"  # the value of what is not there, and known not to be


@dataclass(frozen=True)
class Fact:
    """Something that a stage does; `words` say it to people."""

    value: Any  # None: not known; a tuple: the best of these
    words: str
    slack: float = 0.0  # by which equal values may differ

    def equals(self, other: "Fact") -> bool:
        """Return whether two facts mean the same: a value is no other than the best of several with it among them."""
        slack = max(self.slack, other.slack)
        if slack:
            return bool(abs(self.value - other.value) <= slack)
        if isinstance(self.value, tuple) and not isinstance(other.value, tuple):
            return other.value in self.value
        if isinstance(other.value, tuple) and not isinstance(self.value, tuple):
            return self.value in other.value
        return bool(self.value == other.value)


@dataclass(frozen=True)
class Known:
    """A stage of a recipe or a run, with what is known of its data and of the weights that it starts from."""

    name: str  # of its section in a recipe
    row: str  # of the sweep's table, where it has one; else the name
    kind: StageKind
    config: Any  # of the kind
    model: ModelConfig | None  # None where the weights that it starts from are not here
    image_size: tuple[int, int] | None
    size_key: str  # of a recipe, that sets the image size
    workers: int
    sets: Mapping[str, Index | None]  # by field; None of one that is not here
    choices: Mapping[str, list[Any]] = field(default_factory=dict)  # of a sweep: field → the values to choose from
    seeds: int = 1  # runs that differ by their seed alone

    @property
    def samples(self) -> int | None:
        """Return how many samples it trains on; None where neither recipe nor index tells."""
        samples = 0
        for name, index in self.sets.items():
            if name.startswith("data.train"):
                if index is None:
                    return self.config.data.samples
                samples += index.samples
        return samples

    @property
    def steps(self) -> int | None:
        """Return how many steps it takes; None where it makes passes over nobody knows how many samples."""
        if self.config.steps is None and self.samples is None:
            return None
        return steps_of(self.config, self.samples or 0)


def of_campaign(campaign: Campaign) -> Iterator[Known]:
    """Iterate the stages of a recipe that train or evaluate."""
    there = Available(campaign)
    waiting: set[str] = set()  # tables that other runs take their values from
    for stage in campaign.stages:
        waiting.update(stage.chosen.values())
    seen: set[tuple[str, str]] = set()
    for stage in campaign.stages:
        if not stage.kind.trains and stage.kind not in JUDGING:
            continue
        # 1. Which row of which sweep it is, and which of its values are the best of several.
        row = stage.name
        seeds = 1
        chooser = None
        for table in campaign.stages:
            if table.kind is not TABLE:
                continue
            run = table.config.runs.get(stage.name)
            if run is not None:
                row = run.row
                seeds = sum(other.row == row for other in table.config.runs.values())
            if f"@{table.name}" in stage.chosen.values() or (run is not None and table.config.chooses):
                chooser = table
        is_candidate = chooser is not None and f"@{chooser.name}" in waiting and not stage.chosen
        choices: dict[str, list[Any]] = {}
        if chooser is not None:
            row = stage.source if not stage.chosen else row
            for candidate in chooser.config.runs.values():
                for key, value in candidate.values.items():
                    if value not in choices.setdefault(key, []):
                        choices[key].append(value)
        if is_candidate or (stage.source, row) in seen:
            continue
        seen.add((stage.source, row))

        # 2. Its data, as far as it is here, and the size of its images, which another stage may have set.
        sets = {}
        for name, (path, _reads) in stage.kind.inputs_of(stage.config).items():
            if name != "init":
                sets[name.replace("mixture", "train")] = there.index(path)
        own = getattr(stage.config, "model", {})
        size = stage.model.image_size if stage.model else own.get("image_size")
        size_key = f"{stage.source}.model.image_size"
        link = reference(stage.config.init or "")
        maker = campaign.stage(link[0]) if link else None
        if maker is not None and maker.kind.name == "resize" and "image_size" not in own:
            size = maker.config.image_size
            size_key = f"{maker.name}.image_size"
        yield Known(
            name=stage.source,
            row=row,
            kind=stage.kind,
            config=stage.config,
            model=stage.model,
            image_size=(size, size) if isinstance(size, int) else size and tuple(size),
            size_key=size_key,
            workers=campaign.cluster.most,
            sets=sets,
            choices=choices,
            seeds=seeds,
        )


def of_run(path: Path) -> Iterator[Known]:
    """Iterate the stages of a run that train or evaluate. Raises ConfigError where another version wrote them."""
    for stage in read_run(path).stages:
        record = stage.record
        kind = KINDS.get(record.get("kind", ""))
        if kind is None or not (kind.trains or kind in JUDGING):
            continue
        model = from_dict(record["model"]) if record["model"] else None
        sets = {}
        for name, index in stage.sets.items():
            name = name.replace("probe ", "probe.") if "probe" in name else f"data.{name}"
            sets[name] = index if isinstance(index, Index) else None
        yield Known(
            name=stage.name,
            row=stage.name,
            kind=kind,
            config=config.build(kind.config, record["config"], stage.name),
            model=model,
            image_size=model.image_size if model else None,
            size_key=f"{stage.name}.model.image_size",
            workers=stage.starts[-1]["world"] if stage.starts else 1,
            sets=sets,
        )


# ------------------------------------------------------------------------------------------------ facts


def facts_of(stage: Known, other: Known) -> dict[str, Fact]:
    """Return what a stage does, by the field that says it most directly; it is to be compared with `other`."""
    facts = facts_of_training(stage, other) if stage.kind.trains else facts_of_evaluation(stage)
    for name, index in stage.sets.items():
        digest = None if index is None else index.digest
        facts[f"content.{name}"] = Fact(digest, f"digest {digest}"[:19])
    return facts


def facts_of_evaluation(stage: Known) -> dict[str, Fact]:
    """Return how a stage evaluates: its protocols with their settings, and what becomes of an image before."""
    cfg = stage.config
    facts = {}
    if stage.kind is evaluate.KIND:
        facts["protocols"] = Fact(sorted(cfg.protocols), ", ".join(sorted(cfg.protocols)))
    for name, value in flat(config.plain(cfg)).items():
        section = name.partition(".")[0]
        is_used = section not in ("fewshot", "linear", "knn", "logistic") or section in cfg.protocols
        is_path = section in ("init", "model", "sets", "leaks") or name.startswith(("probe.t", "protocols"))
        is_free = section in ("micro_batch", "cache", "stall_s", "preprocess")
        if is_used and not is_path and not is_free:
            facts[name] = Fact(value, config.shown(value))
    facts["preprocess"] = fact_of_ops(cfg.preprocess, stage.image_size)
    return facts


def facts_of_training(stage: Known, other: Known) -> dict[str, Fact]:
    """Return what is trained how; the schedule is drawn at the other's peak, for an end of 1e-5 is one at any peak."""
    cfg = stage.config
    optim = cfg.optim
    peak = other.config.optim.lr
    values = flat(config.plain(cfg))
    # 1. The fields that a resume may change go, and those that stand below in another form.
    unused = [*config.tagged(cfg, "warn"), *config.tagged(cfg, "free")]
    unused += ["passes", "steps", "data.train", "data.samples", "optim.head_weight_decay"]
    for name in values:
        if name.startswith(("model", "data.mixture", "optim.schedule.", "init")):
            unused.append(name)
    # 2. So do those that another field switches off.
    if cfg.objective == "masked":
        unused += ["loss", "label_smoothing", "mixup", "data.max_labels"]
    if cfg.objective == "masked" or cfg.init is None:
        unused.append("new_head")
    unused += ["optim.beta1", "optim.beta2", "optim.eps"] if optim.name == "sgd" else ["optim.momentum"]
    augment = cfg.data.augment
    if augment.crop != "inception":
        unused += ["data.augment.min_area", "data.augment.min_aspect", "data.augment.max_aspect"]
    if augment.crop == "random":
        unused.append("data.augment.reduced")
    if not augment.randaug_layers:
        unused.append("data.augment.randaug_magnitude")
    if not cfg.thinning.patch_dropout:
        unused.append("thinning.patch_dropout_until")
    for name in unused:
        values.pop(name, None)

    # 3. Values that stand for others: defaults, and how often a best one is looked for.
    values["data.lanes"] = cfg.data.lanes or min(DEFAULT_LANES, cfg.batch_size)
    values["data.shuffle_block"] = cfg.data.shuffle_block or DEFAULT_BLOCK
    values["data.drop"] = sorted(cfg.data.drop)
    values["sweep.seeds"] = stage.seeds
    if cfg.keep_best is not None:
        values["evaluate_every"] = cfg.evaluate_every
    if cfg.probe.train is not None:
        for name in ("shots", "seeds", "l2"):
            values[f"probe.{name}"] = config.plain(cfg.probe)[name]
    # The partner of an image stands beside it in the micro-batch: a single image has none.
    if cfg.mixup and min(cfg.micro_batch, math.ceil(cfg.batch_size / stage.workers)) == 1:
        values["mixup"] = 0.0
    values |= model_values(stage)
    facts = {}
    for name, value in values.items():
        facts[name] = Fact(NONE if value is None else value, config.shown(value))

    if stage.image_size is not None:
        height, width = stage.image_size
        facts["model.image_size"] = Fact([height, width], f"{height} × {width} pixels")

    # 4. The data.
    weights = [weight for _path, weight in cfg.data.sets().values()]
    shares = sorted(round(weight / sum(weights), 6) for weight in weights)
    facts["data.mixture"] = Fact(shares, f"{len(shares)} sets by {shares}")
    facts["data.samples"] = Fact(stage.samples, f"{stage.samples:,} images" if stage.samples else "")
    facts["init"] = Fact(cfg.init is None, "random" if cfg.init is None else "of pretrained weights")
    facts["data.evaluate"] = Fact(
        cfg.data.evaluate is None, "none" if cfg.data.evaluate is None else "a set of its own"
    )
    images = None if stage.steps is None else stage.steps * cfg.batch_size
    facts["images"] = Fact(images, f"{images:,}" if images else "", slack=cfg.batch_size if images else 0)
    if cfg.data.evaluate is not None or cfg.probe.train is not None:
        facts["data.preprocess"] = fact_of_ops(cfg.data.preprocess, stage.image_size)

    # 5. The optimizer. Many keys can say one curve, so that schedules are compared by their rates after the warm-up.
    head = optim.weight_decay if optim.head_weight_decay is None else optim.head_weight_decay
    way = "decoupled, times the rate" if optim.name == "adam" else "added to the gradient"
    facts["optim.weight_decay"] = Fact([optim.weight_decay, head, way], f"{optim.weight_decay:g}, {way}, on kernels")
    if head != optim.weight_decay:
        facts["optim.weight_decay"] = Fact(
            [optim.weight_decay, head, way], f"{optim.weight_decay:g}, {head:g} on the head"
        )
    elif head == 0:
        facts["optim.weight_decay"] = Fact(NONE, NONE)
    schedule = optim.schedule
    steps = stage.steps or 10 * (schedule.warmup_steps + schedule.cooldown_steps + 1)
    end = learning_rate(steps, steps, peak, schedule)
    shape = []
    for quarter in (0.25, 0.5, 0.75):
        step = schedule.warmup_steps + quarter * (steps - schedule.warmup_steps)
        shape.append(round(learning_rate(step, steps, peak, schedule) / peak, 2))
    cooled = f", the last {schedule.cooldown_steps:,} steps linearly to 0" if schedule.cooldown_steps else ""
    words = f"{schedule.decay}{cooled}, ends at {end:.2g}"
    facts["optim.schedule.decay"] = Fact([shape, f"{end:.2g}"], words)
    share = schedule.warmup_steps / steps
    facts["optim.schedule.warmup_steps"] = Fact(
        schedule.warmup_steps, f"{schedule.warmup_steps:,} steps, {share:.1%} of all"
    )
    # 6. The best of several values is chosen by a sweep.
    for name, choices in stage.choices.items():
        facts[name] = Fact(tuple(choices), f"the best of {', '.join(map(str, choices))}")
    return facts


def model_values(stage: Known) -> dict[str, Any]:
    """Return the fields of a stage's model that do something; of weights that are not here, what the recipe says."""
    model = stage.model
    values = dict(stage.config.model)
    values.pop("name", None)
    if model is not None:
        values = {"family": model.family, **asdict(model)}
    elif stage.config.new_head:
        values.setdefault("representation", None)
    if isinstance(model, ViTConfig):
        if model.position_std is None:
            # As models/initial.py draws them.
            values["position_std"] = 0.02 if model.class_slot and model.pool != "map" else model.width**-0.5
        unused = []
        if model.positions in ("none", "sincos2d"):
            unused += ["position_std", "class_slot", "positions_at"]
        elif model.prefix_tokens == 0:
            unused.append("class_slot")
        if model.stem is None:
            unused.append("stem_width")
        for name in unused:
            values.pop(name, None)
    values.pop("image_size", None)
    named = {}
    for name, value in values.items():
        named[f"model.{name}"] = list(value) if isinstance(value, tuple) else value
    return named


def fact_of_ops(ops: str | None, size: tuple[int, int] | None) -> Fact:
    """Return evaluation ops by what they do: the size of the images is called so, and `decode` does nothing."""
    if ops is None and size is None:
        return Fact(None, "")
    if ops is None and size is not None:
        ops = f"resize({size[0]})"
    meant: list[object] = []
    for op, arguments in parse_ops(str(ops)):
        if op.__name__ == "unchanged":
            continue
        numbers = []
        for argument in arguments:
            is_size = size is not None and argument in (size, size[0])
            numbers.append("size" if is_size else argument)
        meant.append((op.__name__, numbers))
    return Fact(meant, str(ops))
