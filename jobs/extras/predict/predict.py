"""Implements `patchline predict`: write the most probable classes of each image to a CSV file and an HTML page.

    patchline predict runs/photos/pretrain new-photos/ --output new.csv

    file,label,score,label_2,score_2              and new.html: thumbnails with their labels
    new-photos/1.jpg,cat,0.91342,dog,0.07120

    patchline predict runs/photos/pretrain runs/photos/parts/held-out

    file,label,score,label_2,score_2,true_label   the page marks wrong predictions
    photos-0.tar:cat/7,dog,0.61342,cat,0.37120,cat

    patchline predict runs/small/pretrain runs/photos/parts/held-out --against runs/large/pretrain

    file,label,score,…,true_label,other_label,other_score,right      also which weights are better (against.py)
    photos-0.tar:cat/7,dog,0.61342,…,cat,cat,0.80123,B               the page shows the images that only one gets right

1. Read the images and apply the preprocessing recorded with the weights, or the evaluation default if there is none.
2. Compute the logits in batches. A score is the softmax probability of a class. If the head was trained with sigmoid
   cross-entropy, it is the sigmoid, and the scores of an image do not sum to 1.
3. Write both files atomically. Images that cannot be decoded are counted and get a row without labels.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import models
from data.errors import DataError, UsageError
from data.extras.pages import page
from data.files import write_atomically
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.names import preview
from jobs.extras.conversion import class_names, verify
from jobs.extras.given_images import GivenImage, given_images
from jobs.extras.predict.against import RIGHT, ClassList, agree, check_known, compared, comparison_lines, names_of_sets
from jobs.extras.progress import ProgressMeter
from models.catalog import normalise
from pipeline.evaluation import any_weights
from pipeline.extras.paired_comparison import PairedOutcomes
from pipeline.extras.recorded_origin import recorded_loss
from pipeline.values import counted

MAX_CLASSES_LISTED = 5  # classes in the summary
MAX_THUMBNAILS = 200  # on the page, about 4 KB each


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image; no classes if the image cannot be decoded."""

    file: str
    labels: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    thumbnail: str = ""  # base64 JPEG; "" beyond the first MAX_THUMBNAILS images
    problem: str = ""  # why the image cannot be decoded
    true_labels: tuple[str, ...] = ()  # the sample's classes in its data set; () if unknown
    other_label: str = ""  # the most probable class by the other weights; "" if there are none
    other_score: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Return whether the most probable class is none of the sample's classes."""
        return bool(self.labels and self.true_labels) and self.labels[0] not in self.true_labels

    @property
    def right(self) -> str:
        """Which of two weights are right: "both", "A", "B" or "neither"; "" without a label or other weights."""
        if not (self.labels and self.true_labels and self.other_label):
            return ""
        return RIGHT[not self.is_wrong, self.other_label in self.true_labels]


@dataclass(frozen=True)
class Predictor:
    """Weights that are ready to predict classes."""

    weights: str
    model: "models.Model"
    names: tuple[str, ...]  # class names, in the order of the outputs; () if unknown
    ops: str  # preprocessing
    is_sigmoid: bool
    device: torch.device
    remarks: tuple[str, ...]  # lines for people

    @property
    def class_list(self) -> ClassList:
        return ClassList(self.weights, self.model.config.classes, self.names)

    def classify(self, pixels: Sequence[np.ndarray], top: int) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
        """Return the labels and scores of the `top` most probable classes for each image (h, w, 3).

        Raises DataError if a logit is not finite.
        """
        if not pixels:
            return []
        try:
            logits = logits_of(self.model, np.stack(pixels), self.device)
        except DataError as error:
            raise DataError(f"{self.weights}: {error}") from None
        return list(most_probable(logits, self.names, top, self.is_sigmoid))


def load_predictor(weights: str) -> Predictor:
    """Load weights and everything that is recorded about them; raises UsageError if the model has no classes."""
    remarks: list[str] = []
    verify(weights, remarks.append)
    model = any_weights.load(weights, {}).eval()
    if not model.config.classes:
        raise UsageError(
            f"{weights} has no classification head, so it cannot predict classes\n"
            "  fine-tune these weights on labelled images first"
        )
    recorded = any_weights.recorded_preprocessing(weights, model.config.image_size)
    ops = recorded.ops if recorded is not None else f"resize({model.config.image_size})"
    if recorded is None:
        remarks.append(f"no preprocessing is recorded with the weights; used the evaluation default, {ops}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_sigmoid = recorded_loss(weights) == "sigmoid"
    return Predictor(weights, model.to(device), class_names(weights), ops, is_sigmoid, device, tuple(remarks))


def named_alike(predictors: list[Predictor], paths: list[str]) -> tuple[list[Predictor], list[str]]:
    """Return the predictors with class names that can be compared with labels, and lines about assumptions."""
    if len(predictors) == 2:
        first, second = predictors
        names, other_names, lines = agree(first.class_list, second.class_list, paths)
        return [replace(first, names=names), replace(second, names=other_names)], lines
    [predictor] = predictors
    if predictor.names:
        return predictors, []
    # Weights without names number their classes as the set does, like in `evaluate`.
    names = names_of_sets(paths)
    if not names:
        return predictors, ["the weights have no class names, so labels are class ids"]
    lines = ["the weights have no class names, so labels are those of the set"]
    return [replace(predictor, names=names)], lines


def is_same(a: Predictor, b: Predictor) -> bool:
    """Return whether both compute the same predictions from the same tensors."""
    if (a.ops, a.names, a.model.config) != (b.ops, b.names, b.model.config):
        return False
    tensors = b.model.state_dict()
    return all(torch.equal(tensor, tensors[name]) for name, tensor in a.model.state_dict().items())


def predict(
    weights: str, paths: list[str], table: Path, top: int, batch_size: int, other: str | None = None
) -> dict[str, Any]:
    """Predict the classes of all images; write the table and the page, and return the predictions and a summary.

    `other` are weights to compare with. Raises UsageError if a model has no classes, or DataError if no image can be
    decoded, a logit is not finite, or the two models cannot be compared.
    """
    predictors = [load_predictor(path) for path in (weights, other) if path is not None]
    predictors, assumptions = named_alike(predictors, paths)
    first = predictors[0]
    known = frozenset(first.class_list.labels)

    rows: list[Prediction] = []
    thumbnails = 0
    progress = ProgressMeter("images")
    skipped: list[Path] = []
    all_ops = [predictor.ops for predictor in predictors]
    images = decoded(given_images(paths, names=first.names, skipped=skipped), all_ops)
    while chunk := list(islice(images, batch_size)):
        outputs = []
        for number, predictor in enumerate(predictors):
            pixels = [versions[number] for _, versions, _ in chunk if versions]
            outputs.append(iter(predictor.classify(pixels, top if number == 0 else 1)))
        for given, versions, problem in chunk:
            if not versions:
                rows.append(Prediction(given.name, problem=problem, true_labels=given.classes))
                continue
            row = Prediction(given.name, *next(outputs[0]), true_labels=given.classes)
            if other is not None:
                check_known(given.name, given.classes, known)
                (other_label,), (other_score,) = next(outputs[1])
                row = replace(row, other_label=other_label, other_score=other_score)
            # The page of a comparison shows the images for which only one model is right.
            if thumbnails < MAX_THUMBNAILS and (other is None or row.right in ("A", "B")):
                row = replace(row, thumbnail=page.jpeg(versions[0]))
                thumbnails += 1
            rows.append(row)
        progress(len(rows))
    if not rows:
        raise DataError(f"{', '.join(paths)}: found no samples with images\n  expected tars or data sets with images")
    bad = [row for row in rows if row.problem]
    if len(bad) == len(rows):
        raise DataError(
            f"none of the {counted(len(bad), 'image')} can be decoded; the first is {bad[0].file}: {bad[0].problem}\n"
            "  expected intact images; restore them from their source"
        )
    labelled = [row for row in rows if row.labels and row.true_labels]
    comparison = None
    if other is not None:
        if not labelled:
            raise DataError(
                f"{', '.join(paths)}: no image that can be decoded has a label, so the weights cannot be compared\n"
                "  pass a labelled data set, for example runs/photos/parts/held-out"
            )
        right_a = np.array([row.right in ("both", "A") for row in labelled])
        right_b = np.array([row.right in ("both", "B") for row in labelled])
        comparison = compared(PairedOutcomes.of(right_a, right_b), (weights, other), is_same(*predictors))
    write_table(rows, table, top)
    shown = [row for row in rows if row.right in ("A", "B")] if comparison else rows
    page.write_page(
        table.with_suffix(".html"),
        "predict.html",
        title=f"Predictions of {weights}" if other is None else f"Predictions of {weights} (A) and {other} (B)",
        rows=shown[:MAX_THUMBNAILS],
        total=len(shown),
        comparison=None if comparison is None else comparison_lines(comparison),
        conclusion=None if comparison is None else comparison["conclusion"],
    )

    lines = []
    for name, predictor in zip("AB", predictors, strict=False):
        lines += [remark if other is None else f"{name}: {remark}" for remark in predictor.remarks]
    lines += assumptions
    if bad:
        lines.append(f"skipped {counted(len(bad), 'undecodable image')}, for example {bad[0].file}: {bad[0].problem}")
    if skipped:
        lines.append(f"skipped {counted(len(skipped), 'file')} of other types, for example {skipped[0]}")
    if comparison is not None:
        unlabelled = len(rows) - len(bad) - len(labelled)
        if unlabelled:
            lines.append(f"not compared: {counted(unlabelled, 'image')} without a label")
        several = sum(len(row.true_labels) > 1 for row in labelled)
        if several:
            lines.append(f"{counted(several, 'image')} with several labels: a prediction is right if it is any of them")
        lines += comparison_lines(comparison)
    else:
        predicted = Counter(row.labels[0] for row in rows if row.labels)
        common = [f"{name} {count:,}" for name, count in predicted.most_common(MAX_CLASSES_LISTED)]
        lines.append(f"predicted {counted(len(rows) - len(bad), 'image')}: {', '.join(common)}")
        if labelled:
            right = sum(not row.is_wrong for row in labelled)
            share = right / len(labelled)
            lines.append(f"right: {right:,} of {counted(len(labelled), 'labelled image')} ({share:.1%})")
            unknown = [row for row in labelled if known.isdisjoint(row.true_labels)]
            if unknown:
                example = preview(unknown[0].true_labels[:1])
                lines.append(
                    f"{len(unknown):,} of them have classes that the weights do not have, for example {example}, and "
                    "count as wrong"
                )
    lines.append(f"written  {table}  {table.with_suffix('.html')}")
    images_of_document = []
    for row in rows:
        classes = [{"label": label, "score": score} for label, score in zip(row.labels, row.scores, strict=True)]
        image: dict[str, Any] = {"file": row.file, "classes": classes}
        if comparison is not None:
            image["other"] = {"label": row.other_label, "score": row.other_score} if row.labels else None
            image["right"] = row.right
        images_of_document.append({**image, "true_labels": list(row.true_labels), "problem": row.problem})
    document: dict[str, Any] = {
        "table": str(table),
        "page": str(table.with_suffix(".html")),
        "preprocessing": first.ops,
        "images": images_of_document,
        "report": lines,
    }
    if comparison is not None:
        document["comparison"] = comparison
    return document


def decoded(images: Iterable[GivenImage], all_ops: Sequence[str]) -> Iterator[tuple[GivenImage, list[np.ndarray], str]]:
    """Yield each image, its pixels (height, width, 3) uint8 after each of `all_ops`, and its error.

    There are no pixels after an error.
    """
    for image in images:
        try:
            pixels = decode(image.encoded)
            versions = {ops: preprocess(pixels, ops) for ops in set(all_ops)}
        except BadImage as error:
            yield image, [], str(error)
            continue
        yield image, [versions[ops] for ops in all_ops], ""


def logits_of(model: "models.Model", pixels: np.ndarray, device: torch.device) -> Tensor:
    """Return the logits (images, classes) for pixels (images, h, w, 3). Raises DataError if any logit is not finite."""
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    with torch.inference_mode():
        logits = model(normalise(batch, model.config, torch.float32, device)).float().cpu()
    if not logits.isfinite().all():
        raise DataError(
            "the model's outputs contain NaN or infinity\n  expected weights from a training run that did not diverge"
        )
    return logits


def most_probable(
    logits: Tensor, names: tuple[str, ...], top: int, is_sigmoid: bool
) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Yield the labels and scores of the `top` most probable classes for each row of logits (images, classes)."""
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    # Sort stably: for equal scores, the class with the smaller id comes first.
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :top]
    for classes, values in zip(order.tolist(), scores.gather(1, order).tolist(), strict=True):
        yield tuple(names[number] if number < len(names) else str(number) for number in classes), tuple(values)


def write_table(rows: list[Prediction], path: Path, top: int) -> None:
    """Write one row per image to a CSV file; an undecodable image has empty labels.

    If any image is labelled, a column has the classes of each image, separated by "|". After a comparison, the last
    columns have the label and score of the other weights, and which weights are right.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    width = min(top, max(len(row.labels) for row in rows))
    header = ["file"]
    for number in range(1, width + 1):
        suffix = "" if number == 1 else f"_{number}"
        header += [f"label{suffix}", f"score{suffix}"]
    has_labels = any(row.true_labels for row in rows)
    is_comparison = any(row.other_label for row in rows)
    last = ["true_label"] if has_labels else []
    if is_comparison:
        last += ["other_label", "other_score", "right"]
    writer.writerow(header + last)
    for row in rows:
        cells = [row.file]
        for label, score in zip(row.labels, row.scores, strict=True):
            cells += [label, f"{score:.6g}"]
        cells += [""] * (len(header) - len(cells))
        if has_labels:
            cells.append("|".join(row.true_labels))
        if is_comparison:
            cells += [row.other_label, f"{row.other_score:.6g}" if row.labels else "", row.right]
        writer.writerow(cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
