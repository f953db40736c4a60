"""Train timm's models on CIFAR-10 for a number of CPU-seconds, as a comparison for jobs/recipes/cifar10_bit.yaml.

    OMP_NUM_THREADS=1 python -m benchmarks.cifar10_timm --images FOLDER --model bit --cpu-seconds 640 --seed 0

FOLDER contains CIFAR-10 as WebDataset tars, cifar10-train-*.tar and cifar10-test-*.tar. Model, transforms, loss,
optimizer, schedule and weight averaging are timm's. Only the loop is written here, because timm's train.py cannot stop
after a number of CPU-seconds:

1. All CPU-seconds of the process count: imports, reading the images, training, and the evaluation at the end.
2. The learning rate follows the used share of the budget, so a cosine ends exactly when the budget does.
3. Training stops in time for the evaluation, which uses the averaged weights and whole images.

Prints one line of JSON: accuracy, CPU-seconds, images seen, and the settings.
"""

import argparse
import io
import json
import time
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.loss import LabelSmoothingCrossEntropy
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from data.extras.sources.tars import tars

CLASSES = 10
SIZE = 32  # pixels
HALF = (0.5, 0.5, 0.5)  # mean and deviation of pixels, as for timm's AugReg ViTs
TICKS = 10_000  # of the schedule, over the whole budget
EVALUATION_S = 4.0  # CPU-seconds reserved for the evaluation


def vit(drop_path: float) -> nn.Module:
    """Return a ViT with the width of ViT-Ti and patches of 4 pixels."""
    return VisionTransformer(
        SIZE,
        patch_size=4,
        num_classes=CLASSES,
        embed_dim=192,
        depth=6,
        num_heads=3,
        mlp_ratio=2.0,
        class_token=False,
        global_pool="avg",
        drop_path_rate=drop_path,
    )


def bit(drop_path: float) -> nn.Module:
    """Return the recipe's model, built by timm: a BiT ResNet of two stages."""
    return ResNetV2([2, 2], channels=(256, 512), num_classes=CLASSES, stem_type="fixed", drop_path_rate=drop_path)


MODELS = {"vit": vit, "bit": bit}


def read(pattern: str) -> tuple[list[Image.Image], Tensor]:
    """Return the decoded images and labels of tars."""
    images = []
    labels = []
    for sample in tars(pattern):
        assert sample.labels is not None
        images.append(Image.open(io.BytesIO(sample.read())).convert("RGB"))
        labels.append(sample.labels[0])
    return images, torch.tensor(labels)


@torch.no_grad()
def accuracy_of(model: nn.Module, images: list[Image.Image], labels: Tensor, options: argparse.Namespace) -> float:
    """Return the share of whole images that the model classifies correctly."""
    transform = create_transform(SIZE, crop_pct=1.0, mean=HALF, std=HALF)
    model.eval()
    correct = 0
    for start in range(0, len(images), 200):
        batch = torch.stack([transform(image) for image in images[start : start + 200]])
        with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
            logits = model(batch)
        correct += int((logits.argmax(1) == labels[start : start + 200]).sum())
    return correct / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="bit")
    parser.add_argument("--cpu-seconds", type=float, default=640.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the budget")
    parser.add_argument("--min-area", type=float, default=0.4, help="smallest share of an image that a crop covers")
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--drop-path", type=float, default=0.0)
    parser.add_argument("--auto-augment", default=None, help="for example rand-m9-mstd0.5-inc1")
    parser.add_argument("--ema", type=float, default=0.998, help="decay of the averaged weights")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="autocast to bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = np.random.default_rng(options.seed)

    images, labels = read(f"{options.images}/cifar10-train-*.tar")
    transform = create_transform(
        SIZE,
        is_training=True,
        scale=(options.min_area, 1.0),
        interpolation="bilinear",
        auto_augment=options.auto_augment,
        color_jitter=None,
        mean=HALF,
        std=HALF,
    )
    loss_of = LabelSmoothingCrossEntropy(options.smoothing)
    model = MODELS[options.model](options.drop_path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Norms and biases are not decayed.
    optimizer = create_optimizer_v2(model, "adamw", lr=options.lr, weight_decay=options.weight_decay)
    warmup = round(options.warmup * TICKS)
    schedule = CosineLRScheduler(optimizer, TICKS, lr_min=0.0, warmup_t=warmup, warmup_prefix=True)
    average = ModelEmaV3(model, decay=options.ema, use_warmup=True)

    steps = 0
    losses = []
    order = np.empty(0, dtype=np.int64)
    while (progress := time.process_time() / (options.cpu_seconds - EVALUATION_S)) < 1:
        schedule.step(round(progress * TICKS))
        if len(order) < options.batch_size:
            order = generator.permutation(len(images))
        chosen, order = order[: options.batch_size], order[options.batch_size :]
        batch = torch.stack([transform(images[number]) for number in chosen])
        model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
            logits = model(batch)
        loss = loss_of(logits.float(), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        average.update(model, step=steps)
        losses.append(loss.item())
        if steps % 100 == 0:
            print(f"step {steps}  {time.process_time():.0f} CPU-s  loss {np.mean(losses[-100:]):.3f}", flush=True)

    test_images, test_labels = read(f"{options.images}/cifar10-test-*.tar")
    result = {
        "accuracy": accuracy_of(average.module, test_images, test_labels, options),
        "cpu_s": round(time.process_time(), 1),
        "images_seen": steps * options.batch_size,
        "parameters": parameters,
        "timm": timm.__version__,
        "torch": torch.__version__,
        **{name: str(value) for name, value in vars(options).items() if name != "images"},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
