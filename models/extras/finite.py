"""Find NaN and infinity in a safetensors file with numpy alone, because importing torch takes more than a second.

A safetensors file is 8 bytes with the header's length, the header, and the tensors:

    {"head.weight": {"dtype": "F32", "shape": [10, 32], "data_offsets": [0, 1280]}, "__metadata__": …}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.checks import refuse_not_finite

CHUNK = 1 << 20  # values checked at a time, so that they stay in the processor's cache
# dtype of a tensor → unsigned integer of its size, and the bits of its exponent: if all are set, the value is not
# finite. numpy has no bfloat16, so the bits are compared instead of the values.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def check_finite_file(path: Path) -> None:
    """Raise ValueError listing the tensors of a file with non-finite values; skip files that cannot be parsed.

    A damaged file is skipped, because loading it raises an error that says what is wrong.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > size - 8:
            return
        try:
            header: Mapping[str, Any] = json.loads(file.read(header_bytes))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            places = {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return
    counts: dict[str, tuple[int, int]] = {}
    for name, (dtype, begin, end) in places.items():
        if dtype in EXPONENTS and 0 <= begin < end <= size - 8 - header_bytes:
            bad, values = not_finite(path, dtype, 8 + header_bytes + begin, end - begin)
            if bad:
                counts[name] = (bad, values)
    refuse_not_finite(counts, len(places))


def not_finite(path: Path, dtype: str, offset: int, size: int) -> tuple[int, int]:
    """Return how many values of a tensor in a file are not finite, and how many it has."""
    integer, exponent = EXPONENTS[dtype]
    values = size // np.dtype(integer).itemsize
    bits = np.memmap(path, dtype=integer, mode="r", offset=offset, shape=(values,))
    mask = bits.dtype.type(exponent)
    bad = 0
    for begin in range(0, values, CHUNK):
        bad += int(np.count_nonzero((bits[begin : begin + CHUNK] & mask) == mask))
    return bad, values
