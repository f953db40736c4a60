"""The mapping of a source's class numbers, and the selection of classes."""

import pytest

from data.errors import DataError
from data.extras.sources.numbering import Numbering, kept_ids, number

pytestmark = pytest.mark.quick

CRANES = ("crane", "gull", "crane", "owl")  # two classes with the same name, as in ImageNet


@pytest.mark.parametrize(
    ("names", "keep", "classes", "expected"),
    [
        (CRANES, None, None, None),
        (CRANES, ["crane"], None, [0, 2]),
        (CRANES, [3, "gull"], None, [1, 3]),
        (CRANES, [0], None, [0]),
        ((), [6, 0], 7, [0, 6]),
        ((), [6], None, [6]),  # the number of classes is unknown
        ((), [7], 7, r"^s: keep contains class 7, but there are 7 classes \(0 … 6\)$"),
        ((), [-1], 7, r"^s: keep contains class -1, but there are 7 classes \(0 … 6\)$"),
        (CRANES, [4], None, r"^s: keep contains class 4, but there are 4 classes \(0 … 3\)$"),
        (
            CRANES,
            ["stork"],
            None,
            "^s: keep contains 'stork', but this source has no such class\n  expected some of its 4 classes: 'cra",
        ),
        (
            (),
            ["stork"],
            7,
            "^s: keep contains 'stork', but this source has no such class\n  its class names are unknown",
        ),
    ],
)
def test_classes_are_kept_by_id_or_name(names, keep, classes, expected) -> None:
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            kept_ids(names, keep, "s", classes)
    else:
        assert kept_ids(names, keep, "s", classes) == expected


@pytest.mark.parametrize(
    ("numbering", "labels", "expected"),
    [
        (Numbering(), [7, 7], (7, 7)),
        (Numbering(known=5), [4, 0], (4, 0)),
        (Numbering(known=5), [], ()),
        (Numbering(known=5), [5], "label 5, but there are 5 class names\n  expected labels from 0 to 4"),
        (Numbering(known=8), [2, 9, 3], "label 9, but there are 8 class names\n  expected labels from 0 to 7"),
        (Numbering(ids={1: 0, 2: 0, 4: 3}), [1, 2, 3, 4], (0, 3)),  # two classes are merged, one is excluded
        (Numbering(ids={1: 0}), [2], ()),
    ],
)
def test_labels_are_renumbered_and_out_of_range_labels_refused(numbering, labels, expected) -> None:
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            numbering.labels(labels, "key")
    else:
        assert numbering.labels(labels, "key") == expected


def test_renaming_merges_classes_but_equal_names_of_the_source_stay_separate():
    merged = number(("cat", "kitty", "dog"), rename={"kitty": "cat"})
    assert merged.names == ("cat", "dog")
    assert merged.ids == {0: 0, 1: 0, 2: 1}
    assert merged.labels((1, 2, 0), "a") == (0, 1)
    cranes = ("crane", "heron", "crane")
    assert number(cranes).ids is None
    assert number(cranes, cranes).ids is None
    with pytest.raises(DataError, match=r"1 of its 1 classes are not in the class list: 'crane'"):
        number(("crane",), ("heron", "crane", "crane"))
    with pytest.raises(DataError, match=r"sample a has label 3, but there are 2 class names"):
        number((), ("a", "b")).labels((3,), "a")
