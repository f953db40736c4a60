"""Pictures of what a trained ViT looks at, and their numbers: the paper's figures 6, 7 and 11.

python -m jobs analyze runs/digits/finetune-1a2b3c4d photo.jpg --output analysis
python -m jobs analyze weights/l16 imagenet-000000.tar --limit 128 --output analysis      as many as in figure 7

Writes attention.png (figure 6), inside.png (figure 7) and analysis.json.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from data.errors import DataError, UsageError
from data.files import write_whole
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.shards.sources import tars
from data.shards.tar import IMAGES
from jobs.commands.weights import load
from models import analysis
from models.positions import ADDED
from pipeline.evaluate import normalise

SHOWN = 8  # images in attention.png
COMPONENTS = 28  # filters in figure 7


def analyze(weights: str, paths: list[str], output: str, limit: int) -> list[str]:
    """Load, look, draw, write; returns the report. Raises UsageError where nothing can be looked at."""
    model = load(weights, {}).to(device())
    try:
        config = analysis.vit_of(model).config
        images = dict(islice(read_images(paths, config.image_size), limit))
        if not images:
            raise UsageError(f"no images in {', '.join(paths)}; give image files, folders of them or tar shards")
        found = {"weights": weights, "images": list(images)} | looked_at(model, config, images) | inside(model)
    except ValueError as error:
        raise UsageError(f"{weights} cannot be analysed: {error}") from None
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in found.items() if name != "components"}
    draw_attention(images, found["attention_maps"], folder / "attention.png")
    draw_inside(found, folder / "inside.png")
    write_whole(folder / "analysis.json", json.dumps(plain, default=rounded))
    reach = found["attention_distance"].mean(1)
    return [
        f"{len(images)} images of {config.image_size[0]}×{config.image_size[1]} px through {config.depth} layers",
        f"mean attention distance {reach[0]:.1f} px in the first layer, {reach[-1]:.1f} px in the last",
        f"written  {folder}/attention.png  inside.png  analysis.json",
    ]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_images(paths: list[str], size: tuple[int, int]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and pixels (height, width, 3) uint8 of image files, folders of them and tar shards, squashed to `size`."""
    for path in map(Path, paths):
        if path.suffix == ".tar":
            found = ((f"{path.name}:{sample.key}", sample.read()) for sample in tars([str(path)]))
        else:
            files = sorted(path.rglob("*.*")) if path.is_dir() else [path]
            found = ((str(file), file.read_bytes()) for file in files if file.suffix[1:].lower() in IMAGES)
        for name, encoded in found:
            try:
                yield name, preprocess(decode(encoded), f"resize({size})")
            except BadImage as error:
                raise DataError(f"{name}: {error}") from None


def looked_at(model: torch.nn.Module, config: Any, images: dict[str, np.ndarray]) -> dict[str, Any]:
    """Attention distances (layers, heads) in pixels and a map (rows, columns) of every image."""
    maps, kept, renormalised = [], [], []
    for pixels in images.values():  # one at a time: weights of L/16 at 384 px take half a gigabyte an image
        image = normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.float32, device())
        weights = analysis.attention_weights(model, image)
        maps.append(analysis.attention_map(weights, config)[0].cpu())
        kept.append(analysis.attention_distance(weights, config).cpu())
        renormalised.append(analysis.attention_distance(weights, config, renormalise=True).cpu())
    return {
        "attention_maps": torch.stack(maps),
        "attention_distance": torch.stack(kept).mean(0),
        "attention_distance_renormalised": torch.stack(renormalised).mean(0),
    }


def inside(model: torch.nn.Module) -> dict[str, Any]:
    """What the weights alone tell; None where the model has no such part."""
    found: dict[str, Any] = {"position_similarity": None, "components": None, "explained_variance": None}
    vit = analysis.vit_of(model)
    if vit.config.positions in ADDED:
        found["position_similarity"] = analysis.position_similarity(model).cpu()
    if vit.stem is None:
        found["components"], found["explained_variance"] = analysis.embedding_components(model, COMPONENTS)
    return found


def rounded(tensor: Tensor) -> Any:
    """Six digits, as JSON."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(tensor.cpu().numpy()).tolist()


# -------------------------------------------------------------------------------------------------- drawing


def draw_attention(images: dict[str, np.ndarray], maps: Tensor, path: Path) -> None:
    """Figure 6: each image beside itself, lit where the model looks."""
    shown = list(images.values())[:SHOWN]
    height = 2 * shown[0].shape[0] / shown[0].shape[1]
    figure = Figure(figsize=(4, height * len(shown) + 0.3), layout="constrained")
    for row, (axes, pixels) in enumerate(zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True)):
        axes[0].imshow(pixels)
        axes[1].imshow(pixels / 255 * enlarged(maps[row], pixels.shape[:2])[..., None])
        for axis, title in zip(axes, ("Input", "Attention"), strict=True):
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title)
    figure.savefig(path, dpi=150)


def enlarged(map_: Tensor, size: tuple[int, int]) -> np.ndarray:
    """A map at the size of its image, bicubic, from 0 to 1."""
    large = F.interpolate(map_[None, None].float(), size=size, mode="bicubic", align_corners=False)[0, 0]
    large = large.clamp(min=0)
    return ((large - large.min()) / (large.max() - large.min()).clamp(min=1e-12)).numpy()


def draw_inside(found: dict[str, Any], path: Path) -> None:
    """Figure 7: filters, positions, and how far every head of every layer looks."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    left, centre, right = figure.subplots(1, 3)
    left.set_title(f"RGB embedding filters\n(first {COMPONENTS} principal components)")
    if found["components"] is None:
        left.text(0.5, 0.5, "the patches come from a ResNet", ha="center")
    else:
        left.imshow(tiled(found["components"]))
    left.set_axis_off()
    draw_positions(figure, centre, found["position_similarity"])
    distance = found["attention_distance"].numpy()
    layers = np.arange(1, len(distance) + 1)
    right.plot(layers, distance, "o", color="tab:blue", alpha=0.6, markersize=5)
    right.set(title="Attention distance of every head", xlabel="Layer", ylabel="Mean attention distance (pixels)")
    right.set_ylim(0, 1.05 * distance.max())
    right.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


def draw_positions(figure: Any, axes: Any, similarity: Tensor | None) -> None:
    axes.set_title("Position embedding similarity")
    if similarity is None:
        axes.text(0.5, 0.5, "no table is added to the patches", ha="center")
        axes.set_axis_off()
        return
    rows, columns = similarity.shape[:2]
    framed = F.pad(similarity.double(), (0, 1, 0, 1), value=float("nan"))  # a gap between the maps of neighbours
    picture = framed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:-1, :-1]
    drawn = axes.imshow(picture.numpy(), vmin=-1, vmax=1, interpolation="nearest")
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        numbers = range(0, count, -(-count // 14))  # 14 labels have room
        axis.set_ticks([(count + 1) * i + (count - 1) / 2 for i in numbers], [str(i + 1) for i in numbers])
    axes.set(xlabel="Input patch column", ylabel="Input patch row")
    figure.colorbar(drawn, ax=axes, label="Cosine similarity", shrink=0.8)


def tiled(components: Tensor, columns: int = 7) -> np.ndarray:
    """(count, 3, h, w) as one picture with white gaps, each scaled to the whole range of colours."""
    low, high = components.amin((1, 2, 3), keepdim=True), components.amax((1, 2, 3), keepdim=True)
    tiles = F.pad((components - low) / (high - low).clamp(min=1e-12), (1, 1, 1, 1), value=1.0)
    missing = -len(tiles) % columns
    tiles = torch.cat([tiles, tiles.new_ones(missing, *tiles.shape[1:])]).unflatten(0, (-1, columns))
    return tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
