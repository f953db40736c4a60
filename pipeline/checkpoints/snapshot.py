"""The state of a worker in host memory, as the bytes of the file that a save writes.

In:  the fragment ("head.bias", 5, {"master": (5,), "exp_avg": (5,), "exp_avg_sq": (5,)}), and the memory of the save
     before
Out: the same memory, which now is a safetensors file with "head.bias|master|5", "head.bias|exp_avg|5", …
"""

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from data.files import DISK_BLOCK


def copied(fragments: Iterable[tuple[str, int, Mapping[str, Tensor]]], memory: Tensor) -> Tensor:
    """Copy this worker's fragments into host memory that is kept from save to save, and return it: bytes (n,), uint8.

    A fragment is (parameter, its first element here, flat fp32 views by kind: "master", "exp_avg", …). Where the memory
    has another size than the file will have, new memory is returned.
    """
    views: dict[str, Tensor] = {}
    for name, start, tensors in fragments:
        for kind, view in tensors.items():
            views[f"{name}|{kind}|{start}"] = view
    # The header is made here, because safetensors' own writer would copy all of the state a second time.
    header, spans = safetensors_header(views)
    header_bytes = len(header)
    total_bytes = header_bytes + sum(view.nbytes for view in views.values())
    if memory.numel() != total_bytes:
        memory = host_memory(total_bytes)
    memory[:header_bytes] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    data = memory[header_bytes:].view(torch.float32)
    for key, view in views.items():
        data[spans[key]].copy_(view.detach())
    return memory


def host_memory(size: int) -> Tensor:
    """Return so many bytes of host memory, pinned where there is a GPU, from which a disk can be written directly."""
    # The copy from a GPU would be staged once more in memory that is not pinned.
    memory = torch.empty(size + DISK_BLOCK, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    first = -memory.data_ptr() % DISK_BLOCK
    return memory[first : first + size]


def safetensors_header(views: dict[str, Tensor]) -> tuple[bytes, dict[str, slice]]:
    """Return the head of a safetensors file that holds these flat fp32 views one after the other.

    Returns it with where each view's elements lie in the data behind it. The format is 8 bytes of length, little
    endian, and so much JSON (https://huggingface.co/docs/safetensors).
    """
    described = {}
    spans = {}
    first_byte = 0
    for key, view in views.items():
        assert view.dtype == torch.float32 and view.dim() == 1, (key, view.dtype, view.shape)
        end_byte = first_byte + view.nbytes
        described[key] = {"dtype": "F32", "shape": [view.numel()], "data_offsets": [first_byte, end_byte]}
        spans[key] = slice(first_byte // 4, end_byte // 4)
        first_byte = end_byte
    text = json.dumps(described).encode()
    # Padded to 8 bytes, so that the data behind it can be viewed as fp32 in place.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans
