"""TFRecord files are read as TensorFlow writes them, and truncated files are rejected."""

import struct
from io import BytesIO

import pytest

from data.errors import DataError
from data.extras.known_sets.vtab_records import MAX_BYTES, records

pytestmark = pytest.mark.quick

CONTENTS = [b"one", b"", b"three" * 20, b"four"]


def framed(content: bytes) -> bytes:
    """Return a record with its length and two checksums, which the reader ignores."""
    return struct.pack("<QI", len(content), 1) + content + b"\x02\x00\x00\x00"


def test_records_are_yielded_in_order() -> None:
    assert list(records(BytesIO(b"".join(map(framed, CONTENTS))), "f")) == CONTENTS
    assert list(records(BytesIO(), "f")) == []


@pytest.mark.parametrize("number", range(4))
def test_truncated_file_raises_an_error_with_the_record(number: int) -> None:
    before = b"".join(map(framed, CONTENTS[:number]))
    last = framed(CONTENTS[number])
    for cut in range(1, len(last)):
        given = []
        with pytest.raises(DataError, match=rf"^f: truncated or damaged in record {number}; prepare the set again$"):
            for content in records(BytesIO(before + last[:cut]), "f"):
                given.append(content)
        assert given == CONTENTS[:number]


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 2**63])
def test_damaged_length_does_not_allocate_memory(size: int) -> None:
    with pytest.raises(DataError, match="in record 1;"):
        list(records(BytesIO(framed(b"one") + struct.pack("<QI", size, 1) + b"x" * 100), "f"))
