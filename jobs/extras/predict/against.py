"""Compares the predictions of two weights, A and B, for `patchline predict A SET --against B`.

    A  runs/small/pretrain: right for 101 of 150 images (67.33%, 95% interval 59.48% to 74.32%)
    B  runs/large/pretrain: right for 107 of 150 images (71.33%, 95% interval 63.64% to 77.97%)
    both right 95, only A 6, only B 12, neither 37
    B − A  +4.00 points, 95% interval -1.69 to +10.11 points, computed from the same images
    the difference is within chance: B alone is right for 12 images, A alone for 6; …

1. Refuse images without labels before the weights are loaded.
2. Agree on the names of the classes: predictions and labels are compared by name, so that models with the same classes
   in another order can be compared. Weights without names get those of the other weights, or of the set.
3. Count the images, and test the difference (pipeline/extras/paired_comparison.py).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError, UsageError
from data.index.document import load_index
from data.index.names import Names, agreed_names, preview
from data.index.shard import IMAGES
from jobs.extras.given_images import indexes_at
from pipeline.extras.paired_comparison import FEWEST_DISCORDANT, PairedOutcomes
from pipeline.values import counted

RIGHT = {(True, True): "both", (True, False): "A", (False, True): "B", (False, False): "neither"}


class ClassList(NamedTuple):
    """The number of classes of weights, and the known names, in the order of the model's outputs."""

    weights: str
    classes: int
    names: Names

    @property
    def labels(self) -> Names:
        """The name of each class; its id if the name is unknown."""
        return label_names(self.names, self.classes)


def label_names(names: Names, classes: int) -> Names:
    """Return the label of each class: its name, or its id if the name is unknown."""
    return names[:classes] + tuple(map(str, range(len(names), classes)))


def check_labels(paths: Sequence[str]) -> None:
    """Raise UsageError if none of these images can have a label. Does not import torch."""
    for path in map(Path, paths):
        indexes = indexes_at(path)
        for index in map(load_index, indexes):
            if index.classes or not index.samples:  # a set without samples is refused when it is read
                return
        has_images = path.suffix[1:].lower() in IMAGES
        if path.is_dir() and not indexes:
            has_images = not any(path.rglob("*.tar"))
        if not indexes and not has_images:
            return
    raise UsageError(
        f"--against compares which images are classified correctly, but {', '.join(paths)} has no labels\n"
        "  pass a labelled data set, for example runs/photos/parts/held-out; to make one from folders of images, run\n"
        "  python -m jobs pack folder FOLDER shards/test"
    )


def names_of_sets(paths: Sequence[str]) -> Names:
    """Return the class names of the data sets at these paths; () if unknown. Raises DataError if two sets disagree."""
    named = []
    for path in paths:
        for index in indexes_at(Path(path)):
            named.append((str(index), load_index(index).names))
    return agreed_names(named, "predict")


def agree(a: ClassList, b: ClassList, paths: Sequence[str]) -> tuple[Names, Names, list[str]]:
    """Return the class names to use for A and for B, and lines for people about assumptions.

    Raises DataError if the models have different classes, or if the set's labels would be ambiguous.
    """
    # 1. Both have names: these must be the same classes, in any order.
    if a.names and b.names:
        if Counter(a.labels) != Counter(b.labels):
            raise DataError(f"A and B have different classes, so they cannot be compared: {differing(a, b)}")
        lines = []
        if a.labels != b.labels:
            for path in map(Path, paths):
                indexes = indexes_at(path)
                if not indexes or not all(load_index(index).names for index in indexes):
                    raise DataError(
                        f"A and B number their classes differently, and {path} has no class names, so its labels are "
                        "ambiguous\n  pack or index it again with class names: --classes-of INDEX or --names FILE"
                    )
            lines.append("A and B number their classes differently; their predictions are compared by class name")
        repeated = [name for name, count in Counter(a.labels).items() if count > 1]
        if repeated:
            lines.append(f"classes with the same name count as one class: {preview(repeated)}")
        return a.names, b.names, lines

    # 2. At least one has only class ids: the number of classes must agree, and the numbering is trusted.
    if a.classes != b.classes:
        raise DataError(f"A and B have different classes, so they cannot be compared: {differing(a, b)}")
    if a.names or b.names:
        nameless, named = ("B", "A") if a.names else ("A", "B")
        names = a.names or b.names
        return names, names, [f"{nameless} has no class names; its classes are numbered like those of {named}"]
    names = names_of_sets(paths)
    if names:
        return names, names, ["A and B have no class names; their classes are numbered like those of the set"]
    return (), (), ["A and B have no class names, so their classes are compared by id"]


def differing(a: ClassList, b: ClassList) -> str:
    """Return the end of a message: the classes that only one of the weights has, and what was expected."""
    parts = []
    if a.classes != b.classes:
        parts.append(f"A has {counted(a.classes, 'class')}, B {b.classes:,}")
    if a.names and b.names:
        for name, labels, others in (("A", a.labels, b.labels), ("B", b.labels, a.labels)):
            only = list((Counter(labels) - Counter(others)).elements())
            if only:
                parts.append(f"only {name} has {preview(only)}")
    return (
        f"{'; '.join(parts)}\n  expected weights with the same classes: A is {a.weights}, B is {b.weights}\n"
        "  if the same classes only have other names, import one of them again with the names of the other: "
        "--names FILE"
    )


def check_known(file: str, classes: Sequence[str], known: frozenset[str]) -> None:
    """Raise DataError if an image has a class that the models lack: both would be wrong, whatever they predict."""
    for name in classes:
        if name not in known:
            raise DataError(
                f"{file} has the class {preview([name])}, which A and B do not have\n"
                f"  expected the classes of the weights: {preview(sorted(known))}\n"
                "  pack or index the set with the numbering of the weights' training set: --classes-of INDEX"
            )


def compared(outcomes: PairedOutcomes, weights: tuple[str, str], is_same: bool) -> dict[str, Any]:
    """Return the entry `comparison` of the document: numbers, and the conclusion in a sentence."""
    models = {}
    for name, path, right in zip("ab", weights, outcomes.right, strict=True):
        value, low, high = outcomes.accuracy(right)
        models[name] = {"weights": path, "right": right, "accuracy": value, "low": low, "high": high}
    low, high = outcomes.interval
    if is_same:
        low, high = 0.0, 0.0
    return {
        **models,
        "images": outcomes.images,
        "both": outcomes.both,
        "only_a": outcomes.only_a,
        "only_b": outcomes.only_b,
        "neither": outcomes.neither,
        "difference": outcomes.difference,
        "low": low,
        "high": high,
        "p_value": outcomes.p_value,
        "better": outcomes.better,
        "same_weights": is_same,
        "conclusion": conclusion(outcomes, is_same),
    }


def conclusion(outcomes: PairedOutcomes, is_same: bool) -> str:
    """Return one sentence: which model is better, or that the difference is within chance."""
    if is_same:
        return "A and B are the same weights"
    discordant = outcomes.only_a + outcomes.only_b
    if discordant == 0:
        return "no difference: A and B are right for the same images"
    ahead, behind = ("A", "B") if outcomes.only_a > outcomes.only_b else ("B", "A")
    most = max(outcomes.only_a, outcomes.only_b)
    verdict = f"{outcomes.better} is better" if outcomes.better else "the difference is within chance"
    noun = "image" if most == 1 else "images"
    text = f"{verdict}: {ahead} alone is right for {most:,} {noun}, "
    text += f"{behind} alone for {discordant - most:,}; "
    if discordant < FEWEST_DISCORDANT:
        return f"{text}fewer than {FEWEST_DISCORDANT} such images can never show which model is better"
    probability = "below 0.0001" if outcomes.p_value < 1e-4 else f"{outcomes.p_value:.2g}"
    return (
        f"{text}if both were equally good, a difference at least this large would occur with probability "
        f"{probability} (exact McNemar test)"
    )


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """Return the comparison as lines for people."""
    lines = []
    for name in "ab":
        model = comparison[name]
        lines.append(
            f"{name.upper()}  {model['weights']}: right for {model['right']:,} of "
            f"{comparison['images']:,} images ({model['accuracy']:.2%}, 95% interval {model['low']:.2%} to "
            f"{model['high']:.2%})"
        )
    lines.append(
        f"both right {comparison['both']:,}, only A {comparison['only_a']:,}, only B {comparison['only_b']:,}, "
        f"neither {comparison['neither']:,}"
    )
    if not comparison["same_weights"]:
        low, high = comparison["low"], comparison["high"]
        lines.append(
            f"B − A  {100 * comparison['difference']:+.2f} points, 95% interval {100 * low:+.2f} to "
            f"{100 * high:+.2f} points, computed from the same images"
        )
    lines.append(comparison["conclusion"])
    if comparison["better"]:
        lines.append("this is about these weights: with another seed, both recipes would give other weights")
    return lines
