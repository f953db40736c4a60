"""Read TFRecord files, the format of data sets prepared by TensorFlow Datasets.

A TFRecord file is a sequence of records: length (8 bytes), checksum of the length (4), the record, checksum of the
record (4). Each record here is a `tf.train.Example`, a message with named lists of bytes, floats or integers
(tensorflow/core/example/*.proto).

    records(file)                 b"\\n\\x9c…", b"\\n\\x81…", …
    features(record)              {"image": [b"\\xff\\xd8…"], "label": [3], "filename": [b"train-17.jpg"]}

Checksums are not verified, because TensorFlow's masked CRC32C is slow in pure Python. Truncated files are detected.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import IO, TYPE_CHECKING

from data.errors import DataError
from data.extras.known_sets.vtab_tasks import Values

if TYPE_CHECKING:
    from google.protobuf.message import Message

LENGTH = struct.Struct("<QI")  # header of a record: its length and the checksum of the length
CHECKSUM_BYTES = 4
MAX_BYTES = 1 << 30  # limit for one record, because a damaged length could request any amount of memory


def records(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the records of an open file; raises DataError if the file ends within a record."""
    number = 0
    while header := file.read(LENGTH.size):
        size = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else MAX_BYTES + 1
        content = file.read(size) if size <= MAX_BYTES else b""
        checksum = file.read(CHECKSUM_BYTES)
        if len(content) != size or len(checksum) != CHECKSUM_BYTES:
            raise DataError(f"{name}: truncated or damaged in record {number:,}; prepare the set again")
        yield content
        number += 1


def features(record: bytes, name: str) -> dict[str, Values]:
    """Parse a `tf.train.Example` into its named lists; raises DataError if the record is not an Example."""
    from google.protobuf.message import DecodeError

    try:
        example = example_type().FromString(record)
    except DecodeError as error:
        raise DataError(f"{name}: a record is not a tf.train.Example ({error}); prepare the set again") from None
    lists: dict[str, Values] = {}
    for key, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        lists[key] = list(getattr(feature, kind).value) if kind else []
    return lists


@cache
def example_type() -> type[Message]:
    """Build the message type of `tf.train.Example` from its description, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("patchline.Example"))


# In protobuf, `map<string, Feature>` is a repeated message of a key and a value.
EXAMPLE = """
name: "example.proto" package: "patchline" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 oneof_index: 0 label: LABEL_OPTIONAL type_name: ".patchline.BytesList" }
  field { name: "float_list" number: 2 oneof_index: 0 label: LABEL_OPTIONAL type_name: ".patchline.FloatList" }
  field { name: "int64_list" number: 3 oneof_index: 0 label: LABEL_OPTIONAL type_name: ".patchline.Int64List" }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: ".patchline.Feature" }
  }
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".patchline.Features.FeatureEntry" }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type_name: ".patchline.Features" }
}
"""
