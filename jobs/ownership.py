"""Ensure that a run has one owner: a lease in the run's storage, and numbered attempts to refuse late commits.

Files in the run's storage, a folder or a bucket:
    leases/000003.json      the lease of one command; the highest number owns the run, and only its holder writes it
    leases/000003.stop      requests that command to commit and stop (`python -m jobs stop RUN`)
    attempts/000007.json    a claimed attempt of a stage

The lifecycle of a lease (`Lease`):
1. `take` reads the newest lease. If its holder is alive, RunOwned names the holder. Otherwise this command creates the
   lease with the next number; if several commands try at the same time, only one succeeds.
2. A thread renews the lease every PERIOD_S by rewriting its file with an incremented counter. Before each renewal it
   checks for a higher number: if there is one, this command has lost the run and exits with code 73.
3. When the command ends, it marks the lease as released, so that the next command need not wait.

`holder_state` decides whether a holder is alive. It never compares the clocks of two machines, because they differ. If
the holder is a process on this machine, the kernel knows; otherwise, the lease is watched for at most LOST_PERIODS
renewal periods.

A holder suspended for longer notices the higher number before it writes anything (`Lease.confirm`). If its
workers still try to commit, their attempt number is too low: each commit first reads the newest number.
"""

import json
import math
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias, TypedDict, cast
from uuid import uuid4

from data.errors import ConfigError, PatchlineError, RunOwned, StorageError
from data.files import make_folder
from data.seal import Unsealed, seal, unseal
from data.storage import Storage
from jobs.terminal import typed_command
from pipeline.checkpoints.manifest import ATTEMPTS, newest_attempt

LEASES = "leases"
LEASE = "leases/{:06d}.json"
STOP = "leases/{:06d}.stop"
LEASE_NAME = re.compile(r"leases/(\d{6,})\.json")
PERIOD_S = 5.0  # interval between renewals
LOST_PERIODS = 4  # a holder is lost after this many missed renewals; a busy disk may delay one of them
RESERVE_BYTES = 64  # padding of a lease's file, because its counter and times get longer
READ_ATTEMPTS = 4  # attempts to read a lease whose file is incomplete
READ_RETRY_S = 0.05
LOG_WAIT_S = 1.0  # waits longer than this are logged
RAY_JOB = "Ray job"
SLURM_JOB = "Slurm job"
UNIT = "unit"
MAX_NAME_BYTES = 255  # bytes of a file's or folder's name (NAME_MAX of Linux)

# "free": no command holds the run; "held": its holder is alive; "lost": its holder died without releasing the lease.
State: TypeAlias = Literal["free", "held", "lost"]
Log = Callable[[str], None]


class LeaseRecord(TypedDict):
    """The content of a lease file."""

    token: str  # unique identifier of the command
    host: str
    machine: str  # boot id of the kernel and PID namespace, in which `pid` is valid
    system: str  # /etc/machine-id, which survives a reboot; "" if there is none
    pid: int
    start: str  # start time of the process in the kernel's ticks, because a pid may be reused
    job: str  # "Ray job digits-001-4f1a", "Slurm job 17", "unit patchline-driver@digits.service", or ""
    since: str
    command: str
    period_s: float
    renewals: int
    renewed: str  # time on the holder's clock, only for display
    renewed_s: float  # seconds since boot; comparable only on the same machine
    is_released: bool


@dataclass(frozen=True)
class SeenLease:
    """The newest lease of a run, as read from its storage."""

    number: int
    content: bytes
    record: LeaseRecord | None  # None if the content is truncated or altered
    stop_requested: bool = False

    @property
    def is_released(self) -> bool:
        """Return whether the holder has released the lease."""
        return self.record is not None and self.record["is_released"]

    @property
    def holder(self) -> str:
        """Describe the lease's holder: its process, host, job, start time and command."""
        if self.record is None:
            return f"the command of {LEASE.format(self.number)} (truncated or altered)"
        record = self.record
        job = f", {record['job']}," if record["job"] else ""
        return f"process {record['pid']} on {record['host']}{job} since {record['since']} ({record['command']})"


class Lease:
    """This command's lease on a run: inside `with Lease(storage, log):`, the command owns the run.

    Entering the block raises RunOwned if another command owns the run, ConfigError if the run directory cannot be
    created, or StorageError if the storage does not respond or does not support exclusive creation of files.
    """

    def __init__(self, storage: Storage, log: Log) -> None:
        self.storage = storage
        self.log = log
        self.number = 0  # 0 until the lease is taken
        self.previous_token = ""  # of the previous command on the run
        self.record: LeaseRecord = {
            "token": uuid4().hex,
            "host": socket.gethostname(),
            "machine": this_machine(),
            "system": this_system(),
            "pid": os.getpid(),
            "start": start_of(os.getpid()),
            "job": this_job(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": typed_command(),
            "period_s": PERIOD_S,
            "renewals": 0,
            "renewed": "",
            "renewed_s": 0.0,
            "is_released": False,
        }
        self.size_bytes = 0  # of the lease's file, once it has been written
        self.renewed_s = 0.0  # time of the last successful renewal, by `clock`
        self.lost: RunOwned | None = None  # set when another command owns the run
        self.awake_s = clock()  # when this process last ran, to detect that it was suspended
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        check_run_path(self.storage.local)
        make_folder(self.storage.local, self.storage.local)
        self.take()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended.set()
        self.thread.join()
        if self.lost is not None:
            return
        try:
            self.renew(is_released=True)
        except (PatchlineError, OSError) as error:
            self.log(
                f"could not release the lease of {self.storage.address()}: {error}; the next command will have to "
                "wait until it expires"
            )

    def take(self) -> None:
        """Acquire the lease, and with it the run.

        Raises RunOwned if another owner is alive, or StorageError or OSError if the storage fails.
        """
        # 1. In a store without conditional writes, two commands could create the same number.
        self.storage.check_exclusive_create(f"{ATTEMPTS}/{0:06d}.json")
        while True:
            # 2. If the newest lease has not been released, its holder may be alive.
            state, seen = holder_state(self.storage, self.log)
            if seen is not None and state == "held":
                raise owned_error(self.storage, seen)
            last_number = 0
            if seen is not None:
                last_number = seen.number
                if state == "lost":
                    self.log(f"taking over the run: {seen.holder} has not renewed its lease, and can no longer commit")
                self.previous_token = seen.record["token"] if seen.record is not None else ""
            # 3. If several commands try at once, one creates the number. The others try again and find its lease.
            if self.storage.create_once(LEASE.format(last_number + 1), self.content()):
                break
        self.number = last_number + 1
        self.renewed_s = self.record["renewed_s"]
        # 4. If this command was slow, other commands may already have created higher numbers and deleted this one.
        self.check()
        older = []
        for name in self.storage.list(LEASES):
            # Keep the temporary files of commands currently creating their lease.
            if "/.tmp-" not in name and name < LEASE.format(self.number):
                older.append(name)
        self.storage.delete(older)

    def check(self) -> None:
        """Raise RunOwned if another command has taken over the run; send this process SIGTERM if a stop was requested.

        Raises StorageError or OSError if the storage fails.
        """
        seen = newest_lease(self.storage)
        if seen is not None and seen.number > self.number:
            self.lost = owned_error(self.storage, seen)
            raise self.lost
        if seen is not None and seen.stop_requested:
            self.storage.delete([STOP.format(self.number)])
            os.kill(os.getpid(), signal.SIGTERM)  # handled like any other stop

    def confirm(self) -> None:
        """Raise RunOwned if another command is known to have taken over the run; cheap enough for every poll.

        The storage is read only if this process was suspended for longer than PERIOD_S.
        """
        if self.lost is not None:
            raise self.lost
        now = clock()
        gap_s = now - self.awake_s
        self.awake_s = now
        if gap_s > PERIOD_S:
            # If the storage does not respond, continue: the next commit reads it again.
            with suppress(StorageError, OSError):
                self.check()

    def check_at_end(self) -> None:
        """Raise RunOwned if another command has taken over the run; ignore unreachable storage."""
        self.storage.limit_retries()
        with suppress(StorageError, OSError):
            self.check()

    def renew(self, *, is_released: bool = False) -> None:
        """Rewrite this lease's file as a sign that the command is alive.

        Raises StorageError or OSError if the storage fails.
        """
        self.record["renewals"] += 1
        self.record["is_released"] = is_released
        self.storage.renew(LEASE.format(self.number), self.content())
        self.renewed_s = self.record["renewed_s"]

    def content(self) -> bytes:
        """Return the next content of the lease file."""
        self.record["renewed"] = time.strftime("%Y-%m-%d %H:%M:%S")
        self.record["renewed_s"] = clock()
        content = seal(self.record).encode()
        # Keep the size constant, so that the file can be overwritten in place.
        self.size_bytes = self.size_bytes or len(content) + RESERVE_BYTES
        return content.ljust(self.size_bytes)

    def age_s(self) -> float:
        """Return the seconds since the last successful renewal."""
        return clock() - self.renewed_s

    def keep(self) -> None:
        """Renew the lease every PERIOD_S until the command ends or another command has taken over the run."""
        has_failed = False
        while not self.has_ended.wait(PERIOD_S):
            try:
                self.check()
                self.renew()
                has_failed = False
            except RunOwned as error:
                self.log(f"another command has taken over the run; this one can no longer commit: {error}")
                # Interrupt the main thread with a signal, because it may be in a long wait (jobs/run/session.py).
                if not self.has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            # After any error, the next renewal may succeed. The workers' saves retry separately.
            except Exception as error:
                if not has_failed:
                    self.log(f"could not renew the lease of {self.storage.address()}; retrying: {error}")
                has_failed = True


# ------------------------------------------------------------------------ the leases of all commands


def newest_lease(storage: Storage) -> SeenLease | None:
    """Return the newest lease of a run; None if there has never been a lease.

    Raises StorageError or OSError if the storage fails.
    """
    seen: SeenLease | None = None
    for _ in range(READ_ATTEMPTS):
        names = storage.list(LEASES)
        number = max((number_of(name) for name in names), default=0)
        content = storage.read(LEASE.format(number)) if number else None
        if content is None:
            # There is no lease, or a newer command has deleted it after it was listed.
            continue
        try:
            record = cast(LeaseRecord, unseal(content.rstrip()))
        except Unsealed:
            # The file is being written right now, or it is permanently truncated or altered.
            seen = SeenLease(number, content, None)
            time.sleep(READ_RETRY_S)
            continue
        return SeenLease(number, content, record, STOP.format(number) in names)
    return seen


def holder_state(storage: Storage, log: Log, periods: float = LOST_PERIODS) -> tuple[State, SeenLease | None]:
    """Return whether a run has a live owner, and its newest lease; if unclear, watch the lease for `periods` renewals.

    `log` reports this wait. Raises StorageError or OSError if the storage fails.
    """
    seen = newest_lease(storage)
    if seen is None or seen.is_released:
        return "free", seen
    period_s = PERIOD_S
    if seen.record is not None:
        period_s = seen.record["period_s"]
    wait_s = periods * period_s
    # 1. A process on this machine: the kernel knows whether it is alive. If it is alive but has stopped renewing, watch
    #    the lease (3).
    if seen.record is not None and seen.record["machine"] == this_machine():
        if start_of(seen.record["pid"]) != seen.record["start"]:
            return "lost", seen
        if clock() - seen.record["renewed_s"] < wait_s:
            return "held", seen
    # 2. The same systemd unit on the same machine: systemd stops a unit before restarting it, and no process survives a
    # reboot. Different machines may share a name, or the id of a copied image, but not both.
    elif seen.record is not None and seen.record["job"].startswith(UNIT) and this_system():
        ours = (this_job(), socket.gethostname(), this_system())
        if (seen.record["job"], seen.record["host"], seen.record["system"]) == ours:
            return "lost", seen
    # 3. Any other holder: watch whether the lease changes. The times in the lease are not used.
    deadline = time.monotonic() + wait_s
    log_at = time.monotonic() + LOG_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(period_s / 20)
        now = newest_lease(storage)
        if now is not None and now.content != seen.content:
            return "free" if now.is_released else "held", now
        if time.monotonic() > log_at:
            log(f"waiting up to {wait_s:.0f} s for a lease renewal by {seen.holder}")
            log_at = math.inf
    return "lost", seen


def owned_error(storage: Storage, seen: SeenLease) -> RunOwned:
    """Return the error that names another command as the owner of a run."""
    address = storage.address()
    typed = shlex.quote(address)
    if seen.is_released:
        return RunOwned(
            f"{address} was taken over by {seen.holder}, which has ended since then\n"
            f"  for its result, run python -m jobs status {typed}\n"
            "  if some stages have not finished, run the same command again to resume"
        )
    return RunOwned(
        f"{address} is owned by {seen.holder}, which is still running\n"
        f"  to watch it, run python -m jobs status {typed}; to stop it, run python -m jobs stop {typed}\n"
        f"  if the owner dies, the same command can take over after {LOST_PERIODS * PERIOD_S:.0f} s\n"
        "  for a separate run, use another folder: run=…"
    )


def number_of(name: str) -> int:
    """Return the number in the name of a lease file; 0 for any other file."""
    match = LEASE_NAME.fullmatch(name)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------ this process


def clock() -> float:
    """Return the seconds since this machine booted, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_machine() -> str:
    """Return an identifier of the kernel's current boot and this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def this_system() -> str:
    """Return this machine's /etc/machine-id; "" if there is none."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start time of a process on this machine, in kernel ticks; "" if the process has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # The parent of a dead process may not have reaped it yet.
    return "" if state in "ZX" else fields[18]


def this_job() -> str:
    """Return this process's Ray job, Slurm job or systemd unit, for example "Slurm job 17"; "" if it has none."""
    # Ray sets this variable for the driver of a job.
    with suppress(ValueError, KeyError, TypeError):
        config = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        return f"{RAY_JOB} {config['metadata']['job_submission_id']}"
    if "SLURM_JOB_ID" in os.environ:
        return f"{SLURM_JOB} {os.environ['SLURM_JOB_ID']}"
    # Set by our unit (deploy/systemd).
    if "PATCHLINE_UNIT" in os.environ:
        return f"{UNIT} {os.environ['PATCHLINE_UNIT']}"
    return ""


# ------------------------------------------------------------------------ the run's folder, and its attempts


def check_run_path(run: Path) -> None:
    """Raise ConfigError if a path cannot be a run directory: a component is too long, or is a file."""
    if run == run.parent:
        raise ConfigError(f"run is {run}, expected a separate folder\n  set run={run}NAME")
    for name in run.parts:
        encoded_bytes = len(os.fsencode(name))
        if encoded_bytes > MAX_NAME_BYTES:
            raise ConfigError(
                f"run contains a name of {encoded_bytes} bytes: {name[:40]}…\n"
                f"  expected at most {MAX_NAME_BYTES} bytes\n  use a shorter name: run=…"
            )
    for path in (run, *run.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file\n  expected a run directory, or a path that does not exist yet\n"
                "  use another folder: run=…"
            )


def claim_attempt(storage: Storage, stage: str = "") -> int:
    """Claim the next attempt number of a run by creating a file such as attempts/000007.json; return the number.

    `stage` is the folder name of the attempt's stage. Raises StorageError or OSError if the storage fails.
    """
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "stage": stage}
    # If another process creates the same number first, read the newest number again.
    while True:
        number = newest_attempt(storage) + 1
        if storage.create_once(f"{ATTEMPTS}/{number:06d}.json", json.dumps(claim).encode()):
            return number
