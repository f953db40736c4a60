"""Implements `patchline analyze`: draw attention maps and learned features as in the ViT paper's figures 6, 7 and 11.

patchline analyze runs/digits/finetune-1a2b3c4d photo.jpg --output analysis
patchline analyze weights/l16 imagenet-000000.tar --limit 128 --output analysis      128 images, as in figure 7

1. Read images from files, folders or shards and resize them to the model's input size, ignoring their aspect ratio.
2. Pass each image through the model; reduce the attention weights to one map per image and one distance per head.
3. Compute the similarities of position embeddings and the principal patch filters from the weights.
4. Write attention.png (figure 6), inside.png (figures 7 and 11), the same figures as PDF, and analysis.json with all
   numbers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from data.errors import DataError, UsageError
from data.extras.pages.page import COLUMN, LINES, ON_PAPER, PAPER_STYLE, TEXT_WIDTH, save_figure
from data.files import write_atomically
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from jobs.extras.conversion import verify
from jobs.extras.given_images import encoded_images
from jobs.extras.progress import ProgressMeter
from jobs.terminal import activity
from models.catalog import normalise
from models.configs import ViTConfig
from models.extras import analysis
from models.positions import ADDED
from pipeline.evaluation import any_weights

NEARLY_UNIFORM = 1.5  # × the mean: below this, no patch stands out
BATCH_BYTES = 64 << 20  # attention weights of a batch; an image of L/16 at 384 px needs half a gigabyte
MAX_IMAGES = 8  # images in attention.png
COMPONENTS = 28  # filters in figure 7
POSITION_LABELS = 7  # maximum number of labels on an axis of the position maps
MAX_ROWS = 3  # of attention.png, with one image each; more images are drawn in two columns
HEADING = 0.2  # inches above the images in attention.png
GAPS_PER_WIDTH = 40  # gaps between images that would fit into the width of one


@dataclass(frozen=True)
class AttentionMaps:
    """A model's attention maps and attention distances for some images."""

    maps: Tensor  # (images, rows, columns), scaled to a maximum of 1 per image
    distance: Tensor  # (layers, heads), pixels, mean over the images
    distance_renormalised: Tensor  # the same, with attention renormalised over the patches


@dataclass(frozen=True)
class Features:
    """Features computed from the weights only; each is None if the model lacks the corresponding layer."""

    position_similarity: Tensor | None  # (rows, columns, rows, columns), cosine
    components: Tensor | None  # (COMPONENTS, 3, height, width) of a patch filter
    explained_variance: Tensor | None  # (COMPONENTS,)


def analyze(weights: str, paths: list[str], output: str, limit: int) -> dict[str, Any]:
    """Analyse weights on images; write figures and numbers, and return a summary.

    Raises UsageError if the model is not a ViT, or DataError if no image can be read.
    """
    verification: list[str] = []
    verify(weights, verification.append)
    model = any_weights.load(weights, {}).to(device())
    try:
        config: ViTConfig = analysis.vit_of(model).config
        bad: dict[str, str] = {}
        # A list, because tars in different folders can have samples with equal names.
        images = list(islice(read_images(paths, config.image_size, limit, bad), limit))
        names = [name for name, _ in images]
        if not images:
            name, reason = next(iter(bad.items()))
            raise DataError(
                f"none of the {len(bad)} images can be read; the first is {name}: {reason}\n"
                "  expected intact images; restore them from their source"
            )
        pixels = [pixels_of_image for _, pixels_of_image in images]
        attention = attention_of(model, config, pixels)
        activity.now("analyze: drawing …")
        features = features_of(model)
    except ValueError as error:
        raise UsageError(f"cannot analyze {weights}: {error}") from None

    # Create the folder only now, so that an error does not leave an empty folder.
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(PAPER_STYLE):
        draw_attention(pixels, attention.maps, folder / "attention.png")
        draw_features(features, attention.distance, folder / "inside.png")
    numbers = {
        "weights": weights,
        "images": names,
        "attention_maps": rounded(attention.maps),
        "attention_distance": rounded(attention.distance),
        "attention_distance_renormalised": rounded(attention.distance_renormalised),
        "position_similarity": rounded(features.position_similarity),
        "explained_variance": rounded(features.explained_variance),
    }
    write_atomically(folder / "analysis.json", json.dumps(numbers))

    reach = attention.distance.mean(1)
    lines = verification
    if bad:
        name, reason = next(iter(bad.items()))
        lines.append(f"skipped {len(bad)} unreadable images; the first is {name}: {reason}")
    size = f"{config.image_size[0]}×{config.image_size[1]}"
    lines.append(f"analysed {len(images)} images of {size} px across {config.depth} layers")
    lines.append(f"mean attention distance {reach[0]:.1f} px in the first layer, {reach[-1]:.1f} px in the last")
    lows, highs = zip(*map(relative_range, attention.maps), strict=True)
    line = f"attention to a patch is {min(lows):.2f} to {max(highs):.2f} × the mean of its image"
    if max(highs) < NEARLY_UNIFORM:
        line += ": nearly uniform, so the regions in attention.png have little meaning"
    lines.append(f"{line} (attention.png stretches this range to black and full brightness)")
    lines.append(f"written  {folder}/attention.png  inside.png (both also as PDF)  analysis.json")
    return {
        "analysis": str(folder / "analysis.json"),
        "figures": [str(folder / name) for name in ("attention.png", "inside.png")],
        "images": names,
        "unreadable": bad,
        "attention_distance": [float(value) for value in reach],
        "report": lines,
    }


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -------------------------------------------------------------------------------------------------- computing


def read_images(
    paths: list[str], size: tuple[int, int], limit: int, bad: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each image's name and pixels, (height, width, 3) uint8 at `size`; add errors to `bad` by name."""
    for name, encoded in encoded_images(paths, limit):
        try:
            yield name, preprocess(decode(encoded), f"resize({size})")
        except BadImage as error:
            bad[name] = str(error)


def attention_of(model: nn.Module, config: ViTConfig, images: Sequence[np.ndarray]) -> AttentionMaps:
    """Compute attention maps and distances in batches whose attention weights fit into BATCH_BYTES."""
    tokens = config.prefix_tokens + config.grid[0] * config.grid[1]
    size = max(1, BATCH_BYTES // (4 * config.depth * config.heads * tokens**2))
    maps: list[Tensor] = []
    distance = torch.zeros(config.depth, config.heads, dtype=torch.float64)
    renormalised = torch.zeros_like(distance)
    progress = ProgressMeter("images analyzed", len(images))
    rest = iter(images)
    while chunk := list(islice(rest, size)):
        progress(len(maps))
        batch = torch.from_numpy(np.stack(chunk)).permute(0, 3, 1, 2)  # (b, height, width, 3) → (b, 3, height, width)
        weights = analysis.attention_weights(model, normalise(batch, config, torch.float32, device()))
        maps += analysis.attention_map(weights, config).cpu()
        raw, scaled = analysis.attention_distances(weights, config)
        distance += len(chunk) * raw.cpu()
        renormalised += len(chunk) * scaled.cpu()
    return AttentionMaps(torch.stack(maps), distance / len(maps), renormalised / len(maps))


def features_of(model: nn.Module) -> Features:
    """Compute the similarities of additive position embeddings, and the patch filters unless the stem is a ResNet."""
    vit = analysis.vit_of(model)
    similarity = None
    if vit.config.positions in ADDED:
        similarity = analysis.position_similarity(model).cpu()
    components = None
    explained_variance = None
    if vit.stem is None:
        components, explained_variance = analysis.embedding_components(model, COMPONENTS)
    return Features(similarity, components, explained_variance)


def rounded(tensor: Tensor | None) -> object:
    """Return a tensor as nested lists of numbers rounded to six digits; None stays None."""
    if tensor is None:
        return None
    flat = [float(f"{value:.6g}") for value in tensor.cpu().numpy().ravel()]
    return np.reshape(flat, tensor.shape).tolist()


# -------------------------------------------------------------------------------------------------- drawing


def draw_attention(images: Sequence[np.ndarray], maps: Tensor, path: Path) -> None:
    """Draw figure 6: each image next to a copy darkened outside the attended regions."""
    shown = images[:MAX_IMAGES]
    height, width = shown[0].shape[:2]  # all images have the model's input size
    pairs = 1 if len(shown) <= MAX_ROWS else 2  # in a row
    rows = -(-len(shown) // pairs)
    # One picture with white gaps, because matplotlib takes long to draw axes for each image.
    gap = -(-width // GAPS_PER_WIDTH)
    picture = np.full((rows * (height + gap) - gap, 2 * pairs * (width + gap) - gap, 3), 255, np.uint8)
    inches = COLUMN if pairs == 1 else TEXT_WIDTH
    figure_height = inches * picture.shape[0] / picture.shape[1] + HEADING
    figure = Figure(figsize=(inches, figure_height))
    axes = figure.add_axes((0, 0, 1, 1 - HEADING / figure_height))
    for number, (pixels, attention_map) in enumerate(zip(shown, maps, strict=False)):
        row, pair = divmod(number, pairs)
        top = row * (height + gap)
        left = 2 * pair * (width + gap)
        dark = left + width + gap
        picture[top : top + height, left : left + width] = pixels
        light = enlarged(attention_map, pixels.shape[:2])
        picture[top : top + height, dark : dark + width] = np.rint(pixels * light[..., None])
        low, high = relative_range(attention_map)
        range_text = f"{low:.2f} to {high:.2f} × mean"
        axes.text(dark + 0.02 * width, top + 0.97 * height, range_text, color="white", fontsize=6)
        if row == 0:
            axes.text(left + width / 2, -gap, "Input", ha="center", fontsize=8)
            axes.text(dark + width / 2, -gap, "Attention, black to bright", ha="center", fontsize=8)
    axes.imshow(picture, aspect="auto", interpolation="none")
    axes.set_axis_off()
    save_figure(figure, path.with_suffix(""), (".png", ".pdf"))


def relative_range(attention_map: Tensor) -> tuple[float, float]:
    """Return the attention to the least and to the most attended patch, relative to the mean of the image."""
    relative = attention_map / attention_map.mean().clamp(min=1e-12)
    return relative.min().item(), relative.max().item()


def enlarged(attention_map: Tensor, size: tuple[int, ...]) -> np.ndarray:
    """Upscale an attention map bicubically to the size of its image, and normalise it to the range 0 to 1."""
    large = F.interpolate(attention_map[None, None].float(), size=size, mode="bicubic", align_corners=False)[0, 0]
    # Bicubic interpolation overshoots below zero.
    large = large.clamp(min=0)
    spread = (large.max() - large.min()).clamp(min=1e-12)
    return ((large - large.min()) / spread).numpy()


def draw_features(features: Features, distance: Tensor, path: Path) -> None:
    """Draw figures 7 and 11: patch filters, position similarities, and the attention distance of every head."""
    figure = Figure(figsize=(TEXT_WIDTH, 2.5))
    # Fixed places, because computing a layout takes long.
    left, centre, right = figure.subplots(
        1, 3, gridspec_kw={"left": 0.02, "right": 0.99, "bottom": 0.17, "top": 0.84, "wspace": 0.4}
    )
    left.set_title(f"{COMPONENTS} principal filter components,\neach from lowest to highest value")
    left.set_axis_off()
    if features.components is None:
        left.text(0.5, 0.5, "no patch filters: the stem is a ResNet", ha="center")
    else:
        left.imshow(tiled(features.components))

    draw_positions(figure, centre, features.position_similarity)

    layers = np.arange(1, len(distance) + 1)
    right.plot(layers, distance.numpy(), "o", color=ON_PAPER[LINES[0]], alpha=0.6, markersize=3)
    right.set(title="Attention distance of each head", xlabel="Layer", ylabel="Mean distance (pixels)")
    right.set_ylim(0, 1.05 * distance.max().item())
    right.locator_params(axis="x", integer=True)
    save_figure(figure, path.with_suffix(""), (".png", ".pdf"))


def draw_positions(figure: Figure, axes: Axes, similarity: Tensor | None) -> None:
    """Draw the similarity of each position to all positions as a grid of maps, separated by gaps."""
    axes.set_title("Position embedding similarity")
    if similarity is None:
        axes.text(0.5, 0.5, "the model has no added position embeddings", ha="center")
        axes.set_axis_off()
        return
    # Separate neighbouring maps by a line of NaN, which imshow leaves white.
    rows, columns = similarity.shape[:2]
    framed = F.pad(similarity.double(), (0, 1, 0, 1), value=float("nan"))  # (rows, columns, rows + 1, columns + 1)
    # (rows, columns, rows + 1, columns + 1) → one image, without the NaN after the last row and column.
    picture = framed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:-1, :-1]
    drawn = axes.imshow(picture.numpy(), vmin=-1, vmax=1, interpolation="nearest")
    # Put a tick in the middle of every n-th map, labelled with the map's number, starting from 1.
    for count, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        # Round up. A map is `count` wide and is followed by one line of NaN.
        every = -(-count // POSITION_LABELS)
        numbers = range(0, count, every)
        places = [(count + 1) * number + (count - 1) / 2 for number in numbers]
        set_ticks(places, [str(number + 1) for number in numbers])
    axes.set(xlabel="Input patch column", ylabel="Input patch row")
    bar = figure.colorbar(drawn, ax=axes, ticks=(-1, 0, 1), shrink=0.8)
    bar.set_label("Cosine similarity", labelpad=-4)


def tiled(components: Tensor, columns: int = 7) -> np.ndarray:
    """Arrange filters (count, 3, h, w) in one image with white gaps; scale each filter to the full colour range."""
    # Filters have no natural scale, so show each from its smallest value (black) to its largest.
    low = components.amin((1, 2, 3), keepdim=True)
    high = components.amax((1, 2, 3), keepdim=True)
    scaled = (components - low) / (high - low).clamp(min=1e-12)
    tiles = F.pad(scaled, (1, 1, 1, 1), value=1.0)  # (count, 3, h + 2, w + 2)
    missing = -len(tiles) % columns  # white tiles to fill the last row
    tiles = torch.cat([tiles, tiles.new_ones(missing, *tiles.shape[1:])]).unflatten(0, (-1, columns))
    # (tile rows, tile columns, 3, h + 2, w + 2) → (tile rows · (h + 2), tile columns · (w + 2), 3)
    return tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
