"""Lines for a terminal that may take none: the run never waits for it.

A terminal takes no lines after Ctrl-S, while `less` is not scrolled on, or when a log collector hangs.
A plain `print` then waits for ever, and the watchdog and a SIGTERM wait with it. Here, in order:
1. `write` puts a line into a queue and returns at once; a signal handler may call it amid another call;
2. a thread writes the lines of the queue, above a bar where the stream is a terminal;
3. where too many lines wait, the next are dropped; the first that gets through again is preceded by their number;
4. `close` waits a few seconds for the lines that are left, and returns how many were never written.

    terminal = Terminal(sys.stdout)
    terminal.write("ray: 1 nodes")
    terminal.close()  →  0
"""

import io
import os
import queue
import select
import sys
import threading
from contextlib import suppress
from typing import NamedTuple, TextIO

from data.checks import printable_lines
from jobs.progress import LiveBar

MOST_WAITING = 10_000  # lines; some 2 MB
CLOSE_S = 3.0  # for the lines that are left at the end: a terminal may be slow, and need not be stuck


class BarPlace(NamedTuple):
    """Where the bar is to stand."""

    done: int
    total: int
    text: str


class Terminal:
    """Writes lines to a stream from a thread; no call waits, but `close`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.handle = handle_of(stream)
        # Of Python's queues only SimpleQueue may be used in a signal handler that interrupts a `put`.
        self.waiting: queue.SimpleQueue[str | BarPlace | None] = queue.SimpleQueue()
        self.dropped = 0  # lines, all in all
        self.dropped_said = 0  # of them, those that the terminal has been told of
        self.has_bar = self.handle is not None and stream.isatty()
        self.thread = threading.Thread(target=self.work, name="terminal", daemon=True)
        if self.handle is not None:
            # The thread writes past the stream's buffer: what is in it comes first.
            with suppress(OSError):
                stream.flush()
            self.thread.start()

    def write(self, text: str) -> None:
        """Have a line written, or dropped and counted where too many wait."""
        if self.handle is None:
            print(text, file=self.stream, flush=True)
        elif self.waiting.qsize() < MOST_WAITING:
            self.waiting.put(text)
        else:
            self.dropped += 1

    def move_bar(self, done: int, total: int, text: str) -> None:
        """Have the bar moved; where something else waits it is left where it is, until the next time."""
        if self.has_bar and self.waiting.empty():
            self.waiting.put(BarPlace(done, total, text))

    def close(self) -> int:
        """Wait for the lines that are left, and take the bar away; returns how many lines were never written."""
        if self.handle is None:
            return 0
        self.waiting.put(None)
        self.thread.join(CLOSE_S)
        lost = self.dropped - self.dropped_said
        if self.thread.is_alive():
            # The None stands for the line that the thread has taken out and cannot get rid of.
            lost += self.waiting.qsize()
            # The bar has put streams of its own there, which are as stuck as the terminal.
            if self.has_bar:
                sys.stdout = sys.__stdout__
                sys.stderr = sys.__stderr__
        return lost

    def work(self) -> None:
        """Do the thread's part: write until a None comes."""
        assert self.handle is not None
        bar = None
        if self.has_bar:
            # A stream of its own: Python's stdout, locked in a write that never ends, would abort the process's end.
            bar = LiveBar(os.fdopen(os.dup(self.handle), "w", encoding=self.stream.encoding, errors="replace"))
        while True:
            item = self.waiting.get()
            if item is None:
                break
            dropped = self.dropped - self.dropped_said
            # A terminal or pipe that is closed must not end the run.
            with suppress(OSError):
                if isinstance(item, BarPlace):
                    assert bar is not None
                    bar.update(*item)
                    continue
                if dropped:
                    self.put(bar, f"({dropped} lines are not shown: this terminal took none; log.txt has them)")
                self.put(bar, item)
            self.dropped_said += dropped
        if bar is not None:
            with suppress(OSError):
                bar.close()

    def put(self, bar: LiveBar | None, text: str) -> None:
        """Write one line."""
        if bar is not None:
            bar.write(text)
        else:
            assert self.handle is not None
            write_all(self.handle, f"{text}\n".encode(self.stream.encoding, "replace"))


def handle_of(stream: TextIO | None) -> int | None:
    """Return a stream's file handle; None for a buffer in memory, which takes every line, and where there is none."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (io.UnsupportedOperation, ValueError):
        return None


def write_all(handle: int, content: bytes) -> None:
    """Write to a file handle, past Python's streams, however long that takes; raises OSError."""
    while content:
        try:
            content = content[os.write(handle, content) :]
        except BlockingIOError:  # of a pipe that its reader has set so
            select.select([], [handle], [])


def echo(line: str) -> None:
    """Print a line of a command's answer at once, without what a terminal would obey."""
    print(printable_lines(line), flush=True)


def write_last(text: str) -> None:
    """Write a line to stderr before the process ends; a stderr that takes no line is waited for a few seconds."""
    stream = sys.stderr
    handle = handle_of(stream)
    if handle is None:
        print(text, file=stream)
        return
    stream.flush()
    encoded = f"{text}\n".encode(stream.encoding, "replace")

    def write() -> None:
        with suppress(OSError):
            write_all(handle, encoded)

    thread = threading.Thread(target=write, name="last line", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
