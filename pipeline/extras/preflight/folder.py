"""Is a folder the same storage for the driver and for a worker's node, and can it do what a run asks of it?

The driver has written `driver.json`, and answers the requests of nodes (`answering`):

    request-h3-0.json  the token of the node h3
    answer-h3-0.json   the same token, and the time on the driver's clock

1. The node looks for the driver's file.
2. It asks, and takes the driver's clock from the answer; half of the time that it took is how far off it may be.
3. It tries what a run does: a link to a name that exists, a commit.
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
ANSWERED_WITHIN_S = 30.0  # as data.files waits for a file
REQUESTS = 3
POLL_S = 0.002
ANSWER_POLL_S = 0.005
REQUEST = "request-"
ANSWER = "answer-"
WRITTEN_BYTES = 2**24  # by each node, all at once


class FolderReport(TypedDict):
    """What a node has found out about the folder; JSON."""

    sees_driver: bool  # what the driver has written
    is_answered: bool  # the driver sees what the node has written
    skew_s: float | None  # of the node's clock against the driver's; positive: ahead. None: no answer
    uncertainty_s: float | None
    lacks: list[str]  # abilities that the file system does not have, in words
    written_bytes: int
    written_s: float  # until they were on the disk
    free_bytes: int


def report_on(folder: Path, name: str, *, is_shared: bool = True) -> FolderReport:
    """Look at the folder from this node, whose files there have `name` in theirs.

    Without `is_shared` the folder is this node's own, as where the run lies in an object store: only its disk is of
    interest, and the folder goes again.
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
        # Another folder, or none at all: nothing that follows would tell more.
        if unseen:
            return report
        # Of several requests the quickest answer tells the clock best.
        for number in range(REQUESTS):
            answer = request_time(folder, f"{REQUEST}{name}-{number}.json")
            if answer is None:
                break
            skew_s, uncertainty_s = answer
            report["is_answered"] = True
            if report["uncertainty_s"] is None or uncertainty_s < report["uncertainty_s"]:
                report["skew_s"] = skew_s
                report["uncertainty_s"] = uncertainty_s
        # Hard links, as a run uses them and with its function: where they do not keep a name, two commands on two
        # machines could own one run.
        try:
            first = create_exclusively(folder / f"claim-{name}", "1")
            second = create_exclusively(folder / f"claim-{name}", "2")
            if not first or second:
                report["lacks"].append("a hard link does not fail where its name exists")
        except (StorageError, OSError) as error:
            report["lacks"].append(str(error).splitlines()[0])
    else:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        # Written and committed as a checkpoint is.
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
def answering(folder: Path) -> Iterator[None]:
    """Be the driver while the block runs: leave its file in the folder, and answer requests."""
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
    """Request the driver's time; return this clock's skew and how far off it may be, in s; None without an answer."""
    token = secrets.token_hex(16)
    name = request.replace(REQUEST, ANSWER)
    # Before it is written: the driver may answer while this node still waits for its own fsync.
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
