"""What metrics.jsonl holds, one short row a record: so that nobody reads a month of records for a few of them.

1. `MetricsIndex(directory)` loads `metrics.index`, where there is one, and adds a row for every record that was written
   since. A row tells where the record lies, what it is of, and the numbers that accounting.py adds up:

       offset  bytes  kind   attempt  step  count  time          seconds  wait  …
       81733   2671   train  1        1200  50     1764071.3     25.1     0.008

2. When it has added rows for a megabyte of records, it appends them to `metrics.index`, under a lock. The driver
   makes one now and then (`keep_up`), so that there is never much to add.
3. Where metrics.jsonl is not the file any more of which the rows are, they are made anew, from its beginning.

The index holds nothing of its own: it may be deleted at any time, and without the right to write it all works, slower.
A record of 50 steps has 2.7 KB, its row 104 bytes.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.errors import DataError, PatchlineError
from data.files import take_lock
from pipeline.monitoring.telemetry import MetricsRecord, Record, parsed, with_nan

FILE = "metrics.index"
MAGIC = b"patchline metrics index 1\n"  # of the columns below; other bytes are another version's, and replaced
ROW = np.dtype(
    [
        ("offset", "<u8"),  # of the record's line in metrics.jsonl
        ("bytes", "<u4"),  # of the line, without what ends it
        ("crc", "<u4"),  # of the line
        ("kind", "S24"),
        ("attempt", "<i4"),
        ("count", "<i4"),  # steps of a report
        ("step", "<i8"),
        ("time", "<f8"),
        ("claimed", "<f8"),  # of an attempt's start: by the driver
        ("seconds", "<f8"),  # of a report; NaN where the record is none
        ("wait", "<f8"),
        ("stalled_s", "<f8"),
        ("evaluated_s", "<f8"),
    ]
)
KEPT_AFTER_BYTES = 1 << 20  # of metrics.jsonl without rows in the file
Row = tuple[int | float | bytes, ...]


class MetricsIndex:
    """The rows of a stage's metrics.jsonl, as it is now."""

    def __init__(self, directory: Path) -> None:
        """Read the rows that were kept, and make those that are missing.

        Raises DataError where a record lacks what a row needs.
        """
        self.path = directory / "metrics.jsonl"
        self.index_path = directory / FILE
        self.rows = _load(self.index_path)
        self.kept = len(self.rows)  # rows that are in the file
        if self.kept and not self._fits():
            self.rows = self.rows[:0]
            self.kept = 0
        self._add_new()

    def records(self, chosen: np.ndarray) -> list[Record]:
        """Return the records of the rows that a mask chooses, in the order written."""
        records: list[Record] = []
        if not chosen.any():
            return records
        with open(self.path, "rb") as file:
            for row in self.rows[chosen]:
                file.seek(int(row["offset"]))
                line = file.read(int(row["bytes"]))
                records.append(MetricsRecord(json.loads(line, object_hook=with_nan), self.path))
        return records

    def of_kind(self, kind: str) -> np.ndarray:
        """Return the mask of the rows of a kind, for `records`."""
        return self.rows["kind"] == kind.encode()

    def covering(self, step: int) -> np.ndarray:
        """Return the mask of the reports that a step is in: one of every attempt that took it."""
        first_step = self.rows["step"] - self.rows["count"] + 1
        return self.of_kind("train") & (first_step <= step) & (step <= self.rows["step"])

    # -------------------------------------------------------------------- making rows

    def _fits(self) -> bool:
        """Tell whether the first and the last row are of lines of the file."""
        try:
            with open(self.path, "rb") as file:
                for row in (self.rows[0], self.rows[-1]):
                    file.seek(int(row["offset"]))
                    line = file.read(int(row["bytes"]))
                    if len(line) != row["bytes"] or zlib.crc32(line) != row["crc"]:
                        return False
        except FileNotFoundError:
            return False
        return True

    def _add_new(self) -> None:
        """Make the rows of the records behind the last row, and keep them where they are many."""
        begin = 0
        if len(self.rows):
            begin = int(self.rows[-1]["offset"] + self.rows[-1]["bytes"])
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(begin)
            whole, torn = _rows_of(file, begin, self.path)
            size = file.tell()
        new = np.array(whole, ROW)
        self.rows = np.concatenate([self.rows, new])
        if size - begin > KEPT_AFTER_BYTES:
            # The index may lie in a folder that is not ours to write, or on a full disk.
            with suppress(OSError, PatchlineError):
                self._keep()
        # A last line without its end may be a whole record, or the beginning of another one.
        self.rows = np.concatenate([self.rows, np.array(torn, ROW)])

    def _keep(self) -> None:
        """Append the rows that are not in the file, unless somebody else has done so meanwhile."""
        with open(self.index_path, "a+b") as file:
            if not take_lock(file.fileno(), self.index_path, wait=False):
                return
            expected = len(MAGIC) + self.kept * ROW.itemsize if self.kept else 0
            size = os.fstat(file.fileno()).st_size
            is_made_anew = self.kept == 0
            # What was appended in part, by somebody who was killed, is no whole row.
            has_part = 0 < size - expected < ROW.itemsize
            if is_made_anew or has_part:
                file.truncate(expected)
            elif size != expected:
                return
            if is_made_anew:
                file.write(MAGIC)
            file.write(self.rows[self.kept :].tobytes())


def keep_up(directory: Path) -> None:
    """Add to the index of a stage where its metrics.jsonl has grown much since that was last done."""
    with suppress(FileNotFoundError):
        size = (directory / "metrics.jsonl").stat().st_size
        if size > KEPT_AFTER_BYTES and size - _indexed_bytes(directory / FILE) > KEPT_AFTER_BYTES:
            # Records that have been altered are told by who wants them.
            with suppress(DataError):
                MetricsIndex(directory)


def table(records: Iterable[Record]) -> np.ndarray:
    """Return the rows of records that come from no file."""
    return np.array([_row(record, 0, b"") for record in records], ROW)


def _load(path: Path) -> np.ndarray:
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if not content.startswith(MAGIC):
        return np.empty(0, ROW)
    count = (len(content) - len(MAGIC)) // ROW.itemsize
    return np.frombuffer(content, ROW, count, len(MAGIC))


def _indexed_bytes(path: Path) -> int:
    """Return up to where in metrics.jsonl there are rows, by the last row alone; 0 where there is no index."""
    try:
        with open(path, "rb") as file:
            count = (os.fstat(file.fileno()).st_size - len(MAGIC)) // ROW.itemsize
            if count < 1:
                return 0
            file.seek(len(MAGIC) + (count - 1) * ROW.itemsize)
            (last,) = np.frombuffer(file.read(ROW.itemsize), ROW)
    except FileNotFoundError:
        return 0
    return int(last["offset"] + last["bytes"])


def _rows_of(lines: Iterable[bytes], begin: int, path: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows of whole lines, and those of a last line without its end; `begin` is where the lines begin."""
    whole: list[Row] = []
    torn: list[Row] = []
    offset = begin
    for line in lines:
        rows = whole if line.endswith(b"\n") else torn
        for part, content in _parts(line, offset):
            record = parsed(content, path)
            if record is None:
                continue
            try:
                rows.append(_row(record, part, content))
            except (TypeError, ValueError, OverflowError):
                raise DataError(
                    f"{path} has changed: a value of another type in {str(dict(record))[:80]}\n"
                    "  expected the lines as the run wrote them\n"
                    "  bring the file back from a copy, or delete that line: no result is made of it"
                ) from None
        offset += len(line)
    return whole, torn


def _parts(line: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Split a line where `read_metrics` does, at carriage returns too; give each part with its offset."""
    for part in line.splitlines(keepends=True):
        yield offset, part.rstrip(b"\r\n")
        offset += len(part)


def _row(record: Record, offset: int, line: bytes) -> Row:
    kind = record["kind"]
    is_window = kind == "train" and "seconds" in record
    claimed = 0.0
    if kind == "start":
        claimed = record.get("claimed") or record["time"]
    numbers = [np.nan] * 4
    if is_window:
        numbers = [float(record[name]) for name in ("seconds", "wait", "stalled_s", "evaluated_s")]
    # An evaluation's record, say, has no losses; of a report and of a start both are needed.
    count = len(record["losses"]) if is_window else len(record.get("losses", []))
    step = record["step"] if is_window or kind == "start" else record.get("step", -1)
    place = (offset, len(line), zlib.crc32(line))
    named = (str(kind).encode(), int(record["attempt"]), count, int(step))
    return (*place, *named, float(record["time"]), float(claimed), *numbers)
