"""Many jobs side by side, in processes or in threads, which end when whoever waits for them does.

How the jobs are done, in order:
1. processes (or threads, for jobs that mostly wait) take one job after the other; one worker alone works right here;
2. the results come in the order of the jobs; `report` is told how many there are, of how many;
3. when the block ends, however it does, or this process is killed, the processes end too, in the midst of their jobs.

    jobs = [partial(index_shard, "train-000000.tar"), partial(index_shard, "train-000001.tar"), …]
    with in_parallel(jobs, workers=4) as results:
        for record in results:
            …
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import call
from typing import TypeVar

Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # jobs done, of how many


@contextmanager
def in_parallel(
    jobs: Sequence[Callable[[], Result]],
    workers: int,
    report: Progress | None = None,
    *,
    in_threads: bool = False,
) -> Iterator[Iterator[Result]]:
    """Give the block an iterator of the jobs' results, in order; for processes, a job is a partial."""
    if workers == 1:
        yield counted(map(call, jobs), len(jobs), report)
    elif in_threads:
        with ThreadPoolExecutor(workers) as threads:
            yield counted(threads.map(call, jobs), len(jobs), report)
    else:
        # Nothing is ever sent: the processes wait for the end of this pipe, which also comes when we are killed.
        reader, writer = Pipe(duplex=False)
        with (
            reader,
            ProcessPoolExecutor(workers, initializer=end_with_pipe, initargs=(reader, writer)) as processes,
            writer,  # closed first, before the executor waits for its processes
        ):
            # Its own `map` would cancel what is left at an interrupt, which an executor whose processes end trips over.
            futures = deque(map(processes.submit, jobs))
            # Each leaves the queue as its result is given: none is kept.
            yield counted((futures.popleft().result() for _ in jobs), len(jobs), report)


@contextmanager
def setting_at_error(stopped: threading.Event) -> Iterator[None]:
    """Set an event when the block raises or is interrupted: threads that look at it then end, and can be waited for."""
    try:
        yield
    except BaseException:
        stopped.set()
        raise


def counted(results: Iterable[Result], total: int, report: Progress | None) -> Iterator[Result]:
    """Give the same results; `report` is told of each one that has been dealt with."""
    for done, result in enumerate(results, start=1):
        yield result
        if report:
            report(done, total)


def end_with_pipe(reader: Connection, writer: Connection) -> None:
    """Make this process end when nobody but its likes holds the pipe: an executor's processes outlive it otherwise."""
    writer.close()  # a forked process has a copy of it
    # A forked process has its parent's handlers too. Ctrl-C reaches it as well, and is for the parent to hear.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_when_closed, args=(reader,), daemon=True).start()


def end_when_closed(reader: Connection) -> None:
    """End this process at once when the other end of a pipe is closed."""
    reader.poll(None)
    os._exit(1)
