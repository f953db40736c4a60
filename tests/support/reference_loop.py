"""An independent implementation of training, evaluation and few-shot probe in torch and NumPy, after SPEC.md.

It shares no code with `pipeline/`; test_reference_loop.py compares Patchline with it. Only the network is Patchline's,
and separate tests compare it with the original's arrays. Everything runs in float32 or float64: their difference is
the noise of a correct float32 run. The specification is docs/design/SPEC.md.

In:  a network, a Plan, and for every step its micro-batches: rows of a pool of images
Out: Trained: the loss and gradient norm of every step, the weights at the end, and their Polyak average
"""

import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# b samples of a micro-batch, C classes, N samples, D features

# big_vision decays only `*/kernel` (SPEC 2.2); these are the kernels of a plain ViT under our names.
KERNELS = re.compile(r"(embedding|qkv|out|up|down|pre_logits|head)\.weight")
BIAS_FEATURE = 100.0  # SPEC 4.4

MicroBatches = Sequence[np.ndarray]  # rows of the pool, one array for each micro-batch of a step


@dataclass(frozen=True)
class Plan:
    """Training settings of a stage, as defined in SPEC 2."""

    steps: int
    rate: float  # the peak
    optimizer: str = "adam"
    weight_decay: float = 0.0  # of kernels, multiplied by the rate
    clip: float = 1.0
    decay: str = "linear"  # of the rate, to `end`
    end: float = 0.0
    warmup_steps: int = 0
    loss: str = "softmax"
    smoothing: float = 0.0
    mixup: float = 0.0
    polyak: float = 0.0
    seed: int = 0
    bf16: bool = False  # the weights that compute, activations and gradients of micro-batches


@dataclass(frozen=True)
class Trained:
    """The results of a training run."""

    losses: list[float]  # of every step: the mean over the batch, before the update
    norms: list[float]  # of every step: of the mean gradient, before clipping
    weights: dict[str, Tensor]
    average: dict[str, Tensor]


def rate_of(plan: Plan, step: int) -> float:
    """Return the learning rate of an update, counted from 0 (SPEC 2.2, 2.3)."""
    share_done = max(0.0, (step - plan.warmup_steps) / (plan.steps - plan.warmup_steps))
    if plan.decay == "cosine":
        rate = plan.rate * (1 + math.cos(math.pi * share_done)) / 2
    else:
        rate = plan.end + (plan.rate - plan.end) * (1 - share_done)
    if step < plan.warmup_steps:
        rate *= step / plan.warmup_steps
    return rate


def pixels_of(images: np.ndarray, kind: torch.dtype) -> Tensor:
    """Convert (b, S, S, 3) uint8 to (b, 3, S, S) in [−1, 1] (SPEC 2.5)."""
    return (torch.from_numpy(images).to(kind) / 127.5 - 1).permute(0, 3, 1, 2)


def targets_of(labels: np.ndarray, classes: int, smoothing: float, kind: torch.dtype) -> Tensor:
    """Convert labels (b,) to smoothed targets (b, C): t·(1 − s) + s/C."""
    targets = torch.full((len(labels), classes), smoothing / classes, dtype=kind)
    for row, label in enumerate(labels):
        targets[row, label] += 1 - smoothing
    return targets


def share_of(plan: Plan, step: int) -> float:
    """Return the larger mixup share of a step (SPEC 2.6), drawn from NumPy's PCG64 with the seed (seed, step)."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((plan.seed, step))))
    share = generator.beta(plan.mixup, plan.mixup)
    return max(share, 1 - share)


def blended(rows: Tensor, share: float) -> Tensor:
    """Blend every row with the previous one, and the first with the last."""
    partners = [number - 1 for number in range(len(rows))]
    return share * rows + (1 - share) * rows[partners]


def loss_of(logits: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Return the loss summed over samples and classes."""
    if loss == "softmax":
        return (targets * (torch.logsumexp(logits, 1, keepdim=True) - logits)).sum()
    softplus = torch.nn.functional.softplus
    return (targets * softplus(-logits) + (1 - targets) * softplus(logits)).sum()


def gradient_of(
    network: nn.Module,
    plan: Plan,
    step: int,
    batch: MicroBatches,
    images: np.ndarray,
    labels: np.ndarray,
    kind: torch.dtype,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a batch and its gradient, summed over the micro-batches in `kind`."""
    compute = next(network.parameters()).dtype
    samples = sum(len(rows) for rows in batch)
    total_loss = 0.0
    total: dict[str, Tensor] = {}
    for rows in batch:
        pixels = pixels_of(images[rows], kind)
        targets = targets_of(labels[rows], network.head.out_features, plan.smoothing, kind)
        if plan.mixup:
            share = share_of(plan, step)
            pixels = blended(pixels, share)
            targets = blended(targets, share)
        network.zero_grad()
        loss = loss_of(network(pixels.to(compute)).to(kind), targets, plan.loss) / samples
        loss.backward()
        total_loss += loss.item()
        for name, parameter in network.named_parameters():
            part = parameter.grad.to(kind)
            total[name] = total[name] + part if name in total else part
    return total_loss, total


def train(
    start: nn.Module,
    plan: Plan,
    batches: Sequence[MicroBatches],
    images: np.ndarray,
    labels: np.ndarray,
    kind: torch.dtype,
) -> Trained:
    """Train a copy of the network with masters and moments of `kind`; without dropout, which no plan uses."""
    network = deepcopy(start).to(torch.bfloat16 if plan.bf16 else kind).train()
    masters = {name: p.detach().to(kind).clone() for name, p in start.named_parameters()}
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    for name, master in masters.items():
        moments[name] = (torch.zeros_like(master), torch.zeros_like(master))
    average = {name: master.clone() for name, master in masters.items()}
    losses: list[float] = []
    norms: list[float] = []
    for step, batch in enumerate(batches):
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(masters[name])
        loss, gradient = gradient_of(network, plan, step, batch, images, labels, kind)
        norm = math.sqrt(sum(part.square().sum().item() for part in gradient.values()))
        # Clipping is g · min(1, c/‖g‖), once a step, on the mean gradient of the whole batch (SPEC 2.2, 2.9).
        factor = min(1.0, plan.clip / norm) if plan.clip else 1.0
        for name, master in masters.items():
            update(master, gradient[name] * factor, moments[name], plan, step, KERNELS.search(name) is not None)
            average[name] = plan.polyak * average[name] + (1 - plan.polyak) * master
        losses.append(loss)
        norms.append(norm)
    return Trained(losses, norms, masters, average)


def update(
    master: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], plan: Plan, step: int, is_kernel: bool
) -> None:
    """Update one parameter in place: Adam with decoupled decay, or SGD with momentum (SPEC 2.2, 2.4)."""
    first, second = moments
    rate = rate_of(plan, step)
    if plan.optimizer == "sgd":
        first.mul_(0.9).add_(gradient)
        master -= rate * first
        return
    first.mul_(0.9).add_(gradient, alpha=1 - 0.9)
    second.mul_(0.999).add_(gradient**2, alpha=1 - 0.999)
    mean = first / (1 - 0.9 ** (step + 1))
    square = second / (1 - 0.999 ** (step + 1))
    decay = plan.weight_decay * master if is_kernel else 0.0
    master -= rate * (mean / (square.sqrt() + 1e-8) + decay)


# ------------------------------------------------------------------------------------------ evaluation, probe


def central_crop(images: np.ndarray, size: int) -> np.ndarray:
    """Crop (N, H, W, 3) to the central `size` × `size` (SPEC 2.5)."""
    top = (images.shape[1] - size) // 2
    left = (images.shape[2] - size) // 2
    return images[:, top : top + size, left : left + size]


def outputs_of(network: nn.Module, weights: dict[str, Tensor], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return features (N, D) and logits (N, C) of images, without dropout, in the weights' dtype."""
    kind = next(iter(weights.values())).dtype
    evaluated = deepcopy(network).to(kind).eval()
    with torch.no_grad():
        for name, parameter in evaluated.named_parameters():
            parameter.copy_(weights[name])
        features = evaluated.features(pixels_of(images, kind))
        return features.numpy(), evaluated.head(features).numpy()


def share_right(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the top-1 accuracy over all rows."""
    right = 0
    for row, label in zip(scores, labels, strict=True):
        right += int(np.argmax(row) == label)
    return right / len(labels)


def near_ties(scores: np.ndarray, noise: float) -> int:
    """Count the rows whose two largest scores are so close that noise may swap them."""
    ordered = np.sort(scores, axis=1)
    return int((ordered[:, -1] - ordered[:, -2] <= 2 * noise).sum())


def probe_scores(
    train: tuple[np.ndarray, np.ndarray], test_features: np.ndarray, shots: int, seed: int, l2: float = 1024.0
) -> np.ndarray:
    """Return ridge regression scores (N, C) of the test rows (SPEC 4); `train` is features (N, D), labels (N,)."""
    features = train[0].astype(np.float64)
    labels = train[1]
    generator = np.random.default_rng(seed)
    classes = labels.max() + 1
    picked: list[int] = []
    for label in range(classes):
        picked += generator.permutation(np.where(labels == label)[0]).tolist()[:shots]
    mean = features[picked].mean(0)
    std = features[picked].std(0) + 1e-5

    def inputs(rows: np.ndarray) -> np.ndarray:
        return np.hstack([(rows - mean) / std, np.full((len(rows), 1), BIAS_FEATURE)])

    x = inputs(features[picked])
    y = np.where(labels[picked][:, None] == np.arange(classes), 1.0, -1.0)
    return inputs(test_features) @ np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)
