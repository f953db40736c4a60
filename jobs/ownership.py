"""Ensures that a run has one owner: a lease in the run's storage, and numbered attempts to refuse late commits.

In the run's storage, whether it is a folder or a bucket:
    leases/000003.json      the lease of one command; the highest number owns the run, and only its holder writes it
    leases/000003.stop      asks that command to commit and end (`python -m jobs stop RUN`)
    attempts/000007.json    a claimed attempt of a stage

The life of a lease, in order (`Lease`):
1. `take` reads the newest lease. If its holder is alive, RunOwned names it. Otherwise this command creates the next
   number; if several commands try, only one of them succeeds.
2. A thread renews the lease every PERIOD_S by writing the same file with the next count. Before each renewal it checks
   for a higher number: if there is one, this command has lost the run and ends with exit code 73.
3. At its end the command marks the lease as released, so that the next command does not wait.

`holder_state` decides whether a holder is alive. It never compares the clocks of two machines, because they differ. For
a process on this machine it asks the kernel; for any other it watches the lease for at most LOST_PERIODS.

A holder that was frozen for longer notices the higher number before it writes anything (`Lease.confirm`). If its
workers still try to commit, the number of their attempt is too low: a commit reads the newest number first.
"""

import json
import math
import os
import re
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

from data.errors import ClusterError, ConfigError, PatchlineError, RunOwned, StorageError, UsageError
from data.files import make_folder
from data.seal import Unsealed, seal, unseal
from data.storage import Storage
from jobs.terminal import typed_command
from pipeline.checkpoints.manifest import ATTEMPTS, newest_attempt

LEASES = "leases"
LEASE = "leases/{:06d}.json"
STOP = "leases/{:06d}.stop"
LEASE_NAME = re.compile(r"leases/(\d{6,})\.json")
PERIOD_S = 5.0  # between two renewals
LOST_PERIODS = 4  # renewals that a living holder cannot miss; a busy disk may delay one of them
RESERVE_BYTES = 64  # blanks in the lease's file, because its count and its times grow
READ_TRIES = 4  # of a lease whose file is incomplete
READ_AGAIN_S = 0.05
STOP_POLL_S = 0.5
LOG_WAIT_S = 1.0  # a longer wait is logged
RAY_JOB = "Ray job"
SLURM_JOB = "Slurm job"
UNIT = "unit"
# Commands that something else restarts must be stopped there: what to type, by the prefix of `job`.
STOP_COMMANDS = {SLURM_JOB: "scancel --batch --signal=TERM", UNIT: "systemctl stop"}
LONGEST_NAME = 255  # bytes of a file's or folder's name (NAME_MAX of Linux)

# "free": nobody holds the run; "held": its holder is alive; "lost": its holder died without releasing the lease.
State: TypeAlias = Literal["free", "held", "lost"]
Log = Callable[[str], None]


class LeaseRecord(TypedDict):
    """Content of a lease's file."""

    token: str  # of the command
    host: str
    machine: str  # boot id of the kernel and PID namespace, within which `pid` is valid
    system: str  # /etc/machine-id, which survives a reboot; "" if there is none
    pid: int
    start: str  # start time of the process in the kernel's ticks, because a pid may be reused
    job: str  # "Ray job digits-001-4f1a", "Slurm job 17", "unit patchline-driver@digits.service", or ""
    since: str
    command: str
    period_s: float
    renewals: int
    renewed: str  # by the holder's clock; for people only
    renewed_s: float  # seconds since boot; comparable on the same machine only
    is_released: bool


@dataclass(frozen=True)
class SeenLease:
    """The newest lease of a run, as it was read."""

    number: int
    content: bytes
    record: LeaseRecord | None  # None if the content is incomplete or altered
    stop_requested: bool = False

    @property
    def is_released(self) -> bool:
        """Return whether the holder has released the lease at its end."""
        return self.record is not None and self.record["is_released"]

    @property
    def holder(self) -> str:
        """Describe the holder: its process, host, job, start time and command."""
        if self.record is None:
            return f"the command of {LEASE.format(self.number)}, which is incomplete or altered"
        record = self.record
        job = f", {record['job']}," if record["job"] else ""
        return f"process {record['pid']} on {record['host']}{job} since {record['since']} ({record['command']})"


class Lease:
    """The lease of this command on a run: `with Lease(storage, log):` owns the run during the block.

    Entering the block raises RunOwned, which names the command that owns the run, ConfigError if the run's folder
    cannot exist here, and StorageError if the storage does not answer or cannot exclude a second owner.
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
        self.awake_s = clock()  # when this process last ran, to detect that it was frozen
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
            self.log(f"could not release the lease of {self.storage.address()}, the next command has to wait: {error}")

    def take(self) -> None:
        """Become the owner of the run. Raises RunOwned if its owner is alive, StorageError."""
        # 1. In a store without conditional writes, two commands could create the same number.
        self.storage.check_exclusive_create(f"{ATTEMPTS}/{0:06d}.json")
        while True:
            # 2. If the lease is not released, its holder may be alive.
            state, seen = holder_state(self.storage, self.log)
            if seen is not None and state == "held":
                raise owned_error(self.storage, seen)
            last_number = 0
            if seen is not None:
                last_number = seen.number
                if state == "lost":
                    self.log(f"taking the run over: no sign of life from {seen.holder}; it can no longer commit")
                self.previous_token = seen.record["token"] if seen.record is not None else ""
            # 3. If several commands try at once, one creates the number. The others try again and find its lease.
            if self.storage.create_once(LEASE.format(last_number + 1), self.content()):
                break
        self.number = last_number + 1
        self.renewed_s = self.record["renewed_s"]
        # 4. If this command was slow, another one may have created, used and deleted this number.
        self.check()
        older = []
        for name in self.storage.list(LEASES):
            # Keep the temporary files of commands creating their lease at the same time.
            if "/.tmp-" not in name and name < LEASE.format(self.number):
                older.append(name)
        self.storage.delete(older)

    def check(self) -> None:
        """Raise RunOwned if another command has taken the run over; if a stop was requested, signal this process.

        Raises StorageError, OSError.
        """
        seen = newest_lease(self.storage)
        if seen is not None and seen.number > self.number:
            self.lost = owned_error(self.storage, seen)
            raise self.lost
        if seen is not None and seen.stop_requested:
            self.storage.delete([STOP.format(self.number)])
            os.kill(os.getpid(), signal.SIGTERM)  # handled like any other stop

    def confirm(self) -> None:
        """Raise RunOwned if another command is known to have taken the run over. Cheap enough for every poll.

        Reads the storage only if this process has not run for a while.
        """
        if self.lost is not None:
            raise self.lost
        now = clock()
        gap_s = now - self.awake_s
        self.awake_s = now
        if gap_s > PERIOD_S:
            # If the storage does not answer now, continue: a commit will read it again.
            with suppress(StorageError, OSError):
                self.check()

    def check_at_end(self) -> None:
        """Raise RunOwned if another command has taken the run over; an unreachable storage does not delay the end."""
        self.storage.limit_retries()
        with suppress(StorageError, OSError):
            self.check()

    def renew(self, *, is_released: bool = False) -> None:
        """Write this lease again as a sign of life. Raises StorageError, OSError."""
        self.record["renewals"] += 1
        self.record["is_released"] = is_released
        self.storage.renew(LEASE.format(self.number), self.content())
        self.renewed_s = self.record["renewed_s"]

    def content(self) -> bytes:
        """Return the next content of the lease's file."""
        self.record["renewed"] = time.strftime("%Y-%m-%d %H:%M:%S")
        self.record["renewed_s"] = clock()
        content = seal(self.record).encode()
        # Always the same size, so that the file can be written in place.
        self.size_bytes = self.size_bytes or len(content) + RESERVE_BYTES
        return content.ljust(self.size_bytes)

    def age_s(self) -> float:
        """Return the seconds since the last successful renewal."""
        return clock() - self.renewed_s

    def keep(self) -> None:
        """Renew the lease repeatedly until the command ends or another one has taken the run over."""
        has_failed = False
        while not self.has_ended.wait(PERIOD_S):
            try:
                self.check()
                self.renew()
                has_failed = False
            except RunOwned as error:
                self.log(f"another command has taken the run over, this one can no longer commit: {error}")
                # The main thread may be busy or waiting for long: a signal interrupts it (jobs/run/session.py).
                if not self.has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            # Whatever the error is, the next renewal may succeed. The workers' saves retry separately.
            except Exception as error:
                if not has_failed:
                    self.log(f"could not renew the lease of {self.storage.address()}, retrying: {error}")
                has_failed = True


# ------------------------------------------------------------------------ the leases of all commands


def newest_lease(storage: Storage) -> SeenLease | None:
    """Return the newest lease of a run; None if there has never been one. Raises StorageError, OSError."""
    seen: SeenLease | None = None
    for _ in range(READ_TRIES):
        names = storage.list(LEASES)
        number = max((number_of(name) for name in names), default=0)
        content = storage.read(LEASE.format(number)) if number else None
        if content is None:
            # There is no lease, or a newer command has deleted it since it was listed.
            continue
        try:
            record = cast(LeaseRecord, unseal(content.rstrip()))
        except Unsealed:
            # It is being written right now, or is incomplete or altered for good.
            seen = SeenLease(number, content, None)
            time.sleep(READ_AGAIN_S)
            continue
        return SeenLease(number, content, record, STOP.format(number) in names)
    return seen


def holder_state(storage: Storage, log: Log, periods: float = LOST_PERIODS) -> tuple[State, SeenLease | None]:
    """Return whether a run is held, and its newest lease; if necessary, watch the lease for at most `periods`.

    `log` reports such a wait. Raises StorageError, OSError.
    """
    seen = newest_lease(storage)
    if seen is None or seen.is_released:
        return "free", seen
    period_s = PERIOD_S
    if seen.record is not None:
        period_s = seen.record["period_s"]
    wait_s = periods * period_s
    # 1. A process on this machine: ask the kernel, and compare its clock. A living process without renewals is frozen.
    if seen.record is not None and seen.record["machine"] == this_machine():
        if start_of(seen.record["pid"]) != seen.record["start"]:
            return "lost", seen
        if clock() - seen.record["renewed_s"] < wait_s:
            return "held", seen
    # 2. systemd ends a unit before it restarts it, and a reboot leaves no process behind. Two machines may have the
    # same name, or the same id from a copied image; if both are equal, it is the same machine.
    elif seen.record is not None and seen.record["job"].startswith(UNIT) and this_system():
        ours = (this_job(), socket.gethostname(), this_system())
        if (seen.record["job"], seen.record["host"], seen.record["system"]) == ours:
            return "lost", seen
    # 3. Any other holder: watch whether the lease changes. The times in it are not used.
    deadline = time.monotonic() + wait_s
    log_at = time.monotonic() + LOG_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(period_s / 20)
        now = newest_lease(storage)
        if now is not None and now.content != seen.content:
            return "free" if now.is_released else "held", now
        if time.monotonic() > log_at:
            log(f"waiting up to {wait_s:.0f} s for a sign of life from {seen.holder}")
            log_at = math.inf
    return "lost", seen


def owned_error(storage: Storage, seen: SeenLease) -> RunOwned:
    """Return the error that names another command as the owner of a run."""
    address = storage.address()
    if seen.is_released:
        return RunOwned(
            f"{address} was taken over by {seen.holder}, which has ended since\n"
            f"  see how it ended: python -m jobs status {address}\n"
            "  if its stages have not all finished, type the same command again to resume"
        )
    return RunOwned(
        f"{address} is owned by {seen.holder}, which is alive\n"
        f"  watch it: python -m jobs status {address}; end it: python -m jobs stop {address}\n"
        f"  the same command can take over {LOST_PERIODS * PERIOD_S:.0f} s after the owner's death; "
        "or give this run another name: run=…"
    )


def stop_holder(storage: Storage, seen: SeenLease, log: Log, patience_s: float) -> None:
    """Ask the command that holds a run to commit and end, wherever it runs; return when it has ended.

    The command notices the request at its next renewal. Raises ClusterError if it does not end in time, UsageError if
    something would restart it, StorageError.
    """
    for kind, words in STOP_COMMANDS.items():
        if seen.record is not None and seen.record["job"].startswith(kind):
            name = seen.record["job"].removeprefix(kind).strip()
            raise UsageError(
                f"{seen.holder} would be restarted when it ends\n"
                "  `jobs stop` works only for commands that nothing restarts\n"
                f"  type on {seen.record['host']}: {words} {name}"
            )
    storage.put(STOP.format(seen.number), b"")
    log(f"asked {seen.holder} to finish its step, commit and end; waiting up to {patience_s:.0f} s")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        state, now = holder_state(storage, log)
        if state == "lost":
            log(f"it died without committing; to see its last step: python -m jobs status {storage.address()}")
            return
        if state == "free" or now is None or now.number > seen.number:
            log(f"it has ended; to see how: python -m jobs status {storage.address()}")
            return
        time.sleep(STOP_POLL_S)
    raise ClusterError(
        f"{seen.holder} still owns {storage.address()} after {patience_s:.0f} s\n"
        "  it should have committed its step and ended; its storage may be slow\n"
        f"  type `python -m jobs stop {storage.address()}` again, or kill it on its machine"
    )


def number_of(name: str) -> int:
    """Return the number in the name of a lease's file; 0 for any other file."""
    match = LEASE_NAME.fullmatch(name)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------ this process


def clock() -> float:
    """Return the seconds since this machine was booted, including time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_machine() -> str:
    """Return an identifier of the kernel's boot and of the PID namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def this_system() -> str:
    """Return the id of this machine's system installation; "" if it has none."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start time of a process of this machine in the kernel's ticks; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # The parent of a dead process may not have reaped it yet.
    return "" if state in "ZX" else fields[18]


def this_job() -> str:
    """Return the Ray or Slurm job, or the systemd unit, of this process, such as "Slurm job 17"; "" without one."""
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
    """Raise ConfigError if a run cannot have this folder: its name is too long, or a file is in the way."""
    if run == run.parent:
        raise ConfigError(f"run is {run}, expected a separate folder\n  type run={run}NAME")
    for name in run.parts:
        encoded_bytes = len(os.fsencode(name))
        if encoded_bytes > LONGEST_NAME:
            raise ConfigError(
                f"run has a name of {encoded_bytes} bytes: {name[:40]}…\n  expected {LONGEST_NAME} at most\n"
                "  give the run a shorter name: run=…"
            )
    for path in (run, *run.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file\n  expected the folder of a run, or a name that does not exist yet\n"
                "  give the run another name: run=…"
            )


def claim_attempt(storage: Storage, stage: str = "") -> int:
    """Claim the next attempt number of a run by creating attempts/000007.json, and return the number.

    `stage` is the folder name of the attempt's stage. Raises StorageError, OSError.
    """
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "stage": stage}
    # If another process creates the same number first, read the newest number again.
    while True:
        number = newest_attempt(storage) + 1
        if storage.create_once(f"{ATTEMPTS}/{number:06d}.json", json.dumps(claim).encode()):
            return number
