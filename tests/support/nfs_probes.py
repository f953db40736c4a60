"""What one NFS client sees of another, by the functions with which a run uses its folder; started by
tests/support/nfs.sh.

    python -m tests.support.nfs_probes first|second FOLDER      # at the same time, on two clients that mount the folder

Each client prints one line per probe. It imports nothing heavy, because a guest's processor is slow.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.files import create_exclusively, look_for, names_in, sync, write_atomically, write_durably
from data.storage import Folder
from pipeline.monitoring.telemetry import append_whole

LINES = 300
NAMES = 100
RENEWALS = 20


def meet(folder: Path, me: str, point: str) -> None:
    """Wait until both clients have reached this point."""
    write_atomically(folder / f"{point}-{me}", "")
    unseen, _ = look_for(folder, {f"{point}-first": None, f"{point}-second": None})
    assert not unseen, unseen


def until(is_so: Callable[[], bool], patience_s: float = 90.0) -> float:
    """Return the seconds until a condition holds."""
    began = time.monotonic()
    while not is_so() and time.monotonic() - began < patience_s:
        time.sleep(0.05)
    return time.monotonic() - began


def main(me: str, folder: Path) -> None:
    is_first = me == "first"
    storage = Folder(folder)

    # 1. Names that both create at the same time.
    meet(folder, me, "names")
    won = sum(create_exclusively(folder / f"name-{number}", f"{me} {number}") for number in range(NAMES))
    meet(folder, me, "named")
    intact = sum((folder / f"name-{number}").read_text() == f"{me} {number}" for number in range(NAMES))
    print(f"{me}: created {won} of {NAMES} names, {intact} hold its content", flush=True)

    # 2. A file that both append to.
    meet(folder, me, "appends")
    for number in range(LINES):
        assert append_whole(folder / "log.txt", f"{me} {number}\n".encode())
    meet(folder, me, "appended")
    lines = (folder / "log.txt").read_text().splitlines()
    whole = len({line for line in lines if line.startswith(f"{me} ")})
    print(f"{me}: {whole} of its {LINES} appended lines are there", flush=True)

    # 3. A file that one renews in place, as a lease is.
    if is_first:
        storage.put("lease.json", b" " * 200)
    meet(folder, me, "lease")
    if is_first:
        for number in range(RENEWALS):
            time.sleep(1.0)
            content = json.dumps({"number": number, "time": time.time()}).encode().ljust(200)
            storage.renew("lease.json", content)
    else:
        ages_s = []
        seen = -1
        while seen < RENEWALS - 1:
            text = (storage.read("lease.json") or b"").strip()
            if text and json.loads(text)["number"] > seen:
                seen = json.loads(text)["number"]
                ages_s.append(time.time() - json.loads(text)["time"])  # of one machine's clock
            time.sleep(0.05)
        print(f"{me}: saw {len(ages_s)} of {RENEWALS} renewals, after {max(ages_s):.2f} s at most", flush=True)

    # 4. A new name: in a listing, as the product looks; and by asking for the name, which it does not rely on.
    (folder / "late").mkdir(exist_ok=True)
    asked = folder / "late" / "asked"
    assert is_first or not asked.exists()
    meet(folder, me, "new")
    if is_first:
        time.sleep(1.0)
        for name in ("listed", "asked"):
            write_atomically(folder / "late" / name, str(time.time()))
    else:
        until(asked.exists)
        waited_s = time.time() - float(asked.read_text())
        print(f"{me}: a name that was asked for before was seen after {waited_s:.2f} s", flush=True)
    meet(folder, me, "fresh")
    if is_first:
        time.sleep(1.0)
        write_atomically(folder / "late" / "again", str(time.time()))
    else:
        until(lambda: "again" in names_in(folder / "late"))
        waited_s = time.time() - float((folder / "late" / "again").read_text())
        print(f"{me}: a name in a listing was seen after {waited_s:.2f} s", flush=True)

    # 5. A save of another client, a file of which somebody has open here, is swept.
    if is_first:
        (folder / "saved").mkdir()
        storage.write(f"{storage.staging_name('saved', 'step-0000000005', 1)}/file", memoryview(b"weights"))
    meet(folder, me, "staged")
    if not is_first:
        with open(folder / storage.staging_name("saved", "step-0000000005", 1) / "file", "rb"):
            storage.sweep("saved", 2)
            print(f"{me}: swept under an open file, left over: {os.listdir(folder / 'saved')}", flush=True)
    meet(folder, me, "swept")
    if is_first:
        try:
            storage.publish("saved", "step-0000000005", 1, b"manifest")
            print(f"{me}: PUBLISHED what was swept", flush=True)
        except OSError as error:
            print(f"{me}: what was swept is not published ({error.strerror})", flush=True)

    # 6. What a lock says, which no run relies on.
    with open(folder / "lock", "a") as lock:
        meet(folder, me, "lock")
        try:
            if not is_first:
                time.sleep(1.0)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(f"{me}: got the lock", flush=True)
        except OSError as error:
            print(f"{me}: no lock ({error.strerror})", flush=True)
        meet(folder, me, "locked")

    # 7. Large files past the page cache, and a folder's fsync.
    write_durably(folder / f"large-{me}", os.urandom(16 << 20))
    sync(folder)
    print(f"{me}: 16 MiB written directly, folder flushed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
