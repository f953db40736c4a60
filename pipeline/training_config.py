"""The configuration of a trained stage (pretrain, finetune), the architecture that it names, the order of its samples.

In:  the section of a recipe, merged by `pipeline.config.build`; every `__post_init__` below refuses what cannot run
Out: a frozen TrainConfig; `trained_model`, `training_order` and `batch_arithmetic` say what follows from it

A batch falls on workers like this: batch_size 4096, micro_batch 64 and 16 workers make accumulation 4, and the worker
of rank 3 owns the slots 768 … 1023 of every global batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import models
from data.checks import at_least, check_name, more_than_0
from data.errors import ConfigError, DataError
from data.images.augment import AugmentConfig
from data.index.index import Index, exclude, join
from data.order import Mixture, Order
from data.order import shares as check_shares  # raises ValueError where a set would get none
from data.remote.cache import CacheConfig, remote_ahead
from models import ModelConfig
from models.configs import MaskedConfig
from pipeline.config import Tags, require, tags
from pipeline.evaluation.protocols import ProbeConfig, check_ops
from pipeline.extras.token_dropping import TokenDroppingConfig, check_token_dropping
from pipeline.optimization import Loss, OptimConfig
from pipeline.values import shown

if TYPE_CHECKING:
    from data.loader import TrainLoader

# Seeds are 64-bit numbers: the order of samples and torch's generators take no others.
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1
BYTES_FP32 = 4
BYTES_BF16 = 2
MOST_SAMPLES = 2**63 - 1  # that a stage can count


@dataclass(frozen=True)
class MixedConfig:
    """Names one of several sets to train on, and its weight among them."""

    train: str = "???"  # the set's index, or its folder; or "@stage/name"
    weight: float = "???"  # type: ignore[assignment]  # of every batch; only the ratios count

    RESUME: ClassVar[Tags] = tags(forbid="train weight")

    def __post_init__(self) -> None:
        more_than_0(self, "weight")


@dataclass(frozen=True)
class DataConfig:
    """Says which shards, in which order, through which processes. Paths may be "@stage/name": made by another stage."""

    train: str | None = None  # the set's index, or its folder; or "@stage/name"; or `mixture` instead
    mixture: dict[str, MixedConfig] = field(default_factory=dict)  # several sets by name, which share their labels
    drop: tuple[str, ...] = ()  # shards of these sets to do without: lost or corrupt ones, by name; steps stay
    samples: int | None = None  # how many `plan` counts with while an index is not there
    evaluate: str | None = None  # index or folder of the set that accuracy is measured on; or "@stage/name"
    preprocess: str | None = None  # evaluation ops (SPEC 2.5); None: resize(image_size), the few-shot squash
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # of training images
    lanes: int | None = None  # contiguous ranges read side by side; None: 64, or the batch (docs/design/order.md)
    shuffle_block: int | None = None  # positions shuffled together; None: 16384 (docs/design/order.md)
    tail: Literal["carry", "drop"] = "carry"  # samples that fill no batch go to the next epoch, or are left out
    max_labels: int = 1  # labels a sample has at most
    max_bad_fraction: float = 1e-3  # of bad samples among those seen, judged from the 10,000th on; past it, exit 65
    processes: int = 0  # decoding processes a worker; 0: the training process decodes
    decode: Literal["cpu", "gpu"] = "cpu"  # gpu: nvJPEG in the training process; other pixels than cpu's
    timeout_s: float = 120.0  # without a batch, or a piece of a shard; then the decoding process is replaced
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node

    RESUME: ClassVar[Tags] = tags(
        forbid="train mixture augment lanes shuffle_block tail max_labels decode",
        warn="drop evaluate preprocess max_bad_fraction",
        free="samples processes timeout_s cache",
    )

    def __post_init__(self) -> None:
        names_two_sources = bool(self.train and self.mixture)
        require(not names_two_sources, "give train or mixture, one of them; data.train=null leaves train out")
        for name in self.mixture:
            check_name(name, "a set of data.mixture", "rename it")
        at_least(self, 1, "max_labels lanes shuffle_block samples", "data.")
        at_least(self, 0, "processes", "data.")
        more_than_0(self, "timeout_s", "data.")
        check_ops(self.preprocess)
        needs_cpu = self.augment.crop == "random" or self.augment.randaug_layers > 0
        require(
            self.decode == "cpu" or not needs_cpu,
            "data.decode=gpu crops, resizes and flips; augment.crop=random and randaug_layers need data.decode=cpu",
        )
        require(0 <= self.max_bad_fraction <= 1, f"data.max_bad_fraction is {self.max_bad_fraction}, expected 0 to 1")

    def sets(self) -> dict[str, str]:
        """Return {name: path} of what is trained on, by name; a set that is no mixture's is called train."""
        if not self.mixture:
            return {"train": self.train or ""}
        return {name: part.train for name, part in sorted(self.mixture.items())}

    def weights(self) -> list[float]:
        """Return the weights of the sets, in their order."""
        return [part.weight for _name, part in sorted(self.mixture.items())] or [1.0]


@dataclass(frozen=True)
class HealthConfig:
    """Says what follows on a gradient norm that is not finite, or ten times the usual."""

    # bisect: the step is searched beside training, and the samples behind it weigh nothing from the next checkpoint on
    # (docs/replay.md); record: it is said, and kept in metrics.jsonl
    on_spike: Literal["record", "bisect"] = "record"


@dataclass(frozen=True)
class TrainConfig:
    """Describes one trained stage. The defaults are the paper's pretraining of ViT-B/16 on JFT-300M (table 3), but
    `optim.clip`.

    The objective "masked" (paper, B.1.2) trains a "Masked-…" model, whose `target`, `corrupted`, `masked` and
    `swapped` stand in `model`; labels are not read, and need not be there. A later stage fine-tunes the ViT inside.
    """

    data: DataConfig = field(default_factory=DataConfig)  # what is trained on, and how it is read
    model: dict[str, Any] = field(default_factory=dict)  # name, image_size, classes, …; or what differs from init's
    init: str | None = None  # weights to start from: a folder, or "@stage"; None: random
    # a branch: go on from this commit of the stage that `init` names, with its moments and the order of its samples;
    # all values are that stage's, but for the steps and the cool-down (docs/scaling.md); null: weights alone, step 0
    begin: int | None = None
    # "@figure/figure.json" of a figure with a fit: what it foretells is logged before the first step and compared after
    # the last; where its fit is of curves, two evaluations in a row that are worse than its interval end the stage
    law: str | None = None
    new_head: bool = False  # replace the head by one zero-initialised layer (paper, B.1.1) even where classes agree
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer and learning rate
    objective: Literal["classification", "masked"] = "classification"  # masked: predict masked patches (paper, B.1.2)
    loss: Loss = "sigmoid"  # cross-entropy of the objective classification
    label_smoothing: float = 0.0  # s: targets become t·(1 − s) + s/classes; 0 is off
    mixup: float = 0.0  # p of Beta(p, p), which the share of a blend of two images is drawn from; 0 is off
    # of what a step computes (fewer-flops.md)
    thinning: TokenDroppingConfig = field(default_factory=TokenDroppingConfig)
    polyak: float = 0.0  # factor of the averaged weights that the stage ends with (paper, B.1.1: 0.9999); 0 is off
    steps: int | None = None  # optimizer steps; or `passes` instead
    passes: float | None = None  # over the data, rounded to steps as big_vision does; or `steps` instead
    batch_size: int = 4096  # images a step, of all workers together
    micro_batch: int = 64  # images a worker takes at a time; accumulation is derived
    uneven: bool = False  # let workers own numbers of a batch's slots that differ by one
    exact_parts: int = 0  # 1, 2, 4 … up to so many workers have the same bits (docs/exact.md); 0: off
    precision: Literal["bf16", "fp32"] = "bf16"  # of weights and activations; the sums of gradients and optimizer: fp32
    zero: int = 2  # DeepSpeed ZeRO stage, 0 to 3: workers share 1 the optimizer's state, 2 gradients too, 3 weights too
    checkpoint_blocks: int = 0  # blocks that recompute their activations when going back; or `activation_gb` instead
    activation_gb: float | None = None  # recompute as few blocks as make a micro-batch's activations fit in this
    compile: bool = False  # torch.compile, block by block
    # path of a ds_config.json of yours; it may tune how data moves (overlap_comm, bucket sizes: docs/design/step.md),
    # nothing else
    deepspeed: str | None = None
    seed: int = 0  # of first weights, sample order, augmentation, mixup and dropout
    evaluate_every: int = 0  # steps between evaluations; 0: only at the end
    # in between: the workers that train, who stop for it; or a spare one beside them (docs/design/cluster.md); for it
    # every such step is a checkpoint, and counts for keep
    evaluate_on: Literal["training", "spare"] = "training"
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # few-shot probe during training, at every evaluation
    # metric, such as accuracy or 5shot: the weights of the evaluation with the highest are handed on, instead of the
    # last ones; for it every evaluated step is a checkpoint, and the best stays whatever keep says; null: the last
    keep_best: str | None = None
    patience: int = 0  # evaluations in a row without a better keep_best, after which the stage ends; 0: never
    log_every: int = 50  # steps between log lines
    save_every: int = 1000  # steps between checkpoints
    keep: int = 3  # newest checkpoints that stay, 2 or more
    keep_every: int = 0  # steps whose multiples are kept for good; 0: none
    health: HealthConfig = field(default_factory=HealthConfig)  # what follows on a spike
    max_skipped: int = 5  # non-finite steps in a row before exit 70
    max_failed_saves: int = 3  # checkpoints in a row that cannot be written before exit 74
    timeout_s: float = 1800.0  # after which a collective that not all workers have joined fails
    stall_s: float = 600.0  # without any worker entering a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(
        forbid="data model init begin law new_head optim objective loss label_smoothing mixup thinning polyak steps "
        "passes batch_size precision seed keep_best patience",
        warn="micro_batch uneven exact_parts zero checkpoint_blocks activation_gb compile deepspeed evaluate_every "
        "probe",
        free="evaluate_on log_every save_every keep keep_every health max_skipped max_failed_saves timeout_s stall_s",
    )
    LATER: ClassVar[tuple[str, ...]] = ("begin", "law", "thinning", "keep_best", "patience")

    @property
    def labels_read(self) -> int:
        """Return how many labels of a sample are read at most; 0: none are looked at, and none need be there."""
        return 0 if self.objective == "masked" else self.data.max_labels

    def __post_init__(self) -> None:
        require(self.zero in (0, 1, 2, 3), f"zero is {self.zero}, expected a ZeRO stage 0, 1, 2 or 3")
        # Measured: DeepSpeed takes an Adam step while it is built there, and the weights go another way from then on.
        is_phantom = self.zero == 0 and self.precision == "bf16"
        require(
            not is_phantom,
            "zero is 0 with precision bf16: DeepSpeed takes a phantom step there\n  use zero=1 or precision=fp32",
        )
        require(0 <= self.label_smoothing < 1, f"label_smoothing is {self.label_smoothing}, expected 0 to 1")
        require(0 <= self.polyak < 1, f"polyak is {self.polyak}, expected 0 (off) to less than 1, for example 0.9999")
        at_least(self, 1, "begin")
        require(self.begin is None or self.init is not None, "begin is a step of the stage that init names: give init")
        at_least(self, 0, "mixup evaluate_every keep_every checkpoint_blocks patience")
        require(
            self.patience == 0 or self.keep_best is not None,
            f"patience is {self.patience} and keep_best names no metric that it waits for\n"
            "  add keep_best=accuracy, or patience=0",
        )
        if self.keep_best is not None:
            require(
                self.evaluate_every > 0,
                f"keep_best is {self.keep_best} and evaluate_every 0: there is one evaluation alone, at the end\n"
                "  set evaluate_every, or keep_best=null",
            )
            require(
                self.evaluate_on == "training",
                f"keep_best is {self.keep_best} and evaluate_on {self.evaluate_on}: the stage would hand weights on "
                "before their evaluations are there\n  set evaluate_on=training, or keep_best=null",
            )
            require(
                self.polyak == 0,
                f"keep_best is {self.keep_best} and polyak {self.polyak}: evaluations amid the steps are of weights "
                "that are not averaged, and others would be handed on\n  set polyak=0, or keep_best=null",
            )
        more_than_0(self, "activation_gb timeout_s stall_s")
        is_contradiction = self.checkpoint_blocks > 0 and self.activation_gb is not None
        require(
            not is_contradiction,
            f"checkpoint_blocks is {self.checkpoint_blocks} and activation_gb {self.activation_gb}, which chooses that "
            "number itself\n  leave out one of them: checkpoint_blocks=0 or activation_gb=null",
        )
        require(MIN_SEED <= self.seed <= MAX_SEED, f"seed is {self.seed}, expected {MIN_SEED} to {MAX_SEED}")
        uses_labels = bool(self.mixup or self.label_smoothing or self.data.evaluate)
        require(
            self.objective != "masked" or not uses_labels,
            "objective masked has no labels: leave out mixup, label_smoothing and data.evaluate; "
            "probe.train and probe.test judge its features",
        )
        require((self.steps is None) != (self.passes is None), "give steps or passes, one of them")
        more_than_0(self, "steps passes")
        at_least(self, 1, "batch_size micro_batch log_every save_every max_skipped max_failed_saves")
        parts = self.exact_parts
        is_power_of_two = parts & (parts - 1) == 0  # 0 too
        require(parts >= 0 and is_power_of_two, f"exact_parts is {parts}, expected 0 (off), 1, 2, 4, 8, …")
        if parts > 0:
            # A part is made of whole micro-batches: a micro-batch has one gradient, which two parts cannot share.
            unit = parts * self.micro_batch
            require(
                self.batch_size % unit == 0 and not self.uneven,
                f"exact_parts {parts} needs a batch_size of equal parts of whole micro-batches; {self.batch_size} is "
                f"not a multiple of {parts} × micro_batch {self.micro_batch} = {unit}, or uneven is on",
            )
            require(
                not self.deepspeed,
                "exact_parts sums and steps without DeepSpeed, whose settings in your deepspeed file would do nothing\n"
                "  leave out one of them",
            )
        if self.data.mixture:
            # Every set must get at least one sample of a batch.
            check_shares(self.batch_size, [part.weight for part in self.data.mixture.values()])
        require(self.keep >= 2, f"keep is {self.keep}, expected 2 or more: one checkpoint alone can be bad")


def model_config(values: Mapping[str, Any], source: ModelConfig | None = None) -> ModelConfig:
    """Return the architecture that a `model:` section describes.

    A section without a name holds only what it changes of `source`, the model of the weights that it starts from.
    Raises ConfigError with what the models package found, and where a number is none.
    """
    options = dict(values)
    try:
        if "name" not in options and source is not None:
            model = models.from_dict({**models.to_dict(source), **options})
        else:
            # A masked model has no head, whatever number of classes the set has.
            if str(options.get("name")).startswith("Masked-"):
                options["classes"] = 0
            name = options.pop("name")
            require(isinstance(name, str), f"model.name is {shown(name)}, expected one such as S/16, B/16 or R50+B/16")
            image_size = options.pop("image_size")
            classes = options.pop("classes")
            model = models.config_of(name, image_size, classes, **options)
    except KeyError as error:
        raise ConfigError(
            f"model.{error.args[0]} is missing: a model without init needs name, image_size and classes\n"
            "  for example model={name: S/16, image_size: 224, classes: 10}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    # A `model:` section is not typed, and YAML reads `nan` as a text, so that nothing before this would notice.
    for part in fields(model):
        if isinstance(part.default, float):
            value = getattr(model, part.name)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            require(is_number, f"model.{part.name} is {value}, expected a finite number")
    return model


def trained_model(cfg: TrainConfig, source: ModelConfig | None = None) -> ModelConfig:
    """Return the architecture a stage trains; classification starts from the ViT inside a masked model.

    Raises ConfigError where it cannot have the stage's objective.
    """
    is_masked = cfg.objective == "masked"
    if isinstance(source, MaskedConfig) and not is_masked:
        # What predicts patches is no part of a classifier; the ViT inside goes on with its own config.
        source = source.vit
    if source is not None and cfg.new_head:
        source = source.with_new_head()
    model = model_config(cfg.model, source)
    require(
        (model.family == "masked") == is_masked,
        f"objective {cfg.objective} cannot train a model of family {model.family}\n"
        "  write objective: masked with model.name: Masked-B/16, or neither",
    )
    if source is not None:
        try:
            models.check_architecture(source, model)
        except ValueError as error:
            raise ConfigError(
                f"model: {error}\n  leave these keys, and the name, out of `model`: the weights of init have their own"
            ) from None
    return model


def check_model(cfg: TrainConfig, model: ModelConfig, classes: Mapping[str, int], key: str = "model") -> None:
    """Raise DataError where a set has labels that the head has no output for; training images are square.

    `classes` is the number of classes of every labelled set that is there, by its path; `key` is what a user types to
    reach the model's section.
    """
    height, width = model.image_size
    require(height == width, f"{key}.image_size is {height}×{width}, expected a square: training crops are")
    squash = cfg.data.augment.squash
    require(
        squash is None or squash >= height,
        f"data.augment.squash is {squash}, out of which {height} pixels are to be cropped\n  expected {height} or more",
    )
    check_token_dropping(cfg.thinning, model, cfg.objective, f"{key.removesuffix('model')}thinning")
    if cfg.objective == "masked":  # labels are not used
        return
    for path, number in classes.items():
        if number > model.classes:
            raise DataError(
                f"{path} has labels up to {number - 1}, the model has {model.classes} classes\n"
                f"  set {key}.classes={number}"
            )


def check_schedule(cfg: TrainConfig, steps: int, key: str) -> None:
    """Raise ConfigError where the learning rate rises and cools down for longer than the stage's steps.

    It would never reach its peak, and what was trained would be worth little. So is a length that is beyond counting
    refused. `key` is the stage's name.
    """
    most_steps = MOST_SAMPLES // cfg.batch_size
    require(
        steps <= most_steps,
        f"{key}: {steps:,} steps of {cfg.batch_size:,} images are more than can be counted\n"
        f"  expected {most_steps:,} steps at most\n  type {key}.steps=…, or {key}.passes=…",
    )
    schedule = cfg.optim.schedule
    rising_and_cooling = schedule.warmup_steps + schedule.cooldown_steps
    if rising_and_cooling <= steps:
        return
    message = f"{key}: {schedule.warmup_steps:,} warm-up steps"
    if schedule.cooldown_steps:
        message += f" and {schedule.cooldown_steps:,} of cool-down"
    overrides = f"{key}.optim.schedule.warmup_steps={steps // 10}"
    if schedule.cooldown_steps > steps // 2:
        overrides += f" {key}.optim.schedule.cooldown_steps={steps // 10}"
    raise ConfigError(
        f"{message} are more than the stage has steps: {steps:,}\n"
        f"  expected: at most {steps:,} together, so that the learning rate reaches optim.lr\n"
        f"  type {overrides}, or let it train for longer"
    )


def training_order(cfg: TrainConfig, sets: Sequence[Index]) -> tuple[Index, Order | Mixture]:
    """Return the set that is trained on and the order of its samples.

    It is the sets of `cfg.data.sets()` joined to one, where the shards of `cfg.data.drop` are empty.
    """
    # Before anything else: a dropped shard counts as empty, and the numbers of the others stay as they were.
    sets = exclude(sets, cfg.data.drop)
    options: dict[str, Any] = {"seed": cfg.seed, "batch_size": cfg.batch_size, "tail": cfg.data.tail}
    # What the recipe leaves open has its default in data.Order, which depends on the batch size.
    if cfg.data.lanes is not None:
        options["lanes"] = cfg.data.lanes
    if cfg.data.shuffle_block is not None:
        options["shuffle_block"] = cfg.data.shuffle_block
    if not cfg.data.mixture:
        return sets[0], Order(sets[0].shard_samples, **options)
    weights = cfg.data.weights()
    shard_counts = [len(index.shards) for index in sets]
    joined = join(sets, weights)
    return joined, Mixture(joined.shard_samples, groups=shard_counts, weights=weights, **options)


def training_loader(
    cfg: TrainConfig,
    index: Index,
    order: Order | Mixture,
    *,
    image_size: int,
    slots: range,
    start_step: int,
    micro_batch: int,
    accumulation: int | None = None,
    processes: int = 0,
) -> "TrainLoader":
    """Return the loader of these slots of every global batch from a step on, counted from 0, as the config says."""
    from data.loader import TrainLoader  # not above: a recipe is checked without torch

    return TrainLoader(
        index,
        order,
        image_size=image_size,
        slots=slots,
        micro_batch=micro_batch,
        accumulation=accumulation,
        start_step=start_step,
        seed=cfg.seed,
        augment=cfg.data.augment,
        max_labels=cfg.labels_read,
        processes=processes,
        timeout_s=cfg.data.timeout_s,
        cache=cfg.data.cache,
        decode=cfg.data.decode,
    )


def cache_line(index: Index, order: Order | Mixture, slots: range, step: int, cfg: DataConfig) -> str:
    """Say whether the shards that these slots read ahead fit a node's cache, and what to type where they do not."""
    count, size = remote_ahead(index, order, slots, step, cfg.cache)
    last_step = step + cfg.cache.ahead
    limit = cfg.cache.limit_bytes
    line = (
        f"{count} shards, {size / 2**30:.3g} GiB, for steps {step} … {last_step}; "
        f"the cache keeps {limit / 2**30:.3g} GiB"
    )
    if count:
        line += "; until a shard is there, its samples are read by range"
    if size <= limit:
        return line
    return (
        f"{line}: THEY DO NOT FIT and are fetched again and again; "
        f"type data.cache.limit_bytes={size} or more, or a smaller data.cache.ahead"
    )


# ------------------------------------------------------------------------ batches, steps and bytes


@dataclass(frozen=True)
class Arithmetic:
    """Says how a global batch falls on the workers."""

    batch_size: int
    micro_batch: int
    world: int
    accumulation: int

    def slots(self, rank: int) -> range:
        """Return the contiguous slots of the global batch that a worker owns."""
        # Rounded down at both ends: shares differ by one at most, and every slot has exactly one owner.
        first = rank * self.batch_size // self.world
        stop = (rank + 1) * self.batch_size // self.world
        return range(first, stop)


def batch_arithmetic(cfg: TrainConfig, world: int) -> Arithmetic:
    """Derive the accumulation from batch_size, micro_batch and the world.

    Raises ConfigError with the nearest sizes that fit where they do not divide, unless `uneven` allows it.
    """
    require(
        cfg.batch_size >= world,
        f"batch_size {cfg.batch_size} is less than {world} workers: some would have no sample\n"
        f"  use cluster.workers={cfg.batch_size} or fewer",
    )
    unit = cfg.micro_batch * world
    if cfg.batch_size % unit != 0 and not cfg.uneven:
        # The message names sizes that work, so that a user need not find them by trial.
        below = cfg.batch_size // unit * unit
        above = below + unit
        # The nearest batch may be thousands of times as large as the one that was asked for: then the mistake is in
        # the micro-batch, and `uneven` would only hide it.
        if below == 0:
            share = cfg.batch_size // world
            remedy = f"set micro_batch={share}"
            if cfg.batch_size % world != 0:
                remedy += f" and batch_size={share * world}"
            raise ConfigError(
                f"micro_batch {cfg.micro_batch} × {world} workers = {unit} is more than batch_size {cfg.batch_size}\n"
                f"  expected a micro_batch of a worker's share of the batch, {share}, or less\n"
                f"  {remedy}, or batch_size={above} if that is meant"
            )
        sizes = f"{below} or {above}"
        raise ConfigError(
            f"batch_size {cfg.batch_size} is not a multiple of micro_batch {cfg.micro_batch} × {world} workers = "
            f"{unit}; nearest: {sizes}\n"
            "  set batch_size or micro_batch to fit, or uneven=true to let workers differ by one sample"
        )
    require(
        not cfg.exact_parts or cfg.exact_parts % world == 0,
        f"exact_parts {cfg.exact_parts} cannot be shared by {world} workers; use 1, 2, 4, … up to {cfg.exact_parts}",
    )
    # All workers take equally many micro-batches, since their collectives must pair up: the largest share counts.
    largest_share = math.ceil(cfg.batch_size / world)
    accumulation = math.ceil(largest_share / cfg.micro_batch)
    return Arithmetic(cfg.batch_size, cfg.micro_batch, world, accumulation)


def steps_of(cfg: TrainConfig, samples: int) -> int:
    """Return the optimizer steps of the stage: passes · samples / batch, rounded, as big_vision utils.steps does.

    `samples` holds those of dropped shards too, so that a stage which drops a shard keeps its number of steps.
    """
    if cfg.steps is not None:
        return cfg.steps
    assert cfg.passes is not None
    return max(1, round(cfg.passes * samples / cfg.batch_size))
