"""What a submitted job takes along: the checkout, how large it is, and the same request as a command of Ray's own.

>>> measure(Path("/home/user/patchline"))
{"jobs/cluster": 61460, "docs/storage.md": 14804, …}
"""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from pathspec import PathSpec

from data.errors import UsageError
from jobs.cluster.ray import EXCLUDES

MIB = 2**20
UPLOAD_LIMIT_BYTES = 100 * MIB  # of the Jobs API, which answers 413 above it
IGNORE_FILES = (".gitignore", ".rayignore")  # Ray reads both in every folder, for what lies below that folder


class RuntimeEnv(TypedDict):
    """What a job takes along: a folder, less what is excluded, and environment variables."""

    working_dir: str
    excludes: list[str]
    env_vars: dict[str, str]


class JobRequest(TypedDict):
    """What the Jobs API is asked, besides the command."""

    submission_id: str
    metadata: dict[str, str]
    runtime_env: RuntimeEnv


def measure(root: Path) -> dict[str, int]:
    """Return the bytes of all that Ray would ship from `root`, before compression, by entry of its first two levels.

    Raises UsageError, naming the largest, when that is more than the Jobs API takes.
    """
    sizes: Counter[str] = Counter()

    def walk(folder: Path, excludes: list[tuple[Path, PathSpec]]) -> None:
        for name in IGNORE_FILES:
            if (folder / name).is_file():
                patterns = PathSpec.from_lines("gitignore", (folder / name).read_text().splitlines())
                excludes = [*excludes, (folder, patterns)]
        for path in folder.iterdir():
            # As Ray does: a pattern that ends with a slash matches what lies in a folder, and never the folder itself.
            if any(patterns.match_file(path.relative_to(base)) for base, patterns in excludes):
                continue
            if path.is_dir():
                walk(path, excludes)
            elif path.is_file():
                entry = "/".join(path.relative_to(root).parts[:2])
                sizes[entry] += path.stat().st_size

    walk(root, [(root, PathSpec.from_lines("gitignore", EXCLUDES))])
    if sizes.total() > UPLOAD_LIMIT_BYTES:
        largest = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.most_common(5))
        raise UsageError(
            f"the checkout is {sizes.total() / MIB:.0f} MiB, Ray takes {UPLOAD_LIMIT_BYTES / MIB:.0f}\n"
            f"largest: {largest}\n"
            f"move them out of {root}, or name them in .rayignore"
        )
    return dict(sizes)


def equivalent(address: str, request: JobRequest, command: Sequence[str]) -> str:
    """Return the `ray job submit` that does the same (its own quoting mangles braces in the command)."""
    runtime_env: dict[str, object] = {**request["runtime_env"]}
    del runtime_env["working_dir"]  # an option of its own
    options = {
        "--address": address,
        "--submission-id": request["submission_id"],
        "--working-dir": ".",
        "--metadata-json": json.dumps(request["metadata"]),
        "--runtime-env-json": json.dumps(runtime_env),
    }
    words = ["ray", "job", "submit"]
    for option, value in options.items():
        words += [option, value]
    return shlex.join([*words, "--", *command])
