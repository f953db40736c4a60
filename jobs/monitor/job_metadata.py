"""What a submitted job tells of itself while it runs: its metadata in Ray's table of jobs.

    update({"state": "PENDING", "waits_for": "4 workers of 1 GPU"})

1. The driver, in whatever thread, says what has changed. That takes no time and raises nothing: nobody trains worse
   because a table could not be written.
2. A thread merges it into the job's entry, at most once a second. Ray has no call for that: metadata is given once,
   when a job is submitted; so the entry is read and written where Ray keeps it (JobInfoStorageClient of Ray 2.60).
3. The dashboard shows it, and `python -m jobs list`, which asks the Jobs API over HTTP and need not be in the cluster.

A process that is no submitted job has no entry, and then nothing happens here.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import ray._raylet
from ray._private.ray_constants import KV_NAMESPACE_JOB
from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY, JobInfoStorageClient, JobStatus

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's name of the variable, by which a driver knows whose job it is
EVERY_S = 1.0  # between two writes
TIMEOUT_S = 5.0  # of a question to the head, which may be away

_lock = threading.Lock()  # of the three below
_said: dict[str, str] = {}  # all that this process has said, the newest
_unwritten: dict[str, str] = {}
_writers: list[threading.Thread] = []  # none or one
_has_news = threading.Event()
_writing = threading.Lock()  # held while the entry is read and written


def update(values: Mapping[str, str]) -> None:
    """Merge the values into this job's metadata soon; nothing happens where this process is no submitted job."""
    if not submission_id():
        return
    with _lock:
        for name, value in values.items():
            # Who looks every second says the same thing every second.
            if _said.get(name) != value:
                _said[name] = value
                _unwritten[name] = value
        if not _unwritten:
            return
        if not _writers:
            # A daemon, because the driver may end while the head does not answer.
            _writers.append(threading.Thread(target=_write_on, name="job-metadata", daemon=True))
            _writers[0].start()
    _has_news.set()


def flush() -> None:
    """Write what was said last, for a driver that is about to end; waits for a head that is away for a few seconds."""
    if _writers:
        _write_unwritten()


@cache
def submission_id() -> str:
    """Return the id under which this process was submitted as a job; "" where it was not."""
    settings = json.loads(os.environ.get(JOB_CONFIG, "{}"))
    return settings.get("metadata", {}).get(JOB_ID_METADATA_KEY, "")


def _write_on() -> None:
    while True:
        _has_news.wait()
        _has_news.clear()
        is_written = _write_unwritten()
        time.sleep(EVERY_S)
        # The head was away: the same once more, with what has been said since.
        if not is_written:
            _has_news.set()


def _write_unwritten() -> bool:
    """Write what has been said since the last time; return False where that failed, and keep it."""
    with _writing:
        with _lock:
            values = dict(_unwritten)
            _unwritten.clear()
        if not values:
            return True
        try:
            _merge(values)
        except Exception:
            with _lock:
                # What was said meanwhile is newer.
                for name, value in values.items():
                    _unwritten.setdefault(name, value)
            return False
    return True


def _merge(values: Mapping[str, str]) -> None:
    # Of its own, because a driver may say something before it joins the cluster, and after it has left.
    raylet: Any = ray._raylet  # compiled: no types
    client = raylet.GcsClient(address=os.environ["RAY_ADDRESS"])
    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=submission_id()).encode()
    namespace = KV_NAMESPACE_JOB
    entry = json.loads(client.internal_kv_get(key, namespace, timeout=TIMEOUT_S))
    # Ray writes the same entry when the job begins and when it has ended. In between it is ours alone; an end that Ray
    # has written while this process still lives is not to be overwritten.
    if entry["status"] != JobStatus.RUNNING.value:
        return
    entry["metadata"] = {**(entry["metadata"] or {}), **values}
    client.internal_kv_put(key, json.dumps(entry).encode(), True, namespace, timeout=TIMEOUT_S)
