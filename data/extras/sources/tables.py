"""Samples of tables: paths and labels in a CSV or parquet file, or parquet that holds the images themselves.

Labels of tables are class ids, or names of classes; a table whose labels are names gives them ids in the order of the
alphabet.

    path,label
    a/1.jpg,tabby cat            Sample("a/1", Path("a/1.jpg"), (1,), "jpg")
    a/2.jpg,pug             →    Sample("a/2", Path("a/2.jpg"), (0,), "jpg"), with the names ("pug", "tabby cat")
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.checks import printable
from data.errors import DataError
from data.index.names import NO_NAMES, Names, NoLabel, agreed_names, ids_of, parse_labels, preview
from data.sources.folders import ListedFile, files_of, read_files
from data.sources.samples import Sample, kind_of

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")  # of image parquet, the first that there is
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls")
TABLE_PATH_COLUMNS = ("path", "file_name", "filename", "image")  # of a table of paths; the second is Hugging Face's
TABLE_LABEL_COLUMNS = ("label", "labels", "cls", "class", "category")


# ---------------------------------------------------------------------------------------------------------- path tables


def path_table(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, *, unlabelled: bool = False
) -> Iterator[Sample]:
    """Give samples of a CSV or parquet file with columns `path` and `label` (or `labels`), relative to `root`.

    A label is a class id, or several of them with spaces or commas between, or a list; or a class name, or a list of
    them, whose ids are those of `table_classes`. Raises DataError where a column is missing, a label is none or a file
    is no image; `root` is by default the table's own folder. Of an `unlabelled` table the paths alone are read.
    """
    path = Path(path)
    names, labels = table_columns(path, unlabelled=unlabelled)
    ids = NO_NAMES if unlabelled else ids_of(classes_in(path, labels))
    entries = []
    for name, label in zip(names, labels, strict=True):
        if unlabelled:
            entries.append(ListedFile(name, None))
            continue
        try:
            entries.append(ListedFile(name, parse_labels(label_text(label), ids)))
        except ValueError as error:
            raise DataError(f"{path}: {printable(name)}: {error}") from None
    yield from read_files(path.parent if root is None else root, entries)


def table_classes(path: str | os.PathLike[str]) -> Names:
    """Return the class names of a table whose labels are texts, sorted; none where they are ids."""
    _, labels = table_columns(Path(path))
    return classes_in(Path(path), labels)


def table_columns(path: Path, *, unlabelled: bool = False) -> tuple[list[str], list[object]]:
    """Read the paths and the labels of a table of paths; raises DataError where it lacks a column.

    Of an `unlabelled` table every label is None.
    """
    rows: list[dict[str, object]]
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with naming_parquet(path):
            rows = parquet.read_table(path).to_pylist()
    else:
        try:
            # utf-8-sig, because Excel begins a file with a byte order mark, which would be read as part of a name.
            with open(path, newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file))
        except IsADirectoryError:
            raise DataError(f"{path} is a folder\n  expected a CSV or parquet file of paths and labels") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    # A line of more cells than there are columns has its rest under None.
    columns = [str(column) for column in rows[0] if column is not None] if rows else []
    label_column = first_of(TABLE_LABEL_COLUMNS, columns)
    path_column = first_of(TABLE_PATH_COLUMNS, columns)
    if path_column is None or (label_column is None and not unlabelled):
        wanted = "a column path" if unlabelled else "columns path and label"
        raise DataError(
            f"{path}: expected {wanted}, found {', '.join(columns) or 'none'}\n"
            "  a CSV begins with the line path,label; then comes a line for each image, as cat/1.jpg,cat"
        )
    names = []
    labels = []
    for row in rows:
        names.append(str(row[path_column]))
        labels.append(row[label_column] if label_column is not None and not unlabelled else None)
    return names, labels


def classes_in(path: Path, labels: Iterable[object]) -> Names:
    """Return the names in a column of labels, sorted; none where all are ids. Raises DataError where there are both."""
    first_id: object = None
    names: set[str] = set()
    for label in labels:
        text = label_text(label)
        try:
            parse_labels(text)
        except NoLabel as error:
            # A cell that is a number and yet no id, as −1 or NaN, is not a name.
            if isinstance(label, str | list):
                names.update(error.texts)
        else:
            if first_id is None:
                first_id = label
    # Numbered by their names, ids and names would meet in one class; and a single name is more likely a slip.
    if names and first_id is not None:
        raise DataError(
            f"{path}: some labels are class ids ({first_id}), others are names ({preview([min(names)])})\n"
            "  expected ids in every row, or names in every row: write the one or the other"
        )
    return tuple(sorted(names))


def label_text(label: object) -> bytes:
    """Return a cell of a column of labels as a label file would hold it."""
    # A CSV has only text: parquet's numbers and lists of them read the same as `7` and `[3, 17]`.
    if isinstance(label, list):
        return json.dumps(label, ensure_ascii=False, default=str).encode()
    return str(label).encode() if label is not None else b""


# -------------------------------------------------------------------------------------------------------- image parquet


class ImageParquet:
    """A parquet file of images: its columns, and the class names that its schema has for ids.

    Raises DataError where pyarrow cannot read it, or where a column is missing.
    """

    def __init__(self, path: Path, *, unlabelled: bool = False):
        from pyarrow import parquet

        with naming_parquet(path):
            schema = parquet.read_schema(path)
        image_column = first_of(IMAGE_COLUMNS, schema.names)
        label_column = first_of(LABEL_COLUMNS, schema.names) or ""
        is_unusable = not image_column or not (label_column or unlabelled)
        if is_unusable:
            wanted = "a column image" if unlabelled else "columns image and label"
            raise DataError(f"{path}: expected {wanted}, found {', '.join(schema.names)}")
        self.path = path
        self.image_column = image_column or ""
        self.label_column = label_column
        # Hugging Face's `datasets` describes its columns in the schema; a list of labels has its ClassLabel one level
        # below.
        try:
            features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
            feature = features[label_column]
            names = feature.get("names", feature.get("feature", {}).get("names", ()))
        except (ValueError, KeyError, TypeError, AttributeError):
            names = ()
        self.names: Names = tuple(map(str, names))

    def rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Give the rows, each by column."""
        from pyarrow import parquet

        with naming_parquet(self.path):
            # A few rows at a time: a file may hold more images than fit the memory.
            for batch in parquet.ParquetFile(self.path).iter_batches(256, columns=columns):
                yield from batch.to_pylist()


def image_parquet(source: str | os.PathLike[str], *, unlabelled: bool = False) -> Iterator[Sample]:
    """Give samples of Hugging Face image parquet (img2dataset's too): a column of {bytes, path} and one of class ids.

    Labels that are texts have the ids of `parquet_classes`. Raises DataError where a column is missing, an image is not
    embedded or a label is none. Of an `unlabelled` set the images alone are read.
    """
    ids: Mapping[str, int] | None = NO_NAMES if unlabelled else None
    for path in files_of(source, "*.parquet"):
        file = ImageParquet(path, unlabelled=unlabelled)
        columns = [file.image_column] if unlabelled else [file.image_column, file.label_column]
        if ids is None:
            # Names in the schema are those of ids; only where the labels are texts do the names give the ids.
            ids = NO_NAMES if file.names else ids_of(parquet_classes(source))
        stem = path.stem.replace(".", "_")
        for row_number, row in enumerate(file.rows(columns)):
            image = row[file.image_column]
            encoded = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(encoded, bytes):
                found = f"a {type(image).__name__}"
                if isinstance(image, dict) and "bytes" in image:
                    found = "a path instead of bytes"
                elif isinstance(image, dict):
                    found = f"no key 'bytes' but {', '.join(image)}"
                raise DataError(
                    f"{path}: row {row_number} holds {found}; embed the images first\n"
                    f"  expected encoded images in the column {file.image_column}: bytes, or bytes and path"
                )
            labels: tuple[int, ...] | None = None
            try:
                if not unlabelled:
                    labels = parse_labels(label_text(row[file.label_column]), ids)
            except ValueError as error:
                raise DataError(f"{path}: row {row_number}: {error}") from None
            yield Sample(f"{stem}-{row_number:08d}", encoded, labels, kind_of(encoded))


def parquet_classes(source: str | os.PathLike[str]) -> Names:
    """Return the class names of image parquet: those of its schema, or its labels where they are texts; otherwise none.

    Raises DataError where two files of a folder name them differently.
    """
    files = []
    described = []
    for path in files_of(source, "*.parquet"):
        file = ImageParquet(path)
        files.append(file)
        described.append((str(path), file.names))
    names = agreed_names(described, str(source))
    if names:
        return names
    labels: set[str] = set()
    for file in files:
        column = (row[file.label_column] for row in file.rows([file.label_column]))
        labels.update(classes_in(file.path, column))
    return tuple(sorted(labels))


@contextmanager
def naming_parquet(path: Path) -> Iterator[None]:
    """Raise DataError, which names the file, where pyarrow cannot read it."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        # An error of the operating system has a number, and says enough; pyarrow's own of a torn file has none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}: not a whole parquet file ({str(error).splitlines()[0]}); copy it again") from None


def first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of these names that is a column of the table, or None."""
    for name in names:
        if name in columns:
            return name
    return None
