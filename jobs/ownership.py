"""One owner a run: a lease in the run's storage, and attempts numbered so that a late commit can be refused.

In the run's storage, whether it is a folder or a bucket:
    leases/000003.json      the lease of one command; the highest number owns the run, and only its holder writes it
    leases/000003.stop      somebody asks that command to commit and end (`python -m jobs stop RUN`)
    attempts/000007.json    an attempt of a stage that was claimed

The life of a lease, in order (`Lease`):
1. `take` reads the newest lease. Where its holder lives, RunOwned names it. Else this command creates the next number,
   which of all commands that try only one can.
2. A thread renews the lease every PERIOD_S: it writes the same file with the next count. Before each renewal it looks
   for a higher number: where there is one, this command has lost the run, and ends with exit code 73.
3. The end of the command marks the lease as released: the next command does not wait.

Whether a holder lives (`judge`) is told without comparing clocks, because those of two machines differ: a process of
this machine is asked of the kernel; that of another one is watched until its lease changes, for LOST_PERIODS at most.

A holder that was frozen for longer finds the higher number before it writes anything (`Lease.confirm`). What its
workers would still commit is refused by the number of their attempt: a commit reads the newest number first.
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
LOST_PERIODS = 4  # without a renewal, after which a holder is taken for dead; a busy disk may hold up one of them
RESERVE_BYTES = 64  # in a lease's file, as blanks: its count and its times grow
READ_TRIES = 4  # of a lease that is not whole at the first look
READ_AGAIN_S = 0.05
STOP_POLL_S = 0.5
LOG_WAIT_S = 1.0  # a longer wait is told
RAY_JOB = "Ray job"
SLURM_JOB = "Slurm job"
UNIT = "unit"
# Who starts a command again must be told itself that it is to end: what to type, by how `job` begins.
HOW_TO_END = {SLURM_JOB: "scancel --batch --signal=TERM", UNIT: "systemctl stop"}
LONGEST_NAME = 255  # bytes of a file's or folder's name (NAME_MAX of Linux)

# "free": nobody holds the run; "held": its holder lives; "lost": its holder has not said that it ends, and is gone.
State: TypeAlias = Literal["free", "held", "lost"]
Log = Callable[[str], None]


class LeaseRecord(TypedDict):
    """Holds what a lease says."""

    token: str  # of one command
    host: str
    machine: str  # a boot of a kernel, and a table of processes of it: only there `pid` says something
    system: str  # /etc/machine-id, which outlives a boot; "" where there is none
    pid: int
    start: str  # of the process, in the kernel's ticks: another process may get the same pid
    job: str  # "Ray job digits-001-4f1a", "Slurm job 17", "unit patchline-driver@digits.service", or ""
    since: str
    command: str
    period_s: float
    renewals: int
    renewed: str  # by the holder's clock; for people alone
    renewed_s: float  # by the kernel's clock since its boot: it says something on the same machine alone
    is_released: bool


@dataclass(frozen=True)
class Seen:
    """Holds the newest lease of a run as it was read."""

    number: int
    content: bytes
    record: LeaseRecord | None  # None where the content is torn or altered
    is_asked_to_stop: bool = False

    @property
    def is_released(self) -> bool:
        """Tell whether the holder has said that it ends."""
        return self.record is not None and self.record["is_released"]

    @property
    def holder(self) -> str:
        """Name the holder: its process, host and job, since when it runs, and its command."""
        if self.record is None:
            return f"the command of {LEASE.format(self.number)}, which is torn or altered"
        record = self.record
        job = f", {record['job']}," if record["job"] else ""
        return f"process {record['pid']} on {record['host']}{job} since {record['since']} ({record['command']})"


class Lease:
    """The lease of this command on a run: `with Lease(storage, log):` owns the run for the length of the block.

    The block's begin raises RunOwned, which names the command that owns the run, ConfigError where the run cannot have
    a folder here, StorageError where the storage does not answer or cannot keep two owners apart.
    """

    def __init__(self, storage: Storage, log: Log) -> None:
        self.storage = storage
        self.log = log
        self.number = 0  # 0 until it is taken
        self.last_token = ""  # of the command that held the run before
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
        self.size_bytes = 0  # of the file, once it has been written
        self.taken_s = 0.0  # when the storage took the last renewal, by `clock`
        self.lost: RunOwned | None = None  # once another command is seen to own the run
        self.awake_s = clock()  # when this process was last seen to run
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        check_place(self.storage.local)
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
            self.log(f"the lease of {self.storage.address()} is not released, the next command waits for it: {error}")

    def take(self) -> None:
        """Become the owner of the run. Raises RunOwned, StorageError."""
        # 1. Of a store without conditional writes two commands could create one number.
        self.storage.check_exclusive_create(f"{ATTEMPTS}/{0:06d}.json")
        while True:
            # 2. A holder that has not said that it ends may live.
            state, seen = judge(self.storage, self.log)
            if seen is not None and state == "held":
                raise owned_by(self.storage, seen)
            last_number = 0
            if seen is not None:
                last_number = seen.number
                if state == "lost":
                    self.log(f"no sign of life: taking the run over; should {seen.holder} wake up, it cannot commit")
                self.last_token = seen.record["token"] if seen.record is not None else ""
            # 3. Of those that come at once one creates the number. The others look again, and find it alive.
            if self.storage.create_once(LEASE.format(last_number + 1), self.content()):
                break
        self.number = last_number + 1
        self.taken_s = self.record["renewed_s"]
        # 4. Where this command was slow, the number may have been another's, which is deleted by now.
        self.check()
        older = []
        for name in self.storage.list(LEASES):
            # What a command that came at the same time is about to create is its own.
            if "/.tmp-" not in name and name < LEASE.format(self.number):
                older.append(name)
        self.storage.delete(older)

    def check(self) -> None:
        """Raise RunOwned where another command has taken the run over; end as asked where somebody asks for it.

        Raises StorageError, OSError.
        """
        seen = newest_lease(self.storage)
        if seen is not None and seen.number > self.number:
            self.lost = owned_by(self.storage, seen)
            raise self.lost
        if seen is not None and seen.is_asked_to_stop:
            self.storage.delete([STOP.format(self.number)])
            os.kill(os.getpid(), signal.SIGTERM)  # it is heard as any stop is

    def confirm(self) -> None:
        """Raise RunOwned where another command is known to have taken the run over.

        The storage is asked only where this process did not run for a while: called again and again, it costs nothing.
        """
        if self.lost is not None:
            raise self.lost
        now = clock()
        gap_s = now - self.awake_s
        self.awake_s = now
        if gap_s > PERIOD_S:
            # A storage that does not answer now is no reason to end: the commit will ask it too.
            with suppress(StorageError, OSError):
                self.check()

    def check_at_end(self) -> None:
        """Raise RunOwned where another command has taken the run over; a storage that is gone holds up no end."""
        self.storage.limit_retries()
        with suppress(StorageError, OSError):
            self.check()

    def renew(self, *, is_released: bool = False) -> None:
        """Write this lease anew: the command's sign of life. Raises StorageError, OSError."""
        self.record["renewals"] += 1
        self.record["is_released"] = is_released
        self.storage.renew(LEASE.format(self.number), self.content())
        self.taken_s = self.record["renewed_s"]

    def content(self) -> bytes:
        """Return what the lease's file holds from now on."""
        self.record["renewed"] = time.strftime("%Y-%m-%d %H:%M:%S")
        self.record["renewed_s"] = clock()
        content = seal(self.record).encode()
        # Always as many bytes, so that it can be written in place.
        self.size_bytes = self.size_bytes or len(content) + RESERVE_BYTES
        return content.ljust(self.size_bytes)

    def age_s(self) -> float:
        """Return the seconds since the last renewal that the storage has taken."""
        return clock() - self.taken_s

    def keep(self) -> None:
        """Renew the lease again and again, until the command ends or another one has taken the run over."""
        has_failed = False
        while not self.has_ended.wait(PERIOD_S):
            try:
                self.check()
                self.renew()
                has_failed = False
            except RunOwned as error:
                self.log(f"taken over, nothing of this command is committed any more: {error}")
                # The main thread may be at work for long, or wait: a signal reaches it (jobs/run/session.py).
                if not self.has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            # Whatever it is, the next renewal may succeed. The workers' saves have a patience of their own.
            except Exception as error:
                if not has_failed:
                    self.log(f"the lease of {self.storage.address()} is not renewed: {error}")
                has_failed = True


# ------------------------------------------------------------------------ what others see


def newest_lease(storage: Storage) -> Seen | None:
    """Return the newest lease of a run; None where there was never one. Raises StorageError, OSError."""
    seen: Seen | None = None
    for _ in range(READ_TRIES):
        names = storage.list(LEASES)
        number = max((number_of(name) for name in names), default=0)
        content = storage.read(LEASE.format(number)) if number else None
        if content is None:
            # There is none, or a newer command has deleted it since the look.
            continue
        try:
            record = cast(LeaseRecord, unseal(content.rstrip()))
        except Unsealed:
            # It is being written at this very moment, or is torn or altered for good.
            seen = Seen(number, content, None)
            time.sleep(READ_AGAIN_S)
            continue
        return Seen(number, content, record, STOP.format(number) in names)
    return seen


def judge(storage: Storage, log: Log, periods: float = LOST_PERIODS) -> tuple[State, Seen | None]:
    """Tell whether a run is held, and by which lease; `log` is told of a wait, which is of `periods` at most.

    Raises StorageError, OSError.
    """
    seen = newest_lease(storage)
    if seen is None or seen.is_released:
        return "free", seen
    period_s = PERIOD_S
    if seen.record is not None:
        period_s = seen.record["period_s"]
    wait_s = periods * period_s
    # 1. The kernel knows a process of this machine, and its clock. One that lives and renews nothing may be frozen.
    if seen.record is not None and seen.record["machine"] == this_machine():
        if start_of(seen.record["pid"]) != seen.record["start"]:
            return "lost", seen
        if clock() - seen.record["renewed_s"] < wait_s:
            return "held", seen
    # 2. systemd ends a unit before it starts it again, and of a machine's last boot no process is left. Two machines
    # may have one name, or one id by a copied image; with both they are the same.
    elif seen.record is not None and seen.record["job"].startswith(UNIT) and this_system():
        ours = (this_job(), socket.gethostname(), this_system())
        if (seen.record["job"], seen.record["host"], seen.record["system"]) == ours:
            return "lost", seen
    # 3. Any other is watched: a lease that changes is alive. No time in it is looked at.
    deadline = time.monotonic() + wait_s
    log_at = time.monotonic() + LOG_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(period_s / 20)
        now = newest_lease(storage)
        if now is not None and now.content != seen.content:
            return "free" if now.is_released else "held", now
        if time.monotonic() > log_at:
            log(f"waiting for a sign of life of {seen.holder}, for {wait_s:.0f} s")
            log_at = math.inf
    return "lost", seen


def owned_by(storage: Storage, seen: Seen) -> RunOwned:
    """Return the error that names another command as the owner of a run."""
    address = storage.address()
    if seen.is_released:
        return RunOwned(
            f"{address} was taken over by {seen.holder}, which has ended since\n"
            f"  see how: python -m jobs status {address}\n"
            "  where its stages have not all finished, type the same command again to go on"
        )
    return RunOwned(
        f"{address} is owned by {seen.holder}, which is alive\n"
        f"  watch it: python -m jobs status {address}; end it: python -m jobs stop {address}\n"
        f"  once it is dead for {LOST_PERIODS * PERIOD_S:.0f} s the same command takes over; or give this run another "
        "name: run=…"
    )


def stop_holder(storage: Storage, seen: Seen, log: Log, patience_s: float) -> None:
    """Ask the command that holds a run to commit and end, wherever it runs, and return when it has ended.

    It hears of it with its next renewal. Raises ClusterError where it has not ended in time, UsageError where it would
    be started again, StorageError.
    """
    for kind, words in HOW_TO_END.items():
        if seen.record is not None and seen.record["job"].startswith(kind):
            name = seen.record["job"].removeprefix(kind).strip()
            raise UsageError(
                f"{seen.holder} is started again when it ends\n"
                "  expected a command that nothing starts again\n"
                f"  type on {seen.record['host']}: {words} {name}"
            )
    storage.put(STOP.format(seen.number), b"")
    log(f"asked {seen.holder} to finish its step, commit and end, for up to {patience_s:.0f} s")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        state, now = judge(storage, log)
        if state == "lost":
            log(f"it ended without a word; see where: python -m jobs status {storage.address()}")
            return
        if state == "free" or now is None or now.number > seen.number:
            log(f"it has ended; see how: python -m jobs status {storage.address()}")
            return
        time.sleep(STOP_POLL_S)
    raise ClusterError(
        f"{seen.holder} still owns {storage.address()} after {patience_s:.0f} s\n"
        "  expected it to commit its step and end; its storage may be slow\n"
        f"  type `python -m jobs stop {storage.address()}` again, or end it on its own machine"
    )


def number_of(name: str) -> int:
    """Return the number of a lease by the name of its file; 0 for any other file."""
    match = LEASE_NAME.fullmatch(name)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------ this process


def clock() -> float:
    """Return the seconds since this machine was booted, also those that it was suspended for."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_machine() -> str:
    """Return what tells this boot of a kernel, and its table of processes that this one is in, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def this_system() -> str:
    """Return the id that the system of this machine was given when it was installed; "" where it has none."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return when a process of this machine was started, in the kernel's ticks; "" where it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Of a process that has ended the parent may still have to hear.
    return "" if state in "ZX" else fields[18]


def this_job() -> str:
    """Return which job of Ray or Slurm, or which unit of systemd, this process belongs to, in words; "" for none."""
    # Ray tells a job's driver of itself in this variable.
    with suppress(ValueError, KeyError, TypeError):
        config = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        return f"{RAY_JOB} {config['metadata']['job_submission_id']}"
    if "SLURM_JOB_ID" in os.environ:
        return f"{SLURM_JOB} {os.environ['SLURM_JOB_ID']}"
    # Our own unit sets it (deploy/systemd).
    if "PATCHLINE_UNIT" in os.environ:
        return f"{UNIT} {os.environ['PATCHLINE_UNIT']}"
    return ""


# ------------------------------------------------------------------------ the run's folder, and its attempts


def check_place(run: Path) -> None:
    """Raise ConfigError where no folder of this name can be a run directory, or one that it lies in is a file."""
    if run == run.parent:
        raise ConfigError(f"run is {run}, expected a folder of its own\n  type run={run}NAME")
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
                f"{path} is a file\n  expected the folder that a run writes into, or a new name\n"
                "  give the run another name: run=…"
            )


def claim_attempt(storage: Storage, stage: str = "") -> int:
    """Claim the next attempt number of a run, ours alone, by creating attempts/000007.json.

    `stage` is the name of the folder of the stage that the attempt is for. Raises StorageError, OSError.
    """
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "stage": stage}
    # Another process may create the same number between our look and our creation; then we look again.
    while True:
        number = newest_attempt(storage) + 1
        if storage.create_once(f"{ATTEMPTS}/{number:06d}.json", json.dumps(claim).encode()):
            return number
