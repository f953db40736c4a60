"""List the images in a tree of folders, whose innermost folders are the classes, in a table that can be packed.

train/animals/cat/1.jpg            path,label
train/animals/dog/2.jpg     →      /data/train/animals/cat/1.jpg,cat
train/things/ship/3.jpg            /data/train/animals/dog/2.jpg,dog
                                   /data/train/things/ship/3.jpg,ship
"""

import csv
import io
import logging
from collections import Counter
from pathlib import Path

from data.checks import printable
from data.errors import DataError
from data.extras.sources.folders import images_below, loose_images, refuse_loop, refuse_undecodable, warn_of_others
from data.extras.sources.walk import class_folders_in
from data.files import write_atomically


def write_leaf_table(root: str, table: str) -> str:
    """List the images below a folder in a CSV table with the columns path and label, and return the table's path.

    The label of an image is the name of its folder, or the folder's path below `root` if several folders have that
    name. Raises DataError if `root` is not a folder of folders, or if the table already exists.
    """
    top = Path(root)
    if Path(table).exists():
        raise DataError(f"{table} already exists and will not be overwritten\n  remove it, or pass --output OTHER.yaml")
    if not top.is_dir() or not class_folders_in(top):
        raise DataError(f"{printable(root)}: --leaf-classes expects a folder with sub-folders\n  omit --leaf-classes")
    skipped: Counter[str] = Counter()
    images: list[Path] = []
    for name in class_folders_in(top, skipped):
        refuse_loop(top / name)
        images += images_below(top / name, skipped)
    warn_of_others(root, skipped)
    _, note = loose_images(top)
    if note:
        logging.getLogger(__name__).warning("%s: %s", root, note)
    for path in images:
        refuse_undecodable(str(path), path, "a table is text")
    folders = {path.parent.relative_to(top) for path in images}
    times = Counter(folder.name for folder in folders)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label"))
    for path in images:
        folder = path.parent.relative_to(top)
        rows.writerow((path.absolute(), folder.name if times[folder.name] == 1 else folder.as_posix()))
    write_atomically(Path(table), text.getvalue())
    return table
