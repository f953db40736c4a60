"""The configuration of a trained stage (pretrain, finetune) and the arithmetic that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import data
import models
from data import AugmentConfig, CacheConfig
from models.cost import block_activation_bytes
from pipeline.config import Tags, require, tags
from pipeline.errors import ConfigError
from pipeline.evaluate import ProbeConfig, check_ops
from pipeline.optimizer import STATE, OptimConfig


@dataclass(frozen=True)
class MixedConfig:
    """One of several sets to train on, and its weight among them."""

    train: str = "???"  # as `DataConfig.train`
    weight: float = "???"  # type: ignore[assignment]  # of every batch; only the ratios count

    RESUME: ClassVar[Tags] = tags(forbid="train weight")

    def __post_init__(self) -> None:
        require(0 < self.weight < float("inf"), f"weight is {self.weight}, expected more than 0")


@dataclass(frozen=True)
class DataConfig:
    """Which shards, in which order, through which processes. Paths may be "@stage/name": made by another stage."""

    train: str | None = None  # the set's index, or its folder; or
    mixture: dict[str, MixedConfig] = field(default_factory=dict)  # several sets by name, which share their labels
    drop: tuple[str, ...] = ()  # shards of these sets to do without: lost or corrupt ones, by name; steps stay
    samples: int | None = None  # what `plan` counts with while an index is not there
    evaluate: str | None = None
    preprocess: str | None = None  # evaluation ops (SPEC 2.5); None: resize(image_size), the few-shot squash
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    lanes: int | None = None  # contiguous ranges read side by side; None: 64, or as many as the batch
    shuffle_block: int | None = None  # positions shuffled together; None: the default of data.Order
    tail: Literal["carry", "drop"] = "carry"
    max_labels: int = 1  # labels a sample has at most
    max_bad_fraction: float = 1e-3  # of the samples seen, judged from the 10,000th on; past it, exit 65
    processes: int = 0  # decoding processes a worker
    decode: Literal["cpu", "gpu"] = "cpu"  # gpu: nvJPEG in the training process; other pixels than cpu's
    timeout_s: float = 120.0  # without a batch, or a piece of a shard
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node

    RESUME: ClassVar[Tags] = tags(
        forbid="train mixture augment lanes shuffle_block tail max_labels decode",
        warn="drop evaluate preprocess max_bad_fraction",
        free="samples processes timeout_s cache",
    )

    def __post_init__(self) -> None:
        require(
            not (self.train and self.mixture), "give train or mixture, one of them; data.train=null leaves train out"
        )
        require(self.max_labels >= 1, f"max_labels is {self.max_labels}, expected 1 or more")
        for name in ("lanes", "shuffle_block", "samples"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}, expected 1 or more")
        require(self.timeout_s > 0, f"timeout_s is {self.timeout_s}, expected more than 0")
        check_ops(self.preprocess)
        require(self.processes >= 0, f"processes is {self.processes}, expected 0 or more")
        require(
            self.decode == "cpu" or (self.augment.crop != "random" and not self.augment.randaug_layers),
            "data.decode=gpu crops, resizes and flips; augment.crop=random and randaug_layers need data.decode=cpu",
        )
        require(0 <= self.max_bad_fraction <= 1, f"max_bad_fraction is {self.max_bad_fraction}, expected 0 to 1")

    def sets(self) -> dict[str, tuple[str, float]]:
        """{name: (path, weight)} of what is trained on, by name; a set that is no mixture's is called train."""
        found = {name: (part.train, part.weight) for name, part in sorted(self.mixture.items())}
        return found or {"train": (self.train or "", 1.0)}


@dataclass(frozen=True)
class TrainConfig:
    """One trained stage. The defaults are the paper's pretraining of ViT-B/16 on JFT-300M (table 3).

    The objective "masked" (paper, B.1.2) trains a "Masked-…" model, whose `target`, `corrupted`, `masked` and
    `swapped` stand in `model`; labels are read and not used. A later stage fine-tunes the ViT inside.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=dict)  # name, image_size, classes, …; or what differs from init's
    init: str | None = None  # weights to start from: a folder, or "@stage"; None: random
    new_head: bool = False  # replace the head by a zero-initialised one (paper, B.1.1) even where classes agree
    optim: OptimConfig = field(default_factory=OptimConfig)
    objective: Literal["classification", "masked"] = "classification"
    loss: Literal["sigmoid", "softmax"] = "sigmoid"  # of classification
    label_smoothing: float = 0.0
    mixup: float = 0.0  # Beta(p, p); 0 is off
    polyak: float = 0.0  # factor of the averaged weights that the stage ends with (paper, B.1.1: 0.9999); 0 is off
    steps: int | None = None  # optimizer steps; or
    passes: float | None = None  # over the data, rounded to steps as big_vision does
    batch_size: int = 4096  # global
    micro_batch: int = 64  # per worker; accumulation is derived
    uneven: bool = False  # let workers own numbers of slots that differ by one
    exact_parts: int = 0  # 1, 2, 4 … up to so many workers have the same bits (docs/elastic.md); 0: off
    precision: Literal["bf16", "fp32"] = "bf16"
    zero: int = 2  # DeepSpeed ZeRO stage
    checkpoint_blocks: int = 0  # blocks that recompute their activations; or
    activation_gb: float | None = None  # as many as make a micro-batch's activations fit in this (GiB)
    compile: bool = False  # torch.compile, block by block
    deepspeed: str | None = None  # your own ds_config.json, merged in
    seed: int = 0
    evaluate_every: int = 0  # steps; 0: only at the end
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # few-shot on the fly
    log_every: int = 50
    save_every: int = 1000
    keep: int = 3  # newest checkpoints
    keep_every: int = 0  # steps whose multiples are kept for good; 0: none
    max_skipped: int = 5  # non-finite steps in a row before exit 70
    max_failed_saves: int = 3  # in a row before exit 74
    timeout_s: float = 1800.0  # collectives
    stall_s: float = 600.0  # in which no worker enters a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(
        forbid="data model init new_head optim objective loss label_smoothing mixup polyak steps passes batch_size "
        "precision seed",
        warn="micro_batch uneven exact_parts zero checkpoint_blocks activation_gb compile deepspeed evaluate_every "
        "probe",
        free="log_every save_every keep keep_every max_skipped max_failed_saves timeout_s stall_s",
    )

    def __post_init__(self) -> None:
        require(self.zero in (0, 1, 2, 3), f"zero is {self.zero}, expected a ZeRO stage 0, 1, 2 or 3")
        require(
            not (self.zero == 0 and self.precision == "bf16"),
            "zero is 0 with precision bf16: DeepSpeed takes a phantom step there\n  use zero=1 or precision=fp32",
        )
        require(0 <= self.label_smoothing < 1, f"label_smoothing is {self.label_smoothing}, expected 0 to 1")
        require(0 <= self.polyak < 1, f"polyak is {self.polyak}, expected 0 (off) to less than 1, for example 0.9999")
        require(self.mixup >= 0, f"mixup is {self.mixup}, expected 0 (off) or more")
        masked = self.objective == "masked"
        require(
            not (masked and (self.mixup or self.label_smoothing or self.data.evaluate)),
            "objective masked has no labels: leave out mixup, label_smoothing and data.evaluate; "
            "probe.train and probe.test judge its features",
        )
        require((self.steps is None) != (self.passes is None), "give steps or passes, one of them")
        require((self.steps or self.passes or 0) > 0, "steps and passes must be more than 0")
        for name in (
            "batch_size",
            "micro_batch",
            "log_every",
            "save_every",
            "max_skipped",
            "max_failed_saves",
        ):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, expected 1 or more")
        for name in ("evaluate_every", "keep_every", "checkpoint_blocks"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}, expected 0 (off) or more")
        self._check_parts()
        if self.data.mixture:
            data.shares(self.batch_size, [part.weight for part in self.data.mixture.values()])
        require(self.keep >= 2, f"keep is {self.keep}, expected 2 or more: one checkpoint alone can be bad")

    def _check_parts(self) -> None:
        parts, unit = self.exact_parts, self.exact_parts * self.micro_batch
        require(parts >= 0 and parts & (parts - 1) == 0, f"exact_parts is {parts}, expected 0 (off), 1, 2, 4, 8, …")
        require(
            not (parts and (self.batch_size % unit or self.uneven)),
            f"exact_parts {parts} needs a batch_size of equal parts of whole micro-batches; {self.batch_size} is not a "
            f"multiple of {parts} × micro_batch {self.micro_batch} = {unit}, or uneven is on",
        )
        require(
            not (parts and self.deepspeed),
            "exact_parts sums and steps without DeepSpeed, whose settings in your deepspeed file would do nothing\n"
            "  leave out one of them",
        )


def model_config(values: Mapping[str, Any], source: Any = None) -> Any:
    """The architecture of a `model:` section: named, or what it changes of `source`, the weights it starts from.

    Raises ConfigError with what the models room found.
    """
    plain = dict(values)
    try:
        if "name" not in plain and source is not None:
            return models.from_dict({**models.to_dict(source), **plain})
        if str(plain.get("name")).startswith("Masked-"):
            plain["classes"] = 0
        return models.config_of(plain.pop("name"), plain.pop("image_size"), plain.pop("classes"), **plain)
    except KeyError as error:
        raise ConfigError(f"model.{error.args[0]} is missing; a model needs name, image_size and classes") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from None


def trained_model(cfg: TrainConfig, source: Any = None) -> Any:
    """The architecture a stage trains; classification starts from the ViT inside a masked model.

    Raises ConfigError where it cannot have the stage's objective.
    """
    masked = cfg.objective == "masked"
    if source is not None and source.family == "masked" and not masked:
        source = source.vit
    found = model_config(cfg.model, source)
    require(
        (found.family == "masked") == masked,
        f"objective {cfg.objective} cannot train a model of family {found.family}\n"
        "  write objective: masked with model.name: Masked-B/16, or neither",
    )
    return found


def training_order(cfg: TrainConfig, sets: Sequence[data.Index]) -> tuple[data.Index, data.Order | data.Mixture]:
    """The set that is trained on, `cfg.data.sets()` as one without `cfg.data.drop`, and the order of its samples."""
    sets = data.without(sets, cfg.data.drop)
    given = {"lanes": cfg.data.lanes, "shuffle_block": cfg.data.shuffle_block, "tail": cfg.data.tail}
    options: dict[str, Any] = {"seed": cfg.seed, "batch_size": cfg.batch_size}
    options |= {name: value for name, value in given.items() if value is not None}
    if not cfg.data.mixture:
        return sets[0], data.Order(sets[0].shard_samples, **options)
    weights, groups = [weight for _, weight in cfg.data.sets().values()], [len(one.shards) for one in sets]
    index = data.join(sets, weights)
    return index, data.Mixture(index.shard_samples, groups=groups, weights=weights, **options)


def cache_line(index: data.Index, order: data.Order | data.Mixture, slots: range, step: int, cfg: DataConfig) -> str:
    """Whether the shards that these slots read ahead fit the cache of a node, and what to type where they do not."""
    count, size = data.wanted(index, order, slots, step, cfg.cache)
    last, limit = step + cfg.cache.ahead, cfg.cache.limit_bytes
    line = f"{count} shards, {size / 2**30:.3g} GiB, for steps {step} … {last}; the cache keeps {limit / 2**30:.3g} GiB"
    if size <= limit:
        return line
    return (
        f"{line}: THEY DO NOT FIT and are fetched again and again; "
        f"type data.cache.limit_bytes={size} or more, or a smaller data.cache.ahead"
    )


@dataclass(frozen=True)
class Arithmetic:
    """How a global batch falls on the workers."""

    batch_size: int
    micro_batch: int
    world: int
    accumulation: int

    def slots(self, rank: int) -> range:
        """The contiguous slots of the global batch that a worker owns."""
        return range(rank * self.batch_size // self.world, (rank + 1) * self.batch_size // self.world)


def batch_arithmetic(cfg: TrainConfig, world: int) -> Arithmetic:
    """Accumulation from batch_size, micro_batch and the world.

    Raises ConfigError with the nearest sizes that fit where they do not divide, unless `uneven` allows it.
    """
    unit = cfg.micro_batch * world
    require(
        cfg.batch_size >= world,
        f"batch_size {cfg.batch_size} is less than {world} workers: some would have no sample\n"
        f"  use cluster.workers={cfg.batch_size} or fewer",
    )
    if cfg.batch_size % unit and not cfg.uneven:
        below, above = cfg.batch_size // unit * unit, -(-cfg.batch_size // unit) * unit
        sizes = " or ".join(str(size) for size in (below, above) if size)
        raise ConfigError(
            f"batch_size {cfg.batch_size} is not a multiple of micro_batch {cfg.micro_batch} × {world} workers = "
            f"{unit}; nearest: {sizes}\n"
            "  set batch_size or micro_batch to fit, or uneven=true to let workers differ by one sample"
        )
    require(
        not cfg.exact_parts or cfg.exact_parts % world == 0,
        f"exact_parts {cfg.exact_parts} cannot be shared by {world} workers; use 1, 2, 4, … up to {cfg.exact_parts}",
    )
    share = -(-cfg.batch_size // world)
    return Arithmetic(cfg.batch_size, cfg.micro_batch, world, -(-share // cfg.micro_batch))


def steps_of(cfg: TrainConfig, samples: int) -> int:
    """Optimizer steps of the stage (big_vision utils.steps: passes · samples / batch, rounded); `data.drop` counts."""
    if cfg.steps is not None:
        return cfg.steps
    assert cfg.passes is not None
    return max(1, round(cfg.passes * samples / cfg.batch_size))


def recomputed_blocks(cfg: TrainConfig, model: Any) -> int:
    """`checkpoint_blocks`, or the fewest that fit `activation_gb`. Raises ConfigError where none does."""
    if cfg.activation_gb is None:
        return cfg.checkpoint_blocks
    numbers = 2 if cfg.precision == "bf16" else 4
    try:
        return models.checkpoint_blocks_for(model, cfg.micro_batch, int(cfg.activation_gb * 2**30), numbers)
    except ValueError as error:
        raise ConfigError(f"activation_gb: {error}") from None


def exact_gradient_bytes(cfg: TrainConfig, world: int) -> float:
    """Bytes a parameter that `exact_parts` holds at most: a micro-batch's gradient, its part's and, in fp32, one for
    each level of the worker's subtree, and the optimizer's share."""
    levels = (cfg.exact_parts // world).bit_length() - 1
    return (2 if cfg.precision == "bf16" else 4) + 4 * (1 + levels) + 4 / world


def memory_estimate(cfg: TrainConfig, model: Any, world: int) -> tuple[int, int]:
    """Bytes a worker needs for (weights, gradients and optimizer state, activations of a micro-batch).

    ZeRO 1 splits masters and moments over the workers, 2 also gradients, 3 also weights (Rajbhandari et al. 2020,
    figure 1). Activations are `models.cost`'s count; buffers of libraries and allocators come on top.
    """
    numbers = 2 if cfg.precision == "bf16" else 4
    masters = 4 if cfg.zero else 0  # at stage 0 the weights are the masters
    state = masters + 4 * (len(STATE[cfg.optim.name]) + bool(cfg.polyak))
    gradients = exact_gradient_bytes(cfg, world) if cfg.exact_parts else 4
    shares = (numbers, gradients, state)  # weights, gradients, masters and moments: bytes a parameter
    split = (cfg.zero >= 3, cfg.zero >= 2 and not cfg.exact_parts, cfg.zero >= 1)
    bytes_each = sum(size / (world if parted else 1) for size, parted in zip(shares, split, strict=True))
    states = round(models.parameters_of(model) * bytes_each)
    if not hasattr(model, "depth"):
        return states, 0
    whole, recomputed = block_activation_bytes(model, numbers)
    blocks = min(recomputed_blocks(cfg, model), model.depth)
    kept = (model.depth - blocks) * whole + blocks * recomputed + (whole if blocks else 0)
    return states, cfg.micro_batch * kept
