"""The labels of one sample, parsed and checked against its set: what training, evaluation and the doctor accept."""

from __future__ import annotations

from data.images.decode import BadImage
from data.shards.tar import parse_labels


def read_labels(raw: bytes, classes: int, most: int) -> tuple[int, ...]:
    """Parse the label bytes of a sample into class ids below `classes`, `most` of them at most.

    Raises BadImage, as a broken image would, with a reason that groups well.
    """
    try:
        labels = parse_labels(raw)
    except ValueError:
        raise BadImage("no label") from None
    if max(labels) >= classes:
        raise BadImage(f"label not below {classes}")
    if len(labels) > most:
        raise BadImage(f"more labels than data.max_labels={most}")
    return labels
