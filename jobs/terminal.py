"""Write lines to a terminal that may be stuck, without making the run wait for it.

A terminal takes no lines after Ctrl-S, while `less` is not scrolled, or when a log collector hangs. A plain `print`
then blocks for ever, and the watchdog and a SIGTERM wait with it. Here, in order:
1. `write` puts a line into a queue and returns at once; a signal handler may call it during another call;
2. a thread writes the lines of the queue, above a bar if the stream is a terminal;
3. if too many lines wait, the next ones are dropped; the first line that gets through is preceded by their number;
4. `close` waits a few seconds for the remaining lines, and returns how many were never written.

    terminal = Terminal(sys.stdout)
    terminal.write("ray: 1 nodes")
    terminal.close()  →  0
"""

import io
import os
import queue
import select
import shlex
import shutil
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from data.checks import printable_lines
from jobs.progress import LiveBar, activity

COMMAND = "python -m jobs"  # how commands begin in all messages

MOST_WAITING = 10_000  # lines; some 2 MB
LONGEST_LINE = 100  # characters on a terminal; what is redirected stays one line
CLOSE_S = 3.0  # for the remaining lines: a terminal may be slow without being stuck


class BarPlace(NamedTuple):
    """The next state of the bar."""

    done: int
    total: int | None
    text: str


class MoveBar:
    """In the queue: move the bar to its latest place."""


class Terminal:
    """Writes lines to a stream from a thread; only `close` waits."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.handle = handle_of(stream)
        # Only a SimpleQueue may be used in a signal handler that interrupts a `put`.
        self.waiting: queue.SimpleQueue[str | MoveBar | None] = queue.SimpleQueue()
        self.dropped = 0  # lines in total
        self.dropped_said = 0  # those of them that the terminal has reported
        self.bar_place: BarPlace | None = None
        self.is_move_waiting = False
        self.has_bar = self.handle is not None and stream.isatty()
        self.thread = threading.Thread(target=self.work, name="terminal", daemon=True)
        if self.handle is not None:
            # The thread bypasses the stream's buffer: empty it first.
            with suppress(OSError):
                stream.flush()
            self.thread.start()

    def write(self, text: str) -> None:
        """Queue a line, or drop and count it if too many wait."""
        text = as_typed(text)
        if self.handle is None:
            print(text, file=self.stream, flush=True)
        elif self.waiting.qsize() < MOST_WAITING:
            self.waiting.put(text)
        else:
            self.dropped += 1

    def move_bar(self, done: int, total: int | None, text: str) -> None:
        """Move the bar after the lines before it; at most one move waits in the queue."""
        if not self.has_bar:
            return
        self.bar_place = BarPlace(done, total, printable_lines(text))
        if not self.is_move_waiting:
            self.is_move_waiting = True
            self.waiting.put(MoveBar())

    def close(self) -> int:
        """Wait for the remaining lines, and remove the bar; return how many lines were never written."""
        if self.handle is None:
            return 0
        self.waiting.put(None)
        self.thread.join(CLOSE_S)
        lost = self.dropped - self.dropped_said
        if self.thread.is_alive():
            # The None counts for the line that the thread cannot write.
            lost += self.waiting.qsize() - self.is_move_waiting
            # The bar has replaced them by streams that are as stuck as the terminal.
            if self.has_bar:
                sys.stdout = sys.__stdout__
                sys.stderr = sys.__stderr__
        return lost

    def work(self) -> None:
        """Write until a None comes; called in the thread."""
        assert self.handle is not None
        bar = None
        if self.has_bar:
            # A separate stream: a write to Python's stdout that never returns would abort the end of the process.
            bar = LiveBar(os.fdopen(os.dup(self.handle), "w", encoding=self.stream.encoding, errors="replace"))
        while True:
            item = self.waiting.get()
            if item is None:
                break
            dropped = self.dropped - self.dropped_said
            # A closed terminal or pipe must not end the run.
            with suppress(OSError):
                if isinstance(item, MoveBar):
                    # First: a later request is another move.
                    self.is_move_waiting = False
                    assert bar is not None and self.bar_place is not None
                    bar.update(*self.bar_place)
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
            bar.write(folded(text, bar.rich.console.width))
        else:
            assert self.handle is not None
            write_all(self.handle, f"{text}\n".encode(self.stream.encoding, "replace"))


def folded(text: str, width: int) -> str:
    """Return a text with long lines broken at words, for a terminal of so many columns.

    Continued lines are indented. A command stays on one line, so that it can be copied.
    """
    lines = []
    for line in text.splitlines() or [""]:
        if len(line) <= min(LONGEST_LINE, width):
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        words, command, arguments = line.partition(f"{program()} ")
        lines += textwrap.wrap(
            words,
            min(LONGEST_LINE, width),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if command and words.strip():
            lines.append(f"{indent}{command}{arguments}")
        elif command:
            lines.append(line)
    return "\n".join(lines)


def for_stream(text: str, stream: TextIO) -> str:
    """Return a text for a stream: with long lines broken for a terminal, unchanged for any other."""
    if not stream.isatty():
        return text
    return folded(text, shutil.get_terminal_size().columns)


def handle_of(stream: TextIO | None) -> int | None:
    """Return a stream's file handle; None for a buffer in memory, or if there is no stream."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (io.UnsupportedOperation, ValueError):
        return None


def is_closed_pipe(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has ended."""
    handle = handle_of(stream)
    if handle is None:
        return False
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def write_all(handle: int, content: bytes) -> None:
    """Write to a file handle, bypassing Python's streams, however long that takes. Raises OSError."""
    while content:
        try:
            content = content[os.write(handle, content) :]
        except BlockingIOError:  # the reader of a pipe has made it non-blocking
            select.select([], [handle], [])


def program() -> str:
    """Return the beginning of this process's command, as it was typed."""
    return "patchline" if Path(sys.argv[0]).name == "patchline" else COMMAND


def as_typed(text: str) -> str:
    """Return a text in which commands begin as the command of this process does."""
    return text.replace(f"{COMMAND} ", f"{program()} ")


def typed_command() -> str:
    """Return the command of this process as it was typed."""
    if program() != COMMAND:
        return shlex.join([program(), *sys.argv[1:]])
    return shlex.join(["python", *sys.orig_argv[1:]])  # sys.argv has lost the `-m jobs`


def echo(line: str) -> None:
    """Print a line of a command's answer at once, without control characters."""
    text = as_typed(printable_lines(line))
    # Above the bar, whose stdout would break a long line: people copy commands from answers.
    if activity.bar is not None:
        activity.bar.write(folded(text, activity.bar.rich.console.width))
    else:
        print(for_stream(text, sys.stdout), flush=True)


def write_last(text: str) -> None:
    """Write a line to stderr before the process ends; wait at most a few seconds for a stuck stderr."""
    stream = sys.stderr
    text = for_stream(as_typed(text), stream)
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
