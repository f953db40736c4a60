"""A decoding process as its loader sees it: started, given tasks, asked for answers, replaced where it dies or hangs.

1. `start` runs `python -m data.decoder`, with one end of a socket pair and a piece of anonymous memory.
2. `brief` sends it the decoder: index, order, sizes, seed.
3. `give` sends it a task and one of the places of its memory that are free.
4. `answer` waits for the oldest task. Where the process dies, or says nothing for `timeout_s`, a new one is started, is
   given all pending tasks and writes them into the same places; after four processes it gives up with DataError.
5. `lend` gives the arrays of that task, without copying them. Their place is free again when nobody holds them.
6. `end` kills it. It has nothing to clean up: the kernel frees the memory with the last user of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from weakref import finalize

import numpy as np

from data.decoder import Arrays, Decoder, Done, Task
from data.errors import DataError

ROOT = Path(__file__).parents[1]
RESTARTS = 3  # times that one micro-batch may cost a process its life


class DecoderProcess:
    """One decoding process, its pipe, and the memory that it shares with us.

    `prefetch` tasks may be pending at most. The memory has a place for one micro-batch more, which may be lent.
    """

    def __init__(self, decoder: Decoder, prefetch: int):
        self.decoder = decoder
        batch_bytes = decoder.layout.bytes
        all_bytes = (prefetch + 1) * batch_bytes
        # Memory without a name: nothing can be left behind in /dev/shm, whoever is killed.
        self.file = os.memfd_create("patchline-batches")
        os.ftruncate(self.file, all_bytes)
        self.memory = mmap(self.file, 0)
        self.free_offsets = deque(range(0, all_bytes, batch_bytes))
        self.pending: deque[tuple[Task, int]] = deque()  # tasks and their offsets, the oldest first
        self.start()

    def start(self) -> None:
        """Start the process, which then waits for its decoder."""
        # The command may have been typed in any folder, so the module path leads to the repository; -P keeps the
        # current folder off it. OMP_NUM_THREADS: the loader chose how many processes there are, each of them is to
        # use one core.
        python_path = str(ROOT)
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        ours, theirs = socketpair()
        # Our copy of the child's end is closed after the start, or its death would not end the stream on our side.
        # The child inherits these two files alone: it has no copy of our end, and so its stream ends when we are
        # gone.
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.decoder", str(theirs.fileno()), str(self.file)],
                pass_fds=(theirs.fileno(), self.file),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())

    def brief(self) -> None:
        """Send the decoder; a step of its own, so that all processes are started before the first one is waited for."""
        # The index may be larger than what a socket holds: sending then lasts until the process has started and
        # reads. A process that is dead already is found by `answer`.
        with suppress(OSError):
            self.connection.send(self.decoder)

    def give(self, task: Task) -> None:
        """Queue a task; one that a dead process cannot take is given to the next."""
        # The last one that became free: the spare place takes no memory as long as nothing is held.
        offset = self.free_offsets.pop()
        self.pending.append((task, offset))
        # A process that is dead is found by `answer`, which gives all pending tasks to the next one.
        with suppress(OSError):
            self.connection.send((task, offset))

    def answer(self, timeout_s: float) -> tuple[Task, int, Done]:
        """Return the oldest task, the offset of its arrays, which `lend` must be given, and what became of it.

        Raises what the process met, and DataError where the task costs one process after another its life.
        """
        task, offset = self.pending[0]
        for _ in range(RESTARTS + 1):
            answer = None
            with suppress(EOFError, OSError):  # it died
                answer = self.receive(timeout_s)
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                self.pending.popleft()
                return task, offset, answer
            self.restart()
        raise DataError(
            f"step {task.step}, slots {task.first} … {task.stop - 1}: {RESTARTS + 1} processes died or were "
            f"silent for {timeout_s:g} s over them; `python -m jobs data check` finds bad samples"
        )

    def lend(self, offset: int) -> Arrays:
        """Return the arrays of an answered task; no other task overwrites them while one of them is held."""
        place = np.ndarray(self.decoder.layout.bytes, np.uint8, self.memory, offset)
        if self.free_offsets:
            # Every array and every tensor on the place holds it: it ends with the last of them.
            finalize(place, self.free_offsets.append, offset).atexit = False
        else:
            # Others are held so long that this is the last place, and the next task needs it.
            place = place.copy()
            self.free_offsets.append(offset)
        return self.decoder.layout.arrays(place)

    def receive(self, timeout_s: float) -> Done | Exception | None:
        """Return the next answer; None where nothing came for `timeout_s`, not even word that a shard is arriving."""
        while self.connection.poll(timeout_s):
            message = self.connection.recv()
            if message is not None:  # None is a sign of life
                return message
        return None

    def restart(self) -> None:
        """Replace the process by a new one, which gets all pending tasks."""
        # What the old process had written is written again: a task gives the same bytes whoever runs it.
        self.stop()
        self.start()
        self.brief()
        with suppress(OSError):
            for task_and_offset in self.pending:
                self.connection.send(task_and_offset)

    def stop(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.connection.close()
        self.child.kill()
        self.child.wait()

    def end(self) -> None:
        """Stop the process and give the memory back."""
        self.stop()
        os.close(self.file)  # the mapping goes with the last array on it
