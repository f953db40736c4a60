"""Implements `patchline predict`: write the most probable classes of each image to a CSV file and an HTML page.

    patchline predict runs/photos/pretrain new-photos/ --output new.csv

    file,label,score,label_2,score_2              and new.html: thumbnails with their labels
    new-photos/1.jpg,cat,0.91342,dog,0.07120

    patchline predict runs/photos/pretrain runs/photos/parts/held-out

    file,label,score,label_2,score_2,true_label   the page marks wrong predictions
    photos-0.tar:cat/7,dog,0.61342,cat,0.37120,cat

1. Read the images and apply the preprocessing recorded with the weights, or the evaluation default if there is none.
2. Compute the logits in batches. A score is the softmax probability of a class. If the head was trained with sigmoid
   cross-entropy, it is the sigmoid, and the scores of an image do not sum to 1.
3. Write both files atomically. Images that cannot be decoded are counted and get a row without labels.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from jobs.extras.conversion import class_names, verify
from jobs.extras.given_images import GivenImage, given_images
from jobs.extras.progress import ProgressMeter
from models.catalog import normalise
from pipeline.evaluation import any_weights
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

    @property
    def is_wrong(self) -> bool:
        """Return whether the most probable class is none of the sample's classes."""
        return bool(self.labels and self.true_labels) and self.labels[0] not in self.true_labels


def predict(weights: str, paths: list[str], table: Path, top: int, batch_size: int) -> dict[str, Any]:
    """Predict the classes of all images; write the table and the page, and return the predictions and a summary.

    Raises UsageError if the model has no classes, or DataError if no image can be decoded or a logit is not finite.
    """
    verification: list[str] = []
    verify(weights, verification.append)
    model = any_weights.load(weights, {}).eval()
    if not model.config.classes:
        raise UsageError(
            f"{weights} has no classification head, so it cannot predict classes\n"
            "  fine-tune these weights on labelled images first"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    names = class_names(weights)
    recorded = any_weights.recorded_preprocessing(weights, model.config.image_size)
    ops = recorded.ops if recorded is not None else f"resize({model.config.image_size})"
    is_sigmoid = recorded_loss(weights) == "sigmoid"

    rows: list[Prediction] = []
    progress = ProgressMeter("images")
    skipped: list[Path] = []
    images = decoded(given_images(paths, names=names, skipped=skipped), ops)
    while chunk := list(islice(images, batch_size)):
        pixels = [image for _, image, _ in chunk if image is not None]
        labels: Iterator[tuple[tuple[str, ...], tuple[float, ...]]] = iter(())
        if pixels:
            labels = most_probable(logits_of(model, np.stack(pixels), device), names, top, is_sigmoid)
        for given, image, problem in chunk:
            if image is None:
                rows.append(Prediction(given.name, problem=problem, true_labels=given.classes))
                continue
            thumbnail = page.jpeg(image) if len(rows) < MAX_THUMBNAILS else ""
            rows.append(Prediction(given.name, *next(labels), thumbnail, true_labels=given.classes))
        progress(len(rows))
    if not rows:
        raise DataError(f"{', '.join(paths)}: found no samples with images\n  expected tars or data sets with images")
    bad = [row for row in rows if row.problem]
    if len(bad) == len(rows):
        raise DataError(
            f"none of the {counted(len(bad), 'image')} can be decoded; the first is {bad[0].file}: {bad[0].problem}\n"
            "  expected intact images; restore them from their source"
        )
    write_table(rows, table, top)
    title = f"Predictions of {weights}"
    page.write_page(
        table.with_suffix(".html"), "predict.html", title=title, rows=rows[:MAX_THUMBNAILS], total=len(rows)
    )

    lines = verification
    if not names:
        lines.append("the weights have no class names, so labels are class ids")
    if recorded is None:
        lines.append(f"no preprocessing is recorded with the weights; used the evaluation default, {ops}")
    if bad:
        lines.append(f"skipped {counted(len(bad), 'undecodable image')}, for example {bad[0].file}: {bad[0].problem}")
    if skipped:
        lines.append(f"skipped {counted(len(skipped), 'file')} of other types, for example {skipped[0]}")
    predicted = Counter(row.labels[0] for row in rows if row.labels)
    common = [f"{name} {count:,}" for name, count in predicted.most_common(MAX_CLASSES_LISTED)]
    lines.append(f"predicted {counted(len(rows) - len(bad), 'image')}: {', '.join(common)}")
    labelled = [row for row in rows if row.labels and row.true_labels]
    if labelled:
        right = sum(not row.is_wrong for row in labelled)
        lines.append(f"right: {right:,} of {counted(len(labelled), 'labelled image')} ({right / len(labelled):.1%})")
    lines.append(f"written  {table}  {table.with_suffix('.html')}")
    images_of_document = []
    for row in rows:
        classes = [{"label": label, "score": score} for label, score in zip(row.labels, row.scores, strict=True)]
        images_of_document.append(
            {"file": row.file, "classes": classes, "true_labels": list(row.true_labels), "problem": row.problem}
        )
    return {
        "table": str(table),
        "page": str(table.with_suffix(".html")),
        "preprocessing": ops,
        "images": images_of_document,
        "report": lines,
    }


def decoded(images: Iterable[GivenImage], ops: str) -> Iterator[tuple[GivenImage, np.ndarray | None, str]]:
    """Yield each image, its pixels and its error; the pixels are (height, width, 3) uint8, or None after an error."""
    for image in images:
        try:
            yield image, preprocess(decode(image.encoded), ops), ""
        except BadImage as error:
            yield image, None, str(error)


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

    If any image is labelled, the last column has the classes of each image, separated by "|".
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    width = min(top, max(len(row.labels) for row in rows))
    header = ["file"]
    for number in range(1, width + 1):
        suffix = "" if number == 1 else f"_{number}"
        header += [f"label{suffix}", f"score{suffix}"]
    has_labels = any(row.true_labels for row in rows)
    writer.writerow([*header, "true_label"] if has_labels else header)
    for row in rows:
        cells = [row.file]
        for label, score in zip(row.labels, row.scores, strict=True):
            cells += [label, f"{score:.6g}"]
        cells += [""] * (len(header) - len(cells))
        if has_labels:
            cells.append("|".join(row.true_labels))
        writer.writerow(cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
