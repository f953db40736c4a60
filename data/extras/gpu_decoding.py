"""JPEGs decoded, cropped, resized and flipped where the model is: `data.decode=gpu`, nvJPEG through TorchCodec.

1. A decoding process reads a JPEG, checks its header, draws box and flip, and leaves the bytes in the image's row of
   the batch, with an `Encoded` beside it. What it cannot leave to nvJPEG it decodes as ever.
2. The loader hands all such rows of a micro-batch to the decoder in one call.
3. Each image is cropped to its box, averaged over 2, 4 or 8 pixels where the processes would have decoded at that
   scale, resized and flipped on the device.
4. Rows that the decoder refuses are given back to the loader.

It has never run on a GPU (docs/design/decoding.md); without one, TorchCodec decodes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from data.errors import DataError
from data.images.augment import Encoded
from data.images.decode import reduction

# b samples, H W sides of an encoded image, S image side

Decode = Callable[..., list[Tensor]]  # encoded bytes, and `device=`, to (3, H, W) uint8 on the device


def torchcodec() -> Decode:
    """Return the decoder of TorchCodec; raises DataError where it is not installed."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise DataError(
            f"data.decode=gpu needs TorchCodec 0.16 or newer ({type(error).__name__}: {error})\n"
            "  pip install torchcodec, built for the CUDA of your torch; or data.decode=cpu"
        ) from None
    return decode_jpeg


class DeviceDecoder:
    """Decodes the rows that were left encoded, where the model is; raises DataError without TorchCodec.

    `reduced` averages pixels where the processes would decode at a reduced scale.
    """

    def __init__(self, reduced: bool):
        self.reduced = reduced
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.decode = torchcodec()

    def rows(self, images: Tensor, encoded: Sequence[Encoded]) -> tuple[Tensor, list[int]]:
        """Return `images` (b, S, S, 3) on the device, their encoded rows decoded; and the rows that were refused."""
        # The rows lie in the loader's memory, padded by whatever stood there before: only the first bytes are the JPEG.
        sources = []
        for jpeg in encoded:
            row_bytes = images[jpeg.row].flatten()
            sources.append(row_bytes[: jpeg.bytes])

        on_device = images.to(self.device, non_blocking=True)  # from pinned memory
        refused = []
        size = images.shape[1]
        for jpeg, whole in zip(encoded, self.decoded(sources), strict=True):
            # Sides other than the header's would make the box another part of the image.
            if whole is None or tuple(whole.shape) != (3, *jpeg.sides):
                refused.append(jpeg.row)
                continue
            y, x, h, w = jpeg.box
            part = whole[None, :, y : y + h, x : x + w].float()
            # The processes decode a JPEG at a reduced scale, which averages the pixels that it merges.
            if self.reduced:
                part = avg_pool2d(part, reduction(min(h, w), size))
            # As cv2.INTER_LINEAR in `augment.fit`: half-pixel centres, no antialiasing.
            part = interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0]
            part = part.round_().clamp_(0, 255).to(torch.uint8)
            if jpeg.flip:
                part = part.flip(2)
            on_device[jpeg.row] = part.permute(1, 2, 0)
        return on_device, refused

    def decoded(self, sources: list[Tensor]) -> Sequence[Tensor | None]:
        """Return every image (3, H, W), None where it is refused. Raises OutOfMemoryError."""
        try:
            return self.decode(sources, device=self.device)
        except torch.OutOfMemoryError:
            raise  # of the GPU: it says nothing about the images
        except RuntimeError:
            if len(sources) == 1:
                return [None]
            # A bad image costs the whole call: each is decoded alone, to find it.
            images: list[Tensor | None] = []
            for source in sources:
                images += self.decoded([source])
            return images
