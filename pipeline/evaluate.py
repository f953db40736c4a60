"""Accuracy and features of a model over a set of shards, each sample exactly once at any world size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.errors import ConfigError
from data.evaluation import EvaluationBatch, EvaluationSet
from data.images.preprocess import parse_ops
from pipeline.config import require
from pipeline.losses import hits
from pipeline.probe import L2, linear_probe
from pipeline.watchdog import Phases


@dataclass(frozen=True)
class ProbeConfig:
    """Few-shot linear evaluation; with a train and a test set it also runs during training, as the paper does."""

    train: str | None = None  # index of the set that the shots are picked from
    test: str | None = None
    shots: tuple[int, ...] = (1, 5, 10, 25)  # big_vision configs/common_fewshot.py
    seeds: tuple[int, ...] = (0, 1, 2)
    l2: float = L2

    def __post_init__(self) -> None:
        require((self.train is None) == (self.test is None), "a probe needs both train and test, or neither")
        require(
            all(s > 0 for s in self.shots) and len(self.shots) > 0,
            f"shots are {self.shots}, expected 1 or more",
        )
        require(len(self.seeds) > 0, "seeds are empty, expected at least one")


def check_ops(ops: str | None) -> None:
    """Raise ConfigError where evaluation could not preprocess with `ops`."""
    try:
        parse_ops(ops or "")
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"preprocess: {error}") from None


def normalise(images: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """uint8 pixels → [−1, 1] on the device (SPEC 2.5: value_range(-1, 1))."""
    return images.to(device, non_blocking=True).float().mul_(1 / 127.5).sub_(1).to(dtype)


def watched(samples: EvaluationSet, phases: Phases, step: int = 0) -> Iterator[EvaluationBatch]:
    """The set's batches, each entered as a phase that names the shard it begins in."""
    batches = iter(samples)
    for number in range(len(samples)):
        rows = samples.rows[number * samples.batch_size :]
        phases.enter("evaluate", step, samples.index.shards[samples.place(rows[0])[0]].name if rows else "")
        yield next(batches)
    phases.enter("evaluate", step)


def _batches(model: nn.Module, samples: Iterable[EvaluationBatch]) -> Iterator[EvaluationBatch]:
    """Batches under eval mode, restored afterwards; every worker gets equally many (ZeRO-3 gathers in lockstep)."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield from samples
    finally:
        model.train(training)


def accuracy(
    model: nn.Module, samples: Iterable[EvaluationBatch], dtype: torch.dtype, device: torch.device
) -> tuple[float, int]:
    """Collective: (top-1 accuracy, samples judged); right means the prediction is one of the sample's labels."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in _batches(model, samples):
        right = hits(model(normalise(batch.images, dtype, device)), batch.labels.to(device))
        mask = batch.mask.to(device)
        counts += torch.stack([(right & mask).sum(), mask.sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    right, judged = counts.tolist()
    return right / max(judged, 1), int(judged)


def features(
    model: nn.Module, samples: Iterable[EvaluationBatch], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Collective: what enters the head for every good sample, (N, D) float32, and first labels (N,), in set order."""
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in _batches(model, samples):
        found = model.features(normalise(batch.images, dtype, device)).float().cpu()  # type: ignore[operator]
        kept.append(found[batch.mask])
        labels.append(batch.labels[batch.mask, 0])
    mine = (torch.cat(kept), torch.cat(labels))
    if not dist.is_initialized():
        return mine
    parts: list[tuple[Tensor, Tensor]] = [mine] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def probe(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    cfg: ProbeConfig,
    shots: Sequence[int] | None = None,
) -> dict[str, float]:
    """{"10shot-seed-0": accuracy, …, "10shot": mean over seeds} (names of big_vision evaluators/fewshot_lsr.py)."""
    results: dict[str, float] = {}
    for count in shots or cfg.shots:
        scores = {seed: linear_probe(*train, *test, shots=count, seed=seed, l2=cfg.l2) for seed in cfg.seeds}
        results |= {f"{count}shot-seed-{seed}": score for seed, score in scores.items()}
        results[f"{count}shot"] = sum(scores.values()) / len(scores)
    return results
