"""The terminal output of a command: lines, and its current activity.

A command that takes longer than a second shows its current activity (`activity`), even if there is nothing to count;
progress.py shows how much of a long task is done.

`Terminal` writes the lines of a run to a terminal without ever blocking the run.

A terminal blocks after Ctrl-S, while `less` is not scrolled, or if a log collector hangs. A plain `print` would then
block forever, together with the watchdog and a requested stop. Instead:
1. `write` puts a line into a queue and returns at once; a signal handler may call it during another call;
2. a thread writes the lines of the queue, above the progress bar if the stream is a terminal;
3. if the queue is full, new lines are dropped; their number is printed before the next written line;
4. `close` waits a few seconds for the remaining lines, and returns how many were never written.

    terminal = Terminal(sys.stdout)
    terminal.write("ray: 1 nodes")
    terminal.close()  →  0
"""

import io
import os
import queue
import re
import select
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from data.checks import printable_lines
from data.errors import OutputError

COMMAND = "python -m jobs"  # how commands begin in all messages
typed_recipe: list[str] = []  # the current command's recipe and overrides, if it has any

UNKNOWN_KEY = re.compile(r"\bunknown key (\S+\w)")  # in a message (pipeline/config.py)

WAIT_S = 1.0  # after this time, a command shows its activity
MAX_QUEUED = 10_000  # lines in the queue, about 2 MB
MAX_LINE_LENGTH = 100  # characters per line on a terminal; redirected output is not wrapped
CLOSE_S = 3.0  # how long `close` waits for the remaining lines: a terminal may be slow but not stuck


class LiveBar:
    """A progress bar at the bottom of a terminal, with a spinner to show that the process is alive."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Set up a bar on stdout, or on the given stream."""
        # Imported here, because rich takes 0.1 s and most commands show no bar.
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
        )
        self.rich = RichProgress(*columns, transient=True, console=Console(file=file))
        # Hidden until the first update.
        self.task = self.rich.add_task("", total=None, visible=False, count="")
        self.rich.start()

    def update(self, done: int, total: int | None, text: str) -> None:
        """Update the bar; if `total` is None, the bar pulses."""
        from pipeline.values import amount  # imports models, which would slow down --help

        # rich stops the clock of a completed task: restart it for the next task.
        shown = self.rich.tasks[0]
        if shown.finished and (total is None or done < shown.completed):
            self.rich.reset(self.task)
        count = amount(done) if done else ""
        if total:
            count = f"{done}/{total} eta"
        self.rich.update(self.task, completed=done, total=total, description=text, count=count, visible=True)

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        # Print brackets literally, numbers without colour, and long lines unwrapped.
        self.rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.rich.stop()


class Activity:
    """Shows an activity longer than WAIT_S: as a bar on a terminal, otherwise as a line on stderr."""

    def __init__(self) -> None:
        self.text = ""  # "" if there is nothing to show
        self.bar: LiveBar | None = None
        self.timer = threading.Timer(0, str)
        self.lock = threading.RLock()  # the timer calls `show_if_slow` in another thread

    def now(self, text: str) -> None:
        """Set the activity to show if it takes longer than WAIT_S."""
        with self.lock:
            self.text = printable_lines(text)
            self.timer.cancel()
            if self.bar is not None:
                self.bar.update(0, None, self.text)
                return
            self.timer = threading.Timer(WAIT_S, self.show_if_slow)
            self.timer.daemon = True
            self.timer.start()

    def show_if_slow(self) -> None:
        """Show the current activity; called once it has taken WAIT_S."""
        with self.lock:
            if self.text and not self.show(0, None, self.text):
                print(self.text, file=sys.stderr, flush=True)

    def show(self, done: int, total: int | None, text: str) -> bool:
        """Show progress with a bar; return False if stdout is not a terminal."""
        with self.lock:
            if self.bar is None and sys.stdout.isatty():
                self.bar = LiveBar()
            if self.bar is not None:
                self.bar.update(done, total, text)
            return self.bar is not None

    def end(self) -> None:
        """Remove the bar and the current activity."""
        with self.lock:
            self.text = ""
            self.timer.cancel()
            if self.bar is not None:
                self.bar.close()
            self.bar = None


activity = Activity()  # one per process, because a terminal has room for one bar


# ------------------------------------------------------------------------ lines of a run


class BarPlace(NamedTuple):
    """The latest state of the progress bar."""

    done: int
    total: int | None
    text: str


class MoveBar:
    """A queue entry: update the bar to its latest state."""


class Terminal:
    """Writes lines to a stream in a thread; only `close` may block."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.handle = handle_of(stream)
        # Only a SimpleQueue may be used in a signal handler that interrupts a `put`.
        self.waiting: queue.SimpleQueue[str | MoveBar | None] = queue.SimpleQueue()
        self.dropped = 0  # number of dropped lines
        self.dropped_reported = 0  # dropped lines already reported in the terminal
        self.bar_place: BarPlace | None = None
        self.is_move_waiting = False
        self.has_bar = self.handle is not None and stream.isatty()
        self.thread = threading.Thread(target=self.work, name="terminal", daemon=True)
        if self.handle is not None:
            # The thread bypasses the stream's buffer, so flush that first.
            with suppress(OSError):
                stream.flush()
            self.thread.start()

    def write(self, text: str) -> None:
        """Queue a line; if the queue is full, drop and count the line."""
        text = as_typed(text)
        if self.handle is None:
            print(text, file=self.stream, flush=True)
        elif self.waiting.qsize() < MAX_QUEUED:
            self.waiting.put(text)
        else:
            self.dropped += 1

    def move_bar(self, done: int, total: int | None, text: str) -> None:
        """Update the bar after the queued lines; the queue has at most one update."""
        if not self.has_bar:
            return
        self.bar_place = BarPlace(done, total, printable_lines(text))
        if not self.is_move_waiting:
            self.is_move_waiting = True
            self.waiting.put(MoveBar())

    def close(self) -> int:
        """Wait for the queued lines to be written, and remove the bar; return how many lines were never written."""
        if self.handle is None:
            return 0
        self.waiting.put(None)
        self.thread.join(CLOSE_S)
        lost = self.dropped - self.dropped_reported
        if self.thread.is_alive():
            # The queue also contains the None, which stands for the line that the thread cannot write.
            lost += self.waiting.qsize() - self.is_move_waiting
            # rich's bar has replaced stdout and stderr with streams that block like the terminal.
            if self.has_bar:
                sys.stdout = sys.__stdout__
                sys.stderr = sys.__stderr__
        return lost

    def work(self) -> None:
        """Write queued lines until None arrives; runs in the writer thread."""
        assert self.handle is not None
        bar = None
        if self.has_bar:
            # Use a separate stream: if a write to Python's stdout never returns, the process aborts at exit.
            bar = LiveBar(os.fdopen(os.dup(self.handle), "w", encoding=self.stream.encoding, errors="replace"))
        while True:
            item = self.waiting.get()
            if item is None:
                break
            dropped = self.dropped - self.dropped_reported
            # A closed terminal or pipe must not end the run.
            with suppress(OSError):
                if isinstance(item, MoveBar):
                    # Reset before drawing: a later request needs another update.
                    self.is_move_waiting = False
                    assert bar is not None and self.bar_place is not None
                    bar.update(*self.bar_place)
                    continue
                if dropped:
                    self.put(
                        bar,
                        f"({dropped} lines are not shown, because this terminal was blocked; they are in log.txt)",
                    )
                self.put(bar, item)
            self.dropped_reported += dropped
        if bar is not None:
            with suppress(OSError):
                bar.close()

    def put(self, bar: LiveBar | None, text: str) -> None:
        """Write a line to the stream, above the bar if there is one."""
        if bar is not None:
            bar.write(wrapped(text, bar.rich.console.width))
        else:
            assert self.handle is not None
            write_all(self.handle, f"{text}\n".encode(self.stream.encoding, "replace"))


def wrapped(text: str, width: int) -> str:
    """Wrap a string's long lines at spaces, for a terminal with `width` columns.

    Continuation lines are indented. A command stays on one line, so that it can be copied.
    """
    lines = []
    for line in text.splitlines() or [""]:
        if len(line) <= min(MAX_LINE_LENGTH, width):
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        words, command, arguments = line.partition(f"{program()} ")
        lines += textwrap.wrap(
            words,
            min(MAX_LINE_LENGTH, width),
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
    """Return a string as it should be written to a stream: wrapped for a terminal, otherwise unchanged."""
    if not stream.isatty():
        return text
    return wrapped(text, shutil.get_terminal_size().columns)


def handle_of(stream: TextIO | None) -> int | None:
    """Return a stream's file descriptor; None for an in-memory buffer or a missing stream."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (io.UnsupportedOperation, ValueError):
        return None


def write_all(handle: int, content: bytes) -> None:
    """Write all bytes to a file descriptor, bypassing Python's streams; may block forever.

    Raises OSError if the write fails.
    """
    while content:
        try:
            content = content[os.write(handle, content) :]
        except BlockingIOError:  # the reader of a pipe has made it non-blocking
            select.select([], [handle], [])


def program() -> str:
    """Return the program name as the user typed it: "patchline" or "python -m jobs"."""
    return "patchline" if Path(sys.argv[0]).name == "patchline" else COMMAND


def as_typed(text: str) -> str:
    """Replace "python -m jobs" and "RECIPE" in a string with the program name, recipe and overrides that were typed.

    Overrides that the line itself sets after RECIPE are omitted, and so is an override with an unknown key.
    """
    unknown = UNKNOWN_KEY.search(text)
    words = [word for word in typed_recipe if unknown is None or not word.startswith(unknown[1])]
    if words:
        # A line may have several commands: what follows RECIPE ends at the next one.
        text = re.sub(r"\bRECIPE\b((?:(?!\bRECIPE\b).)*)", lambda match: recipe_before(words, match[1]), text)
    return text.replace(f"{COMMAND} ", f"{program()} ")


def recipe_before(words: Sequence[str], rest: str) -> str:
    """Return the typed recipe and overrides, followed by the rest of a line; omit overrides that the rest sets."""
    kept = [word for word in words if f" {word.partition('=')[0]}=" not in rest]
    return shlex.join(kept) + rest


def typed_command() -> str:
    """Return this process's command line as the user typed it."""
    if program() != COMMAND:
        return shlex.join([program(), *sys.argv[1:]])
    return shlex.join(["python", *sys.orig_argv[1:]])  # sys.argv does not contain `-m jobs`


def echo(line: str) -> None:
    """Print a line of output immediately, without control characters."""
    text = as_typed(printable_lines(line))
    # If there is a bar, write above it with our own wrapping, so that commands in the text can be copied.
    if activity.bar is not None:
        activity.bar.write(wrapped(text, activity.bar.rich.console.width))
    else:
        print(for_stream(text, sys.stdout), flush=True)


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Raise OutputError if stdout cannot be written in this block, for example because it is a file on a full disk.

    A closed pipe stays a BrokenPipeError: nobody reads the output any more.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write to stdout: {reason}\n  redirect it to another disk: > FILE") from None


def write_last(text: str) -> None:
    """Write a last line to stderr before the process exits; give up after a few seconds if the write blocks."""
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
