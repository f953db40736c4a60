"""Run many jobs in parallel, in processes or threads that never outlive the caller.

How jobs run, in order:
1. Processes (or threads, for jobs that mostly wait) take one job at a time; with workers=1, the jobs run in the caller.
2. Results arrive in the order of the jobs; `report` is called with the number of finished jobs and the total.
3. When the block ends for any reason, or this process is killed, the processes end too, even during a job.

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
Progress = Callable[[int, int], None]  # called with (finished jobs, all jobs)


@contextmanager
def in_parallel(
    jobs: Sequence[Callable[[], Result]],
    workers: int,
    report: Progress | None = None,
    *,
    in_threads: bool = False,
) -> Iterator[Iterator[Result]]:
    """Context manager that yields an iterator of the jobs' results, in order; jobs for processes must be picklable."""
    if workers == 1:
        yield counted(map(call, jobs), len(jobs), report)
    elif in_threads:
        with ThreadPoolExecutor(workers) as threads:
            yield counted(threads.map(call, jobs), len(jobs), report)
    else:
        # No data is ever sent: the processes wait for the end of this pipe, which also closes if we are killed.
        reader, writer = Pipe(duplex=False)
        with (
            reader,
            ProcessPoolExecutor(workers, initializer=end_with_pipe, initargs=(reader, writer)) as processes,
            writer,  # must be closed before the executor waits for its processes
        ):
            # Submit individually: on an interrupt, `map` cancels pending jobs, which fails if the processes end.
            futures = deque(map(processes.submit, jobs))
            # Remove each future when its result is used, to free its memory.
            yield counted((futures.popleft().result() for _ in jobs), len(jobs), report)


@contextmanager
def set_on_error(stopped: threading.Event) -> Iterator[None]:
    """Set `stopped` if the block raises or is interrupted, so that threads that check it exit and can be joined."""
    try:
        yield
    except BaseException:
        stopped.set()
        raise


def counted(results: Iterable[Result], total: int, report: Progress | None) -> Iterator[Result]:
    """Yield the results unchanged, and report after the caller has processed each one."""
    for done, result in enumerate(results, start=1):
        yield result
        if report:
            report(done, total)


def end_with_pipe(reader: Connection, writer: Connection) -> None:
    """Make this process exit when the pipe closes; an executor's processes would otherwise outlive their parent."""
    writer.close()  # a forked process inherits a copy
    # A forked process inherits signal handlers too. Ctrl-C reaches all processes, but the parent handles it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_when_closed, args=(reader,), daemon=True).start()


def end_when_closed(reader: Connection) -> None:
    """Exit this process immediately when the other end of a pipe closes."""
    reader.poll(None)
    os._exit(1)
