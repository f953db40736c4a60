"""Read samples from tables: image paths and labels in a CSV or Parquet file, or Parquet files with embedded images.

Parquet files with images may be on the Hugging Face Hub (remote_files.py).

The labels are class ids or class names. Class names are numbered in alphabetical order.

    path,label
    a/1.jpg,tabby cat            Sample("a/1", Path("a/1.jpg"), (1,), "jpg")
    a/2.jpg,pug             →    Sample("a/2", Path("a/2.jpg"), (0,), "jpg"), with the names ("pug", "tabby cat")
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from data.checks import printable
from data.errors import DataError
from data.extras.sources.folders import ListedFile, files_of, read_files
from data.extras.sources.remote_files import RemoteParquet, remote_parquet
from data.extras.sources.samples import Sample, kind_of
from data.index.names import NO_NAMES, Names, NoLabel, agreed_names, ids_of, parse_labels, preview

# Possible names of columns; the first name that a table has is used.
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")  # in Parquet with embedded images
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls")
TABLE_PATH_COLUMNS = ("path", "file_name", "filename", "image")  # in a table of paths; Hugging Face uses file_name
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # other than commas
TABLE_LABEL_COLUMNS = ("label", "labels", "cls", "class", "category")


# ---------------------------------------------------------------------------------------------------------- path tables


def path_table(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, *, unlabelled: bool = False
) -> Iterator[Sample]:
    """Yield the samples of a CSV or Parquet file with the columns `path` and `label` (or `labels`).

    Paths are relative to `root`, by default the folder of the table. A label is a class id, several ids separated by
    spaces or commas, a list of ids, a class name, or a list of class names; `table_classes` defines the ids of names.
    With `unlabelled=True`, only the paths are read. Raises DataError if a column is missing, if a label is invalid, or
    if a file is not an image.
    """
    path = Path(path)
    entries = table_entries(path, *table_columns(path, unlabelled=unlabelled), unlabelled=unlabelled)
    yield from read_files(path.parent if root is None else root, entries)


def table_entries(
    path: Path, names: Sequence[str], labels: Sequence[object], *, unlabelled: bool = False
) -> list[ListedFile]:
    """Return the rows of a table as listed files; raises DataError for an invalid label."""
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
    return entries


def table_classes(path: str | os.PathLike[str]) -> Names:
    """Return the sorted class names of a table; an empty tuple if its labels are ids."""
    _, labels = table_columns(Path(path))
    return classes_in(Path(path), labels)


def table_columns(path: Path, *, unlabelled: bool = False) -> tuple[list[str], list[object]]:
    """Read the paths and labels of a table; raises DataError if a column is missing.

    With `unlabelled=True`, every label is None.
    """
    rows: list[dict[str, object]]
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with naming_parquet(path):
            rows = parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":  # such as metadata.jsonl of Hugging Face's image folders
        rows = json_lines(path)
    else:
        try:
            # utf-8-sig because Excel writes a byte order mark, which would become part of the first column's name.
            with open(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, strict=True)
                rows = list(reader)
        except IsADirectoryError:
            raise DataError(f"{path} is a folder\n  expected a CSV or Parquet file of paths and labels") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        # Without `strict`, a quote that is never closed would swallow all following lines.
        except csv.Error as error:
            raise DataError(
                f"{path}: not a valid CSV after line {reader.line_num} ({error})\n"
                "  expected every quoted cell to end with a quote and a comma; correct the quotes"
            ) from None
    # csv.DictReader stores the extra cells of a too long line under the key None.
    columns = [str(column) for column in rows[0] if column is not None] if rows else []
    label_column = first_of(TABLE_LABEL_COLUMNS, columns)
    path_column = first_of(TABLE_PATH_COLUMNS, columns)
    if path_column is None or (label_column is None and not unlabelled):
        wanted = f"a column of paths ({', '.join(TABLE_PATH_COLUMNS)})"
        if not unlabelled:
            wanted += f" and one of labels ({', '.join(TABLE_LABEL_COLUMNS)})"
        if len(columns) == 1:
            # One column whose name has a separator: Excel writes semicolons in many languages.
            separator = next((name for character, name in SEPARATORS.items() if character in columns[0]), None)
            if separator is not None:
                raise DataError(
                    f"{path}: the columns are separated by {separator}: {printable(columns[0])}\n"
                    "  expected commas: save it again as a CSV with commas"
                )
        raise DataError(
            f"{path}: expected {wanted}, found {', '.join(columns) or 'no columns'}\n"
            "  the first line of a CSV names its columns, for example path,label; every further line describes one "
            "image, for example cat/1.jpg,cat"
        )
    names = []
    labels = []
    for number, row in enumerate(rows, 1):
        # A line of a CSV may end early, and an object of a .jsonl may lack an entry.
        if row.get(path_column) is None:
            raise DataError(f"{path}: row {number} has no {path_column}\n  add it, or remove the row")
        names.append(str(row[path_column]))
        labels.append(row.get(label_column) if label_column is not None and not unlabelled else None)
    return names, labels


def json_lines(path: Path) -> list[dict[str, object]]:
    """Return the objects of a .jsonl file; raises DataError for a line that is not a JSON object."""
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(
                    f'{path}: line {number} is not a JSON object, such as {{"file_name": "1.jpg", "label": 0}}'
                )
            rows.append(row)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}: line {number} is not JSON ({error})") from None
    return rows


def classes_in(path: Path | RemoteParquet, labels: Iterable[object]) -> Names:
    """Return the sorted class names in a column of labels; an empty tuple if all labels are ids.

    Raises DataError if the column contains both names and ids.
    """
    first_id: object = None
    names: set[str] = set()
    for label in labels:
        text = label_text(label)
        try:
            parse_labels(text)
        except NoLabel as error:
            # A number that is not a valid id, such as −1 or NaN, is not a name either.
            if isinstance(label, str | list | bool):
                names.update(error.texts)
        else:
            if first_id is None:
                first_id = label
    # If ids were numbered like names, an id and a name could refer to the same class; and a single name among ids is
    # probably a mistake.
    if names and first_id is not None:
        raise DataError(
            f"{path}: some labels are class ids ({first_id}), others are names ({preview([min(names)])})\n"
            "  expected ids in every row, or names in every row"
        )
    return tuple(sorted(names))


def label_text(label: object) -> bytes:
    """Convert a cell of a label column to the content of a label file."""
    # Numbers and lists in Parquet become the same text as in a CSV: `7` and `[3, 17]`.
    if isinstance(label, bool):  # class names, as in a CSV
        return str(label).encode()
    if isinstance(label, list):
        return json.dumps(label, ensure_ascii=False, default=str).encode()
    return str(label).encode() if label is not None else b""


# -------------------------------------------------------------------------------------------------------- image parquet


class ImageParquet:
    """A Parquet file with embedded images: its columns, and the class names from its schema.

    Raises DataError if pyarrow cannot read the file, or if a column is missing.
    """

    def __init__(self, path: Path | RemoteParquet, *, unlabelled: bool = False):
        from pyarrow import parquet

        with naming_parquet(path), opened(path) as file:
            schema = parquet.read_schema(file)
        image_column = first_of(IMAGE_COLUMNS, schema.names)
        label_column = first_of(LABEL_COLUMNS, schema.names) or ""
        is_unusable = not image_column or not (label_column or unlabelled)
        if is_unusable:
            wanted = "a column image" if unlabelled else "columns image and label"
            raise DataError(
                f"{path}: expected {wanted}, found {', '.join(schema.names)}\n"
                f"  rename the columns: images can be called {', '.join(IMAGE_COLUMNS)}, and labels "
                f"{', '.join(LABEL_COLUMNS)}"
            )
        self.path = path
        self.image_column = image_column or ""
        self.label_column = label_column
        # Hugging Face `datasets` describes the columns in the schema metadata; for a list of labels, ClassLabel is one
        # level deeper.
        try:
            features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
            feature = features[label_column]
            names = feature.get("names", feature.get("feature", {}).get("names", ()))
        except (ValueError, KeyError, TypeError, AttributeError):
            names = ()
        self.names: Names = tuple(map(str, names))

    def rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries with the given columns."""
        from pyarrow import parquet

        with naming_parquet(self.path), opened(self.path, whole=self.image_column in columns) as file:
            # Read a few rows at a time, because the images of a file may not fit into memory.
            for batch in parquet.ParquetFile(file).iter_batches(256, columns=columns):
                yield from batch.to_pylist()


@contextmanager
def opened(path: Path | RemoteParquet, *, whole: bool = False) -> Iterator[Path | BufferedReader]:
    """Context manager that yields a local path, or an open remote file; with `whole`, downloads a remote file first."""
    if isinstance(path, Path):
        yield path
        return
    with path.downloaded() if whole else path.by_range() as file:
        yield file


def parquet_files(source: str | os.PathLike[str]) -> Sequence[Path | RemoteParquet]:
    """Return the Parquet files of a folder, pattern or URL; raises DataError if there are none."""
    if "://" in str(source):
        return remote_parquet(str(source))
    return files_of(source, "*.parquet")


def image_parquet(source: str | os.PathLike[str], *, unlabelled: bool = False) -> Iterator[Sample]:
    """Yield the samples of Parquet files with embedded images, as written by Hugging Face `datasets` and img2dataset.

    The image column contains {bytes, path} or bytes, and the label column contains class ids or names;
    `parquet_classes` defines the ids of names. With `unlabelled=True`, only the images are read. Raises DataError if a
    column is missing, if an image is not embedded, or if a label is invalid.
    """
    ids: Mapping[str, int] | None = NO_NAMES if unlabelled else None
    used: Counter[str] = Counter()  # how often each file name occurs: a pattern may match files of several folders
    for path in parquet_files(source):
        file = ImageParquet(path, unlabelled=unlabelled)
        columns = [file.image_column] if unlabelled else [file.image_column, file.label_column]
        if ids is None:
            # If the schema has class names, the labels are ids. Otherwise, text labels are numbered by their names.
            ids = NO_NAMES if file.names else ids_of(parquet_classes(source))
        stem = path.stem.replace(".", "_")
        used[stem] += 1
        if used[stem] > 1:
            stem += f"_{used[stem]}"
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
                    f"{path}: row {row_number} contains {found}; embed the images first\n"
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
    """Return the class names of Parquet files with images: from the schema, or else from the text labels.

    The result is empty if the files contain neither. Raises DataError if the files of a folder have different class
    names.
    """
    files = []
    described = []
    for path in parquet_files(source):
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
def naming_parquet(path: Path | RemoteParquet) -> Iterator[None]:
    """Context manager that converts errors from pyarrow to a DataError with the name of the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        # Errors of the operating system have an errno and a clear message; pyarrow's errors for damaged files do not.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}: not a complete Parquet file ({str(error).splitlines()[0]}); copy it again") from None


def first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of these names that is a column; None if none of them is."""
    for name in names:
        if name in columns:
            return name
    return None
