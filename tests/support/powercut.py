"""Simulate a power cut during a recorded run: fsynced data survives, any part of the rest may be lost.

This is the weakest guarantee that POSIX allows:
- data written after the last fsync may be present, missing, truncated or zero;
- names created after the last fsync of their folder may each exist or not, independently of earlier names;
- a rename is atomic;
- a folder without a name is lost with its content.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path

NEVER = 1 << 30


@dataclass
class Operation:
    """One change to an inode: of a folder's `names` (None: the name goes), or of a file's data."""

    inode: int
    names: dict[str, int | None] = field(default_factory=dict)
    data: bytes | None = None
    emptied: bool = False
    durable: int = NEVER  # the number of the line that made it so


class Recording:
    """A trace written by faults.c, and the durable content of the folder before it."""

    def __init__(self, base: Path, trace: Path, root: str) -> None:
        self.inodes = count(1)
        self.folders: dict[int, dict[str, int]] = {0: {}}  # as the run saw them
        self.files: dict[int, bytes] = {}
        self._read(base, 0)
        self.start = ({k: dict(v) for k, v in self.folders.items()}, dict(self.files))
        self.lines: list[list[Operation]] = []
        self.acknowledged: list[tuple[int, str, int]] = []  # (number of lines before it, what, value)
        for line in trace.read_text().splitlines():
            what, path, other, data = line.split("\t")
            if path.startswith(root):
                self.lines.append(self._apply(what, path[len(root) + 1 :], other[len(root) + 1 :], bytes.fromhex(data)))
            else:
                self.acknowledged.append((len(self.lines), what, int(path)))

    def _read(self, folder: Path, inode: int) -> None:
        for path in sorted(folder.iterdir()):
            new = self.folders[inode][path.name] = next(self.inodes)
            if path.is_dir():
                self.folders[new] = {}
                self._read(path, new)
            else:
                self.files[new] = path.read_bytes()

    def _find(self, path: str) -> tuple[int, str]:
        """(inode of the folder, name in it)"""
        *folders, name = path.split("/")
        inode = 0
        for folder in folders:
            inode = self.folders[inode][folder]
        return inode, name

    def _apply(self, what: str, path: str, other: str, data: bytes) -> list[Operation]:
        if what == "mkdir-again":
            return []
        if what == "fsync":
            self._make_durable(0 if not path else self._inode(path))
            return []
        if what in ("write", "truncate"):
            return [Operation(self._inode(path), data=data, emptied=what == "truncate")]
        folder, name = self._find(path)
        if what in ("create", "mkdir"):
            new = self.folders[folder][name] = next(self.inodes)
            (self.files if what == "create" else self.folders)[new] = b"" if what == "create" else {}  # type: ignore[index,assignment]
            return [Operation(folder, {name: new})]
        if what in ("unlink", "rmdir"):
            del self.folders[folder][name]
            return [Operation(folder, {name: None})]
        target, new_name = self._find(other)
        assert target == folder, (what, path, other)
        assert what in ("rename", "link"), (what, path, other)
        inode = self.folders[folder][new_name] = self.folders[folder][name]
        if what == "link":
            return [Operation(folder, {new_name: inode})]
        del self.folders[folder][name]
        return [Operation(folder, {name: None, new_name: inode})]

    def _inode(self, path: str) -> int:
        folder, name = self._find(path)
        return self.folders[folder][name]

    def _make_durable(self, inode: int) -> None:
        for operation in (operation for line in self.lines for operation in line if operation.inode == inode):
            operation.durable = min(operation.durable, len(self.lines))

    def cut(self, after: int, rng: random.Random) -> dict[str, bytes | None]:
        """Return a possible state after a power cut at this call: path → content, None for a folder."""
        folders, files = {k: dict(v) for k, v in self.start[0].items()}, dict(self.start[1])
        likely = rng.choice((0.1, 0.5, 0.9))
        for operation in (operation for line in self.lines[:after] for operation in line):
            durable = operation.durable < after
            if not durable and rng.random() > likely:
                continue
            for name, inode in operation.names.items():
                names = folders.setdefault(operation.inode, {})
                if inode is None:
                    names.pop(name, None)
                else:
                    names[name] = inode
            if operation.data is not None:
                before = b"" if operation.emptied else files.get(operation.inode, b"")
                files[operation.inode] = before + (operation.data if durable else torn(operation.data, rng))
        return dict(walk(folders, files, 0, "", self.folders))


def torn(data: bytes, rng: random.Random) -> bytes:
    """Return data with all, none or some of its sectors (64 bytes here: our files are small), perhaps truncated."""
    sectors = [data[at : at + 64] for at in range(0, len(data), 64)]
    kept = b"".join(sector if rng.random() < 0.5 else bytes(len(sector)) for sector in sectors)
    return rng.choice((data, data[: rng.randrange(len(data) + 1)], kept, bytes(len(data))))


def walk(folders: dict, files: dict, inode: int, path: str, known: dict) -> Iterator[tuple[str, bytes | None]]:
    for name, child in folders.get(inode, {}).items():
        if child in known:  # a folder
            yield f"{path}{name}", None
            yield from walk(folders, files, child, f"{path}{name}/", known)
        else:
            yield f"{path}{name}", files.get(child, b"")


def build(state: dict[str, bytes | None], folder: Path, store: Path) -> None:
    """Write the state to disk; equal files are links to one file in `store`."""
    folder.mkdir()
    for path, content in state.items():
        if content is None:
            (folder / path).mkdir()
            continue
        kept = store / sha256(content).hexdigest()
        if not kept.exists():
            kept.write_bytes(content)
        os.link(kept, folder / path)
