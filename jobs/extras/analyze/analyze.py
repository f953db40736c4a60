"""The work of `patchline analyze`: what a trained ViT looks at, as in the paper's figures 6, 7 and 11.

patchline analyze runs/digits/finetune-1a2b3c4d photo.jpg --output analysis
patchline analyze weights/l16 imagenet-000000.tar --limit 128 --output analysis      as many as in figure 7

1. Images of files, folders or shards are squashed to the model's size.
2. Each goes through the model alone; its attention weights become one map and one distance a head.
3. The weights alone tell how alike the positions are, and which filters the patches pass.
4. Written: attention.png (figure 6), inside.png (figures 7 and 11) and analysis.json with all the numbers.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from data.errors import DataError, UsageError
from data.extras.sources.tars import tars
from data.files import write_atomically
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.shard import IMAGES
from jobs.commands.conversion import load, verify
from jobs.terminal import ProgressMeter, activity, echo
from models.catalog import normalise
from models.configs import ViTConfig
from models.extras import analysis
from models.positions import ADDED

SHOWN = 8  # images in attention.png
COMPONENTS = 28  # filters in figure 7
POSITION_LABELS = 14  # on an axis of the position maps, at most: more do not fit


@dataclass(frozen=True)
class AttentionMaps:
    """What the model looks at in the images."""

    maps: Tensor  # (images, rows, columns), the largest of each is 1
    distance: Tensor  # (layers, heads), pixels, mean over the images
    distance_renormalised: Tensor  # the same, of the patches' share of attention alone


@dataclass(frozen=True)
class Inside:
    """What the weights alone tell; None where the model has no such part."""

    position_similarity: Tensor | None  # (rows, columns, rows, columns), cosine
    components: Tensor | None  # (COMPONENTS, 3, height, width) of a patch filter
    explained_variance: Tensor | None  # (COMPONENTS,)


def analyze(weights: str, paths: list[str], output: str, limit: int) -> None:
    """Load, look, draw, write, and print the report. Raises UsageError where nothing can be looked at."""
    verification: list[str] = []
    verify(weights, verification.append)
    model = load(weights, {}).to(device())
    try:
        config: ViTConfig = analysis.vit_of(model).config
        bad: dict[str, str] = {}
        images = dict(islice(read_images(paths, config.image_size, limit, bad), limit))
        if not images:
            name, reason = next(iter(bad.items()))
            raise DataError(
                f"none of the {len(bad)} images that were tried can be read: {reason}, first {name}\n"
                "  expected whole images; bring them back from where they came"
            )
        attention = look_at(model, config, images)
        activity.now("analyze: looking inside, drawing …")
        inside = look_inside(model)
    except ValueError as error:
        raise UsageError(f"{weights} cannot be analysed: {error}") from None

    # Nothing has been written so far: a refusal leaves no folder behind.
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    draw_attention(images, attention.maps, folder / "attention.png")
    draw_inside(inside, attention.distance, folder / "inside.png")
    numbers = {
        "weights": weights,
        "images": list(images),
        "attention_maps": rounded(attention.maps),
        "attention_distance": rounded(attention.distance),
        "attention_distance_renormalised": rounded(attention.distance_renormalised),
        "position_similarity": rounded(inside.position_similarity),
        "explained_variance": rounded(inside.explained_variance),
    }
    write_atomically(folder / "analysis.json", json.dumps(numbers))

    reach = attention.distance.mean(1)
    for line in verification:
        echo(line)
    if bad:
        name, reason = next(iter(bad.items()))
        echo(f"left out {len(bad)} that cannot be read: {reason}, first {name}")
    echo(f"{len(images)} images of {config.image_size[0]}×{config.image_size[1]} px through {config.depth} layers")
    echo(f"mean attention distance {reach[0]:.1f} px in the first layer, {reach[-1]:.1f} px in the last")
    echo(f"written  {folder}/attention.png  inside.png  analysis.json")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -------------------------------------------------------------------------------------------------- looking


def read_images(
    paths: list[str], size: tuple[int, int], limit: int, bad: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and pixels, (height, width, 3) uint8, of each image at `size`; `bad` gets the others, and why."""
    for name, encoded in encoded_images(paths, limit):
        try:
            yield name, preprocess(decode(encoded), f"resize({size})")
        except BadImage as error:
            bad[name] = str(error)


def encoded_images(paths: list[str], limit: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of at most `limit` image files, also of those in folders, and of the samples of tar shards.

    Of more files some are taken evenly over their names: the first ones may all be of one class.
    """
    files: list[Path] = []
    shards: list[Path] = []
    for path in map(Path, paths):
        if path.suffix == ".tar":
            shards.append(path)
        elif path.is_dir():
            files += sorted(file for file in path.rglob("*.*") if file.suffix[1:].lower() in IMAGES)
        elif path.suffix[1:].lower() in IMAGES:
            files.append(path)
    count = min(limit, len(files))
    for number in range(count):
        file = files[number * len(files) // count]
        yield str(file), file.read_bytes()
    for shard in shards:
        for sample in tars([str(shard)]):
            yield f"{shard.name}:{sample.key}", sample.read()


def look_at(model: nn.Module, config: ViTConfig, images: dict[str, np.ndarray]) -> AttentionMaps:
    """Compute attention maps and distances, one image at a time: L/16 at 384 px has half a gigabyte of weights each."""
    maps = []
    distances = []
    renormalised = []
    progress = ProgressMeter("images looked at", len(images))
    for number, pixels in enumerate(images.values()):
        progress(number)
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]  # (height, width, 3) → (1, 3, height, width)
        weights = analysis.attention_weights(model, normalise(batch, torch.float32, device()))
        maps.append(analysis.attention_map(weights, config)[0].cpu())
        distances.append(analysis.attention_distance(weights, config).cpu())
        renormalised.append(analysis.attention_distance(weights, config, renormalise=True).cpu())
    return AttentionMaps(torch.stack(maps), torch.stack(distances).mean(0), torch.stack(renormalised).mean(0))


def look_inside(model: nn.Module) -> Inside:
    """Compute position similarity where a table is added to the patches, filters where no ResNet makes them."""
    vit = analysis.vit_of(model)
    similarity = None
    if vit.config.positions in ADDED:
        similarity = analysis.position_similarity(model).cpu()
    components = None
    explained_variance = None
    if vit.stem is None:
        components, explained_variance = analysis.embedding_components(model, COMPONENTS)
    return Inside(similarity, components, explained_variance)


def rounded(tensor: Tensor | None) -> object:
    """Return a tensor as nested lists of numbers with six digits; None stays None."""
    if tensor is None:
        return None
    flat = [float(f"{value:.6g}") for value in tensor.cpu().numpy().ravel()]
    return np.reshape(flat, tensor.shape).tolist()


# -------------------------------------------------------------------------------------------------- drawing


def draw_attention(images: dict[str, np.ndarray], maps: Tensor, path: Path) -> None:
    """Draw figure 6: each image, and beside it the image again, bright where the model looks."""
    shown = list(images.values())[:SHOWN]
    height, width = shown[0].shape[:2]
    # All images have the size of the first: they were squashed to the model's.
    row_height = 2 * height / width  # inches; both columns together are four wide
    figure = Figure(figsize=(4, row_height * len(shown) + 0.3), layout="constrained")
    # squeeze=False: a single image must give a row of two axes as well.
    rows = figure.subplots(len(shown), 2, squeeze=False)
    rows[0][0].set_title("Input")
    rows[0][1].set_title("Attention")
    for (left, right), pixels, attention_map in zip(rows, shown, maps[: len(shown)], strict=True):
        light = enlarged(attention_map, pixels.shape[:2])
        left.imshow(pixels)
        right.imshow(pixels / 255 * light[..., None])
        left.set_axis_off()
        right.set_axis_off()
    figure.savefig(path, dpi=150)


def enlarged(attention_map: Tensor, size: tuple[int, ...]) -> np.ndarray:
    """Return a map at the size of its image, interpolated bicubically, with values from 0 to 1."""
    large = F.interpolate(attention_map[None, None].float(), size=size, mode="bicubic", align_corners=False)[0, 0]
    # Bicubic interpolation overshoots, here below zero.
    large = large.clamp(min=0)
    spread = (large.max() - large.min()).clamp(min=1e-12)
    return ((large - large.min()) / spread).numpy()


def draw_inside(inside: Inside, distance: Tensor, path: Path) -> None:
    """Draw figures 7 and 11: filters, positions, and how far every head of every layer looks."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    left, centre, right = figure.subplots(1, 3)

    left.set_title(f"RGB embedding filters\n(first {COMPONENTS} principal components)")
    left.set_axis_off()
    if inside.components is None:
        left.text(0.5, 0.5, "the patches come from a ResNet", ha="center")
    else:
        left.imshow(tiled(inside.components))

    draw_positions(figure, centre, inside.position_similarity)

    layers = np.arange(1, len(distance) + 1)
    right.plot(layers, distance.numpy(), "o", color="tab:blue", alpha=0.6, markersize=5)
    right.set(title="Attention distance of every head", xlabel="Layer", ylabel="Mean attention distance (pixels)")
    right.set_ylim(0, 1.05 * distance.max().item())
    right.locator_params(axis="x", integer=True)
    figure.savefig(path, dpi=150)


def draw_positions(figure: Figure, axes: Axes, similarity: Tensor | None) -> None:
    """Draw the similarity of every position to all others, as a grid of maps with a gap between neighbours."""
    axes.set_title("Position embedding similarity")
    if similarity is None:
        axes.text(0.5, 0.5, "no table is added to the patches", ha="center")
        axes.set_axis_off()
        return
    # Maps of neighbours get a line of NaN between them, which imshow leaves white.
    rows, columns = similarity.shape[:2]
    framed = F.pad(similarity.double(), (0, 1, 0, 1), value=float("nan"))  # (rows, columns, rows + 1, columns + 1)
    # (rows, columns, rows + 1, columns + 1) → one picture, less the NaN after the last row and column.
    picture = framed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:-1, :-1]
    drawn = axes.imshow(picture.numpy(), vmin=-1, vmax=1, interpolation="nearest")
    # A tick in the middle of a map, with the map's number from 1 on; as many as have room.
    for count, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        # Rounded up. A map is `count` wide and has one line of NaN after it.
        every = -(-count // POSITION_LABELS)
        numbers = range(0, count, every)
        places = [(count + 1) * number + (count - 1) / 2 for number in numbers]
        set_ticks(places, [str(number + 1) for number in numbers])
    axes.set(xlabel="Input patch column", ylabel="Input patch row")
    figure.colorbar(drawn, ax=axes, label="Cosine similarity", shrink=0.8)


def tiled(components: Tensor, columns: int = 7) -> np.ndarray:
    """Join filters (count, 3, h, w) to a picture with white gaps, each scaled to the whole range of colours."""
    # Filters have no natural scale; each is shown from its smallest value (black) to its largest.
    low = components.amin((1, 2, 3), keepdim=True)
    high = components.amax((1, 2, 3), keepdim=True)
    scaled = (components - low) / (high - low).clamp(min=1e-12)
    tiles = F.pad(scaled, (1, 1, 1, 1), value=1.0)  # (count, 3, h + 2, w + 2)
    missing = -len(tiles) % columns  # white tiles that fill the last row
    tiles = torch.cat([tiles, tiles.new_ones(missing, *tiles.shape[1:])]).unflatten(0, (-1, columns))
    # (tile rows, tile columns, 3, h + 2, w + 2) → (tile rows · (h + 2), tile columns · (w + 2), 3)
    return tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
