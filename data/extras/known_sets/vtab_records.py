"""TFRecord files, in which TensorFlow Datasets keeps the sets that it has prepared.

A TFRecord file is a row of records: length (8 bytes), its checksum (4), the record, its checksum (4). Each record here
is a `tf.train.Example`, a message of named lists of bytes, floats or integers (tensorflow/core/example/*.proto).

    records(file)                 b"\\n\\x9c…", b"\\n\\x81…", …
    features(record)              {"image": [b"\\xff\\xd8…"], "label": [3], "filename": [b"train-17.jpg"]}

The checksums are not compared: TensorFlow's is slow to compute without its own code. A file that is cut short is seen.
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

LENGTH = struct.Struct("<QI")  # of a record, and the checksum of this length
CHECKSUM_BYTES = 4
MOST_BYTES = 1 << 30  # of a record: a damaged length would ask for any memory


def records(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Give the records of an open file; raises DataError where it ends within one."""
    number = 0
    while header := file.read(LENGTH.size):
        size = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else MOST_BYTES + 1
        content = file.read(size) if size <= MOST_BYTES else b""
        checksum = file.read(CHECKSUM_BYTES)
        if len(content) != size or len(checksum) != CHECKSUM_BYTES:
            raise DataError(f"{name}: cut short or damaged in record {number:,}; prepare the set again")
        yield content
        number += 1


def features(record: bytes, name: str) -> dict[str, Values]:
    """Return the lists of a `tf.train.Example`; raises DataError where the record is none."""
    from google.protobuf.message import DecodeError

    try:
        example = example_type().FromString(record)
    except DecodeError as error:
        raise DataError(f"{name}: a record that is no tf.train.Example ({error}); prepare the set again") from None
    lists: dict[str, Values] = {}
    for key, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        lists[key] = list(getattr(feature, kind).value) if kind else []
    return lists


@cache
def example_type() -> type[Message]:
    """Return the message type of `tf.train.Example`, which protobuf makes of its description."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("patchline.Example"))


# `map<string, Feature>` is, to protobuf, a repeated message of a key and a value.
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
