"""Brings what workers leave on their own node to the driver, where the nodes share no storage.

A stage's folder then has the same path on every node, and on each node it is another folder.

1. Before the workers start, `NodeFiles.begin` makes on every node what they expect to find: the attempt's folder, the
   names of the attempts before it, and the few files by which one attempt tells the next. It also says whether the node
   has a folder of its own at all: where the folder is shared after all, nothing must be copied onto itself.
2. With every report the agent sends what is new, changed or longer, as `NodeFiles.look` finds it:

       Change("attempts/attempt-000001/rank-00003.json", b'{"rank": 3, …', is_appended=False, mark=(311, 1764…))
       Change("metrics.jsonl", b'{"kind": "train", …}\n', is_appended=True, mark=(81733, 0))

3. `apply_changes` writes them into the driver's own folders, under the same names.
4. What the driver has written is carried to the node by its `mark`. Only then does the node count it as sent, so that
   nothing is lost with an answer that never came, and what follows in a log is sent once.

What a file may hold, and how it is sent:
- `rank-*` of the attempt, and the files by which attempts tell each other: whole, as often as they change;
- log.txt, metrics.jsonl and TensorBoard's files: what was added, since several nodes and the driver may add to a file
  of the same name. The node keeps in `sent.json` how far it has come, also for later attempts.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.files import temporary_name
from pipeline.monitoring.telemetry import append_whole

Mark = tuple[int, int]  # of a file that is sent whole: size, time of change in ns; of one that grows: bytes sent, 0

SENT = "sent.json"  # in the stage's folder of a node: bytes sent of each file that grows
TOKEN = "driver-token"  # in the attempt's folder: who finds the driver's own there shares its storage
LOGS = ("log.txt", "metrics.jsonl")  # in the stage's folder; of lines, to which several nodes may add
TENSORBOARD = "tensorboard"
# Bounds of an answer: so much of a file at one look. Of a file that grows the next look has the rest; of a longer one
# that is sent whole the end is sent, where a worker's log has its stacks.
LARGEST_BYTES = 1 << 20
# A file's time of change moves in ticks of up to 10 ms: one that was younger when it was read may have changed since.
SETTLED_NS = 1_000_000_000


@dataclass(frozen=True)
class Change:
    """A file of a node that the driver has not, or not as it is now."""

    name: str  # in the stage's folder
    content: bytes
    is_appended: bool  # to be added to what the driver has, instead of taking its place
    mark: Mark


# ------------------------------------------------------------------------ on a node


class NodeFiles:
    """Looks at the folders of one attempt and its stage on one node."""

    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.stage = attempt.parents[1]
        self.carried: list[str] = []  # names, in the stage's folder, of the files by which one attempt tells the next
        self.sent: dict[str, Mark] = {}  # by name, as far as the driver has said that it has them
        self.settled: set[str] = set()  # files that are sent whole and had not just changed when they were read
        self.grown: dict[str, int] = {}  # by name: how much of a file that grows the driver has, over all attempts

    def begin(self, token: str, carried: Mapping[str, bytes | None], earlier: Iterable[str]) -> bool:
        """Prepare the folders for the workers; return False, and do nothing, where they are the driver's own.

        `carried` are the files by which one attempt tells the next: None where there is none. `earlier` are the names of
        the stage's attempts.
        """
        with suppress(OSError):
            if (self.attempt / TOKEN).read_text() == token:
                return False
        # Another process may have begun here before this one, and been killed.
        is_new = not self.attempt.exists()
        self.attempt.mkdir(parents=True, exist_ok=True)
        for name in earlier:
            (self.attempt.parent / name).mkdir(exist_ok=True)
        self.carried = list(carried)
        for name, content in carried.items():
            if not is_new:
                continue
            if content is None:
                (self.stage / name).unlink(missing_ok=True)
            else:
                _replace(self.stage / name, content)

        # How much of the files that grow was sent in earlier attempts.
        try:
            self.grown = json.loads((self.stage / SENT).read_text())
        except (OSError, ValueError):
            # The first attempt with a worker here. What lies here already is of a driver that was here.
            for path in self._growing():
                with suppress(OSError):
                    self.grown[str(path.relative_to(self.stage))] = path.stat().st_size
            self._keep_grown()
        return True

    def look(self) -> list[Change]:
        """Return what is new here, of which `acknowledge` has not been carried."""
        changes = []
        # Files that are sent whole. A file may vanish or be replaced at this moment: the next look has it.
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

        # Files that grow: what was added.
        for path in self._growing():
            name = str(path.relative_to(self.stage))
            known = self.grown.setdefault(name, 0)
            with suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Shorter than what was sent: it is another file.
                if size < known:
                    known = 0
                file.seek(known)
                content = file.read(min(size - known, LARGEST_BYTES))
                # The last line may be half written, and another node's would go on behind it. A line as long as all
                # that is read at once is sent in parts, or it would never be sent.
                is_lines = path.suffix in (".txt", ".jsonl")
                if is_lines and (b"\n" in content or len(content) < LARGEST_BYTES):
                    content = content[: content.rfind(b"\n") + 1]
                if content:
                    changes.append(Change(name, content, True, (known + len(content), 0)))
        return changes

    def acknowledge(self, acknowledged: Mapping[str, Mark]) -> None:
        """Count as sent what the driver has written down: by name, the mark of the change."""
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
        # On a full disk a later attempt sends some lines twice; this one does not.
        with suppress(OSError):
            _replace(self.stage / SENT, json.dumps(self.grown).encode())


# ------------------------------------------------------------------------ in the driver


def mark_driver_folder(attempt: Path, token: str) -> None:
    """Mark the driver's own folder of an attempt."""
    (attempt / TOKEN).write_text(token)
    # The files here are the driver's again: whatever was sent from here is in them, and more.
    (attempt.parents[1] / SENT).unlink(missing_ok=True)


def apply_changes(stage: Path, changes: Iterable[Change]) -> dict[str, Mark]:
    """Write what has changed on a node into the driver's folder of the stage; return the marks of what is written."""
    acknowledged = {}
    for change in changes:
        path = stage / change.name
        # A full disk costs the driver what it would have read there; the node sends it again.
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
    """Put a file in the place of another at once. It is not flushed: after a power cut nobody reads it."""
    temporary = temporary_name(path)
    temporary.write_bytes(content)
    os.replace(temporary, path)
