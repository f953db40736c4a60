"""Errors of the operating system are explained by their cause, with what to type next."""

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data import files
from jobs import os_errors
from tests.support.permissions import without_privileges

pytestmark = pytest.mark.quick

# A program that writes files into a folder until the system refuses one, and prints the explanation.
FILL = """
import sys
from pathlib import Path
from data import files
from jobs import os_errors
try:
    for number in range(1000):
        files.write_atomically(Path(sys.argv[1]) / str(number), b"x" * 3000)
except OSError as error:
    print(os_errors.explain(error))
"""


def explained_on(mount: str, after: str, folder: Path) -> str:
    """Mount a file system on a folder in a separate mount namespace, run FILL there, and return its output."""
    script = f"mount -t tmpfs -o {mount} none {folder} && {after} && exec {sys.executable} -c '{FILL}' {folder}"
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("mount", "after", "found", "typed"),
    [
        ("nr_inodes=24", "true", "B free, but no inodes: this disk has reached its maximum number of files)", "df -i"),
        ("size=40k", "true", "(3.0 kB needed, 0.0 kB free)", "free some space, or use another disk"),
        ("size=1m", "mount -o remount,ro {}", "Read-only file system", "findmnt -T {} "),
    ],
)
def test_full_or_read_only_disk_is_explained_by_its_cause(tmp_path, mount, after, found, typed):
    text = explained_on(mount, after.format(tmp_path), tmp_path)
    lines = text.splitlines()
    assert len(lines) == 3
    assert f"{tmp_path}/" in lines[0]
    assert found in lines[0]
    assert lines[1].startswith("  expected")
    assert typed.format(tmp_path) in lines[2]


def test_file_size_limit_is_explained_by_its_cause(tmp_path):
    script = f"ulimit -f 2; exec {sys.executable} -c '{FILL}' {tmp_path}"
    text = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert f"File too large: {tmp_path}/0 (3.0 kB needed, " in text
    assert "this process may only write files up to 2.0 kB (ulimit -f))\n" in text
    assert "run ulimit -f unlimited" in text
    assert "free some space" not in text


def test_limit_of_open_files_is_explained_by_its_cause(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        with pytest.raises(OSError) as refused:
            for number in range(hard):
                opened.append(open(tmp_path / str(number), "w"))  # noqa: SIM115
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = os_errors.explain(refused.value)
        without_name = os_errors.explain(OSError(errno.EMFILE, "Too many open files"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in opened:
            file.close()
    assert text.startswith(f"Too many open files: {tmp_path}/")
    for message in (text, without_name):
        assert f"(the limit of this process is {limit}: ulimit -n)\n" in message
        assert f"run ulimit -n {hard};" in message


def test_quota_and_missing_permission_are_explained_by_their_cause(tmp_path):
    quota = os_errors.explain(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "file")))
    assert "free on the disk, but this user's quota of bytes or files is used up)" in quota
    assert "quota -s" in quota
    refused = os_errors.explain(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run" / "file")))
    assert f"(this user: {os.geteuid()})" in refused
    assert f"run ls -ld {tmp_path} " in refused


OPEN = """
import sys
from pathlib import Path
from data import files
from jobs import os_errors
try:
    open(sys.argv[1], sys.argv[2]).close()
    raise SystemExit("opened")
except OSError as error:
    print(os_errors.explain(error, sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("path", "mode", "expected", "denying", "elsewhere"),
    [
        ("closed/run/stage/done.json", "r", "a folder that this user may read", "closed", False),
        ("closed/new", "w", "a folder that this user may read", "closed", False),
        ("open/secret", "r", "a file that this user may read", "open/secret", False),
        ("fixed/new", "w", "a folder that this user may write to", "fixed", True),
    ],
)
def test_missing_permission_names_what_denies_it(tmp_path, path, mode, expected, denying, elsewhere):
    (tmp_path / "closed" / "run" / "stage").mkdir(parents=True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "secret").touch()
    (tmp_path / "fixed").mkdir()
    for name, bits in (("closed", 0), ("open/secret", 0), ("fixed", 0o555)):
        (tmp_path / name).chmod(bits)
    command = [sys.executable, "-c", OPEN, str(tmp_path / path), mode, ": --output /elsewhere/x"]
    done = subprocess.run(without_privileges(command), capture_output=True, text=True, cwd=files.ROOT)
    (tmp_path / "closed").chmod(0o755)
    assert done.stderr == ""
    assert f"expected: {expected}\n" in done.stdout
    assert f"run ls -ld {tmp_path / denying} to see" in done.stdout
    assert (": --output /elsewhere/x" in done.stdout) == elsewhere


def test_a_file_that_cannot_be_created_is_reported_before_the_work(tmp_path):
    os_errors.check_creatable(tmp_path / "new" / "table.csv")
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match=r"'/proc/none/table\.csv'"):
        os_errors.check_creatable(Path("/proc/none/table.csv"))


def test_full_disk_error_names_the_path_the_needed_and_the_free_space(tmp_path, monkeypatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError) as refused:
        files.write_atomically(tmp_path / "file", b"x" * 2500)
    lines = os_errors.explain(refused.value).splitlines()
    assert lines[0].startswith(f"No space left on device: {tmp_path / 'file'} (2.5 kB needed, ")
    assert re.search(r", [\d.]+ [kMG]B free\)$", lines[0])
    assert "free some space, or use another disk: run=/elsewhere" in lines[2]
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/claim'"):
        files.create_exclusively(tmp_path / "claim", "mine")
    assert os.listdir(tmp_path) == []
