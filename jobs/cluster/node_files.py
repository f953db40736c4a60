"""Copy files written by workers from their nodes to the driver, if nodes and driver do not share storage.

A stage's folder then has the same path on every node, but is a separate folder on each.

1. Before the workers start, `NodeFiles.begin` prepares the folders on every node: the attempt's folder, empty folders
   for earlier attempts, and the few files that one attempt passes to the next. It also detects whether the node and the
   driver share the folder after all, in which case nothing needs to be copied.
2. With every report, the agent sends new, changed or longer files, which `NodeFiles.changes` returns:

       Change("attempts/attempt-000001/rank-00003.json", b'{"rank": 3, …', is_appended=False, mark=(311, 1764…))
       Change("metrics.jsonl", b'{"kind": "train", …}\n', is_appended=True, mark=(81733, 0))

3. `apply_changes` writes these changes to the driver's folders, under the same names.
4. The driver acknowledges each written change by its `mark`. Only then does the node record it as sent, so that a lost
   reply loses no file, and no log line is copied twice.

There are two kinds of files:
- complete files: `rank-*` of the attempt, and files carried between attempts. The whole file is sent after each
  change;
- append-only files: log.txt, metrics.jsonl and TensorBoard's files, to which several nodes and the driver append. Only
  the new part is sent. The node records its position in `sent.json` for this and later attempts.
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

SENT = "sent.json"  # in the stage's folder on a node: number of bytes sent of each appended file
TOKEN = "driver-token"  # in the attempt's folder; a node that finds the driver's token shares storage with the driver
LOGS = ("log.txt", "metrics.jsonl")  # in the stage's folder; several nodes may append lines
TENSORBOARD = "tensorboard"
# Maximum bytes of a file in one report. The rest of an appended file follows in the next report. For a longer complete
# file, only the end is sent, because the stack traces are at the end of a worker's log.
LARGEST_BYTES = 1 << 20
# The mtime may be as coarse as 10 ms, so a file read just after a change may change again with the same mtime.
SETTLED_NS = 1_000_000_000


@dataclass(frozen=True)
class Change:
    """A new or changed file on a node, or the new part of a file that has grown."""

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
        self.carried: list[str] = []  # names of the files carried between attempts, relative to the stage's folder
        self.sent: dict[str, Mark] = {}  # name of a complete file → last version that the driver has acknowledged
        self.settled: set[str] = set()  # names of complete files that had not just changed when they were read
        self.grown: dict[str, int] = {}  # name of an appended file → number of bytes that the driver has

    def begin(self, token: str, carried: Mapping[str, bytes | None], earlier: Iterable[str]) -> bool:
        """Prepare the folders for the workers; if the node shares the driver's folders, do nothing and return False.

        `carried` contains the files that one attempt passes to the next; None for a missing file. `earlier` contains
        the names of the folders of the stage's earlier attempts.
        """
        with suppress(OSError):
            if (self.attempt / TOKEN).read_text() == token:
                return False
        # A killed agent of the same attempt may have prepared the folder before.
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

        # Read how much of the appended files earlier attempts have sent.
        try:
            self.grown = json.loads((self.stage / SENT).read_text())
        except (OSError, ValueError):
            # First attempt with a worker on this node: existing files were written by a driver on this machine.
            for path in self._growing():
                with suppress(OSError):
                    self.grown[str(path.relative_to(self.stage))] = path.stat().st_size
            self._keep_grown()
        return True

    def changes(self) -> list[Change]:
        """Return the changes not yet acknowledged by the driver."""
        changes = []
        # Complete files. If a file is deleted or replaced while it is read, the next call finds the new version.
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

        # Appended files: return only the new part.
        for path in self._growing():
            name = str(path.relative_to(self.stage))
            known = self.grown.setdefault(name, 0)
            with suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # If the file is shorter than the part already sent, it was replaced.
                if size < known:
                    known = 0
                file.seek(known)
                content = file.read(min(size - known, LARGEST_BYTES))
                # Exclude an incomplete last line, because another node's line would be appended to it. A line longer
                # than one report is sent in parts, because it would never be complete.
                is_lines = path.suffix in (".txt", ".jsonl")
                if is_lines and (b"\n" in content or len(content) < LARGEST_BYTES):
                    content = content[: content.rfind(b"\n") + 1]
                if content:
                    changes.append(Change(name, content, True, (known + len(content), 0)))
        return changes

    def acknowledge(self, acknowledged: Mapping[str, Mark]) -> None:
        """Record the changes written by the driver, given as file name → mark."""
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
        # If the disk is full, a later attempt sends some lines again, but this attempt does not.
        with suppress(OSError):
            _replace(self.stage / SENT, json.dumps(self.grown).encode())


# ------------------------------------------------------------------------ in the driver


def mark_driver_folder(attempt: Path, token: str) -> None:
    """Mark an attempt's folder as the driver's, so that nodes can detect shared storage."""
    (attempt / TOKEN).write_text(token)
    # The driver's files already contain everything that an agent on this machine has sent before.
    (attempt.parents[1] / SENT).unlink(missing_ok=True)


def apply_changes(stage: Path, changes: Iterable[Change]) -> dict[str, Mark]:
    """Write a node's changes to the driver's copy of the stage's folder; return file name → mark for each change.

    Raises DataError if a file name leads outside the stage's folder.
    """
    acknowledged = {}
    for change in changes:
        path = stage / check_file_name(change.name, "a node's agent")
        # If the disk is full, the change is not acknowledged, and the node sends it again.
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
    """Replace a file atomically, without fsync, because its content is not needed after a power failure."""
    temporary = temporary_name(path)
    temporary.write_bytes(content)
    os.replace(temporary, path)
