"""Copies the files that workers write on their own node to the driver, if nodes and driver share no storage.

A stage's folder then has the same path on every node, but it is a separate folder on each.

1. Before the workers start, `NodeFiles.begin` prepares the folders on every node: the attempt's folder, empty folders
   of earlier attempts, and the few files that attempts pass to the next one. It also detects whether the node's folder
   is the driver's own after all; then nothing must be copied.
2. With every report, the agent sends new, changed or longer files, which `NodeFiles.look` returns:

       Change("attempts/attempt-000001/rank-00003.json", b'{"rank": 3, …', is_appended=False, mark=(311, 1764…))
       Change("metrics.jsonl", b'{"kind": "train", …}\n', is_appended=True, mark=(81733, 0))

3. `apply_changes` writes them into the driver's folders, under the same names.
4. The driver acknowledges each written change by its `mark`. Only then does the node count it as sent: a lost answer
   loses no file, and no line of a log is sent twice.

There are two kinds of files:
- `rank-*` of the attempt, and the files carried between attempts, are sent completely after every change;
- log.txt, metrics.jsonl and TensorBoard's files are appended to, by several nodes and the driver, so only the new part
  is sent. The node records its position in `sent.json`, also for later attempts.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.checks import check_file_name
from data.files import temporary_name
from pipeline.monitoring.telemetry import append_whole

# Version of a file. Complete files: size in bytes, mtime in ns. Appended files: number of bytes sent, 0.
Mark = tuple[int, int]

SENT = "sent.json"  # in the stage's folder on a node: bytes sent of each appended file
TOKEN = "driver-token"  # in the attempt's folder: a node that finds the driver's token shares storage with the driver
LOGS = ("log.txt", "metrics.jsonl")  # in the stage's folder; several nodes may append lines
TENSORBOARD = "tensorboard"
# Maximum bytes of a file in one report. The rest of an appended file follows in the next report. Of a longer complete
# file only the end is sent, because the stacks are at the end of a worker's log.
LARGEST_BYTES = 1 << 20
# The mtime has a resolution of up to 10 ms: a file read just after a change may have changed again.
SETTLED_NS = 1_000_000_000


@dataclass(frozen=True)
class Change:
    """A file on a node that the driver does not have yet, or has in an older version."""

    name: str  # relative to the stage's folder
    content: bytes
    is_appended: bool  # append the content to the driver's file instead of replacing the file
    mark: Mark


# ------------------------------------------------------------------------ on a node


class NodeFiles:
    """Finds changed files in the folders of one attempt and its stage on one node."""

    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.stage = attempt.parents[1]
        self.carried: list[str] = []  # names, relative to the stage's folder, of the files carried between attempts
        self.sent: dict[str, Mark] = {}  # by name: the last version that the driver has acknowledged
        self.settled: set[str] = set()  # names of complete files that had not just changed when they were read
        self.grown: dict[str, int] = {}  # by name: bytes of an appended file that the driver has, over all attempts

    def begin(self, token: str, carried: Mapping[str, bytes | None], earlier: Iterable[str]) -> bool:
        """Prepare the folders for the workers; return False without doing so if the driver's folders are shared.

        `carried` contains the files that attempts pass to the next one, None for a missing file. `earlier` contains
        the folder names of the stage's earlier attempts.
        """
        with suppress(OSError):
            if (self.attempt / TOKEN).read_text() == token:
                return False
        # An earlier agent of this attempt may have prepared the folder and then been killed.
        is_new = not self.attempt.exists()
        self.attempt.mkdir(parents=True, exist_ok=True)
        for name in earlier:
            (self.attempt.parent / check_file_name(name, "the driver", folders=False)).mkdir(exist_ok=True)
        self.carried = [check_file_name(name, "the driver") for name in carried]
        for name, content in carried.items():
            if not is_new:
                continue
            if content is None:
                (self.stage / name).unlink(missing_ok=True)
            else:
                _replace(self.stage / name, content)

        # How much of the appended files earlier attempts have sent.
        try:
            self.grown = json.loads((self.stage / SENT).read_text())
        except (OSError, ValueError):
            # The first attempt with a worker on this node: existing files were written by a driver that ran here.
            for path in self._growing():
                with suppress(OSError):
                    self.grown[str(path.relative_to(self.stage))] = path.stat().st_size
            self._keep_grown()
        return True

    def look(self) -> list[Change]:
        """Return the changes that the driver has not acknowledged yet."""
        changes = []
        # Complete files. A file may be deleted or replaced at this moment: the next call finds it.
        for path in [*sorted(self.attempt.glob("rank-*")), *(self.stage / name for name in self.carried)]:
            name = str(path.relative_to(self.stage))
            with suppress(OSError), path.open("rb") as file:
                before_reading_ns = time.time_ns()
                state = os.fstat(file.fileno())
                mark = (state.st_size, state.st_mtime_ns)
                if self.sent.get(name) == mark and name in self.settled:
                    continue
                file.seek(max(0, state.st_size - LARGEST_BYTES))
                changes.append(Change(name, file.read(LARGEST_BYTES), False, mark))
                if before_reading_ns - state.st_mtime_ns > SETTLED_NS:
                    self.settled.add(name)
                else:
                    self.settled.discard(name)

        # Appended files: send the new part.
        for path in self._growing():
            name = str(path.relative_to(self.stage))
            known = self.grown.setdefault(name, 0)
            with suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Shorter than what was sent: the file was replaced.
                if size < known:
                    known = 0
                file.seek(known)
                content = file.read(min(size - known, LARGEST_BYTES))
                # The last line may be incomplete, and another node's line would continue it. A line that is longer
                # than one report is sent in parts, because it would never be sent otherwise.
                is_lines = path.suffix in (".txt", ".jsonl")
                if is_lines and (b"\n" in content or len(content) < LARGEST_BYTES):
                    content = content[: content.rfind(b"\n") + 1]
                if content:
                    changes.append(Change(name, content, True, (known + len(content), 0)))
        return changes

    def acknowledge(self, acknowledged: Mapping[str, Mark]) -> None:
        """Record which changes the driver has written: by file name, the mark of the change."""
        has_grown = False
        for name, mark in acknowledged.items():
            if name in self.grown:
                self.grown[name] = mark[0]
                has_grown = True
            else:
                self.sent[name] = mark
        if has_grown:
            self._keep_grown()

    def _growing(self) -> Iterator[Path]:
        for name in LOGS:
            yield self.stage / name
        yield from sorted((self.stage / TENSORBOARD).glob("*"))

    def _keep_grown(self) -> None:
        # If the disk is full, a later attempt sends some lines twice; this attempt does not.
        with suppress(OSError):
            _replace(self.stage / SENT, json.dumps(self.grown).encode())


# ------------------------------------------------------------------------ in the driver


def mark_driver_folder(attempt: Path, token: str) -> None:
    """Mark an attempt's folder as the driver's own, so that nodes can detect shared storage."""
    (attempt / TOKEN).write_text(token)
    # The driver's files already contain everything sent from this machine earlier.
    (attempt.parents[1] / SENT).unlink(missing_ok=True)


def apply_changes(stage: Path, changes: Iterable[Change]) -> dict[str, Mark]:
    """Write a node's changes into the driver's folder of the stage; return the marks of the written changes.

    Raises DataError if the name of a change leads outside the stage's folder.
    """
    acknowledged = {}
    for change in changes:
        path = stage / check_file_name(change.name, "a node's agent")
        # On a full disk the change is not written; the node sends it again.
        with suppress(OSError):
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            if change.is_appended:
                is_written = append_whole(path, change.content)
            else:
                _replace(path, change.content)
                is_written = True
            if is_written:
                acknowledged[change.name] = change.mark
    return acknowledged


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically. It is not flushed, because nobody reads it after a power failure."""
    temporary = temporary_name(path)
    temporary.write_bytes(content)
    os.replace(temporary, path)
