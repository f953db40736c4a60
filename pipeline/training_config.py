"""The configuration of a trained stage (pretrain, finetune).

In:  a section of a recipe, merged by `pipeline.config.build`; each `__post_init__` below rejects what cannot run
Out: a frozen TrainConfig

An extra adds its own keys in a subclass (pipeline/hooks.py). The config of a stage is composed of all these classes,
and its keys stay flat. The core learns about an extra's keys only through the methods at the end of TrainConfig.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import models
from data.checks import at_least, check_name, more_than_0
from data.errors import ConfigError
from data.images.augment import AugmentConfig
from data.images.preprocess import shape_of
from data.order import shares as check_shares  # raises ValueError if a set would get no samples
from data.remote.config import CacheConfig
from models import ModelConfig
from pipeline.config import Tags, require, tags
from pipeline.optimization import Loss, OptimConfig
from pipeline.values import shown

if TYPE_CHECKING:
    from torch import Tensor

L2 = 2.0**10  # penalty of the ridge regression (big_vision configs/common_fewshot.py): fixed, never tuned
# Seeds are 64-bit numbers: the sample order and torch's generators accept no others.
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class MixedConfig:
    """A data set in a mixture, and its weight."""

    train: str = "???"  # index or folder of the set; or "@stage/name"
    weight: float = "???"  # type: ignore[assignment]  # share of every batch, relative to the other weights

    RESUME: ClassVar[Tags] = tags(forbid="train weight")

    def __post_init__(self) -> None:
        more_than_0(self, "weight")


@dataclass(frozen=True)
class DataConfig:
    """The data of a stage, and how it is read. A path can be "@stage/name", the output of another stage."""

    train: str | None = None  # index or folder of the set; "@stage/name"; a URL of its tars; or use `mixture`
    mixture: dict[str, MixedConfig] = field(default_factory=dict)  # several sets with the same classes, by name
    drop: tuple[str, ...] = ()  # names of lost or corrupt shards to exclude; the number of steps stays the same
    samples: int | None = None  # number of samples that `plan` assumes while an index does not exist yet
    evaluate: str | None = None  # index or folder of the set on which accuracy is measured; or "@stage/name"
    preprocess: str | None = None  # evaluation ops (SPEC 2.5); None: resize(image_size), the few-shot squash
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # augmentation of training images
    lanes: int | None = None  # contiguous ranges read in parallel; None: 64, or the batch (docs/design/order.md)
    shuffle_block: int | None = None  # positions shuffled together; None: 16384 (docs/design/order.md)
    tail: Literal["carry", "drop"] = "carry"  # samples after the last full batch: carry into the next epoch, or drop
    max_labels: int = 1  # maximum number of labels per sample
    max_bad_fraction: float = 1e-3  # bad samples per seen sample (of at least 10,000) that end the run (exit 65)
    processes: int = 0  # decoding processes per worker; 0: decode in the training process
    decode: Literal["cpu", "gpu"] = "cpu"  # gpu: nvJPEG in the training process, whose pixels differ from cpu's
    timeout_s: float = 120.0  # replace a decoding process that delivers nothing for this long
    cache: CacheConfig = field(default_factory=CacheConfig)  # cache for remote shards on every node

    RESUME: ClassVar[Tags] = tags(
        forbid="train mixture augment lanes shuffle_block tail max_labels decode",
        warn="drop evaluate preprocess max_bad_fraction",
        free="samples processes timeout_s cache",
    )

    def __post_init__(self) -> None:
        names_two_sources = bool(self.train and self.mixture)
        require(
            not names_two_sources,
            "both data.train and data.mixture are set, expected one of them; to use data.mixture, set data.train=null",
        )
        for name in self.mixture:
            check_name(name, "a set of data.mixture", "rename it")
        at_least(self, 1, "max_labels lanes shuffle_block samples", "data.")
        at_least(self, 0, "processes", "data.")
        more_than_0(self, "timeout_s", "data.")
        check_ops(self.preprocess)
        needs_cpu = self.augment.crop == "random" or self.augment.randaug_layers > 0
        require(
            self.decode == "cpu" or not needs_cpu,
            "data.decode=gpu does not support augment.crop=random or augment.randaug_layers\n  set data.decode=cpu",
        )
        require(0 <= self.max_bad_fraction <= 1, f"data.max_bad_fraction is {self.max_bad_fraction}, expected 0 to 1")

    def sets(self) -> dict[str, str]:
        """Return the training sets as {name: path}, sorted by name; without a mixture the name is "train"."""
        if not self.mixture:
            return {"train": self.train or ""}
        return {name: part.train for name, part in sorted(self.mixture.items())}

    def weights(self) -> list[float]:
        """Return the weights of the training sets, in the order of `sets`."""
        return [part.weight for _name, part in sorted(self.mixture.items())] or [1.0]


@dataclass(frozen=True)
class ProbeConfig:
    """The few-shot probe; if training and test sets are given, it also runs during training, as in the paper."""

    train: str | None = None  # index of the set from which shots are picked; or "@stage/name"
    test: str | None = None  # index of the set on which the fitted classifier is evaluated; or "@stage/name"
    shots: tuple[int, ...] = (1, 5, 10, 25)  # training images per class (big_vision configs/common_fewshot.py)
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds for picking the shots; the mean over them is reported too
    l2: float = L2  # weight of the ridge regression's penalty (big_vision configs/common_fewshot.py)

    def __post_init__(self) -> None:
        require(
            (self.train is None) == (self.test is None),
            "only one of probe.train and probe.test is set, expected both or neither",
        )
        fewest = min(self.shots, default=0)
        require(fewest > 0, f"probe.shots is {self.shots}, expected one or more numbers ≥ 1")
        require(len(self.seeds) > 0, "probe.seeds is empty, expected at least one seed")
        require(min(self.seeds) >= 0, f"probe.seeds is {self.seeds}, expected seeds ≥ 0")
        require(len(set(self.seeds)) == len(self.seeds), f"probe.seeds is {self.seeds}, expected no duplicates")
        at_least(self, 0, "l2", "probe.")


@dataclass(frozen=True)
class SavingConfig:
    """When a stage saves checkpoints, and how many it keeps."""

    save_every: int = 1000  # steps between checkpoints
    keep: int = 3  # number of newest checkpoints to keep, 2 or more
    keep_every: int = 0  # never delete checkpoints of steps that are multiples of this; 0: off
    max_failed_saves: int = 3  # consecutive failed saves before the run ends with exit 74

    RESUME: ClassVar[Tags] = tags(free="save_every keep keep_every max_failed_saves")

    def __post_init__(self) -> None:
        at_least(self, 0, "keep_every")
        at_least(self, 1, "save_every max_failed_saves")
        require(self.keep >= 2, f"keep is {self.keep}, expected 2 or more, in case one checkpoint is damaged")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine computes a step."""

    exact_parts: int = 0  # 1, 2, 4 …: same bits with any number of workers up to this (docs/exact.md); 0: off
    precision: Literal["bf16", "fp32"] = "bf16"  # of weights and activations; gradient sums and optimizer are fp32
    zero: int = 2  # DeepSpeed ZeRO stage: workers shard optimizer state (1), also gradients (2), also weights (3)
    checkpoint_blocks: int = 0  # number of blocks that recompute their activations in the backward pass
    compile: bool = False  # compile each block with torch.compile
    # path of your own ds_config.json; it may only tune data movement (overlap_comm, bucket sizes:
    # docs/design/step.md)
    deepspeed: str | None = None

    RESUME: ClassVar[Tags] = tags(forbid="precision", warn="exact_parts zero checkpoint_blocks compile deepspeed")

    def __post_init__(self) -> None:
        at_least(self, 0, "checkpoint_blocks")
        require(self.zero in (0, 1, 2, 3), f"zero is {self.zero}, expected ZeRO stage 0, 1, 2 or 3")
        # Measured: with this setup DeepSpeed takes an Adam step during initialisation, which changes the weights.
        is_phantom = self.zero == 0 and self.precision == "bf16"
        require(
            not is_phantom,
            "zero is 0 with precision bf16: DeepSpeed would take an extra optimizer step at start-up\n"
            "  use zero=1 or precision=fp32",
        )
        parts = self.exact_parts
        is_power_of_two = parts & (parts - 1) == 0  # true for 0, too
        require(parts >= 0 and is_power_of_two, f"exact_parts is {parts}, expected 0 (off), 1, 2, 4, 8, …")
        require(
            not (parts and self.deepspeed),
            "exact_parts is set, which trains without DeepSpeed, so the file in `deepspeed` would have no effect\n"
            "  remove exact_parts or deepspeed",
        )


@dataclass(frozen=True)
class Phase:
    """A range of steps, counted from 0, with the same image size and the same number of kept patches.

    Without extras, a stage is a single phase of full images (`TrainConfig.phases`). Phases are pure functions of the
    step, so a resumed run repeats them at any world size.
    """

    steps: range
    image_size: int  # side in pixels
    patches: int = 0  # of an image; 0: not counted
    kept: int | None = None  # patches of an image that the model sees; None: all
    # (step, ids (b, 3): epoch, shard, sample) → (b, kept), which patches; None: all
    draw_patches: "Callable[[int, Tensor], Tensor] | None" = None


@dataclass(frozen=True)
class TrainConfig(SavingConfig, EngineConfig):
    """The config of a trained stage; its defaults are those of the paper's ViT-B/16 (table 3), except for `optim.clip`.

    The paper uses these values for pretraining on JFT-300M.

    The objective "masked" (paper, B.1.2) trains a "Masked-…" model; `target`, `corrupted`, `masked` and `swapped` are
    keys of `model`. Labels are not read and may be missing. A later stage can fine-tune the ViT inside this model.
    """

    data: DataConfig = field(default_factory=DataConfig)  # training and evaluation data, and how it is read
    model: dict[str, Any] = field(default_factory=dict)  # name, image_size, classes, …; or only changes to init's model
    init: str | None = None  # weights to start from: a folder, or "@stage"; None: random
    new_head: bool = False  # replace the head by a zero-initialised layer (paper, B.1.1) even if the classes agree
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer and learning rate
    objective: Literal["classification", "masked"] = "classification"  # masked: predict masked patches (paper, B.1.2)
    loss: Loss = "sigmoid"  # cross-entropy of the objective classification
    label_smoothing: float = 0.0  # s: targets become t·(1 − s) + s/classes; 0 is off
    mixup: float = 0.0  # p: two images of a micro-batch are blended, with a share drawn from Beta(p, p); 0 is off
    polyak: float = 0.0  # decay of the averaged weights, which the stage exports (paper, B.1.1: 0.9999); 0 is off
    steps: int | None = None  # optimizer steps; or use `passes`
    passes: float | None = None  # passes over the data, rounded to steps as in big_vision; or use `steps`
    batch_size: int = 4096  # images per step, of all workers together
    micro_batch: int = 64  # images per worker and forward pass; accumulation is derived
    uneven: bool = False  # allow the workers' shares of a batch to differ by one sample
    seed: int = 0  # seed of initial weights, sample order, augmentation, mixup and dropout
    evaluate_every: int = 0  # steps between evaluations; 0: only at the end
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # few-shot probe during training, at every evaluation
    log_every: int = 50  # steps between log lines
    max_skipped: int = 5  # consecutive non-finite steps before a rollback; exit 70 if that does not help
    timeout_s: float = 1800.0  # longest wait in a collective for workers that have not joined it
    stall_s: float = 600.0  # restart the attempt if no worker enters a new phase for this long

    RESUME: ClassVar[Tags] = tags(
        forbid="data model init new_head optim objective loss label_smoothing mixup polyak steps passes batch_size "
        "seed",
        warn="micro_batch uneven evaluate_every probe",
        free="log_every max_skipped timeout_s stall_s",
    )

    @property
    def labels_read(self) -> int:
        """Return the maximum number of labels read per sample; 0 if labels are not read and may be missing."""
        return 0 if self.objective == "masked" else self.data.max_labels

    def __post_init__(self) -> None:
        SavingConfig.__post_init__(self)
        EngineConfig.__post_init__(self)
        require(0 <= self.label_smoothing < 1, f"label_smoothing is {self.label_smoothing}, expected 0 to 1")
        require(0 <= self.polyak < 1, f"polyak is {self.polyak}, expected 0 (off) to less than 1, for example 0.9999")
        at_least(self, 0, "mixup evaluate_every")
        more_than_0(self, "timeout_s stall_s")
        require(MIN_SEED <= self.seed <= MAX_SEED, f"seed is {self.seed}, expected {MIN_SEED} to {MAX_SEED}")
        uses_labels = bool(self.mixup or self.label_smoothing or self.data.evaluate)
        require(
            self.objective != "masked" or not uses_labels,
            "objective=masked does not use labels; remove mixup, label_smoothing and data.evaluate, and evaluate the "
            "features with probe.train and probe.test",
        )
        sets_both = self.steps is not None and self.passes is not None
        require(
            not sets_both,
            f"both steps={self.steps} and passes={shown(self.passes)} are set, expected one of them\n"
            "  to train this number of steps, set passes=null; otherwise, set steps=null",
        )
        require(
            self.steps is not None or self.passes is not None,
            "neither steps nor passes is set, expected one of them\n  set, for example, passes=10",
        )
        more_than_0(self, "steps passes")
        at_least(self, 1, "batch_size micro_batch log_every max_skipped")
        require(
            not self.mixup or self.micro_batch > 1,
            f"mixup is {self.mixup} and micro_batch is 1, but mixup blends images within a micro-batch, so nothing "
            "would be mixed\n  expected a micro_batch of 2 or more\n  set micro_batch=2, or mixup=0",
        )
        if self.exact_parts:
            # A part must consist of whole micro-batches, because two parts cannot share the gradient of one.
            unit = self.exact_parts * self.micro_batch
            require(
                self.batch_size % unit == 0 and not self.uneven,
                f"exact_parts {self.exact_parts} needs uneven=false, and a batch_size that is a multiple of "
                f"{self.exact_parts} × micro_batch {self.micro_batch} = {unit}; found uneven={self.uneven} and "
                "batch_size "
                f"{self.batch_size}",
            )
        if self.data.mixture:
            # Every set must get at least one sample in a batch.
            check_shares(self.batch_size, [part.weight for part in self.data.mixture.values()])

    # Extras override these methods to change the core's behaviour.

    @property
    def first_step(self) -> int:
        """Return the step that the stage starts from: 0, unless the stage branches from another stage's checkpoint."""
        return 0

    @property
    def saves_evaluated(self) -> bool:
        """Return whether every evaluated step is saved as a checkpoint."""
        return False

    @property
    def exempt_checkpoints(self) -> int:
        """Return how many checkpoints may be kept in addition to those that `keep` and `keep_every` select."""
        return 0

    def phases(self, steps: int, model: ModelConfig) -> list[Phase]:
        """Return the phases of the stage in order; without extras, a single phase of full images."""
        return [Phase(range(steps), model.image_size[0])]

    def check_architecture(self, model: ModelConfig, prefix: str = "") -> None:
        """Raise ConfigError if the stage cannot train this model; `prefix` is the stage's name and a dot."""


def check_ops(ops: str | None) -> None:
    """Raise ConfigError if the evaluation ops, or their arguments, are invalid."""
    if not ops:  # the image is resized to the model's size
        return
    try:
        shape_of(ops)
    except ValueError as error:
        raise ConfigError(f"preprocess: {error}") from None


# ------------------------------------------------------------------------ phases of a stage


def phase_at(step: int, phases: Sequence[Phase]) -> Phase:
    """Return the phase of a step, counted from 0; the last phase for steps beyond the end."""
    for phase in phases:
        if step < phase.steps.stop:
            return phase
    return phases[-1]


def has_whole_images(phases: Sequence[Phase]) -> bool:
    """Return whether the model sees all patches of an image in at least one phase."""
    return any(phase.kept is None for phase in phases)


def has_one_shape(phases: Sequence[Phase], model: ModelConfig) -> bool:
    """Return whether every phase has full images of the model's own size, like evaluation."""
    return all(phase.kept is None and phase.image_size == model.image_size[0] for phase in phases)


def smaller_sizes(phases: Sequence[Phase], model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the distinct image sizes of these phases that differ from the model's own, in order."""
    sizes = []
    for phase in phases:
        size = (phase.image_size, phase.image_size)
        if phase.image_size != model.image_size[0] and size not in sizes:
            sizes.append(size)
    return tuple(sizes)


def flops_of(phases: Sequence[Phase], model: ModelConfig, steps: range, batch_size: int) -> int:
    """Return the floating-point operations for training these steps; steps are counted from 0."""
    total = 0
    for phase in phases:
        common = range(max(steps.start, phase.steps.start), min(steps.stop, phase.steps.stop))
        if common:
            model_of_phase = model
            if phase.image_size != model.image_size[0]:  # the model's own size need not be square
                model_of_phase = replace(model, image_size=(phase.image_size, phase.image_size))
            total += models.training_flops(model_of_phase, len(common) * batch_size, phase.kept)
    return total
