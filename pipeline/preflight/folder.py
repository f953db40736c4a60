"""Is a folder the same storage for the driver and for a worker's node, and can it do what a run asks of it?

The driver has written `driver.json`, holds a lock on `lock`, and answers what nodes ask (jobs/commands/preflight.py):

    ask-00003-0.json      a worker's token
    answer-00003-0.json   the same token, and the time on the driver's clock

1. The worker looks for the driver's file.
2. It asks, and takes the driver's clock from the answer; half of the time that it took is how far off it may be.
3. It tries what a run does: a lock that another process has, a link to a name that exists, a commit.
"""

import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TypedDict

from data.errors import StorageError
from data.files import create_exclusively, free_bytes, locked, refusal, sync, write_durably, write_whole
from pipeline.checkpoints.shared_storage_check import look_for, names_in

DRIVER_FILE = "driver.json"
LOCK_FILE = "lock"
ANSWERED_WITHIN_S = 30.0  # as pipeline.checkpoints.shared_storage_check waits for a file
ASKED_TIMES = 3
POLL_S = 0.002
WRITTEN_BYTES = 2**24  # by each node, all at once


class FolderReport(TypedDict):
    """What a node has found out about the folder; JSON."""

    sees_driver: bool  # what the driver has written
    is_answered: bool  # the driver sees what the node has written
    skew_s: float | None  # of the node's clock against the driver's; positive: ahead. None: no answer
    uncertainty_s: float | None
    lacks: list[str]  # what the file system cannot do, in words
    written_bytes: int
    written_s: float  # until they were on the disk
    free_bytes: int


def ask_file(rank: int, number: int) -> str:
    """Return the name of a worker's question."""
    return f"ask-{rank:05d}-{number}.json"


def answer_file(question: str) -> str:
    """Return the name of the driver's answer to a question."""
    return question.replace("ask-", "answer-")


def report_on(folder: Path, rank: int) -> FolderReport:
    """Look at the folder from this node; `rank` is of the worker that does it."""
    unseen, _ = look_for(folder, {DRIVER_FILE: None})
    report: FolderReport = {
        "sees_driver": not unseen,
        "is_answered": False,
        "skew_s": None,
        "uncertainty_s": None,
        "lacks": [],
        "written_bytes": 0,
        "written_s": 0.0,
        "free_bytes": 0,
    }
    # Another folder, or none at all: nothing that follows would tell more.
    if unseen:
        return report
    # Of several questions the one that was answered fastest tells the clock best.
    for number in range(ASKED_TIMES):
        answer = ask(folder, ask_file(rank, number))
        if answer is None:
            break
        skew_s, uncertainty_s = answer
        report["is_answered"] = True
        if report["uncertainty_s"] is None or uncertainty_s < report["uncertainty_s"]:
            report["skew_s"] = skew_s
            report["uncertainty_s"] = uncertainty_s
    report["lacks"] = lacking(folder, rank)
    try:
        report["written_s"] = write_a_file(folder, rank)
        report["written_bytes"] = WRITTEN_BYTES
    except OSError as error:
        report["lacks"].append(refusal(error))
    report["free_bytes"] = free_bytes(folder)
    return report


def report_on_own(folder: Path, rank: int) -> FolderReport:
    """Look at a folder that every node has for itself, as where the run lies in an object store: only at its disk."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return {
            "sees_driver": False,
            "is_answered": False,
            "skew_s": None,
            "uncertainty_s": None,
            "lacks": [],
            "written_s": write_a_file(folder, rank),
            "written_bytes": WRITTEN_BYTES,
            "free_bytes": free_bytes(folder),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ask(folder: Path, question: str) -> tuple[float, float] | None:
    """Ask the driver; return (skew of this clock, how far off that may be) in seconds, None without an answer."""
    token = secrets.token_hex(16)
    write_whole(folder / question, json.dumps({"token": token}))
    asked = time.time()
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    while time.monotonic() < deadline:
        if answer_file(question) in names_in(folder):
            answered = time.time()
            answer = json.loads((folder / answer_file(question)).read_text())
            if answer["token"] == token:
                return (asked + answered) / 2 - answer["time"], (answered - asked) / 2
        time.sleep(POLL_S)
    return None


def lacking(folder: Path, rank: int) -> list[str]:
    """Try what a run asks of its file system, with the functions that a run uses; return what fails, in words."""
    lacks = []
    # The driver has this lock: where we get it, two commands on two machines could own one run.
    try:
        with locked(folder / LOCK_FILE, wait=False) as is_ours:
            if is_ours:
                lacks.append("a lock (flock) that the driver holds is not seen")
    except StorageError as error:
        lacks.append(str(error).splitlines()[0])
    try:
        first = create_exclusively(folder / f"claim-{rank:05d}", "1")
        second = create_exclusively(folder / f"claim-{rank:05d}", "2")
        if not first or second:
            lacks.append("a hard link does not fail where its name exists")
    except (StorageError, OSError) as error:
        lacks.append(str(error).splitlines()[0])
    return lacks


def write_a_file(folder: Path, rank: int) -> float:
    """Write and commit as a checkpoint is; return the seconds until it was on the disk.

    Raises OSError where the disk refuses.
    """
    temporary = folder / f".tmp-{rank:05d}"
    temporary.mkdir()
    began = time.monotonic()
    write_durably(temporary / "file", os.urandom(WRITTEN_BYTES))
    sync(temporary)
    os.rename(temporary, folder / f"step-{rank:05d}")
    sync(folder)
    return time.monotonic() - began
