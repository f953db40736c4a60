"""Check whether the driver and a worker's node share a folder, and whether the folder's file system supports a run.

The driver writes `driver.json` and replies to the nodes' requests (`acting_as_driver`):

    request-h3-0.json  a token from node h3
    answer-h3-0.json   the same token, and the time on the driver's clock

1. The node looks for the driver's file.
2. The node sends a request, and compares the clocks; the uncertainty of the difference is half of the round trip.
3. The node tests the operations that a run needs: a hard link to an existing name, and a commit.
"""

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from data.errors import StorageError
from data.files import (
    create_exclusively,
    error_text,
    free_bytes,
    look_for,
    names_in,
    sync,
    write_atomically,
    write_durably,
)

DRIVER_FILE = "driver.json"
ANSWERED_WITHIN_S = 30.0  # the same timeout as for a file in data.files
REQUESTS = 3
POLL_S = 0.002
ANSWER_POLL_S = 0.005
REQUEST = "request-"
ANSWER = "answer-"
WRITTEN_BYTES = 2**24  # written by each node, at the same time


class FolderReport(TypedDict):
    """A node's report on the folder, in JSON-serialisable form."""

    sees_driver: bool  # the node sees the file of the driver
    is_answered: bool  # the driver sees the files of the node
    skew_s: float | None  # clock of the node minus clock of the driver; None without an answer
    uncertainty_s: float | None
    lacks: list[str]  # descriptions of features that the file system does not support
    written_bytes: int
    written_s: float  # time including the sync to disk
    free_bytes: int


def report_on(folder: Path, name: str, *, is_shared: bool = True) -> FolderReport:
    """Test the folder from this node, and return the report; `name` is part of the names of the node's files.

    With `is_shared=False`, the folder is local to the node, as for a run in an object store: only its disk is tested,
    and the folder is deleted afterwards.
    """
    report: FolderReport = {
        "sees_driver": False,
        "is_answered": False,
        "skew_s": None,
        "uncertainty_s": None,
        "lacks": [],
        "written_bytes": 0,
        "written_s": 0.0,
        "free_bytes": 0,
    }
    if is_shared:
        unseen, _ = look_for(folder, {DRIVER_FILE: None})
        report["sees_driver"] = not unseen
        # The folder is missing or not shared: the other tests would be meaningless.
        if unseen:
            return report
        # The fastest of several answers gives the most precise clock difference.
        for number in range(REQUESTS):
            answer = request_time(folder, f"{REQUEST}{name}-{number}.json")
            if answer is None:
                break
            skew_s, uncertainty_s = answer
            report["is_answered"] = True
            if report["uncertainty_s"] is None or uncertainty_s < report["uncertainty_s"]:
                report["skew_s"] = skew_s
                report["uncertainty_s"] = uncertainty_s
        # Test hard links with the same function as a run: if a link can replace an existing name, commands on two
        # machines could both own the run.
        try:
            first = create_exclusively(folder / f"claim-{name}", "1")
            second = create_exclusively(folder / f"claim-{name}", "2")
            if not first or second:
                report["lacks"].append("a hard link to an existing name does not fail")
        except (StorageError, OSError) as error:
            report["lacks"].append(str(error).splitlines()[0])
    else:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        # Write and commit a file in the same way as a checkpoint.
        temporary = folder / f".tmp-{name}"
        temporary.mkdir()
        began = time.monotonic()
        write_durably(temporary / "file", os.urandom(WRITTEN_BYTES))
        sync(temporary)
        os.rename(temporary, folder / f"step-{name}")
        sync(folder)
        report["written_s"] = time.monotonic() - began
        report["written_bytes"] = WRITTEN_BYTES
        report["free_bytes"] = free_bytes(folder)
    except OSError as error:
        report["lacks"].append(error_text(error))
    finally:
        if not is_shared:
            shutil.rmtree(folder, ignore_errors=True)
    return report


@contextmanager
def acting_as_driver(folder: Path) -> Iterator[None]:
    """Act as the driver during a `with` block: write the driver's file to the folder, and reply to requests."""
    write_atomically(folder / DRIVER_FILE, json.dumps({"token": secrets.token_hex(16)}))
    has_ended = threading.Event()

    def answer_all() -> None:
        answered: set[str] = set()
        while not has_ended.wait(ANSWER_POLL_S):
            with suppress(OSError, ValueError):
                for path in folder.iterdir():
                    if path.name.startswith(REQUEST) and path.name not in answered:
                        token = json.loads(path.read_text())["token"]
                        answer = {"token": token, "time": time.time()}
                        write_atomically(folder / path.name.replace(REQUEST, ANSWER), json.dumps(answer))
                        answered.add(path.name)

    thread = threading.Thread(target=answer_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def request_time(folder: Path, request: str) -> tuple[float, float] | None:
    """Return the skew of this node's clock against the driver's, and the skew's uncertainty, both in seconds.

    Returns None if the driver does not reply.
    """
    token = secrets.token_hex(16)
    name = request.replace(REQUEST, ANSWER)
    # Take the time before the write: the driver may answer while this node is still in fsync.
    requested = time.time()
    write_atomically(folder / request, json.dumps({"token": token}))
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    while time.monotonic() < deadline:
        if name in names_in(folder):
            answered = time.time()
            answer = json.loads((folder / name).read_text())
            if answer["token"] == token:
                return (requested + answered) / 2 - answer["time"], (answered - requested) / 2
        time.sleep(POLL_S)
    return None
