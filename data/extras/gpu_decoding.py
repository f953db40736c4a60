"""Decode, crop, resize and flip JPEGs on the GPU (`data.decode=gpu`), with nvJPEG through TorchCodec.

1. A decoding process reads a JPEG, checks its header, draws the crop box and the flip, and stores the encoded bytes in
   the image's row of the batch, together with an `Encoded`. It decodes an image itself if nvJPEG does not support it.
2. The loader passes all encoded rows of a micro-batch to the decoder in one call.
3. Each image is cropped to its box, averaged over 2, 4 or 8 pixels if a CPU process would have decoded it at that
   reduced scale, resized and flipped on the device.
4. Rows that the decoder rejects are returned to the loader.

This decoder has never run on a GPU (docs/design/decoding.md). On a machine without a GPU, TorchCodec uses the CPU.
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

Decode = Callable[..., list[Tensor]]  # list of encoded images, `device=` → list of (3, H, W) uint8 on the device


def torchcodec() -> Decode:
    """Return TorchCodec's JPEG decoder; raises DataError if TorchCodec is not installed."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise DataError(
            f"data.decode=gpu needs TorchCodec 0.16 or newer ({type(error).__name__}: {error})\n"
            "  install torchcodec for the CUDA version of your torch, or set data.decode=cpu"
        ) from None
    return decode_jpeg


class DeviceDecoder:
    """Decodes the encoded rows of a micro-batch on the model's device.

    With `reduced`, it averages pixels if a CPU process would have decoded the image at a reduced scale. Raises
    DataError if TorchCodec is not installed.
    """

    def __init__(self, reduced: bool):
        self.reduced = reduced
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.decode = torchcodec()

    def rows(self, images: Tensor, encoded: Sequence[Encoded]) -> tuple[Tensor, list[int]]:
        """Return `images` (b, S, S, 3) on the device, with encoded rows decoded, and the numbers of rejected rows."""
        # Only the first `bytes` bytes of a row are the JPEG; the rest is left over from an earlier batch.
        sources = []
        for jpeg in encoded:
            row_bytes = images[jpeg.row].flatten()
            sources.append(row_bytes[: jpeg.bytes])

        on_device = images.to(self.device, non_blocking=True)  # asynchronous, because the source is pinned
        rejected = []
        size = images.shape[1]
        for jpeg, image in zip(encoded, self.decoded(sources), strict=True):
            # If the sides differ from the header's, the box would select a different part of the image.
            if image is None or tuple(image.shape) != (3, *jpeg.sides):
                rejected.append(jpeg.row)
                continue
            y, x, h, w = jpeg.box
            part = image[None, :, y : y + h, x : x + w].float()
            # CPU processes decode a JPEG at a reduced scale, which averages blocks of pixels.
            if self.reduced:
                part = avg_pool2d(part, reduction(min(h, w), size))
            # Like cv2.INTER_LINEAR in `augment.fit`: half-pixel centres, no antialiasing.
            part = interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0]
            part = part.round_().clamp_(0, 255).to(torch.uint8)
            if jpeg.flip:
                part = part.flip(2)
            on_device[jpeg.row] = part.permute(1, 2, 0)
        return on_device, rejected

    def decoded(self, sources: list[Tensor]) -> Sequence[Tensor | None]:
        """Decode images to (3, H, W), with None for each rejected image.

        Raises OutOfMemoryError if the device has too little free memory.
        """
        try:
            return self.decode(sources, device=self.device)
        except torch.OutOfMemoryError:
            raise  # the GPU is out of memory; the images may be good
        except RuntimeError:
            if len(sources) == 1:
                return [None]
            # One bad image fails the whole call: decode the images separately to find it.
            images: list[Tensor | None] = []
            for source in sources:
                images += self.decoded([source])
            return images
