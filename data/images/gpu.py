"""JPEGs decoded, cropped, resized and flipped where the model is: `data.decode=gpu`, nvJPEG through TorchCodec.

The decoding processes then only read, check headers and draw; what they cannot leave to nvJPEG they decode as ever.
It has never run on a GPU (docs/decoding.md); without one, TorchCodec decodes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from data.errors import DataError
from data.images.augment import Encoded
from data.images.decode import reduction

# b samples, S image side

Decode = Callable[[list[Tensor], torch.device], list[Tensor]]  # encoded bytes to (3, H, W) uint8 on the device


def torchcodec() -> Decode:
    """Its decoder. Raises DataError where it is not installed."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise DataError(
            f"data.decode=gpu needs TorchCodec 0.16 or newer ({type(error).__name__}: {error})\n"
            "  pip install torchcodec, built for the CUDA of your torch; or data.decode=cpu"
        ) from None
    return lambda sources, device: decode_jpeg(sources, device=device)


def decode_rows(
    images: Tensor, encoded: Sequence[Encoded], reduced: bool, decode: Decode, device: torch.device
) -> tuple[Tensor, list[int]]:
    """`images` (b, S, S, 3) on the device, their encoded rows decoded; and the rows that were refused."""
    sources = [images[one.row].flatten()[: one.bytes] for one in encoded]
    found: list[Tensor | None]
    try:
        found = [*decode(sources, device)]
    except RuntimeError:  # one bad image costs the whole call: find it
        found = [decode_one(source, decode, device) for source in sources]
    out, refused = images.to(device), []
    for one, whole in zip(encoded, found, strict=True):
        if whole is None or tuple(whole.shape) != (3, *one.sides):
            refused.append(one.row)
        else:
            out[one.row] = crop(whole, one, images.shape[1], reduced).permute(1, 2, 0)
    return out, refused


def decode_one(source: Tensor, decode: Decode, device: torch.device) -> Tensor | None:
    try:
        return decode([source], device)[0]
    except RuntimeError:
        return None


def crop(whole: Tensor, one: Encoded, size: int, reduced: bool) -> Tensor:
    """The box at (3, S, S): averaged over 2, 4 or 8 pixels where the processes decode at that scale, then bilinear."""
    y, x, h, w = one.box
    part = whole[None, :, y : y + h, x : x + w].float()
    part = avg_pool2d(part, reduction(min(h, w), size if reduced else 0))
    part = interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0]
    part = part.round_().clamp_(0, 255).to(torch.uint8)
    return part.flip(2) if one.flip else part
