"""Image data sets as users have them: how to make each, and the samples that every import command must find.

A case is a function that writes a set into a folder and returns (path, samples): {key: class} of its usable samples, or
None if every import command must reject the set. A class is a name, or an id if the set has no names. The keys of a tar
are those inside it.
"""

import json
import os
import pickle
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from tests.support.foreign_tars import WRITERS, header, old
from tests.support.tars import picture, tar_of

Class = str | int | tuple[str | int, ...]
Samples = Mapping[str, Class]
Case = Callable[[Path], tuple[Path, Samples | None]]
CLASSES = ("cat", "dog", "fox")


def image(number: int) -> bytes:
    """Return a distinct image for each number."""
    return picture(5 * number + 3)


def refused(case: Case) -> Case:
    """Return a case with the same files that must be rejected."""
    return lambda root: (case(root)[0], None)


# ------------------------------------------------------------------------------------------------ tars


def labelled_tar(
    labels: Sequence[bytes | None], samples: Sequence[Class | None] | None, extension: str = "cls"
) -> Case:
    """Return the case of a tar with these labels, and the class that each should give (None: excluded)."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        members = []
        for number, label in enumerate(labels):
            members.append((f"s{number}.jpg", image(number)))
            if label is not None:
                members.append((f"s{number}.{extension}", label))
        (root / "a.tar").write_bytes(tar_of(members))
        if samples is None:
            return root, None
        return root, {f"s{number}": found for number, found in enumerate(samples) if found is not None}

    return make


def npy(label: int) -> bytes:
    """Return an array as numpy saves it."""
    file = BytesIO()
    np.save(file, np.array(label))
    return file.getvalue()


def written_by(writer: str) -> Case:
    """Return the case of a tar by a writer of `foreign_tars`."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        members: list[tuple[str, bytes]] = []
        for number in range(6):
            members += [(f"d/{number}.jpg", image(number)), (f"d/{number}.cls", b"%d" % (number % 3))]
        (root / "a.tar").write_bytes(WRITERS[writer](members))
        return root, {f"d/{number}": number % 3 for number in range(6)}

    return make


def dotted_names(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar whose names have dots, so that webdataset finds no sample; only `pack tars` can rename them."""
    members = []
    for number in range(6):
        members += [(f"IMG.{number}.jpg", image(number)), (f"IMG.{number}.cls", b"%d" % (number % 3))]
    (root / "a.tar").write_bytes(tar_of(members))
    return root, None


def repeated_keys(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar in which two samples have one key."""
    members = []
    for number in (0, 1, 2, 3):
        members += [(f"s{number}.jpg", image(number)), (f"s{number}.cls", b"%d" % (number % 3))]
    members += [("s0.jpg", image(9)), ("s0.cls", b"2")]
    (root / "a.tar").write_bytes(tar_of(members))
    return root, {"s0": 0, "s1": 1, "s2": 2, "s3": 0, "s0 again": 2}


def two_kinds_of_images(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar whose samples have an additional image, which is not read."""
    members = []
    for number in range(6):
        members += [(f"s{number}.jpg", image(number)), (f"s{number}.png", b"x"), (f"s{number}.seg.png", b"x")]
        members.append((f"s{number}.cls", b"%d" % (number % 3)))
    (root / "a.tar").write_bytes(tar_of(members))
    return root, {f"s{number}": number % 3 for number in range(6)}


def parents_in_names(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar in which half of the names lead to a folder above it."""
    members = []
    for number in range(6):
        folder = "../" if number % 2 else ""
        members += [(f"{folder}s{number}.jpg", image(number)), (f"{folder}s{number}.cls", b"%d" % (number // 3))]
    (root / "a.tar").write_bytes(tar_of(members))
    return root, {"s0": 0, "s2": 0, "s4": 1}


def links_in_a_tar(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar with hard and symbolic links to images, which are not read."""
    members = []
    for number in range(4):
        members += [(f"s{number}.jpg", image(number)), (f"s{number}.cls", b"%d" % (number % 2))]
    links = header(b"l0.jpg", 0, b"1", link=b"s0.jpg") + header(b"l1.jpg", 0, b"2", link=b"s1.jpg")
    (root / "a.tar").write_bytes(links + old(members))
    return root, {f"s{number}": number % 2 for number in range(4)}


def labels_apart(root: Path) -> tuple[Path, Samples | None]:
    """Make a tar with all images first, then all labels."""
    images = [(f"s{number}.jpg", image(number)) for number in range(4)]
    labels = [(f"s{number}.cls", b"%d" % (number % 2)) for number in range(4)]
    (root / "a.tar").write_bytes(tar_of([*images, *labels]))
    return root, {f"s{number}": number % 2 for number in range(4)}


IDS = [b"0", b"1", b"2", b"0", b"1", b"2"]
NAMES = [name.encode() for name in (*CLASSES, *CLASSES)]
TARS: dict[str, Case] = {
    "ids": labelled_tar(IDS, [0, 1, 2, 0, 1, 2]),
    "ids in json": labelled_tar([b'{"label": %s}' % label for label in IDS], [0, 1, 2, 0, 1, 2], "json"),
    "ids as floats": labelled_tar([label + b".0" for label in IDS], [0, 1, 2, 0, 1, 2]),
    "ids after a byte order mark": labelled_tar([b"\xef\xbb\xbf" + label for label in IDS], [0, 1, 2, 0, 1, 2]),
    "several ids": labelled_tar([b"0 2", b"1", b"2", b"[0, 1]"], [(0, 2), 1, 2, (0, 1)]),
    "ids with a gap": labelled_tar([b"0", b"5", b"70000", b"0"], [0, 5, 70000, 0]),
    "names": labelled_tar(NAMES, [*CLASSES, *CLASSES]),
    "names in json": labelled_tar([json.dumps(name).encode() for name in CLASSES], [*CLASSES], "json"),
    "names without letters": labelled_tar(["🐱".encode(), b"!", b"+", b"!"], ["🐱", "!", "+", "!"]),
    "names with commas": labelled_tar([b"wolf, grey", b"cat", b"wolf, grey"], ["wolf, grey", "cat", "wolf, grey"]),
    "some ids, some names": labelled_tar([b"0", b"cat", b"1", b"dog"], [0, None, 1, None]),
    "one-hot vectors of three": labelled_tar([b"1 0 0", b"0 1 0", b"0 0 1", b"1 0 0"], None),
    "one-hot vectors of two": labelled_tar([b"1 0", b"0 1", b"0 1", b"1 0"], None),
    "one-hot vectors in json": labelled_tar([b"[0, 1, 0]", b"[1, 0, 0]", b"[0, 0, 1]"], None, "json"),
    "arrays": labelled_tar([npy(label) for label in (0, 1, 2)], None),
    "pickles": labelled_tar([pickle.dumps({"label": label}) for label in (0, 1, 2)], None),
    "UTF-16": labelled_tar([name.encode("utf-16") for name in CLASSES], None),
    "fractions": labelled_tar([b"0.5", b"0.25", b"0.75"], None),
    "negative ids": labelled_tar([b"-1", b"-1", b"-1"], None),
    "some without a label": labelled_tar([b"0", None, b"1", b"", b"1"], [0, None, 1, None, 1]),
    "some that cannot be read": labelled_tar([b"0", b"0.5", b"1", b"\x93NUMPY\xff", b"1"], [0, None, 1, None, 1]),
    "dots in names": dotted_names,
    "repeated keys": repeated_keys,
    "two kinds of images": two_kinds_of_images,
    "parents in names": parents_in_names,
    "links in a tar": links_in_a_tar,
    "labels apart": labels_apart,
    **{f"written by {writer}": written_by(writer) for writer in WRITERS},
}


# ------------------------------------------------------------------------------------------------ folders


def folder_of(names: Sequence[str], renamed: Mapping[str, str] | None = None) -> Case:
    """Return the case of a folder with these files; `renamed` are keys that differ from the file's name."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        samples = {}
        for number, name in enumerate(names):
            path = root / "photos" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image(number))
            samples[(renamed or {}).get(name, os.path.splitext(name)[0])] = name.partition("/")[0]
        return root / "photos", samples

    return make


PLAIN = ["cat/0.jpg", "cat/1.jpg", "dog/2.jpg", "dog/3.jpg"]


def with_others(others: Mapping[str, bytes | str | None]) -> Case:
    """Return the case of a plain folder with ignored files (bytes), links (text) and folders (None)."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        path, samples = folder_of(PLAIN)(root)
        for name, content in others.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                (path / name).mkdir()
            elif isinstance(content, str):
                (path / name).symlink_to(content)
            else:
                (path / name).write_bytes(content)
        return path, samples

    return make


def linked_folders(root: Path) -> tuple[Path, Samples | None]:
    """Make class folders that contain links to files and folders; one class folder is itself a link."""
    store = root / "store"
    for number, name in enumerate(("more/4.jpg", "more/deep/5.jpg", "6.jpg", "fox/7.jpg")):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(image(10 + number))
    path, _ = folder_of(PLAIN)(root)
    (path / "cat" / "more").symlink_to(store / "more")
    (path / "dog" / "6.jpg").symlink_to(store / "6.jpg")
    (path / "fox").symlink_to(store / "fox")
    expected = {"cat/0": "cat", "cat/1": "cat", "cat/more/4": "cat", "cat/more/deep/5": "cat", "fox/7": "fox"}
    return path, {**expected, "dog/2": "dog", "dog/3": "dog", "dog/6": "dog"}


def other_formats(suffix: str) -> Case:
    """Return the case of a class whose images have an unsupported format."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        path, _ = folder_of(PLAIN)(root)
        for file in (path / "dog").iterdir():
            file.rename(file.with_suffix(suffix))
        return path, None

    return make


NFD = unicodedata.normalize("NFD", "café")
FOLDERS: dict[str, Case] = {
    "plain": folder_of(PLAIN),
    "deep": folder_of(["cat/a/b/0.jpg", "cat/1.JPG", "dog/2.jpeg", "dog/c/3.Jpg"]),
    "equal stems": folder_of(
        ["cat/0.jpg", "cat/0.png", "cat/0.JPG", "dog/1.jpg"],
        {"cat/0.jpg": "cat/0_jpg", "cat/0.png": "cat/0_png", "cat/0.JPG": "cat/0_JPG"},
    ),
    "equal keys": refused(folder_of(["cat/a.b.jpg", "cat/a_b.jpg", "dog/1.jpg"])),
    "dots in names": folder_of(
        ["cat/v1.0.jpg", "cat/v1.1.jpg", "d.o.g/2.jpg"],
        {"cat/v1.0.jpg": "cat/v1_0"} | {"cat/v1.1.jpg": "cat/v1_1", "d.o.g/2.jpg": "d.o.g/2"},
    ),
    "classes without letters": folder_of(["🐱/0.jpg", "!/1.jpg", "+/2.jpg", "1/3.jpg", " /4.jpg"]),
    "classes in other scripts": folder_of([f"{NFD}/0.jpg", "Ünï/1.jpg", "火/2.jpg"]),
    "system folders": with_others(
        {name: b"thumb" for name in ("cat/@eaDir/0.jpg/T.jpg", "@eaDir/1.jpg", "#recycle/2.jpg", "$RECYCLE.BIN/3.jpg")}
    ),
    "hidden files": with_others(
        {"cat/._0.jpg": b"x", "cat/.DS_Store": b"x", ".git/x.jpg": b"x", "dog/Thumbs.db": b"x"}
    ),
    "broken links": with_others({"cat/9.jpg": "nowhere", "dog/loop": "..", "cat/self": "."}),
    "texts next to images": with_others({"cat/0.txt": b"a cat", "README.md": b"photos", "labels.csv": b"a,b\n1,2\n"}),
    "links": linked_folders,
    "an empty class": refused(with_others({"fox": None})),
    **{f"{suffix} images": other_formats(suffix) for suffix in (".tif", ".bmp", ".gif", ".ppm")},
}


# ------------------------------------------------------------------------------------------------ tables


def table_of(
    rows: Sequence[tuple[str, object]], samples: Samples | None, form: str = "csv", columns: str = "path,label"
) -> Case:
    """Return the case of a table with these paths and labels."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        (root / "im").mkdir()
        for number in range(6):
            (root / "im" / f"{number}.jpg").write_bytes(image(number))
        (root / "tables").mkdir()
        path = root / "tables" / f"t.{form}"
        names = columns.split(",")
        if form == "parquet":
            import pyarrow as pa
            from pyarrow import parquet

            parquet.write_table(
                pa.table({names[0]: [row[0] for row in rows], names[1]: [row[1] for row in rows]}), path
            )
        elif form == "jsonl":
            path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
        else:
            lines = [columns, *(f'{name},"{label}"' for name, label in rows)]
            path.write_text("\n".join(lines), encoding="utf-8-sig")
        return path, samples

    return make


def rows_of(labels: Sequence[object]) -> list[tuple[str, object]]:
    """Return a row for each label, with the path of an image."""
    return [(f"../im/{number}.jpg", label) for number, label in enumerate(labels)]


def keyed(labels: Sequence[Class]) -> Samples:
    """Return the samples of `rows_of`."""
    return {f"im/{number}": label for number, label in enumerate(labels)}


TABLES: dict[str, Case] = {
    "ids": table_of(rows_of([0, 1, 2, 0]), keyed([0, 1, 2, 0])),
    "names": table_of(rows_of(["cat", "dog", "cat", "fox"]), keyed(["cat", "dog", "cat", "fox"])),
    "floats": table_of(rows_of(["0.0", "1.0", "0.0", "2.0"]), keyed([0, 1, 0, 2])),
    "names without letters": table_of(rows_of(["🐱", "!", "+", "!"]), keyed(["🐱", "!", "+", "!"])),
    "several ids": table_of(rows_of(["0 2", "1", "2", "0 1"]), keyed([(0, 2), 1, 2, (0, 1)])),
    "truth values": table_of(rows_of(["True", "False", "True"]), keyed(["True", "False", "True"])),
    "truth values in parquet": table_of(rows_of([True, False, True]), keyed(["True", "False", "True"]), "parquet"),
    "ids in parquet": table_of(rows_of([0, 1, 2, 0]), keyed([0, 1, 2, 0]), "parquet"),
    "floats in parquet": table_of(rows_of([0.0, 1.0, 2.0, 0.0]), keyed([0, 1, 2, 0]), "parquet"),
    "lists in parquet": table_of(rows_of([[0, 2], [1], [2], [0]]), keyed([(0, 2), 1, 2, 0]), "parquet"),
    "one-hot lists in parquet": table_of(rows_of([[1, 0, 0], [0, 1, 0], [0, 0, 1]]), None, "parquet"),
    "json lines": table_of(rows_of(["cat", "dog", "cat"]), keyed(["cat", "dog", "cat"]), "jsonl", "file_name,label"),
    "one-hot vectors": table_of(rows_of(["1 0 0", "0 1 0", "0 0 1"]), None),
    "one-hot vectors of two": table_of(rows_of(["1 0", "0 1", "1 0"]), None),
    "fractions": table_of(rows_of(["0.5", "0.25", "0.5"]), None),
    "ids and names": table_of(rows_of(["0", "cat", "1"]), None),
    "a row without a label": table_of(rows_of(["0", "", "1"]), None),
    "a label that cannot be read": table_of(rows_of(["0", "0.5", "1"]), None),
    "the same file twice": table_of([*rows_of([0, 1, 0]), ("../im/0.jpg", 0)], None),
    "the same file under two spellings": table_of([*rows_of([0, 1, 0]), ("./../im/0.jpg", 0)], None),
    "a missing file": table_of([*rows_of([0, 1, 0]), ("../im/9.jpg", 0)], None),
    "other columns": table_of(rows_of([0, 1, 0]), keyed([0, 1, 0]), "csv", "filename,category"),
}


# ------------------------------------------------------------------------------------------------ parquet with images


def parquet_of(labels: Sequence[object], classes: Sequence[Class] | None) -> Case:
    """Return the case of a Parquet file with embedded images and these labels."""

    def make(root: Path) -> tuple[Path, Samples | None]:
        import pyarrow as pa
        from pyarrow import parquet

        images = [{"bytes": image(number), "path": None} for number in range(len(labels))]
        path = root / "t.parquet"
        parquet.write_table(pa.table({"image": images, "label": list(labels)}), path)
        if classes is None:
            return path, None
        return path, {f"t-{number:08d}": found for number, found in enumerate(classes)}

    return make


PARQUETS: dict[str, Case] = {
    "ids": parquet_of([0, 1, 2, 0], [0, 1, 2, 0]),
    "names": parquet_of(["cat", "dog", "cat"], ["cat", "dog", "cat"]),
    "floats": parquet_of([0.0, 1.0, 0.0], [0, 1, 0]),
    "truth values": parquet_of([True, False, True], ["True", "False", "True"]),
    "names without letters": parquet_of(["🐱", "!", "🐱"], ["🐱", "!", "🐱"]),
    "lists of ids": parquet_of([[0, 2], [1], [2]], [(0, 2), 1, 2]),
    "lists of names": parquet_of([["cat"], ["dog"], ["cat", "dog"]], ["cat", "dog", ("cat", "dog")]),
    "one-hot vectors": parquet_of([[1, 0, 0], [0, 1, 0], [0, 0, 1]], None),
    "one-hot vectors of two": parquet_of([[1, 0], [0, 1], [1, 0]], None),
    "fractions": parquet_of([0.5, 0.25, 0.5], None),
    "negative ids": parquet_of([-1, 0, 1], None),
    "a missing label": parquet_of([0, None, 1], None),
    "ids and names": parquet_of(["0", "cat", "1"], None),
}
