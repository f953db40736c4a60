"""Names that an attacker puts into buckets, records, manifests, claims and tars."""

import io
import tarfile
from itertools import islice
from pathlib import Path

from tests.support.shards import digits

# Names that would write outside the folder of a run.
HOSTILE_NAMES = [
    "..",
    ".",
    "",
    "../outside",
    "a/../../outside",
    "a/..",
    "./a",
    "a//b",
    "//abs",
    "/abs",
    "a/",
    "a\0b",
    "a/" + 256 * "b",
    128 * "é",
    "a\ud800",
    None,
    7,
    ["a"],
]

CONTROLS = "a\x1b[2J\x07\nok: well\u202e\x9b"
ESCAPED = r"a\x1b[2J\x07\nok: well\u202e\x9b"  # as it must be shown on terminals and pages


def tar_with_control_characters(folder: Path) -> Path:
    """Write a tar of a broken and a good image of class 7, named CONTROLS and CONTROLS2; return its path.

    A page shows the last 24 characters of a name below an image: CONTROLS is shorter.
    """
    (image,) = (sample.image for sample in islice(digits(train=True, image_size=16), 1))
    path = folder / "theirs.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for key, content in ((CONTROLS, b"no jpeg"), (f"{CONTROLS}2", image)):
            for extension, body in (("jpg", content), ("cls", b"7")):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    return path
