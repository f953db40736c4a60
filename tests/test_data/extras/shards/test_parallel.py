"""Parallel jobs: results in order, errors raised, and no process left."""

import os
import threading
from functools import partial

import psutil
import pytest

from data.extras.shards.parallel import in_parallel

pytestmark = pytest.mark.quick


def square(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number, os.getpid()


@pytest.mark.parametrize(("workers", "in_threads"), [(1, False), (3, False), (3, True)])
def test_results_come_in_the_order_of_the_jobs_with_a_report_of_each(workers, in_threads):
    reports = []
    jobs = [partial(square, number) for number in range(7)]
    with in_parallel(
        jobs, workers, lambda done, all_jobs: reports.append((done, all_jobs)), in_threads=in_threads
    ) as got:
        values = list(got)
    assert [value for value, _ in values] == [0, 1, 4, 9, 16, 25, 36]
    assert reports[-1] == (7, 7)
    is_here = {pid == os.getpid() for _, pid in values}
    assert is_here == {workers == 1 or in_threads}


@pytest.mark.parametrize("workers", [1, 2])
def test_error_of_a_job_reaches_the_caller_and_no_process_remains(workers):
    before = set(psutil.Process().children(recursive=True))
    with (
        pytest.raises(ValueError, match="-1 is negative"),
        in_parallel([partial(square, n) for n in (2, -1)], workers) as got,
    ):
        list(got)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_threads_share_the_memory_of_the_caller():
    names = set()
    with in_parallel([lambda: names.add(threading.current_thread().name)] * 4, 2, in_threads=True) as got:
        list(got)
    assert threading.main_thread().name not in names
